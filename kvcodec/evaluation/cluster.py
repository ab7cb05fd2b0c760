"""Measurements on the workers of a Dask cluster: one task for each unit and codec.

Every worker loads the model from the same path, where it must be the same, and keeps it. Dask
gives the tasks of a lost worker to another.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack
from functools import lru_cache
from typing import Any

from kvcodec.evaluation.codecs import CodecPair
from kvcodec.evaluation.measure import Results, Unit, keep_result, stored_results
from kvcodec.evaluation.models import LanguageModel, load_language_model
from kvcodec.evaluation.store import Store, file_digest

__all__ = ["check_scheduler", "measure_on_cluster"]

LOCAL = "local"
SECONDS_TO_CONNECT = 10


def check_scheduler(scheduler: str) -> int | None:
    """The number of local workers that are asked for, None for the address of a scheduler.

    Parameters
    ----------
    scheduler : str
        ``local``, ``local:N`` with N workers, or an address such as ``tcp://host:8786``.

    Returns
    -------
    int or None
        Workers to start.

    Raises
    ------
    ValueError
        If it is none of these or `dask.distributed` is not installed.

    Examples
    --------
    >>> from kvcodec.evaluation.cluster import check_scheduler
    >>> check_scheduler("local:none")
    Traceback (most recent call last):
    ValueError: scheduler must be local, local:N or an address, but 'local:none' was given.
    """
    kind, _, count = scheduler.partition(":")
    is_local = kind == LOCAL
    wrong = not scheduler or (is_local and ":" in scheduler and not count.isdecimal())
    if wrong or (is_local and count and int(count) < 1):
        raise ValueError(
            f"scheduler must be local, local:N or an address, but {scheduler!r} was given."
        )
    try:
        import distributed  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"scheduler needs dask.distributed, of which {error.name} is missing; install the "
            "extra 'cluster': pip install \"kvcodec-cpu[cluster]\"."
        ) from None
    if not is_local:
        return None
    return int(count) if count else os.cpu_count() or 1


def measure_on_cluster(
    scheduler: str,
    path: str | os.PathLike[str],
    units: Sequence[Unit],
    pairs: Sequence[CodecPair],
    *,
    store: Store | None = None,
    progress: Callable[[float], None] | None = None,
) -> Results:
    """Run units with codecs as Dask tasks; the results are those of `measure`.

    Each task repeats the float32 run of its chunk. Workers compute with as many threads as this
    process would, since the order of a model's sums depends on it.

    Parameters
    ----------
    scheduler : str
        As in `check_scheduler`.
    path : str or path
        The model, where every worker finds it.
    units, pairs, store, progress
        As in `measure`.

    Returns
    -------
    dict
        The result of each name of a unit and name of a codec.

    Raises
    ------
    ValueError
        If the scheduler does not answer or is lost, a worker finds another model, or a task cannot
        be run.
    OSError
        If the model or the store cannot be read.
    """
    workers = check_scheduler(scheduler)
    import torch
    from distributed import Client, KilledWorker, LocalCluster, as_completed

    results, missing = stored_results(units, pairs, store)
    if not missing:
        return results
    path = os.path.abspath(path)
    digest = file_digest(path)
    with ExitStack() as stack:
        if workers is not None:
            address: Any = stack.enter_context(
                LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=None)
            )
        else:
            address = scheduler
        try:
            client = stack.enter_context(Client(address, timeout=SECONDS_TO_CONNECT))
        except (OSError, ValueError) as error:
            raise ValueError(f"scheduler {scheduler!r} cannot be reached: {error}.") from None
        tasks = {
            client.submit(
                _run_task, path, digest, unit, pair, torch.get_num_threads(), pure=False
            ): (unit, pair)
            for unit, lacking in missing
            for pair in lacking
        }
        for done, task in enumerate(as_completed(tasks), start=1):
            unit, pair = tasks[task]
            try:
                result = task.result()
            except KilledWorker:
                raise ValueError(
                    f"the workers that ran {pair.name} on {unit.name} were lost again and again; "
                    "they may lack memory."
                ) from None
            except CancelledError:
                raise ValueError(
                    f"scheduler {scheduler!r} was lost, or has cancelled {pair.name} on "
                    f"{unit.name}."
                ) from None
            keep_result(results, store, unit, pair, result)
            if progress is not None:
                progress(done / len(tasks))
    return results


@lru_cache(maxsize=1)
def _model(path: str, digest: str) -> LanguageModel:
    """The model of a worker; one that has changed at its path is loaded anew."""
    found = file_digest(path)
    if found != digest:
        raise ValueError(
            f"model must be the same on every worker, but {path!r} has the digest {found[:8]} "
            f"instead of {digest[:8]} there."
        )
    return load_language_model(path)


def _run_task(path: str, digest: str, unit: Unit, pair: CodecPair, threads: int) -> dict[str, Any]:
    """What a worker does."""
    import torch

    torch.set_num_threads(threads)
    [result] = unit.run(_model(path, digest), [pair], lambda: None)
    return result
