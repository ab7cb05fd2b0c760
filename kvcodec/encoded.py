"""One side of a cache in packed form: what `Codec.encode` returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvcodec.reference.packing import packed_bytes

if TYPE_CHECKING:
    from kvcodec.codec import Codec

ARRAYS = ("packed", "scale", "zero_point", "center_levels", "center_scale", "weights")


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

    Examples
    --------
    >>> import numpy as np
    >>> import kvcodec as kv
    >>> k = np.random.default_rng(0).standard_normal((1, 2, 128, 64))
    >>> keys = kv.codec("int4").encode(k, side="key")
    >>> keys.packed.shape, keys.scale.shape, keys.center_levels.shape
    ((1, 2, 128, 32), (1, 2, 128), (1, 2, 2, 64))
    """

    codec: Codec
    head_dim: int
    packed: np.ndarray
    scale: np.ndarray
    zero_point: np.ndarray | None = None
    center_levels: np.ndarray | None = None
    center_scale: np.ndarray | None = None
    weights: np.ndarray | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.packed, np.ndarray) or self.packed.ndim != 4:
            raise ValueError("packed must be an array (batch, kv_heads, tokens, packed_bytes).")
        layout = layout_of(self.codec, self.shape)
        if self.weights is not None:
            batch, heads, _, head_dim = self.shape
            layout["weights"] = ((batch, heads, head_dim), np.float32)
        for name in ARRAYS:
            array = getattr(self, name)
            if name not in layout:
                if array is not None:
                    raise ValueError(f"{name} must be None for {self.codec!r}.")
                continue
            shape, dtype = layout[name]
            given = (getattr(array, "shape", None), getattr(array, "dtype", type(array).__name__))
            if given != (shape, dtype):
                raise ValueError(
                    f"{name} must have shape {shape} and dtype {np.dtype(dtype)}, "
                    f"but has {given[0]} and {given[1]}."
                )
            object.__setattr__(self, name, np.require(array, requirements=["C", "A"]))
        weights = self.weights
        if weights is not None and not ((weights > 0) & (weights < np.inf)).all():
            raise ValueError("weights must be finite and above 0, but some are not.")

    def freeze(self) -> Encoded:
        """Make the arrays read-only.

        Returns
        -------
        Encoded
            Itself.

        Examples
        --------
        >>> import numpy as np
        >>> import kvcodec as kv
        >>> encoded = kv.codec("int8").encode(np.ones((1, 1, 4, 8)), side="value")
        >>> encoded.freeze().packed.flags.writeable  # what `Codec.encode` returns is frozen
        False
        """
        for name in ARRAYS:
            array = getattr(self, name)
            if array is not None:
                array.flags.writeable = False
        return self

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
        arrays = (getattr(self, name) for name in ARRAYS)
        return sum(array.nbytes for array in arrays if array is not None)

    def __repr__(self) -> str:
        values = int(np.prod(self.shape))
        rate = f", {8 * self.nbytes / values:.2f} bits a value" if values else ""
        return f"<Encoded {self.codec.name} {self.codec.side} {self.shape}{rate}>"


def layout_of(
    codec: Codec, shape: tuple[int, int, int, int]
) -> dict[str, tuple[tuple[int, ...], type]]:
    """Shape and type of each array of what decodes to `shape`, the weights not among them.

    `codec` is one whose side, center and equalize are settled.
    """
    batch, heads, tokens, head_dim = shape
    stored = np.uint16 if codec.scale_dtype == "bfloat16" else np.float32
    scale = (batch, heads, tokens)
    if codec.code == "asymmetric" and codec.group_axis == "token":
        scale = (batch, heads, -(-tokens // codec.group_size), head_dim)
    elif codec.code == "asymmetric":
        scale = (batch, heads, tokens, -(-head_dim // codec.group_size))
    row_bytes = packed_bytes(head_dim, codec.bits, codec.layout)
    layout = {"packed": ((batch, heads, tokens, row_bytes), np.uint8), "scale": (scale, stored)}
    if codec.code == "asymmetric":
        layout["zero_point"] = (scale, stored)
    if codec.center:
        blocks = -(-tokens // codec.block)
        layout["center_levels"] = ((batch, heads, blocks, head_dim), np.int8)
        layout["center_scale"] = ((batch, heads, blocks), stored)
    return layout


def empty_encoded(
    codec: Codec, shape: tuple[int, int, int, int], weights: np.ndarray | None = None
) -> Encoded:
    """Arrays of the right shapes and types, not filled, for what decodes to `shape`."""
    arrays = {name: np.empty(*about) for name, about in layout_of(codec, shape).items()}
    return Encoded(codec=codec, head_dim=shape[3], weights=weights, **arrays)
