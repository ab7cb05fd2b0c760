"""Quantizers against brute-force nearest search in float64 and scales of ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest
from conftest import relative_error
from hypothesis import given
from hypothesis import strategies as st

import kvcodec as kv
from kvcodec.codebook import HEAD_DIMS
from kvcodec.quantize import LLOYD_MAX_SCALE_RULES
from kvcodec.testing import arrays, assert_same_bits, kv_arrays, sizes

pytestmark = pytest.mark.usefixtures("backend")

scale_dtypes = pytest.mark.parametrize("scale_dtype", ["bfloat16", "float32"])
symmetric_bits = pytest.mark.parametrize("bits", [2, 3, 4, 8])
asymmetric_bits = pytest.mark.parametrize("bits", [2, 4, 8])
lloyd_max_bits = pytest.mark.parametrize("bits", [2, 3, 4])
fitted_rules = pytest.mark.parametrize("scale_rule", ["norm", "least_squares"])
axes = pytest.mark.parametrize("axis", ["token", "channel"])
vectors = arrays(st.tuples(st.integers(1, 4), sizes(min_size=1)))
tensors = kv_arrays(batch=[1], heads=[2], tokens=[1, 7, 33, 64], head_dim=[1, 7, 33, 64])

PUBLISHED = {2: 0.1175, 3: 0.03454, 4: 0.009497}
TIE = 5e-5


def stored_up(x, scale_dtype):
    """Non-negative float32 rounded up to the stored type, not below 2^-126 unless 0."""
    x = np.asarray(x, dtype=np.float32)
    if scale_dtype == "bfloat16":
        rounded = x.astype(ml_dtypes.bfloat16)
        above = np.nextafter(rounded, ml_dtypes.bfloat16(np.inf))
        x = np.where(rounded.astype(np.float32) < x, above, rounded).astype(np.float32)
    return np.where(x > 0, np.maximum(x, np.float32(2.0**-126)), np.float32(0))


def stored_down(x, scale_dtype):
    """Float32 rounded down to the stored type."""
    if scale_dtype == "float32":
        return x
    rounded = x.astype(ml_dtypes.bfloat16)
    below = np.nextafter(rounded, ml_dtypes.bfloat16(-np.inf))
    return np.where(rounded.astype(np.float32) > x, below, rounded).astype(np.float32)


def in_units(x, scale):
    """Values as float64 multiples of a scale, 0 where the scale is 0."""
    x, scale = np.broadcast_arrays(np.asarray(x, np.float64), np.asarray(scale, np.float64))
    return np.divide(x, scale, out=np.zeros(x.shape), where=scale > 0)


def assert_nearest(y, chosen, grid):
    """No entry of the grid is nearer to y than the chosen one, up to float32 ties."""
    best = np.abs(y[..., None] - np.asarray(grid, dtype=np.float64)).min(axis=-1)
    assert (np.abs(y - chosen) <= best + TIE).all()


def grouped(x, group_size, axis):
    """The groups of an array (..., tokens, channels), each as an array."""
    along = -2 if axis == "token" else -1
    cuts = range(group_size, x.shape[along], group_size)
    return np.split(x, cuts, axis=along), along


# Symmetric


@given(x=vectors)
@symmetric_bits
@scale_dtypes
def test_symmetric_levels_are_nearest_and_none_clips(x, bits, scale_dtype):
    largest = 2 ** (bits - 1) - 1
    levels, scale = kv.quantize_symmetric(x, bits, scale_dtype=scale_dtype)
    assert (levels.shape, levels.dtype) == (x.shape, np.int8)
    expected = stored_up(np.abs(x).max(axis=-1) / np.float32(largest), scale_dtype)
    assert_same_bits(scale, expected)
    y = in_units(x, scale[..., None])
    assert (np.abs(y) <= largest + TIE).all()
    assert_nearest(y, levels, range(-largest, largest + 1))


@given(x=vectors)
@symmetric_bits
def test_symmetric_decodes_to_level_times_scale(x, bits):
    levels, scale = kv.quantize_symmetric(x, bits)
    assert_same_bits(kv.dequantize_symmetric(levels, scale), levels * scale[..., None])
    assert (np.abs(levels * scale[..., None] - x) <= scale[..., None] * (0.5 + TIE)).all()


def test_symmetric_rounds_halves_to_even():
    levels, scale = kv.quantize_symmetric([[7.0, 0.5, 1.5, 2.5, -0.5, -1.5]], bits=4)
    assert scale.tolist() == [1.0]
    assert levels.tolist() == [[7, 0, 2, 2, 0, -2]]


@symmetric_bits
def test_symmetric_keeps_a_vector_of_its_own_levels(bits):
    largest = 2 ** (bits - 1) - 1
    x = np.arange(-largest, largest + 1, dtype=np.float32) * np.float32(0.125)
    levels, scale = kv.quantize_symmetric(x, bits)
    assert_same_bits(kv.dequantize_symmetric(levels, scale), x)


# Asymmetric


@given(x=tensors, group_size=st.sampled_from([1, 5, 32, 128]))
@asymmetric_bits
@axes
@scale_dtypes
def test_asymmetric_codes_are_nearest_and_none_clips(x, group_size, bits, axis, scale_dtype):
    codes, scale, zero_point = kv.quantize_asymmetric(
        x, bits, group_size=group_size, axis=axis, scale_dtype=scale_dtype
    )
    groups, along = grouped(x, group_size, axis)
    assert (codes.shape, codes.dtype) == (x.shape, np.uint8)
    assert scale.shape[along] == zero_point.shape[along] == len(groups)
    coded_groups, _ = grouped(codes, group_size, axis)
    for i, (group, code) in enumerate(zip(groups, coded_groups, strict=True)):
        low, high = group.min(along, keepdims=True), group.max(along, keepdims=True)
        zero, step = (a.take([i], axis=along) for a in (zero_point, scale))
        np.testing.assert_array_equal(zero, stored_down(low, scale_dtype))
        steps = np.where(low == high, np.float32(1), np.float32(2**bits - 1))
        np.testing.assert_array_equal(step, stored_up((high - zero) / steps, scale_dtype))
        y = in_units(group.astype(np.float64) - zero, step)
        assert (y >= 0).all()
        assert (y <= 2**bits - 1 + TIE).all()
        assert_nearest(y, code, range(2**bits))


@given(x=tensors, group_size=st.sampled_from([1, 5, 32, 128]))
@asymmetric_bits
@axes
def test_asymmetric_decodes_to_zero_point_plus_code_times_scale(x, group_size, bits, axis):
    options = {"group_size": group_size, "axis": axis}
    codes, scale, zero_point = kv.quantize_asymmetric(x, bits, **options)
    along = -2 if axis == "token" else -1
    member = np.arange(x.shape[along]) // group_size
    expected = zero_point.take(member, along) + codes * scale.take(member, along)
    assert_same_bits(kv.dequantize_asymmetric(codes, scale, zero_point, **options), expected)


@given(value=st.floats(-1e4, 1e4, width=16), shape=st.sampled_from([(1, 1), (7, 3), (33, 40)]))
@asymmetric_bits
@axes
@scale_dtypes
def test_constant_groups_of_float16_are_exact(value, shape, bits, axis, scale_dtype):
    x = np.full(shape, value, np.float32)
    coded = kv.quantize_asymmetric(x, bits, axis=axis, scale_dtype=scale_dtype)
    np.testing.assert_array_equal(kv.dequantize_asymmetric(*coded, axis=axis), x)


@given(k=kv_arrays(head_dim=[7]), group_size=st.sampled_from([1, 5, 32]), residual=sizes(0, 64))
def test_kivi_keys_code_whole_groups_and_keep_the_tail(k, group_size, residual):
    codes, scale, zero_point, tail = kv.quantize_kivi_keys(
        k, 2, group_size=group_size, residual=residual
    )
    coded = codes.shape[2]
    assert coded % group_size == 0
    assert coded + tail.shape[2] == k.shape[2]
    assert tail.shape[2] < residual + group_size
    assert tail.shape[2] >= min(residual, k.shape[2])
    assert_same_bits(tail, k[:, :, coded:])
    whole = kv.quantize_asymmetric(k[:, :, :coded], 2, group_size=group_size)
    assert_same_bits((codes, scale, zero_point), whole)


# Lloyd-Max


@given(data=st.data(), head_dim=st.sampled_from(HEAD_DIMS[:30]))
@lloyd_max_bits
@fitted_rules
@scale_dtypes
def test_lloyd_max_codes_are_nearest_centroids(data, head_dim, bits, scale_rule, scale_dtype):
    x = data.draw(arrays((3, head_dim)))
    book = kv.codebook(head_dim, bits)
    codes, scale = kv.quantize_lloyd_max(x, bits, scale_rule=scale_rule, scale_dtype=scale_dtype)
    assert (codes.shape, codes.dtype) == (x.shape, np.uint8)
    assert_nearest(in_units(x, scale[..., None]), book.levels[codes], book.levels)


@given(data=st.data(), head_dim=st.sampled_from(HEAD_DIMS[:30]))
@lloyd_max_bits
@scale_dtypes
def test_lloyd_max_norm_rule_stores_norm_times_step(data, head_dim, bits, scale_dtype):
    x = data.draw(arrays((3, head_dim)))
    _, scale = kv.quantize_lloyd_max(x, bits, scale_dtype=scale_dtype)
    exact = np.linalg.norm(x.astype(np.float64), axis=-1) * kv.codebook(head_dim, bits).step
    assert_same_bits(scale, stored_up(scale, scale_dtype))
    assert (scale >= exact * (1 - 1e-7)).all()
    assert (scale <= exact * (1 + (2**-7 if scale_dtype == "bfloat16" else 1e-7))).all()


@given(data=st.data(), head_dim=st.sampled_from(HEAD_DIMS[:30]))
@lloyd_max_bits
def test_least_squares_is_at_least_as_good_as_the_norm_for_every_vector(data, head_dim, bits):
    x = data.draw(arrays((4, head_dim)))
    errors = []
    for scale_rule in ("norm", "least_squares"):
        codes, scale = kv.quantize_lloyd_max(x, bits, scale_rule=scale_rule, scale_dtype="float32")
        decoded = kv.dequantize_lloyd_max(codes, scale, bits)
        errors.append(((decoded.astype(np.float64) - x) ** 2).sum(axis=-1))
    assert (errors[1] <= errors[0] * (1 + 1e-5)).all()


@given(data=st.data(), head_dim=st.sampled_from(HEAD_DIMS[:30]))
@lloyd_max_bits
@pytest.mark.parametrize("scale_rule", ["norm_preserving", "unbiased"])
def test_lengthening_rules_keep_norm_or_projection(data, head_dim, bits, scale_rule):
    x = data.draw(arrays((4, head_dim)))
    codes, scale = kv.quantize_lloyd_max(x, bits, scale_rule=scale_rule, scale_dtype="float32")
    assert_same_bits(codes, kv.quantize_lloyd_max(x, bits, scale_dtype="float32")[0])
    y = kv.dequantize_lloyd_max(codes, scale, bits).astype(np.float64)
    energy = (x.astype(np.float64) ** 2).sum(axis=-1)
    kept = (y * y if scale_rule == "norm_preserving" else y * x).sum(axis=-1)
    np.testing.assert_allclose(kept, energy, rtol=1e-6)


@given(data=st.data(), head_dim=st.sampled_from(HEAD_DIMS[:30]))
@lloyd_max_bits
def test_lloyd_max_decodes_to_level_times_scale(data, head_dim, bits):
    codes, scale = kv.quantize_lloyd_max(data.draw(arrays((3, head_dim))), bits)
    expected = kv.codebook(head_dim, bits).levels[codes] * scale[..., None]
    assert_same_bits(kv.dequantize_lloyd_max(codes, scale, bits), expected)


@pytest.mark.parametrize(("bits", "published"), PUBLISHED.items())
@fitted_rules
def test_distortion_on_gaussian_data_is_the_published_one(bits, published, scale_rule):
    x = np.random.default_rng(bits).standard_normal((300, 1024))
    decoded = kv.dequantize_lloyd_max(*kv.quantize_lloyd_max(x, bits, scale_rule=scale_rule), bits)
    assert relative_error(decoded, x) ** 2 == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize(("bits", "published"), PUBLISHED.items())
def test_distortion_after_srht_is_the_same_for_heavy_tails(bits, published):
    x = np.random.default_rng(bits).laplace(size=(300, 1024))
    rotated = kv.srht(x, seed=bits)
    decoded = kv.dequantize_lloyd_max(*kv.quantize_lloyd_max(rotated, bits), bits)
    assert relative_error(kv.inverse_srht(decoded, bits), x) ** 2 == pytest.approx(
        published, rel=0.02
    )


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@lloyd_max_bits
def test_distortion_of_unit_vectors_is_the_one_the_codebook_states(head_dim, bits):
    x = np.random.default_rng(head_dim).standard_normal((200_000 // head_dim, head_dim))
    decoded = kv.dequantize_lloyd_max(*kv.quantize_lloyd_max(x, bits), bits)
    stated = kv.codebook(head_dim, bits).mse
    unit = np.linalg.norm(x, axis=-1, keepdims=True) / np.sqrt(head_dim)
    assert np.mean(((decoded - x) / unit) ** 2) == pytest.approx(stated, rel=0.02)


# All of them


QUANTIZERS = {
    **{
        f"symmetric-{bits}": lambda x, bits=bits: kv.dequantize_symmetric(
            *kv.quantize_symmetric(x, bits)
        )
        for bits in (2, 3, 4, 8)
    },
    **{
        f"asymmetric-{bits}-{axis}": lambda x, bits=bits, axis=axis: kv.dequantize_asymmetric(
            *kv.quantize_asymmetric(x, bits, axis=axis), axis=axis
        )
        for bits in (2, 4, 8)
        for axis in ("token", "channel")
    },
    **{
        f"lloyd_max-{bits}-{rule}": lambda x, bits=bits, rule=rule: kv.dequantize_lloyd_max(
            *kv.quantize_lloyd_max(x, bits, scale_rule=rule), bits
        )
        for bits in (2, 3, 4)
        for rule in LLOYD_MAX_SCALE_RULES
    },
    **{
        f"trellis-{bits}-{rule}": lambda x, bits=bits, rule=rule: kv.dequantize_trellis(
            *kv.quantize_trellis(x, bits, scale_rule=rule), bits
        )
        for bits in (2, 3, 4)
        for rule in LLOYD_MAX_SCALE_RULES
    },
}
every_quantizer = pytest.mark.parametrize("roundtrip", QUANTIZERS.values(), ids=QUANTIZERS)


@every_quantizer
def test_zero_vectors_are_exact(roundtrip):
    assert not roundtrip(np.zeros((3, 64), np.float32)).any()


@given(x=arrays((5, 64), kinds=["huge", "tiny", "mixed_magnitudes", "zero_vectors"]))
@every_quantizer
def test_extreme_magnitudes_stay_finite(roundtrip, x):
    decoded = roundtrip(x).astype(np.float64)
    assert np.linalg.norm(decoded) <= 3 * np.linalg.norm(x.astype(np.float64))


@pytest.mark.parametrize("exponent", [-30, -20, -10, 10, 20, 29])
@every_quantizer
def test_relative_error_does_not_depend_on_the_magnitude(roundtrip, exponent):
    x = np.random.default_rng(0).standard_normal((20, 64))
    scaled = x * 10.0**exponent
    allowed = 1.05 * relative_error(roundtrip(x), x)
    assert relative_error(roundtrip(scaled) / 10.0**exponent, x) < allowed


@pytest.mark.parametrize("name", [name for name in QUANTIZERS if "asymmetric" not in name])
def test_a_vector_alone_is_quantized_as_a_matrix_of_one(name):
    x = np.random.default_rng(0).standard_normal(64)
    assert_same_bits(QUANTIZERS[name](x), QUANTIZERS[name](x[None])[0])


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
@every_quantizer
def test_nothing_to_quantize_gives_nothing(roundtrip, shape):
    assert roundtrip(np.zeros(shape)).shape == shape
