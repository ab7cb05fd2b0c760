"""Train the level tables of `trellis` by Lloyd's iterations on Gaussian vectors.

A table starts as the 256 quantiles of a Gaussian in random order. Each iteration encodes the
vectors and moves every level to the mean of the elements whose window chose it, which never makes
the error larger [1]_. The levels of windows that differ in their newest bit are negatives of each
other, so both take part in one mean. Iterations alone stop at the local optimum next to the random
start; noise that fades out during the first two thirds of them finds a better one. Levels are
rounded to whole numbers for encoding throughout, so that the table at the end is the one that was
trained.

The unit of the levels is fixed beforehand, a little above what 127 units must reach.

References
----------
.. [1] Y. Linde, A. Buzo and R. Gray, "An algorithm for vector quantizer design", IEEE Trans.
   Commun. 28 (1980).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvcodec.reference.trellis import FRACTION, WINDOWS, targets_of, windows

HEAD_DIM = 128
ROWS = 3000
ITERATIONS = 200
NOISE = 0.05
LARGEST = {2: 2.9, 3: 3.35, 4: 3.65}

Quantizer = Callable[..., tuple[np.ndarray, np.ndarray]]
"""`quantize_trellis` of the reference or of the fast path, which find the same codes."""


def unit_of(bits: int) -> float:
    """The size of a level for elements of variance 1."""
    return LARGEST[bits] / 127


def table_of(half: np.ndarray) -> np.ndarray:
    """The int8 levels of all windows, from those whose newest bit is 0."""
    lower = np.clip(np.rint(half), -127, 127).astype(np.int8)
    return np.concatenate([lower, -lower])


def initial_half(bits: int, rng: np.random.Generator) -> np.ndarray:
    """Quantiles of a Gaussian in random order, in levels.

    They are read off a large sample, which needs no inverse of the error function.
    """
    sample = np.sort(np.abs(rng.standard_normal(2**16)))
    quantiles = sample.reshape(WINDOWS // 2, -1).mean(axis=1)
    signs = rng.choice([-1.0, 1.0], WINDOWS // 2)
    return rng.permutation(quantiles) * signs / unit_of(bits)


def lloyd_iteration(
    half: np.ndarray, x: np.ndarray, bits: int, quantize: Quantizer
) -> tuple[np.ndarray, float]:
    """The means of what chose each level, and the mean squared error before they move."""
    levels = table_of(half)
    step = unit_of(bits) / np.sqrt(x.shape[1])
    codes, scale = quantize(x, levels, step, bits, "norm", "float32")
    window = windows(codes, bits).ravel()
    y = targets_of(x, scale).ravel() / FRACTION
    error = np.mean((y - levels[window]) ** 2) * unit_of(bits) ** 2

    sign = np.where(window >= WINDOWS // 2, -1.0, 1.0)
    window = window % (WINDOWS // 2)
    total = np.bincount(window, weights=sign * y, minlength=WINDOWS // 2)
    count = np.bincount(window, minlength=WINDOWS // 2)
    return np.where(count > 0, total / np.maximum(count, 1), half), float(error)


def train(
    bits: int, seed: int, quantize: Quantizer, rows: int = ROWS, iterations: int = ITERATIONS
) -> tuple[np.ndarray, float]:
    """A table of int8 (256,) and its mean squared error for vectors of variance 1."""
    rng = np.random.default_rng([seed, bits])
    x = rng.standard_normal((rows, HEAD_DIM)).astype(np.float32)
    half = initial_half(bits, rng)
    fading = 2 * iterations // 3
    for iteration in range(iterations):
        half, _ = lloyd_iteration(half, x, bits, quantize)
        noise = NOISE * max(1 - iteration / fading, 0) / unit_of(bits)
        half = half + noise * rng.standard_normal(half.shape)
    fresh = rng.standard_normal((4 * rows, HEAD_DIM)).astype(np.float32)
    return table_of(half), lloyd_iteration(half, fresh, bits, quantize)[1]
