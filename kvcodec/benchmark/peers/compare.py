"""Rounds in which a library and kvcodec take turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvcodec._backend import config_context
from kvcodec.benchmark.peers.cases import PEERS, Job, Peer, PeerCase
from kvcodec.benchmark.peers.process import PeerError, peer_process
from kvcodec.benchmark.settings import WARMUP, Settings, Shape, cache_pair
from kvcodec.benchmark.timing import Measure, median_ratio, timed_rounds, turn
from kvcodec.benchmark.work import (
    attend_measure,
    encode_measure,
    filled_caches,
    fwht_measure,
    prefill_measure,
    vectors,
)

__all__ = ["PeerMeasurement", "compare_with_peers"]


@dataclass(frozen=True)
class PeerMeasurement:
    """The time of a library's call, beside ours.

    Attributes
    ----------
    peer, name : str
        The library and what of it.
    task : str
        decode, prefill, fwht or encode.
    tokens, threads : int
        Tokens (or vectors) and threads of both.
    ours : str
        What of kvcodec it is compared with.
    seconds, our_seconds : float
        Medians.
    ratio : float
        Median of the ratios of theirs to ours in each round: above 1 kvcodec is faster.
    relative_error : float or None
        Of their output against float64.
    version : str or None
        Of the library, where it is an installed package.
    """

    peer: str
    name: str
    task: str
    tokens: int
    threads: int
    ours: str
    seconds: float
    our_seconds: float
    ratio: float
    relative_error: float | None = None
    version: str | None = None


def compare_with_peers(
    settings: Settings,
    libraries: Mapping[str, str] | None = None,
    progress: Callable[[float], None] = lambda done: None,
) -> tuple[list[PeerMeasurement], dict[str, str]]:
    """Measure every library that is there beside kvcodec.

    Parameters
    ----------
    settings : Settings
        From `make_settings`; its codecs are not used.
    libraries : mapping, optional
        Paths of shared libraries, by the names of `PEERS`.
    progress : callable, optional
        Called with the part that is done, from 0 to 1.

    Returns
    -------
    rows : list of PeerMeasurement
        What was measured.
    missing : dict
        What could not be, and why.

    Examples
    --------
    >>> from kvcodec.benchmark import compare_with_peers, make_settings
    >>> rows, missing = compare_with_peers(make_settings(quick=True))  # doctest: +SKIP
    """
    libraries = libraries or {}
    reasons = {peer.name: peer.missing(libraries.get(peer.name)) for peer in PEERS}
    missing = {name: reason for name, reason in reasons.items() if reason is not None}
    there = [peer for peer in PEERS if peer.name not in missing]
    versions = {peer.name: peer.version(libraries.get(peer.name)) for peer in there}
    planned = [work for peer in there for work in _jobs(peer, settings, libraries.get(peer.name))]
    rows = []
    for index, (case, job) in enumerate(planned):
        progress(index / len(planned))
        try:
            rows.append(_measure(case, job, settings.repeats, versions[job.peer]))
        except (PeerError, ValueError) as error:
            what = f"{job.peer}, {job.case}, {job.task} of {job.tokens} by {job.threads}"
            missing[what] = str(error)
    progress(1.0)
    return rows, missing


def _jobs(peer: Peer, settings: Settings, library: str | None) -> Iterator[tuple[PeerCase, Job]]:
    """Every case with every number of tokens and threads that it is measured with."""
    shape = settings.shape
    sizes = {
        "decode": settings.contexts,
        "prefill": (settings.prefill_tokens,),
        "fwht": (settings.fwht_rows,),
        "encode": (settings.encode_rows,),
    }
    for case in peer.cases:
        for tokens in sizes[case.task]:
            for threads in (1,) if case.task == "encode" else settings.threads:
                yield (
                    case,
                    Job(
                        peer.name,
                        case.name,
                        case.task,
                        shape.q_heads,
                        shape.kv_heads,
                        shape.head_dim,
                        tokens,
                        threads,
                        library,
                    ),
                )


def _measure(case: PeerCase, job: Job, repeats: int, version: str | None) -> PeerMeasurement:
    """Rounds of one case."""
    with peer_process(job) as (peer, error), config_context(num_threads=job.threads):
        ours = _our_measure(case, job)
        measures = {"ours": partial(turn, ours), "theirs": peer.measure}
        samples = timed_rounds(measures, repeats, WARMUP)
    return PeerMeasurement(
        job.peer,
        job.case,
        job.task,
        job.tokens,
        job.threads,
        case.ours,
        float(np.median(samples["theirs"])),
        float(np.median(samples["ours"])),
        median_ratio(samples["theirs"], samples["ours"]),
        error,
        version,
    )


def _our_measure(case: PeerCase, job: Job) -> Measure:
    """The same by kvcodec."""
    if job.task == "fwht":
        return fwht_measure(vectors(job.tokens, job.head_dim), case.ours == "in place")
    pair = cache_pair(case.ours)
    if job.task == "encode":
        assert pair.value is not None
        x = vectors(job.tokens, job.head_dim).reshape(1, 1, job.tokens, job.head_dim)
        return encode_measure(pair.value, "value", x)
    shape = Shape(job.q_heads, job.kv_heads, job.head_dim)
    if job.task == "prefill":
        return prefill_measure(pair, shape, job.tokens)
    return attend_measure(filled_caches([pair], shape, job.tokens)[pair.name], shape)
