"""Packed layouts: codes of 2, 3, 4 or 8 bits in bytes."""

from __future__ import annotations

from numpy import uint8
from numpy.typing import ArrayLike, NDArray

from kvcodec import _backend, _validate
from kvcodec.reference.packing import packed_bytes

__all__ = ["pack", "unpack"]

BITS = (2, 3, 4, 8)
LAYOUTS = ("dense", "padded")


def check_layout(bits: int, layout: str) -> tuple[int, str]:
    """Bits and a layout that exists for them."""
    bits = _validate.choice(bits, "bits", BITS)
    layout = _validate.choice(layout, "layout", LAYOUTS)
    if layout == "padded" and bits != 3:
        raise ValueError(f"layout 'padded' is for 3 bits only, but bits is {bits}.")
    return bits, layout


def pack(
    codes: ArrayLike, bits: int, *, layout: str = "dense", backend: str | None = None
) -> NDArray[uint8]:
    """Pack unsigned codes along the last axis, little end first.

    Code i occupies bits i * bits to (i + 1) * bits - 1 of the row's bit stream; bits behind the
    last code are zero.

    Parameters
    ----------
    codes : array_like of int, shape (..., n)
        Codes from 0 to 2^bits - 1.
    bits : {2, 3, 4, 8}
        Bits a code.
    layout : {"dense", "padded"}, default "dense"
        "padded" (3 bits only) gives each code a nibble: two a byte, two bits wasted. "dense" lays
        eight 3-bit codes in three bytes.
    backend : {"auto", "fast", "reference"}, optional
        Which twin computes it; see `config_context`.

    Returns
    -------
    ndarray of uint8, shape (..., ceil(n * bits / 8))
        The rows; (..., ceil(n / 2)) for "padded".

    Raises
    ------
    ValueError
        If a code does not fit, or bits or layout is not one of the allowed ones.
    TypeError
        If codes are no integers.

    Examples
    --------
    >>> import kvcodec as kv
    >>> [hex(byte) for byte in kv.pack([0x1, 0x2, 0x3, 0x4], bits=4)]
    ['0x21', '0x43']
    """
    bits, layout = check_layout(bits, layout)
    codes = _validate.code_array(codes, "codes", 2**bits - 1)
    return _backend.resolve(backend).pack(codes, bits, layout)


def unpack(
    packed: ArrayLike, n: int, bits: int, *, layout: str = "dense", backend: str | None = None
) -> NDArray[uint8]:
    """Unpack the first n codes of each row.

    Parameters
    ----------
    packed : array_like of uint8, shape (..., row_bytes)
        Rows made by `pack`.
    n : int
        Codes a row; they must fit in row_bytes.
    bits : {2, 3, 4, 8}
        Bits a code.
    layout : {"dense", "padded"}, default "dense"
        As given to `pack`.
    backend : {"auto", "fast", "reference"}, optional
        Which twin computes it; see `config_context`.

    Returns
    -------
    ndarray of uint8, shape (..., n)
        The codes.

    Raises
    ------
    ValueError
        If a row is too short for n codes, or bits or layout is not one of the allowed ones.
    TypeError
        If packed holds no integers.

    Examples
    --------
    >>> import kvcodec as kv
    >>> kv.unpack(kv.pack([1, 2, 3, 0, 1], bits=2), 5, bits=2)
    array([1, 2, 3, 0, 1], dtype=uint8)
    """
    bits, layout = check_layout(bits, layout)
    packed = _validate.code_array(packed, "packed", 255)
    n = _validate.integer(n, "n", 0)
    if packed.shape[-1] < packed_bytes(n, bits, layout):
        raise ValueError(
            f"n must be at most {packed.shape[-1] * 8 // (4 if layout == 'padded' else bits)} "
            f"for rows of {packed.shape[-1]} bytes, but {n} was given."
        )
    return _backend.resolve(backend).unpack(packed, n, bits, layout)
