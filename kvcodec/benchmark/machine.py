"""What a benchmark ran on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from kvcodec._backend import get_config

__all__ = ["describe_machine"]

FACTS = ("version", "backend", "simd", "openmp", "python", "numpy", "machine")
CPUINFO = Path("/proc/cpuinfo")


def describe_machine() -> dict[str, Any]:
    """Processor, cores, and what of kvcodec runs on them.

    Returns
    -------
    dict
        processor; cores, those that this process may use; load, how many processes wanted one
        during the last minute, None where the system does not tell; and version, backend, simd,
        openmp, python, numpy and machine as `get_config` tells them.

    Examples
    --------
    >>> from kvcodec.benchmark import describe_machine
    >>> describe_machine()["cores"] > 0
    True
    """
    facts = get_config()
    return {
        "processor": _processor(),
        "cores": _cores(),
        "load": _load(),
        **{name: facts[name] for name in FACTS},
    }


def _processor() -> str:
    """The name that the system gives to the processor, as far as it does."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(filter(None, names), platform.processor() or platform.machine())


def _load() -> float | None:
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
