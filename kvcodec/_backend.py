"""Which twin runs: the NumPy reference, or the compiled fast path at one SIMD level."""

from __future__ import annotations

import importlib
import importlib.util
import operator
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from types import ModuleType

from kvcodec import reference
from kvcodec._version import __version__

BACKENDS = ("auto", "fast", "reference")
SIMD_LEVELS = ("baseline", "avx2", "avxvnni", "avx512", "amx")
_MODULES = {
    "baseline": "kvcodec._fast._kernels",
    "avx2": "kvcodec._fast._kernels_avx2",
    "avxvnni": "kvcodec._fast._kernels_avxvnni",
    "avx512": "kvcodec._fast._kernels_avx512",
    "amx": "kvcodec._fast._kernels_amx",
}


MOST_THREADS = 1024

# Elements of work below which a call ends before a second thread would have started.
PARALLEL_FROM = 32768


@dataclass(frozen=True, eq=False)
class _Settings:
    backend: str | None = None
    simd: str | None = None
    num_threads: int | None = None


_UNSET = _Settings()
_process = _UNSET
_context: ContextVar[_Settings] = ContextVar("kvcodec_settings", default=_UNSET)


def _setting(name: str) -> str | int | None:
    """A setting from the innermost context that gives it, else from the process."""
    chosen = getattr(_context.get(), name)
    return getattr(_process, name) if chosen is None else chosen


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, but {value!r} was given.")
    return value


def _thread_count(name: str, value: object, *, text: bool = False) -> int:
    try:
        count = int(value) if text else operator.index(value)
    except (TypeError, ValueError):
        count = 0
    if isinstance(value, bool) or not 1 <= count <= MOST_THREADS:
        raise ValueError(f"{name} must be a whole number from 1 to 1024, but {value!r} was given.")
    return count


@cache
def _environment() -> _Settings:
    """The KVCODEC_* environment variables, checked once when they are first needed."""
    backend = os.environ.get("KVCODEC_BACKEND") or None
    simd = os.environ.get("KVCODEC_SIMD") or None
    threads = os.environ.get("KVCODEC_NUM_THREADS") or None
    return _Settings(
        backend=_choice("KVCODEC_BACKEND", backend, BACKENDS) if backend else None,
        simd=_choice("KVCODEC_SIMD", simd, SIMD_LEVELS) if simd else None,
        num_threads=_thread_count("KVCODEC_NUM_THREADS", threads, text=True) if threads else None,
    )


@cache
def _cpu() -> ModuleType | str:
    """The compiled processor detection, or why it could not be imported."""
    try:
        return importlib.import_module("kvcodec._fast._cpu")
    except ImportError as error:
        return str(error)


@cache
def available_simd_levels() -> tuple[str, ...]:
    """The SIMD levels that are built and that this processor runs, weakest first."""
    cpu = _cpu()
    if isinstance(cpu, str):
        return ()
    return tuple(
        level
        for level in SIMD_LEVELS
        if cpu.supports(level) and importlib.util.find_spec(_MODULES[level]) is not None
    )


def simd_level() -> str | None:
    """The SIMD level that the fast path uses now; None where there is no fast path."""
    chosen = _setting("simd")
    levels = available_simd_levels()
    if chosen is None and _environment().simd is not None:
        cap = SIMD_LEVELS.index(_environment().simd)
        levels = tuple(level for level in levels if SIMD_LEVELS.index(level) <= cap)
    if chosen is not None:
        return chosen
    return levels[-1] if levels else None


def active_backend(backend: str | None = None) -> str:
    """Tell which of "fast" and "reference" a call with this `backend` argument uses."""
    if backend is not None:
        _choice("backend", backend, BACKENDS)
    chosen = backend or _setting("backend") or _environment().backend or "auto"
    if chosen == "reference":
        return "reference"
    if simd_level() is not None:
        return "fast"
    if chosen == "fast":
        raise RuntimeError(
            "backend 'fast' was asked for, but the compiled kernels cannot be imported "
            f"({_cpu()}); install kvcodec-cpu with a C compiler, or choose 'reference'."
        )
    return "reference"


@cache
def _fast(level: str) -> ModuleType:
    return importlib.import_module(_MODULES[level])


def resolve(backend: str | None = None) -> ModuleType:
    """The module that holds the twins for a call with this `backend` argument."""
    if backend is not None:
        _choice("backend", backend, BACKENDS)
    return _resolved(backend, _context.get(), _process)


@lru_cache(maxsize=32)
def _resolved(backend: str | None, *_: _Settings) -> ModuleType:
    """What `resolve` finds, remembered for as long as the settings are the same."""
    return reference if active_backend(backend) == "reference" else _fast(simd_level())


_forked = False


def _note_fork() -> None:
    """OpenMP's threads do not survive a fork, and waiting for them would never end."""
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


def num_threads() -> int:
    """Threads that the fast path uses now.

    Returns
    -------
    int
        1 in a forked child of a process. Otherwise from `config_context`, else `set_num_threads`,
        else ``KVCODEC_NUM_THREADS``, else as many as OpenMP would start (``OMP_NUM_THREADS`` or the
        processors of the process).

    Examples
    --------
    >>> import kvcodec as kv
    >>> with kv.config_context(num_threads=2):
    ...     kv.num_threads()
    2
    """
    if _forked:
        return 1
    chosen = _setting("num_threads") or _environment().num_threads
    if chosen is None:
        cpu = _cpu()
        chosen = 1 if isinstance(cpu, str) else min(cpu.max_threads(), MOST_THREADS)
    return chosen


def set_num_threads(count: int) -> None:
    """Set how many threads the fast path uses, for the whole process.

    Results do not depend on it, bit for bit.

    Parameters
    ----------
    count : int
        From 1 to 1024.

    Raises
    ------
    ValueError
        If count is no such number.

    Examples
    --------
    >>> import kvcodec as kv
    >>> kv.set_num_threads(kv.num_threads())
    """
    global _process
    _process = replace(_process, num_threads=_thread_count("count", count))


@contextmanager
def config_context(
    *, backend: str | None = None, simd: str | None = None, num_threads: int | None = None
) -> Iterator[None]:
    """Choose backend, SIMD level and threads for the calls inside a ``with`` block.

    Contexts nest, and each thread and each asyncio task has its own.

    Parameters
    ----------
    backend : {"auto", "fast", "reference"}, optional
        Which twin runs. "auto" takes the fast path where it is installed.
    simd : {"baseline", "avx2", "avxvnni", "avx512", "amx"}, optional
        The SIMD level of the fast path, exactly this one.
    num_threads : int, optional
        Threads of the fast path.

    Raises
    ------
    ValueError
        If a value is not one of the allowed ones, or this processor lacks the SIMD level.
    RuntimeError
        If backend is "fast" and the compiled kernels are not there.

    Examples
    --------
    >>> import numpy as np
    >>> import kvcodec as kv
    >>> x = np.ones((1, 8), dtype=np.float32)
    >>> with kv.config_context(backend="reference"):
    ...     kv.fwht(x).round(3)
    array([[2.828, 0.   , 0.   , 0.   , 0.   , 0.   , 0.   , 0.   ]], dtype=float32)
    """
    if simd is not None:
        _choice("simd", simd, SIMD_LEVELS)
        if simd not in available_simd_levels():
            there = ", ".join(available_simd_levels()) or "none"
            raise ValueError(f"simd {simd!r} is not available here; available: {there}.")
    if num_threads is not None:
        num_threads = _thread_count("num_threads", num_threads)
    if backend is not None:
        active_backend(backend)
    outer = _context.get()
    inner = _Settings(
        backend=backend or outer.backend,
        simd=simd or outer.simd,
        num_threads=num_threads or outer.num_threads,
    )
    token = _context.set(inner)
    try:
        yield
    finally:
        _context.reset(token)


def get_config() -> dict[str, object]:
    """What is installed and what a call would use now.

    Returns
    -------
    dict
        version, backend, simd, available_simd, openmp, num_threads, python, numpy, machine; and
        fast_path_error, which is None where the fast path can be imported.

    Examples
    --------
    >>> import kvcodec as kv
    >>> kv.get_config()["backend"] in ("fast", "reference")
    True
    """
    import numpy as np

    cpu = _cpu()
    backend = active_backend()
    return {
        "version": __version__,
        "backend": backend,
        "simd": simd_level() if backend == "fast" else None,
        "available_simd": list(available_simd_levels()),
        "openmp": False if isinstance(cpu, str) else cpu.has_openmp(),
        "num_threads": num_threads(),
        "fast_path_error": cpu if isinstance(cpu, str) else None,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": f"{platform.machine()} {sys.platform}",
    }


def show_config() -> None:
    """Print what `get_config` returns, a line each.

    Examples
    --------
    >>> import kvcodec as kv
    >>> kv.show_config()
    version: ...
    """
    for name, value in get_config().items():
        text = ", ".join(value) if isinstance(value, list) else value
        print(f"{name}: {text}")
