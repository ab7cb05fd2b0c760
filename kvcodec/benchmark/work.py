"""The calls that are timed, and what they run on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcodec import _arena
from kvcodec._backend import resolve
from kvcodec.benchmark.settings import Shape
from kvcodec.benchmark.timing import Measure, timed
from kvcodec.cache import KVCache
from kvcodec.codec import Codec
from kvcodec.evaluation.codecs import CodecPair
from kvcodec.transform import fwht

__all__ = [
    "attend_measure",
    "attended_bytes",
    "encode_measure",
    "filled_caches",
    "fwht_measure",
    "kv_chunks",
    "prefill_measure",
    "queries",
    "read_measure",
    "vectors",
]

SINKS, RECENT = 4, 64
CHUNK = 1024
FLOATS: dict[str, Any] = {"query_bits": None, "probability_bits": None}

Floats = NDArray[np.float32]


def vectors(rows: int, head_dim: int) -> Floats:
    """Normal vectors, the same at each call."""
    return np.random.default_rng(0).standard_normal((rows, head_dim), dtype=np.float32)


def queries(shape: Shape, tokens: int) -> Floats:
    """Queries (1, q_heads, tokens, head_dim), the same at each call."""
    rng = np.random.default_rng(1)
    return rng.standard_normal((1, shape.q_heads, tokens, shape.head_dim), dtype=np.float32)


def kv_chunks(shape: Shape, tokens: int) -> Iterator[Floats]:
    """Keys and values (2, 1, kv_heads, some tokens, head_dim), the same at each call."""
    rng = np.random.default_rng(2)
    for first in range(0, tokens, CHUNK):
        some = min(CHUNK, tokens - first)
        yield rng.standard_normal((2, 1, shape.kv_heads, some, shape.head_dim), dtype=np.float32)


def empty_cache(pair: CodecPair | None, shape: Shape, **options: Any) -> KVCache:
    """A cache of one layer; without codecs where there is no pair."""
    key, value, block = (None, None, 64) if pair is None else (pair.key, pair.value, pair.block)
    return KVCache(
        1,
        shape.kv_heads,
        shape.head_dim,
        key=key,
        value=value,
        sinks=SINKS,
        recent=RECENT,
        block=block,
        **options,
    )


def filled_caches(
    pairs: Sequence[CodecPair], shape: Shape, tokens: int, **options: Any
) -> dict[str, KVCache]:
    """A cache of so many tokens for each pair, by its name."""
    caches = {pair.name: empty_cache(pair, shape, **options) for pair in pairs}
    for k, v in kv_chunks(shape, tokens):
        for cache in caches.values():
            cache.append(0, k, v)
    return caches


def attended_bytes(pair: CodecPair, shape: Shape, tokens: int) -> int:
    """Bytes of the packed body and of the exact windows that a query of the newest token reads.

    It is what `KVCache.memory` tells, less the room that is not filled yet.
    """
    packed = max(tokens - SINKS - RECENT, 0) // pair.block * pair.block
    numbers = 2 * shape.kv_heads * shape.head_dim
    bits = pair.bits_per_value(shape.head_dim, shape.head_dim)
    return round(packed * numbers * bits / 8) + (tokens - packed) * numbers * 4


def attend_measure(cache: KVCache, shape: Shape) -> Measure:
    """Attention of one query."""
    q = queries(shape, 1)
    return timed(lambda _: cache.attend(0, q))


def read_measure(content: NDArray[Any] | int) -> Measure:
    """Reading an array, or as many bytes of one that is made here, in huge pages as codes are."""
    if isinstance(content, int):
        content = _arena.zeros({"bytes": ((content,), np.uint8)})["bytes"]
        content[...] = 1  # pages of zeros could all be one page
    return timed(lambda _: resolve().read_all(content))


def prefill_measure(pair: CodecPair | None, shape: Shape, tokens: int) -> Measure:
    """A prompt into an empty cache, with attention."""
    q = queries(shape, tokens)
    k, v = np.concatenate(list(kv_chunks(shape, tokens)), axis=3)
    return timed(
        lambda cache: cache.append_attend(0, q, k, v), prepare=lambda: empty_cache(pair, shape)
    )


def encode_measure(codec: Codec, side: str, x: Floats) -> Measure:
    """Encoding keys or values (batch, heads, tokens, head_dim)."""
    return timed(lambda _: codec.encode(x, side=side))


def fwht_measure(x: Floats, in_place: bool) -> Measure:
    """The transform of vectors, which over and over again gives the same two in turn."""
    return timed(lambda _: fwht(x, out=x if in_place else None))
