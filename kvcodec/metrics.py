"""How far an approximation is from what it stands for: errors, angles and divergences.

All of them compute in float64, whatever the dtype of the arrays.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcodec import _validate

__all__ = ["cosine_similarity", "kl_divergence", "relative_error", "relative_mse"]

LARGEST_LOG_PROBABILITY = 0.01
"""Log probabilities that were rounded to bfloat16 may lie a little above 0."""


def relative_error(approximation: ArrayLike, exact: ArrayLike) -> float:
    r"""Relative error in the Frobenius norm, :math:`\|a - b\| / \|b\|`.

    Parameters
    ----------
    approximation : array_like of float
        The approximation a.
    exact : array_like of float, of the same shape
        What it approximates, b.

    Returns
    -------
    float
        The error: 0 where both are zero or hold nothing, infinity where only `exact` is zero.

    Raises
    ------
    ValueError
        If the shapes differ or a value is not finite.
    TypeError
        If an array does not hold floats.

    References
    ----------
    G. H. Golub, C. F. Van Loan, Matrix Computations, 4th edition, section 2.3.

    Examples
    --------
    >>> from kvcodec.metrics import relative_error
    >>> relative_error([3.0, 5.0], [3.0, 4.0])
    0.2
    """
    approximation, exact = _pair(approximation, exact)
    error = float(np.linalg.norm(approximation - exact))
    size = float(np.linalg.norm(exact))
    if size == 0.0:
        return 0.0 if error == 0.0 else float("inf")
    return error / size


def relative_mse(approximation: ArrayLike, exact: ArrayLike) -> float:
    r"""Mean squared error relative to the mean square, :math:`\|a - b\|^2 / \|b\|^2`.

    For numbers of mean zero this is the error relative to the variance, in which the distortion of
    quantizers is published: 0.1175, 0.0345 and 0.0095 for Lloyd-Max at 2, 3 and 4 bits.

    Parameters
    ----------
    approximation : array_like of float
        The approximation a.
    exact : array_like of float, of the same shape
        What it approximates, b.

    Returns
    -------
    float
        The square of `relative_error`.

    Raises
    ------
    ValueError
        If the shapes differ or a value is not finite.
    TypeError
        If an array does not hold floats.

    References
    ----------
    J. Max, IRE Trans. Inf. Theory IT-6 (1960), table I, for the published distortions.

    Examples
    --------
    >>> import numpy as np
    >>> import kvcodec as kv
    >>> from kvcodec.metrics import relative_mse
    >>> x = np.random.default_rng(0).standard_normal((1000, 128))
    >>> codes, scale = kv.quantize_lloyd_max(x, bits=2)
    >>> round(relative_mse(kv.dequantize_lloyd_max(codes, scale, bits=2), x), 2)
    0.12
    """
    return relative_error(approximation, exact) ** 2


def cosine_similarity(approximation: ArrayLike, exact: ArrayLike) -> float:
    r"""Mean cosine of the angle between the vectors of the last axis.

    Parameters
    ----------
    approximation : array_like of float, shape (..., n)
        The approximating vectors a.
    exact : array_like of float, shape (..., n)
        What they approximate, b.

    Returns
    -------
    float
        Mean of :math:`a \cdot b / (\|a\| \|b\|)` over the vectors. A pair of zero vectors counts
        1, a pair of which one is zero counts 0.

    Raises
    ------
    ValueError
        If the shapes differ, there is no vector, or a value is not finite.
    TypeError
        If an array does not hold floats.

    References
    ----------
    G. Salton, M. J. McGill, Introduction to Modern Information Retrieval (1983), section 4.

    Examples
    --------
    >>> from kvcodec.metrics import cosine_similarity
    >>> cosine_similarity([[1.0, 0.0], [0.0, 2.0]], [[3.0, 0.0], [1.0, 0.0]])
    0.5
    """
    approximation, exact = _pair(approximation, exact)
    if exact.ndim == 0 or exact.size == 0:
        raise ValueError(f"exact must hold at least one vector, but has shape {exact.shape}.")
    products = (approximation * exact).sum(axis=-1)
    sizes = np.linalg.norm(approximation, axis=-1), np.linalg.norm(exact, axis=-1)
    lengths = sizes[0] * sizes[1]
    cosines = np.clip(products / np.where(lengths > 0, lengths, 1), -1, 1)
    both_zero = (sizes[0] == 0) & (sizes[1] == 0)
    return float(np.where(both_zero, 1, cosines).mean())


def kl_divergence(
    log_p: ArrayLike, log_q: ArrayLike, axis: int = -1
) -> np.float64 | NDArray[np.float64]:
    r"""Kullback-Leibler divergence :math:`\sum_i p_i (\log p_i - \log q_i)` in nats.

    The sum is over the entries that are finite in both. Masked entries have minus infinity in
    both, and some models have entries of the vocabulary that are dead; neither makes it NaN.

    Parameters
    ----------
    log_p : array_like of float
        Log probabilities of the exact distribution P; not logits.
    log_q : array_like of float, of the same shape
        Log probabilities of the approximating distribution Q.
    axis : int, default -1
        The axis over which a distribution extends.

    Returns
    -------
    float64, or ndarray of float64
        KL(P || Q) of each pair of distributions, of the shape without `axis`.

    Raises
    ------
    ValueError
        If the shapes differ, axis is out of range, or an entry is above 0 and so is no log
        probability.
    TypeError
        If an array does not hold floats.

    References
    ----------
    S. Kullback, R. A. Leibler, Ann. Math. Stat. 22 (1951), equation 2.4.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcodec.metrics import kl_divergence
    >>> p, q = np.array([0.5, 0.5, 0.0]), np.array([0.25, 0.75, 0.0])
    >>> with np.errstate(divide="ignore"):
    ...     print(kl_divergence(np.log(p), np.log(q)).round(4))
    0.1438
    """
    log_p, log_q = _float64(log_p, "log_p"), _float64(log_q, "log_q")
    _validate.shaped(log_q, "log_q", log_p.shape)
    if log_p.ndim == 0:
        raise ValueError("log_p must have at least 1 dimension, but is a scalar.")
    axis = _validate.integer(axis, "axis", -log_p.ndim, log_p.ndim - 1)
    finite = np.isfinite(log_p) & np.isfinite(log_q)
    log_p, log_q = np.where(finite, log_p, 0), np.where(finite, log_q, 0)
    for array, name in ((log_p, "log_p"), (log_q, "log_q")):
        if array.max(initial=0) > LARGEST_LOG_PROBABILITY:
            raise ValueError(
                f"{name} must hold log probabilities, none above 0, but holds {array.max():g}."
            )
    # Entries that do not count were set to log_p = log_q = 0 and add nothing.
    return (np.exp(log_p) * (log_p - log_q)).sum(axis=axis)


def _float64(x: ArrayLike, name: str) -> NDArray[np.float64]:
    """A float64 array of whatever float dtype was given, finite or not."""
    try:
        array = np.asarray(x)
    except (ValueError, TypeError) as error:
        raise TypeError(f"{name} must be an array of floats, but is no array: {error}.") from None
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
        raise TypeError(f"{name} must be an array of floats, but has dtype {array.dtype}.")
    return array.astype(np.float64)


def _pair(
    approximation: ArrayLike, exact: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Two float64 arrays of one shape whose squares can be summed."""
    arrays = _float64(approximation, "approximation"), _float64(exact, "exact")
    _validate.shaped(arrays[0], "approximation", arrays[1].shape)
    for array, name in zip(arrays, ("approximation", "exact"), strict=True):
        largest = np.abs(array).max(initial=0)
        if not largest < _validate.LARGEST_MAGNITUDE:
            given = "a NaN" if np.isnan(largest) else f"a magnitude of {largest:g}"
            raise ValueError(
                f"{name} must hold finite values below 2^100 (about 1.27e30) in magnitude, "
                f"but holds {given}."
            )
    return arrays
