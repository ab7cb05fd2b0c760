"""Rotations: the fast Walsh-Hadamard transform and its randomized form."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcodec import _backend, _validate
from kvcodec.codebook import HEAD_DIMS
from kvcodec.reference.fwht import factor_order, inverse_square_root, paley_matrix
from kvcodec.reference.srht import srht_signs as _srht_signs

__all__ = [
    "fwht",
    "hadamard_matrix",
    "inverse_srht",
    "srht",
    "srht_signs",
    "supported_head_dims",
]


def _operands(
    x: NDArray[np.float32], out: NDArray[np.float32] | None
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Input and output: the same memory, or memory that does not overlap."""
    if out is None:
        return x, np.empty_like(x)
    _validate.output_array(out, "out", x.shape)
    if out is x:
        return x, out
    same = x.ctypes.data == out.ctypes.data
    return x.copy() if not same and np.may_share_memory(x, out) else x, out


def fwht(
    x: ArrayLike, *, out: NDArray[np.float32] | None = None, backend: str | None = None
) -> NDArray[np.float32]:
    r"""Orthonormal fast Walsh-Hadamard transform of the last axis.

    Computes :math:`H x / \sqrt n` with a symmetric Hadamard matrix H, so that it preserves dot
    products and is its own inverse. It is defined in float32 with a fixed order of additions:
    both backends return the same bits.

    Parameters
    ----------
    x : array_like of float, shape (..., n)
        n = m * 2^k with m in 1, 12, 20, 28, 36, 44, 60.
    out : ndarray of float32, shape (..., n), optional
        Where to put the result; C-contiguous. ``out=x`` transforms in place.
    backend : {"auto", "fast", "reference"}, optional
        Which twin computes it; see `config_context`.

    Returns
    -------
    ndarray of float32, shape (..., n)
        The transform; `out` if that was given.

    Raises
    ------
    ValueError
        If no Hadamard matrix of order n is known here, or a value is not finite.
    TypeError
        If x does not hold floats or out is not float32.

    References
    ----------
    B. J. Fino, V. R. Algazi, IEEE Trans. Comput. C-25 (1976), for powers of two; R. E. A. C.
    Paley, J. Math. Phys. 12 (1933), for the other orders.

    Examples
    --------
    >>> import numpy as np
    >>> import kvcodec as kv
    >>> kv.fwht(np.array([4.0, 0.0, 0.0, 0.0]))
    array([2., 2., 2., 2.], dtype=float32)
    """
    x = _validate.float_array(x, "x")
    _validate.transform_order(x.shape[-1], "the last axis of x")
    x, out = _operands(x, out)
    _backend.resolve(backend).fwht(x, out)
    return out


def srht(
    x: ArrayLike,
    seed: int = 0,
    *,
    out: NDArray[np.float32] | None = None,
    backend: str | None = None,
) -> NDArray[np.float32]:
    r"""Randomized Hadamard rotation of the last axis: random signs, then the transform.

    Computes :math:`H D x / \sqrt n` with D the signs of `srht_signs`. Whatever x is, the
    coordinates of the result are nearly normal with variance :math:`\|x\|^2 / n`.

    Parameters
    ----------
    x : array_like of float, shape (..., n)
        n as in `fwht`.
    seed : int, default 0
        From 0 to 2^64 - 1.
    out : ndarray of float32, shape (..., n), optional
        Where to put the result; C-contiguous; may be x.
    backend : {"auto", "fast", "reference"}, optional
        Which twin computes it; see `config_context`.

    Returns
    -------
    ndarray of float32, shape (..., n)
        The rotated vectors; `inverse_srht` with the same seed undoes it.

    Raises
    ------
    ValueError
        If n is not supported, seed is out of range, or a value is not finite.
    TypeError
        If x does not hold floats or out is not float32.

    References
    ----------
    N. Ailon, B. Chazelle, SIAM J. Comput. 39 (2009), section 2.

    Examples
    --------
    >>> import numpy as np
    >>> import kvcodec as kv
    >>> x = np.ones(128)
    >>> bool(np.abs(kv.srht(x, seed=1)).max() < 4)  # a constant does not become a spike
    True
    """
    x = _validate.float_array(x, "x")
    signs = srht_signs(_validate.transform_order(x.shape[-1], "the last axis of x"), seed)
    x, out = _operands(x, out)
    _backend.resolve(backend).srht(x, signs, out)
    return out


def inverse_srht(
    y: ArrayLike,
    seed: int = 0,
    *,
    out: NDArray[np.float32] | None = None,
    backend: str | None = None,
) -> NDArray[np.float32]:
    r"""Undo `srht`: the transform, then the signs, :math:`D H y / \sqrt n`.

    Parameters
    ----------
    y : array_like of float, shape (..., n)
        Rotated vectors.
    seed : int, default 0
        The seed they were rotated with.
    out : ndarray of float32, shape (..., n), optional
        Where to put the result; C-contiguous; may be y.
    backend : {"auto", "fast", "reference"}, optional
        Which twin computes it; see `config_context`.

    Returns
    -------
    ndarray of float32, shape (..., n)
        The vectors before rotation, up to float32 rounding.

    Raises
    ------
    ValueError
        If n is not supported, seed is out of range, or a value is not finite.
    TypeError
        If y does not hold floats or out is not float32.

    References
    ----------
    N. Ailon, B. Chazelle, SIAM J. Comput. 39 (2009), section 2.

    Examples
    --------
    >>> import numpy as np
    >>> import kvcodec as kv
    >>> x = np.arange(8, dtype=np.float32)
    >>> np.allclose(kv.inverse_srht(kv.srht(x, 5), 5), x, atol=1e-5)
    True
    """
    y = _validate.float_array(y, "y")
    signs = srht_signs(_validate.transform_order(y.shape[-1], "the last axis of y"), seed)
    y, out = _operands(y, out)
    _backend.resolve(backend).inverse_srht(y, signs, out)
    return out


def srht_signs(n: int, seed: int = 0) -> NDArray[np.float32]:
    """The random signs of `srht`, +1 or -1.

    Sign i is -1 where the top bit of SplitMix64(seed + i) is set, which an engine in any language
    reproduces in three lines.

    Parameters
    ----------
    n : int
        How many, at least 1.
    seed : int, default 0
        From 0 to 2^64 - 1.

    Returns
    -------
    ndarray of float32, shape (n,)
        The signs.

    Raises
    ------
    ValueError
        If n or seed is out of range.

    References
    ----------
    G. L. Steele, D. Lea, C. H. Flood, OOPSLA 2014, figure 17 (SplitMix64).

    Examples
    --------
    >>> import kvcodec as kv
    >>> kv.srht_signs(8, seed=0)
    array([-1., -1., -1.,  1.,  1.,  1., -1.,  1.], dtype=float32)
    """
    n = _validate.integer(n, "n", 1)
    return _srht_signs(n, _validate.integer(seed, "seed", 0, 2**64 - 1))


def hadamard_matrix(n: int) -> NDArray[np.float32]:
    """The symmetric orthonormal matrix that `fwht` multiplies with.

    Parameters
    ----------
    n : int
        The order, m * 2^k with m in 1, 12, 20, 28, 36, 44, 60.

    Returns
    -------
    ndarray of float32, shape (n, n)
        Entries +1/sqrt(n) and -1/sqrt(n).

    Raises
    ------
    ValueError
        If no Hadamard matrix of order n is known here.

    References
    ----------
    R. E. A. C. Paley, J. Math. Phys. 12 (1933), constructions I and II; J. J. Sylvester,
    Philos. Mag. 34 (1867), for powers of two.

    Examples
    --------
    >>> import kvcodec as kv
    >>> kv.hadamard_matrix(4) * 2
    array([[ 1.,  1.,  1.,  1.],
           [ 1., -1.,  1., -1.],
           [ 1.,  1., -1., -1.],
           [ 1., -1., -1.,  1.]], dtype=float32)
    """
    n = _validate.transform_order(_validate.integer(n, "n", 1), "n")
    m, power = factor_order(n)
    matrix = paley_matrix(m)
    for _ in range(power.bit_length() - 1):
        matrix = np.kron(matrix, np.array([[1, 1], [1, -1]], dtype=np.int8))
    return matrix * inverse_square_root(n)


def supported_head_dims() -> list[int]:
    """The sizes from 16 to 1024 that can be rotated and for which codebooks exist.

    Returns
    -------
    list of int
        In ascending order.

    Examples
    --------
    >>> import kvcodec as kv
    >>> {64, 72, 80, 96, 112, 128, 160, 192, 256, 512, 576} <= set(kv.supported_head_dims())
    True
    """
    return list(HEAD_DIMS)
