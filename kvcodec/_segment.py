"""What attention runs over: stretches of tokens, exact or packed, and what each query sees."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from kvcodec.encoded import Encoded


class Segment(NamedTuple):
    """A run of tokens and the part of it that each query sees.

    Query i of batch row b sees the segment's tokens start[b, i] <= t < stop[b, i]. Arrays hold
    exact tokens: float32, or uint16 for the bits of bfloat16. `start` and `stop` are C-contiguous
    int64. Token t of an array is `number + t` of the sequence, up to a constant: where running
    sums begin anew depends on it.
    """

    keys: np.ndarray | Encoded
    values: np.ndarray | Encoded
    start: np.ndarray
    stop: np.ndarray
    number: int = 0
