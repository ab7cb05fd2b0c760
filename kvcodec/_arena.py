"""Memory for the pages of packed tokens.

All pages of a layer are read for every token that is decoded. With memory pages of 4 KiB the
processor then spends as long on looking up where they lie as on reading them, so that pages of
tokens are cut from chunks for which the system is asked for memory pages of 2 MiB. Chunks are
shared by all layers and caches of the process, and one is freed with the last array that lies in
it.
"""

from __future__ import annotations

import math
import mmap
import threading
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
# Smaller pages of tokens are not worth a chunk: they are those of short or narrow caches; larger
# ones have memory of their own.
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
