r"""The mixed-precision window: exact sinks, a packed body, exact recent tokens.

The first few tokens ("sinks") draw attention from everywhere [1]_, the newest are the most looked
at; both stay exact. What lies between is packed, in whole blocks: a block is packed as soon as
all of it is older than the newest `recent` tokens, and never again. After T tokens

    packed(T) = floor((T - sinks - recent) / block) * block    (0 if negative)

tokens are packed, those from `sinks` on, and the exact tail holds `recent` to
`recent + block - 1` tokens.

A query at position i sees what decoding one token at a time would have shown it: the first `sinks`
tokens and those after sinks + packed(i + 1) exactly, the ones between from their codes. So a whole
prompt can be attended to at once with the same result as token by token.

References
----------
.. [1] G. Xiao et al., "Efficient streaming language models with attention sinks",
   arXiv:2309.17453.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from kvcodec.reference._numbers import (
    LARGEST_MAGNITUDE,
    largest_magnitude_of,
    round_to_bfloat16,
    store,
)
from kvcodec.reference.attention import attend


def packed_tokens(tokens: np.ndarray | int, sinks: int, recent: int, block: int) -> np.ndarray:
    """How many tokens, from number `sinks` on, are packed once `tokens` have been seen."""
    ready = np.asarray(tokens, dtype=np.int64) - sinks - recent
    return np.maximum(ready, 0) // block * block


def window_ranges(
    start: np.ndarray, stop: np.ndarray, positions: np.ndarray, sinks: int, recent: int, block: int
) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Split what each query sees, start <= t < stop, into sinks, packed body and exact tail.

    Returns (start, stop) for each of the three, counted from the beginning of the sequence, and
    empty ranges as start == stop. `positions` are those of the queries.
    """
    body_end = sinks + packed_tokens(positions + 1, sinks, recent, block)
    edges = [np.zeros_like(stop), np.full_like(stop, sinks), body_end, np.maximum(stop, body_end)]
    ranges = []
    for low, high in pairwise(edges):
        first = np.maximum(start, low)
        ranges.append((first, np.maximum(np.minimum(stop, high), first)))
    return tuple(ranges)


def cache_ranges(
    count: int,
    end: int,
    sinks: int,
    evicted: int,
    packed_end: int,
    most_blocks: int,
    recent: int,
    block: int,
    causal: bool,
    window: int,
    ring: int,
    tail_base: int,
) -> np.ndarray:
    """What the newest `count` queries of a cache see of its sinks, body and tail.

    The cache has `end` tokens, of which `evicted` after the sinks are gone. Its body ended at
    `packed_end` before the queries' tokens came, which may have packed up to `most_blocks` more by
    the time of each query. A query at position i sees the tokens up to its own (all, if not
    `causal`), of these the newest `window`, and after the sinks the newest `ring`; 0 means no
    limit. Token numbers jump over what was evicted.

    Returns (start, stop) for each of the three, int64 (3, 2, 1, count): token numbers, those of the
    tail less `tail_base`.
    """
    positions = np.arange(end - count, end, dtype=np.int64)
    first = sinks + evicted
    positions = np.where(positions < first, positions - evicted, positions)
    stop = positions + 1 if causal else np.full_like(positions, end)
    oldest = positions + 1 - window if window else np.zeros_like(positions)
    start = np.maximum(oldest, np.maximum(first, positions + 1 - ring) if ring else first)
    ready = np.clip((positions + 1 - recent - packed_end) // block, 0, most_blocks)
    body_end = packed_end + ready * block
    ranges = [
        [np.maximum(oldest, 0), np.minimum(stop, min(sinks, end))],
        [start, np.minimum(stop, body_end)],
        [np.maximum(start, body_end) - tail_base, stop - tail_base],
    ]
    return np.array(ranges)[:, :, None]


def clean_tokens(x: object, batch: int, heads: int, head_dim: int) -> int:
    """How many tokens an array (batch, heads or a multiple, tokens, head_dim) is of.

    -1 of anything but a C-contiguous, aligned float32 array of this shape, with at least one token,
    whose values are below 2^100 in magnitude.
    """
    if type(x) is not np.ndarray or x.dtype != np.float32 or x.ndim != 4 or x.size == 0:
        return -1
    if not x.flags.c_contiguous or not x.flags.aligned:
        return -1
    if x.shape[0] != batch or x.shape[1] % heads or x.shape[3] != head_dim:
        return -1
    return x.shape[2] if largest_magnitude_of(x) < LARGEST_MAGNITUDE else -1


def attend_sequence(
    q: np.ndarray,
    sequence: Any,
    packed_end: int,
    most_blocks: int,
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
    query_bits: int | None,
    probability_bits: int | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of the newest queries (1, q_heads, q_len, head_dim) of a sequence of a cache.

    `packed_end` and `most_blocks` are those of `cache_ranges`, the rest those of `attend`.
    """
    segments = sequence.segments(q.shape[2], packed_end, most_blocks, causal, window)
    return attend(q, segments, scale, softcap, query_bits, probability_bits)


def keep_tokens(kept: np.ndarray, slot: int, x: np.ndarray, first: int, stop: int) -> None:
    """Put the tokens first <= t < stop of x (1, heads, tokens, dim) into slots of `kept`.

    They are kept as they are, or rounded to the nearest bfloat16 where `kept` is of uint16.
    """
    new = x[:, :, first:stop]
    if kept.dtype == np.uint16:
        new = store(round_to_bfloat16(new), "bfloat16")
    kept[:, :, slot : slot + stop - first] = new
