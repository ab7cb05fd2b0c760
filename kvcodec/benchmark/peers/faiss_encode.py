"""faiss: norm, Hadamard rotation and 4-bit codes, as its parts give them."""

from __future__ import annotations

import numpy as np

from kvcodec.benchmark.peers.cases import Job
from kvcodec.benchmark.peers.worker import Prepared
from kvcodec.benchmark.work import vectors


def prepare(job: Job) -> Prepared:
    """Encoding of all vectors."""
    import faiss

    faiss.omp_set_num_threads(job.threads)
    x = vectors(job.tokens, job.head_dim)
    rotation = faiss.HadamardRotation(job.head_dim)
    rotation.train(x)
    quantizer = faiss.ScalarQuantizer(rotation.d_out, faiss.ScalarQuantizer.QT_4bit_tqmse)
    quantizer.train(rotation.apply(_units(x)[0]))

    def call() -> tuple[np.ndarray, np.ndarray]:
        units, norms = _units(x)
        return quantizer.compute_codes(rotation.apply(units)), norms

    call()
    return Prepared(call, None)


def _units(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Vectors of length 1, and the lengths."""
    norms = np.linalg.norm(x, axis=1, keepdims=True)
    return x / np.maximum(norms, np.float32(1e-30)), norms
