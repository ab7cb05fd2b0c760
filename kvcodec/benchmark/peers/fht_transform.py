"""fht-cpu: the transform without the factor 1/sqrt(n)."""

from __future__ import annotations

import numpy as np

from kvcodec.benchmark.peers.cases import Job
from kvcodec.benchmark.peers.worker import Prepared
from kvcodec.benchmark.work import vectors


def prepare(job: Job) -> Prepared:
    """The transform in place, of zeros since others would grow each time, or out of place."""
    import fht_cpu

    x = vectors(job.tokens, job.head_dim)
    output = fht_cpu.fht(x, inplace=False, num_threads=job.threads) * np.float32(job.head_dim**-0.5)
    in_place = job.case == "in place"
    if in_place:
        x[...] = 0
    return Prepared(
        lambda: fht_cpu.fht(x, inplace=in_place, num_threads=job.threads), np.asarray(output)
    )
