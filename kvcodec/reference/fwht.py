r"""The fast Walsh-Hadamard transform, for every order that a head_dim has.

A Hadamard matrix H has entries +1 and -1 and orthogonal rows, so H / sqrt(n) is a rotation (with
or without a reflection). Multiplying by it spreads what was in one channel evenly over all of
them, which is what a quantizer wants, and costs no multiplications.

Sylvester's matrices, of order 2^k, come from S_2n = [[S_n, S_n], [S_n, -S_n]]: this recursion is
the fast transform, k rounds of n/2 "butterflies" (a, b) -> (a + b, a - b) [1]_. Orders
n = m 2^k use the Kronecker product H = P_m (x) S_2^k with Paley's matrices P_m, m = 12, 20, 28,
36, 44, 60 [2]_: one pass of butterflies inside each of the m pieces, then a small matrix across
the pieces.

All matrices here are symmetric, so that the orthonormal transform is its own inverse. It is
*defined* in float32, with the additions in the order below, and the factor 1/sqrt(n) last: codes
are computed from its output, and must not depend on who computed it.

References
----------
.. [1] B. J. Fino, V. R. Algazi, "Unified matrix treatment of the fast Walsh-Hadamard transform",
   IEEE Trans. Comput. C-25 (1976).
.. [2] R. E. A. C. Paley, "On orthogonal matrices", J. Math. Phys. 12 (1933).
"""

from __future__ import annotations

from functools import cache

import numpy as np

PALEY_ORDERS = (12, 20, 28, 36, 44, 60)


def factor_order(n: int) -> tuple[int, int] | None:
    """Write n as m * 2^k with m = 1 or a Paley order; None where that is not possible."""
    power = n & -n if n > 0 else 0
    if n == power and n > 0:
        return 1, n
    for m in PALEY_ORDERS:
        if n % m == 0 and (n // m).bit_count() == 1:
            return m, n // m
    return None


def _quadratic_character(q: int) -> np.ndarray:
    """chi(i) for i modulo a prime q: 0 at 0, 1 at squares, -1 elsewhere."""
    chi = -np.ones(q, dtype=np.int8)
    chi[[i * i % q for i in range(1, q)]] = 1
    chi[0] = 0
    return chi


def _paley_one(q: int) -> np.ndarray:
    """Order q + 1 for a prime q = 3 mod 4, its rows permuted so that it is symmetric.

    With entries that depend on i + j instead of Paley's j - i the core is symmetric.
    """
    total = np.add.outer(np.arange(q), np.arange(q)) % q
    core = -(_quadratic_character(q)[total] + (total == 0))
    return np.block([[np.ones((1, 1)), np.ones((1, q))], [np.ones((q, 1)), core]]).astype(np.int8)


def _paley_two(q: int) -> np.ndarray:
    """Order 2 (q + 1) for a prime q = 1 mod 4: the conference matrix C with each entry doubled."""
    difference = np.subtract.outer(np.arange(q), np.arange(q)) % q
    conference = np.zeros((q + 1, q + 1), dtype=np.int8)
    conference[0, 1:] = conference[1:, 0] = 1
    conference[1:, 1:] = _quadratic_character(q)[difference]
    return (
        np.kron(conference, [[1, 1], [1, -1]]) + np.kron(np.eye(q + 1), [[1, -1], [-1, -1]])
    ).astype(np.int8)


@cache
def paley_matrix(m: int) -> np.ndarray:
    """The symmetric Hadamard matrix of order m in `PALEY_ORDERS` (or 1), int8, read-only."""
    if m == 1:
        matrix = np.ones((1, 1), dtype=np.int8)
    elif m in (28, 36):
        matrix = _paley_two(m // 2 - 1)
    else:
        matrix = _paley_one(m - 1)
    matrix.flags.writeable = False
    return matrix


def inverse_square_root(n: int) -> np.float32:
    """The factor 1/sqrt(n), rounded once to float32."""
    return np.float32(1.0 / np.sqrt(np.float64(n)))


def fwht(x: np.ndarray, out: np.ndarray) -> None:
    """Write the orthonormal transform of the last axis of x to out; both float32."""
    n = x.shape[-1]
    m, power = factor_order(n)
    y = x.reshape(*x.shape[:-1], m, power)

    half = 1
    while half < power:
        pairs = y.reshape(*y.shape[:-1], power // (2 * half), 2, half)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y = np.stack([a + b, a - b], axis=-2).reshape(y.shape)
        half *= 2

    if m > 1:
        signs = paley_matrix(m).astype(np.float32)
        total = signs[:, :1] * y[..., :1, :]
        for piece in range(1, m):
            total = total + signs[:, piece : piece + 1] * y[..., piece : piece + 1, :]
        y = total

    out[...] = y.reshape(x.shape) * inverse_square_root(n)
