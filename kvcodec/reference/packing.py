r"""Packed layouts: unsigned codes of 2, 3, 4 or 8 bits in bytes, little end first.

A row of n codes becomes ceil(n * bits / 8) bytes, one bit stream: code i occupies bits i*bits ..
(i+1)*bits - 1, and bit j of the stream is bit j mod 8 of byte j div 8. So 4-bit codes lie two a
byte, the first in the low nibble; 2-bit codes four a byte; eight 3-bit codes fill three bytes. The
"padded" layout gives each 3-bit code a nibble: two bits of a byte are wasted and a decoder of
4-bit codes reads it. Bits behind the last code are zero.
"""

from __future__ import annotations

import numpy as np


def stored_bits(bits: int, layout: str) -> int:
    """Bits that a code takes in the stream: its own, or 4 for padded 3-bit codes."""
    return 4 if layout == "padded" else bits


def packed_bytes(n: int, bits: int, layout: str) -> int:
    """Bytes of a row of n codes."""
    return -(-n * stored_bits(bits, layout) // 8)


def pack(codes: np.ndarray, bits: int, layout: str) -> np.ndarray:
    """Pack the last axis of uint8 codes; uint8 of shape (..., packed_bytes)."""
    width = stored_bits(bits, layout)
    stream = (codes[..., None] >> np.arange(width, dtype=np.uint8)) & 1
    stream = stream.reshape(*codes.shape[:-1], codes.shape[-1] * width)
    return np.packbits(stream, axis=-1, bitorder="little")


def unpack(packed: np.ndarray, n: int, bits: int, layout: str) -> np.ndarray:
    """Unpack the first n codes of each row; uint8 of shape (..., n)."""
    width = stored_bits(bits, layout)
    stream = np.unpackbits(packed, axis=-1, count=n * width, bitorder="little")
    stream = stream.reshape(*packed.shape[:-1], n, width)[..., :bits]
    return (stream << np.arange(bits, dtype=np.uint8)).sum(axis=-1, dtype=np.uint8)
