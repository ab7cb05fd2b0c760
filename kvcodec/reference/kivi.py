r"""KIVI: asymmetric codes, keys by channel and values by token.

Keys have channels that are large for every token, so KIVI gives every channel a range of its own,
over a group of consecutive tokens; values do not, and get a range for each token, over groups of
consecutive channels [1]_. Within a group

    zero_point = min x,  rounded down to the stored type
    scale = (max x - zero_point) / (2^bits - 1),  rounded up
    code_i = round_to_even((x_i - zero_point) * (1 / scale))
    x_i ~ zero_point + code_i * scale

Keys can be coded only when a whole group of tokens is there; what is left over, and the newest
`residual` tokens, stay in floating point.

A constant group has no range to divide by. It takes scale = x - zero_point and code 1, which is
exact for any value of at most 16 significant bits, float16 and bfloat16 among them, down to about
2^-110 (and scale 0 where the zero point is exact).

References
----------
.. [1] Z. Liu et al., "KIVI: a tuning-free asymmetric 2bit quantization for KV cache",
   arXiv:2402.02750, section 3 and equation 1.
"""

from __future__ import annotations

import numpy as np

from kvcodec.reference._numbers import reciprocal, round_down_to_bfloat16, round_scale


def _quantize_group(
    group: np.ndarray, axis: int, bits: int, scale_dtype: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scale and zero point of one group that extends along `axis` (kept as length 1)."""
    largest = np.float32(2**bits - 1)
    low, high = group.min(axis, keepdims=True), group.max(axis, keepdims=True)
    zero_point = round_down_to_bfloat16(low) if scale_dtype == "bfloat16" else low
    zero_point = zero_point + np.float32(0)  # no minus zero: its sign would depend on the order
    constant = low == high
    steps = np.where(constant, np.float32(1), largest)
    scale = round_scale((high - zero_point) / steps, scale_dtype)
    codes = np.rint((group - zero_point) * reciprocal(scale))
    return np.clip(codes, 0, largest).astype(np.uint8), scale, zero_point


def quantize_asymmetric(
    x: np.ndarray, bits: int, group_size: int, axis: str, scale_dtype: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes (uint8, x's shape), scale and zero point (float32) of x (..., tokens, channels).

    With axis="token" a group is `group_size` consecutive tokens of one channel (KIVI's keys) and
    scale has shape (..., groups, channels); with axis="channel" it is `group_size` consecutive
    channels of one token (KIVI's values) and scale has shape (..., tokens, groups). The last group
    may be shorter.
    """
    along = -2 if axis == "token" else -1
    codes, scales, zero_points = [], [], []
    for start in range(0, x.shape[along], group_size):
        group = x.take(range(start, min(start + group_size, x.shape[along])), axis=along)
        code, scale, zero_point = _quantize_group(group, along, bits, scale_dtype)
        codes.append(code)
        scales.append(scale)
        zero_points.append(zero_point)
    if not codes:
        shape = (*x.shape[:-2], 0, x.shape[-1]) if axis == "token" else (*x.shape[:-1], 0)
        return np.zeros(x.shape, np.uint8), np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    return (
        np.concatenate(codes, axis=along),
        np.concatenate(scales, axis=along),
        np.concatenate(zero_points, axis=along),
    )


def expand_groups(per_group: np.ndarray, group_size: int, axis: str, length: int) -> np.ndarray:
    """Repeat each group's number over its members; `length` is the size of the grouped axis."""
    along = -2 if axis == "token" else -1
    return per_group.repeat(group_size, axis=along).take(range(length), axis=along)


def dequantize_asymmetric(
    codes: np.ndarray, scale: np.ndarray, zero_point: np.ndarray, group_size: int, axis: str
) -> np.ndarray:
    """zero_point + code * scale, in float32."""
    length = codes.shape[-2 if axis == "token" else -1]
    scale = expand_groups(scale, group_size, axis, length)
    return expand_groups(zero_point, group_size, axis, length) + codes.astype(np.float32) * scale


def kivi_packed_tokens(tokens: int, group_size: int, residual: int) -> int:
    """How many of `tokens` are coded: whole groups, once `residual` newer tokens are there."""
    return max(tokens - residual, 0) // group_size * group_size
