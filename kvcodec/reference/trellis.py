r"""Trellis codes for rotated vectors: a table look-up on a window that slides over the bit stream.

With 2 bits an element, the best scalar code (`lloyd_max`) has a mean squared error of 0.1175 on a
Gaussian, and no code one below 1/16. A trellis code [1]_ [2]_ comes nearer by deciding about
several elements together. Element i owns b bits of its row's stream, its code, and is decoded by
the last 8 bits of the stream up to and including its own:

    window_i = the byte made of bits b (i + 1) - 8 .. b (i + 1) - 1 of the stream, newest bit on top
    x_i ~ scale * levels[window_i]

So a code decides about its own element and, as older bits of their windows, about the next few: a
bitshift trellis [3]_ of 2^(8-b) states with 2^b branches each. The stream is a ring: the windows of
the first elements reach back into the last codes (tail-biting), so that a row takes exactly n b
bits and no bit is spent on where the path begins.

The table has 256 int8 levels and is the same for all sizes. Its upper half is the negative of its
lower half, levels[w + 128] = -levels[w]: the newest bit is a sign. It was trained on Gaussian
vectors by Lloyd's iterations (`tools/gen_codebooks.py`): encode, then move each level to the mean
of the elements that chose it.

*Encoding* is Viterbi's algorithm [4]_ on integers, so that every implementation finds the same
codes. With scale = round(\|x\| * step) the elements become t_i = round(4 x_i / scale), quarters of
a level; a window w costs 2 levels[w]^2 - t_i levels[w], which is twice the squared error less what
all windows have in common. Among paths of equal cost into a state the one with the lowest oldest
code wins, among end states the lowest. The ring is closed in two runs. The first goes once around
the ring from its middle, free at both ends; the state in which it passes from the last element to
the first is all that is kept of it. The second is the best path from that state to itself.

The scale rules are those of `lloyd_max`, but that the codes are not fitted once more to the scale
of least squares.

References
----------
.. [1] M. Marcellin and T. Fischer, "Trellis coded quantization of memoryless and Gauss-Markov
   sources", IEEE Trans. Commun. 38 (1990).
.. [2] A. Tseng et al., "QTIP: quantization with trellises and incoherence processing",
   arXiv:2406.11235, sections 3 and 4.
.. [3] M. Mao and R. Gray, "Stationary and trellis encoding for IID sources and simulation",
   Data Compression Conference (2010).
.. [4] G. Forney, "The Viterbi algorithm", Proc. IEEE 61 (1973).
"""

from __future__ import annotations

import numpy as np

from kvcodec.reference._numbers import lane_sum, reciprocal, round_scale
from kvcodec.reference.lloyd_max import fitted_scale

WINDOWS = 256
FRACTION = 4
UNREACHABLE = 2**40


def windows(codes: np.ndarray, bits: int) -> np.ndarray:
    """The byte that decodes each element, uint8, from codes (..., n) of a ring."""
    window = codes << np.uint8(8 - bits)
    for back in range(1, -(-8 // bits)):
        older = np.roll(codes, back, axis=-1).astype(np.int16) << 8 >> (back * bits + bits)
        window |= older.astype(np.uint8)
    return window


def targets_of(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Vectors (..., n) in quarters of a level, int64."""
    return np.rint(x * reciprocal(scale)[..., None] * np.float32(FRACTION)).astype(np.int64)


def best_path(
    targets: np.ndarray, levels: np.ndarray, bits: int, state: np.ndarray | None
) -> np.ndarray:
    """The windows, uint8 (rows, n), of the cheapest path for targets (rows, n).

    With `state`, (rows,), it begins and ends there; otherwise it is free at both ends.
    """
    rows, n = targets.shape
    states, branches = WINDOWS >> bits, 1 << bits
    level = levels.astype(np.int64)
    before = np.arange(WINDOWS) % states  # the state that a window is a branch of
    row = np.arange(rows)

    cost = np.zeros((rows, states), dtype=np.int64)
    if state is not None:
        cost[:] = UNREACHABLE
        cost[row, state] = 0
    oldest = np.empty((n, rows, states), dtype=np.uint8)
    for i in range(n):
        branch = FRACTION // 2 * level**2 - targets[:, i, None] * level
        into = (cost[:, before] + branch).reshape(rows, states, branches)
        oldest[i] = into.argmin(axis=-1)
        cost = into.min(axis=-1)

    window = np.empty((rows, n), dtype=np.uint8)
    after = cost.argmin(axis=-1) if state is None else state
    for i in reversed(range(n)):
        window[:, i] = after << bits | oldest[i, row, after]
        after = before[window[:, i]]
    return window


def ring_codes(targets: np.ndarray, levels: np.ndarray, bits: int) -> np.ndarray:
    """The codes, uint8 (rows, n), of a cheap closed path for targets (rows, n)."""
    n = targets.shape[1]
    half = n // 2
    around = best_path(np.roll(targets, -half, axis=1), levels, bits, None)
    seam = around[:, n - half].astype(np.int64) % (WINDOWS >> bits)
    return best_path(targets, levels, bits, seam) >> np.uint8(8 - bits)


def quantize_trellis(
    x: np.ndarray, levels: np.ndarray, step: float, bits: int, scale_rule: str, scale_dtype: str
) -> tuple[np.ndarray, np.ndarray]:
    """Codes, uint8 of x's shape, and scales, float32 of x's shape without the last axis."""
    norm = np.sqrt(lane_sum(x.astype(np.float64) ** 2, lanes=8))
    scale = round_scale((norm * step).astype(np.float32), scale_dtype)
    targets = targets_of(x, scale)
    codes = ring_codes(targets.reshape(-1, x.shape[-1]), levels, bits).reshape(x.shape)
    if scale_rule != "norm":
        y = levels[windows(codes, bits)].astype(np.float64)
        scale = fitted_scale(x, y, norm, scale_rule, scale_dtype)
    return codes, scale


def dequantize_trellis(
    codes: np.ndarray, levels: np.ndarray, scale: np.ndarray, bits: int
) -> np.ndarray:
    """levels[window] times scale, in float32."""
    return levels[windows(codes, bits)].astype(np.float32) * scale[..., None]
