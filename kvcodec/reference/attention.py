r"""Fused dequant-dot attention: scores and value sums straight from integer codes.

Softmax attention of a query q over tokens t with keys k_t and values v_t is

    s_t = scale * q . k_t,    p_t = exp(s_t - max s),    o = sum_t p_t v_t / sum_t p_t.

Packed keys and values are never turned back into floats one by one.

*Scores.* The query goes through the same equalizing (inverted) and rotation as the keys, once, and
is rounded to INT8. With key levels n_t and scale a_t, q . k_t = a_q a_t (n_q . n_t): an integer
product, then two multiplications. The center of a block adds q . c to its centered tokens, one
product a block, for which the query is rounded to 15 bits since c is large. KIVI's channel scales
move into the query, one INT8 query for each group of tokens; its zero points are one float product
a group.

*Value sums.* In a tile of 64 tokens the weights w_t = p_t * (scale of v_t) are rounded to integers
u_t of 7 bits, relative to the largest of the tile: w_t ~ u_t * max(w) / 127. Then sum_t u_t n_t is
an integer sum. For 8-bit values u has 14 bits (two 7-bit digits). The sum stays in the rotated
domain over all tokens; the output is rotated back once.

So everything but the exponential is exact integer arithmetic or a few float32 operations in a
stated order. Products with `query_bits=None` or `probability_bits=None` stay in floating point.

Attention runs over a list of segments (exact sinks, packed body, exact recent tokens) under one
softmax. Each query sees a contiguous range of each segment, which expresses causal masks, sliding
windows and padding. A query that sees nothing gets zeros and a log-sum-exp of minus infinity.
Parts computed apart are merged by their log-sum-exp, as in FlashAttention [1]_.

References
----------
.. [1] T. Dao et al., "FlashAttention", arXiv:2205.14135, section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvcodec._segment import Segment
from kvcodec.blocks import Blocks
from kvcodec.encoded import Encoded
from kvcodec.reference import tiles
from kvcodec.reference._numbers import lane_sum, load, reciprocal, round_scale
from kvcodec.reference.encode import (
    decode_rotated,
    is_centered,
    midpoints,
    rotate,
    unpack_levels,
    unrotate,
)
from kvcodec.reference.symmetric import dequantize_symmetric
from kvcodec.reference.tiles import TILE

CENTER_QUERY_BITS = 15
SATURATION = np.float32(2.0**126)
SMALLEST_TILE_WEIGHT = np.float32(2.0**-112)


def group_rows(q: np.ndarray, kv_heads: int) -> np.ndarray:
    """View (batch, q_heads, q_len, head_dim) as rows of their KV head: (batch, kv_heads, rows, d).

    Grouped-query attention: q_heads / kv_heads consecutive query heads share a KV head.
    """
    batch, q_heads, q_len, head_dim = q.shape
    return q.reshape(batch, kv_heads, q_heads // kv_heads * q_len, head_dim)


def _product(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Left @ right in float64, rounded once to float32. Exact sums if both hold integers."""
    return (left.astype(np.float64) @ right.astype(np.float64)).astype(np.float32)


def _transposed(x: np.ndarray) -> np.ndarray:
    return x.swapaxes(-1, -2)


def normalize_query(q: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Take a power of two out of each query vector and into its softmax scale.

    It is exact, and no product with a key overflows afterwards. Returns the query and the float32
    factor that turns products with it into scores.
    """
    _, exponent = np.frexp(np.abs(q).max(axis=-1, initial=0))
    exponent = np.clip(exponent, -100, 110)
    factor = np.clip(np.ldexp(np.float64(scale), exponent), -SATURATION, SATURATION)
    return np.ldexp(q, -exponent[..., None]), factor.astype(np.float32)


def round_query(q: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric integers of `bits` bits for each query vector, as float32, and their scales."""
    largest = np.float32(2 ** (bits - 1) - 1)
    scale = round_scale(np.abs(q).max(axis=-1, initial=0) / largest, "float32")
    return np.clip(np.rint(q * reciprocal(scale)[..., None]), -largest, largest), scale


def _products_per_token(q: np.ndarray, keys: Encoded, query_bits: int | None) -> np.ndarray:
    """Q . k' for codes with one scale a token; q is weighted and rotated like the keys."""
    levels, key_scale = unpack_levels(keys), np.abs(load(keys.scale))[..., None, :]
    if query_bits is None:
        return _product(q, _transposed(levels)) * key_scale
    rounded, query_scale = round_query(q, query_bits)
    return (_product(rounded, _transposed(levels)) * key_scale) * query_scale[..., None]


def _products_per_group(q: np.ndarray, keys: Encoded, query_bits: int | None) -> np.ndarray:
    """Q . k for codes with a scale and a zero point for each channel of a group of tokens."""
    levels, scale, middle = unpack_levels(keys), load(keys.scale), midpoints(keys)
    size = keys.codec.group_size
    products = np.empty((*q.shape[:-1], keys.tokens), dtype=np.float32)
    for group in range(scale.shape[2]):
        members = slice(group * size, (group + 1) * size)
        folded = q * scale[:, :, group, None, :]
        offset = lane_sum(q * middle[:, :, group, None, :], lanes=16)[..., None]
        level = _transposed(levels[:, :, members])
        if query_bits is None:
            products[..., members] = _product(folded, level) + offset
        else:
            rounded, query_scale = round_query(folded, query_bits)
            products[..., members] = _product(rounded, level) * query_scale[..., None] + offset
    return products


def _products_with_centers(q: np.ndarray, keys: Encoded, query_bits: int | None) -> np.ndarray:
    """Q . c of each token's block; q is the query as it came in."""
    center_scale = load(keys.center_scale)
    if query_bits is None:
        centers = dequantize_symmetric(keys.center_levels, center_scale)
        products = _product(q, _transposed(centers))
    else:
        rounded, query_scale = round_query(q, CENTER_QUERY_BITS)
        products = _product(rounded, _transposed(keys.center_levels))
        products = (products * center_scale[..., None, :]) * query_scale[..., None]
    return products.repeat(keys.codec.block, axis=-1)[..., : keys.tokens]


def scores(
    q: np.ndarray, keys: np.ndarray | Encoded, scale: float, query_bits: int | None
) -> np.ndarray:
    """Scores of rows q (batch, kv_heads, rows, head_dim): scale * q . k for each token."""
    q, factor = normalize_query(q, scale)
    if isinstance(keys, np.ndarray):
        products = _product(q, _transposed(load(keys)))
    else:
        rotated = q if keys.weights is None else q / keys.weights[:, :, None, :]
        rotated = rotate(rotated, keys.codec)
        if keys.codec.code == "asymmetric":
            products = _products_per_group(rotated, keys, query_bits)
        else:
            products = _products_per_token(rotated, keys, query_bits)
        if keys.codec.center:
            with_center = products + _products_with_centers(q, keys, query_bits)
            products = np.where(is_centered(keys)[..., None, :], with_center, products)
    with np.errstate(over="ignore"):
        return np.clip(products * factor[..., None], -SATURATION, SATURATION)


def round_weights(weights: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Integers u of `bits` bits and the step with weights ~ u * step, over the last axis.

    Weights that are all below 2^-112 become 0: their reciprocal would overflow.
    """
    top = np.float32(2**bits - 1)
    largest = weights.max(axis=-1, keepdims=True, initial=0)
    largest = np.where(largest >= SMALLEST_TILE_WEIGHT, largest, np.float32(0))
    inverse = np.where(largest > 0, top / np.where(largest > 0, largest, 1), np.float32(0))
    return np.rint(weights * inverse), largest / top


def value_sums(
    probabilities: np.ndarray, values: np.ndarray | Encoded, probability_bits: int | None
) -> np.ndarray:
    """sum_t p_t v_t, float32 (batch, kv_heads, rows, head_dim), in the values' rotated domain."""
    if isinstance(values, np.ndarray):
        return _product(probabilities, load(values))
    if probability_bits is None:
        return _product(probabilities, decode_rotated(values))

    levels, scale = unpack_levels(values), load(values.scale)
    asymmetric = values.codec.code == "asymmetric"
    size = values.codec.group_size if asymmetric else values.head_dim
    scale = scale if asymmetric else scale[..., None]
    middle = midpoints(values) if asymmetric else None

    total = np.zeros((*probabilities.shape[:-1], values.head_dim), dtype=np.float32)
    for start in range(0, values.tokens, TILE):
        tile = slice(start, start + TILE)
        p = probabilities[..., tile]
        for group in range(scale.shape[-1]):
            channels = slice(group * size, (group + 1) * size)
            u, step = round_weights(p * scale[:, :, None, tile, group], probability_bits)
            total[..., channels] += _product(u, levels[:, :, tile, channels]) * step
            if asymmetric:
                offset = lane_sum(p * middle[:, :, None, tile, group], lanes=16)
                total[..., channels] += offset[..., None]
    return total


def units(segment: Segment) -> Iterator[Segment]:
    """Cut a segment of paged blocks into its units; a unit counts its tokens from 0."""
    if not isinstance(segment.keys, Blocks):
        yield segment
        return
    pairs = zip(segment.keys.unpacked(tiles), segment.values.unpacked(tiles), strict=True)
    for (number, keys), (_, values) in pairs:
        edges = (np.maximum(edge - number, 0) for edge in (segment.start, segment.stop))
        yield Segment(keys, values, *edges)


def attend(
    q: np.ndarray,
    segments: Sequence[Segment],
    scale: float,
    softcap: float | None,
    query_bits: int | None,
    probability_bits: int | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of q (batch, q_heads, q_len, head_dim) over all segments under one softmax.

    Returns the output, float32 (batch, q_heads, q_len, value head_dim), and the log-sum-exp of the
    scores, float32 (batch, q_heads, q_len).
    """
    segments = [part for segment in segments for part in units(segment)]
    kv_heads = segments[0].keys.shape[1]
    repeats = q.shape[1] // kv_heads
    rows = group_rows(q, kv_heads)

    all_scores = []
    for segment in segments:
        s = scores(rows, segment.keys, scale, query_bits)
        if softcap is not None:
            with np.errstate(over="ignore"):
                s = np.float32(softcap) * np.tanh(s / np.float32(softcap))
        token = np.arange(s.shape[-1])
        visible = (segment.start[..., None] <= token) & (token < segment.stop[..., None])
        visible = np.tile(visible, (1, repeats, 1))[:, None]
        all_scores.append(np.where(visible, s, -np.inf))

    largest = np.max([s.max(axis=-1, initial=-np.inf) for s in all_scores], axis=0)
    shift = np.where(np.isfinite(largest), largest, 0)[..., None]
    probabilities = [np.exp(s - shift).astype(np.float32) for s in all_scores]
    total = sum(p.sum(axis=-1, dtype=np.float64) for p in probabilities)

    output = 0
    for segment, p in zip(segments, probabilities, strict=True):
        part = value_sums(p, segment.values, probability_bits)
        if isinstance(segment.values, Encoded):
            part = unrotate(part, segment.values.codec)
        output = output + part
    with np.errstate(divide="ignore"):
        log_sum_exp = largest + np.log(total)
    output = output / np.where(total > 0, total, 1)[..., None]
    shape = q.shape[:3]
    return (
        output.reshape(*shape, output.shape[-1]).astype(np.float32),
        log_sum_exp.reshape(shape).astype(np.float32),
    )


def merge(outputs: np.ndarray, log_sum_exps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Combine attention over disjoint sets of tokens, stacked along the first axis.

    o = sum_j exp(L_j - L) o_j with L = log sum_j exp(L_j).
    """
    parts = log_sum_exps.astype(np.float64)
    largest = parts.max(axis=0)
    shift = np.where(np.isfinite(largest), largest, 0)
    weights = np.exp(parts - shift)
    total = weights.sum(axis=0)
    output = (weights[..., None] * outputs).sum(axis=0) / np.where(total > 0, total, 1)[..., None]
    with np.errstate(divide="ignore"):
        log_sum_exp = shift + np.log(total)
    return output.astype(np.float32), log_sum_exp.astype(np.float32)
