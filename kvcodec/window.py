"""Attention through the mixed-precision window: exact sinks, packed body, exact tail."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcodec import _backend, _validate
from kvcodec._segment import Segment
from kvcodec.attention import (
    AttentionResult,
    check_probability_bits,
    check_query_bits,
    check_window,
    query_positions,
    softmax_scale,
    visible_range,
)
from kvcodec.codec import Codec, as_codec
from kvcodec.encoded import Encoded
from kvcodec.reference.window import packed_tokens, window_ranges

__all__ = ["windowed_attention"]


def windowed_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    key: str | Codec = "int4",
    value: str | Codec = "int4",
    *,
    sinks: int = 4,
    recent: int = 64,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    positions: ArrayLike | None = None,
    query_bits: int | None = 8,
    probability_bits: int | str | None = "auto",
    return_lse: bool = False,
    backend: str | None = None,
) -> NDArray[np.float32] | AttentionResult:
    """Causal attention through a mixed-precision window, for a whole sequence at once.

    The first `sinks` tokens and the newest `recent` to ``recent + block - 1`` stay exact; the
    tokens between are packed in blocks. Each query sees what decoding one token at a time would
    have shown it, provided that the queries of the first tokens are among those of the call (see
    `positions`).

    Parameters
    ----------
    q : array_like of float, shape (batch, q_heads, q_len, head_dim)
        Queries; see `positions`.
    k, v : array_like of float, shape (batch, kv_heads, tokens, head_dim)
        All keys and values of the sequence; the values may have another head_dim.
    key, value : str or Codec, default "int4"
        Preset name or codec of each side; both with the same `block`.
    sinks : int, default 4
        Exact tokens at the beginning.
    recent : int, default 64
        Newest tokens that stay exact.
    scale, window, softcap, query_bits, probability_bits, return_lse, backend
        As in `attention`.
    positions : array_like of int, shape (q_len,) or (batch, q_len), optional
        The token that each query belongs to; by default the queries are the newest tokens.
        Equalizing weights are taken from the queries that belong to tokens up to the end of the
        first packed block, and keys are equalized only where there are such queries.

    Returns
    -------
    ndarray of float32, shape (batch, q_heads, q_len, value head_dim), or AttentionResult
        The output.

    Raises
    ------
    ValueError
        If shapes do not fit together, an option is not allowed, or a value is not finite.
    TypeError
        If an array does not hold floats.

    References
    ----------
    G. Xiao et al., attention sinks, arXiv:2309.17453; Z. Liu et al., KIVI, arXiv:2402.02750,
    section 3.2, for the exact recent tokens.

    Examples
    --------
    >>> import numpy as np
    >>> import kvcodec as kv
    >>> rng = np.random.default_rng(0)
    >>> k, v, q = rng.standard_normal((3, 1, 2, 200, 64), dtype=np.float32)
    >>> kv.windowed_attention(q, k, v, key="lm4", value="lm2").shape
    (1, 2, 200, 64)
    """
    q, k, v = (_validate.kv_array(x, name) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    _validate.query_heads(q, k.shape)
    check_window(window, True)
    softcap = None if softcap is None else _validate.positive(softcap, "softcap")
    scale = softmax_scale(scale, q.shape[3])
    query_bits = check_query_bits(query_bits)
    check_probability_bits(probability_bits, value_bits=4)
    positions = query_positions(positions, q.shape[0], q.shape[2], k.shape[2])
    body = encode_body(q, k, v, key, value, sinks, recent, positions, backend)
    result = attend_window(
        q,
        k,
        v,
        body,
        positions,
        sinks=sinks,
        recent=recent,
        scale=scale,
        window=window,
        softcap=softcap,
        query_bits=query_bits,
        probability_bits=probability_bits,
        backend=backend,
    )
    return result if return_lse else result.output


def encode_body(
    q: NDArray[np.float32],
    k: NDArray[np.float32],
    v: NDArray[np.float32],
    key: str | Codec,
    value: str | Codec,
    sinks: int,
    recent: int,
    positions: NDArray[np.int64],
    backend: str | None,
) -> tuple[Encoded, Encoded]:
    """Pack the tokens that have left the window at the end of the sequence."""
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"v must have the batch, heads and tokens of k, {k.shape[:3]}, but has {v.shape[:3]}."
        )
    sinks = _validate.token_count(sinks, "sinks")
    recent = _validate.token_count(recent, "recent")
    key = as_codec(key, "key")
    value = as_codec(value, "value").for_side("value")
    end = sinks + int(packed_tokens(k.shape[2], sinks, recent, key.block))
    early = positions < sinks + key.block
    queries = None
    if key.for_side("key").equalize:
        if early.any():
            # A query of zeros has no energy: each row counts its own early queries only.
            queries = np.where(early[:, None, :, None], q, 0)[:, :, early.any(axis=0)]
        elif key.equalize:
            raise ValueError(
                f"positions must include tokens before {sinks + key.block} for a codec that "
                f"equalizes, but begin at {positions.min(initial=0)}."
            )
        else:
            key = replace(key, equalize=False)
    key = key.for_side("key")
    if key.block != value.block:
        raise ValueError(f"value must have the block of key, {key.block}, but has {value.block}.")
    return (
        key.encode(k[:, :, sinks:end], queries=queries, backend=backend),
        value.encode(v[:, :, sinks:end], backend=backend),
    )


def attend_window(
    q: NDArray[np.float32],
    k: NDArray[np.float32],
    v: NDArray[np.float32],
    body: tuple[Encoded, Encoded],
    positions: NDArray[np.int64],
    *,
    sinks: int,
    recent: int,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    query_bits: int | None = 8,
    probability_bits: int | str | None = "auto",
    backend: str | None = None,
) -> AttentionResult:
    """Attend over exact sinks, a body from `encode_body` and the exact tail.

    Takes checked arguments, in any memory layout; positions have shape (batch, q_len).
    """
    ranges = visible_range(positions, k.shape[2], True, window)
    return AttentionResult(
        *_backend.resolve(backend).attend(
            np.ascontiguousarray(q, dtype=np.float32),
            window_segments(k, v, body, ranges, positions, sinks, recent),
            softmax_scale(scale, q.shape[3]),
            softcap,
            query_bits,
            check_probability_bits(probability_bits, body[1].codec.bits),
        )
    )


def window_segments(
    k: NDArray[np.float32],
    v: NDArray[np.float32],
    body: tuple[Encoded, Encoded],
    ranges: tuple[NDArray[np.int64], NDArray[np.int64]],
    positions: NDArray[np.int64],
    sinks: int,
    recent: int,
) -> list[Segment]:
    """Exact sinks, packed body and exact tail, with what each query sees of them."""
    k, v = (np.ascontiguousarray(x, dtype=np.float32) for x in (k, v))
    block = body[0].codec.block
    first, middle, last = window_ranges(*ranges, positions, sinks, recent, block)
    return [
        Segment(k, v, *first),
        Segment(*body, *(np.maximum(edge - sinks, 0) for edge in middle)),
        Segment(k, v, *last),
    ]
