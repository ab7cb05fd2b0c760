"""Count the instructions of kernels and compare them with those of an earlier build.

Times are noise where a machine is shared; the instructions of a call are nearly the same every
time. A small driver runs under ``valgrind --tool=callgrind`` with AVX2 and one thread. Only what
happens inside the kernels is counted, of the second of two calls. The figures are those of one
compiler: after another one, or a change that is meant to cost what it costs, write them again with
``--update``.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np

import kvcodec as kv

FIGURES = Path(__file__).with_name("instruction_counts.json")
TOLERANCE = 0.03
TOKENS, ENCODED, TRANSFORMED = 1024, 256, 256
Q_HEADS, KV_HEADS, HEAD_DIM = 8, 2, 128
DECODED = ("int4", "lm4", "int8", "kivi4")
# The functions of the AVX2 kernels that Python calls.
KERNELS = "__pyx_pw_*_kernels_avx2_*"
ENVIRONMENT = {
    "KVCODEC_BACKEND": "fast",
    "KVCODEC_SIMD": "avx2",
    "KVCODEC_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}
# Requests to callgrind are instructions that do nothing elsewhere; its header writes them.
REQUESTS = """
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_ZERO_STATS; }
void end(const char *name) { CALLGRIND_DUMP_STATS_AT(name); }
"""


class Unable(click.ClickException):
    """Something is missing: one line on standard error, exit code 2."""

    exit_code = 2


@click.command()
@click.option("--update", is_flag=True, help="Write the figures instead of comparing with them.")
@click.option("--driver", metavar="LIBRARY", hidden=True, help="Run the calls; used by itself.")
def main(update: bool, driver: str | None) -> None:
    """Compare the instructions of kernels with tools/instruction_counts.json."""
    if driver is not None:
        drive(driver)
        return
    check_tools()
    found = {"compiler": compiler(), "instructions": count()}
    if update:
        FIGURES.write_text(f"{json.dumps(found, indent=2)}\n")
        click.echo(f"Wrote {len(found['instructions'])} figures to {FIGURES.name}.")
        return
    known = json.loads(FIGURES.read_text())
    lines, failed = compare(found["instructions"], known["instructions"])
    click.echo("\n".join(lines))
    if known["compiler"] != found["compiler"]:
        click.echo(
            f"Nothing is judged: the figures are of {known['compiler']}, "
            f"this is {found['compiler']}."
        )
        failed = False
    sys.exit(1 if failed else 0)


# The driver


def calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    """The calls that are counted, on the same numbers each time."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    k, v = normal(2, 1, KV_HEADS, TOKENS, HEAD_DIM)
    q = normal(1, Q_HEADS, 1, HEAD_DIM)
    for name in DECODED:
        cache = kv.KVCache(1, KV_HEADS, HEAD_DIM, key=name, value=name)
        cache.append(0, k, v)
        yield f"decode {name}", lambda cache=cache: cache.attend(0, q)
    x = k[:, :, :ENCODED]
    for name in kv.PRESETS:
        for side in ("key", "value"):
            codec = kv.codec(name, side=side)
            yield f"encode {name} {side}", lambda codec=codec: codec.encode(x)
    rows, out = normal(TRANSFORMED, HEAD_DIM), np.empty((TRANSFORMED, HEAD_DIM), dtype=np.float32)
    yield "fwht", lambda: kv.fwht(rows, out=out)


def drive(library: str) -> None:
    """Make each call twice, the second time between two requests to callgrind."""
    requests = ctypes.CDLL(library)
    for name, call in calls():
        call()
        requests.begin()
        call()
        requests.end(name.encode())


# Counting


def check_tools() -> None:
    """Raise unless everything is there that counting needs."""
    if shutil.which("valgrind") is None:
        raise Unable("valgrind is not installed, which counts the instructions.")
    if "avx2" not in kv.get_config()["available_simd"]:
        raise Unable("the AVX2 kernels are not built or not supported here, which are counted.")


def compiler() -> str:
    """The first line that the C compiler says about itself."""
    said = subprocess.run(
        [*_compiler_words(), "--version"], capture_output=True, text=True, check=True
    )
    return said.stdout.splitlines()[0]


def _compiler_words() -> list[str]:
    return (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[:1]


def build_requests(folder: Path) -> Path:
    """Compile the requests to callgrind."""
    source, library = folder / "requests.c", folder / "requests.so"
    source.write_text(REQUESTS)
    command = [*_compiler_words(), "-shared", "-fPIC", "-O1", str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unable("valgrind/callgrind.h cannot be compiled, which valgrind installs.")
    return library


def count() -> dict[str, int]:
    """Instructions of the kernels in each call of the driver."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        library = build_requests(folder)
        done = subprocess.run(
            [
                *("valgrind", "--tool=callgrind", f"--callgrind-out-file={folder / 'counts'}"),
                f"--toggle-collect={KERNELS}",
                *(sys.executable, str(Path(__file__).resolve()), "--driver", str(library)),
            ],
            env=os.environ | ENVIRONMENT,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or ["no message"]
            raise Unable(f"the driver failed under valgrind: {last[0]}")
        dumps = [path.read_text() for path in folder.glob("counts.*")]
    return in_order(dict(filter(None, map(parse, dumps))))


def parse(dump: str) -> tuple[str, int] | None:
    """Name and instructions of what was dumped between two requests."""
    name = re.search(r"^desc: Trigger: Client Request: (.+)$", dump, re.MULTILINE)
    total = re.search(r"^(?:totals|summary): (\d+)", dump, re.MULTILINE)
    return (name[1].strip(), int(total[1])) if name and total else None


def in_order(found: Mapping[str, int]) -> dict[str, int]:
    """The figures in the order of the calls, of which none may be missing."""
    names = [name for name, _ in calls()]
    missing = [name for name in names if not found.get(name)]
    if missing:
        raise Unable(f"no instructions were counted for {', '.join(missing)}.")
    return {name: found[name] for name in names}


def compare(found: Mapping[str, int], known: Mapping[str, int]) -> tuple[list[str], bool]:
    """A line for each call, and whether one takes more instructions than is tolerated."""
    lines, failed = [], False
    for name, instructions in found.items():
        if name not in known:
            lines.append(f"{name:20} {instructions:12,}  new")
            continue
        change = instructions / known[name] - 1
        worse = change > TOLERANCE
        failed |= worse
        verdict = "  MORE than before" if worse else "  fewer" if change < -TOLERANCE else ""
        lines.append(f"{name:20} {instructions:12,} {change:+8.2%}{verdict}")
    return lines, failed


if __name__ == "__main__":
    main()
