"""Profiles of hypothesis, the backends that the laws run on, and oracles that tests share."""

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from kvcodec.testing import backends

_COMMON = {
    "deadline": None,
    "suppress_health_check": [
        HealthCheck.data_too_large,
        HealthCheck.differing_executors,
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
    ],
}
settings.register_profile("default", max_examples=8, derandomize=True, database=None, **_COMMON)
settings.register_profile("long", max_examples=500, print_blob=True, **_COMMON)
settings.load_profile(os.environ.get("KVCODEC_TEST_PROFILE") or "default")


@pytest.fixture(params=backends(threads=[1]), ids=lambda backend: backend.label)
def backend(request):
    """Run the test on the reference and on every available SIMD level in turn."""
    with request.param.context():
        yield request.param


def splitmix64(x):
    """SplitMix64's hash of x, in Python integers."""
    mask = 2**64 - 1
    z = (x + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def pack_row(codes, width):
    """The bit stream of some codes as one large integer, in bytes from its low end."""
    stream = sum(int(code) << (i * width) for i, code in enumerate(codes))
    return stream.to_bytes(-(-len(codes) * width // 8), "little")


def unpack_row(row, n, width):
    """The first n codes of a bit stream."""
    stream = int.from_bytes(bytes(row), "little")
    return [(stream >> (i * width)) & (2**width - 1) for i in range(n)]


def causal_mask(positions, tokens, window=None):
    """What queries at these positions see: tokens up to their own, the last `window` of them."""
    distance = np.asarray(positions)[..., None] - np.arange(tokens)
    return (distance >= 0) & (distance < (tokens if window is None else window))


def relative_error(x, truth):
    """Root of the mean squared error, relative to that of the truth."""
    x, truth = np.asarray(x, dtype=np.float64), np.asarray(truth, dtype=np.float64)
    return np.sqrt(np.mean((x - truth) ** 2) / np.mean(truth**2))
