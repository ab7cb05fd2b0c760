"""The scale rules of Lloyd-Max codes, and which keys are centered."""

import numpy as np
import pytest

import kvcodec as kv

pytestmark = pytest.mark.usefixtures("backend")
BFLOAT16_STEP = 2.0**-7


def rotated(rows=200, n=128):
    return np.random.default_rng(0).standard_normal((rows, n))


def decoded(x, bits, rule):
    codes, scale = kv.quantize_lloyd_max(x, bits, scale_rule=rule, scale_dtype="float32")
    return kv.dequantize_lloyd_max(codes, scale, bits).astype(np.float64)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_norm_preserving_keeps_the_norm(bits):
    x = rotated()
    y = decoded(x, bits, "norm_preserving")
    np.testing.assert_allclose(np.linalg.norm(y, axis=1), np.linalg.norm(x, axis=1), rtol=1e-5)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_unbiased_keeps_the_projection_on_the_vector(bits):
    x = rotated()
    y = decoded(x, bits, "unbiased")
    np.testing.assert_allclose((x * y).sum(axis=1), (x * x).sum(axis=1), rtol=1e-5)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_least_squares_has_the_least_error(bits):
    x = rotated()
    errors = {
        rule: np.mean((decoded(x, bits, rule) - x) ** 2)
        for rule in ("norm", "least_squares", "norm_preserving", "unbiased")
    }
    assert min(errors, key=errors.get) == "least_squares"


@pytest.mark.parametrize("rule", ["norm", "least_squares", "norm_preserving", "unbiased"])
def test_zeros_and_single_spikes_are_coded_by_every_rule(rule):
    x = np.zeros((3, 64))
    x[1, 5], x[2] = 3.0, 1e-42
    y = decoded(x, 2, rule)
    assert np.isfinite(y).all()
    assert not y[0].any()


def test_keys_preserve_the_norm_and_values_are_unbiased_by_default():
    assert kv.codec("lm2").for_side("key").scale_rule == "norm_preserving"
    assert kv.codec("lm2").for_side("value").scale_rule == "unbiased"
    assert kv.codec("tcq2").for_side("key").scale_rule == "norm_preserving"
    assert kv.codec("tcq2").for_side("value").scale_rule == "unbiased"
    assert kv.codec("lm2", scale_rule="norm").for_side("key").scale_rule == "norm"


def keys_with_offset(tokens=128, head_dim=64):
    k = np.random.default_rng(1).standard_normal((1, 1, tokens, head_dim)).astype(np.float32)
    k[..., 3] += 20
    return k


def test_a_key_is_not_centered_where_that_would_make_it_longer():
    k = keys_with_offset()
    k[:, :, 10] = 0.01 * k[:, :, 10]
    encoded = kv.codec("int4", equalize=False).encode(k, side="key")
    centered = encoded.scale >> 15 == 0
    assert centered.sum() == 127
    assert not centered[0, 0, 10]
    short, restored = k[0, 0, 10], encoded.codec.decode(encoded)[0, 0, 10]
    assert np.linalg.norm(restored - short) < 0.25 * np.linalg.norm(short)


def test_a_zero_key_among_large_ones_stays_zero():
    k = keys_with_offset()
    k[:, :, 77] = 0
    codec = kv.codec("int2", equalize=False)
    assert not codec.decode(codec.encode(k, side="key"))[0, 0, 77].any()


def test_scores_of_keys_that_are_not_centered_leave_the_center_out():
    k = keys_with_offset()
    k[:, :, ::5] *= 0.01
    encoded = kv.codec("int4", equalize=False).encode(k, side="key")
    q = np.random.default_rng(2).standard_normal((1, 2, 3, 64)).astype(np.float32)
    exact = kv.scores(q, encoded.codec.decode(encoded))
    np.testing.assert_allclose(kv.scores(q, encoded, query_bits=None), exact, atol=1e-4)
