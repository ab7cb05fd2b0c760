"""The benchmark of kvcodec itself: a step for each kind of call, shape and number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kvcodec._backend import config_context
from kvcodec.benchmark.settings import BASE, WARMUP, Settings, possible_pairs
from kvcodec.benchmark.timing import (
    Measure,
    Samples,
    mean_of_calls,
    median_ratio,
    second_of_two,
    timed_rounds,
)
from kvcodec.benchmark.work import (
    FLOATS,
    attend_measure,
    attended_bytes,
    empty_cache,
    encode_measure,
    filled_caches,
    fwht_measure,
    kv_chunks,
    prefill_measure,
    queries,
    read_measure,
    vectors,
)
from kvcodec.codec import Codec

__all__ = ["Measurement", "run_benchmark"]

FLOAT_CODECS = (BASE, "lm4")
EXACT = "exact"
FEW_TOKENS, FEW_CALLS = 16, 20
BLOCK = 64


@dataclass(frozen=True)
class Measurement:
    """The time of one kind of call.

    Attributes
    ----------
    task : str
        decode, floats, prefill, fwht, encode, block or few.
    name : str
        The codec, or what was called.
    tokens : int
        Tokens (or vectors) that it ran on.
    threads : int
        Threads.
    seconds, lower_quartile, upper_quartile : float
        Quartiles of the seconds of a call, `seconds` the median.
    nbytes : int or None
        Bytes that it has to read.
    read_seconds : float or None
        Median of the seconds of reading as many bytes in the same rounds.
    share_of_read : float or None
        Median of the ratios of reading to the call in each round: 1 is as fast as reading.
    base : str or None
        The call that it is compared with.
    relative : float or None
        Median of the ratios of this call to that one in each round.
    """

    task: str
    name: str
    tokens: int
    threads: int
    seconds: float
    lower_quartile: float
    upper_quartile: float
    nbytes: int | None = None
    read_seconds: float | None = None
    share_of_read: float | None = None
    base: str | None = None
    relative: float | None = None


@dataclass(frozen=True)
class Step:
    """Measures that take turns, and how they are reported."""

    task: str
    tokens: int
    threads: int
    measures: dict[str, Measure]
    nbytes: dict[str, int]
    bases: dict[str, str]

    def run(self, repeats: int, tick: Callable[[], None]) -> list[Measurement]:
        """Measure and compare."""
        with config_context(num_threads=self.threads):
            samples = timed_rounds(self.measures, repeats, WARMUP, tick)
        return [self._measurement(name, samples) for name in samples if name not in self._reads()]

    def _reads(self) -> set[str]:
        return {reading(name) for name in self.nbytes}

    def _measurement(self, name: str, samples: Samples) -> Measurement:
        seconds = samples[name]
        facts: dict[str, Any] = {}
        if name in self.nbytes:
            read = samples[reading(name)]
            facts["nbytes"] = self.nbytes[name]
            facts["read_seconds"] = float(np.median(read))
            facts["share_of_read"] = median_ratio(read, seconds)
        if name in self.bases:
            facts["base"] = self.bases[name]
            facts["relative"] = median_ratio(seconds, samples[self.bases[name]])
        lower, median, upper = map(float, np.quantile(seconds, (0.25, 0.5, 0.75)))
        return Measurement(
            self.task, name, self.tokens, self.threads, median, lower, upper, **facts
        )


def reading(name: str) -> str:
    """The name of the read loop that stands beside a measure."""
    return f"reading for {name}"


def run_benchmark(
    settings: Settings, progress: Callable[[float, str], None] = lambda done, doing: None
) -> list[Measurement]:
    """Measure everything that settings ask for.

    Parameters
    ----------
    settings : Settings
        From `make_settings`.
    progress : callable, optional
        Called with the part that is done, from 0 to 1, and what is done next: "filling caches" or
        "measuring".

    Returns
    -------
    list of Measurement
        In the order in which they were taken.

    Examples
    --------
    >>> from kvcodec.benchmark import make_settings, run_benchmark
    >>> settings = make_settings(contexts=[80], codecs=["int4"], repeats=1, quick=True)
    >>> run_benchmark(settings)[0].name
    'int4'
    """
    makers = list(_steps(settings))
    rounds = len(makers) * (WARMUP + settings.repeats)
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        progress(done / rounds, "measuring")

    rows: list[Measurement] = []
    # A step is made when its turn comes: no two of them hold their caches at a time.
    for make in makers:
        progress(done / rounds, "filling caches")
        rows += make().run(settings.repeats, tick)
    return rows


def _steps(settings: Settings) -> Iterator[Callable[[], Step]]:
    for threads in settings.threads:
        for context in settings.contexts:
            yield partial(_decode_step, settings, context, threads)
        yield partial(_floats_step, settings, settings.contexts[0], threads)
        yield partial(_prefill_step, settings, threads)
        yield partial(_fwht_step, settings, threads)
    yield partial(_encode_step, settings, "encode", settings.encode_rows, 1)
    yield partial(_encode_step, settings, "block", BLOCK, settings.shape.kv_heads)
    yield partial(_few_step, settings)


def _decode_step(settings: Settings, context: int, threads: int) -> Step:
    """One query over caches of a context, beside reading as many bytes."""
    shape = settings.shape
    caches = filled_caches(settings.codecs, shape, context)
    nbytes = {pair.name: attended_bytes(pair, shape, context) for pair in settings.codecs}
    measures = {}
    for name, cache in caches.items():
        measures[name] = attend_measure(cache, shape)
        measures[reading(name)] = read_measure(nbytes[name])
    return Step("decode", context, threads, measures, nbytes, dict.fromkeys(caches, BASE))


def _floats_step(settings: Settings, context: int, threads: int) -> Step:
    """One query with float products beside the same with integer products."""
    shape = settings.shape
    pairs = possible_pairs(FLOAT_CODECS, shape)
    integer = filled_caches(pairs, shape, context)
    floats = filled_caches(pairs, shape, context, **FLOATS)
    measures, bases = {}, {}
    for name in integer:
        measures[name] = attend_measure(integer[name], shape)
        measures[f"{name} in floats"] = attend_measure(floats[name], shape)
        bases[f"{name} in floats"] = name
    return Step("floats", context, threads, measures, {}, bases)


def _prefill_step(settings: Settings, threads: int) -> Step:
    """A prompt into an int4 cache beside one into a cache without codecs."""
    tokens = settings.prefill_tokens
    measures = {
        BASE: prefill_measure(settings.codecs[0], settings.shape, tokens),
        EXACT: prefill_measure(None, settings.shape, tokens),
    }
    return Step("prefill", tokens, threads, measures, {}, {EXACT: BASE})


def _fwht_step(settings: Settings, threads: int) -> Step:
    rows = settings.fwht_rows
    x = vectors(rows, settings.shape.head_dim)
    measures = {}
    for name, in_place in (("in place", True), ("out of place", False)):
        measures[name] = fwht_measure(x, in_place)
        measures[reading(name)] = read_measure(x)
    nbytes = dict.fromkeys(("in place", "out of place"), x.nbytes)
    return Step("fwht", rows, threads, measures, nbytes, {})


def _encode_step(settings: Settings, task: str, tokens: int, heads: int) -> Step:
    """Encoding by one thread, beside reading the same floats."""
    x = vectors(heads * tokens, settings.shape.head_dim).reshape(1, heads, tokens, -1)
    measures, nbytes = {}, {}
    for name, (codec, side) in _sides(settings).items():
        measures[name] = encode_measure(codec, side, x)
        measures[reading(name)] = read_measure(x)
        nbytes[name] = x.nbytes
    # The first call may wait for the system to give memory for what it returns.
    second = {name: partial(second_of_two, measure) for name, measure in measures.items()}
    return Step(task, heads * tokens, 1, second, nbytes, {})


def _sides(settings: Settings) -> dict[str, tuple[Codec, str]]:
    """Each codec of keys and of values once, by a name."""
    found: dict[tuple[Codec, str], str] = {}
    for pair in settings.codecs:
        for codec, side in ((pair.key, "key"), (pair.value, "value")):
            if codec is not None:
                found.setdefault((codec, side), f"{pair.name} {side}s")
    return {name: codec for codec, name in found.items()}


def _few_step(settings: Settings) -> Step:
    """What a call costs where there is next to nothing to do."""
    shape, pair = settings.shape, settings.codecs[0]
    cache = empty_cache(pair, shape)
    for k, v in kv_chunks(shape, FEW_TOKENS):
        cache.append(0, k, v)
    q = queries(shape, 1)
    k, v = next(kv_chunks(shape, 1))

    def again() -> None:
        cache.crop(FEW_TOKENS)

    calls: dict[str, Callable[[], Any]] = {
        "append": lambda: cache.append(0, k, v),
        "attend": lambda: cache.attend(0, q),
        "append_attend": lambda: cache.append_attend(0, q, k, v),
    }
    measures = {name: mean_of_calls(call, FEW_CALLS, again) for name, call in calls.items()}
    return Step("few", FEW_TOKENS, 1, measures, {}, {})
