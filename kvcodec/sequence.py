"""One sequence in one layer: exact sinks, packed body, exact tail."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcodec import _arena
from kvcodec._segment import Segment
from kvcodec.blocks import STORED_AS, TILE, Blocks
from kvcodec.codec import Codec
from kvcodec.reference._numbers import load
from kvcodec.reference.center import center_tokens
from kvcodec.reference.equalize import equalizing_weights
from kvcodec.reference.window import cache_ranges

Floats = NDArray[np.float32]
SPARE = 32


@dataclass(frozen=True)
class Layer:
    """What all sequences of a layer have in common; codecs are settled for their side or None."""

    kv_heads: int
    key_dim: int
    value_dim: int
    key: Codec | None
    value: Codec | None
    sinks: int
    recent: int
    block: int
    rollback: int
    window: int | None
    exact_dtype: str
    reserve: int

    @property
    def usual_tail(self) -> int:
        """Slots for the exact tokens after the sinks while tokens come one by one."""
        lead = 0 if self.block % TILE == 0 else TILE  # less than which the first token may be off
        return self.recent + self.block + self.rollback + lead


class Tail:
    """Exact tokens in a buffer: appended at the end, dropped at the front, compacted when full.

    They are kept in `exact_dtype`: float32, or the bits of bfloat16 to which they are rounded.
    Slot 0 always holds a token whose number differs from the first one's by whole tiles, so that
    sums over tiles do not depend on how the tokens came to be where they are.
    """

    def __init__(
        self,
        heads: int,
        dims: tuple[int, int],
        exact_dtype: str,
        number: int,
        slots: int = 0,
        usual: int = 0,
    ) -> None:
        dtype = STORED_AS[exact_dtype]
        self.k, self.v = (np.zeros((1, heads, slots, dim), dtype=dtype) for dim in dims)
        self.usual = usual  # slots of its buffers where they are enough
        self.origin = number
        self.restart(number)

    def restart(self, number: int) -> None:
        """Hold no token; the next one has this number."""
        self.first = self.end = number
        self.base = number - (number - self.origin) % TILE  # number of slot 0

    def append(self, k: Floats, v: Floats, first: int, stop: int, kernels: ModuleType) -> None:
        """Add the tokens first <= t < stop of arrays (1, heads, tokens, dim)."""
        new = stop - first
        if self.end + new > self.base + self.k.shape[2]:
            self._move(self.end - self.first + new)
        slot = self.end - self.base
        kernels.keep_tokens(self.k, slot, k, first, stop)
        kernels.keep_tokens(self.v, slot, v, first, stop)
        self.end += new

    def _move(self, slots: int) -> None:
        """Bring the tokens to the front of new buffers with room for so many."""
        lead = (self.first - self.origin) % TILE
        slots += lead
        # Spare room for half a block: a token is moved a few times, not at each append.
        fits = slots <= self.usual <= 2 * (slots + TILE)
        slots = self.usual if fits else slots + SPARE
        kept = slice(self.first - self.base, self.end - self.base)
        moved = []
        for old in (self.k, self.v):
            shape = (*old.shape[:2], slots, old.shape[3])
            make = _arena.buffer if slots == self.usual else np.zeros
            new = make(shape, old.dtype)
            new[:, :, lead : lead + kept.stop - kept.start] = old[:, :, kept]
            moved.append(new)
        self.k, self.v = moved
        self.base = self.first - lead

    def drop(self, number: int) -> None:
        """Forget the tokens before this number, and the room of a long prompt with them."""
        self.first = min(max(self.first, number), self.end)
        count = self.end - self.first
        if self.k.shape[2] > max(self.usual, count + SPARE + 2 * TILE):
            with suppress(MemoryError):
                self._move(count)

    def truncate(self, number: int) -> None:
        """Forget the tokens from this number on."""
        if number < self.first:
            self.restart(number)
        self.end = number

    def take(self, start: int, stop: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Keys and values of the tokens start <= number < stop, as they are kept."""
        part = slice(start - self.base, stop - self.base)
        return self.k[:, :, part], self.v[:, :, part]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Copy buffers that cannot be written to, as pickles may bring them."""
        self.__dict__.update(state)
        self.k, self.v = (np.require(x, requirements="W") for x in (self.k, self.v))

    def copy(self) -> Tail:
        """An independent copy."""
        copied = object.__new__(Tail)
        copied.__dict__.update(self.__dict__)
        copied.k, copied.v = self.k.copy(), self.v.copy()
        return copied


class Sequence:
    """Keys and values of one sequence in one layer.

    Tokens are numbered from 0 as they come. The first `sinks` stay exact. A block of the others is
    packed as soon as all of it is older than the newest `recent`; the exact tokens of blocks that
    were packed during the last `rollback` tokens are kept too, so that a crop can unpack them.
    """

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        heads, sinks = layer.kv_heads, layer.sinks
        dims = (layer.key_dim, layer.value_dim)
        self.sinks = Tail(heads, dims, layer.exact_dtype, 0, sinks)
        self.tail = Tail(heads, dims, layer.exact_dtype, sinks, usual=layer.usual_tail)
        self.keys, self.values = (
            Blocks(codec, heads, dim, layer.block, layer.exact_dtype, layer.window is not None)
            for codec, dim in zip((layer.key, layer.value), dims, strict=True)
        )
        self.end = 0
        self.packed_end = sinks
        self.evicted = 0
        # Exact tokens where they were given, and the first one's number, until `trim`: their own
        # queries see them, but most of them are packed already.
        self.prompt: tuple[NDArray[Any], NDArray[Any], int] | None = None
        self.released = sinks  # tokens between the sinks and this number may be gone
        # Of the queries of early tokens, by token; None where no query was given.
        self.energy: list[NDArray[np.float64] | None] = []
        if layer.reserve:
            self.keys.reserve(layer.reserve)
            self.values.reserve(layer.reserve)

    @property
    def length(self) -> int:
        """Tokens of the sequence: all that came, less those that were evicted."""
        return self.end - self.evicted

    @property
    def held(self) -> int:
        """Tokens that the next query may see."""
        return min(self.end, self.layer.sinks) + max(self.end - self.visible_from, 0)

    @property
    def visible_from(self) -> int:
        """Number of the oldest token after the sinks that the next query may see."""
        layer, first = self.layer, self.layer.sinks + self.evicted
        return first if layer.window is None else max(first, self.end + 1 - layer.window)

    def buffers(self) -> dict[str, dict[str, list[Any]]]:
        """The buffers by side and part."""
        weights = self.keys.weights
        statistics = [x for x in (*self.energy, weights) if x is not None]
        return {
            "key": {
                "sinks": [self.sinks.k],
                "body": self.keys.buffers(),
                "tail": [self.tail.k],
                "statistics": statistics,
            },
            "value": {
                "sinks": [self.sinks.v],
                "body": self.values.buffers(),
                "tail": [self.tail.v],
            },
        }

    def mark(self, new: int | None = None) -> Callable[[], None]:
        """What takes back all changes from now on, or those of appending so many tokens.

        No token is copied. Tokens are written behind the end or to new buffers; a tile that is
        written to again keeps the bytes of the codes that it had.
        """
        layer, tail = self.layer, self.tail
        if (
            new is not None
            and layer.sinks <= self.end < self.packed_end + layer.recent + layer.block - new
            and self.end + new <= tail.base + tail.k.shape[2]
            and self._is_trimmed()
        ):  # no token is a sink, is packed, needs new buffers or is let go of
            return partial(self._shrink, self.end, len(self.energy))
        keys, values = self.keys, self.values
        state = vars(self).copy()
        state["energy"] = self.energy.copy()
        marked = [(self, state), (self.sinks, vars(self.sinks).copy())]
        marked.append((tail, vars(tail).copy()))
        for blocks in (keys, values):
            state = vars(blocks).copy()
            state["pages"], state["shared"] = blocks.pages.copy(), blocks.shared.copy()
            marked.append((blocks, state))
        return partial(self._restore, marked)

    def _shrink(self, end: int, queries: int) -> None:
        """Forget the tokens from this number on, and the energy of more queries than so many."""
        self.end = self.tail.end = end
        del self.energy[queries:]

    def _restore(self, marked: list[tuple[Any, dict[str, Any]]]) -> None:
        """Be again what the sequence was when it was marked."""
        for part, state in marked:
            vars(part).update(state)
        for blocks in (self.keys, self.values):
            blocks.tables.clear()
            blocks.truncate(self.packed_end)

    def append(self, k: Floats, v: Floats, q: Floats | None, kernels: ModuleType) -> None:
        """Add tokens and pack the blocks that have left the window; `trim` must follow.

        Until then the exact tokens of the new blocks are kept for queries that saw them.
        """
        layer, new = self.layer, k.shape[2]
        new_sinks = min(layer.sinks - self.end, new) if self.end < layer.sinks else 0
        if q is not None:
            self._note_queries(q, kernels)
        if new_sinks:
            self.sinks.append(k, v, 0, new_sinks, kernels)
        ready = (self.end + new - layer.recent - self.packed_end) // layer.block * layer.block
        if ready > 0 and self._exact_without_tail():
            self._append_prompt(k, v, new_sinks, ready, kernels)
            return
        self.tail.append(k, v, new_sinks, new, kernels)
        self.end += new
        if ready > 0:
            self._pack(*self.tail.take(self.packed_end, self.packed_end + ready), kernels)

    def _exact_without_tail(self) -> bool:
        """Whether new tokens can be seen where they are, as there are none that they follow."""
        tail = self.tail
        return tail.first == tail.end == tail.base and tail.k.dtype == np.float32

    def _append_prompt(
        self, k: Floats, v: Floats, new_sinks: int, ready: int, kernels: ModuleType
    ) -> None:
        """Pack so many tokens without copying them to the tail, which keeps only the others."""
        start, new = self.packed_end, k.shape[2]
        seen = (k[:, :, new_sinks:], v[:, :, new_sinks:])
        self.prompt = (*seen, start)
        self.end += new
        self._pack(*(x[:, :, :ready] for x in seen), kernels)
        kept = self._packed_end_at(self.end - self.layer.rollback)
        self.tail.restart(kept)
        if kept < self.end:
            self.tail.append(k, v, new_sinks + kept - start, new, kernels)

    def exact(self) -> tuple[NDArray[Any], NDArray[Any], int]:
        """Keys, values and the first token's number of what queries may see after the sinks."""
        tail = self.tail
        return (tail.k, tail.v, tail.base) if self.prompt is None else self.prompt

    def _note_queries(self, q: Floats, kernels: ModuleType) -> None:
        """Keep the energy of the queries of tokens up to the end of the first block."""
        layer = self.layer
        early = layer.sinks + layer.block - self.end
        if layer.key is None or not layer.key.equalize or early <= 0:
            return
        self.energy += [None] * (self.end - len(self.energy))
        by_token = np.ascontiguousarray(q[0, :, :early].swapaxes(0, 1))
        repeats = q.shape[1] // layer.kv_heads
        grouped = by_token.reshape(-1, layer.kv_heads, repeats, layer.key_dim)
        self.energy += [kernels.channel_energy(heads) for heads in grouped]

    def _pack(self, exact_k: NDArray[Any], exact_v: NDArray[Any], kernels: ModuleType) -> None:
        """Pack the tokens that come next."""
        k, v = load(exact_k), load(exact_v)
        codec, weights = self.keys.codec, self.keys.weights
        if self.packed_end == self.layer.sinks and codec is not None and codec.equalize:
            weights = self._weights(k, codec, kernels)
            codec = replace(codec, equalize=weights is not None)
        keys, values = (
            # Values were bounded when they came; as bfloat16 they may have arrived at the bound.
            stored if codec is None else kernels.encode(x, codec, weights, np.inf)
            for stored, x, codec, weights in zip(
                (exact_k, exact_v), (k, v), (codec, self.values.codec), (weights, None), strict=True
            )
        )
        self.keys.codec, self.keys.weights = codec, weights
        self.keys.append(keys, self.packed_end, kernels)
        self.values.append(values, self.packed_end, kernels)
        self.packed_end += k.shape[2]

    def _weights(self, k: Floats, codec: Codec, kernels: ModuleType) -> Floats | None:
        """Equalizing weights from the early queries and the first block; None without queries."""
        given = [energy for energy in self.energy if energy is not None]
        if not given:
            return None
        first = np.ascontiguousarray(k[:, :, : codec.block])
        if codec.center:
            center = kernels.center_blocks(first, codec.block, codec.scale_dtype)
            first = np.ascontiguousarray(center_tokens(first, *center, codec.block)[0])
        queries = np.zeros((self.layer.kv_heads, self.layer.key_dim))
        for energy in given:
            queries += energy
        return equalizing_weights(queries, kernels.channel_energy(first)[0])[None].copy()

    def trim(self) -> None:
        """Let go of what no query and no crop within `rollback` can ask for."""
        self.prompt = None
        if self._is_trimmed():
            return
        layer = self.layer
        self.tail.drop(self._packed_end_at(self.end - layer.rollback))
        if self.tail.first >= layer.sinks + layer.block:
            self.energy.clear()
        oldest = layer.sinks + self.evicted
        if layer.window is not None:
            # What the newest query saw, and the newest after a crop within the rollback.
            oldest = max(oldest, self.end - layer.window - layer.rollback)
        if oldest > self.released:
            self.keys.release(oldest)
            self.values.release(oldest)
            self.released = oldest

    def _is_trimmed(self) -> bool:
        """Whether nothing is to be let go of before the next block is packed."""
        layer = self.layer
        return (
            self.tail.first == self.packed_end
            and self.released == layer.sinks + self.evicted
            and layer.window is None
            and (not self.energy or self.tail.first < layer.sinks + layer.block)
        )

    def _packed_end_at(self, end: int) -> int:
        """Where the packed body ended when there were `end` tokens, if that can be restored."""
        late = self.packed_end + self.layer.recent - end
        back = -(-late // self.layer.block) * self.layer.block if late > 0 else 0
        return max(self.packed_end - back, self.tail.first)

    def segments(
        self,
        tokens: int,
        packed_end: int,
        most_blocks: int,
        causal: bool,
        window: int | None,
    ) -> list[Segment]:
        """Sinks, body and tail with what the newest queries see of them.

        The body ended at `packed_end` before their tokens came, and they may have packed up to
        `most_blocks` more.
        """
        layer = self.layer
        exact_k, exact_v, base = self.exact()
        ranges = cache_ranges(
            tokens,
            self.end,
            layer.sinks,
            self.evicted,
            packed_end,
            most_blocks,
            layer.recent,
            layer.block,
            causal,
            window or 0,
            layer.window or 0,
            base,
        )
        return [
            Segment(self.sinks.k, self.sinks.v, ranges[0, 0], ranges[0, 1]),
            Segment(self.keys, self.values, ranges[1, 0], ranges[1, 1]),
            Segment(exact_k, exact_v, ranges[2, 0], ranges[2, 1], base - layer.sinks),
        ]

    def number_of(self, length: int) -> int:
        """Number after the last token when the sequence is cut to this length."""
        return length if length <= self.layer.sinks else length + self.evicted

    def can_crop(self, length: int) -> bool:
        """Whether what a query would see after a crop is still there."""
        window, number = self.layer.window, self.number_of(length)
        if window is None or number <= self.layer.sinks:
            return True
        return max(number + 1 - window, self.layer.sinks + self.evicted) >= self.released

    def can_attend(self, queries: int) -> bool:
        """Whether all that the newest queries saw is still there."""
        sinks, window = self.layer.sinks, self.layer.window
        if window is None or not queries or self.end <= sinks:
            return True
        first = self.number_of(self.length - queries + 1) - 1
        return max(max(first, sinks) + 1 - window, sinks + self.evicted) >= self.released

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens."""
        if length >= self.length:
            return
        sinks, number = self.layer.sinks, self.number_of(length)
        restored = max(self._packed_end_at(number), sinks) if number > self.tail.first else number
        self.packed_end = max(min(self.packed_end, restored, number), sinks)
        self.keys.truncate(self.packed_end)
        self.values.truncate(self.packed_end)
        self.tail.truncate(max(number, sinks))
        self.sinks.truncate(min(number, self.sinks.end))
        self.end = number
        self.tail.drop(self.tail.first)
        del self.energy[number:]
        if number <= sinks:
            self.evicted = 0
            self.released = sinks
        if self.packed_end == sinks:
            self.keys.weights = None
            self.keys.codec = self.layer.key

    def evict(self, tokens: int) -> None:
        """Drop the oldest tokens after the sinks."""
        self.evicted += tokens
        self.trim()

    def copy(self) -> Sequence:
        """A copy that shares the packed pages."""
        copied = object.__new__(Sequence)
        copied.__dict__.update(self.__dict__)
        copied.sinks, copied.tail = self.sinks.copy(), self.tail.copy()
        copied.keys, copied.values = self.keys.copy(), self.values.copy()
        copied.energy = list(self.energy)
        return copied

    def decoded(self, side: str, kernels: ModuleType) -> Floats:
        """Keys or values as the next query would see them, float32 (kv_heads, tokens, dim)."""
        blocks: Any = self.keys if side == "key" else self.values
        parts = [load(getattr(self.sinks, side[0])[:, :, : self.sinks.end])]
        for number, unit in blocks.unpacked(kernels):
            x = load(unit) if blocks.codec is None else kernels.decode(unit)
            parts.append(x[:, :, max(self.visible_from - number, 0) :])
        exact_from = max(self.packed_end, self.visible_from)
        if exact_from < self.end:
            k, v = self.tail.take(exact_from, self.end)
            parts.append(load(k if side == "key" else v))
        return np.concatenate(parts, axis=2)[0]
