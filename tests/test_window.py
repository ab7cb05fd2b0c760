"""The mixed-precision window against decoding token by token."""

import numpy as np
import pytest
from conftest import causal_mask, relative_error, token_by_token
from hypothesis import given
from hypothesis import strategies as st

import kvcodec as kv
from kvcodec.reference.window import packed_tokens, window_ranges
from kvcodec.testing import assert_same_bits, exact_attention

pytestmark = pytest.mark.usefixtures("backend")

every_preset = pytest.mark.parametrize("name", kv.PRESETS)
FLOATS = {"query_bits": None, "probability_bits": None}


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def sequence(tokens, heads=2, head_dim=64, batch=1):
    """Queries, keys and values of a whole sequence, with large offsets in two key channels."""
    q = random(batch, 2 * heads, tokens, head_dim)
    k = random(batch, heads, tokens, head_dim, seed=1)
    v = random(batch, heads, tokens, head_dim, seed=2)
    k[..., 3] += 5
    k[..., 5] -= 3
    return q, k, v


def small(name, **options):
    """A preset with blocks of 16 tokens."""
    group = {"group_size": 16} if name.startswith("kivi") else {}
    return kv.codec(name, block=16, **group, **options)


def settled(name, **options):
    codec = small(name, **options)
    return codec.for_side("key"), codec.for_side("value")


def assert_close(result, exact, atol=5e-6):
    np.testing.assert_allclose(result.output, exact[0], atol=atol, rtol=0)
    np.testing.assert_allclose(result.log_sum_exp, exact[1], atol=atol, rtol=1e-6)


# What is packed


@given(
    tokens=st.integers(0, 500),
    sinks=st.integers(0, 9),
    recent=st.integers(0, 80),
    block=st.integers(1, 70),
)
def test_whole_blocks_are_packed_once_they_are_old(tokens, sinks, recent, block):
    packed = 0
    while sinks + packed + block + recent <= tokens:
        packed += block
    assert packed_tokens(tokens, sinks, recent, block) == packed
    if tokens >= sinks + recent:
        assert recent <= tokens - sinks - packed < recent + block


@given(
    tokens=st.integers(1, 300),
    sinks=st.integers(0, 9),
    recent=st.integers(0, 80),
    block=st.integers(1, 70),
    window=st.sampled_from((None, 1, 5, 100)),
)
def test_ranges_cut_what_is_seen_in_three(tokens, sinks, recent, block, window):
    positions = np.arange(tokens)[None]
    seen = causal_mask(positions[0], tokens, window)
    start, stop = seen.argmax(axis=-1)[None], positions + 1
    parts = window_ranges(start, stop, positions, sinks, recent, block)
    token = np.arange(tokens)
    masks = [(low[..., None] <= token) & (token < high[..., None]) for low, high in parts]
    assert (sum(mask.astype(int) for mask in masks) == seen).all()
    for i in range(tokens):
        body_end = sinks + packed_tokens(i + 1, sinks, recent, block)
        exact = (token < sinks) | (token >= body_end)
        assert not (masks[1][0, i] & exact).any()
        assert not ((masks[0] | masks[2])[0, i] & ~exact).any()


# Token by token


@every_preset
@pytest.mark.parametrize(("sinks", "recent"), [(4, 20), (0, 0), (3, 33)])
def test_a_whole_prompt_equals_token_by_token(name, sinks, recent):
    q, k, v = sequence(100)
    codec = small(name)
    result = kv.windowed_attention(
        q, k, v, codec, codec, sinks=sinks, recent=recent, **FLOATS, return_lse=True
    )
    positions = np.arange(100)[None]
    assert_close(result, token_by_token(q, k, v, *settled(name), sinks, recent, positions))


@given(data=st.data())
@pytest.mark.parametrize(("key", "value"), [("lm4", "lm2"), ("int4", "kivi2"), ("kivi4", "int8")])
def test_options_act_as_in_token_by_token(key, value, data):
    tokens = data.draw(st.sampled_from((1, 17, 37, 65)))
    q, k, v = sequence(tokens, batch=2)
    positions = np.stack([np.arange(tokens), np.arange(tokens)[::-1]])
    options = {
        "window": data.draw(st.sampled_from((None, 1, 10, 50))),
        "softcap": data.draw(st.sampled_from((None, 5.0))),
        "scale": data.draw(st.sampled_from((None, 0.05))),
    }
    sinks, recent = data.draw(st.sampled_from((0, 2))), data.draw(st.sampled_from((0, 5, 16)))
    key, value = small(key, equalize=False), small(value)
    result = kv.windowed_attention(
        q,
        k,
        v,
        key,
        value,
        sinks=sinks,
        recent=recent,
        positions=positions,
        **options,
        **FLOATS,
        return_lse=True,
    )
    exact = token_by_token(
        q, k, v, key.for_side("key"), value.for_side("value"), sinks, recent, positions, **options
    )
    assert_close(result, exact, atol=1e-5)


@every_preset
def test_integer_products_stay_close_to_token_by_token(name):
    q, k, v = sequence(100)
    codec = small(name)
    output = kv.windowed_attention(q, k, v, codec, codec, sinks=4, recent=20)
    exact, _ = token_by_token(q, k, v, *settled(name), 4, 20, np.arange(100)[None])
    assert relative_error(output, exact) < 0.02


@every_preset
def test_grouping_of_queries_into_calls_does_not_count(name):
    q, k, v = sequence(100)
    codec = small(name, equalize=False)
    options = {"sinks": 4, "recent": 20, "return_lse": True, **FLOATS}
    whole = kv.windowed_attention(q, k, v, codec, codec, **options)
    for first, last in ((0, 1), (1, 40), (40, 99), (99, 100)):
        part = kv.windowed_attention(
            q[:, :, first:last],
            k[:, :, :last],
            v[:, :, :last],
            codec,
            codec,
            **options,
        )
        assert_close(part, [x[:, :, first:last] for x in whole], atol=2e-6)


@every_preset
def test_order_of_queries_does_not_count(name):
    q, k, v = sequence(70)
    codec = small(name)
    options = {"sinks": 4, "recent": 20, "return_lse": True, **FLOATS}
    whole = kv.windowed_attention(q, k, v, codec, codec, **options)
    order = np.random.default_rng(0).permutation(70)
    shuffled = kv.windowed_attention(q[:, :, order], k, v, codec, codec, positions=order, **options)
    assert_close(shuffled, [x[:, :, order] for x in whole], atol=2e-6)


def test_rows_of_the_batch_do_not_count_for_each_other():
    q, k, v = sequence(70, batch=2)
    codec = small("int4")
    options = {"sinks": 4, "recent": 20, "return_lse": True, **FLOATS}
    positions = np.stack([np.arange(40), np.arange(30, 70)])
    together = kv.windowed_attention(
        q[:, :, :40], k, v, codec, codec, positions=positions, **options
    )
    for row in range(2):
        one = slice(row, row + 1)
        alone = kv.windowed_attention(
            q[one, :, :40], k[one], v[one], codec, codec, positions=positions[one], **options
        )
        assert_close(alone, [x[one] for x in together])


# Exact parts


@every_preset
def test_nothing_is_packed_while_all_is_recent(name):
    q, k, v = sequence(60)
    result = kv.windowed_attention(q, k, v, name, name, sinks=4, recent=64, return_lse=True)
    visible = causal_mask(np.arange(60), 60)
    assert_close(result, exact_attention(q, k, v, visible=visible))


@pytest.mark.parametrize("tokens", [slice(0, 4), slice(-20, None)])
def test_sinks_and_recent_values_are_exact(tokens):
    q, k, v = sequence(200)
    shifted = v.copy()
    shifted[:, :, tokens] += 1
    before, after = (
        kv.windowed_attention(q[:, :, -1:], k, x, "int2", "int2", sinks=4, recent=20, **FLOATS)
        for x in (v, shifted)
    )
    shift = after - before
    assert (shift > 0).all()
    np.testing.assert_allclose(shift, shift[..., :1].repeat(64, axis=-1), atol=1e-6)


def test_defaults_are_int4_with_4_sinks_and_64_recent_tokens():
    q, k, v = sequence(200)
    assert_same_bits(
        kv.windowed_attention(q, k, v),
        kv.windowed_attention(q, k, v, "int4", kv.codec("int4"), sinks=4, recent=64),
    )


def test_late_queries_alone_do_not_equalize():
    q, k, v = sequence(200)
    late = q[:, :, -3:]
    assert_same_bits(
        kv.windowed_attention(late, k, v),
        kv.windowed_attention(late, k, v, key=kv.codec("int4", equalize=False)),
    )
