"""Times as the median of rounds in which all that is compared takes turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Measure", "Samples", "median_ratio", "settled", "timed", "timed_rounds", "turn"]

Measure = Callable[[], float]
Samples = Mapping[str, NDArray[np.float64]]

# Until threads of others that wait for work in a loop have gone to sleep: those of onnxruntime 0.03.
SETTLE_SECONDS = 0.04


def timed(call: Callable[[Any], Any], prepare: Callable[[], Any] = lambda: None) -> Measure:
    """A measure: the seconds of one call with what was prepared, the preparation not counted."""

    def measure() -> float:
        prepared = prepare()
        start = time.perf_counter()
        call(prepared)
        return time.perf_counter() - start

    return measure


def turn(measure: Measure) -> float:
    """The second of two calls: the first finds caches and memory as others left them."""
    measure()
    return measure()


def settled(measure: Measure) -> float:
    """A call after others of SETTLE_SECONDS, which leave the threads of other processes asleep.

    Idle time would do the same, but then one's own threads sleep too, and the system may wake two of
    them on one core.
    """
    end = time.perf_counter() + SETTLE_SECONDS
    measure()
    while time.perf_counter() < end:
        measure()
    return measure()


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
