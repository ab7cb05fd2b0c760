"""Whether what is measured fits into memory, which filling caches would find out after minutes."""

from __future__ import annotations

import os
from pathlib import Path

from kvcodec.benchmark.settings import Settings, cache_pair, possible_pairs
from kvcodec.benchmark.suite import FLOAT_CODECS
from kvcodec.benchmark.work import attended_bytes

__all__ = ["available_bytes", "check_memory", "needed_bytes"]

MEMINFO, STATM = Path("/proc/meminfo"), Path("/proc/self/statm")
FLOAT_BYTES = 4


def check_memory(settings: Settings, peers: bool = False) -> None:
    """Raise unless each step has the memory that it needs; where that is not known, do nothing.

    Parameters
    ----------
    settings : Settings
        What is to be measured.
    peers : bool, default False
        Whether other libraries are to be measured too.

    Raises
    ------
    ValueError
        If a step needs more than is available.
    """
    available = available_bytes()
    needed = needed_bytes(settings, peers)
    step = max(needed, key=lambda name: needed[name])
    if available is not None and needed[step] > available:
        raise ValueError(
            f"the caches do not fit into memory: {step} needs about {needed[step] / 1e9:.1f} GB, "
            f"but {available / 1e9:.1f} GB are available; take shorter contexts, fewer codecs or "
            "fewer heads."
        )


def needed_bytes(settings: Settings, peers: bool = False) -> dict[str, int]:
    """Bytes that the large steps hold at a time, without scratch memory, by what they run on."""
    shape, numbers = settings.shape, settings.shape.head_dim * FLOAT_BYTES
    needed: dict[str, int] = {}
    for context in settings.contexts:
        # Beside each cache lies a buffer of as many bytes, which is read.
        packed = sum(attended_bytes(pair, shape, context) for pair in settings.codecs)
        needed[f"context {context}"] = 2 * packed
    context = settings.contexts[0]
    pairs = possible_pairs(FLOAT_CODECS, shape)
    in_floats = 2 * sum(attended_bytes(pair, shape, context) for pair in pairs)
    needed[f"context {context}"] = max(needed[f"context {context}"], in_floats)
    # Two measures have a prompt of their own each; a cache and an output are made in turn.
    heads = shape.q_heads + 2 * shape.kv_heads
    needed["prefill"] = 3 * settings.prefill_tokens * heads * numbers
    if peers:
        longest = max(settings.contexts)
        exact = 2 * shape.kv_heads * longest * numbers
        ours = attended_bytes(cache_pair("int8"), shape, longest)
        # Chunks of keys and values, and the arrays that they are put together in.
        needed[f"context {longest} of other libraries"] = 2 * exact + ours
    return needed


def available_bytes() -> int | None:
    """Bytes that this process can still take, None where the system tells nothing."""
    known = [size for size in (_memory(), _address_space()) if size is not None]
    return max(min(known), 0) if known else None


def _memory() -> int | None:
    """Memory that can be had without swapping; where that is not told, all there is."""
    try:
        # What sysconf calls available leaves out the pages that cache files.
        for line in MEMINFO.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _address_space() -> int | None:
    """What a limit of the process leaves, None without a limit."""
    try:
        import resource
    except ImportError:
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        taken = int(STATM.read_text(encoding="ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        taken = 0
    return limit - taken
