"""Number formats and sums whose result does not depend on who computes them.

Two ideas recur in every chapter. Metadata is stored as bfloat16, the upper half of a float32,
rounded in a chosen direction. And a sum that decides about codes is taken in a fixed order, so
that NumPy, a SIMD unit of any width and any number of threads arrive at the same bits.
"""

from __future__ import annotations

import numpy as np

SMALLEST_NORMAL = np.float32(2.0**-126)
LARGEST_MAGNITUDE = 2.0**100  # of what functions are given


def largest_magnitude_of(x: np.ndarray) -> float:
    """Maximum of |x_i| in an array that is not empty, NaN where it holds one."""
    return max(float(x.max()), -float(x.min()))


def round_up_to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Round non-negative float32 up to the next bfloat16, returned as float32."""
    bits = np.asarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)


def round_down_to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Round float32 of either sign toward minus infinity to a bfloat16, returned as float32."""
    bits = np.asarray(x, dtype=np.float32).view(np.uint32)
    away = np.where(bits >> np.uint32(31), np.uint32(0xFFFF), np.uint32(0))
    return ((bits + away) & np.uint32(0xFFFF0000)).view(np.float32)


def round_to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Round float32 of either sign to the nearest bfloat16, ties to even, returned as float32."""
    bits = np.asarray(x, dtype=np.float32).view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + even) & np.uint32(0xFFFF0000)).view(np.float32)


def store(x: np.ndarray, scale_dtype: str) -> np.ndarray:
    """Turn float32 that is representable in `scale_dtype` into the array that is kept."""
    x = np.asarray(x, dtype=np.float32)
    if scale_dtype == "float32":
        return x
    return (x.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def load(stored: np.ndarray) -> np.ndarray:
    """Invert `store`: uint16 are bfloat16, float32 are themselves."""
    if stored.dtype == np.float32:
        return stored
    return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)


def round_scale(scale: np.ndarray, scale_dtype: str) -> np.ndarray:
    """Round non-negative scales up to their stored type; only an exact zero stays below 2^-126.

    Rounding up means that no value lies outside the range of the codes. The floor keeps the
    reciprocal of a scale finite.
    """
    scale = np.asarray(scale, dtype=np.float32)
    if scale_dtype == "bfloat16":
        scale = round_up_to_bfloat16(scale)
    return np.where(scale > 0, np.maximum(scale, SMALLEST_NORMAL), np.float32(0))


def reciprocal(scale: np.ndarray) -> np.ndarray:
    """1 / scale in float32, and 0 for a scale of 0."""
    safe = np.where(scale > 0, scale, np.float32(1))
    return np.where(scale > 0, np.float32(1) / safe, np.float32(0))


def lane_sum(x: np.ndarray, lanes: int) -> np.ndarray:
    """Sum the last axis as `lanes` running sums, then as a tree of halves.

    Lane j adds x[j], x[j + lanes], x[j + 2 lanes], ... in this order; then the upper half of the
    lanes is added to the lower half until one is left. This is what a SIMD register does.
    """
    n = x.shape[-1]
    padded = np.zeros((*x.shape[:-1], -(-max(n, 1) // lanes) * lanes), dtype=x.dtype)
    padded[..., :n] = x
    total = padded[..., :lanes].copy()
    for start in range(lanes, padded.shape[-1], lanes):
        total += padded[..., start : start + lanes]
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total[..., 0]
