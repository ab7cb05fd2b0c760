"""Memory for the pages of packed tokens, and for exact ones.

All tokens of a layer are read for every token that is decoded. With memory pages of 4 KiB the
processor then spends as long on looking up where they lie as on reading them, so that pages of
tokens are cut from chunks for which the system is asked for memory pages of 2 MiB. Chunks are
shared by all layers and caches of the process, and one is freed with the last array that lies in
it. The buffers of exact tokens are replaced again and again by others of their size, so that they
have chunks of their own, in which what was freed is used again.
"""

from __future__ import annotations

import math
import mmap
import threading
from collections import deque
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

CACHE_LINE = 64
HUGE_PAGE = 1 << 21
# A chunk has room for so many pages of tokens, that little of its last huge page is left over; the
# system gives a huge page when it is first written to.
PAGES_OF_CHUNK = 8
SMALLEST_CHUNK = 4 * HUGE_PAGE
# Smaller pages of tokens, or buffers, are not worth a chunk: they are those of short or narrow
# caches; larger ones have memory of their own.
SMALL, LARGE = 1 << 16, 1 << 23


class _Chunk:
    """A chunk and how much of it is handed out."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.room = np.empty(0, dtype=np.uint8)
        self.used = 0

    def take(self, size: int) -> NDArray[np.uint8]:
        """So many zero bytes, the first of them on a cache line."""
        with self.lock:
            if self.used + size > self.room.size:
                self.room, self.used = _new_chunk(size), 0
            start = self.used
            self.used += size
            return self.room[start : start + size]


_chunk = _Chunk()


class _Buffers:
    """A chunk for some buffers of one size, and where in it those lie that are free.

    Buffers are given back whenever their last array is collected, even while another is taken, so
    that there is no lock: each step is a single operation of a deque or a list.
    """

    def __init__(self, size: int, chunks: list[_Buffers]) -> None:
        self.size = size
        self.chunks = chunks
        self.count = chunk_bytes(size) // size
        self.room = _huge_zeros(self.count * size)
        self.free = deque(range(0, self.count * size, size))

    def take(self) -> _Buffer | None:
        """A buffer; None if all are in use."""
        with suppress(IndexError):
            return _Buffer(self)
        return None

    def give_back(self, start: int) -> None:
        """Take a buffer back, and let go of the chunk with the last one."""
        self.free.append(start)
        if len(self.free) == self.count:
            with suppress(ValueError):  # another thread may have been first
                self.chunks.remove(self)


class _Buffer:
    """What an array in a chunk of buffers keeps alive, to be given back after it."""

    chunk: _Buffers | None = None

    def __init__(self, chunk: _Buffers) -> None:
        self.start = chunk.free.popleft()
        self.chunk = chunk
        place = chunk.room.ctypes.data + self.start
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (chunk.size,),
            "data": (place, False),
        }

    def __del__(self) -> None:
        if self.chunk is not None:  # it is where there was none to take
            self.chunk.give_back(self.start)


_buffers: dict[int, list[_Buffers]] = {}


def buffer(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """An array of zeros whose memory the next one of its size uses again.

    Raises MemoryError if there is no room for it.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if not SMALL <= size <= LARGE:
        return np.zeros(shape, dtype=dtype)
    whole = _rounded_up(size, CACHE_LINE)
    chunks = _buffers.setdefault(whole, [])
    taken = next(filter(None, (chunk.take() for chunk in chunks.copy())), None)
    if taken is None:
        try:
            chunks.append(_Buffers(whole, chunks))
        except MemoryError:  # there may be room for one
            return np.zeros(shape, dtype=dtype)
        return buffer(shape, dtype)
    found = np.asarray(taken)[:size]
    found[...] = 0
    return found.view(dtype).reshape(shape)


def chunk_bytes(size: int) -> int:
    """Bytes of the chunk that is made for a page of so many bytes."""
    return max(SMALLEST_CHUNK, PAGES_OF_CHUNK * size)


def zeros(layout: dict[str, tuple[tuple[int, ...], DTypeLike]]) -> dict[str, NDArray[Any]]:
    """Arrays of zeros of these shapes and dtypes, side by side and each on a cache line.

    Raises MemoryError if there is no room for them.
    """
    sizes = {
        name: math.prod(shape) * np.dtype(dtype).itemsize for name, (shape, dtype) in layout.items()
    }
    total = sum(_rounded_up(size, CACHE_LINE) for size in sizes.values())
    if total < SMALL:
        room = _aligned(np.zeros(total + CACHE_LINE, dtype=np.uint8), CACHE_LINE, total)
    elif total > LARGE:
        room = _huge_zeros(total)
    else:
        room = _chunk.take(total)
    arrays, start = {}, 0
    for name, (shape, dtype) in layout.items():
        arrays[name] = room[start : start + sizes[name]].view(dtype).reshape(shape)
        start += _rounded_up(sizes[name], CACHE_LINE)
    return arrays


def copies(arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Copies of arrays that `zeros` could have made."""
    copied = zeros({name: (x.shape, x.dtype) for name, x in arrays.items()})
    for name, x in arrays.items():
        copied[name][...] = x
    return copied


def _new_chunk(size: int) -> NDArray[np.uint8]:
    """A chunk for pages of so many bytes, or for one where there is no room for more."""
    try:
        return _huge_zeros(chunk_bytes(size))
    except MemoryError:
        return _huge_zeros(size)


def _rounded_up(size: int, step: int) -> int:
    return -(-size // step) * step


def _aligned(room: NDArray[np.uint8], step: int, size: int) -> NDArray[np.uint8]:
    start = -room.ctypes.data % step
    return room[start : start + size]


def _huge_zeros(size: int) -> NDArray[np.uint8]:
    """Zero bytes that begin on a huge page, in huge pages where the system has them."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return _aligned(np.zeros(size + CACHE_LINE, dtype=np.uint8), CACHE_LINE, size)
    try:
        # Private, so that a forked child does not write into its parent's tokens.
        memory = mmap.mmap(-1, size + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no room for {size:,} bytes of packed tokens") from error
    with suppress(OSError):  # of a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return _aligned(np.frombuffer(memory, dtype=np.uint8), HUGE_PAGE, size)
