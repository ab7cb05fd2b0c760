r"""Key centering: take the mean of each block of tokens out of the keys, and keep it apart.

Some channels of a key carry an offset that is many times larger than what distinguishes one token
from the next. A code that has one scale a token spends its range on that offset. With c the mean
of the block's keys, k' = k - c is what gets coded, and nothing is lost, since

    q . k = q . k' + q . c

holds exactly and q . c is one product a block. The mean is stored as INT8 with one scale for each
block and head, and what is subtracted is the *stored* mean. Rotary embeddings turn the offset
slowly, so a mean of 64 tokens follows it where a mean of the whole sequence does not.

Some tokens do not share the offset: the short keys of tokens that serve as attention sinks, for
instance, wherever they stand in the text. Subtracting the mean would make them longer, and their
error with it, though it is they that queries look at. So each token chooses: it is centered unless
that makes it longer. The choice takes no memory, since the sign of its scale is free: a token with
a negative scale is not centered.
"""

from __future__ import annotations

import numpy as np

from kvcodec.reference._numbers import lane_sum, load, store
from kvcodec.reference.symmetric import dequantize_symmetric, quantize_symmetric


def block_means(x: np.ndarray, block: int) -> np.ndarray:
    """Mean over each block of tokens of x (..., tokens, channels): (..., blocks, channels).

    Summed token by token in float64, rounded once to float32; the last block may be short.
    """
    tokens = x.shape[-2]
    means = np.zeros((*x.shape[:-2], -(-tokens // block), x.shape[-1]), dtype=np.float32)
    for index in range(means.shape[-2]):
        members = x[..., index * block : (index + 1) * block, :]
        total = np.zeros((*x.shape[:-2], x.shape[-1]), dtype=np.float64)
        for token in range(members.shape[-2]):
            total += members[..., token, :]
        means[..., index, :] = total / members.shape[-2]
    return means


def center_blocks(x: np.ndarray, block: int, scale_dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """The stored means: int8 levels (..., blocks, channels), stored scales (..., blocks)."""
    levels, scale = quantize_symmetric(block_means(x, block), 8, scale_dtype)
    return levels, store(scale, scale_dtype)


def center_tokens(
    x: np.ndarray, levels: np.ndarray, scale: np.ndarray, block: int
) -> tuple[np.ndarray, np.ndarray]:
    """Subtract the stored means where that does not make a token longer.

    Returns the keys and, bool (..., tokens), which of them are centered.
    """
    shifted = x - expand_centers(levels, scale, block, x.shape[-2])
    length, shifted_length = (lane_sum(y.astype(np.float64) ** 2, lanes=8) for y in (x, shifted))
    centered = shifted_length <= length
    return np.where(centered[..., None], shifted, x), centered


def expand_centers(levels: np.ndarray, scale: np.ndarray, block: int, tokens: int) -> np.ndarray:
    """The decoded mean of each token's block: (..., tokens, channels)."""
    centers = dequantize_symmetric(levels, load(scale))
    return centers.repeat(block, axis=-2)[..., :tokens, :]
