"""Lloyd-Max codebooks, solved offline and shipped as constants."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcodec import _validate
from kvcodec.reference.fwht import factor_order

__all__ = ["BITS", "HEAD_DIMS", "Codebook", "codebook"]

BITS: tuple[int, ...] = (2, 3, 4)
"""Code widths for which a codebook is shipped."""

HEAD_DIMS: tuple[int, ...] = tuple(n for n in range(16, 1025) if factor_order(n) is not None)
"""Head dimensions for which a codebook is shipped: orders m * 2**k of the Hadamard transform."""


@dataclass(frozen=True, eq=False)
class Codebook:
    """Lloyd-Max quantizer of the coordinates of a uniformly distributed unit vector.

    A vector is divided by its norm, so its coordinates are about ``1 / sqrt(head_dim)`` in size.
    Such a coordinate ``x`` has as its code the number of ``boundaries`` less than ``x / step``,
    and the code decodes to ``levels[code] * step``. All arrays are ascending, antisymmetric and
    read-only.

    Attributes
    ----------
    head_dim : int
        Dimension of the vector.
    bits : int
        Bits of a code; there are ``2 ** bits`` levels.
    centroids : ndarray of float64, shape (2 ** bits,)
        Optimal reconstruction values before they were snapped to the grid of ``levels``.
    boundaries : ndarray of float64, shape (2 ** bits - 1,)
        Midpoints of adjacent levels in units of ``step``: multiples of 0.5.
    levels : ndarray of int8, shape (2 ** bits,)
        Reconstruction values in units of ``step``.
    step : float
        Size of one unit of ``levels`` and ``boundaries``.
    mse : float
        ``head_dim * E[(x - levels[code] * step)**2]``: the mean squared error relative to the
        variance ``1 / head_dim``, for a uniformly distributed vector.
    unsnapped_mse : float
        The same with ``centroids`` and their midpoints: the least that any quantizer with as many
        levels reaches.

    Examples
    --------
    >>> import kvcodec as kv
    >>> book = kv.codebook(128, 2)
    >>> book.levels, book.boundaries
    (array([-123,  -37,   37,  123], dtype=int8), array([-80.,   0.,  80.]))
    """

    head_dim: int
    bits: int
    centroids: NDArray[np.float64]
    boundaries: NDArray[np.float64]
    levels: NDArray[np.int8]
    step: float
    mse: float
    unsnapped_mse: float

    def __post_init__(self) -> None:
        for array in (self.centroids, self.boundaries, self.levels):
            array.flags.writeable = False


def codebook(head_dim: int, bits: int) -> Codebook:
    """Return the Lloyd-Max codebook for one head dimension and code width.

    Parameters
    ----------
    head_dim : int
        Dimension of the vectors, one of ``HEAD_DIMS``.
    bits : int
        Bits of a code: 2, 3 or 4.

    Returns
    -------
    Codebook
        The quantizer. Repeated calls return the same object.

    Raises
    ------
    ValueError
        If there is no codebook for ``head_dim`` or ``bits``.

    See Also
    --------
    kvcodec.reference.codebook_solver : How the codebooks are solved for.

    Notes
    -----
    A coordinate of a uniform unit vector in d dimensions has a density proportional to
    ``(1 - x**2) ** ((d - 3) / 2)`` and the variance ``1 / d``. Its optimal quantizer has its
    boundaries midway between its centroids, and its centroids at the means of their cells. The
    centroids are then snapped to integer multiples of a step, which adds less than 0.1% to the
    mean squared error.

    References
    ----------
    .. [1] S. P. Lloyd, "Least squares quantization in PCM", IEEE Transactions on Information
       Theory 28(2), 1982, pp. 129-137.
    .. [2] J. Max, "Quantizing for minimum distortion", IRE Transactions on Information Theory
       6(1), 1960, pp. 7-12: the conditions, and table I for the Gaussian limit.
    .. [3] A. Zandieh et al., "TurboQuant: Online vector quantization with near-optimal distortion
       rate", arXiv:2504.19874, 2025, equation (4).

    Examples
    --------
    >>> import numpy as np
    >>> book = codebook(128, 2)
    >>> book.levels.tolist(), book.boundaries.tolist()
    ([-123, -37, 37, 123], [-80.0, 0.0, 80.0])
    >>> round(book.mse, 4)
    0.116

    Quantize a vector and reconstruct it:

    >>> x = np.sin(np.arange(128) ** 2)
    >>> norm = np.linalg.norm(x)
    >>> codes = np.searchsorted(book.boundaries, x / (norm * book.step))
    >>> y = book.levels[codes] * (book.step * norm)
    >>> bool(np.linalg.norm(x - y) < 0.5 * norm)
    True
    """
    head_dim = _validate.choice(head_dim, "head_dim", HEAD_DIMS)
    bits = _validate.choice(bits, "bits", BITS)
    return _load(head_dim, bits)


@cache
def _shipped() -> dict[str, Any]:
    path = files("kvcodec.reference") / "data" / "codebooks.json"
    return json.loads(path.read_text(encoding="utf-8"))["codebooks"]


@cache
def _load(head_dim: int, bits: int) -> Codebook:
    return from_record(head_dim, bits, _shipped()[str(head_dim)][str(bits)])


def from_record(head_dim: int, bits: int, record: Mapping[str, Any]) -> Codebook:
    """Build a codebook from its entry in ``codebooks.json``, which holds the positive half."""
    levels = _mirror(np.array(record["levels"], dtype=np.int8))
    wide = levels.astype(np.float64)
    return Codebook(
        head_dim=head_dim,
        bits=bits,
        centroids=_mirror(np.array(record["centroids"], dtype=np.float64)),
        boundaries=0.5 * (wide[:-1] + wide[1:]),
        levels=levels,
        step=record["step"],
        mse=record["mse"],
        unsnapped_mse=record["unsnapped_mse"],
    )


def _mirror(half: NDArray) -> NDArray:
    return np.concatenate([-half[::-1], half])
