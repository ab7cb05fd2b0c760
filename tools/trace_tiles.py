"""Count what a core executes for a tile of 64 tokens, and the cycles that this takes at least.

A child process attends over a short and a longer cache while this one steps through it, an
instruction at a time; the difference is what a tile takes, at whatever SIMD level the kernels have
here. Since the processor's own counters are seldom to be had in a virtual machine, this is the
ground of what ``docs/benchmark.md`` says about what bounds attention: a core with two ports for
512-bit arithmetic, one of which alone permutes and packs, takes at least ``max(one, (one + either)
/ 2)`` cycles. Beside it stand the bytes of a tile, which have to be read in that time.

Needs Linux on x86-64, objdump, and to be allowed to trace a child.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import click
import numpy as np
from rich.console import Console
from rich.table import Table

import kvcodec as kv
from kvcodec import _backend

TILE = 64
SHORT, LONG = 1024, 2048
TRACE_ME, PEEK_USER, CONTINUE, STEP = 0, 3, 7, 9
INSTRUCTION_POINTER = 16 * 8  # in struct user of x86-64
FLOATS = {"query_bits": None, "probability_bits": None}
VECTOR = re.compile(r"%[xyz]mm\d")
# What one port alone does in 512 bits (uops.info); vpmovdb and its like do it twice.
ONE_PORT = re.compile(
    r"v(perm|pshuf|shuf|punpck|unpck|pack|palign|align|pmov[sz]x|extract|insert|compress|expand"
    r"|p?broadcast|p?cmp|pcmp|pmov[dqw][bwd]|pmovus|pmovs[dqw]|movd[du]|pslldq|psrldq)"
)
TWICE = re.compile(r"vpmov(us|s)?[dqw][bwd]\b")
MOVES = re.compile(r"v?(mov|lddqu|zero|stmxcsr|ldmxcsr|kmov)")


class Unable(click.ClickException):
    """Something is missing: one line on standard error, exit code 2."""

    exit_code = 2


@dataclass(frozen=True)
class Case:
    """What attends: query heads of one KV head over a cache of a codec."""

    name: str
    codec: str
    rows: int = 4
    head_dim: int = 128
    floats: bool = False


CASES = (
    Case("int4", "int4"),
    Case("int8", "int8"),
    Case("lm4", "lm4"),
    Case("lm2", "lm2"),
    Case("kivi4", "kivi4"),
    Case("kivi2", "kivi2"),
    Case("tcq2", "tcq2"),
    Case("int4 in floats", "int4", floats=True),
    Case("lm4 in floats", "lm4", floats=True),
    Case("int4, 1 query head", "int4", rows=1),
    Case("int4, 8 query heads", "int4", rows=8),
    Case("int4, 32 rows", "int4", rows=32),
    Case("int4, head_dim 64", "int4", head_dim=64),
    Case("int4, head_dim 80", "int4", head_dim=80),
    Case("int4, head_dim 96", "int4", head_dim=96),
    Case("int4, head_dim 256", "int4", head_dim=256),
)


@click.command()
@click.option("--case", "names", multiple=True, metavar="NAME", help="By default all.")
def main(names: tuple[str, ...]) -> None:
    """Count what is executed for a tile of 64 tokens."""
    unknown = set(names) - {case.name for case in CASES}
    if unknown:
        raise Unable(f"--case must be one of {', '.join(case.name for case in CASES)}.")
    library = library_of_kernels()
    console = Console(width=110)
    table = Table(title=f"a tile of {TILE} tokens; {_backend.resolve().__name__}")
    for title in ("what", "instructions", "vector", "one port", "least cycles", "bytes"):
        table.add_column(title, justify="left" if title == "what" else "right")
    kinds = kinds_of(library)
    for case in CASES:
        if not names or case.name in names:
            table.add_row(case.name, *row_of(case, library, kinds))
    console.print(table)


def library_of_kernels() -> Path:
    """The shared library of the kernels that are in use."""
    if sys.platform != "linux" or os.uname().machine != "x86_64" or not shutil.which("objdump"):
        raise Unable("this needs Linux on x86-64 and objdump.")
    kernels = _backend.resolve()
    if not str(kernels.__file__).endswith(".so"):
        raise Unable("the fast path is not built.")
    return Path(kernels.__file__).resolve()


def row_of(case: Case, library: Path, kinds: dict[int, tuple[int, int]]) -> list[str]:
    """The figures of a case."""
    cache, call = prepared(case, SHORT)
    longer, longer_call = prepared(case, LONG)
    counts = [executed(each, library) for each in (call, longer_call)]
    tiles = (LONG - SHORT) // TILE
    instructions = (sum(counts[1].values()) - sum(counts[0].values())) / tiles
    one, either = (
        sum((counts[1][at] - counts[0][at]) * kinds.get(at, (0, 0))[i] for at in counts[1]) / tiles
        for i in (0, 1)
    )
    nbytes = (packed_bytes(longer) - packed_bytes(cache)) / tiles
    cycles = max(one, (one + either) / 2)
    return [f"{x:,.0f}" for x in (instructions, one + either, one, cycles, nbytes)]


def prepared(case: Case, tokens: int) -> tuple[kv.KVCache, Callable[[], Any]]:
    """A cache with so many packed tokens, and a call that attends over it with one thread."""
    rng = np.random.default_rng(0)
    options = FLOATS if case.floats else {}
    cache = kv.KVCache(1, 1, case.head_dim, case.codec, case.codec, sinks=0, recent=0, **options)
    cache.append(0, *rng.standard_normal((2, 1, 1, tokens, case.head_dim), dtype=np.float32))
    q = rng.standard_normal((1, case.rows, 1, case.head_dim), dtype=np.float32)
    return cache, lambda: cache.attend(0, q)


def packed_bytes(cache: kv.KVCache) -> int:
    """Bytes of all full units, metadata included."""
    layer = cache._layers[0]
    bits = sum(getattr(layer, side).bits_per_value(layer.key_dim) for side in ("key", "value"))
    return int(bits * layer.key_dim * len(cache) / 8)


# Stepping


def executed(call: Callable[[], Any], library: Path) -> Counter[int]:
    """How often each instruction of the library is executed by a call, by its offset."""
    call()  # what is made once
    child = os.fork()
    if child == 0:
        run_traced(call)
    try:
        return stepped(child, library)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def stepped(child: int, library: Path) -> Counter[int]:
    """The same of a child in run_traced()."""
    wait_for_stop(child)
    base, size = mapped(child, library)
    trace(CONTINUE, child)
    wait_for_stop(child)
    counts: Counter[int] = Counter()
    while True:
        trace(STEP, child)
        stopped = wait_for_stop(child)
        if stopped == signal.SIGSTOP:
            return counts
        if stopped == signal.SIGCONT:  # someone else halted and continued it
            continue
        if stopped != signal.SIGTRAP:
            raise Unable(f"the traced process was stopped by signal {stopped}.")
        at = trace(PEEK_USER, child, INSTRUCTION_POINTER) - base
        if 0 <= at < size:
            counts[at] += 1


def run_traced(call: Callable[[], Any]) -> NoReturn:
    """In the child: stop before and after the call."""
    try:
        with kv.config_context(num_threads=1):
            trace(TRACE_ME, 0)
            os.kill(os.getpid(), signal.SIGSTOP)
            call()
            os.kill(os.getpid(), signal.SIGSTOP)
            call()
            os.kill(os.getpid(), signal.SIGSTOP)
    finally:
        os._exit(1)


_ptrace = ctypes.CDLL(None, use_errno=True).ptrace
_ptrace.restype = ctypes.c_long
_ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def trace(request: int, process: int, address: int = 0) -> int:
    """A request to the system about a traced process."""
    ctypes.set_errno(0)
    result = _ptrace(request, process, address, None)
    if result == -1 and ctypes.get_errno():
        raise Unable(
            f"the system does not let a process be traced: {os.strerror(ctypes.get_errno())}."
        )
    return int(result)


def wait_for_stop(process: int) -> int:
    """The signal with which a traced process stops next."""
    _, status = os.waitpid(process, 0)
    if not os.WIFSTOPPED(status):
        raise Unable("the traced process ended.")
    return os.WSTOPSIG(status)


def mapped(process: int, library: Path) -> tuple[int, int]:
    """Where a library begins in a process, and how many bytes of addresses it takes."""
    places = [
        [int(x, 16) for x in line.split()[0].split("-")]
        for line in Path(f"/proc/{process}/maps").read_text().splitlines()
        if line.endswith(str(library))
    ]
    start = min(first for first, _ in places)
    return start, max(last for _, last in places) - start


# Instructions


def kinds_of(library: Path) -> dict[int, tuple[int, int]]:
    """For each vector instruction that computes: how much work for one port, for either."""
    return dict(_kinds(library))


def _kinds(library: Path) -> Iterator[tuple[int, tuple[int, int]]]:
    done = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(library)],
        capture_output=True,
        text=True,
        check=True,
    )
    for line in done.stdout.splitlines():
        found = re.match(r"\s*([0-9a-f]+):\s+(\S+)\s*(.*)", line)
        if not found or not VECTOR.search(found[3]):
            continue
        name, operands = found[2], found[3].split("#")[0]
        if MOVES.match(name) or ("broadcast" in name and "(" in operands):
            continue
        if ONE_PORT.match(name):
            yield int(found[1], 16), (2 if TWICE.match(name) else 1, 0)
        else:
            yield int(found[1], 16), (0, 1)


if __name__ == "__main__":
    main()
