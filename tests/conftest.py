"""Profiles of hypothesis, the backends that the laws run on, and oracles that tests share."""

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from storage_cases import small_cache

from kvcodec import storage
from kvcodec.cli import main
from kvcodec.testing import backends, exact_attention

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
settings.register_profile("long", max_examples=100, print_blob=True, **_COMMON)
settings.load_profile(os.environ.get("KVCODEC_TEST_PROFILE") or "default")


_EACH = backends(threads=[1])


@pytest.fixture(params=_EACH, ids=lambda backend: backend.label)
def backend(request):
    """Run the test on the reference and on every available SIMD level in turn."""
    with request.param.context():
        yield request.param


@pytest.fixture(params=_EACH[:1] + _EACH[1:][-1:], ids=lambda backend: backend.label)
def twin(request):
    """Run the test on the reference, and on the fast path at its highest SIMD level."""
    with request.param.context():
        yield


@pytest.fixture
def run(capsys):
    """Run ``kvcodec``; its exit code, standard output and standard error."""

    def command(*arguments):
        with pytest.raises(SystemExit) as leaving:
            main([str(argument) for argument in arguments], prog_name="kvcodec")
        captured = capsys.readouterr()
        return leaving.value.code or 0, captured.out, captured.err

    return command


@pytest.fixture
def fails(run):
    """Run the command and return the one line that it says about a user's error."""

    def command(*arguments):
        code, out, err = run(*arguments)
        assert (code, out) == (2, "")
        assert err.startswith("Error: ")
        assert err.endswith("\n")
        assert err.count("\n") == 1
        return err

    return command


@pytest.fixture
def load(monkeypatch):
    """Nothing else seems to run on this machine; the function makes it seem otherwise."""

    def of(number):
        def average():
            if number is None:
                raise OSError
            return (number, 9.0, 9.0)

        monkeypatch.setattr("os.getloadavg", average, raising=False)

    of(0.5)
    return of


@pytest.fixture
def path(tmp_path):
    """A file that holds a small cache."""
    small_cache().save(tmp_path / "cache.safetensors")
    return tmp_path / "cache.safetensors"


@pytest.fixture
def nothing_is_built(monkeypatch):
    """Loading fails where a cache is built."""

    def build(*args, **options):
        raise AssertionError("a cache was built")

    monkeypatch.setattr(storage, "KVCache", build)


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


def token_by_token(q, k, v, key, value, sinks, recent, positions, *, window=None, **options):
    """Decode one token after the other: pack a block once when it has left the window, attend.

    Takes codecs with side and steps settled; returns the float64 output and log-sum-exp.
    """
    batch, q_heads, q_len, _ = q.shape
    output = np.zeros((batch, q_heads, q_len, v.shape[3]))
    log_sum_exp = np.zeros((batch, q_heads, q_len))
    early = (positions < sinks + key.block).all(axis=0)
    keys, values, end = [k[:, :, :sinks]], [v[:, :, :sinks]], sinks
    first = {"queries": q[:, :, early]} if key.equalize else {}
    for token in range(k.shape[2]):
        while end + key.block + recent <= token + 1:
            members = slice(end, end + key.block)
            packed = key.encode(k[:, :, members], **first)
            first = {"weights": packed.weights} if key.equalize else {}
            keys.append(key.decode(packed))
            values.append(value.decode(value.encode(v[:, :, members])))
            end += key.block
        asked = positions == token
        if asked.any():
            seen_k = np.concatenate([*keys, k[:, :, end:]], axis=2)[:, :, : token + 1]
            seen_v = np.concatenate([*values, v[:, :, end:]], axis=2)[:, :, : token + 1]
            visible = causal_mask([token], token + 1, window)
            result = exact_attention(q, seen_k, seen_v, visible=visible, **options)
            output = np.where(asked[:, None, :, None], result[0], output)
            log_sum_exp = np.where(asked[:, None], result[1], log_sum_exp)
    return output, log_sum_exp


def relative_error(x, truth):
    """Root of the mean squared error, relative to that of the truth."""
    x, truth = np.asarray(x, dtype=np.float64), np.asarray(truth, dtype=np.float64)
    return np.sqrt(np.mean((x - truth) ** 2) / np.mean(truth**2))
