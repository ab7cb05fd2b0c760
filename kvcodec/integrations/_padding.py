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
                f"past_key_values must hold as many tokens in every layer, but the mask is for "
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
                "attention_mask must be what it was for the tokens that past_key_values holds, "
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

    def to_config(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "columns": self.count,
            "padding": [[first, padded.tolist()] for first, padded in self.padding],
        }
