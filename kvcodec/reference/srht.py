r"""The randomized Hadamard rotation H D / sqrt(n), known as SRHT (here without subsampling).

D is a diagonal of random signs. The Hadamard matrix alone maps a constant vector to a single
spike; random signs before it make every input look alike: each output coordinate is close to
normal with variance \|x\|^2 / n [1]_. Signs *after* the transform would not do this.

The signs come from SplitMix64 [2]_, a hash of seed + i in three lines, so that an engine in any
language reproduces them from the seed.

References
----------
.. [1] N. Ailon, B. Chazelle, "The fast Johnson-Lindenstrauss transform", SIAM J. Comput. 39 (2009).
.. [2] G. L. Steele, D. Lea, C. H. Flood, "Fast splittable pseudorandom number generators",
   OOPSLA 2014.
"""

from __future__ import annotations

import numpy as np

from kvcodec.reference.fwht import fwht


def splitmix64(x: np.ndarray) -> np.ndarray:
    """Hash each uint64: add the golden ratio, then two rounds of xor-shift and multiply."""
    z = x + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def srht_signs(n: int, seed: int) -> np.ndarray:
    """+1 where the top bit of SplitMix64(seed + i) is 0, else -1, for i = 0 .. n-1; float32."""
    counter = np.arange(n, dtype=np.uint64) + np.uint64(seed)
    return np.where(splitmix64(counter) >> np.uint64(63), -1, 1).astype(np.float32)


def srht(x: np.ndarray, signs: np.ndarray, out: np.ndarray) -> None:
    """Write H D x / sqrt(n) to out: signs first, then the transform."""
    fwht(x * signs, out)


def inverse_srht(y: np.ndarray, signs: np.ndarray, out: np.ndarray) -> None:
    """Write D H y / sqrt(n) to out, which undoes `srht`."""
    fwht(y, out)
    out *= signs
