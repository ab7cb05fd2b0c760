"""What a codec does to attention: to its scores, its distribution and its output.

Every query sees what decoding token by token would have shown it: the first tokens ("sinks") and
the newest exactly, whole blocks between them from their codes. Each layer is a problem of its own,
computed with the attention that a cache computes, integer products and all; what is reported is
the mean over the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax

from kvcodec import _validate
from kvcodec._segment import Segment
from kvcodec.attention import attention, scores
from kvcodec.encoded import Encoded
from kvcodec.evaluation.codecs import CodecPair
from kvcodec.evaluation.tensors import Tensors
from kvcodec.metrics import cosine_similarity, kl_divergence, relative_error, relative_mse
from kvcodec.reference.window import packed_tokens
from kvcodec.window import attend_window, encode_body, window_segments

__all__ = ["AttentionQuality", "check_pair", "evaluate_attention"]

SCORES_AT_ONCE = 2**22


@dataclass(frozen=True)
class AttentionQuality:
    """One codec's figures, each a mean over the layers.

    Attributes
    ----------
    name : str
        The name of the codec pair.
    key, value : dict or None
        What `Codec.from_config` makes the codec of each side from; None for float16.
    bits_per_value : float
        Stored bits a number, all metadata counted, the mean of keys and values.
    key_relative_mse, value_relative_mse : float
        Of the decoded tokens: mean squared error relative to the mean square.
    mean_kl : float
        Mean Kullback-Leibler divergence of the quantized attention distribution from the exact
        one, in nats, over the query heads and the queries that see packed tokens.
    output_relative_error : float
        Of the attention output for these queries, in the Frobenius norm.
    output_cosine : float
        Mean cosine of these outputs with the exact ones.
    bytes_per_1000_tokens : float
        What 1000 packed tokens take in all layers and KV heads that were evaluated.
    sinks, recent : int
        Tokens that stayed exact: those at the beginning, and at least as many of the newest.
    """

    name: str
    key: dict[str, Any] | None
    value: dict[str, Any] | None
    bits_per_value: float
    key_relative_mse: float
    value_relative_mse: float
    mean_kl: float
    output_relative_error: float
    output_cosine: float
    bytes_per_1000_tokens: float
    sinks: int
    recent: int


def check_pair(pair: CodecPair, tensors: Tensors, sinks: int, recent: int) -> None:
    """Raise a ValueError that says why a codec pair cannot be evaluated on these tensors.

    Parameters
    ----------
    pair : CodecPair
        The codecs of keys and values.
    tensors : Tensors
        What they would be evaluated on.
    sinks, recent : int
        Exact tokens at the beginning, and of the newest.

    Raises
    ------
    ValueError
        If the codec cannot encode such vectors or no query would see a packed token.

    Examples
    --------
    >>> from kvcodec.evaluation import check_pair, codec_pair, sample_tensors
    >>> check_pair(codec_pair("int4"), sample_tensors(), sinks=4, recent=32)
    """
    if pair.exact_dtype is not None:
        raise ValueError(f"{pair.name} is a number type of a model's cache; for tensors take fp16.")
    pair.check_head_dims(tensors.k.shape[-1], tensors.v.shape[-1])
    first = sinks + recent + pair.block - 1
    last = int(tensors.positions.max(initial=-1))
    if last < first:
        raise ValueError(
            f"no query sees a packed token: with sinks={sinks}, recent={recent} and blocks of "
            f"{pair.block} tokens the first to do so is at position {first}, "
            f"but the last query is at {last}."
        )
    largest = np.finfo(np.float16).max
    if pair.key is None and max(np.abs(tensors.k).max(), np.abs(tensors.v).max()) > largest:
        raise ValueError(f"k or v holds magnitudes above {largest}, the largest float16.")


def evaluate_attention(
    tensors: Tensors,
    pairs: Sequence[CodecPair],
    *,
    sinks: int = 4,
    recent: int = 32,
    progress: Callable[[float], None] | None = None,
) -> list[AttentionQuality]:
    """Measure what codecs do to causal attention.

    Parameters
    ----------
    tensors : Tensors
        Queries, keys and values.
    pairs : sequence of CodecPair
        The codecs to compare.
    sinks : int, default 4
        Exact tokens at the beginning.
    recent : int, default 32
        Newest tokens that stay exact.
    progress : callable, optional
        Is called with the part of the work that is done, from 0 to 1.

    Returns
    -------
    list of AttentionQuality
        One for each pair, in the same order.

    Raises
    ------
    ValueError
        If a pair cannot be evaluated on these tensors, or an option is not allowed.

    References
    ----------
    G. Xiao et al., arXiv:2309.17453, for the exact sinks; Z. Liu et al., KIVI, arXiv:2402.02750,
    section 3.2, for the exact recent tokens.

    Examples
    --------
    >>> from kvcodec.evaluation import codec_pair, evaluate_attention, sample_tensors
    >>> int8, = evaluate_attention(sample_tensors(), [codec_pair("int8")])
    >>> 0 < int8.mean_kl < 0.001
    True
    """
    sinks = _validate.integer(sinks, "sinks", 0)
    recent = _validate.integer(recent, "recent", 0)
    for pair in pairs:
        try:
            check_pair(pair, tensors, sinks, recent)
        except ValueError as error:
            raise ValueError(f"{pair.name} cannot be evaluated: {error}") from None
    if not pairs:
        return []
    chunks = _query_chunks(tensors, sinks + recent + min(pair.block for pair in pairs) - 1)
    layers = tensors.q.shape[0]
    steps = layers * len(pairs) * (1 + len(chunks))
    done = count(1)

    def advance() -> None:
        if progress is not None:
            progress(next(done) / steps)

    by_layer = [
        _evaluate_layer(_layer(tensors, index), pairs, chunks, sinks, recent, advance)
        for index in range(layers)
    ]
    return [
        _mean_over_layers(pair, tensors, figures, sinks, recent)
        for pair, figures in zip(pairs, zip(*by_layer, strict=True), strict=True)
    ]


class _Layer(NamedTuple):
    """One layer's tensors, each with a batch axis of length 1."""

    q: NDArray[np.float32]
    k: NDArray[np.float32]
    v: NDArray[np.float32]
    positions: NDArray[np.int64]


class _Exact(NamedTuple):
    """Exact attention of some queries of a layer, and the queries."""

    q: NDArray[np.float32]
    positions: NDArray[np.int64]
    visible: NDArray[np.bool_]
    scores: NDArray[np.float32]
    log_probabilities: NDArray[np.float64]
    output: NDArray[np.float32]


class _Figures(NamedTuple):
    """What `AttentionQuality` reports, for one layer."""

    key: dict[str, Any] | None
    value: dict[str, Any] | None
    key_relative_mse: float
    value_relative_mse: float
    mean_kl: float
    output_relative_error: float
    output_cosine: float
    bytes_per_token: Fraction


def _layer(tensors: Tensors, index: int) -> _Layer:
    one = slice(index, index + 1)
    return _Layer(tensors.q[one], tensors.k[one], tensors.v[one], tensors.positions[None])


def _query_chunks(tensors: Tensors, first: int) -> list[NDArray[np.int64]]:
    """Indices of the queries at positions from `first` on, few enough to hold their scores."""
    chosen = np.flatnonzero(tensors.positions >= first)
    scores_each = tensors.q.shape[1] * tensors.k.shape[2]
    size = max(SCORES_AT_ONCE // scores_each, 1)
    return [chosen[start : start + size] for start in range(0, len(chosen), size)]


def _evaluate_layer(
    layer: _Layer,
    pairs: Sequence[CodecPair],
    chunks: Sequence[NDArray[np.int64]],
    sinks: int,
    recent: int,
    advance: Callable[[], None],
) -> list[_Figures]:
    """The figures of every pair for one layer; the exact attention is computed once for all."""
    stores = []
    for pair in pairs:
        stores.append(_store(layer, pair, sinks, recent))
        advance()
    exact_outputs = []
    answers: list[list[tuple[NDArray[np.float32], NDArray[np.float64]]]] = [[] for _ in pairs]
    for chunk in chunks:
        exact = _attend_exactly(layer, chunk)
        exact_outputs.append(exact.output)
        for store, answer in zip(stores, answers, strict=True):
            answer.append((store.output(exact), _divergence(store.scores(exact), exact)))
            advance()
    exact_output = np.concatenate(exact_outputs, axis=2)
    positions = layer.positions[0, np.concatenate(chunks)]
    return [
        _figures(
            store,
            exact_output,
            np.concatenate([output for output, _ in answer], axis=2),
            np.concatenate([divergence for _, divergence in answer], axis=2),
            positions >= sinks + recent + pair.block - 1,
        )
        for pair, store, answer in zip(pairs, stores, answers, strict=True)
    ]


def _attend_exactly(layer: _Layer, chosen: NDArray[np.int64]) -> _Exact:
    q, positions = layer.q[:, :, chosen], layer.positions[:, chosen]
    visible = np.arange(layer.k.shape[2]) <= positions[:, None, :, None]
    exact_scores = scores(q, layer.k)
    return _Exact(
        q,
        positions,
        visible,
        exact_scores,
        _log_probabilities(exact_scores, visible),
        attention(q, layer.k, layer.v, causal=True, positions=positions),
    )


def _log_probabilities(
    of_scores: NDArray[np.float32], visible: NDArray[np.bool_]
) -> NDArray[np.float64]:
    return log_softmax(np.where(visible, of_scores.astype(np.float64), -np.inf), axis=-1)


def _divergence(of_scores: NDArray[np.float32], exact: _Exact) -> NDArray[np.float64]:
    """KL of each query's attention distribution, (1, q_heads, q_len)."""
    log_probabilities = _log_probabilities(of_scores, exact.visible)
    return np.asarray(kl_divergence(exact.log_probabilities, log_probabilities))


def _figures(
    store: _Packed | _HalfPrecision,
    exact_output: NDArray[np.float32],
    output: NDArray[np.float32],
    divergence: NDArray[np.float64],
    counted: NDArray[np.bool_],
) -> _Figures:
    key_relative_mse, value_relative_mse = store.relative_mses()
    output, exact_output = output[:, :, counted], exact_output[:, :, counted]
    key, value = store.configs()
    return _Figures(
        key=key,
        value=value,
        key_relative_mse=key_relative_mse,
        value_relative_mse=value_relative_mse,
        mean_kl=float(divergence[:, :, counted].mean()),
        output_relative_error=relative_error(output, exact_output),
        output_cosine=cosine_similarity(output, exact_output),
        bytes_per_token=store.bytes_per_token(),
    )


def _mean_over_layers(
    pair: CodecPair,
    tensors: Tensors,
    figures: Sequence[_Figures],
    sinks: int,
    recent: int,
) -> AttentionQuality:
    def mean(name: str) -> float:
        return float(np.mean([getattr(of_layer, name) for of_layer in figures]))

    return AttentionQuality(
        name=pair.name,
        key=figures[0].key,
        value=figures[0].value,
        bits_per_value=pair.bits_per_value(tensors.k.shape[-1], tensors.v.shape[-1]),
        key_relative_mse=mean("key_relative_mse"),
        value_relative_mse=mean("value_relative_mse"),
        mean_kl=mean("mean_kl"),
        output_relative_error=mean("output_relative_error"),
        output_cosine=mean("output_cosine"),
        bytes_per_1000_tokens=float(1000 * sum(each.bytes_per_token for each in figures)),
        sinks=sinks,
        recent=recent,
    )


def _store(layer: _Layer, pair: CodecPair, sinks: int, recent: int) -> _Packed | _HalfPrecision:
    """Keep the layer's keys and values as the pair says."""
    if pair.key is None or pair.value is None:
        packed = int(packed_tokens(layer.k.shape[2], sinks, recent, pair.block))
        k, v = (x.astype(np.float16).astype(np.float32) for x in (layer.k, layer.v))
        return _HalfPrecision(layer, slice(sinks, sinks + packed), k, v)
    body = encode_body(
        layer.q, layer.k, layer.v, pair.key, pair.value, sinks, recent, layer.positions, None
    )
    return _Packed(layer, sinks, recent, body)


@dataclass(frozen=True, eq=False)
class _Packed:
    """A layer as a cache keeps it: exact sinks, packed body, exact tail."""

    layer: _Layer
    sinks: int
    recent: int
    body: tuple[Encoded, Encoded]

    def configs(self) -> tuple[dict[str, Any], dict[str, Any]]:
        keys, values = self.body
        return keys.codec.to_config(), values.codec.to_config()

    def relative_mses(self) -> tuple[float, float]:
        """Of the decoded keys and values."""
        packed = slice(self.sinks, self.sinks + self.body[0].tokens)
        keys, values = (
            relative_mse(encoded.codec.decode(encoded), exact[:, :, packed])
            for encoded, exact in zip(self.body, (self.layer.k, self.layer.v), strict=True)
        )
        return keys, values

    def bytes_per_token(self) -> Fraction:
        """Of what is stored with each token; the equalizing weights are stored once a sequence."""
        keys, values = self.body
        weights = 0 if keys.weights is None else keys.weights.nbytes
        return Fraction(keys.nbytes - weights + values.nbytes, keys.tokens)

    def scores(self, exact: _Exact) -> NDArray[np.float32]:
        """Scores as each query sees them: from codes where the token is packed for it."""
        keys = self.body[0]
        segment = self._segments(exact)[1]
        token = np.arange(keys.tokens)
        packed = (segment.start[..., None] <= token) & (token < segment.stop[..., None])
        result = exact.scores.copy()
        body = result[..., self.sinks : self.sinks + keys.tokens]
        np.copyto(body, scores(exact.q, keys), where=packed[:, None])
        return result

    def output(self, exact: _Exact) -> NDArray[np.float32]:
        """The output of attention through the window."""
        return attend_window(
            exact.q,
            self.layer.k,
            self.layer.v,
            self.body,
            exact.positions,
            sinks=self.sinks,
            recent=self.recent,
        ).output

    def _segments(self, exact: _Exact) -> list[Segment]:
        visible = np.zeros_like(exact.positions), exact.positions + 1
        layer = self.layer
        return window_segments(
            layer.k, layer.v, self.body, visible, exact.positions, self.sinks, self.recent
        )


@dataclass(frozen=True, eq=False)
class _HalfPrecision:
    """A layer whose keys and values are all rounded to float16."""

    layer: _Layer
    counted: slice
    k: NDArray[np.float32]
    v: NDArray[np.float32]

    def configs(self) -> tuple[None, None]:
        return None, None

    def relative_mses(self) -> tuple[float, float]:
        """Of the tokens that a codec would pack."""
        layer, counted = self.layer, self.counted
        return (
            relative_mse(self.k[:, :, counted], layer.k[:, :, counted]),
            relative_mse(self.v[:, :, counted], layer.v[:, :, counted]),
        )

    def bytes_per_token(self) -> Fraction:
        channels = self.k.shape[-1] + self.v.shape[-1]
        return Fraction(self.k.shape[1] * channels * np.dtype(np.float16).itemsize)

    def scores(self, exact: _Exact) -> NDArray[np.float32]:
        return scores(exact.q, self.k)

    def output(self, exact: _Exact) -> NDArray[np.float32]:
        return attention(exact.q, self.k, self.v, causal=True, positions=exact.positions)
