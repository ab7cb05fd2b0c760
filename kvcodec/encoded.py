"""One side of a cache in packed form: what `Codec.encode` returns."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvcodec.codec import Codec


@dataclass(frozen=True, eq=False)
class Encoded:
    """Keys or values of a stretch of tokens, packed by a codec.

    Every code decodes to ``scale * level`` (plus, for asymmetric codes, a zero point) in the
    rotated and weighted domain; `Codec.decode` undoes all six steps.

    Attributes
    ----------
    codec : Codec
        How it was made; its side is "key" or "value".
    packed : ndarray of uint8, shape (batch, kv_heads, tokens, packed_bytes)
        The codes in the canonical layout: token-major, little end first.
    scale : ndarray of uint16 (bfloat16 bits) or float32
        (batch, kv_heads, tokens) for codes with one scale a token, (batch, kv_heads, groups,
        head_dim) for groups of tokens, (batch, kv_heads, tokens, groups) for groups of channels.
        Where the codec centers, a token with a negative scale is not centered.
    zero_point : ndarray or None
        Of scale's shape and type, for asymmetric codes.
    center_levels : ndarray of int8, shape (batch, kv_heads, blocks, head_dim), or None
        The mean of each block of tokens, where the codec centers.
    center_scale : ndarray, shape (batch, kv_heads, blocks), or None
        Its scale.
    weights : ndarray of float32, shape (batch, kv_heads, head_dim), or None
        The equalizing weights, where the codec equalizes.
    head_dim : int
        Channels of a vector.
    """

    codec: Codec
    head_dim: int
    packed: np.ndarray
    scale: np.ndarray
    zero_point: np.ndarray | None = None
    center_levels: np.ndarray | None = None
    center_scale: np.ndarray | None = None
    weights: np.ndarray | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.packed.shape[2]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of what it decodes to: (batch, kv_heads, tokens, head_dim)."""
        return (*self.packed.shape[:3], self.head_dim)

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        arrays = (getattr(self, field.name) for field in fields(self))
        return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))

    def __repr__(self) -> str:
        values = int(np.prod(self.shape))
        rate = f", {8 * self.nbytes / values:.2f} bits a value" if values else ""
        return f"<Encoded {self.codec.name} {self.codec.side} {self.shape}{rate}>"
