"""Times as the median of rounds in which all that is compared takes turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Measure",
    "Samples",
    "mean_of_calls",
    "median_ratio",
    "second_of_two",
    "timed",
    "timed_rounds",
    "turn",
]

Measure = Callable[[], float]
Samples = Mapping[str, NDArray[np.float64]]

# Until the threads of other processes sleep: those of onnxruntime spin for 0.03 after a call.
SETTLE_SECONDS = 0.04


def timed(call: Callable[[Any], Any], prepare: Callable[[], Any] = lambda: None) -> Measure:
    """A measure: the seconds of one call with what was prepared, the preparation not counted."""

    def measure() -> float:
        prepared = prepare()
        start = time.perf_counter()
        call(prepared)
        return time.perf_counter() - start

    return measure


def mean_of_calls(
    call: Callable[[], Any], count: int, prepare: Callable[[], Any] = lambda: None
) -> Measure:
    """A measure: the mean seconds of so many calls in a row, after a preparation."""

    def all_calls(_: Any) -> None:
        for _ in range(count):
            call()

    measure = timed(all_calls, prepare)
    return lambda: measure() / count


def second_of_two(measure: Measure) -> float:
    """The second of two calls: the first finds caches and memory as others left them."""
    measure()
    return measure()


def turn(measure: Measure) -> float:
    """The second of two calls, begun when threads of other processes that wait in a loop sleep.

    Until then this one is busy: after idle time the system may wake two threads on one core.
    """
    end = time.perf_counter() + SETTLE_SECONDS
    while time.perf_counter() < end:
        pass
    return second_of_two(measure)


def timed_rounds(
    measures: Mapping[str, Measure],
    repeats: int,
    warmup: int,
    tick: Callable[[], None] = lambda: None,
) -> Samples:
    """Seconds of each measure in each of so many rounds.

    A round takes all of them, one after the other, and each round begins one further. What is to
    be compared should stand side by side.
    """
    names = list(measures)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with _no_garbage_collection():
        for number in range(warmup + repeats):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                taken = measures[name]()
                if number >= warmup:
                    seconds[name].append(taken)
            tick()
    return {name: np.array(taken) for name, taken in seconds.items()}


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def median_ratio(seconds: NDArray[np.float64], base: NDArray[np.float64]) -> float:
    """The median of the ratios within each round."""
    return float(np.median(seconds / base))
