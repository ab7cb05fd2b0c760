"""What chunks of predictions say of a codec: divergence, agreement and perplexity, with errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcodec.evaluation.language_model import ChunkOptions, Predictions

__all__ = ["ModelQuality", "summarize"]

RESAMPLES = 1000


@dataclass(frozen=True)
class ModelQuality:
    """One codec's figures on a language model, over all counted predictions.

    Attributes
    ----------
    model : str
        The name of the model.
    name : str
        The name of the codec pair.
    key, value : dict or None
        What `Codec.from_config` makes the codec of each side from; None without a codec.
    bits_per_value : float
        Stored bits a number of a packed token, all metadata counted.
    bytes_per_token : float
        Bytes of a packed token in all layers.
    mean_kl, mean_kl_error : float
        Mean Kullback-Leibler divergence of the predicted distribution from that of the float32
        run, in nats, and its standard error: the spread of means over chunks drawn with
        replacement. NaN for one chunk.
    median_kl, kl_90, kl_99, kl_999 : float
        Median, and what 90, 99 and 99.9% of the predictions stay below.
    same_top : float
        Share of predictions whose likeliest token is that of the float32 run.
    rms_probability_change : float
        Root of the mean squared change of the probability of the text's next token.
    perplexity, exact_perplexity : float
        Of the text, with the codec and in the float32 run.
    perplexity_ratio, perplexity_ratio_error : float
        The first over the second, and its standard error, found as that of the mean.
    left_out : int
        Entries of the vocabulary that were not finite, summed over positions, and did not count.
    tokens_per_second : float
        Tokens fed over the time of the forward passes.
    predictions, chunks, tokens : int
        Counted predictions, chunks, and tokens of a chunk.
    sinks, recent, block, chunk : int
        Exact tokens at the beginning, of the newest, tokens packed at a time, and tokens fed at a
        time.
    """

    model: str
    name: str
    key: dict[str, Any] | None
    value: dict[str, Any] | None
    bits_per_value: float
    bytes_per_token: float
    mean_kl: float
    mean_kl_error: float
    median_kl: float
    kl_90: float
    kl_99: float
    kl_999: float
    same_top: float
    rms_probability_change: float
    perplexity: float
    exact_perplexity: float
    perplexity_ratio: float
    perplexity_ratio_error: float
    left_out: int
    tokens_per_second: float
    predictions: int
    chunks: int
    tokens: int
    sinks: int
    recent: int
    block: int
    chunk: int


def summarize(
    model: str, chunks: Sequence[Predictions], options: ChunkOptions, block: int, seed: int
) -> ModelQuality:
    """The figures of one codec.

    Parameters
    ----------
    model : str
        The name of the model.
    chunks : sequence of Predictions
        What was predicted in each chunk, at least one.
    options : ChunkOptions
        How the chunks were run.
    block : int
        Tokens that the codec packs at a time.
    seed : int
        Seed of the drawing that gives the errors.

    Returns
    -------
    ModelQuality
        The figures.

    References
    ----------
    B. Efron, Ann. Statist. 7 (1979), for the bootstrap.

    Examples
    --------
    >>> from kvcodec.evaluation import ChunkOptions, Predictions, summarize
    >>> predictions = Predictions(
    ...     "int4", None, None, bits_per_value=4.25, bytes_per_token=544.0, kl=[0.125, 0.375],
    ...     same_top=[True, False], exact_log_probability=[-1.0, -2.0],
    ...     log_probability=[-1.5, -2.5], tokens=2, seconds=0.5,
    ... )
    >>> quality = summarize("model", [predictions], ChunkOptions(), block=64, seed=0)
    >>> quality.mean_kl, quality.same_top, round(quality.perplexity_ratio, 3)
    (0.25, 0.5, 1.649)
    """
    kl = _joined(chunks, "kl")
    exact, quantized = _joined(chunks, "exact_log_probability"), _joined(chunks, "log_probability")
    # An infinite loss in both runs has no ratio; NaN says so.
    with np.errstate(invalid="ignore", over="ignore"):
        losses = [
            _array(each, "exact_log_probability") - _array(each, "log_probability")
            for each in chunks
        ]
        mean_kl_error = _bootstrap([_array(each, "kl") for each in chunks], np.mean, seed)
        ratio_error = _bootstrap(losses, lambda x: np.exp(np.mean(x)), seed)
        median, *quantiles = np.quantile(kl, [0.5, 0.9, 0.99, 0.999])
        change = np.exp(quantized) - np.exp(exact)
        first = chunks[0]
        return ModelQuality(
            model=model,
            name=first.codec,
            key=first.key,
            value=first.value,
            bits_per_value=first.bits_per_value,
            bytes_per_token=first.bytes_per_token,
            mean_kl=float(kl.mean()),
            mean_kl_error=mean_kl_error,
            median_kl=float(median),
            kl_90=float(quantiles[0]),
            kl_99=float(quantiles[1]),
            kl_999=float(quantiles[2]),
            same_top=float(_joined(chunks, "same_top").mean()),
            rms_probability_change=float(np.sqrt(np.mean(change**2))),
            perplexity=float(np.exp(-quantized.mean())),
            exact_perplexity=float(np.exp(-exact.mean())),
            perplexity_ratio=float(np.exp(np.concatenate(losses).mean())),
            perplexity_ratio_error=ratio_error,
            left_out=sum(each.left_out for each in chunks),
            tokens_per_second=sum(each.tokens for each in chunks)
            / sum(each.seconds for each in chunks),
            predictions=len(kl),
            chunks=len(chunks),
            tokens=first.tokens,
            sinks=options.sinks,
            recent=options.recent,
            block=block,
            chunk=options.chunk,
        )


def _array(predictions: Predictions, name: str) -> NDArray[np.float64]:
    return np.asarray(getattr(predictions, name), dtype=np.float64)


def _joined(chunks: Sequence[Predictions], name: str) -> NDArray[np.float64]:
    return np.concatenate([_array(each, name) for each in chunks])


def _bootstrap(
    chunks: Sequence[NDArray[np.float64]], statistic: Callable[..., float], seed: int
) -> float:
    """Standard deviation of a statistic over as many chunks, drawn with replacement."""
    if len(chunks) < 2:
        return math.nan
    rng = np.random.default_rng(seed)
    draws = rng.integers(len(chunks), size=(RESAMPLES, len(chunks)))
    return float(
        np.std([statistic(np.concatenate([chunks[i] for i in draw])) for draw in draws], ddof=1)
    )
