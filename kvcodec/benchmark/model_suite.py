"""Decoding with a language model: tokens a second with packed caches and with others.

All caches hold the same prompt and are fed the same tokens after it. A round takes some tokens
with each of them in turn, and with a copy of each that holds a few tokens only: what the longer one
takes more is the time of its context, the rest that of the weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kvcodec import _validate
from kvcodec._backend import config_context
from kvcodec.benchmark.model_caches import (
    DTYPES,
    DYNAMIC,
    CacheKind,
    cache_bytes,
    cache_kinds,
    copied,
    in_dtypes,
)
from kvcodec.benchmark.settings import (
    BASE,
    REPEATS,
    WARMUP,
    bench_command,
    cache_pair,
    chosen_repeats,
    chosen_threads,
)
from kvcodec.benchmark.timing import Measure, Samples, median_ratio, timed_rounds
from kvcodec.evaluation.codecs import CodecPair, distinct_pairs
from kvcodec.evaluation.language_model import Run, pieces
from kvcodec.evaluation.models import LanguageModel, read_text

__all__ = ["DecodingMeasurement", "ModelSettings", "make_model_settings", "run_model_benchmark"]

CONTEXTS = (4096, 8000)
CODECS = ("int8",)
STEPS = 4
FEW_TOKENS = 16
PIECE = 1024


@dataclass(frozen=True)
class ModelSettings:
    """What `run_model_benchmark` measures.

    Attributes
    ----------
    path : str
        The model, for the command that measures the same.
    contexts : tuple of int
        Tokens of the prompt, ascending.
    codecs : tuple of CodecPair
        The codecs of `KVCodecCache`, int4 first.
    threads : tuple of int
        Numbers of threads, of torch and of kvcodec.
    repeats : int
        Rounds that count, after `WARMUP` that do not.
    """

    path: str
    contexts: tuple[int, ...]
    codecs: tuple[CodecPair, ...]
    threads: tuple[int, ...]
    repeats: int

    @property
    def tokens(self) -> int:
        """Tokens that are fed in all: the longest prompt and what is decoded after it."""
        return max(self.contexts) + STEPS * (WARMUP + self.repeats)

    def command(self) -> str:
        """The command that measures this.

        Returns
        -------
        str
            A line for a shell.

        Examples
        --------
        >>> from kvcodec.benchmark import make_model_settings
        >>> make_model_settings("model.gguf", [4096], threads=[2], repeats=9).command()
        'kvcodec bench --model model.gguf --context 4096 ... --threads 2 --repeats 9'
        """
        options = {
            "context": self.contexts,
            "codec": [pair.name for pair in self.codecs],
            "threads": self.threads,
            "repeats": [self.repeats],
        }
        return bench_command(["--model", self.path], options)


def make_model_settings(
    path: str | os.PathLike[str],
    contexts: Sequence[int] = (),
    codecs: Sequence[str] = (),
    threads: Sequence[int] = (),
    repeats: int | None = None,
) -> ModelSettings:
    """Settings, with defaults where nothing is chosen.

    Parameters
    ----------
    path : str or path
        A model as `load_language_model` takes it.
    contexts : sequence of int
        Tokens of the prompt, by default 4,096 and 8,000.
    codecs : sequence of str
        Names as `codec_pair` takes them, by default int8; int4 is measured too.
    threads : sequence of int
        Numbers of threads; by default that of `kvcodec.num_threads`.
    repeats : int, optional
        Rounds, by default 25.

    Returns
    -------
    ModelSettings
        For `run_model_benchmark`.

    Raises
    ------
    ValueError
        If a value is not possible.

    Examples
    --------
    >>> from kvcodec.benchmark import make_model_settings
    >>> make_model_settings("model.gguf", threads=[1]).command()
    'kvcodec bench --model model.gguf --context 4096 --context 8000 --codec int4 --codec int8 ...'
    """
    for context in contexts:
        _validate.token_count(context, "context", FEW_TOKENS)
    pairs = [cache_pair(name) for name in (BASE, *(codecs or CODECS))]
    return ModelSettings(
        path=os.fspath(path),
        contexts=tuple(sorted(set(contexts or CONTEXTS))),
        codecs=tuple(distinct_pairs(pairs)),
        threads=chosen_threads(threads),
        repeats=chosen_repeats(repeats, REPEATS),
    )


@dataclass(frozen=True)
class DecodingMeasurement:
    """The time of a decoded token with one kind of cache.

    Attributes
    ----------
    cache : str
        The class of the cache, with the codec or the library that packs.
    dtype : {"float32", "bfloat16"}
        What the model is in.
    context : int
        Tokens of the prompt.
    threads : int
        Threads.
    seconds, lower_quartile, upper_quartile : float
        Quartiles over rounds of the seconds of a token, `seconds` the median.
    mean_seconds : float
        Their mean: other than the median, it has its share of what is done for some tokens only,
        such as packing a block.
    tokens_per_second : float
        1 / `seconds`.
    context_seconds : float
        Median of what a token takes more than with a cache of a few tokens in the same round.
    nbytes : int
        Bytes of all buffers of the cache after the prompt.
    speedup : dict of str to float
        For each number type, the time of a `DynamicCache` of a model in it over this, as the median
        of the ratios in each round: above 1, this is faster.
    """

    cache: str
    dtype: str
    context: int
    threads: int
    seconds: float
    lower_quartile: float
    upper_quartile: float
    mean_seconds: float
    tokens_per_second: float
    context_seconds: float
    nbytes: int
    speedup: dict[str, float]


def run_model_benchmark(
    model: LanguageModel,
    settings: ModelSettings,
    progress: Callable[[float], None] = lambda done: None,
) -> tuple[list[DecodingMeasurement], dict[str, str]]:
    """Measure decoding with packed caches, `DynamicCache` and Transformers' `QuantizedCache`.

    Parameters
    ----------
    model : LanguageModel
        From `load_language_model`; a copy in bfloat16 is made.
    settings : ModelSettings
        From `make_model_settings`.
    progress : callable, optional
        Called with the part that is done, from 0 to 1.

    Returns
    -------
    rows : list of DecodingMeasurement
        By context, threads and number type.
    missing : dict of str to str
        Kinds of cache that could not be measured, and why.

    Raises
    ------
    ValueError
        If the model has fewer positions than it is to be fed tokens, or a codec does not fit it.
    """
    tokens = _prompt(model, settings)
    kinds, missing = cache_kinds(in_dtypes(model), settings.codecs)
    with _threads(max(settings.threads)):
        few = [_fed(kind.start(), tokens, FEW_TOKENS) for kind in kinds]
    runs = [kind.start() for kind in kinds]
    rows: list[DecodingMeasurement] = []
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        steps = len(settings.contexts) * len(settings.threads) * (WARMUP + settings.repeats)
        progress(done / steps)

    for context in settings.contexts:
        with _threads(max(settings.threads)):
            for run in runs:
                _fed(run, tokens, context)
        nbytes = [cache_bytes(run.cache) for run in runs]
        for threads in settings.threads:
            measures = {}
            for kind, run, short in zip(kinds, runs, few, strict=True):
                measures[_label(kind)] = _decoding(copied(run), tokens)
                measures[_few_label(kind)] = _decoding_anew(short, tokens)
            with _threads(threads):
                samples = timed_rounds(measures, settings.repeats, WARMUP, tick)
            rows += [
                _measurement(kind, context, threads, size, samples)
                for kind, size in zip(kinds, nbytes, strict=True)
            ]
    return rows, missing


def _prompt(model: LanguageModel, settings: ModelSettings) -> list[int]:
    """The tokens that are fed, of the default text of evaluations."""
    config = model.model.config.get_text_config(decoder=True)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and settings.tokens > positions:
        most = positions - settings.tokens + max(settings.contexts)
        raise ValueError(
            f"context must be at most {most} for {model.source}, which has {positions} positions, "
            f"with {settings.repeats} repeats of {STEPS} tokens after it, but "
            f"{max(settings.contexts)} was given."
        )
    tokens = [*model.first_tokens, *model.encode(read_text())]
    if settings.tokens > len(tokens):
        raise ValueError(
            f"context must be at most {len(tokens) - settings.tokens + max(settings.contexts)}, "
            f"as long as the text that is fed, but {max(settings.contexts)} was given."
        )
    return tokens


def _fed(run: Run, tokens: Sequence[int], until: int) -> Run:
    """The run, fed so many tokens in all, those that its cache holds included."""
    held = run.cache.get_seq_length()
    for start, stop in pieces(until - held, PIECE):
        run.feed(tokens[held + start : held + stop], 1)
    return run


def _decoding(run: Run, tokens: Sequence[int]) -> Measure:
    """Seconds of a token, of some that follow on those that the cache holds."""

    def measure() -> float:
        held, before = run.cache.get_seq_length(), run.seconds
        for token in tokens[held : held + STEPS]:
            run.feed([token], 1)
        return (run.seconds - before) / STEPS

    return measure


def _decoding_anew(run: Run, tokens: Sequence[int]) -> Measure:
    """The same with a copy of the cache each time, so that it stays as short as it is."""
    return lambda: _decoding(copied(run), tokens)()


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Threads of torch and of kvcodec for a while."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        with config_context(num_threads=count):
            yield
    finally:
        torch.set_num_threads(before)


def _label(kind: CacheKind) -> str:
    return f"{kind.name} in {kind.dtype}"


def _few_label(kind: CacheKind) -> str:
    return f"{_label(kind)} of few tokens"


def _measurement(
    kind: CacheKind, context: int, threads: int, nbytes: int, samples: Samples
) -> DecodingMeasurement:
    seconds = samples[_label(kind)]
    lower, median, upper = map(float, np.quantile(seconds, (0.25, 0.5, 0.75)))
    speedup = {dtype: median_ratio(samples[f"{DYNAMIC} in {dtype}"], seconds) for dtype in DTYPES}
    return DecodingMeasurement(
        cache=kind.name,
        dtype=kind.dtype,
        context=context,
        threads=threads,
        seconds=median,
        lower_quartile=lower,
        upper_quartile=upper,
        mean_seconds=float(np.mean(seconds)),
        tokens_per_second=1 / median,
        context_seconds=float(np.median(seconds - samples[_few_label(kind)])),
        nbytes=nbytes,
        speedup=speedup,
    )
