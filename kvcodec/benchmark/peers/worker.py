"""The other side of `process`: prepares the job of the first line, times a call at each other."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcodec.benchmark.peers.cases import PEERS, Job
from kvcodec.benchmark.settings import Shape
from kvcodec.benchmark.timing import timed, turn
from kvcodec.benchmark.work import kv_chunks, queries, vectors
from kvcodec.transform import fwht

Floats = NDArray[np.float32]

# An output further from the truth than any of these codecs would be no attention at all.
LARGEST_ERROR = 0.5


class Prepared(NamedTuple):
    """The call that is timed, and what a first one gave; None where that is not compared."""

    call: Callable[[], Any]
    output: Floats | None


def arguments(job: Job) -> tuple[Floats, Floats, Floats]:
    """Queries, keys and values of a job (1, heads, tokens, head_dim)."""
    shape = Shape(job.q_heads, job.kv_heads, job.head_dim)
    k, v = np.concatenate(list(kv_chunks(shape, job.tokens)), axis=3)
    return queries(shape, 1 if job.task == "decode" else job.tokens), k, v


def truth(job: Job) -> NDArray[np.float64] | None:
    """What the output of a job should be, in float64; of a prompt, that of its last token."""
    if job.task == "fwht":
        return fwht(vectors(job.tokens, job.head_dim)).astype(np.float64)
    if job.task == "encode":
        return None
    q, k, v = arguments(job)
    groups = q[0, :, -1].reshape(job.kv_heads, -1, job.head_dim).astype(np.float64)
    scores = groups @ k[0].swapaxes(1, 2) / np.sqrt(job.head_dim)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    output: NDArray[np.float64] = weights @ v[0] / weights.sum(axis=-1, keepdims=True)
    return output.reshape(job.q_heads, job.head_dim)


def relative_error(output: Floats | None, expected: NDArray[np.float64] | None) -> float | None:
    """The norm of the difference by that of the truth."""
    if output is None or expected is None:
        return None
    error = float(np.linalg.norm(output - expected) / np.linalg.norm(expected))
    if not error < LARGEST_ERROR:
        raise ValueError(f"the output has a relative error of {error:.3g}")
    return error


def prepare(job: Job) -> Prepared:
    """What the job's library prepares."""
    [peer] = [peer for peer in PEERS if peer.name == job.peer]
    driver = importlib.import_module(f"kvcodec.benchmark.peers.{peer.module}")
    prepared: Prepared = driver.prepare(job)
    return prepared


def main() -> None:
    """Answer a line of JSON for each line that comes; libraries print to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**facts: Any) -> None:
        answers.write(f"{json.dumps(facts)}\n")
        answers.flush()

    job = Job(**json.loads(sys.stdin.readline()))
    try:
        prepared = prepare(job)
        answer(relative_error=relative_error(prepared.output, truth(job)))
    except Exception as error:
        answer(failure=" ".join(f"{type(error).__name__}: {error}".split())[:200])
        return
    measure = timed(lambda _: prepared.call())
    for _ in sys.stdin:
        answer(seconds=turn(measure))


if __name__ == "__main__":
    main()
