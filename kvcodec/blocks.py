"""The packed body of one sequence: tokens in units that are filled once and never move."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcodec import _arena
from kvcodec.codec import Codec
from kvcodec.encoded import Encoded, layout_of
from kvcodec.reference import tiles
from kvcodec.reference.packing import packed_bytes, stored_bits
from kvcodec.reference.tiles import TILE

PAGE_UNITS = 8  # of the smallest page
LARGEST_PAGE = 4096  # tokens, where 8 units are not more
STORED_AS = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(np.uint16)}


def units_of(page: dict[str, NDArray[Any]]) -> int:
    """Units that a page has room for."""
    return int(next(iter(page.values())).shape[1])


class Blocks:
    """Keys or values of one sequence and layer, packed (or exact, without a codec).

    Tokens lie in units of 64 slots, or of one block where blocks are larger. A page has room for 8
    units and is allocated when the first of them is; with more tokens pages become larger, up to
    4,096 tokens, as memory is read faster in long stretches, but no larger than half of what is
    there or all of what is added. Pages of a ring stay small, to be given back. A page holds the
    arrays of an `Encoded` (or one "exact" array) with an axis more, (heads, units, tokens of a
    unit, ...), but for the codes, which lie in tiles (reference/tiles.py): "packed" is (heads,
    units, tiles of a unit, tile_bytes). A token is encoded once and never moved. Copies share
    pages; a shared page is copied before it is written to. Tokens have ascending numbers: unit u
    holds the tokens first[u] to first[u] + count[u] - 1, and may be short where a sequence was
    cropped.
    """

    def __init__(
        self,
        codec: Codec | None,
        heads: int,
        head_dim: int,
        block: int,
        exact_dtype: str = "float32",
        ring: bool = False,
    ) -> None:
        self.codec = codec
        self.exact_dtype = exact_dtype
        self.heads = heads
        self.head_dim = head_dim
        self.block = block
        self.unit = max(TILE, block)
        self.ring = ring
        self.weights: NDArray[np.float32] | None = None
        self.pages: list[dict[str, NDArray[Any]]] = []
        self.shared: list[bool] = []
        self.units = 0
        self.first = np.zeros(PAGE_UNITS, dtype=np.int64)
        self.count = np.zeros(PAGE_UNITS, dtype=np.int64)
        self.reserved = 0
        self.tables: dict[str, Any] = {}

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of what it decodes to."""
        return (1, self.heads, self.tokens, self.head_dim)

    @property
    def tokens(self) -> int:
        """Tokens that are stored."""
        return int(self.count[: self.units].sum())

    @property
    def room(self) -> int:
        """Units that the pages have room for."""
        return sum(map(units_of, self.pages))

    def buffers(self) -> list[Any]:
        """All pages and arrays that take memory, room that is not filled yet included."""
        return [self.first, self.count, *(x for page in self.pages for x in page.values())]

    def append(self, x: Encoded | NDArray[Any], number: int, kernels: Any) -> None:
        """Add whole blocks of encoded (or exact) tokens of batch 1, the first of this number."""
        done, total = 0, x.shape[2]
        while done < total:
            units, slot = 1, self._open_slot()
            if slot == self.unit:
                units, slot = self._add_units(number + done, total - done), 0
            size = min(units * self.unit - slot, total - done)
            self._write(x, done, units, slot, size, kernels)
            self.count[self.units - units : self.units] += size // units
            done += size

    def _open_slot(self) -> int:
        """The slot of the last unit that the next token goes to; the number of slots for none."""
        used = int(self.count[self.units - 1]) if self.units else self.unit
        # A unit that was cropped inside a block stays short: its groups are complete.
        return used if used % self.block == 0 else self.unit

    def _add_units(self, number: int, tokens: int) -> int:
        """Begin a unit, and as many more of a page as the tokens fill; returns how many."""
        wanted = tokens // self.unit
        if self.units == self.room:
            self._add_page(wanted)
        at, inside = self._place_of(self.units)
        units = max(1, min(wanted, units_of(self.pages[at]) - inside))
        while self.units + units > len(self.first):
            self.first = np.concatenate([self.first, np.zeros_like(self.first)])
            self.count = np.concatenate([self.count, np.zeros_like(self.count)])
        new = slice(self.units, self.units + units)
        self.first[new] = number + self.unit * np.arange(units)
        self.count[new] = 0
        self.units += units
        return units

    def append_unit(self, x: Encoded | NDArray[Any], number: int, kernels: Any) -> None:
        """Add a unit as it was in another Blocks, short or not."""
        self._add_units(number, min(x.shape[2], self.unit))
        self._write(x, 0, 1, 0, x.shape[2], kernels)
        self.count[self.units - 1] = x.shape[2]

    def _next_page_units(self, wanted: int) -> int:
        """Units of the next page, a power of two: up to half of those there are, or the wanted."""
        most = PAGE_UNITS if self.ring else max(PAGE_UNITS, LARGEST_PAGE // self.unit)
        units = PAGE_UNITS
        while 2 * units <= min(most, max(self.room // 2, wanted)):
            units *= 2
        return units

    def _add_page(self, wanted: int) -> None:
        units = self._next_page_units(wanted)
        shape = (self.heads, units, self.unit, self.head_dim)
        if self.codec is None:
            layout: dict[str, Any] = {"exact": (shape, STORED_AS[self.exact_dtype])}
        else:
            packed = (self.heads, units, self.unit // TILE, self._tile_bytes())
            layout = layout_of(self.codec, shape) | {"packed": (packed, np.uint8)}
        self.pages.append(_arena.zeros(layout))
        self.shared.append(False)
        self.tables.clear()

    def _places(self) -> Iterator[tuple[int, int]]:
        """The page of each unit, and where it lies in it."""
        places = ((at, i) for at, page in enumerate(self.pages) for i in range(units_of(page)))
        return islice(places, self.units)

    def _place_of(self, index: int) -> tuple[int, int]:
        """The page of a unit, and where it lies in it."""
        at = 0
        while index >= units_of(self.pages[at]):
            index -= units_of(self.pages[at])
            at += 1
        return at, index

    def _write(self, x: Any, done: int, units: int, slot: int, size: int, kernels: Any) -> None:
        """Put tokens done .. done + size - 1 of x into the last units, of one page.

        The first of them goes to this slot.
        """
        at, index = self._place_of(self.units - units)
        if self.shared[at]:
            self.pages[at] = _arena.copies(self.pages[at])
            self.shared[at] = False
            self.tables.clear()
        page = self.pages[at]
        for name, step in self.steps().items():
            source = x if name == "exact" else getattr(x, name)
            new = source[0, :, done // step : -(-(done + size) // step)]
            kept = page[name][:, index : index + units]
            kept = kept.reshape(self.heads, -1, *kept.shape[3:])  # a view: it lies in one piece
            if name == "packed":
                self._write_tiles(kept, slot, new, kernels)
            else:
                kept[:, slot // step : slot // step + new.shape[1]] = new

    def _tile_bytes(self) -> int:
        codec: Any = self.codec
        if codec.code == "trellis":
            row_bytes = packed_bytes(self.head_dim, codec.bits, codec.layout)
            return TILE * (row_bytes if codec.side == "value" else -(-row_bytes // 4) * 4)
        return tiles.tile_bytes(self.head_dim, self.width, codec.side)

    def _write_tiles(self, packed: Any, slot: int, rows: Any, kernels: Any) -> None:
        """Put canonical rows into tiles from this slot on."""
        codec: Any = self.codec
        if codec.code == "trellis":
            tiles.write_streams(packed, slot, rows, codec.side)
        else:
            kernels.write_tiles(packed, slot, rows, self.head_dim, self.width, codec.side)

    def _read_tiles(self, packed: Any, tokens: int, kernels: Any) -> NDArray[Any]:
        """Canonical rows of the first tokens of tiles."""
        codec: Any = self.codec
        if codec.code == "trellis":
            row_bytes = packed_bytes(self.head_dim, codec.bits, codec.layout)
            return tiles.read_streams(packed, tokens, row_bytes, codec.side)
        return kernels.read_tiles(packed, tokens, self.head_dim, self.width, codec.side)

    @property
    def width(self) -> int:
        """Bits that a code takes."""
        return stored_bits(self.codec.bits, self.codec.layout) if self.codec else 0

    def steps(self) -> dict[str, int]:
        """Tokens that one entry of the third axis of each array stands for."""
        codec = self.codec
        if codec is None:
            return {"exact": 1}
        grouped = codec.code == "asymmetric" and codec.group_axis == "token"
        steps = {"packed": 1, "scale": codec.group_size if grouped else 1}
        if codec.code == "asymmetric":
            steps["zero_point"] = steps["scale"]
        if codec.center:
            steps |= {"center_levels": codec.block, "center_scale": codec.block}
        return steps

    def unit_at(self, index: int, kernels: Any) -> Any:
        """One unit as a canonical `Encoded` or exact array of batch 1."""
        at, inside = self._place_of(index)
        page, size = self.pages[at], int(self.count[index])
        if self.codec is None:
            return np.ascontiguousarray(page["exact"][:, inside, :size])[None]
        arrays = {
            name: page[name][None, :, inside, : -(-size // step)]
            for name, step in self.steps().items()
            if name != "packed"
        }
        packed = self._read_tiles(page["packed"][:, inside], size, kernels)
        return Encoded(
            self.codec, self.head_dim, packed=packed[None], **arrays, weights=self.weights
        )

    def unpacked(self, kernels: Any) -> Iterator[tuple[int, Any]]:
        """Each unit that holds tokens, with the number of its first token."""
        for index in range(self.units):
            if self.count[index]:
                yield int(self.first[index]), self.unit_at(index, kernels)

    def joined(self, name: str, kernels: Any) -> NDArray[Any]:
        """One array of all units, canonical, one after the other along the third axis."""
        pieces = []
        for (at, inside), count in zip(self._places(), self.count, strict=False):
            tokens = int(count)
            unit = self.pages[at][name][:, inside]
            if name == "packed":
                unit = self._read_tiles(unit, tokens, kernels)
            pieces.append(unit[:, : -(-tokens // self.steps()[name])])
        return np.concatenate(pieces, axis=1)[None]

    def truncate(self, number: int) -> None:
        """Forget the tokens from this number on; a unit may become short."""
        while self.units and self.first[self.units - 1] >= number:
            self.units -= 1
        last = self.units - 1
        if self.units and self.first[last] + self.count[last] > number:
            # Not in place, so that what the sequence was can be restored.
            self.count = self.count.copy()
            self.count[last] = number - self.first[last]
        needed = max(self.units, self.reserved)
        while self.pages and self.room - units_of(self.pages[-1]) >= needed:
            del self.pages[-1], self.shared[-1]
            self.tables.clear()

    def reserve(self, tokens: int) -> None:
        """Allocate room for so many tokens now, and keep it."""
        self.reserved = -(-tokens // self.unit)
        self._fill_reserve()

    def _fill_reserve(self) -> None:
        while self.room < self.reserved:
            self._add_page(self.reserved - self.room)

    def release(self, number: int) -> None:
        """Give back the pages all of whose tokens come before this number."""
        pages = gone = 0
        for page in self.pages:
            last = gone + units_of(page) - 1
            if last >= self.units or self.first[last] + self.count[last] > number:
                break
            pages, gone = pages + 1, last + 1
        if pages:
            room = np.zeros(gone, dtype=np.int64)
            first = np.concatenate([self.first[gone:], room])
            count = np.concatenate([self.count[gone:], room])
            self._recycle(pages)
            self.first, self.count, self.units = first, count, self.units - gone
            self.tables.clear()

    def _recycle(self, pages: int) -> None:
        """Take the first pages away, and bring as many as are reserved back at the end."""
        gone = zip(self.pages[:pages], self.shared[:pages], strict=True)
        own = [page for page, shared in gone if not shared]
        del self.pages[:pages], self.shared[:pages]
        while own and self.room < self.reserved:
            self.pages.append(own.pop(0))
            self.shared.append(False)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"tables": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take pages that cannot be written to, as pickles may bring them, for shared ones."""
        self.__dict__.update(state)
        self.first, self.count = self.first.copy(), self.count.copy()
        self.shared = [
            shared or not all(x.flags.writeable for x in page.values())
            for page, shared in zip(self.pages, self.shared, strict=True)
        ]

    def copy(self) -> Blocks:
        """A copy that shares the pages that hold tokens."""
        used = self._place_of(self.units - 1)[0] + 1 if self.units else 0
        copied = Blocks(
            self.codec, self.heads, self.head_dim, self.block, self.exact_dtype, self.ring
        )
        copied.weights, copied.reserved, copied.units = self.weights, self.reserved, self.units
        copied.pages, copied.shared = self.pages[:used], [True] * used
        copied.first, copied.count = self.first.copy(), self.count.copy()
        copied._fill_reserve()
        self.shared[:used] = [True] * used
        return copied
