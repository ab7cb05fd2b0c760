r"""Query-aware equalizing: give each channel the share of the code that the queries ask of it.

A key is stored as w * k' and used with q / w, channel by channel, so that q . k' is unchanged.
A code with one scale a token makes an error of the same size in every channel of w * k', and the
query turns it into an error of the score with variance proportional to

    (sum_c w_c^2 E[k'_c^2]) * (sum_c E[q_c^2] / w_c^2),

which by the Cauchy-Schwarz inequality is least where both factors weigh the channels alike, at
w_c = (E[q_c^2] / E[k'_c^2])^(1/4). The energies are those of the first block only, and the weights
stay as they are for the whole sequence; so only half of that step is taken, in logarithms:

    w_c = (E[q_c^2] / E[k'_c^2])^(1/8).

On text that the choice was not made on, the damped weights cost two language models less than the
full ones in all cases but the symmetric codes of one of them.

A common factor of all weights does nothing; they are given geometric mean 1 and stored as bfloat16.
The rule is that of cross-layer equalization [1]_ and of SmoothQuant [2]_ (whose exponent 1/2 is of
magnitudes, and so 1/4 of energies), applied here to the product of queries and keys.

References
----------
.. [1] M. Nagel et al., "Data-free quantization through weight equalization and bias correction",
   arXiv:1906.04721, equation 11.
.. [2] G. Xiao et al., "SmoothQuant", arXiv:2211.10438, equation 4.
"""

from __future__ import annotations

import numpy as np

LARGEST_WEIGHT = 64.0
EXPONENT = 1 / 8


def channel_energy(x: np.ndarray) -> np.ndarray:
    """Sum over the tokens of x^2: float64 (..., channels) of float32 (..., tokens, channels).

    Token by token; each square of a float32 is exact in float64.
    """
    total = np.zeros((*x.shape[:-2], x.shape[-1]), dtype=np.float64)
    for token in range(x.shape[-2]):
        total += x[..., token, :].astype(np.float64) ** 2
    return total


def equalizing_weights(query_energy: np.ndarray, key_energy: np.ndarray) -> np.ndarray:
    """The weights w, float32 (..., channels), from the channel energies of queries and keys.

    Weights lie between 1/64 and 64 times their geometric mean: a channel that was silent in one of
    the two so far neither vanishes nor takes the whole range. Where all channels of one side are
    silent, the weights are 1.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        log_ratio = EXPONENT * (np.log2(query_energy) - np.log2(key_energy))
    bound = np.log2(LARGEST_WEIGHT)
    log_ratio = np.nan_to_num(log_ratio, nan=0.0, posinf=np.inf, neginf=-np.inf)
    finite = np.isfinite(log_ratio)
    count = np.maximum(finite.sum(axis=-1, keepdims=True), 1)
    mean = np.where(finite, log_ratio, 0.0).sum(axis=-1, keepdims=True) / count
    log_weight = np.clip(log_ratio - mean, -bound, bound)
    log_weight = np.where(finite.any(axis=-1, keepdims=True), log_weight, 0.0)
    bits = np.exp2(log_weight).astype(np.float32).view(np.uint32)
    return ((bits + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(np.float32)
