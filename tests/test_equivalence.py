"""The reference and every fast build, compared on one table of cases.

A row of the table names the twins that it covers, draws arguments and makes a call. Without a
truth the call must give the same bits on the reference and on every SIMD level and thread count.
With a truth (a float64 oracle and what is allowed besides) the result is floating point: the fast
builds must agree with each other bit for bit, and be at most twice as far from the truth as the
reference is. A new algorithm needs a row and nothing else.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import causal_mask, token_by_token
from hypothesis import given
from hypothesis import strategies as st

import kvcodec as kv
from kvcodec import _backend, _validate, reference
from kvcodec.codebook import HEAD_DIMS
from kvcodec.quantize import LLOYD_MAX_SCALE_RULES, SCALE_DTYPES
from kvcodec.reference.encode import decode_rotated
from kvcodec.reference.fwht import factor_order
from kvcodec.reference.packing import packed_bytes
from kvcodec.reference.tiles import tile
from kvcodec.sequence import Layer, Sequence
from kvcodec.testing import (
    KINDS,
    ORDINARY_KINDS,
    TILE_SIZES,
    arrays,
    assert_equivalent,
    assert_same_bits,
    assert_within_twice,
    backends,
    codecs,
    exact_attention,
    kv_arrays,
    orders,
    sizes,
    twin,
)

ORDERS = [n for n in range(1, 1025) if factor_order(n)]
LAYOUTS = [(2, "dense"), (3, "dense"), (3, "padded"), (4, "dense"), (8, "dense")]
GROUP_SIZES = (1, 5, 32, 128)
EPSILON = 2.0**-20


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    name: str
    covers: tuple[str, ...]
    arguments: st.SearchStrategy[tuple]
    call: Callable[..., Any]
    truth: Callable[..., list[tuple[np.ndarray, float]]] | None = None


# What is drawn


def rng(seed):
    return np.random.default_rng(seed)


seeds = st.integers(0, 2**64 - 1)
short_seeds = st.integers(0, 2**32 - 1)
book_dims = st.sampled_from(HEAD_DIMS)
trellis_dims = st.sampled_from((16, 20, 60, 128))  # the reference takes a while for a long row


def vectors(n):
    """Vectors of n channels, in two leading axes."""
    counts = st.sampled_from((0, 1, 3, 17, 20_000 // n + 1))
    return arrays(st.tuples(st.just(2), counts, st.just(n)))


def tensors(head_dim=TILE_SIZES[1:], tokens=TILE_SIZES, kinds=KINDS):
    """Keys or values."""
    small = kv_arrays(head_dim=head_dim, tokens=tokens, kinds=kinds)
    large = kv_arrays(
        batch=[2], heads=[5], head_dim=[max(head_dim)], tokens=[max(tokens)], kinds=kinds
    )
    return small | small | large


def on_size(strategy, build):
    """Draw a size, then arguments that depend on it."""
    return strategy.flatmap(lambda n: st.tuples(*build(n)))


@st.composite
def coded(draw, n, dtype, low, high, scale_shapes):
    """Random codes (3, tokens, n) and as many scales as `scale_shapes(tokens, n)` has shapes."""
    tokens = draw(sizes())
    generator = rng(draw(short_seeds))
    count = draw(st.sampled_from((1, 3, 20)))
    codes = generator.integers(low, high + 1, (count, tokens, n)).astype(dtype)
    exponents = generator.uniform(-30, 29, (len(scale_shapes), 1))
    return (
        codes,
        *(
            (generator.random((count, *shape(tokens, n))) * 10.0**exponent).astype(np.float32)
            for shape, exponent in zip(scale_shapes, exponents, strict=True)
        ),
    )


def codes_with_scale(dtype, low, high, dims=None):
    dims = sizes(min_size=1) if dims is None else dims
    return dims.flatmap(lambda n: coded(n, dtype, low, high, [lambda tokens, n: (tokens,)]))


def codes_with_groups(group_size, axis):
    def shape(tokens, n):
        token_groups, channel_groups = -(-tokens // group_size), -(-n // group_size)
        return (token_groups, n) if axis == "token" else (tokens, channel_groups)

    return sizes(min_size=1).flatmap(lambda n: coded(n, np.uint8, 0, 255, [shape, shape]))


def packed_rows(bits, layout):
    def build(n):
        width = packed_bytes(n, bits, layout)
        rows = st.tuples(short_seeds, st.sampled_from((0, 3, 1000)), st.integers(0, 2)).map(
            lambda drawn: rng(drawn[0]).integers(0, 256, (drawn[1], width + drawn[2]), np.uint8)
        )
        return rows, st.just(n)

    return on_size(sizes(), build)


def codes(bits):
    return st.tuples(short_seeds, st.sampled_from((0, 3, 1000)), sizes()).map(
        lambda drawn: (rng(drawn[0]).integers(0, 2**bits, (2, *drawn[1:]), np.uint8),)
    )


def head_dims(codec):
    """Sizes that a codec takes."""
    if codec.code in ("lloyd_max", "trellis"):
        return (16, 40, 64, 80, 128)
    return (1, 2, 12, 16, 40, 64, 128) if codec.rotation != "none" else (1, 7, 16, 33, 64, 128)


@st.composite
def encodable(draw, codec, kinds=ORDINARY_KINDS, tokens=TILE_SIZES, max_ratio=3):
    """Keys or values for a codec, queries, and the codec."""
    x = draw(tensors(head_dims(codec), tokens, kinds))
    batch, heads, _, head_dim = x.shape
    ratio, q_len = draw(st.integers(1, max_ratio)), draw(st.sampled_from((1, 2, 7, 65)))
    q = draw(arrays((batch, heads * ratio, q_len, head_dim), kinds))
    return x, q, codec


@st.composite
def any_encodable(draw, side):
    """As `encodable`, for any codec of a side."""
    head_dim = draw(st.sampled_from((1, 7, 16, 40, 64, 80, 128)))
    return draw(encodable_with(draw(codecs(side, head_dim)), head_dim))


@st.composite
def encodable_with(draw, codec, head_dim):
    x = draw(tensors([head_dim]))
    q = draw(arrays((x.shape[0], 2 * x.shape[1], 3, head_dim)))
    return x, q, codec


def encode(x, q, codec):
    return codec.encode(x, queries=q if codec.equalize else None)


def encoded_by_reference(x, q, codec):
    with kv.config_context(backend="reference"):
        return encode(x, q, codec)


def encoded(strategy):
    """Queries and what the reference encodes."""
    return strategy.map(lambda drawn: (drawn[1], encoded_by_reference(*drawn)))


# Probabilities for value sums


@st.composite
def weighted_values(draw, values, heads_of, kinds=("softmax", "sparse", "zero", "tiny")):
    """Probabilities (batch, kv_heads, rows, tokens) and the values they belong to."""
    x = draw(values)
    batch, heads, tokens = heads_of(x)
    rows, kind = draw(st.sampled_from((1, 3, 65))), draw(st.sampled_from(kinds))
    generator = rng(draw(short_seeds))
    p = np.exp(-generator.exponential(4, (batch, heads, rows, tokens)))
    if kind == "sparse":
        p *= generator.random(p.shape) < 0.1
    if kind == "tiny":
        p *= 10.0 ** -generator.uniform(0, 45, (batch, heads, rows, 1))
    return p.astype(np.float32) * np.float32(kind != "zero"), x


def weighted_codes(codec, **options):
    made = encodable(codec, **options).map(lambda drawn: encoded_by_reference(*drawn))
    return weighted_values(made, lambda x: x.shape[:3])


def sums_truth(p, values):
    """Value sums in float64, and the float32 rounding allowed for them."""
    exact = values if isinstance(values, np.ndarray) else decode_rotated(values)
    total = p.astype(np.float64) @ exact
    largest = p.astype(np.float64).sum(axis=-1).max(initial=0) * np.abs(exact).max(initial=0)
    return [(total, EPSILON * largest)]


# Attention


@st.composite
def attention_arguments(draw, key, value, causal_only=False):
    """Queries, keys, values, codecs of each side (None for exact), and options."""
    head_dim = draw(st.sampled_from((16, 40, 64, 128)))
    value_dim = draw(st.sampled_from((head_dim, 64)))
    batch, heads = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    ratio = draw(st.sampled_from((1, 2, 4, 7, 8)))
    tokens = draw(sizes(min_size=1))
    q_len = draw(st.sampled_from([n for n in (1, 2, 17, 65, tokens) if n <= tokens]))
    q = draw(arrays((batch, heads * ratio, q_len, head_dim), ORDINARY_KINDS))
    k = draw(arrays((batch, heads, tokens, head_dim), ORDINARY_KINDS))
    v = draw(arrays((batch, heads, tokens, value_dim), ORDINARY_KINDS))

    options = {
        "scale": draw(st.sampled_from((None, 0.02))),
        "softcap": draw(st.sampled_from((None, 5.0))),
        "query_bits": draw(st.sampled_from((8, None))),
        "probability_bits": draw(st.sampled_from(("auto", 7, 14, None))),
    }
    causal = causal_only or draw(st.booleans())
    if causal:
        options["window"] = draw(st.sampled_from((None, 1, 5, 70)))
        options["positions"] = draw(
            st.none() | short_seeds.map(lambda seed: rng(seed).integers(0, tokens, (batch, q_len)))
        )
    if not causal_only:
        options["causal"] = causal
    return q, k, v, key, value, options


def side_for(x, name, side, q):
    if name is None:
        return x
    codec = kv.codec(name).for_side(side)
    return encoded_by_reference(x, q, codec)


def attend(q, k, v, key, value, options):
    k, v = side_for(k, key, "key", q), side_for(v, value, "value", q)
    return kv.attention(q, k, v, **options, return_lse=True)


def mask_of(options, tokens, q_len):
    positions = options.get("positions")
    positions = np.arange(tokens - q_len, tokens) if positions is None else positions
    return causal_mask(positions, tokens, options.get("window"))


def attention_truth(q, k, v, key, value, options):
    """Attention in float64 over what is decoded, and the float32 rounding allowed for it."""
    k, v = (
        x if isinstance(x, np.ndarray) else reference.decode(x)
        for x in (side_for(k, key, "key", q), side_for(v, value, "value", q))
    )
    visible = mask_of(options, k.shape[2], q.shape[2]) if options["causal"] else None
    truth = exact_attention(
        q, k, v, visible=visible, scale=options["scale"], softcap=options["softcap"]
    )
    return list(zip(truth, allowed_errors(q, k, v, options, value is not None), strict=True))


def allowed_errors(q, k, v, options, packed):
    """Float32 rounding of the output and of the log-sum-exp.

    The rounded weights of packed values may fall on either side of a tie.
    """
    scale = q.shape[3] ** -0.5 if options["scale"] is None else options["scale"]
    score_error = EPSILON * (1 + scale * longest(q) * longest(k))
    steps = {None: np.inf, 7: 127, 14: 16383, "auto": 127}[options["probability_bits"]]
    rounding = np.sqrt(v.shape[3]) / steps if packed else 0
    return np.abs(v).max(initial=0) * (score_error + rounding), score_error


def longest(x):
    """The largest norm of a vector."""
    return np.linalg.norm(x.astype(np.float64), axis=-1).max(initial=0)


def windowed_attend(q, k, v, key, value, options):
    return kv.windowed_attention(
        q, k, v, key, value, sinks=3, recent=20, **options, return_lse=True
    )


def codec_of_window(name):
    group = {"group_size": 16} if name.startswith("kivi") else {}
    return kv.codec(name, block=16, **group)


def windowed_truth(q, k, v, key, value, options):
    """Decoding token by token in float64, and the float32 rounding allowed for it."""
    batch, q_len, tokens = q.shape[0], q.shape[2], k.shape[2]
    positions = options["positions"]
    positions = np.arange(tokens - q_len, tokens) if positions is None else positions
    positions = np.broadcast_to(positions, (batch, q_len))
    seen_early = (positions < 3 + key.block).all(axis=0).any()
    key = key if seen_early else replace(key, equalize=False)
    truth = token_by_token(
        q,
        k,
        v,
        key.for_side("key"),
        value.for_side("value"),
        3,
        20,
        positions,
        window=options["window"],
        scale=options["scale"],
        softcap=options["softcap"],
    )
    return list(zip(truth, allowed_errors(q, k, v, options, packed=True), strict=True))


def scores_truth(q, keys):
    """Scores in float64, and the float32 rounding allowed for them."""
    k = keys if isinstance(keys, np.ndarray) else reference.decode(keys)
    k = k.astype(np.float64).repeat(q.shape[1] // k.shape[1], axis=1)
    exact = q.astype(np.float64) @ k.swapaxes(-1, -2) * q.shape[3] ** -0.5
    return [(exact, EPSILON * longest(q) * longest(k))]


@st.composite
def parts_to_merge(draw):
    """Outputs and log-sum-exps of a few parts, some of which saw nothing."""
    parts = draw(st.integers(1, 4))
    shape = (parts, draw(st.integers(1, 2)), draw(sizes()))
    outputs = draw(arrays((*shape, draw(sizes(min_size=1))), ORDINARY_KINDS))
    log_sum_exps = 10 * draw(arrays((*shape, 1), ORDINARY_KINDS))[..., 0]
    unseen = rng(draw(short_seeds)).random(shape) < 0.3
    return outputs, np.where(unseen, np.float32(-np.inf), log_sum_exps)


def merge_truth(outputs, log_sum_exps):
    parts = log_sum_exps.astype(np.float64)
    largest = parts.max(axis=0, initial=-np.inf)
    largest = np.where(np.isfinite(largest), largest, 0)
    weights = np.exp(parts - largest)
    total = weights.sum(axis=0)
    output = (weights[..., None] * outputs).sum(axis=0) / np.where(total > 0, total, 1)[..., None]
    with np.errstate(divide="ignore"):
        log_sum_exp = largest + np.log(total)
    finite = parts[np.isfinite(parts)]
    return [
        (output, EPSILON * np.abs(outputs).max(initial=0)),
        (log_sum_exp, EPSILON * (1 + np.abs(finite).max(initial=0))),
    ]


# The table

PRESET_CODECS = {
    f"{name} {side}": kv.codec(name).for_side(side)
    for name, side in product(kv.PRESETS, ("key", "value"))
}
KEY_CODECS = {name: codec for name, codec in PRESET_CODECS.items() if codec.side == "key"}
VALUE_CODECS = {name: codec for name, codec in PRESET_CODECS.items() if codec.side == "value"}
PAIRS = [
    (None, None),
    (None, "int4"),
    ("int4", None),
    *((name, name) for name in kv.PRESETS),
    ("lm4", "lm2"),
    ("int8", "kivi2"),
    ("kivi4", "int3"),
]


def in_place(function):
    """The function with its result written over a copy of its first argument."""

    def call(x, *args):
        buffer = x.copy()
        assert function(buffer, *args, out=buffer) is buffer
        return buffer

    return call


@st.composite
def tiles_and_rows(draw, width, side):
    """Tiles of two heads in one unit of a page, and canonical rows to put into them."""
    n, count = draw(st.sampled_from((1, 7, 16, 33, 64, 80, 128, 256))), draw(st.integers(1, 3))
    slot = draw(st.integers(0, 64 * count - 1))
    tokens = draw(st.integers(0, 64 * count - slot))
    random = rng(draw(short_seeds))
    before, rows = (
        random.integers(0, 2**width, shape, dtype=np.uint8)
        for shape in ((2, 2, count, 64, n), (2, tokens, n))
    )
    return tile(before, width, side), slot, kv.pack(rows, width), n


def contents():
    """Bytes of any number, few or many."""
    counts = st.integers(0, 300) | st.sampled_from((4096, 100_003))
    return st.tuples(short_seeds, counts).map(
        lambda drawn: rng(drawn[0]).integers(0, 256, drawn[1], np.uint8)
    )


def write_and_read(width, side):
    def call(page, slot, rows, n):
        page = page.copy()
        twin("write_tiles")(page[:, 1], slot, rows, n, width, side)
        tokens = slot + rows.shape[1]
        return page, twin("read_tiles")(page[:, 1], tokens, n, width, side)

    return call


@st.composite
def sequences_and_queries(draw):
    """A sequence of a cache with queries of its newest tokens, and what they see of it."""
    pick = lambda *choices: draw(st.sampled_from(choices))  # noqa: E731
    random = rng(draw(short_seeds))
    block, rollback, window = pick(1, 32, 64), pick(0, 40), pick(None, 1, 50)
    codecs = [
        None if name is None else kv.codec(name, block=block, **options).for_side(side)
        for side, (name, options) in (
            ("key", pick((None, {}), ("int4", {"center": False, "equalize": False}))),
            ("value", pick((None, {}), ("int8", {}), ("lm2", {}))),
        )
    ]
    exact = (pick(0, 4), pick(0, 20), block, rollback, window, pick("float32", "bfloat16"), 0)
    sequence = Sequence(Layer(2, 32, 16, *codecs, *exact))
    for tokens, is_last in ((pick(0, 3, 40, 150), False), (pick(1, 70, 200), True)):
        before, packed_end = sequence.end, sequence.packed_end
        k, v = (random.standard_normal((1, 2, tokens, n), dtype=np.float32) for n in (32, 16))
        sequence.append(k, v, None, reference)
        appended = packed_end, max(pick(before - packed_end, sequence.end), 0) // block
        if is_last and pick(True, False):
            break  # as when the tokens' own queries see them
        sequence.trim()
        sequence.evict(draw(st.integers(0, max(sequence.length - exact[0] - 3, 0) // 2)))
    counts = (count for count in (1, 40, 20, 2, 0) if count <= sequence.length)
    count = pick(*filter(sequence.can_attend, counts))
    blocks = pick((sequence.packed_end, 0), appended)
    return random.standard_normal((1, 4, count, 32), dtype=np.float32), sequence, *blocks


def attend_to_sequence(q, sequence, *blocks):
    """The same bits as attention over the segments of the reference."""
    options, found = (0.2, None, 8, 7), []
    for seen in product((True, False), (None, 1, 30)):
        result = twin("attend_sequence")(q, sequence, *blocks, *seen, *options)
        segments = sequence.segments(q.shape[2], *blocks, *seen)
        assert_same_bits(result, twin("attend")(q, segments, *options))
        found.append(result[0].shape)
    return found


@st.composite
def slots_and_tokens(draw):
    """Exact tokens as they are kept, a slot, and a stretch of other tokens to put there."""
    x = draw(tensors().filter(lambda x: x.shape[0] == 1))
    first = draw(st.integers(0, x.shape[2]))
    stop = draw(st.integers(first, x.shape[2]))
    slot, left = draw(st.integers(0, 70)), draw(st.integers(0, 2))
    shape = (1, x.shape[1], slot + stop - first + left, x.shape[3])
    return np.ones(shape, draw(st.sampled_from((np.float32, np.uint16)))), slot, x, first, stop


def count_clean(x):
    """How many tokens are found in an array, and in what only looks like it."""
    memory = np.zeros(x.nbytes + 1, np.uint8)
    unaligned = np.frombuffer(memory[1:].data, np.float32).reshape(x.shape)
    others = (x.astype(dtype) for dtype in (np.float64, ">f4", np.int32, ml_dtypes.bfloat16))
    broken = [x.copy() for _ in range(3)]
    for array, value in zip(broken, (np.nan, -np.inf, -(2.0**100)), strict=True):
        array.flat[-1:] = value
    masked, strided = np.ma.masked_array(x), (x[..., ::2], x[..., ::-1], x.T)
    count, (batch, heads, _, n) = twin("clean_tokens"), x.shape
    shapes = [
        (batch, heads, n),
        (batch + 1, heads, n),
        (batch, 2 * heads, n),
        (batch, heads, 2 * n),
    ]
    found = [count(x, *shape) for shape in (*shapes, (batch, 1, n))]
    for y in (x.tolist(), None, x.data, x[0], masked, unaligned, *strided, *others, *broken):
        found.append(count(y, batch, heads, n))
        assert found[-1] < 0 or _validate.kv_array(y, "y") is y, "it passes the checks as it is"
    return found


def keep(kept, *rest):
    kept = kept.copy()
    twin("keep_tokens")(kept, *rest)
    return kept


TABLE = [
    *(Case(f"fwht {n}", ("fwht",), st.tuples(vectors(n)), kv.fwht) for n in ORDERS),
    *(Case(f"srht {n}", ("srht",), st.tuples(vectors(n), seeds), kv.srht) for n in ORDERS),
    *(
        Case(f"inverse_srht {n}", ("inverse_srht",), st.tuples(vectors(n), seeds), kv.inverse_srht)
        for n in ORDERS
    ),
    *(
        Case(
            f"{function.__name__} in place",
            (function.__name__,),
            on_size(orders(), lambda n, rest=rest: (vectors(n), *rest)),
            in_place(function),
        )
        for function, rest in ((kv.fwht, ()), (kv.srht, (seeds,)), (kv.inverse_srht, (seeds,)))
    ),
    *(
        Case(
            f"quantize_symmetric {bits} {dtype}",
            ("quantize_symmetric",),
            on_size(sizes(min_size=1), lambda n: (vectors(n),)),
            lambda x, bits=bits, dtype=dtype: kv.quantize_symmetric(x, bits, scale_dtype=dtype),
        )
        for bits, dtype in product((2, 3, 4, 8), SCALE_DTYPES)
    ),
    Case(
        "dequantize_symmetric",
        ("dequantize_symmetric",),
        codes_with_scale(np.int8, -128, 127),
        kv.dequantize_symmetric,
    ),
    *(
        Case(
            f"quantize_asymmetric {bits} by {axis} group {group} {dtype}",
            ("quantize_asymmetric",),
            st.tuples(tensors()),
            lambda x, bits=bits, axis=axis, group=group, dtype=dtype: kv.quantize_asymmetric(
                x, bits, group_size=group, axis=axis, scale_dtype=dtype
            ),
        )
        for bits, axis, group, dtype in product(
            (2, 4, 8), ("token", "channel"), GROUP_SIZES, SCALE_DTYPES
        )
    ),
    *(
        Case(
            f"dequantize_asymmetric by {axis} group {group}",
            ("dequantize_asymmetric",),
            codes_with_groups(group, axis),
            lambda codes, scale, zero_point, axis=axis, group=group: kv.dequantize_asymmetric(
                codes, scale, zero_point, group_size=group, axis=axis
            ),
        )
        for axis, group in product(("token", "channel"), GROUP_SIZES)
    ),
    *(
        Case(
            f"quantize_kivi_keys group {group} residual {residual}",
            ("quantize_asymmetric",),
            st.tuples(tensors()),
            lambda k, group=group, residual=residual: kv.quantize_kivi_keys(
                k, 2, group_size=group, residual=residual
            ),
        )
        for group, residual in ((5, 0), (32, 33))
    ),
    Case(
        "largest_magnitude_of",
        ("largest_magnitude_of",),
        on_size(st.integers(1, 200), lambda n: (vectors(n),)).filter(lambda drawn: drawn[0].size),
        lambda x: twin("largest_magnitude_of")(x),
    ),
    Case(
        "clean_tokens",
        ("clean_tokens",),
        st.tuples(tensors(tokens=(0, 1, 17), kinds=("normal",))),
        count_clean,
    ),
    Case("attend_sequence", ("attend_sequence",), sequences_and_queries(), attend_to_sequence),
    Case("keep_tokens", ("keep_tokens",), slots_and_tokens(), keep),
    *(
        Case(
            f"tiles of {width} bits by {side}",
            ("write_tiles", "read_tiles"),
            tiles_and_rows(width, side),
            write_and_read(width, side),
        )
        for width, side in product((2, 3, 4, 8), ("key", "value"))
    ),
    *(
        Case(
            f"quantize_lloyd_max {bits} {rule} {dtype}",
            ("quantize_lloyd_max",),
            on_size(book_dims, lambda n: (vectors(n),)),
            lambda x, bits=bits, rule=rule, dtype=dtype: kv.quantize_lloyd_max(
                x, bits, scale_rule=rule, scale_dtype=dtype
            ),
        )
        for bits, rule, dtype in product((2, 3, 4), LLOYD_MAX_SCALE_RULES, SCALE_DTYPES)
    ),
    *(
        Case(
            f"dequantize_lloyd_max {bits}",
            ("dequantize_lloyd_max",),
            codes_with_scale(np.uint8, 0, 2**bits - 1, book_dims),
            lambda codes, scale, bits=bits: kv.dequantize_lloyd_max(codes, scale, bits),
        )
        for bits in (2, 3, 4)
    ),
    *(
        Case(
            f"quantize_trellis {bits}",
            ("quantize_trellis",),
            on_size(
                trellis_dims,
                lambda n: (
                    vectors(n),
                    st.sampled_from(LLOYD_MAX_SCALE_RULES),
                    st.sampled_from(SCALE_DTYPES),
                ),
            ),
            lambda x, rule, dtype, bits=bits: kv.quantize_trellis(
                x, bits, scale_rule=rule, scale_dtype=dtype
            ),
        )
        for bits in (2, 3, 4)
    ),
    *(
        Case(
            f"dequantize_trellis {bits}",
            ("dequantize_trellis",),
            codes_with_scale(np.uint8, 0, 2**bits - 1, trellis_dims),
            lambda codes, scale, bits=bits: kv.dequantize_trellis(codes, scale, bits),
        )
        for bits in (2, 3, 4)
    ),
    *(
        Case(
            f"pack {bits} {layout}",
            ("pack",),
            codes(bits),
            lambda codes, bits=bits, layout=layout: kv.pack(codes, bits, layout=layout),
        )
        for bits, layout in LAYOUTS
    ),
    *(
        Case(
            f"unpack {bits} {layout}",
            ("unpack",),
            packed_rows(bits, layout),
            lambda rows, n, bits=bits, layout=layout: kv.unpack(rows, n, bits, layout=layout),
        )
        for bits, layout in LAYOUTS
    ),
    Case(
        "block_means",
        ("block_means",),
        st.tuples(tensors(), st.sampled_from((1, 5, 64))),
        twin("block_means"),
    ),
    *(
        Case(
            f"center_blocks {dtype}",
            ("center_blocks",),
            st.tuples(tensors(), st.sampled_from((2, 5, 64)), st.just(dtype)),
            twin("center_blocks"),
        )
        for dtype in SCALE_DTYPES
    ),
    Case("channel_energy", ("channel_energy",), st.tuples(tensors()), twin("channel_energy")),
    *(
        Case(
            f"encode {name}",
            ("encode", "center_blocks", "channel_energy"),
            encodable(codec, kinds=("normal", *ORDINARY_KINDS, "huge", "tiny")),
            encode,
        )
        for name, codec in PRESET_CODECS.items()
    ),
    *(
        Case(f"encode any {side}", ("encode",), any_encodable(side), encode)
        for side in ("key", "value")
    ),
    *(
        Case(
            f"decode {name}",
            ("decode",),
            encoded(encodable(codec)),
            lambda q, encoded: encoded.codec.decode(encoded),
        )
        for name, codec in PRESET_CODECS.items()
    ),
    *(
        Case(
            f"decode any {side}",
            ("decode",),
            encoded(any_encodable(side)),
            lambda q, encoded: encoded.codec.decode(encoded),
        )
        for side in ("key", "value")
    ),
    *(
        Case(f"scores {name}", ("scores",), encoded(encodable(codec)), kv.scores)
        for name, codec in KEY_CODECS.items()
    ),
    Case("scores any key", ("scores",), encoded(any_encodable("key")), kv.scores),
    *(
        Case(
            f"scores {name} by a float query",
            ("scores",),
            encoded(encodable(codec)),
            lambda q, keys: kv.scores(q, keys, query_bits=None),
            scores_truth,
        )
        for name, codec in KEY_CODECS.items()
    ),
    Case(
        "scores of exact keys",
        ("scores",),
        encodable(kv.codec("int8", side="key")).map(lambda drawn: (drawn[1], drawn[0])),
        kv.scores,
        scores_truth,
    ),
    *(
        Case(
            f"value_sums {name} by {bits} bits",
            ("value_sums",),
            weighted_codes(codec, max_ratio=1),
            lambda p, values, bits=bits: twin("value_sums")(p, values, bits),
        )
        for (name, codec), bits in product(VALUE_CODECS.items(), (7, 14))
    ),
    *(
        Case(
            f"value_sums any value by {bits} bits",
            ("value_sums",),
            weighted_values(
                any_encodable("value").map(lambda drawn: encoded_by_reference(*drawn)),
                lambda x: x.shape[:3],
            ),
            lambda p, values, bits=bits: twin("value_sums")(p, values, bits),
        )
        for bits in (7, 14)
    ),
    *(
        Case(
            f"value_sums {name} by floats",
            ("value_sums",),
            weighted_codes(codec, max_ratio=1),
            lambda p, values: twin("value_sums")(p, values, None),
            sums_truth,
        )
        for name, codec in VALUE_CODECS.items()
    ),
    Case(
        "value_sums of exact values",
        ("value_sums",),
        weighted_values(tensors(kinds=ORDINARY_KINDS), lambda x: x.shape[:3]),
        lambda p, values: twin("value_sums")(p, values, 7),
        sums_truth,
    ),
    *(
        Case(
            f"attention {key} keys {value} values",
            ("attend", "scores", "value_sums"),
            attention_arguments(key, value),
            attend,
            attention_truth,
        )
        for key, value in PAIRS
    ),
    *(
        Case(
            f"windowed_attention {key} keys {value} values",
            ("attend", "encode"),
            attention_arguments(codec_of_window(key), codec_of_window(value), causal_only=True),
            windowed_attend,
            windowed_truth,
        )
        for key, value in PAIRS
        if key and value
    ),
    Case("merge_attention", ("merge",), parts_to_merge(), kv.merge_attention, merge_truth),
    Case("read_all", ("read_all",), st.tuples(contents()), twin("read_all")),
]


# The tests


@pytest.fixture
def fast_path(monkeypatch):
    """Start threads for the least work; skip without the fast path, or fail if it is required."""
    if len(backends()) == 1:
        reason = f"no compiled fast path here: {kv.get_config()['fast_path_error']}"
        if os.environ.get("KVCODEC_REQUIRE_FAST") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    monkeypatch.setattr(_backend, "PARALLEL_FROM", 0)


@pytest.mark.usefixtures("fast_path")
@given(data=st.data())
@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_fast_path_equals_the_reference(case, data):
    args = data.draw(case.arguments)
    if case.truth is None:
        assert_equivalent(case.call, *args)
    else:
        assert_within_truth(case, args)


def assert_within_truth(case, args):
    results = []
    for backend in backends():
        with backend.context():
            result = case.call(*args)
        results.append(result if isinstance(result, tuple) else (result,))
    expected, first, *others = results
    for backend, other in zip(backends()[2:], others, strict=True):
        assert_same_bits(other, first, backend.label)
    truths = case.truth(*args)
    for i, (part, other, (truth, atol)) in enumerate(zip(first, expected, truths, strict=True)):
        assert (part.dtype, part.shape) == (other.dtype, other.shape)
        assert_within_twice(part, other, truth, atol, f"result[{i}]")


def test_every_twin_has_a_row():
    assert {name for case in TABLE for name in case.covers} == set(reference.__all__)


def test_row_names_are_unique():
    names = [case.name for case in TABLE]
    assert len(names) == len(set(names))


@pytest.mark.usefixtures("fast_path")
def test_fast_modules_have_the_names_of_the_reference():
    for backend in backends()[1:]:
        with backend.context():
            for name in reference.__all__:
                assert callable(getattr(_backend.resolve(), name))
