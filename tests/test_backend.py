"""Choosing the backend: environment, contexts, threads, and what happens where it is missing."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import kvcodec as kv
from kvcodec import _backend, reference
from kvcodec._backend import SIMD_LEVELS, available_simd_levels
from kvcodec.testing import assert_same_bits, backends

ROOT = Path(kv.__file__).parents[1]
needs_fast_path = pytest.mark.skipif(
    not available_simd_levels() and os.environ.get("KVCODEC_REQUIRE_FAST") != "1",
    reason="no compiled fast path here",
)
WITHOUT_FAST_PATH = "import sys; sys.modules['kvcodec._fast._cpu'] = None\n"
TRANSFORM = "import kvcodec as kv; kv.fwht([1.0, 2.0])\n"


def run(code, **environment):
    """Run code in a new interpreter; returns what it printed, or raised in its last line."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("KVCODEC_")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**inherited, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def reported(name):
    return f"import kvcodec as kv; print(kv.get_config()[{name!r}])"


# The environment


def test_backend_comes_from_the_environment():
    assert run(reported("backend"), KVCODEC_BACKEND="reference") == "reference"
    available = "fast" if available_simd_levels() else "reference"
    assert run(reported("backend"), KVCODEC_BACKEND="auto") == available
    assert run(reported("backend"), KVCODEC_BACKEND="") == available


@needs_fast_path
def test_fast_backend_comes_from_the_environment():
    assert run(reported("backend"), KVCODEC_BACKEND="fast") == "fast"


@needs_fast_path
@pytest.mark.parametrize("level", SIMD_LEVELS)
def test_simd_level_of_the_environment_is_the_highest_used(level):
    allowed = SIMD_LEVELS[: SIMD_LEVELS.index(level) + 1]
    expected = [name for name in available_simd_levels() if name in allowed][-1]
    assert run(reported("simd"), KVCODEC_SIMD=level) == expected


def test_threads_come_from_the_environment():
    assert run(reported("num_threads"), KVCODEC_NUM_THREADS="3") == "3"


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("KVCODEC_BACKEND", "gpu", "auto, fast, reference"),
        ("KVCODEC_BACKEND", "Fast", "auto, fast, reference"),
        ("KVCODEC_SIMD", "sse9", "baseline, avx2, avxvnni, avx512, amx"),
        ("KVCODEC_NUM_THREADS", "0", "from 1 to 1024"),
        ("KVCODEC_NUM_THREADS", "many", "from 1 to 1024"),
        ("KVCODEC_NUM_THREADS", "1.5", "from 1 to 1024"),
    ],
)
def test_bad_variables_raise_at_the_first_call(name, value, allowed):
    message = run("import kvcodec as kv; kv.get_config()", **{name: value})
    assert message.startswith(f"ValueError: {name} must be")
    assert allowed in message
    assert repr(value) in message


def test_bad_variables_do_not_break_the_import():
    assert run("import kvcodec; print('imported')", KVCODEC_BACKEND="gpu") == "imported"


# A missing fast path


def test_without_a_fast_path_auto_is_the_reference():
    code = WITHOUT_FAST_PATH + TRANSFORM + reported("backend")
    assert run(code) == "reference"
    assert run(WITHOUT_FAST_PATH + reported("available_simd")) == "[]"
    assert "kvcodec._fast._cpu" in run(WITHOUT_FAST_PATH + reported("fast_path_error"))


def test_without_a_fast_path_fast_raises():
    message = run(WITHOUT_FAST_PATH + TRANSFORM, KVCODEC_BACKEND="fast")
    assert message.startswith("RuntimeError: backend 'fast' was asked for")
    assert "kvcodec._fast._cpu" in message
    call = "import kvcodec as kv; kv.fwht([1.0, 2.0], backend='fast')"
    assert run(WITHOUT_FAST_PATH + call) == message
    context = "import kvcodec as kv\nwith kv.config_context(backend='fast'): print('entered')"
    assert run(WITHOUT_FAST_PATH + context) == message


def test_without_a_fast_path_no_simd_level_is_available():
    code = "import kvcodec as kv\nwith kv.config_context(simd='avx2'): pass"
    assert run(WITHOUT_FAST_PATH + code) == (
        "ValueError: simd 'avx2' is not available here; available: none."
    )


def test_testing_without_hypothesis_names_the_extra():
    code = "import sys; sys.modules['hypothesis'] = None\nimport kvcodec.testing"
    message = run(code)
    assert message.startswith("ImportError: kvcodec.testing needs hypothesis")
    assert "'test'" in message


# Contexts


def test_contexts_nest():
    outside = kv.get_config()
    with kv.config_context(backend="reference", num_threads=3):
        assert (kv.get_config()["backend"], kv.num_threads()) == ("reference", 3)
        with kv.config_context(num_threads=5):
            assert (kv.get_config()["backend"], kv.num_threads()) == ("reference", 5)
        with kv.config_context(backend="auto"):
            assert kv.num_threads() == 3
        assert (kv.get_config()["backend"], kv.num_threads()) == ("reference", 3)
    assert kv.get_config() == outside


def test_contexts_end_with_an_exception():
    outside = kv.get_config()

    @contextmanager
    def failing():
        with kv.config_context(backend="reference", num_threads=7):
            yield

    with pytest.raises(KeyError), failing():
        raise KeyError
    assert kv.get_config() == outside


@pytest.mark.parametrize("backend", backends(), ids=lambda backend: backend.label)
def test_context_is_what_runs(backend):
    with backend.context():
        config = kv.get_config()
        assert (config["backend"], config["simd"]) == (backend.backend, backend.simd)
        if backend.num_threads is not None:
            assert config["num_threads"] == backend.num_threads


@needs_fast_path
def test_argument_is_stronger_than_context(monkeypatch):
    called = []
    monkeypatch.setattr(kv.reference, "fwht", lambda x, out: called.append("reference"))
    with kv.config_context(backend="fast"):
        kv.fwht([1.0, 2.0], backend="reference")
        kv.fwht([1.0, 2.0])
    with kv.config_context(backend="reference"):
        kv.fwht([1.0, 2.0], backend="fast")
    assert called == ["reference"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "gpu"}, "backend must be one of auto, fast, reference, but 'gpu' was given"),
        (
            {"simd": "sse2"},
            "simd must be one of baseline, avx2, avxvnni, avx512, amx, but 'sse2' was given",
        ),
        ({"num_threads": 0}, "num_threads must be a whole number from 1 to 1024, but 0 was given"),
        ({"num_threads": 2.0}, "num_threads must be a whole number"),
        ({"num_threads": np.float32(2.5)}, "num_threads must be a whole number"),
        ({"num_threads": True}, "num_threads must be a whole number"),
        ({"num_threads": "many"}, "num_threads must be a whole number"),
        ({"num_threads": 1025}, "num_threads must be a whole number"),
    ],
    ids=str,
)
def test_bad_contexts_raise_and_change_nothing(options, message):
    outside = kv.get_config()
    with pytest.raises(ValueError, match=message), kv.config_context(**options):
        pass
    assert kv.get_config() == outside


@pytest.mark.parametrize("backend", ["gpu", "", 1])
def test_bad_backend_arguments_raise(backend):
    with pytest.raises(ValueError, match="backend must be one of auto, fast, reference"):
        kv.fwht([1.0, 2.0], backend=backend)


# Threads


def test_set_num_threads_is_for_the_process():
    before = kv.num_threads()
    try:
        kv.set_num_threads(5)
        assert kv.num_threads() == 5
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(kv.num_threads).result() == 5
        with kv.config_context(num_threads=2):
            assert kv.num_threads() == 2
    finally:
        kv.set_num_threads(before)


@pytest.mark.parametrize("count", [0, -1, 1025, 1.0, True, None, "two", np.float32(2.5)])
def test_set_num_threads_refuses_other_values(count):
    before = kv.num_threads()
    with pytest.raises(ValueError, match="count must be a whole number from 1 to 1024"):
        kv.set_num_threads(count)
    assert kv.num_threads() == before


def test_each_thread_has_its_own_context():
    inside, seen = threading.Barrier(2), {}

    def look(count):
        with kv.config_context(num_threads=count):
            inside.wait(timeout=30)
            seen[count] = kv.num_threads()
            inside.wait(timeout=30)

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(look, count) for count in (11, 12)]:
            future.result()
    assert seen == {11: 11, 12: 12}


def work(name, seed):
    """Encode, decode and attend."""
    q, k, v = np.random.default_rng(seed).standard_normal((3, 1, 4, 70, 64), dtype=np.float32)
    key, value = kv.codec(name).for_side("key"), kv.codec(name).for_side("value")
    keys = key.encode(k, queries=q if key.equalize else None)
    values = value.encode(v)
    return keys, values, key.decode(keys), kv.attention(q, keys, values, causal=True)


@pytest.mark.parametrize("backend", backends(), ids=lambda backend: backend.label)
def test_concurrent_calls_give_the_same_bits(backend, monkeypatch):
    monkeypatch.setattr(_backend, "PARALLEL_FROM", 0)
    jobs = [(name, seed) for seed in range(2) for name in ("int8", "int4", "kivi2", "lm3")]

    def job(arguments):
        with backend.context():
            return work(*arguments)

    alone = [job(arguments) for arguments in jobs]
    with ThreadPoolExecutor(4) as pool:
        for result, expected in zip(pool.map(job, jobs * 2), alone * 2, strict=True):
            assert_same_bits(result, expected)


@needs_fast_path
@pytest.mark.parametrize("level", available_simd_levels())
def test_any_number_of_threads_gives_the_same_bits(level, monkeypatch):
    monkeypatch.setattr(_backend, "PARALLEL_FROM", 0)
    results = []
    for count in (1, 2, 2, 2, 3, 4, 7):
        with kv.config_context(backend="fast", simd=level, num_threads=count):
            results.append([work(name, seed=0) for name in ("int8", "int4", "kivi4", "lm2")])
    for result in results[1:]:
        assert_same_bits(result, results[0])


# Reports


def test_configuration_is_complete():
    config = kv.get_config()
    assert list(config) == [
        *("version", "backend", "simd", "available_simd", "openmp", "num_threads"),
        *("fast_path_error", "python", "numpy", "machine"),
    ]
    assert config["version"] == kv.__version__
    assert (config["fast_path_error"] is None) == bool(config["available_simd"])
    assert (config["simd"] is None) == (config["backend"] == "reference")


def test_configuration_is_printed_a_line_each(capsys):
    kv.show_config()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == list(kv.get_config())


def test_an_explicit_reference_needs_no_fast_path(monkeypatch):
    x = np.ones((1, 1, 4, 16), np.float32)

    def unavailable(backend=None):
        if backend != "reference":
            raise RuntimeError("backend 'fast' was asked for, but cannot be had")
        return reference

    monkeypatch.setattr(_backend, "resolve", unavailable)
    assert kv.attention(x, x, x, backend="reference").shape == x.shape
    with pytest.raises(RuntimeError, match="was asked for"):
        kv.attention(x, x, x)
