r"""Lloyd-Max codebooks for the coordinates of a unit vector.

A vector that a random rotation has spread evenly is, once divided by its norm, a uniformly
distributed point of the unit sphere in :math:`R^d`. Each of its coordinates then has the density

.. math:: f(x) = (1 - x^2)^{(d - 3) / 2} / B(1/2, (d - 1)/2), \qquad -1 \le x \le 1,

whatever the data were. Its variance is exactly :math:`1/d`, and it tends to a Gaussian as
:math:`d` grows. Shifted to [0, 1] it is the distribution Beta((d-1)/2, (d-1)/2).

Because the density is known, the scalar quantizer with the least mean squared error can be solved
for once and shipped as constants. It satisfies two conditions [1]_ [2]_:

* a boundary is the midpoint of its two neighboring centroids (nearest neighbor), and
* a centroid is the mean of the density over its cell (center of mass).

Alternating the two is Lloyd's algorithm, whose error shrinks only by a constant factor each time,
a factor that approaches 1 as the number of levels grows. Here the two are solved together by
Newton's method, which is cheap because every quantity has a closed form.

The density is even, so is the quantizer: only its positive half is solved for.
``lloyd_max`` finds the centroids and ``snap`` moves them onto an integer grid.

References
----------
.. [1] S. P. Lloyd, "Least squares quantization in PCM", IEEE Transactions on Information Theory
   28(2), 1982, pp. 129-137.
.. [2] J. Max, "Quantizing for minimum distortion", IRE Transactions on Information Theory 6(1),
   1960, pp. 7-12.
.. [3] P. F. Panter and W. Dite, "Quantization distortion in pulse-count modulation with nonuniform
   spacing of levels", Proceedings of the IRE 39(1), 1951, pp. 44-48.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaincc, betaincinv, xlog1py

__all__ = [
    "density",
    "distortion",
    "lloyd_max",
    "lloyd_step",
    "snap",
    "upper_mass",
    "upper_moment",
]

Floats = NDArray[np.float64]
Levels = NDArray[np.int64]

MAX_LEVEL = 127


@cache
def _normalizer(head_dim: int) -> float:
    """Return B(1/2, (d-1)/2), the integral of (1 - x^2)^((d-3)/2) over [-1, 1].

    The recurrence B(1/2, (d+1)/2) = B(1/2, (d-1)/2) (d-1)/d keeps the digits that a difference of
    log-gammas would lose.
    """
    first, value = (2, math.pi) if head_dim % 2 == 0 else (3, 2.0)
    return value * math.prod((dim - 1) / dim for dim in range(first, head_dim, 2))


def _power(exponent: float, x: Floats) -> Floats:
    """Return (1 - x^2)^exponent; large exponents would magnify the rounding of 1 - x^2."""
    return np.exp(xlog1py(exponent, -x * x))


def density(head_dim: int, x: ArrayLike) -> Floats:
    """Return the density of one coordinate of a uniform unit vector.

    Parameters
    ----------
    head_dim : int
        Dimension of the vector, at least 2.
    x : array_like
        Points in (-1, 1).

    Returns
    -------
    ndarray of float64
        The density at each point.

    Examples
    --------
    In three dimensions every coordinate is uniform on [-1, 1] (Archimedes' hat box):

    >>> density(3, [0.0, 0.5]).tolist()
    [0.5, 0.5]
    """
    x = np.asarray(x, dtype=np.float64)
    return _power(0.5 * (head_dim - 3), x) / _normalizer(head_dim)


def upper_mass(head_dim: int, x: ArrayLike) -> Floats:
    """Return P(X > x) for x in [0, 1], a regularized incomplete beta function.

    Half the upper tail of X^2, which is Beta(1/2, (d-1)/2). Counting from the outside keeps the
    relative precision where the tail is thin.

    Parameters
    ----------
    head_dim : int
        Dimension of the vector, at least 2.
    x : array_like
        Points in [0, 1].

    Returns
    -------
    ndarray of float64
        The probability above each point.

    Examples
    --------
    >>> upper_mass(3, [0.0, 0.5, 1.0]).tolist()
    [0.5, 0.25, 0.0]
    """
    x = np.asarray(x, dtype=np.float64)
    return 0.5 * betaincc(0.5, 0.5 * (head_dim - 1), x * x)


def upper_moment(head_dim: int, x: ArrayLike) -> Floats:
    """Return E[X; X > x], the partial first moment, which is elementary.

    The integrand x (1 - x^2)^((d-3)/2) has the antiderivative -(1 - x^2)^((d-1)/2) / (d - 1).

    Parameters
    ----------
    head_dim : int
        Dimension of the vector, at least 2.
    x : array_like
        Points in [0, 1].

    Returns
    -------
    ndarray of float64
        The first moment of the part of the density above each point.

    Examples
    --------
    >>> upper_moment(3, [0.0, 1.0]).tolist()
    [0.25, 0.0]
    """
    x = np.asarray(x, dtype=np.float64)
    return _power(0.5 * (head_dim - 1), x) / ((head_dim - 1) * _normalizer(head_dim))


def _cells(head_dim: int, boundaries: Floats) -> tuple[Floats, Floats]:
    """Return the mass and first moment of the cells that positive boundaries cut [0, 1] into."""
    zero = np.zeros((*boundaries.shape[:-1], 1))
    edges = np.concatenate([zero, np.minimum(boundaries, 1.0), zero + 1.0], axis=-1)
    return -np.diff(upper_mass(head_dim, edges)), -np.diff(upper_moment(head_dim, edges))


def _midpoints(values: NDArray) -> Floats:
    return 0.5 * (values[..., :-1] + values[..., 1:])


def distortion(head_dim: int, values: ArrayLike) -> Floats:
    """Return the mean squared error of a symmetric nearest-neighbor quantizer, times d.

    The factor d, the inverse variance, makes errors of different dimensions comparable: it is the
    error relative to the vector's energy.

    Parameters
    ----------
    head_dim : int
        Dimension of the vector, at least 2.
    values : array_like, shape (..., n / 2)
        Positive half of the reconstruction values, ascending.

    Returns
    -------
    ndarray of float64, shape (...)
        d E[(X - Q(X))^2].

    Examples
    --------
    Two bits on a uniform density: steps of one half, and an error of step^2 / 12.

    >>> round(float(distortion(3, [0.25, 0.75]) / 3), 12) == round(0.5**2 / 12, 12)
    True
    """
    values = np.asarray(values, dtype=np.float64)
    mass, moment = _cells(head_dim, _midpoints(values))
    # E[(X - c)^2] = E[X^2] - 2 c E[X] + c^2 in each cell; E[X^2] adds up to 1/d.
    return 1.0 - 2.0 * head_dim * np.sum(values * (2.0 * moment - values * mass), axis=-1)


def lloyd_step(head_dim: int, centroids: ArrayLike) -> Floats:
    """Return one step of Lloyd's algorithm: midpoints, then the means of the cells.

    Parameters
    ----------
    head_dim : int
        Dimension of the vector, at least 2.
    centroids : array_like, shape (n / 2,)
        Positive half of the centroids, ascending.

    Returns
    -------
    ndarray of float64, shape (n / 2,)
        The improved centroids. The optimum is the fixed point.

    References
    ----------
    .. [1] S. P. Lloyd, "Least squares quantization in PCM", 1982, method I.

    Examples
    --------
    >>> lloyd_step(3, [0.25, 0.75]).tolist()
    [0.25, 0.75]
    """
    mass, moment = _cells(head_dim, _midpoints(np.asarray(centroids, dtype=np.float64)))
    return moment / mass


def _lloyd_jacobian(head_dim: int, centroids: Floats) -> Floats:
    """Return the Jacobian of ``lloyd_step``: tridiagonal, since a cell has two boundaries.

    A cell's mean moves with a boundary b by f(b) |b - mean| / mass, and a boundary moves by half
    of what either of its two centroids does.
    """
    boundaries = _midpoints(centroids)
    mass, moment = _cells(head_dim, boundaries)
    mean = moment / mass
    weight = 0.5 * density(head_dim, boundaries)
    below = weight * (boundaries - mean[:-1]) / mass[:-1]
    above = weight * (mean[1:] - boundaries) / mass[1:]
    diagonal = np.append(below, 0.0) + np.insert(above, 0, 0.0)
    return np.diag(diagonal) + np.diag(below, 1) + np.diag(above, -1)


def lloyd_max(head_dim: int, bits: int) -> Floats:
    """Solve for the Lloyd-Max centroids of a coordinate of a uniform unit vector.

    Parameters
    ----------
    head_dim : int
        Dimension of the vector, at least 2.
    bits : int
        Bits of a code, 1 to 7.

    Returns
    -------
    ndarray of float64, shape (2 ** (bits - 1),)
        Positive half of the centroids, ascending, in coordinates of the unit vector.

    Raises
    ------
    RuntimeError
        If Newton's method does not reach a residual of 1e-13 / sqrt(d).

    Notes
    -----
    For a fine quantizer the best density of levels is proportional to f^(1/3) [1]_. The cube root
    of the density of a coordinate in d dimensions is that of one in d/3 + 2 dimensions, so evenly
    spaced quantiles of the latter are the starting point, close enough for undamped Newton steps.

    References
    ----------
    .. [1] P. F. Panter and W. Dite, "Quantization distortion in pulse-count modulation with
       nonuniform spacing of levels", 1951.

    Examples
    --------
    A uniform density has evenly spaced centroids; a large d approaches the Gaussian's 0.4528 and
    1.510 (Max 1960, table I).

    >>> lloyd_max(3, 2).round(12).tolist()
    [0.25, 0.75]
    >>> (lloyd_max(10**5, 2) * 10**2.5).round(3).tolist()
    [0.453, 1.51]
    """
    half = 2 ** (bits - 1)
    quantiles = (np.arange(half) + 0.5) / half
    centroids = np.sqrt(betaincinv(0.5, 0.5 * (head_dim / 3 + 1), quantiles))
    for _ in range(50):
        error = centroids - lloyd_step(head_dim, centroids)
        if np.abs(error).max() * math.sqrt(head_dim) < 1e-14:
            break
        jacobian = np.eye(half) - _lloyd_jacobian(head_dim, centroids)
        centroids = centroids - np.linalg.solve(jacobian, error)
    residual = np.abs(centroids - lloyd_step(head_dim, centroids)).max() * math.sqrt(head_dim)
    if not residual < 1e-13:
        raise RuntimeError(
            f"the Lloyd-Max conditions for head_dim={head_dim}, bits={bits} are met only to "
            f"{residual:.1e} / sqrt(d)"
        )
    return centroids


def _best_steps(head_dim: int, levels: Levels, centroids: Floats) -> Floats:
    """Return the step of least distortion for each row of levels, by Newton's method.

    With boundaries at the midpoints their movement costs nothing (the envelope theorem), so the
    distortion is stationary where sum_i l_i (moment_i - step l_i mass_i) = 0. The start is the
    solution of this equation with the cells of the centroids.
    """
    mass, moment = _cells(head_dim, _midpoints(centroids))
    steps = np.sum(levels * moment, axis=-1) / np.sum(levels**2 * mass, axis=-1)
    middles, gaps = _midpoints(levels), np.diff(levels)
    for _ in range(50):
        boundaries = np.minimum(steps[:, None] * middles, 1.0)
        mass, moment = _cells(head_dim, boundaries)
        gradient = np.sum(levels * (moment - steps[:, None] * levels * mass), axis=-1)
        curvature = np.sum(levels**2 * mass, axis=-1) - steps * np.sum(
            density(head_dim, boundaries) * gaps * middles**2, axis=-1
        )
        update = np.clip(gradient / curvature, -0.1 * steps, 0.1 * steps)
        steps = steps + update
        if np.all(np.abs(update) < 1e-14 * steps):
            break
    return steps


def snap(head_dim: int, centroids: ArrayLike) -> tuple[Levels, float]:
    """Move centroids onto an integer grid at the least cost in mean squared error.

    Integer levels let attention multiply codes as int8. Boundaries are the midpoints of the
    levels, so they are exact multiples of one half in units of the step.

    Parameters
    ----------
    head_dim : int
        Dimension of the vector, at least 2.
    centroids : array_like, shape (n / 2,)
        Positive half of the centroids, ascending.

    Returns
    -------
    levels : ndarray of int64, shape (n / 2,)
        Positive half of the levels, ascending, at most 127.
    step : float
        The step with the least error for these levels: ``levels * step`` are near ``centroids``.

    Raises
    ------
    ValueError
        If the grid is too coarse to tell the centroids apart.

    Notes
    -----
    Rounding ``scale * centroids`` gives a new set of levels only where one of the products passes
    an integer and a half. One scale between each two such points therefore tries every rounding
    there is. Of scales that are equally good, to a relative 1e-9, the smallest is taken.

    Examples
    --------
    >>> levels, step = snap(3, [0.25, 0.75])
    >>> levels.tolist(), step
    ([1, 3], 0.25)
    """
    centroids = np.asarray(centroids, dtype=np.float64)
    turns = ((np.arange(MAX_LEVEL + 1) + 0.5) / centroids[:, None]).ravel()
    scales = _midpoints(np.unique(turns[turns <= (MAX_LEVEL + 0.5) / centroids[-1]]))
    levels = np.rint(scales[:, None] * centroids).astype(np.int64)
    # The smallest scales round neighbors to the same level.
    usable = (levels[:, 0] > 0) & np.all(np.diff(levels) > 0, axis=-1)
    levels = levels[usable]
    if len(levels) == 0:
        raise ValueError(f"centroids lie too close together for levels up to {MAX_LEVEL}")
    steps = _best_steps(head_dim, levels, centroids)
    errors = distortion(head_dim, steps[:, None] * levels)
    best = int(np.flatnonzero(errors <= errors.min() * (1.0 + 1e-9))[0])
    return levels[best], float(steps[best])
