"""Attention against a float64 softmax, and the laws of its integer path, masks and parts."""

import ml_dtypes
import numpy as np
import pytest
from conftest import causal_mask
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import logsumexp

import kvcodec as kv
from kvcodec._segment import Segment
from kvcodec.reference.encode import decode_rotated
from kvcodec.testing import (
    ORDINARY_KINDS,
    TILE_SIZES,
    arrays,
    assert_same_bits,
    codecs,
    exact_attention,
    sizes,
    twin,
)

pytestmark = pytest.mark.usefixtures("backend")

every_preset = pytest.mark.parametrize("name", kv.PRESETS)
heads = pytest.mark.parametrize(
    ("q_heads", "kv_heads"), [(2, 2), (4, 2), (8, 2), (14, 2), (16, 2), (8, 1), (3, 1)]
)
positive_sizes = st.sampled_from(TILE_SIZES[1:])


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def encode(name, x, side, **options):
    return kv.codec(name, **options).encode(x, side=side)


def stored(scale):
    """Scales that are stored as bfloat16."""
    return scale.view(ml_dtypes.bfloat16).astype(np.float32)


def assert_close(result, exact, atol=2e-6):
    """Output and log-sum-exp are what the oracle says."""
    np.testing.assert_allclose(result.output, exact[0], atol=atol, rtol=0)
    np.testing.assert_allclose(result.log_sum_exp, exact[1], atol=atol, rtol=1e-6)


# Exact keys and values


@heads
@pytest.mark.parametrize("q_len", [1, 5])
def test_exact_attention_is_the_softmax(q_heads, kv_heads, q_len):
    q = random(2, q_heads, q_len, 64)
    k, v = random(2, kv_heads, 97, 64, seed=1), random(2, kv_heads, 97, 48, seed=2)
    assert_close(kv.attention(q, k, v, return_lse=True), exact_attention(q, k, v))
    assert_same_bits(kv.attention(q, k, v), kv.attention(q, k, v, return_lse=True).output)


@given(tokens=positive_sizes, window=st.sampled_from((None, 1, 7, 64, 500)), data=st.data())
def test_causal_mask_and_window_follow_the_positions(tokens, window, data):
    q_len = data.draw(st.integers(1, min(tokens, 9)))
    q, k, v = random(2, 2, q_len, 16), random(2, 1, tokens, 16, seed=1), random(2, 1, tokens, 16)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    of_each_row = rng.integers(0, tokens, (2, q_len))
    for positions in (None, of_each_row[0], of_each_row):
        result = kv.attention(
            q, k, v, causal=True, window=window, positions=positions, return_lse=True
        )
        given = np.arange(tokens - q_len, tokens) if positions is None else positions
        visible = causal_mask(given, tokens, window)
        assert_close(result, exact_attention(q, k, v, visible=visible))


@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
def test_softcap_comes_before_the_mask(softcap):
    q, k, v = 3 * random(1, 2, 6, 16), random(1, 2, 33, 16, seed=1), random(1, 2, 33, 16, seed=2)
    visible = causal_mask(np.arange(27, 33), 33)
    result = kv.attention(q, k, v, causal=True, softcap=softcap, scale=0.7, return_lse=True)
    exact = exact_attention(q, k, v, visible=visible, scale=0.7, softcap=softcap)
    assert_close(result, exact, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 7, 64, 129])
def test_log_sum_exp_is_scipys(tokens):
    q, k = 4 * random(1, 2, 3, 32), random(1, 2, tokens, 32, seed=1)
    s = kv.scores(q, k).astype(np.float64)
    result = kv.attention(q, k, k, return_lse=True)
    np.testing.assert_allclose(result.log_sum_exp, logsumexp(s, axis=-1), rtol=1e-6)


def test_scores_are_scaled_products():
    q, k = random(2, 6, 3, 20), random(2, 3, 65, 20, seed=1)
    exact = np.einsum("bhqd,bhtd->bhqt", q.astype(np.float64), k.repeat(2, axis=1))
    np.testing.assert_allclose(kv.scores(q, k), exact / np.sqrt(20), atol=1e-5)
    np.testing.assert_allclose(kv.scores(q, k, scale=2), 2 * exact, atol=5e-5)


def test_a_single_token_is_returned():
    q, k, v = random(1, 2, 1, 64), random(1, 2, 1, 64, seed=1), random(1, 2, 1, 64, seed=2)
    np.testing.assert_allclose(kv.attention(q, k, v), v, rtol=1e-6)


# Nothing to see


@pytest.mark.parametrize("packed", [False, True])
def test_nothing_to_see_gives_zeros(packed):
    q, k = random(2, 4, 3, 64), np.zeros((2, 2, 0, 64), np.float32)
    keys, values = (encode("int4", k, side) if packed else k for side in ("key", "value"))
    output, log_sum_exp = kv.attention(q, keys, values, return_lse=True)
    assert_same_bits(output, np.zeros((2, 4, 3, 64), np.float32))
    assert_same_bits(log_sum_exp, np.full((2, 4, 3), -np.inf, np.float32))
    assert kv.scores(q, keys).shape == (2, 4, 3, 0)


@pytest.mark.parametrize("packed", [False, True])
def test_no_queries_give_nothing(packed):
    q, k = random(1, 2, 0, 64), random(1, 2, 9, 64)
    keys, values = (encode("int4", k, side) if packed else k for side in ("key", "value"))
    assert kv.attention(q, keys, values, causal=True).shape == (1, 2, 0, 64)
    assert kv.scores(q, keys).shape == (1, 2, 0, 9)


def test_rows_that_see_nothing_stand_among_others():
    k = random(1, 1, 70, 64)
    segment = Segment(
        encode("int4", k, "key"),
        encode("int4", k, "value"),
        np.array([[0, 5, 70]]),
        np.array([[70, 5, 70]]),
    )
    output, log_sum_exp = twin("attend")(random(1, 2, 3, 64), [segment], 0.125, None, 8, 7)
    assert np.isfinite(log_sum_exp[:, :, 0]).all()
    assert (log_sum_exp[:, :, 1:] == -np.inf).all()
    assert not output[:, :, 1:].any()


# Packed keys and values


@given(data=st.data(), tokens=positive_sizes, head_dim=st.sampled_from((7, 16, 64)))
def test_float_products_attend_over_what_is_decoded(data, tokens, head_dim):
    q = random(1, 4, 3, head_dim)
    k, v = random(1, 2, tokens, head_dim, seed=1), random(1, 2, tokens, head_dim, seed=2)
    key, value = data.draw(codecs("key", head_dim)), data.draw(codecs("value", head_dim))
    keys, values = key.encode(k, queries=q if key.equalize else None), value.encode(v)
    result = kv.attention(q, keys, values, query_bits=None, probability_bits=None, return_lse=True)
    exact = exact_attention(q, key.decode(keys), value.decode(values))
    assert_close(result, exact, atol=5e-6)
    one_sided = kv.attention(q, keys, v, query_bits=None, return_lse=True)
    assert_close(one_sided, exact_attention(q, key.decode(keys), v), atol=5e-6)


@every_preset
@heads
def test_packed_attention_shares_heads(name, q_heads, kv_heads):
    q, k = random(1, q_heads, 2, 64), random(1, kv_heads, 65, 64, seed=1)
    keys, values = encode(name, k, "key"), encode(name, k, "value")
    decoded = kv.codec(name).decode(keys), kv.codec(name).decode(values)
    np.testing.assert_allclose(
        kv.attention(q, keys, values), exact_attention(q, *decoded)[0], atol=0.05
    )


@pytest.mark.parametrize("name", [name for name in kv.PRESETS if not name.startswith("kivi")])
def test_query_rounding_moves_scores_by_half_a_step_at_most(name):
    q, k = random(1, 2, 4, 64), random(1, 2, 130, 64, seed=1)
    keys = encode(name, k, "key")
    codec = keys.codec
    rotate = {"none": np.array, "hadamard": kv.fwht, "srht": kv.srht}[codec.rotation]
    step = np.abs(rotate(q)).max(axis=-1, keepdims=True) / 127
    length = np.abs(decode_rotated(keys)).sum(axis=-1)[:, :, None]
    center = np.abs(q).max() / 16383 * np.abs(k).sum(axis=-1).max() if codec.center else 0
    moved = np.abs(kv.scores(q, keys) - kv.scores(q, keys, query_bits=None))
    assert (moved <= (0.51 * step * length + center) / 8).all()


@pytest.mark.parametrize("name", ["kivi4", "kivi2"])
def test_query_rounding_with_channel_scales_is_as_small(name):
    q, k = random(1, 2, 4, 64), random(1, 2, 128, 64, seed=1)
    keys = encode(name, k, "key")
    scale = stored(keys.scale).repeat(32, axis=2)
    step = np.abs(q[:, :, :, None] * scale[:, :, None]).max(axis=-1) / 127
    length = 64 * 2 ** (keys.codec.bits - 1)
    moved = np.abs(kv.scores(q, keys) - kv.scores(q, keys, query_bits=None))
    assert (moved <= 0.51 * step * length / 8).all()


@every_preset
@pytest.mark.parametrize("bits", [7, 14])
def test_weight_rounding_moves_sums_by_half_a_step_at_most(name, bits):
    values = encode(name, random(1, 2, 130, 64), "value")
    p = np.exp(-np.random.default_rng(1).exponential(3, (1, 2, 5, 130))).astype(np.float32)
    sums = twin("value_sums")(p, values, bits)
    exact = p.astype(np.float64) @ decode_rotated(values)
    codec = values.codec
    scale = stored(values.scale).reshape(1, 2, 130, -1)
    scale = scale.repeat(64 // scale.shape[-1], axis=-1)
    largest = 127 if codec.code in ("lloyd_max", "trellis") else 2 ** (codec.bits - 1)
    allowed = 0
    for start in range(0, 130, 64):
        tile = slice(start, start + 64)
        weights = (p[:, :, :, tile, None] * scale[:, :, None, tile]).max(axis=3)
        allowed = allowed + 0.51 * weights / (2**bits - 1) * largest * len(range(130)[tile])
    assert (np.abs(sums - exact) <= allowed + 1e-5).all()


@every_preset
def test_more_probability_bits_are_closer(name):
    q, k, v = random(1, 2, 8, 64), random(1, 2, 128, 64, seed=1), random(1, 2, 128, 64, seed=2)
    values = encode(name, v, "value")
    truth = kv.attention(q, k, values, probability_bits=None)
    errors = [
        np.abs(kv.attention(q, k, values, probability_bits=bits) - truth).mean() for bits in (7, 14)
    ]
    assert errors[1] < 0.05 * errors[0]


@every_preset
def test_automatic_probability_bits_are_14_for_8_bit_codes(name):
    q, k, v = random(1, 2, 3, 64), random(1, 2, 70, 64, seed=1), random(1, 2, 70, 64, seed=2)
    values = encode(name, v, "value")
    bits = 14 if values.codec.bits == 8 else 7
    assert_same_bits(kv.attention(q, k, values), kv.attention(q, k, values, probability_bits=bits))


def test_integer_scores_are_exact():
    q, k = random(1, 1, 2, 32), random(1, 1, 5, 32, seed=1)
    keys = encode("int8", k, "key")
    levels = keys.packed[0, 0].astype(np.int64) - 128
    scores = kv.scores(q, keys, scale=1.0)[0, 0]
    for i, t in np.ndindex(2, 5):
        _, exponent = np.frexp(np.abs(q[0, 0, i]).max())
        normal = np.ldexp(q[0, 0, i], -exponent)
        query_scale = np.abs(normal).max() / np.float32(127)
        rounded = np.rint(normal * (np.float32(1) / query_scale)).astype(np.int64)
        product = np.float32(rounded @ levels[t]) * stored(keys.scale)[0, 0, t] * query_scale
        assert scores[i, t] == product * np.float32(2.0**exponent)


# Masked tokens


@every_preset
@pytest.mark.parametrize("exact_side", ["none", "keys", "values"])
def test_what_is_masked_does_not_count(name, exact_side):
    q = random(1, 4, 9, 64)
    k, v = random(1, 2, 200, 64, seed=1), random(1, 2, 200, 64, seed=2)
    key = kv.codec(name, block=32, center=False, equalize=False, side="key")
    results = []
    for masked in (0, 1e20):
        k[:, :, :32], k[:, :, 128:], v[:, :, :32], v[:, :, 128:] = masked, -masked, masked, -masked
        keys = k if exact_side == "keys" else key.encode(k)
        values = v if exact_side == "values" else encode(name, v, "value")
        result = kv.attention(
            q, keys, values, causal=True, window=40, positions=np.arange(90, 99), return_lse=True
        )
        results.append(result)
    assert_same_bits(results[0], results[1])


@every_preset
def test_causal_attention_over_more_tokens_is_the_same(name):
    q = random(1, 2, 4, 64)
    k, v = random(1, 2, 256, 64, seed=1), random(1, 2, 256, 64, seed=2)
    positions = np.array([0, 60, 64, 127])
    results = []
    for tokens in (128, 256):
        keys, values = (
            encode(name, k[:, :, :tokens], "key"),
            encode(name, v[:, :, :tokens], "value"),
        )
        results.append(
            kv.attention(q, keys, values, causal=True, positions=positions, return_lse=True)
        )
    assert_close(results[0], results[1])


# Independence


@every_preset
def test_queries_do_not_see_each_other(name):
    q, k, v = random(2, 4, 5, 64), random(2, 2, 130, 64, seed=1), random(2, 2, 130, 64, seed=2)
    keys, values = encode(name, k, "key"), encode(name, v, "value")
    together = kv.attention(q, keys, values, causal=True, return_lse=True)
    scores = kv.scores(q, keys)
    for i in range(5):
        one = q[:, :, i : i + 1]
        alone = kv.attention(one, keys, values, causal=True, positions=[125 + i], return_lse=True)
        assert_close(alone, [x[:, :, i : i + 1] for x in together])
        assert_same_bits(kv.scores(one, keys), scores[:, :, i : i + 1])


@every_preset
def test_batch_rows_do_not_see_each_other(name):
    q, k, v = random(3, 4, 2, 64), random(3, 2, 70, 64, seed=1), random(3, 2, 70, 64, seed=2)
    together = kv.attention(q, encode(name, k, "key"), encode(name, v, "value"), return_lse=True)
    for row in range(3):
        one = slice(row, row + 1)
        alone = kv.attention(
            q[one], encode(name, k[one], "key"), encode(name, v[one], "value"), return_lse=True
        )
        assert_close(alone, [x[one] for x in together])


# Merging


@given(tokens=positive_sizes, data=st.data())
def test_merged_parts_equal_the_whole(tokens, data):
    q, k, v = (
        random(1, 4, 3, 64),
        random(1, 2, tokens, 64, seed=1),
        random(1, 2, tokens, 64, seed=2),
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, tokens), max_size=4)))
    parts = [
        kv.attention(q, k[:, :, low:high], v[:, :, low:high], return_lse=True)
        for low, high in zip([0, *cuts], [*cuts, tokens], strict=True)
    ]
    merged = kv.merge_attention(*zip(*parts, strict=True))
    assert_close(merged, exact_attention(q, k, v))


@every_preset
def test_merged_packed_parts_equal_the_whole(name):
    q, k, v = random(1, 2, 3, 64), random(1, 2, 256, 64, seed=1), random(1, 2, 256, 64, seed=2)
    floats = {"query_bits": None, "probability_bits": None, "return_lse": True}
    whole = kv.attention(q, encode(name, k, "key"), encode(name, v, "value"), **floats)
    parts = [
        kv.attention(
            q, encode(name, k[:, :, part], "key"), encode(name, v[:, :, part], "value"), **floats
        )
        for part in (slice(0, 64), slice(64, 192), slice(192, 256))
    ]
    assert_close(kv.merge_attention(*zip(*parts, strict=True)), whole)


@given(outputs=arrays(st.tuples(st.integers(1, 4), sizes(max_size=17), st.just(5)), ORDINARY_KINDS))
def test_merging_weighs_by_the_exponential_of_the_log_sum_exp(outputs):
    parts = np.random.default_rng(0).normal(0, 30, outputs.shape[:-1]).astype(np.float32)
    output, log_sum_exp = kv.merge_attention(list(outputs), list(parts))
    np.testing.assert_allclose(log_sum_exp, logsumexp(parts.astype(np.float64), axis=0), rtol=1e-6)
    weights = np.exp(parts - logsumexp(parts.astype(np.float64), axis=0))[..., None]
    np.testing.assert_allclose(output, (weights * outputs).sum(axis=0), atol=1e-5)


def test_parts_that_saw_nothing_do_not_count():
    outputs, nothing = random(2, 3, 8), np.full(3, -np.inf)
    merged = kv.merge_attention(outputs, [np.zeros(3), nothing])
    assert_same_bits(merged.output, outputs[0])
    assert_same_bits(merged.log_sum_exp, np.zeros(3, np.float32))
    merged = kv.merge_attention(outputs, [nothing, nothing])
    assert not merged.output.any()
    assert (merged.log_sum_exp == -np.inf).all()


# Magnitudes


@given(
    data=st.data(),
    kinds=st.tuples(*[st.sampled_from(("huge", "tiny", "mixed_magnitudes", "zero_vectors"))] * 3),
    options=st.fixed_dictionaries(
        {
            "softcap": st.sampled_from((None, 30.0)),
            "scale": st.sampled_from((None, 1e-30, 1e30)),
            "query_bits": st.sampled_from((8, None)),
            "probability_bits": st.sampled_from(("auto", None)),
        }
    ),
)
@pytest.mark.parametrize("name", [None, *kv.PRESETS])
def test_extreme_magnitudes_stay_finite(data, kinds, options, name):
    q, k, v = (data.draw(arrays((1, 2, 70, 64), [kind])) for kind in kinds)
    keys, values = k, v
    if name is not None:
        key = kv.codec(name).for_side("key")
        keys = key.encode(k, queries=q if key.equalize else None)
        values = encode(name, v, "value")
    output, log_sum_exp = kv.attention(q, keys, values, return_lse=True, **options)
    assert np.isfinite(log_sum_exp).all()
    assert (np.abs(output.astype(np.float64)) <= 16 * np.abs(v.astype(np.float64)).max()).all()


def test_large_scores_pick_the_largest():
    k = np.eye(64, dtype=np.float32)[None, None]
    v = random(1, 1, 64, 64)
    np.testing.assert_allclose(kv.attention(1e6 * k, k, v), v, rtol=1e-6)


def test_many_exact_tokens_are_summed_as_well_as_few(backend):
    rng = np.random.default_rng(0)
    tokens = 100_000
    q = rng.standard_normal((1, 1, 1, 16), dtype=np.float32)
    k = rng.standard_normal((1, 1, tokens, 16), dtype=np.float32)
    v = rng.random((1, 1, tokens, 16), dtype=np.float32)
    truth, _ = exact_attention(q, k, v)
    assert np.abs(kv.attention(q, k, v) - truth).max() < 2e-6 * np.abs(truth).max()
