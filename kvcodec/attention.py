"""Attention over exact or packed keys and values, and its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcodec import _backend, _validate
from kvcodec._segment import Segment
from kvcodec.codec import Codec
from kvcodec.codec import codec as make_codec
from kvcodec.encoded import Encoded
from kvcodec.reference.attention import group_rows
from kvcodec.reference.window import packed_tokens, window_ranges

__all__ = ["AttentionResult", "attention", "merge_attention", "scores", "windowed_attention"]


class AttentionResult(NamedTuple):
    """Output of attention with the log-sum-exp of its scores.

    Attributes
    ----------
    output : ndarray of float32, shape (batch, q_heads, q_len, head_dim of the values)
        The weighted mean of the values.
    log_sum_exp : ndarray of float32, shape (batch, q_heads, q_len)
        Natural logarithm of the sum of the exponentials of the scores; minus infinity where a
        query sees no token.
    """

    output: NDArray[np.float32]
    log_sum_exp: NDArray[np.float32]


def _query_bits(value: int | None) -> int | None:
    return None if value is None else _validate.choice(value, "query_bits", (8,))


def _probability_bits(value: int | str | None, values: object) -> int | None:
    """7 bits, or 14 for 8-bit codes, unless chosen."""
    if value is None:
        return None
    if isinstance(value, str):
        _validate.choice(value, "probability_bits", ("auto", 7, 14))
        return 14 if isinstance(values, Encoded) and values.codec.bits == 8 else 7
    return _validate.choice(value, "probability_bits", (7, 14))


def _side(x: ArrayLike | Encoded, name: str, side: str) -> NDArray[np.float32] | Encoded:
    """A clean array, or an `Encoded` made for this side."""
    if not isinstance(x, Encoded):
        return _validate.kv_array(x, name)
    if x.codec.side != side:
        raise ValueError(f"{name} must be encoded with side={side!r}, but {x!r} was given.")
    return x


def _softmax_scale(scale: float | None, head_dim: int) -> float:
    return head_dim**-0.5 if scale is None else _validate.positive(scale, "scale")


def _positions(
    positions: ArrayLike | None, batch: int, q_len: int, tokens: int
) -> NDArray[np.int64]:
    """Position of each query, (batch, q_len); by default the queries are the newest tokens."""
    if positions is None:
        if q_len > tokens:
            raise ValueError(
                f"q must have at most as many queries as there are tokens ({tokens}) unless "
                f"positions are given, but has {q_len}."
            )
        positions = np.arange(tokens - q_len, tokens)
    array = np.asarray(positions)
    if array.dtype.kind not in "iu":
        raise TypeError(f"positions must be integers, but have dtype {array.dtype}.")
    if array.shape not in ((q_len,), (batch, q_len)):
        raise ValueError(
            f"positions must have shape ({q_len},) or ({batch}, {q_len}), "
            f"but have shape {array.shape}."
        )
    if array.size and (array.min() < 0 or array.max() >= tokens):
        raise ValueError(
            f"positions must lie from 0 to {tokens - 1}, "
            f"but lie from {array.min()} to {array.max()}."
        )
    return np.ascontiguousarray(np.broadcast_to(array, (batch, q_len)), dtype=np.int64)


def _visible(
    positions: NDArray[np.int64], tokens: int, causal: bool, window: int | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What each query sees: start <= t < stop."""
    stop = positions + 1 if causal else np.full_like(positions, tokens)
    if window is None:
        return np.zeros_like(stop), stop
    return np.maximum(positions + 1 - window, 0), stop


def _check_window(window: int | None, causal: bool) -> None:
    if window is not None:
        _validate.integer(window, "window", 1)
        if not causal:
            raise ValueError("window must be left out for attention that is not causal.")


def attention(
    q: ArrayLike,
    k: ArrayLike | Encoded,
    v: ArrayLike | Encoded,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    positions: ArrayLike | None = None,
    query_bits: int | None = 8,
    probability_bits: int | str | None = "auto",
    return_lse: bool = False,
    backend: str | None = None,
) -> NDArray[np.float32] | AttentionResult:
    """Softmax attention, over packed keys and values without unpacking them in memory.

    Each side is an array of floats, used exactly, or an `Encoded`. Query heads share KV heads
    (grouped-query attention) without repeating them.

    Parameters
    ----------
    q : array_like of float, shape (batch, q_heads, q_len, head_dim)
        Queries, after the rotary embedding; q_heads a multiple of kv_heads.
    k : array_like of float, shape (batch, kv_heads, tokens, head_dim), or Encoded
        Keys.
    v : array_like of float, shape (batch, kv_heads, tokens, value head_dim), or Encoded
        Values.
    scale : float, optional
        Factor of q . k; by default 1 / sqrt(head_dim).
    causal : bool, default False
        Whether a query sees only tokens up to its own position.
    window : int, optional
        With causal: a query sees itself and the ``window - 1`` tokens before.
    softcap : float, optional
        Scores s become ``softcap * tanh(s / softcap)``, before the mask.
    positions : array_like of int, shape (q_len,) or (batch, q_len), optional
        With causal: the token that each query belongs to; by default the queries are the newest
        tokens.
    query_bits : {8, None}, default 8
        Bits of the query in products with packed keys; None keeps it in floating point.
    probability_bits : {"auto", 7, 14, None}, default "auto"
        Bits of the weights in sums of packed values, relative to the largest of 64 tokens; None
        keeps them in floating point. "auto" is 14 for 8-bit codes and 7 otherwise.
    return_lse : bool, default False
        Whether to return the log-sum-exp of the scores too.
    backend : {"auto", "fast", "reference"}, optional
        Which twin computes it; see `config_context`.

    Returns
    -------
    ndarray of float32, shape (batch, q_heads, q_len, value head_dim), or AttentionResult
        The output. A query that sees no token gets zeros.

    Raises
    ------
    ValueError
        If shapes do not fit together, an option is not allowed, or a value is not finite.
    TypeError
        If an array does not hold floats.

    References
    ----------
    A. Vaswani et al., arXiv:1706.03762, equation 1; T. Dao et al., FlashAttention,
    arXiv:2205.14135, algorithm 1; J. Ainslie et al., GQA, arXiv:2305.13245.

    Examples
    --------
    >>> import numpy as np
    >>> import kvcodec as kv
    >>> rng = np.random.default_rng(0)
    >>> k, v = rng.standard_normal((2, 1, 2, 256, 64), dtype=np.float32)
    >>> q = rng.standard_normal((1, 8, 1, 64), dtype=np.float32)
    >>> int8 = kv.codec("int8")
    >>> packed = kv.attention(q, int8.encode(k, side="key"), int8.encode(v, side="value"))
    >>> bool(np.abs(packed - kv.attention(q, k, v)).max() < 0.01)
    True
    """
    q = _validate.kv_array(q, "q")
    k, v = _side(k, "k", "key"), _side(v, "v", "value")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"v must have the batch, heads and tokens of k, {k.shape[:3]}, but has {v.shape[:3]}."
        )
    _validate.query_heads(q, k.shape)
    causal = _validate.boolean(causal, "causal")
    _check_window(window, causal)
    softcap = None if softcap is None else _validate.positive(softcap, "softcap")
    tokens = k.shape[2]
    if not causal and positions is not None:
        raise ValueError("positions must be left out for attention that is not causal.")
    if causal:
        positions = _positions(positions, q.shape[0], q.shape[2], tokens)
    else:
        positions = np.zeros((q.shape[0], q.shape[2]), dtype=np.int64)
    start, stop = _visible(positions, tokens, causal, window)
    output, log_sum_exp = _backend.resolve(backend).attend(
        q,
        [Segment(k, v, start, stop)],
        _softmax_scale(scale, q.shape[3]),
        softcap,
        _query_bits(query_bits),
        _probability_bits(probability_bits, v),
    )
    return AttentionResult(output, log_sum_exp) if return_lse else output


def scores(
    q: ArrayLike,
    k: ArrayLike | Encoded,
    *,
    scale: float | None = None,
    query_bits: int | None = 8,
    backend: str | None = None,
) -> NDArray[np.float32]:
    """Scores of attention before softcap, mask and softmax.

    For packed keys and ``query_bits=8`` they come from integer products and are the same bits on
    every backend.

    Parameters
    ----------
    q : array_like of float, shape (batch, q_heads, q_len, head_dim)
        Queries.
    k : array_like of float, shape (batch, kv_heads, tokens, head_dim), or Encoded
        Keys.
    scale : float, optional
        Factor of q . k; by default 1 / sqrt(head_dim).
    query_bits : {8, None}, default 8
        Bits of the query in products with packed keys; None keeps it in floating point.
    backend : {"auto", "fast", "reference"}, optional
        Which twin computes it; see `config_context`.

    Returns
    -------
    ndarray of float32, shape (batch, q_heads, q_len, tokens)
        The scores.

    Raises
    ------
    ValueError
        If shapes do not fit together, an option is not allowed, or a value is not finite.
    TypeError
        If an array does not hold floats.

    References
    ----------
    A. Vaswani et al., arXiv:1706.03762, equation 1.

    Examples
    --------
    >>> import numpy as np
    >>> import kvcodec as kv
    >>> kv.scores(np.ones((1, 1, 1, 4)), np.ones((1, 1, 2, 4)))
    array([[[[2., 2.]]]], dtype=float32)
    """
    q = _validate.kv_array(q, "q")
    k = _side(k, "k", "key")
    _validate.query_heads(q, k.shape)
    rows = group_rows(q, k.shape[1])
    result = _backend.resolve(backend).scores(
        rows, k, _softmax_scale(scale, q.shape[3]), _query_bits(query_bits)
    )
    return result.reshape(*q.shape[:3], k.shape[2])


def merge_attention(
    outputs: Sequence[ArrayLike] | ArrayLike,
    log_sum_exps: Sequence[ArrayLike] | ArrayLike,
    *,
    backend: str | None = None,
) -> AttentionResult:
    """Combine attention over disjoint sets of tokens into attention over all of them.

    Parameters
    ----------
    outputs : sequence of array_like of float, each of shape (..., head_dim)
        Outputs of `attention` with the same queries.
    log_sum_exps : sequence of array_like of float, each of shape (...)
        Their log-sum-exps; minus infinity for a part in which the query saw nothing.
    backend : {"auto", "fast", "reference"}, optional
        Which twin computes it; see `config_context`.

    Returns
    -------
    AttentionResult
        Output and log-sum-exp over all parts.

    Raises
    ------
    ValueError
        If there is no part, shapes do not fit together, or a value is not finite.
    TypeError
        If an array does not hold floats.

    References
    ----------
    T. Dao et al., FlashAttention, arXiv:2205.14135, section 3.1.

    Examples
    --------
    >>> import numpy as np
    >>> import kvcodec as kv
    >>> parts = [np.array([[1.0]]), np.array([[3.0]])]
    >>> kv.merge_attention(parts, [np.array([0.0]), np.array([0.0])]).output
    array([[2.]], dtype=float32)
    """
    outputs = [_validate.float_array(x, f"outputs[{i}]") for i, x in enumerate(outputs)]
    log_sum_exps = [np.asarray(x) for x in log_sum_exps]
    if not outputs or len(outputs) != len(log_sum_exps):
        raise ValueError(
            f"log_sum_exps must have as many parts as outputs and at least one, "
            f"but there are {len(log_sum_exps)} and {len(outputs)}."
        )
    for i, (output, part) in enumerate(zip(outputs, log_sum_exps, strict=True)):
        if part.dtype.kind != "f":
            raise TypeError(f"log_sum_exps[{i}] must hold floats, but has dtype {part.dtype}.")
        if np.isnan(part).any() or np.isposinf(part).any():
            raise ValueError(f"log_sum_exps[{i}] must be finite or minus infinity, but is not.")
        _validate.shaped(output, f"outputs[{i}]", outputs[0].shape)
        _validate.shaped(part, f"log_sum_exps[{i}]", output.shape[:-1])
    result = _backend.resolve(backend).merge(
        np.stack(outputs), np.stack(log_sum_exps).astype(np.float32)
    )
    return AttentionResult(*result)


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
    have shown it.

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
    _check_window(window, True)
    softcap = None if softcap is None else _validate.positive(softcap, "softcap")
    scale = _softmax_scale(scale, q.shape[3])
    query_bits = _query_bits(query_bits)
    _probability_bits(probability_bits, None)
    positions = _positions(positions, q.shape[0], q.shape[2], k.shape[2])
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
    sinks = _validate.integer(sinks, "sinks", 0)
    recent = _validate.integer(recent, "recent", 0)
    key = make_codec(key) if isinstance(key, str) else key
    value = (make_codec(value) if isinstance(value, str) else value).for_side("value")
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
    ranges = _visible(positions, k.shape[2], True, window)
    return AttentionResult(
        *_backend.resolve(backend).attend(
            np.ascontiguousarray(q),
            window_segments(k, v, body, ranges, positions, sinks, recent),
            _softmax_scale(scale, q.shape[3]),
            softcap,
            query_bits,
            _probability_bits(probability_bits, body[1]),
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
    block = body[0].codec.block
    first, middle, last = window_ranges(*ranges, positions, sinks, recent, block)
    return [
        Segment(k, v, *first),
        Segment(*body, *(np.maximum(edge - sinks, 0) for edge in middle)),
        Segment(k, v, *last),
    ]
