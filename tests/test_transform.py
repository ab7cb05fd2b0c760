"""Rotations against dense matrices, SciPy and independent integer code."""

import ml_dtypes
import numpy as np
import pytest
from conftest import splitmix64
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import hadamard

import kvcodec as kv
from kvcodec.reference.fwht import factor_order, paley_matrix
from kvcodec.reference.srht import splitmix64 as reference_splitmix64
from kvcodec.testing import arrays, assert_same_bits, orders

pytestmark = pytest.mark.usefixtures("backend")

HEAD_DIMS = [64, 80, 96, 112, 128, 160, 192, 256, 512, 576]
ALL_ORDERS = [n for n in range(1, 1025) if factor_order(n)]
ROTATIONS = {"fwht": kv.fwht, "srht": kv.srht, "inverse_srht": kv.inverse_srht}

every_rotation = pytest.mark.parametrize("rotate", ROTATIONS.values(), ids=ROTATIONS)
every_head_dim = pytest.mark.parametrize("head_dim", HEAD_DIMS)
seeds = st.one_of(st.sampled_from([0, 1, 2**63, 2**64 - 1]), st.integers(0, 2**64 - 1))


def vectors(n, count=5, seed=0):
    return np.random.default_rng(seed).standard_normal((count, n), dtype=np.float32)


def signs(n, seed):
    return np.array([-1.0 if splitmix64((seed + i) % 2**64) >> 63 else 1.0 for i in range(n)])


def dense(x):
    """The transform by a matrix product in float64."""
    return x.astype(np.float64) @ kv.hadamard_matrix(x.shape[-1]).astype(np.float64)


def assert_close(actual, expected, x):
    """Equal up to float32 rounding of vectors x."""
    norm = np.linalg.norm(x.astype(np.float64), axis=-1, keepdims=True)
    assert (np.abs(actual - expected) <= 1e-6 * norm).all()


# The matrix


@pytest.mark.parametrize("n", ALL_ORDERS)
def test_matrix_is_a_symmetric_hadamard_matrix(n):
    matrix = np.rint(kv.hadamard_matrix(n) * np.sqrt(n)).astype(np.int64)
    assert_same_bits(kv.hadamard_matrix(n), matrix.astype(np.float32) * np.float32(n**-0.5))
    assert set(np.unique(matrix)) <= {-1, 1}
    assert (matrix == matrix.T).all()
    assert (matrix @ matrix.T == n * np.eye(n, dtype=np.int64)).all()


@pytest.mark.parametrize("n", [2**k for k in range(11)])
def test_matrix_of_a_power_of_two_is_scipys(n):
    assert_same_bits(kv.hadamard_matrix(n), (hadamard(n) / np.sqrt(n)).astype(np.float32))


def test_supported_head_dims_have_a_matrix_and_a_codebook():
    assert kv.supported_head_dims() == [n for n in ALL_ORDERS if n >= 16]
    assert set(HEAD_DIMS) <= set(kv.supported_head_dims())
    assert all(kv.codebook(n, bits=2).head_dim == n for n in kv.supported_head_dims())


# The transform


@pytest.mark.parametrize("n", ALL_ORDERS)
def test_fwht_is_the_dense_product(n):
    x = vectors(n)
    assert_close(kv.fwht(x), dense(x), x)


@pytest.mark.parametrize("n", [1, 2, 8, 20, 24, 48, 80, 112])
def test_fwht_adds_in_the_stated_order(n):
    m, power = factor_order(n)
    x = vectors(n, count=1)[0]
    y = [np.float32(entry) for entry in x]
    half = 1
    while half < power:
        for i in range(n):
            if i // half % 2 == 0:
                y[i], y[i + half] = y[i] + y[i + half], y[i] - y[i + half]
        half *= 2
    matrix = paley_matrix(m).astype(np.float32)
    expected = np.empty(n, np.float32)
    for i in range(n):
        row, column = divmod(i, power)
        total = matrix[row, 0] * y[column]
        for piece in range(1, m):
            total = total + matrix[row, piece] * y[piece * power + column]
        expected[i] = total * np.float32(1 / np.sqrt(n))
    assert_same_bits(kv.fwht(x), expected)


@every_head_dim
@every_rotation
def test_rotation_is_orthonormal(rotate, head_dim):
    matrix = rotate(np.eye(head_dim)).astype(np.float64)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(head_dim), atol=1e-6)


@every_head_dim
@every_rotation
def test_rotation_preserves_dot_products(rotate, head_dim):
    q, k = vectors(head_dim, seed=1), vectors(head_dim, seed=2)
    exact = (q.astype(np.float64) * k).sum(axis=-1)
    rotated = (rotate(q).astype(np.float64) * rotate(k)).sum(axis=-1)
    np.testing.assert_allclose(rotated, exact, atol=2e-6 * head_dim)


@given(data=st.data(), n=orders(), seed=seeds)
def test_transforms_invert_each_other(data, n, seed):
    x = data.draw(arrays((3, n)))
    assert_close(kv.fwht(kv.fwht(x)), x, x)
    assert_close(kv.inverse_srht(kv.srht(x, seed), seed), x, x)
    assert_close(kv.srht(kv.inverse_srht(x, seed), seed), x, x)


@given(n=orders(), seed=seeds)
def test_srht_takes_the_signs_first(n, seed):
    x = vectors(n)
    assert_close(kv.srht(x, seed), dense(x * signs(n, seed)), x)
    assert_close(kv.inverse_srht(x, seed), dense(x) * signs(n, seed), x)


@every_head_dim
def test_srht_spreads_a_constant_vector_and_fwht_does_not(head_dim):
    x = np.ones(head_dim, np.float32)
    if head_dim & (head_dim - 1) == 0:
        assert kv.fwht(x)[0] == pytest.approx(np.sqrt(head_dim))
    assert np.abs(kv.srht(x, seed=1)).max() < 5


def test_seed_decides_about_the_rotation():
    x = vectors(64)
    assert_same_bits(kv.srht(x, seed=3), kv.srht(x, seed=3))
    assert (kv.srht(x, seed=3) != kv.srht(x, seed=4)).any()
    assert_same_bits(kv.srht(x), kv.srht(x, seed=0))


# The signs


def test_splitmix64_gives_its_published_outputs():
    golden = 0x9E3779B97F4A7C15
    states = [0, golden, 2 * golden % 2**64]
    outputs = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [splitmix64(state) for state in states] == outputs
    assert reference_splitmix64(np.array(states, np.uint64)).tolist() == outputs


@given(n=st.integers(1, 600), seed=seeds)
def test_signs_are_the_top_bits_of_splitmix64(n, seed):
    assert_same_bits(kv.srht_signs(n, seed), signs(n, seed).astype(np.float32))


def test_signs_of_consecutive_seeds_overlap_by_one_step():
    assert_same_bits(kv.srht_signs(63, seed=8), kv.srht_signs(64, seed=7)[1:])


# Arguments and edges


@given(data=st.data(), n=orders(256))
@every_rotation
def test_out_receives_the_result_also_in_place(data, n, rotate):
    x = data.draw(arrays((2, 3, n)))
    expected = rotate(x)
    for out in (np.full_like(x, 7), x.copy()):
        source = x if out[0, 0, 0] == 7 else out
        assert rotate(source, out=out) is out
        assert_same_bits(out, expected)


@every_rotation
def test_out_may_overlap_the_input(rotate):
    x = vectors(64, count=6)
    for source, target in ((slice(0, 5), slice(1, 6)), (slice(1, 6), slice(0, 5))):
        buffer = x.copy()
        rotate(buffer[source], out=buffer[target])
        assert_same_bits(buffer[target], rotate(x[source]))


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ml_dtypes.bfloat16], ids=str)
@every_rotation
def test_any_float_dtype_gives_float32(rotate, dtype):
    x = vectors(80).astype(dtype)
    assert_same_bits(rotate(x), rotate(x.astype(np.float32)))


@pytest.mark.parametrize("shape", [(64,), (0, 64), (2, 0, 64), (1, 1, 1, 1), (3, 2, 1, 20)])
@every_rotation
def test_shape_is_kept(rotate, shape):
    y = rotate(np.zeros(shape))
    assert (y.shape, y.dtype) == (shape, np.float32)
    assert not y.any()


@given(data=st.data(), n=orders(), exponent=st.sampled_from([-97, 97]))
@every_rotation
def test_extreme_magnitudes_are_scaled_exactly(data, n, exponent, rotate):
    x = data.draw(arrays((2, n), kinds=["normal", "ties"]))
    factor = np.float32(2.0**exponent)
    assert_same_bits(rotate(x * factor), rotate(x) * factor)
