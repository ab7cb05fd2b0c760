r"""A codec is six steps: center, equalize, rotate, scale, code, pack.

This chapter strings the others together. What a codec of keys or values does to an array
(batch, kv_heads, tokens, head_dim) of float32:

1. center: subtract the stored mean of its block of tokens from each token that it makes shorter;
2. equalize: multiply by the weights;
3. rotate: multiply by the Hadamard matrix, or by random signs and then the Hadamard matrix;
4. scale and 5. code: symmetric, Lloyd-Max, trellis or asymmetric;
6. pack the codes.

Decoding goes the same way back. The weights come from `equalize`: they are taken once a sequence,
from the first block of keys and the queries up to its end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvcodec.encoded import Encoded
from kvcodec.reference._numbers import LARGEST_MAGNITUDE, largest_magnitude_of, load, store
from kvcodec.reference.center import center_blocks, center_tokens, expand_centers
from kvcodec.reference.fwht import fwht
from kvcodec.reference.kivi import dequantize_asymmetric, quantize_asymmetric
from kvcodec.reference.lloyd_max import quantize_lloyd_max
from kvcodec.reference.packing import pack, unpack
from kvcodec.reference.srht import inverse_srht, srht
from kvcodec.reference.symmetric import quantize_symmetric
from kvcodec.reference.trellis import quantize_trellis, windows

if TYPE_CHECKING:
    from kvcodec.codec import Codec


def rotate(x: np.ndarray, codec: Codec) -> np.ndarray:
    """The codec's rotation of the last axis."""
    if codec.rotation == "none":
        return x
    out = np.empty_like(x)
    if codec.rotation == "srht":
        srht(x, codec.signs(x.shape[-1]), out)
    else:
        fwht(x, out)
    return out


def unrotate(y: np.ndarray, codec: Codec) -> np.ndarray:
    """Undo `rotate`."""
    if codec.rotation == "none":
        return y
    out = np.empty_like(y)
    if codec.rotation == "srht":
        inverse_srht(y, codec.signs(y.shape[-1]), out)
    else:
        fwht(y, out)
    return out


def encode(
    x: np.ndarray,
    codec: Codec,
    weights: np.ndarray | None,
    bound: float = LARGEST_MAGNITUDE,
) -> Encoded | None:
    """Encode x (batch, kv_heads, tokens, head_dim) of float32.

    None if a value is not below the bound in magnitude.
    """
    if x.size and not largest_magnitude_of(x) < bound:
        return None
    head_dim = x.shape[-1]
    center_levels = center_scale = zero_point = None
    if codec.center:
        center_levels, center_scale = center_blocks(x, codec.block, codec.scale_dtype)
        x, centered = center_tokens(x, center_levels, center_scale, codec.block)
    if weights is not None:
        x = x * weights[:, :, None, :]
    x = rotate(x, codec)

    if codec.code == "asymmetric":
        codes, scale, zero_point = quantize_asymmetric(
            x, codec.bits, codec.group_size, codec.group_axis, codec.scale_dtype
        )
        zero_point = store(zero_point, codec.scale_dtype)
    elif codec.code == "symmetric":
        levels, scale = quantize_symmetric(x, codec.bits, codec.scale_dtype)
        codes = (levels.astype(np.int16) + 2 ** (codec.bits - 1)).astype(np.uint8)
    elif codec.code == "trellis":
        table = codec.trellis
        codes, scale = quantize_trellis(
            x, table.levels, table.step(head_dim), codec.bits, codec.scale_rule, codec.scale_dtype
        )
    else:
        book = codec.codebook(head_dim)
        codes, scale = quantize_lloyd_max(
            x, book.levels, book.boundaries, book.step, codec.scale_rule, codec.scale_dtype
        )

    if codec.center:
        scale = np.where(centered, scale, -scale)

    return Encoded(
        codec=codec,
        head_dim=head_dim,
        packed=pack(codes, codec.bits, codec.layout),
        scale=store(scale, codec.scale_dtype),
        zero_point=zero_point,
        center_levels=center_levels,
        center_scale=center_scale,
        weights=weights,
    )


def unpack_levels(encoded: Encoded) -> np.ndarray:
    """The int8 level of every code: the integers that attention multiplies with."""
    codec = encoded.codec
    codes = unpack(encoded.packed, encoded.head_dim, codec.bits, codec.layout)
    if codec.code == "trellis":
        codes = windows(codes, codec.bits)
    return codec.levels(encoded.head_dim)[codes]


def is_centered(encoded: Encoded) -> np.ndarray:
    """Which tokens are centered, bool (batch, kv_heads, tokens): those with a positive scale."""
    return ~np.signbit(load(encoded.scale))


def midpoints(encoded: Encoded) -> np.ndarray:
    """What an asymmetric code with level 0 stands for: zero_point + 2^(bits-1) * scale.

    Unsigned codes become signed levels by subtracting 2^(bits-1); this is the other half of that.
    """
    half = np.float32(2 ** (encoded.codec.bits - 1))
    return load(encoded.zero_point) + half * load(encoded.scale)


def decode_rotated(encoded: Encoded) -> np.ndarray:
    """Decode to the rotated, weighted and centered domain, in float32."""
    codec = encoded.codec
    if codec.code != "asymmetric":
        levels = unpack_levels(encoded)
        return levels.astype(np.float32) * np.abs(load(encoded.scale))[..., None]
    codes = unpack(encoded.packed, encoded.head_dim, codec.bits, codec.layout)
    return dequantize_asymmetric(
        codes, load(encoded.scale), load(encoded.zero_point), codec.group_size, codec.group_axis
    )


def decode(encoded: Encoded) -> np.ndarray:
    """Undo all six steps: float32 (batch, kv_heads, tokens, head_dim)."""
    codec = encoded.codec
    x = unrotate(decode_rotated(encoded), codec)
    if encoded.weights is not None:
        x = x / encoded.weights[:, :, None, :]
    if codec.center:
        centers = expand_centers(
            encoded.center_levels, encoded.center_scale, codec.block, encoded.tokens
        )
        x = np.where(is_centered(encoded)[..., None], x + centers, x)
    return x
