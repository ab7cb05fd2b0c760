"""Metrics against independent oracles, at their edges, and what they refuse."""

import ml_dtypes
import numpy as np
import pytest
from scipy.special import log_softmax
from scipy.stats import entropy

from kvcodec.metrics import cosine_similarity, kl_divergence, relative_error, relative_mse

pairwise = pytest.mark.parametrize("metric", [relative_error, relative_mse, cosine_similarity])


@pytest.fixture
def vectors():
    return np.random.default_rng(0).standard_normal((2, 5, 7, 16))


@pytest.fixture
def distributions():
    return log_softmax(3 * np.random.default_rng(1).standard_normal((2, 6, 50)), axis=-1)


def test_relative_error_is_the_ratio_of_frobenius_norms(vectors):
    a, b = vectors
    expected = np.sqrt(((a - b) ** 2).sum() / (b**2).sum())
    assert relative_error(a, b) == pytest.approx(expected, rel=1e-14)
    assert relative_mse(a, b) == pytest.approx(expected**2, rel=1e-14)


def test_relative_error_at_zero():
    zeros, ones = np.zeros((3, 4)), np.ones((3, 4))
    assert relative_error(zeros, zeros) == 0
    assert relative_error(ones, zeros) == np.inf
    assert relative_error(zeros, ones) == 1
    assert relative_error(np.zeros((0, 4)), np.zeros((0, 4))) == 0


def test_errors_below_the_resolution_of_the_dtype_are_seen():
    exact = np.full(1000, 1.0)
    assert relative_error(exact + 1e-12, exact) == pytest.approx(1e-12, rel=1e-3)


@pytest.mark.parametrize("magnitude", [1e-30, 1e30])
def test_magnitude_does_not_matter(vectors, magnitude):
    a, b = vectors.astype(np.float32)
    size = np.float32(magnitude / 10)
    for metric in (relative_error, cosine_similarity):
        assert metric(a * size, b * size) == pytest.approx(metric(a, b), rel=1e-5)


def test_cosine_similarity_is_the_mean_over_vectors(vectors):
    a, b = vectors.reshape(2, -1, 16)
    expected = [x @ y / np.sqrt((x @ x) * (y @ y)) for x, y in zip(a, b, strict=True)]
    assert cosine_similarity(*vectors) == pytest.approx(np.mean(expected), rel=1e-13)


def test_cosine_similarity_of_zero_vectors():
    zero, one = np.zeros((1, 4)), np.ones((1, 4))
    assert cosine_similarity(zero, zero) == 1
    assert cosine_similarity(zero, one) == 0
    assert cosine_similarity(one, zero) == 0
    assert cosine_similarity(one, -one) == -1


def test_cosine_similarity_is_never_above_one(vectors):
    assert all(cosine_similarity(x, x) <= 1 for x in vectors[0].reshape(-1, 16))


def test_kl_divergence_agrees_with_scipy(distributions):
    log_p, log_q = distributions
    expected = entropy(np.exp(log_p), np.exp(log_q), axis=-1)
    np.testing.assert_allclose(kl_divergence(log_p, log_q), expected, rtol=1e-12)
    assert (expected > 0.1).all()


def test_kl_divergence_along_another_axis(distributions):
    log_p, log_q = distributions
    across = kl_divergence(log_p.T, log_q.T, axis=0)
    np.testing.assert_allclose(across, kl_divergence(log_p, log_q), rtol=1e-14)


def test_kl_divergence_of_equal_distributions_is_zero(distributions):
    assert (kl_divergence(distributions, distributions) == 0).all()


def test_kl_divergence_counts_only_entries_that_are_finite_in_both(distributions):
    log_p, log_q = distributions.copy()
    expected = entropy(np.exp(log_p), np.exp(log_q), axis=-1)
    padding = np.array([-np.inf, -np.inf, np.nan, -1.0, np.inf, -np.inf])
    other = np.array([-np.inf, -2.0, -1.0, np.nan, -np.inf, np.inf])
    log_p = np.concatenate([log_p, np.broadcast_to(padding, (6, 6))], axis=-1)
    log_q = np.concatenate([log_q, np.broadcast_to(other, (6, 6))], axis=-1)
    np.testing.assert_allclose(kl_divergence(log_p, log_q), expected, rtol=1e-12)


def test_kl_divergence_where_nothing_is_finite_is_zero():
    nothing = np.full((2, 3), -np.inf)
    assert (kl_divergence(nothing, nothing) == 0).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_every_float_dtype_is_taken_and_computed_in_float64(distributions, dtype):
    log_p, log_q = distributions.astype(dtype)
    result = kl_divergence(log_p, log_q)
    assert result.dtype == np.float64
    exact = kl_divergence(log_p.astype(np.float64), log_q.astype(np.float64))
    np.testing.assert_array_equal(result, exact)
    assert relative_error(log_p, log_q) == relative_error(
        log_p.astype(np.float64), log_q.astype(np.float64)
    )


@pairwise
def test_shapes_must_agree(metric):
    with pytest.raises(ValueError, match=r"approximation must have shape \(2, 3\)"):
        metric(np.zeros((3, 2)), np.zeros((2, 3)))


@pairwise
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 1e31])
def test_values_must_be_finite(metric, wrong):
    good = np.ones((2, 3))
    bad = good.copy()
    bad[1, 2] = wrong
    with pytest.raises(ValueError, match=r"^approximation must hold finite values"):
        metric(bad, good)
    with pytest.raises(ValueError, match=r"^exact must hold finite values"):
        metric(good, bad)


@pairwise
@pytest.mark.parametrize("wrong", [np.ones((2, 3), dtype=int), "text", None, [[1.0], [1.0, 2.0]]])
def test_arrays_must_hold_floats(metric, wrong):
    with pytest.raises(TypeError, match=r"^approximation must be an array of floats"):
        metric(wrong, np.ones((2, 3)))


@pytest.mark.parametrize("empty", [np.zeros((0, 4)), np.zeros((4, 0)), np.float64(1)])
def test_cosine_similarity_needs_a_vector(empty):
    with pytest.raises(ValueError, match=r"^exact must hold at least one vector"):
        cosine_similarity(empty, empty)


@pytest.mark.parametrize(
    ("log_p", "log_q", "options", "error", "message"),
    [
        ([-1.0], [-1.0, -1.0], {}, ValueError, "log_q must have shape"),
        (-1.0, -1.0, {}, ValueError, "log_p must have at least 1 dimension"),
        ([-1.0], [-1.0], {"axis": 1}, ValueError, "axis must be a whole number from -1 to 0"),
        ([3.0], [-1.0], {}, ValueError, "log_p must hold log probabilities"),
        ([-1.0], [3.0], {}, ValueError, "log_q must hold log probabilities"),
        ([-1], [-1.0], {}, TypeError, "log_p must be an array of floats"),
        ([-1.0], ["a"], {}, TypeError, "log_q must be an array of floats"),
    ],
)
def test_kl_divergence_refuses(log_p, log_q, options, error, message):
    with pytest.raises(error, match=f"^{message}"):
        kl_divergence(log_p, log_q, **options)
