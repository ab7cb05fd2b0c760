"""Attention over exact or packed keys and values, and its parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcodec import _backend, _validate
from kvcodec._segment import Segment
from kvcodec.encoded import Encoded
from kvcodec.reference.attention import group_rows

__all__ = ["AttentionResult", "attention", "merge_attention", "scores"]


class AttentionResult(NamedTuple):
    """Output of attention with the log-sum-exp of its scores.

    Attributes
    ----------
    output : ndarray of float32, shape (batch, q_heads, q_len, head_dim of the values)
        The weighted mean of the values.
    log_sum_exp : ndarray of float32, shape (batch, q_heads, q_len)
        Natural logarithm of the sum of the exponentials of the scores; minus infinity where a
        query sees no token.

    Examples
    --------
    >>> import numpy as np
    >>> import kvcodec as kv
    >>> q, k, v = np.zeros((1, 1, 1, 4)), np.ones((1, 1, 8, 4)), np.ones((1, 1, 8, 4))
    >>> output, log_sum_exp = kv.attention(q, k, v, return_lse=True)
    >>> bool(np.isclose(log_sum_exp[0, 0, 0], np.log(8)))
    True
    """

    output: NDArray[np.float32]
    log_sum_exp: NDArray[np.float32]


def check_query_bits(value: int | None) -> int | None:
    """8 bits, or None for floating point."""
    return None if value is None else _validate.choice(value, "query_bits", (None, 8))


def check_probability_bits(value: int | str | None, value_bits: int) -> int | None:
    """7 bits, or 14 for 8-bit codes of the values, unless chosen."""
    if value is None:
        return None
    _validate.choice(value, "probability_bits", (None, "auto", 7, 14))
    return (14 if value_bits == 8 else 7) if isinstance(value, str) else int(value)


def _bits(values: NDArray[np.float32] | Encoded) -> int:
    return values.codec.bits if isinstance(values, Encoded) else 32


def _side(x: ArrayLike | Encoded, name: str, side: str) -> NDArray[np.float32] | Encoded:
    """A clean array, or an `Encoded` made for this side."""
    if not isinstance(x, Encoded):
        return _validate.kv_array(x, name)
    if x.codec.side != side:
        raise ValueError(f"{name} must be encoded with side={side!r}, but {x!r} was given.")
    return x


def softmax_scale(scale: float | None, head_dim: int) -> float:
    """The factor of q . k, 1 / sqrt(head_dim) unless given."""
    return head_dim**-0.5 if scale is None else _validate.positive(scale, "scale")


def query_positions(
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
    array = _validate.as_array(positions, "positions", "integers")
    if array.size == 0:
        array = array.astype(np.int64)
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


def visible_range(
    positions: NDArray[np.int64], tokens: int, causal: bool, window: int | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What each query sees: start <= t < stop."""
    stop = positions + 1 if causal else np.full_like(positions, tokens)
    if window is None:
        return np.zeros_like(stop), stop
    return np.maximum(positions + 1 - window, 0), stop


def check_window(window: int | None, causal: bool) -> None:
    """A sliding window, for causal attention only."""
    if window is not None:
        _validate.token_count(window, "window", 1)
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
    check_window(window, causal)
    softcap = None if softcap is None else _validate.positive(softcap, "softcap")
    tokens = k.shape[2]
    if not causal and positions is not None:
        raise ValueError("positions must be left out for attention that is not causal.")
    if causal:
        positions = query_positions(positions, q.shape[0], q.shape[2], tokens)
    else:
        positions = np.zeros((q.shape[0], q.shape[2]), dtype=np.int64)
    start, stop = visible_range(positions, tokens, causal, window)
    output, log_sum_exp = _backend.resolve(backend).attend(
        q,
        [Segment(k, v, start, stop)],
        softmax_scale(scale, q.shape[3]),
        softcap,
        check_query_bits(query_bits),
        check_probability_bits(probability_bits, _bits(v)),
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
        rows, k, softmax_scale(scale, q.shape[3]), check_query_bits(query_bits)
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
    log_sum_exps = [
        _validate.log_sum_exp(x, f"log_sum_exps[{i}]") for i, x in enumerate(log_sum_exps)
    ]
    if not outputs or len(outputs) != len(log_sum_exps):
        raise ValueError(
            f"log_sum_exps must have as many parts as outputs and at least one, "
            f"but there are {len(log_sum_exps)} and {len(outputs)}."
        )
    for i, (output, part) in enumerate(zip(outputs, log_sum_exps, strict=True)):
        _validate.shaped(output, f"outputs[{i}]", outputs[0].shape)
        _validate.shaped(part, f"log_sum_exps[{i}]", output.shape[:-1])
    result = _backend.resolve(backend).merge(np.stack(outputs), np.stack(log_sum_exps))
    return AttentionResult(*result)
