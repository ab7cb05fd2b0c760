"""Bad and special input to KVCache."""

import numpy as np
import pytest
from cache_cases import every_preset, part, saved, sequence, small_cache, state

import kvcodec as kv
from kvcodec.testing import assert_same_bits

pytestmark = pytest.mark.usefixtures("twin")

# Errors


def nan(x):
    x = x.copy()
    x[-1, -1, -1, -1] = np.nan
    return x


Q, K, V = sequence(20, batch=2, seed=7)
BAD_CALLS = {
    "no layer": ("append", (5, K, V), {}, ValueError, "layer"),
    "negative layer": ("append", (-1, K, V), {}, ValueError, "layer"),
    "layer no number": ("attend", ("0", Q), {}, ValueError, "layer"),
    "nan key": ("append", (0, nan(K), V), {}, ValueError, "k must hold finite"),
    "nan value": ("append", (0, K, nan(V)), {}, ValueError, "v must hold finite"),
    "infinite key": ("append", (0, K * np.inf, V), {}, ValueError, "k must hold finite"),
    "integer key": ("append", (0, K.astype(int), V), {}, TypeError, "k must be an array of floats"),
    "text value": ("append", (0, K, "v"), {}, TypeError, "v must be an array of floats"),
    "key heads": ("append", (0, K[:, :1], V), {}, ValueError, "k must have shape"),
    "key batch": ("append", (0, K[:1], V[:1]), {}, ValueError, "k must have shape"),
    "key channels": ("append", (0, K[..., :16], V), {}, ValueError, "k must have shape"),
    "value tokens": ("append", (0, K, V[:, :, 1:]), {}, ValueError, "v must have shape"),
    "key dimensions": ("append", (0, K[0], V), {}, ValueError, "k must have 4 dimensions"),
    "too many tokens": (
        "append",
        (0, K.repeat(9, axis=2), V.repeat(9, axis=2)),
        {},
        ValueError,
        "max_tokens",
    ),
    "too many for one row": (
        "append_attend",
        (0, *(x.repeat(8, axis=2) for x in (Q, K, V))),
        {"lengths": [1, 121]},
        ValueError,
        "max_tokens",
    ),
    "lengths too long": ("append", (0, K, V), {"lengths": [1, 21]}, ValueError, "lengths"),
    "lengths negative": ("append", (0, K, V), {"lengths": [-1, 2]}, ValueError, "lengths"),
    "lengths for one": ("append", (0, K, V), {"lengths": [1]}, ValueError, "lengths"),
    "lengths no integers": ("append", (0, K, V), {"lengths": [1.0, 2.0]}, ValueError, "lengths"),
    "nan query": ("append_attend", (0, nan(Q), K, V), {}, ValueError, "q must hold finite"),
    "query tokens": (
        "append_attend",
        (0, Q[:, :, 1:], K, V),
        {},
        ValueError,
        "q must have as many",
    ),
    "query heads": ("append_attend", (0, Q[:, :3], K, V), {}, ValueError, "q must have shape"),
    "integer query": (
        "append_attend",
        (0, Q.astype(int), K, V),
        {},
        TypeError,
        "q must be an array",
    ),
    "nan new key": ("append_attend", (0, Q, nan(K), V), {}, ValueError, "k must hold finite"),
    "nan new value": ("append_attend", (0, Q, K, nan(V)), {}, ValueError, "v must hold finite"),
    "scale": ("append_attend", (0, Q, K, V), {"scale": 0}, ValueError, "scale"),
    "softcap": ("append_attend", (0, Q, K, V), {"softcap": -1.0}, ValueError, "softcap"),
    "window": ("append_attend", (0, Q, K, V), {"window": 0}, ValueError, "window"),
    "exact prefill": ("append_attend", (0, Q, K, V), {"exact_prefill": 1}, ValueError, "exact_pre"),
    "attend nan": ("attend", (0, nan(Q)), {}, ValueError, "q must hold finite"),
    "attend too many": (
        "attend",
        (0, Q.repeat(6, axis=2)),
        {},
        ValueError,
        "q must have at most",
    ),
    "attend causal": ("attend", (0, Q[:, :, :1]), {"causal": 1}, ValueError, "causal"),
    "attend window": ("attend", (0, Q[:, :, :1]), {"window": 1.5}, ValueError, "window"),
    "attend lengths": ("attend", (0, Q), {"lengths": [0, 21]}, ValueError, "lengths"),
    "crop beyond": ("crop", (101,), {}, ValueError, "length"),
    "crop far back": ("crop", (-101,), {}, ValueError, "length"),
    "crop no number": ("crop", (3.0,), {}, ValueError, "length"),
    "evict too many": ("evict", (56,), {}, ValueError, "tokens"),
    "evict negative": ("evict", (-1,), {}, ValueError, "tokens"),
    "reorder too few": ("reorder", ([0],), {}, ValueError, "indices"),
    "reorder no row": ("reorder", ([0, 2],), {}, ValueError, "indices"),
    "reorder negative": ("reorder", ([0, -1],), {}, ValueError, "indices"),
    "select nothing": ("select", ([],), {}, ValueError, "indices"),
    "select no row": ("select", ([5],), {}, ValueError, "indices"),
    "select floats": ("select", ([0.0],), {}, ValueError, "indices"),
    "select truth values": ("select", ([True, False],), {}, ValueError, "indices"),
    "select a number": ("select", (0,), {}, ValueError, "indices"),
    "repeat never": ("repeat", (0,), {}, ValueError, "times"),
    "repeat a fraction": ("repeat", (1.5,), {}, ValueError, "times"),
    "keys of no layer": ("keys", (2,), {}, ValueError, "layer"),
    "values of no layer": ("values", (None,), {}, ValueError, "layer"),
}


@pytest.mark.parametrize(
    ("verb", "args", "options", "error", "message"), BAD_CALLS.values(), ids=BAD_CALLS
)
def test_an_error_leaves_the_cache_as_it_was(verb, args, options, error, message, tmp_path):
    cache = kv.KVCache(2, 2, 32, recent=8, block=16, rollback=5, batch=2, max_tokens=220)
    cache.append_attend(0, *sequence(100, batch=2), lengths=[60, 100])
    before, size = saved(cache, tmp_path), cache.nbytes
    with pytest.raises(error, match=message):
        getattr(cache, verb)(*args, **options)
    assert_same_bits(saved(cache, tmp_path), before)
    assert cache.nbytes == size


BAD_CACHES = {
    "layers": ((0, 2, 32), {}, "num_layers"),
    "heads": ((1, 0, 32), {}, "num_kv_heads"),
    "heads of layers": ((2, [1, 2, 3], 32), {}, "num_kv_heads must be one number or 2"),
    "head_dim": ((1, 2, 0), {}, "head_dim"),
    "large head_dim": ((1, 2, 2000), {}, "head_dim"),
    "rotated head_dim": ((1, 2, 7), {}, "head_dim of the keys"),
    "rotated value_head_dim": ((1, 2, 32), {"value_head_dim": 7}, "head_dim of the values"),
    "unknown preset": ((1, 2, 32, "int5"), {}, "int5"),
    "value side": ((1, 2, 32, kv.codec("int4", side="value")), {}, "side"),
    "missing layer": ((2, 2, 32, {0: "int4"}), {}, "key must name every layer"),
    "unknown layer": ((1, 2, 32, {0: None, 1: None}), {}, "key must name every layer"),
    "block": ((1, 2, 32), {"block": 24}, "block must be a divisor or a multiple of 64"),
    "other block": ((1, 2, 32, kv.codec("int4", block=32)), {}, "block must be that of the key"),
    "kivi block": ((1, 2, 32, "kivi4"), {"block": 16}, "block must be a multiple of group_size"),
    "sinks": ((1, 2, 32), {"sinks": -1}, "sinks"),
    "recent": ((1, 2, 32), {"recent": -1}, "recent"),
    "rollback": ((1, 2, 32), {"rollback": 0.5}, "rollback"),
    "batch": ((1, 2, 32), {"batch": 0}, "batch"),
    "max_tokens": ((1, 2, 32), {"max_tokens": 0}, "max_tokens"),
    "window": ((1, 2, 32), {"window": 0}, "window"),
    "query bits": ((1, 2, 32), {"query_bits": 7}, "query_bits"),
    "probability bits": ((1, 2, 32), {"probability_bits": 8}, "probability_bits"),
    "backend": ((1, 2, 32), {"backend": "gpu"}, "backend"),
}


@pytest.mark.parametrize(("args", "options", "message"), BAD_CACHES.values(), ids=BAD_CACHES)
def test_a_cache_that_cannot_be_is_refused_when_it_is_made(args, options, message):
    with pytest.raises(ValueError, match=message):
        kv.KVCache(*args, **options)


def test_a_codec_must_be_a_codec():
    with pytest.raises(TypeError, match="value must be"):
        kv.KVCache(1, 2, 32, "int4", 4)


# Special input


@every_preset
def test_zeros_come_back_exactly(name):
    cache = small_cache(name)
    zeros = np.zeros((1, 2, 100, 32), np.float32)
    output = cache.append_attend(0, zeros, zeros, zeros)
    assert not output.any()
    assert not cache.keys(0).any()
    assert not cache.values(0).any()


@every_preset
@pytest.mark.parametrize("magnitude", [1e-30, 1e30])
def test_extreme_magnitudes_stay_finite(name, magnitude):
    q, k, v = (x * np.float32(magnitude) / 10 for x in sequence(100))
    cache = small_cache(name)
    output = cache.append_attend(0, q, k, v)
    assert np.isfinite(output).all()
    assert np.isfinite(cache.keys(0)).all()


def test_any_floats_and_strides_are_taken():
    q, k, v = sequence(100)
    expected = small_cache().append_attend(0, *(x.astype(np.float16) for x in (q, k, v)))
    wide = [x.astype(np.float16).astype(np.float64) for x in (q, k, v)]
    assert_same_bits(small_cache().append_attend(0, *wide), expected)
    backwards = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in wide]
    assert_same_bits(small_cache().append_attend(0, *backwards), expected)


def test_what_was_given_may_change_afterwards():
    _, k, v = sequence(30)
    cache = small_cache()
    cache.append(0, k, v)
    seen = cache.keys(0)
    k[:] = 0
    assert_same_bits(cache.keys(0), seen)
    seen[:] = 0
    assert cache.keys(0).any()


def test_no_tokens_change_nothing():
    q, k, v = sequence(60)
    cache = small_cache()
    cache.append_attend(0, q, k, v)
    before = state(cache)
    assert cache.append_attend(0, *part((q, k, v), 0, 0)).shape == (1, 4, 0, 32)
    cache.append(0, *part((k, v), 0, 0))
    assert_same_bits(state(cache), before)


@pytest.mark.parametrize("padding", [np.nan, np.inf])
def test_padding_may_hold_anything(padding):
    lengths = [9, 3]
    clean = sequence(9, batch=2)
    filled = [x.copy() for x in clean]
    for x in filled:
        x[1, :, :6] = padding
    one, other = small_cache(batch=2), small_cache(batch=2)
    expected = one.append_attend(0, *clean, lengths=lengths)
    assert_same_bits(other.append_attend(0, *filled, lengths=lengths), expected)
    assert_same_bits(state(other), state(one))
    assert np.isnan(filled[0][1, 0, 0, 0]) or np.isinf(filled[0][1, 0, 0, 0])
    with pytest.raises(ValueError, match="q must hold finite values"):
        other.append_attend(0, *filled)


def test_a_wrong_preset_names_the_side():
    with pytest.raises(ValueError, match=r"key must be one of int8, .*, None, but 'fp16'"):
        kv.KVCache(1, 2, 64, key="fp16")
    with pytest.raises(ValueError, match="value must be one of"):
        kv.KVCache(2, 2, 64, value={0: "int4", 1: "int5"})
