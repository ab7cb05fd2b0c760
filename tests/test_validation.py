"""What is refused, in which words; and what is taken in any form."""

import re

import ml_dtypes
import numpy as np
import pytest

import kvcodec as kv
from kvcodec.testing import assert_same_bits


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


INT4 = kv.codec("int4", side="value")
VECTORS = random(3, 64)
KEYS = random(1, 2, 70, 64)
QUERIES = random(1, 4, 3, 64, seed=1)
PACKED_KEYS = kv.codec("int4").encode(KEYS, side="key")
PACKED_VALUES = kv.codec("int4").encode(KEYS, side="value")
ONES = np.ones(3, np.float32)
CODES = np.ones((3, 64), np.uint8)

# Each takes one array of floats of the given shape.
CALLS = {
    "fwht": ("x", VECTORS, kv.fwht),
    "srht": ("x", VECTORS, kv.srht),
    "inverse_srht": ("y", VECTORS, kv.inverse_srht),
    "quantize_symmetric": ("x", VECTORS, lambda x: kv.quantize_symmetric(x, 4)),
    "dequantize_symmetric": (
        "scale",
        ONES,
        lambda x: kv.dequantize_symmetric(CODES.astype(np.int8), x),
    ),
    "quantize_asymmetric": ("x", VECTORS, lambda x: kv.quantize_asymmetric(x, 4)),
    "dequantize_asymmetric": (
        "scale",
        random(1, 64),
        lambda x: kv.dequantize_asymmetric(CODES, x, np.ones((1, 64))),
    ),
    "zero_point": (
        "zero_point",
        random(1, 64),
        lambda x: kv.dequantize_asymmetric(CODES, np.ones((1, 64)), x),
    ),
    "quantize_kivi_keys": ("k", VECTORS, lambda x: kv.quantize_kivi_keys(x, 4, group_size=2)),
    "quantize_lloyd_max": ("x", VECTORS, lambda x: kv.quantize_lloyd_max(x, 4)),
    "dequantize_lloyd_max": ("scale", ONES, lambda x: kv.dequantize_lloyd_max(CODES, x, 4)),
    "quantize_trellis": ("x", VECTORS, lambda x: kv.quantize_trellis(x, 4)),
    "dequantize_trellis": ("scale", ONES, lambda x: kv.dequantize_trellis(CODES, x, 4)),
    "encode": ("x", KEYS, INT4.encode),
    "encode queries": (
        "queries",
        QUERIES,
        lambda x: kv.codec("int4").encode(KEYS, side="key", queries=x),
    ),
    "encode weights": (
        "weights",
        np.abs(random(1, 2, 64)) + 0.1,
        lambda x: kv.codec("int4").encode(KEYS, side="key", weights=x),
    ),
    "attention q": ("q", QUERIES, lambda x: kv.attention(x, KEYS, KEYS)),
    "attention k": ("k", KEYS, lambda x: kv.attention(QUERIES, x, KEYS)),
    "attention v": ("v", KEYS, lambda x: kv.attention(QUERIES, KEYS, x)),
    "packed attention": ("q", QUERIES, lambda x: kv.attention(x, PACKED_KEYS, PACKED_VALUES)),
    "scores q": ("q", QUERIES, lambda x: kv.scores(x, PACKED_KEYS)),
    "scores k": ("k", KEYS, lambda x: kv.scores(QUERIES, x)),
    "merge_attention": (
        re.escape("outputs[1]"),
        VECTORS,
        lambda x: kv.merge_attention([VECTORS, x], [ONES, ONES]),
    ),
    "windowed_attention q": ("q", QUERIES, lambda x: kv.windowed_attention(x, KEYS, KEYS)),
    "windowed_attention k": ("k", KEYS, lambda x: kv.windowed_attention(QUERIES, x, KEYS)),
    "windowed_attention v": ("v", KEYS, lambda x: kv.windowed_attention(QUERIES, KEYS, x)),
}
every_call = pytest.mark.parametrize(("name", "x", "call"), CALLS.values(), ids=CALLS)


# Arrays that are refused


@pytest.mark.parametrize(
    ("value", "given"),
    [
        (np.nan, "holds a NaN"),
        (np.inf, "holds a magnitude of inf"),
        (-np.inf, "holds a magnitude of inf"),
        (2.0**100, r"holds a magnitude of 1.26765e\+30"),
        (-1e35, r"holds a magnitude of 1e\+35"),
        (1e300, "holds a magnitude of inf"),
    ],
)
@every_call
def test_values_that_are_not_finite_or_too_large_are_refused(name, x, call, value, given):
    bad = x.astype(np.float64)
    bad.reshape(-1)[-1] = value
    with pytest.raises(ValueError, match=rf"^{name} must hold finite values below 2\^100.*{given}"):
        call(bad)


def test_a_signaling_nan_is_refused_like_any_other():
    bad = np.array([1, 0x7FF0000000000001], np.uint64).view(np.float64)
    with pytest.raises(ValueError, match=r"^x must hold finite values.*holds a NaN"):
        kv.fwht(bad)


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.complex64, bool, object, "U3"], ids=str)
@every_call
def test_other_dtypes_are_refused(name, x, call, dtype):
    bad = x.astype(np.complex64) if dtype == np.complex64 else np.ones(x.shape, dtype)
    with pytest.raises(TypeError, match=f"^{name} must be an array of floats, but has dtype"):
        call(bad)


@pytest.mark.parametrize("bad", ["text", object(), [None], [[1.0], [1.0, 2.0]]], ids=str)
@every_call
def test_what_is_no_array_is_refused(name, x, call, bad):
    with pytest.raises(TypeError, match=f"^{name} must be an array of floats"):
        call(bad)


class NoArray:
    """What torch's tensors are to NumPy: some turn into arrays, others raise."""

    class Dtype:
        is_floating_point = True

        def __init__(self, name):
            self.name = name

        def __repr__(self):
            return f"torch.{self.name}"

    def __init__(self, dtype, error):
        self.dtype, self.error = self.Dtype(dtype), error

    def __array__(self, *_, **__):
        raise self.error


NoArray.__module__ = "torch"


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@every_call
def test_a_tensor_of_floats_that_numpy_lacks_is_told_what_to_do(name, x, call, dtype):
    tensor = NoArray(dtype, TypeError("Got unsupported ScalarType"))
    hint = rf"give {name}.float\(\) of a tensor of torch.{dtype}, or use KVCodecCache of kvcodec"
    with pytest.raises(TypeError, match=rf"^{name} must be an array of floats, .*; {hint}.*\.$"):
        call(tensor)


@every_call
def test_a_tensor_that_numpy_may_not_read_is_refused(name, x, call):
    tensor = NoArray("float32", RuntimeError("Use tensor.detach()."))
    message = f"^{name} must be an array of floats, but is no array: Use tensor.detach\\(\\).$"
    with pytest.raises(TypeError, match=message):
        call(tensor)


@every_call
def test_a_scalar_is_refused(name, x, call):
    with pytest.raises(ValueError, match=f"^{name} must have"):
        call(np.float32(1.0))


@pytest.mark.parametrize(
    ("name", "x", "call"),
    [value for value in CALLS.values() if value[1] is not VECTORS],
    ids=[name for name, value in CALLS.items() if value[1] is not VECTORS],
)
def test_another_shape_is_refused(name, x, call):
    with pytest.raises(ValueError, match=name):
        call(x[None])


# Options that are refused

I8 = CODES.astype(np.int8)
GROUPS = np.ones((1, 64))
REFUSED = [
    (lambda: kv.fwht(random(2, 68)), "last axis of x must be m . 2.k .* but 68 was given"),
    (lambda: kv.srht(random(2, 0)), "last axis of x must be .* but 0 was given"),
    (lambda: kv.inverse_srht(random(2, 3)), "last axis of y must be .* but 3 was given"),
    (lambda: kv.hadamard_matrix(68), "n must be .* but 68 was given"),
    (lambda: kv.hadamard_matrix(0), "n must be a whole number of at least 1, but 0"),
    (lambda: kv.hadamard_matrix(4.0), "n must be a whole number .* but 4.0"),
    (lambda: kv.srht(VECTORS, seed=-1), "seed must be a whole number from 0 to .* but -1"),
    (
        lambda: kv.srht(VECTORS, seed=2**64),
        "seed must be a whole number from 0 to 18446744073709551615",
    ),
    (lambda: kv.srht(VECTORS, seed=1.0), "seed must be a whole number"),
    (lambda: kv.srht(VECTORS, seed=True), "seed must be a whole number"),
    (lambda: kv.srht_signs(0), "n must be a whole number of at least 1"),
    (lambda: kv.quantize_symmetric(VECTORS, 5), "bits must be one of 2, 3, 4, 8, but 5 was given"),
    (lambda: kv.quantize_symmetric(VECTORS, "4"), "bits must be one of"),
    (lambda: kv.quantize_symmetric(VECTORS, 4.0), "bits must be one of"),
    (
        lambda: kv.quantize_symmetric(VECTORS, 4, scale_dtype="float16"),
        "scale_dtype must be one of bfloat16, float32",
    ),
    (lambda: kv.quantize_symmetric(random(3, 0), 4), "x must have a last axis of at least 1"),
    (lambda: kv.dequantize_symmetric(CODES, ONES), "levels must be an array of int8"),
    (
        lambda: kv.dequantize_symmetric(I8, np.ones(4)),
        r"scale must have shape \(3,\), but has shape \(4,\)",
    ),
    (lambda: kv.quantize_asymmetric(VECTORS, 3), "bits must be one of 2, 4, 8, but 3"),
    (
        lambda: kv.quantize_asymmetric(VECTORS, 2, axis="tokens"),
        "axis must be one of token, channel",
    ),
    (lambda: kv.quantize_asymmetric(VECTORS, 2, axis=0), "axis must be one of token, channel"),
    (
        lambda: kv.quantize_asymmetric(VECTORS, 2, group_size=0),
        "group_size must be a whole number from 1 to 4096",
    ),
    (lambda: kv.quantize_asymmetric(VECTORS[0], 2), r"x must have shape \(..., tokens, channels\)"),
    (
        lambda: kv.quantize_kivi_keys(VECTORS, 2, residual=-1),
        "residual must be a whole number from 0",
    ),
    (lambda: kv.quantize_kivi_keys(VECTORS[0], 2), "k must have shape"),
    (lambda: kv.dequantize_asymmetric(CODES, GROUPS.T, GROUPS), r"scale must have shape \(1, 64\)"),
    (
        lambda: kv.dequantize_asymmetric(CODES, GROUPS, GROUPS.T),
        r"zero_point must have shape \(1, 64\)",
    ),
    (
        lambda: kv.dequantize_asymmetric(CODES * 1.0, GROUPS, GROUPS),
        "codes must be an array of integers",
    ),
    (
        lambda: kv.dequantize_asymmetric(CODES + np.int16(300), GROUPS, GROUPS),
        "codes must hold codes from 0 to 255",
    ),
    (lambda: kv.quantize_lloyd_max(random(3, 68), 4), "head_dim must be one of"),
    (lambda: kv.quantize_lloyd_max(VECTORS, 8), "bits must be one of 2, 3, 4, but 8"),
    (
        lambda: kv.quantize_lloyd_max(VECTORS, 4, scale_rule="absmax"),
        "scale_rule must be one of norm, least_squares",
    ),
    (lambda: kv.dequantize_lloyd_max(CODES + 15, ONES, 4), "codes must hold codes from 0 to 15"),
    (lambda: kv.quantize_trellis(random(3, 68), 4), "head_dim must be one of .* but 68"),
    (lambda: kv.quantize_trellis(VECTORS, 8), "bits must be one of 2, 3, 4, but 8"),
    (lambda: kv.quantize_trellis(VECTORS, 4, scale_rule="absmax"), "scale_rule must be one of"),
    (lambda: kv.dequantize_trellis(CODES + 15, ONES, 4), "codes must hold codes from 0 to 15"),
    (lambda: kv.dequantize_trellis(CODES[:, :63], ONES, 4), "head_dim must be one of .* but 63"),
    (lambda: kv.trellis_table(8), "bits must be one of 2, 3, 4, but 8"),
    (lambda: kv.codebook(63, 4), "head_dim must be one of .* but 63"),
    (lambda: kv.codebook(64, 5), "bits must be one of 2, 3, 4, but 5"),
    (lambda: kv.pack([4], 2), "codes must hold codes from 0 to 3, but holds values from 4 to 4"),
    (lambda: kv.pack([-1], 2), "codes must hold codes from 0 to 3"),
    (lambda: kv.pack([1.0], 2), "codes must be an array of integers, but has dtype float64"),
    (lambda: kv.pack([1], 5), "bits must be one of 2, 3, 4, 8"),
    (lambda: kv.pack([1], 3, layout="loose"), "layout must be one of dense, padded"),
    (lambda: kv.pack([1], 4, layout="padded"), "layout 'padded' is for 3 bits only, but bits is 4"),
    (lambda: kv.unpack([1], 3, 3), "n must be at most 2 for rows of 1 bytes, but 3"),
    (
        lambda: kv.unpack([1], 3, 3, layout="padded"),
        "n must be at most 2 for rows of 1 bytes, but 3",
    ),
    (lambda: kv.unpack([1], -1, 3), "n must be a whole number of at least 0"),
    (lambda: kv.unpack([256], 1, 8), "packed must hold codes from 0 to 255"),
    (lambda: kv.codec("int5"), "name must be one of int8, int4, .* but 'int5'"),
    (lambda: kv.codec("int4", bit=4), "option must be one of .* but 'bit'"),
    (lambda: kv.codec("int4", bits=5), "bits must be one of 2, 3, 4, 8"),
    (lambda: kv.codec("int4", rotation="dct"), "rotation must be one of none, hadamard, srht"),
    (lambda: kv.codec("int4", seed=1), "seed is for rotation 'srht' only"),
    (lambda: kv.codec("int4", layout="padded"), "layout 'padded' is for 3 bits only"),
    (lambda: kv.codec("int4", group_size=32), "group_size is for code 'asymmetric' only"),
    (lambda: kv.codec("lm4", group_size=32), "group_size is for code 'asymmetric' only"),
    (lambda: kv.codec("tcq3", layout="padded"), "layout must be 'dense' for code 'trellis'"),
    (lambda: kv.codec("tcq4", bits=8), "bits must be one of 2, 3, 4"),
    (lambda: kv.codec("tcq2").check_head_dim(17), "17"),
    (lambda: kv.codec("lm4", bits=8), "bits must be one of 2, 3, 4"),
    (lambda: kv.codec("kivi4", bits=3), "bits must be one of 2, 4, 8"),
    (lambda: kv.codec("kivi4", group_size=None), "group_size must be a whole number"),
    (lambda: kv.codec("kivi4", group_size=48), r"block must be a multiple of group_size \(48\)"),
    (lambda: kv.codec("kivi4", center=True), "center and equalize are for codes with one scale"),
    (lambda: kv.codec("kivi4", equalize=True), "center and equalize are for codes with one scale"),
    (lambda: kv.codec("int4", center=True, side="value"), "center and equalize are for keys only"),
    (
        lambda: kv.codec("int4", equalize=True).for_side("value"),
        "center and equalize are for keys only",
    ),
    (lambda: kv.codec("int4", center=True, block=1), "center needs blocks of at least 2 tokens"),
    (lambda: kv.codec("int4", center="yes"), "center must be True or False, but 'yes'"),
    (lambda: kv.codec("int4", equalize=1), "equalize must be True or False, but 1"),
    (lambda: kv.codec("int4", block=0), "block must be a whole number from 1 to 4096"),
    (lambda: kv.codec("int4", side="query"), "side must be one of key, value"),
    (lambda: kv.codec("int4", scale_rule="norm"), "scale_rule must be one of absmax"),
    (lambda: kv.codec("int4", side="key").for_side("value"), "side must be 'key' for this codec"),
    (
        lambda: kv.codec("int4").bits_per_value(64),
        "side must be one of key, value, but none was given",
    ),
    (lambda: kv.codec("int4").bits_per_value(68, "key"), r"head_dim .*must be m . 2.k"),
    (
        lambda: kv.codec("int8").bits_per_value(1025, "key"),
        "head_dim must be a whole number from 1 to 1024",
    ),
    (lambda: kv.codec("int4").encode(KEYS), "side must be one of key, value, but none was given"),
    (lambda: INT4.encode(KEYS[..., :63]), "last axis of x .*must be m . 2.k"),
    (lambda: INT4.encode(KEYS[0]), r"x must have 4 dimensions, but has shape \(2, 70, 64\)"),
    (lambda: INT4.encode(KEYS[:0]), "x must have a batch and at least one head"),
    (lambda: INT4.encode(KEYS[..., :0]), r"x must have a last axis \(head_dim\) of 1 to 1024"),
    (lambda: INT4.encode(KEYS, queries=QUERIES), "queries must be left out"),
    (lambda: INT4.encode(KEYS, weights=np.ones((1, 2, 64))), "weights must be left out"),
    (lambda: kv.codec("int4", side="key", equalize=True).encode(KEYS), "queries must be given"),
    (
        lambda: kv.codec("int4", side="key").encode(
            KEYS, queries=QUERIES, weights=np.ones((1, 2, 64))
        ),
        "queries must be left out where weights are given",
    ),
    (
        lambda: kv.codec("int4", side="key").encode(KEYS, queries=QUERIES[:, :3]),
        "queries must have shape",
    ),
    (
        lambda: kv.codec("int4", side="key").encode(KEYS, weights=np.zeros((1, 2, 64))),
        r"weights must lie between 2\^-10 and 2\^10, but lie from 0 to 0",
    ),
    (lambda: kv.codec("int4").decode(KEYS), "encoded must be an Encoded, but is ndarray"),
    (lambda: kv.codec("int3").decode(PACKED_KEYS), "encoded must be made by codec.'int3'"),
    (lambda: INT4.decode(PACKED_KEYS), "encoded must be made by codec.'int4', side='value'"),
    (
        lambda: kv.attention(QUERIES[:, :3], KEYS, KEYS),
        r"q must have shape \(1, a multiple of 2, q_len, 64\)",
    ),
    (lambda: kv.attention(QUERIES[..., :32], KEYS, KEYS), "q must have shape"),
    (lambda: kv.attention(QUERIES.repeat(2, 0), KEYS, KEYS), "q must have shape"),
    (
        lambda: kv.attention(QUERIES, KEYS, KEYS[:, :, :3]),
        "v must have the batch, heads and tokens of k",
    ),
    (lambda: kv.attention(QUERIES, PACKED_VALUES, KEYS), "k must be encoded with side='key'"),
    (lambda: kv.attention(QUERIES, KEYS, PACKED_KEYS), "v must be encoded with side='value'"),
    (lambda: kv.attention(QUERIES, KEYS, KEYS, scale=0), "scale must be a number from"),
    (lambda: kv.attention(QUERIES, KEYS, KEYS, scale=np.inf), "scale must be a number from"),
    (lambda: kv.attention(QUERIES, KEYS, KEYS, scale=np.nan), "scale must be a number from"),
    (lambda: kv.attention(QUERIES, KEYS, KEYS, scale="1"), "scale must be a number from"),
    (lambda: kv.attention(QUERIES, KEYS, KEYS, softcap=-1.0), "softcap must be a number from"),
    (lambda: kv.attention(QUERIES, KEYS, KEYS, causal=1), "causal must be True or False"),
    (lambda: kv.attention(QUERIES, KEYS, KEYS, window=3), "window must be left out for attention"),
    (
        lambda: kv.attention(QUERIES, KEYS, KEYS, causal=True, window=0),
        "window must be a whole number from 1",
    ),
    (
        lambda: kv.attention(QUERIES, KEYS, KEYS, query_bits=4),
        "query_bits must be one of None, 8, but 4",
    ),
    (
        lambda: kv.attention(QUERIES, KEYS, KEYS, probability_bits=8),
        "probability_bits must be one of .*7, 14",
    ),
    (
        lambda: kv.attention(QUERIES, KEYS, KEYS, probability_bits="all"),
        "probability_bits must be one of None, auto, 7, 14",
    ),
    (
        lambda: kv.attention(KEYS, KEYS[:, :, :3], KEYS[:, :, :3], causal=True),
        "q must have at most as many queries",
    ),
    (
        lambda: kv.attention(QUERIES, KEYS, KEYS, causal=True, positions=[0, 1]),
        r"positions must have shape \(3,\) or \(1, 3\), but have shape \(2,\)",
    ),
    (
        lambda: kv.attention(QUERIES, KEYS, KEYS, causal=True, positions=[0, 1, 70]),
        "positions must lie from 0 to 69, but lie from 0 to 70",
    ),
    (
        lambda: kv.attention(QUERIES, KEYS, KEYS, causal=True, positions=[-1, 0, 1]),
        "positions must lie from 0",
    ),
    (lambda: kv.scores(QUERIES, PACKED_VALUES), "k must be encoded with side='key'"),
    (lambda: kv.scores(QUERIES, KEYS, query_bits=7), "query_bits must be one of None, 8"),
    (lambda: kv.merge_attention([], []), "log_sum_exps must have as many parts as outputs"),
    (lambda: kv.merge_attention([VECTORS], [ONES, ONES]), "log_sum_exps must have as many parts"),
    (
        lambda: kv.merge_attention([VECTORS, VECTORS[:2]], [ONES, ONES]),
        r"outputs\[1\] must have shape \(3, 64\)",
    ),
    (
        lambda: kv.merge_attention([VECTORS], [ONES[:2]]),
        r"log_sum_exps\[0\] must have shape \(3,\)",
    ),
    (
        lambda: kv.merge_attention([VECTORS], [ONES * np.nan]),
        r"log_sum_exps\[0\] must hold finite",
    ),
    (
        lambda: kv.merge_attention([VECTORS], [ONES * np.inf]),
        r"log_sum_exps\[0\] must hold finite",
    ),
    (lambda: kv.windowed_attention(QUERIES, KEYS, KEYS, "int5"), "must be one of int8, int4"),
    (lambda: kv.windowed_attention(QUERIES, KEYS, KEYS, 5), "key must be"),
    (lambda: kv.windowed_attention(QUERIES, KEYS, KEYS, value=None), "value must be"),
    (
        lambda: kv.windowed_attention(QUERIES, KEYS, KEYS, sinks=-1),
        "sinks must be a whole number from 0",
    ),
    (
        lambda: kv.windowed_attention(QUERIES, KEYS, KEYS, recent=1.5),
        "recent must be a whole number from 0",
    ),
    (
        lambda: kv.windowed_attention(QUERIES, KEYS, KEYS, value=kv.codec("int4", block=32)),
        "value must have the block of key, 64, but has 32",
    ),
    (
        lambda: kv.windowed_attention(QUERIES, KEYS, KEYS[:, :1]),
        "v must have the batch, heads and tokens of k",
    ),
    (
        lambda: kv.windowed_attention(
            QUERIES, random(1, 2, 200, 64), random(1, 2, 200, 64), kv.codec("int4", equalize=True)
        ),
        "positions must include tokens before 68",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_options_are_refused_in_one_sentence(call, message):
    with pytest.raises((ValueError, TypeError), match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("wrong", [5.0, "int", [0.0, 1.0, 2.0]], ids=str)
def test_positions_must_be_integers(wrong):
    with pytest.raises(TypeError, match="positions must be integers, but have dtype"):
        kv.attention(QUERIES, KEYS, KEYS, causal=True, positions=wrong)


def refused_or_finite(call, name):
    """Whether a call raises an error that begins with the name, or gives finite numbers."""
    try:
        result = call()
    except ValueError as error:
        return str(error).startswith(name)
    return bool(np.isfinite(result).all())


@pytest.mark.parametrize("softcap", [1e-300, 1e-45, 1e39, 1e300])
@pytest.mark.usefixtures("backend")
def test_extreme_softcaps_are_refused_or_finite(softcap):
    assert refused_or_finite(
        lambda: kv.attention(QUERIES, KEYS, KEYS, softcap=softcap), "softcap must"
    )


@pytest.mark.usefixtures("backend")
def test_log_sum_exps_beyond_float32_are_refused_or_finite():
    parts = [ONES, np.full(3, 1e300)]
    assert refused_or_finite(
        lambda: kv.merge_attention([VECTORS, VECTORS], parts).output, "log_sum_exps[1] must"
    )


def test_log_sum_exps_may_be_bfloat16():
    half = ONES.astype(ml_dtypes.bfloat16)
    assert_same_bits(kv.merge_attention([VECTORS], [half]), kv.merge_attention([VECTORS], [ONES]))


# Nothing has changed when something is refused


@pytest.mark.parametrize("rotate", [kv.fwht, kv.srht, kv.inverse_srht])
def test_out_is_untouched_when_a_call_is_refused(rotate):
    out = np.full((3, 64), 7, np.float32)
    bad = VECTORS.copy()
    bad[-1, -1] = np.nan
    with pytest.raises(ValueError, match="must hold finite values"):
        rotate(bad, out=out)
    assert (out == 7).all()


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (np.zeros((3, 64)), TypeError, "out must be a float32 ndarray, but float64"),
        ([[0.0]], TypeError, "out must be a float32 ndarray, but list"),
        (np.zeros((3, 32), np.float32), ValueError, r"out must have shape \(3, 64\)"),
        (np.zeros((64, 3), np.float32).T, ValueError, "out must be C-contiguous, aligned"),
        (np.broadcast_to(np.float32(0), (3, 64)), ValueError, "out must be C-contiguous, aligned"),
    ],
    ids=["dtype", "list", "shape", "strides", "read-only"],
)
@pytest.mark.parametrize("rotate", [kv.fwht, kv.srht, kv.inverse_srht])
def test_out_must_be_an_array_to_write_to(rotate, out, error, message):
    with pytest.raises(error, match=message):
        rotate(VECTORS, out=out)


# Any form of an array is taken


FORMS = {
    "float64": lambda x: x.astype(np.float64),
    "float16": lambda x: x.astype(np.float16),
    "bfloat16": lambda x: x.astype(ml_dtypes.bfloat16),
    "big-endian": lambda x: x.astype(">f4"),
    "longdouble": lambda x: x.astype(np.longdouble),
    "list": lambda x: x.tolist(),
    "every second": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "reversed": lambda x: x[..., ::-1].copy()[..., ::-1],
    "Fortran": np.asfortranarray,
    "transposed": lambda x: np.ascontiguousarray(x.T).T,
    "read-only": lambda x: np.broadcast_to(x, x.shape),
    "broadcast": lambda x: np.broadcast_to(x[..., :1], x.shape),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@every_call
@pytest.mark.usefixtures("backend")
def test_any_form_gives_what_a_plain_copy_gives(name, x, call, form):
    given = form(x)
    before = np.array(given)
    plain = np.array(given, dtype=np.float32, order="C")
    assert_same_bits(call(given), call(plain))
    assert_same_bits(np.array(given), before)


@every_call
@pytest.mark.usefixtures("backend")
def test_inputs_are_not_changed_nor_returned(name, x, call):
    given = x.copy()
    result = call(given)
    assert_same_bits(given, x)
    for part in result if isinstance(result, tuple) else (result,):
        if isinstance(part, np.ndarray):
            assert not np.shares_memory(part, given)


# Configurations


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"color": "red"}, "missing or unknown: color"),
        ({"bits": 5}, "bits must be one of"),
        ({"seed": 3}, "seed is for rotation 'srht' only"),
        ({"block": "64"}, "block must be a whole number"),
        ({"bits": 4.0}, "bits must be one of"),
        ({"name": 3}, "name must be"),
    ],
    ids=str,
)
def test_bad_configurations_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        kv.Codec.from_config(kv.codec("int4").to_config() | changes)


def test_incomplete_configurations_are_refused():
    config = kv.codec("int4").to_config()
    del config["bits"], config["code"]
    with pytest.raises(ValueError, match="missing or unknown: bits, code"):
        kv.Codec.from_config(config)


def test_options_that_a_configuration_leaves_out_have_their_defaults():
    config = kv.codec("int4").to_config()
    del config["block"], config["seed"]
    assert kv.Codec.from_config(config) == kv.codec("int4")


@pytest.mark.parametrize("config", [None, 5, "int4", ["int4"]], ids=str)
def test_what_is_no_configuration_is_refused(config):
    with pytest.raises((TypeError, ValueError), match="config must"):
        kv.Codec.from_config(config)


def test_codecs_are_frozen():
    with pytest.raises(AttributeError):
        kv.codec("int4").bits = 8
