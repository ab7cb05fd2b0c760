"""A library in another process, which makes its call when told and answers how long it took."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import IO, Any

from kvcodec.benchmark.peers.cases import Job

__all__ = ["PeerError", "PeerProcess", "peer_process"]

# These would have NumPy's and SciPy's matrix products run below what the processor can do.
UNSET = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class PeerError(Exception):
    """A library that could not do what it was asked for, in one line."""


class PeerProcess:
    """A process that has prepared a job."""

    def __init__(self, process: subprocess.Popen[str], errors: IO[bytes]) -> None:
        self._process = process
        self._errors = errors

    def ask(self, question: str) -> Mapping[str, Any]:
        """The answer to a line."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{question}\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            code = self._process.wait()
            raise PeerError(f"ended with exit code {code}{self._last_words()}")
        answered: dict[str, Any] = json.loads(answer)
        if "failure" in answered:
            raise PeerError(answered["failure"])
        return answered

    def measure(self) -> float:
        """Seconds of one turn."""
        return float(self.ask("turn")["seconds"])

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        words = [line.strip() for line in lines if line.strip()]
        words = [line for line in words if "error" in line.lower()] or words  # not a debugger's
        return f": {words[-1][:200]}" if words else ""


@contextmanager
def peer_process(job: Job) -> Iterator[tuple[PeerProcess, float | None]]:
    """A process that has prepared a job, and the relative error of the result that it has seen."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvcodec.benchmark.peers.worker"],
            env=worker_environment(job.threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            peer = PeerProcess(process, errors)
            yield peer, peer.ask(json.dumps(asdict(job)))["relative_error"]
        finally:
            process.kill()
            process.communicate()


def worker_environment(threads: int) -> dict[str, str]:
    """The environment, with so many threads in all libraries and no product slowed down."""
    kept = {name: value for name, value in os.environ.items() if name not in UNSET}
    return kept | dict.fromkeys(THREADS, str(threads))
