"""Scalar quantizers: symmetric INTn, asymmetric groups (KIVI) and Lloyd-Max codes."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcodec import _backend, _validate
from kvcodec.codebook import codebook
from kvcodec.reference.kivi import kivi_packed_tokens

__all__ = [
    "dequantize_asymmetric",
    "dequantize_lloyd_max",
    "dequantize_symmetric",
    "quantize_asymmetric",
    "quantize_kivi_keys",
    "quantize_lloyd_max",
    "quantize_symmetric",
]

SCALE_DTYPES = ("bfloat16", "float32")
ASYMMETRIC_BITS = (2, 4, 8)
GROUP_AXES = ("token", "channel")
LLOYD_MAX_SCALE_RULES = ("norm", "least_squares", "norm_preserving", "unbiased")


def quantize_symmetric(
    x: ArrayLike,
    bits: int,
    *,
    scale_dtype: str = "bfloat16",
    backend: str | None = None,
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    r"""Symmetric INTn with one scale for each vector along the last axis.

    :math:`x_i \approx s\, n_i` with integers :math:`|n_i| \le 2^{bits-1} - 1` and
    :math:`s = \max_i |x_i| / (2^{bits-1} - 1)`, rounded up to `scale_dtype`.

    Parameters
    ----------
    x : array_like of float, shape (..., n)
        The vectors.
    bits : {2, 3, 4, 8}
        Bits a code. At 2 bits the levels are -1, 0 and 1.
    scale_dtype : {"bfloat16", "float32"}, default "bfloat16"
        What the scale is rounded up to; the levels are fitted to the rounded scale.
    backend : {"auto", "fast", "reference"}, optional
        Which twin computes it; see `config_context`.

    Returns
    -------
    levels : ndarray of int8, shape (..., n)
        The integers.
    scale : ndarray of float32, shape (...)
        The scales; 0 for a vector of zeros.

    Raises
    ------
    ValueError
        If an option is not one of the allowed ones, n is 0, or a value is not finite.
    TypeError
        If x does not hold floats.

    References
    ----------
    B. Jacob et al., arXiv:1712.05877, section 2.1, without a zero point.

    Examples
    --------
    >>> import kvcodec as kv
    >>> levels, scale = kv.quantize_symmetric([7.0, -3.0, 0.4, 0.6], bits=4)
    >>> levels, float(scale)
    (array([ 7, -3,  0,  1], dtype=int8), 1.0)
    """
    x = vector_array(x)
    bits = _validate.choice(bits, "bits", (2, 3, 4, 8))
    scale_dtype = _validate.choice(scale_dtype, "scale_dtype", SCALE_DTYPES)
    return _backend.resolve(backend).quantize_symmetric(x, bits, scale_dtype)


def dequantize_symmetric(
    levels: ArrayLike, scale: ArrayLike, *, backend: str | None = None
) -> NDArray[np.float32]:
    """Level times scale.

    Parameters
    ----------
    levels : array_like of int8, shape (..., n)
        From `quantize_symmetric`.
    scale : array_like of float, shape (...)
        Its scales.
    backend : {"auto", "fast", "reference"}, optional
        Which twin computes it; see `config_context`.

    Returns
    -------
    ndarray of float32, shape (..., n)
        The decoded vectors.

    Raises
    ------
    ValueError
        If the shapes do not fit together or a scale is not finite.
    TypeError
        If levels are not int8 or scale does not hold floats.

    References
    ----------
    B. Jacob et al., arXiv:1712.05877, equation 1, without a zero point.

    Examples
    --------
    >>> import numpy as np
    >>> import kvcodec as kv
    >>> kv.dequantize_symmetric(np.array([[7, -3]], dtype=np.int8), [0.5])
    array([[ 3.5, -1.5]], dtype=float32)
    """
    levels = _validate.level_array(levels, "levels")
    scale = scale_array(scale, "scale", levels.shape[:-1])
    return _backend.resolve(backend).dequantize_symmetric(levels, scale)


def quantize_asymmetric(
    x: ArrayLike,
    bits: int,
    *,
    group_size: int = 32,
    axis: str = "token",
    scale_dtype: str = "bfloat16",
    backend: str | None = None,
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32]]:
    """Asymmetric codes with a scale and a zero point for each group.

    Parameters
    ----------
    x : array_like of float, shape (..., tokens, channels)
        Keys or values.
    bits : {2, 4, 8}
        Bits a code.
    group_size : int, default 32
        Members of a group; the last group of an axis may be shorter.
    axis : {"token", "channel"}, default "token"
        Along which axis a group extends: "token" gives each channel its own range over
        consecutive tokens (KIVI's keys), "channel" gives each token its own ranges over
        consecutive channels (KIVI's values).
    scale_dtype : {"bfloat16", "float32"}, default "bfloat16"
        The scale is rounded up to it and the zero point down; the codes are fitted to both.
    backend : {"auto", "fast", "reference"}, optional
        Which twin computes it; see `config_context`.

    Returns
    -------
    codes : ndarray of uint8, shape (..., tokens, channels)
        From 0 to 2^bits - 1.
    scale, zero_point : ndarray of float32
        (..., groups, channels) for axis="token", (..., tokens, groups) for axis="channel".

    Raises
    ------
    ValueError
        If an option is not one of the allowed ones or a value is not finite.
    TypeError
        If x does not hold floats.

    References
    ----------
    Z. Liu et al., KIVI, arXiv:2402.02750, equation 1.

    Examples
    --------
    >>> import numpy as np
    >>> import kvcodec as kv
    >>> x = np.array([[0.0, 10.0], [1.0, 20.0], [2.0, 30.0], [3.0, 40.0]])
    >>> codes, scale, zero_point = kv.quantize_asymmetric(x, bits=2, group_size=4)
    >>> codes.T
    array([[0, 1, 2, 3],
           [0, 1, 2, 3]], dtype=uint8)
    """
    x = _validate.float_array(x, "x")
    if x.ndim < 2:
        raise ValueError(f"x must have shape (..., tokens, channels), but has shape {x.shape}.")
    bits = _validate.choice(bits, "bits", ASYMMETRIC_BITS)
    group_size = _validate.integer(group_size, "group_size", 1, _validate.LARGEST_GROUP)
    axis = _validate.choice(axis, "axis", GROUP_AXES)
    scale_dtype = _validate.choice(scale_dtype, "scale_dtype", SCALE_DTYPES)
    return _backend.resolve(backend).quantize_asymmetric(x, bits, group_size, axis, scale_dtype)


def dequantize_asymmetric(
    codes: ArrayLike,
    scale: ArrayLike,
    zero_point: ArrayLike,
    *,
    group_size: int = 32,
    axis: str = "token",
    backend: str | None = None,
) -> NDArray[np.float32]:
    """zero_point + code * scale, for each group.

    Parameters
    ----------
    codes : array_like of uint8, shape (..., tokens, channels)
        From `quantize_asymmetric`.
    scale, zero_point : array_like of float
        Likewise.
    group_size : int, default 32
        As it was coded.
    axis : {"token", "channel"}, default "token"
        As it was coded.
    backend : {"auto", "fast", "reference"}, optional
        Which twin computes it; see `config_context`.

    Returns
    -------
    ndarray of float32, shape (..., tokens, channels)
        The decoded array.

    Raises
    ------
    ValueError
        If the shapes do not fit together, or a number is not finite.
    TypeError
        If codes are no integers, or scale or zero_point does not hold floats.

    References
    ----------
    Z. Liu et al., KIVI, arXiv:2402.02750, equation 1.

    Examples
    --------
    >>> import numpy as np
    >>> import kvcodec as kv
    >>> x = np.full((3, 2), 0.125)
    >>> kv.dequantize_asymmetric(*kv.quantize_asymmetric(x, bits=2))
    array([[0.125, 0.125],
           [0.125, 0.125],
           [0.125, 0.125]], dtype=float32)
    """
    codes = _validate.code_array(codes, "codes", 255)
    if codes.ndim < 2:
        raise ValueError(
            f"codes must have shape (..., tokens, channels), but has shape {codes.shape}."
        )
    group_size = _validate.integer(group_size, "group_size", 1, _validate.LARGEST_GROUP)
    axis = _validate.choice(axis, "axis", GROUP_AXES)
    *outer, tokens, channels = codes.shape
    if axis == "token":
        shape = (*outer, -(-tokens // group_size), channels)
    else:
        shape = (*outer, tokens, -(-channels // group_size))
    scale = scale_array(scale, "scale", shape)
    zero_point = scale_array(zero_point, "zero_point", shape)
    return _backend.resolve(backend).dequantize_asymmetric(
        codes, scale, zero_point, group_size, axis
    )


def quantize_kivi_keys(
    k: ArrayLike,
    bits: int,
    *,
    group_size: int = 32,
    residual: int = 0,
    scale_dtype: str = "bfloat16",
    backend: str | None = None,
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """KIVI's keys: whole groups of tokens by channel, and a tail left in floating point.

    Only whole groups are coded, and only once `residual` newer tokens are there. So encoding all
    tokens at once gives the codes that encoding them as they come would have given.

    Parameters
    ----------
    k : array_like of float, shape (..., tokens, channels)
        Keys.
    bits : {2, 4, 8}
        Bits a code.
    group_size : int, default 32
        Tokens of a group.
    residual : int, default 0
        Newest tokens that are never coded; the tail has `residual` to
        ``residual + group_size - 1`` tokens.
    scale_dtype : {"bfloat16", "float32"}, default "bfloat16"
        As in `quantize_asymmetric`.
    backend : {"auto", "fast", "reference"}, optional
        Which twin computes it; see `config_context`.

    Returns
    -------
    codes : ndarray of uint8, shape (..., coded tokens, channels)
        From 0 to 2^bits - 1.
    scale, zero_point : ndarray of float32, shape (..., groups, channels)
        For each group and channel.
    tail : ndarray of float32, shape (..., tokens - coded tokens, channels)
        The rest, unchanged.

    Raises
    ------
    ValueError
        If an option is not one of the allowed ones or a value is not finite.
    TypeError
        If k does not hold floats.

    References
    ----------
    Z. Liu et al., KIVI, arXiv:2402.02750, section 3.2.

    Examples
    --------
    >>> import numpy as np
    >>> import kvcodec as kv
    >>> k = np.random.default_rng(0).standard_normal((100, 8))
    >>> codes, scale, zero_point, tail = kv.quantize_kivi_keys(k, bits=2, residual=16)
    >>> codes.shape, scale.shape, tail.shape
    ((64, 8), (2, 8), (36, 8))
    """
    k = _validate.float_array(k, "k")
    if k.ndim < 2:
        raise ValueError(f"k must have shape (..., tokens, channels), but has shape {k.shape}.")
    group_size = _validate.integer(group_size, "group_size", 1, _validate.LARGEST_GROUP)
    residual = _validate.token_count(residual, "residual")
    coded = kivi_packed_tokens(k.shape[-2], group_size, residual)
    codes, scale, zero_point = quantize_asymmetric(
        k[..., :coded, :],
        bits,
        group_size=group_size,
        axis="token",
        scale_dtype=scale_dtype,
        backend=backend,
    )
    return codes, scale, zero_point, k[..., coded:, :].copy()


def quantize_lloyd_max(
    x: ArrayLike,
    bits: int,
    *,
    scale_rule: str = "norm",
    scale_dtype: str = "bfloat16",
    backend: str | None = None,
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    r"""Lloyd-Max codes for vectors that have been rotated at random.

    Each coordinate is quantized with the codebook that has the least mean squared error for a
    coordinate of a uniform unit vector of this size, times the vector's norm.

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
        What the scale is rounded up to; the codes are fitted to the rounded scale.
    backend : {"auto", "fast", "reference"}, optional
        Which twin computes it; see `config_context`.

    Returns
    -------
    codes : ndarray of uint8, shape (..., n)
        Indices into ``codebook(n, bits).levels``.
    scale : ndarray of float32, shape (...)
        The vector is about ``levels[codes] * scale``.

    Raises
    ------
    ValueError
        If there is no codebook for n, an option is not one of the allowed ones, or a value is
        not finite.
    TypeError
        If x does not hold floats.

    References
    ----------
    A. Zandieh et al., TurboQuant, arXiv:2504.19874, algorithm 1.

    Examples
    --------
    >>> import numpy as np
    >>> import kvcodec as kv
    >>> x = np.random.default_rng(0).standard_normal((1000, 128))
    >>> codes, scale = kv.quantize_lloyd_max(x, bits=4)
    >>> error = kv.dequantize_lloyd_max(codes, scale, bits=4) - x
    >>> bool(0.0090 < np.mean(error**2) < 0.0096)
    True
    """
    x = vector_array(x)
    bits = _validate.choice(bits, "bits", (2, 3, 4))
    scale_rule = _validate.choice(scale_rule, "scale_rule", LLOYD_MAX_SCALE_RULES)
    scale_dtype = _validate.choice(scale_dtype, "scale_dtype", SCALE_DTYPES)
    book = codebook(x.shape[-1], bits)
    return _backend.resolve(backend).quantize_lloyd_max(
        x, book.levels, book.boundaries, book.step, scale_rule, scale_dtype
    )


def dequantize_lloyd_max(
    codes: ArrayLike, scale: ArrayLike, bits: int, *, backend: str | None = None
) -> NDArray[np.float32]:
    """Look the levels up and multiply by the scale.

    Parameters
    ----------
    codes : array_like of uint8, shape (..., n)
        From `quantize_lloyd_max`.
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
        If there is no codebook for n, a code does not fit in bits, or the shapes do not fit.
    TypeError
        If codes are no integers or scale does not hold floats.

    References
    ----------
    A. Zandieh et al., TurboQuant, arXiv:2504.19874, algorithm 1.

    Examples
    --------
    >>> import numpy as np
    >>> import kvcodec as kv
    >>> kv.dequantize_lloyd_max(np.zeros((1, 64), np.uint8), [0.0], bits=2).any()
    np.False_
    """
    bits = _validate.choice(bits, "bits", (2, 3, 4))
    codes = _validate.code_array(codes, "codes", 2**bits - 1)
    scale = scale_array(scale, "scale", codes.shape[:-1])
    levels = codebook(codes.shape[-1], bits).levels
    return _backend.resolve(backend).dequantize_lloyd_max(codes, levels, scale)


def vector_array(x: ArrayLike) -> NDArray[np.float32]:
    """Clean vectors that are not empty."""
    x = _validate.float_array(x, "x")
    if x.shape[-1] == 0:
        raise ValueError(f"x must have a last axis of at least 1, but has shape {x.shape}.")
    return x


def scale_array(scale: ArrayLike, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Clean scales of vectors, or of one."""
    array = _validate.as_array(scale, name)
    if array.ndim == 0:
        return scale_array(array[None], name, (1, *shape))[0]
    return _validate.shaped(_validate.float_array(array, name), name, shape)
