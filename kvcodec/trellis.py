"""Trellis codes for vectors that have been rotated at random, and their level tables."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcodec import _backend, _validate
from kvcodec.codebook import HEAD_DIMS
from kvcodec.quantize import LLOYD_MAX_SCALE_RULES, SCALE_DTYPES, scale_array, vector_array

__all__ = ["TrellisTable", "dequantize_trellis", "quantize_trellis", "trellis_table"]

BITS = (2, 3, 4)


@dataclass(frozen=True, eq=False)
class TrellisTable:
    """The levels that the windows of a trellis code decode to.

    Attributes
    ----------
    bits : int
        Bits of a code.
    levels : ndarray of int8, shape (256,)
        The level of each window, the byte of the last 8 bits of the stream; read-only. Windows
        that differ in the newest bit have opposite levels.
    unit : float
        Size of one level for elements of variance 1.
    mse : float
        Mean squared error for Gaussian vectors of 128 elements of variance 1.

    Examples
    --------
    >>> import kvcodec as kv
    >>> table = kv.trellis_table(4)
    >>> table.bits, table.levels.dtype
    (4, dtype('int8'))
    >>> bool((table.levels[:128] == -table.levels[128:]).all())
    True
    """

    bits: int
    levels: NDArray[np.int8]
    unit: float
    mse: float

    def __post_init__(self) -> None:
        self.levels.flags.writeable = False

    def step(self, head_dim: int) -> float:
        """Size of one level for a vector of norm 1.

        Parameters
        ----------
        head_dim : int
            Elements of the vector.

        Returns
        -------
        float
            unit / sqrt(head_dim).

        Examples
        --------
        >>> import kvcodec as kv
        >>> table = kv.trellis_table(2)
        >>> table.step(64) == table.unit / 8
        True
        """
        return self.unit / sqrt(head_dim)


@cache
def _shipped() -> dict[str, Any]:
    path = files("kvcodec.reference") / "data" / "trellis.json"
    return json.loads(path.read_text(encoding="utf-8"))["tables"]


@cache
def _load(bits: int) -> TrellisTable:
    record = _shipped()[str(bits)]
    half = np.array(record["levels"], dtype=np.int8)
    return TrellisTable(bits, np.concatenate([half, -half]), record["unit"], record["mse"])


def trellis_table(bits: int) -> TrellisTable:
    """The level table of the trellis code of so many bits; it serves all sizes.

    Parameters
    ----------
    bits : {2, 3, 4}
        Bits of a code.

    Returns
    -------
    TrellisTable
        The table. Repeated calls return the same object.

    Raises
    ------
    ValueError
        If there is none for `bits`.

    See Also
    --------
    kvcodec.reference.trellis_training : How the tables are trained.

    References
    ----------
    Y. Linde, A. Buzo and R. Gray, "An algorithm for vector quantizer design", IEEE Trans. Commun.
    28 (1980), for the training.

    Examples
    --------
    >>> import kvcodec as kv
    >>> table = kv.trellis_table(2)
    >>> table.levels.shape, table.mse < 0.076
    ((256,), True)
    """
    return _load(int(_validate.choice(bits, "bits", BITS)))


def trellis_step(head_dim: int, bits: int) -> float:
    """Size of one level for a vector of norm 1 and of a size that can be encoded."""
    return trellis_table(bits).step(_validate.choice(head_dim, "head_dim", HEAD_DIMS))


def quantize_trellis(
    x: ArrayLike,
    bits: int,
    *,
    scale_rule: str = "norm",
    scale_dtype: str = "bfloat16",
    backend: str | None = None,
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    r"""Trellis codes for vectors that have been rotated at random.

    Element i decodes to ``levels[window] * scale``, where the window is the byte of the last 8 bits
    of the vector's codes up to and including its own. The codes of a vector are a ring: before the
    first come the last. They are found together, as the path of least squared error from a state
    back to it.

    Parameters
    ----------
    x : array_like of float, shape (..., n)
        Rotated vectors (see `srht`); n one of `supported_head_dims`.
    bits : {2, 3, 4}
        Bits a code.
    scale_rule : {"norm", "least_squares", "norm_preserving", "unbiased"}, default "norm"
        "norm" takes the vector's norm for scale. The others are multipliers of the chosen levels
        y: <x, y> / <y, y>, the least squared error; \|x\| / \|y\|, which keeps the norm; and
        \|x\|^2 / <x, y>, which keeps the projection on x.
    scale_dtype : {"bfloat16", "float32"}, default "bfloat16"
        What the scale is rounded up to; the codes are fitted to the rounded norm.
    backend : {"auto", "fast", "reference"}, optional
        Which twin computes it; see `config_context`.

    Returns
    -------
    codes : ndarray of uint8, shape (..., n)
        The bits that each element owns; `pack` makes the bit stream of them.
    scale : ndarray of float32, shape (...)
        The scales; 0 for a vector of zeros.

    Raises
    ------
    ValueError
        If n or an option is not one of the allowed ones, or a value is not finite.
    TypeError
        If x does not hold floats.

    References
    ----------
    M. Marcellin and T. Fischer, "Trellis coded quantization of memoryless and Gauss-Markov
    sources", IEEE Trans. Commun. 38 (1990); A. Tseng et al., QTIP, arXiv:2406.11235, section 3.

    Examples
    --------
    >>> import numpy as np
    >>> import kvcodec as kv
    >>> x = np.random.default_rng(0).standard_normal((1000, 128))
    >>> codes, scale = kv.quantize_trellis(x, bits=2)
    >>> error = kv.dequantize_trellis(codes, scale, bits=2) - x
    >>> bool(0.074 < np.mean(error**2) < 0.077)
    True
    """
    x = vector_array(x)
    bits = _validate.choice(bits, "bits", BITS)
    scale_rule = _validate.choice(scale_rule, "scale_rule", LLOYD_MAX_SCALE_RULES)
    scale_dtype = _validate.choice(scale_dtype, "scale_dtype", SCALE_DTYPES)
    step = trellis_step(x.shape[-1], bits)
    return _backend.resolve(backend).quantize_trellis(
        x, trellis_table(bits).levels, step, bits, scale_rule, scale_dtype
    )


def dequantize_trellis(
    codes: ArrayLike, scale: ArrayLike, bits: int, *, backend: str | None = None
) -> NDArray[np.float32]:
    """Look the levels of all windows up and multiply by the scale.

    Parameters
    ----------
    codes : array_like of uint8, shape (..., n)
        From `quantize_trellis`.
    scale : array_like of float, shape (...)
        Likewise.
    bits : {2, 3, 4}
        Bits a code.
    backend : {"auto", "fast", "reference"}, optional
        Which twin computes it; see `config_context`.

    Returns
    -------
    ndarray of float32, shape (..., n)
        The decoded vectors.

    Raises
    ------
    ValueError
        If n is not one of the allowed sizes, a code does not fit in bits, or the shapes do not fit.
    TypeError
        If codes are no integers or scale does not hold floats.

    References
    ----------
    A. Tseng et al., QTIP, arXiv:2406.11235, section 3.

    Examples
    --------
    >>> import numpy as np
    >>> import kvcodec as kv
    >>> kv.dequantize_trellis(np.zeros((1, 64), np.uint8), [0.0], bits=2).any()
    np.False_
    """
    bits = _validate.choice(bits, "bits", BITS)
    codes = _validate.code_array(codes, "codes", 2**bits - 1)
    _validate.choice(codes.shape[-1], "head_dim", HEAD_DIMS)
    scale = scale_array(scale, "scale", codes.shape[:-1])
    levels = trellis_table(bits).levels
    return _backend.resolve(backend).dequantize_trellis(codes, levels, scale, bits)
