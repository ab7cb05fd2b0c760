r"""Symmetric INTn: one scale a vector, integer levels on both sides of zero.

A vector x (one token of one head) is written as x_i ~ scale * level_i with integers
\|level_i\| <= 2^(bits-1) - 1:

    scale = max \|x_i\| / (2^(bits-1) - 1),  rounded up to the stored type
    level_i = round_to_even(x_i * (1 / scale))

The reciprocal is taken in float32 from the *stored* scale, so what is decoded later is what was
fitted now. The most negative two's-complement level is not used: the grid is symmetric. At 2 bits
the levels are -1, 0, 1.
"""

from __future__ import annotations

import numpy as np

from kvcodec.reference._numbers import reciprocal, round_scale


def largest_level(bits: int) -> int:
    """2^(bits-1) - 1: 127, 7, 3, 1 for 8, 4, 3, 2 bits."""
    return 2 ** (bits - 1) - 1


def quantize_symmetric(x: np.ndarray, bits: int, scale_dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Levels, int8 of x's shape, and scales, float32 of x's shape without the last axis."""
    largest = np.float32(largest_level(bits))
    scale = round_scale(np.abs(x).max(axis=-1, initial=0) / largest, scale_dtype)
    levels = np.rint(x * reciprocal(scale)[..., None])
    return np.clip(levels, -largest, largest).astype(np.int8), scale


def dequantize_symmetric(levels: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Level times scale, in float32."""
    return levels.astype(np.float32) * scale[..., None]
