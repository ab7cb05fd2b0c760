"""Which columns of a padded batch a layer has seen, and which of them were padding.

A model counts columns: every row of a batch has as many. The cache holds real tokens only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class NewColumns:
    """What a mask says of the columns of one forward pass; None for "all of them are real"."""

    start: int
    count: int
    past: NDArray[np.bool_] | None  # (batch, start)
    lengths: NDArray[np.int64] | None  # (batch,): real ones, from the right
    window: int | None


class Columns:
    """The columns that a layer has seen."""

    def __init__(self) -> None:
        self.count = 0
        self.padding: list[tuple[int, NDArray[np.int64]]] = []  # first column, how many a row

    def check(self, new: NewColumns) -> None:
        """The new columns must follow on, and the padding before be what it was."""
        if new.start != self.count:
            raise ValueError(
                f"cache must hold as many tokens in every layer, but the mask is for "
                f"{new.start} and this layer holds {self.count}; after a forward pass that was "
                f"interrupted, crop(0) makes them equal."
            )
        if not self.padding and new.past is None:
            return
        real = None if new.past is None else new.past.shape[0]
        batch = len(self.padding[0][1]) if self.padding else real
        seen = self.mask(batch)
        if not np.array_equal(seen, np.ones_like(seen) if new.past is None else new.past):
            raise ValueError(
                "attention_mask must be what it was for the tokens that cache holds, "
                "but differs; it covers all tokens, those of earlier calls included."
            )

    def mask(self, batch: int) -> NDArray[np.bool_]:
        """Which columns are real, (batch, columns)."""
        real = np.ones((batch, self.count), dtype=bool)
        for first, padded in self.padding:
            for row, count in zip(real, padded, strict=True):
                row[first : first + count] = False
        return real

    def append(self, new: NewColumns) -> None:
        """Count the new columns."""
        if new.lengths is not None:
            self.padding.append((self.count, new.count - new.lengths))
        self.count += new.count

    def cropped(self, count: int) -> Columns:
        """The first columns."""
        kept = Columns()
        kept.count = count
        kept.padding = [
            (first, np.minimum(padded, count - first))
            for first, padded in self.padding
            if first < count
        ]
        return kept

    def rows(self, indices: NDArray[np.int64]) -> Columns:
        """The columns of the chosen rows, as a batch."""
        kept = Columns()
        kept.count = self.count
        kept.padding = [(first, padded[indices]) for first, padded in self.padding]
        return kept

    def lengths(self, batch: int) -> NDArray[np.int64]:
        """Real tokens of each row."""
        padded = sum((padded for _, padded in self.padding), np.zeros(batch, dtype=np.int64))
        return self.count - padded

    @classmethod
    def from_config(cls, config: Any, batch: int) -> Columns:
        """What `to_config` gave; raises ValueError for what it cannot have given."""
        fits = isinstance(config, dict) and set(config) == {"columns", "padding"}
        columns = cls()
        columns.count = _whole(config["columns"]) if fits else -1
        end = 0
        for entry in config["padding"] if fits else ():
            fits = fits and isinstance(entry, list) and len(entry) == 2
            first, padded = entry if fits else (0, [])
            counts = np.array([_whole(count) for count in padded], dtype=np.int64)
            fits = fits and len(counts) == batch and counts.min() >= 0 and _whole(first) >= end
            if not fits:
                break
            columns.padding.append((first, counts))
            end = first + int(counts.max())
        if not fits or end > columns.count:
            raise ValueError("columns and padding do not fit together")
        return columns

    def to_config(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "columns": self.count,
            "padding": [[first, padded.tolist()] for first, padded in self.padding],
        }


def _whole(value: Any) -> int:
    """A whole number of JSON, or -1."""
    return value if type(value) is int and 0 <= value < 2**40 else -1
