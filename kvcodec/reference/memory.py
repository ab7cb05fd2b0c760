"""Reading memory: what an array's bytes come to, so that reading all of them can be timed.

Attention over a long context has to read every packed byte once and does little else, so that the
time of a plain read loop is the least that it could take. That loop must use what it reads, or a
compiler would leave it out: it folds all 64-bit words into one by exclusive or.
"""

from __future__ import annotations

import numpy as np


def read_all(x: np.ndarray) -> int:
    """The exclusive or of an array's 64-bit words, the last one filled up with zeros."""
    content = x.reshape(-1).view(np.uint8)
    words = np.zeros(-(-content.size // 8), dtype=np.uint64)
    words.view(np.uint8)[: content.size] = content
    return int(np.bitwise_xor.reduce(words))
