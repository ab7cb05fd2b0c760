"""The benchmark: that it measures what it says and reports it; no time is asserted."""

import json
import os

import numpy as np
import pytest

import kvcodec as kv
from kvcodec import benchmark
from kvcodec.benchmark import memory, peers
from kvcodec.benchmark.peers.process import worker_environment
from kvcodec.benchmark.report import time_text
from kvcodec.benchmark.settings import CODECS, cache_pair
from kvcodec.benchmark.timing import (
    mean_of_calls,
    median_ratio,
    second_of_two,
    timed,
    timed_rounds,
    turn,
)
from kvcodec.benchmark.work import attended_bytes, filled_caches, kv_chunks, queries
from kvcodec.blocks import PAGE_UNITS, TILE
from kvcodec.reference.memory import read_all

pytestmark = pytest.mark.usefixtures("load")
TINY = (
    *("bench", "--quick", "--context", 130, "--repeats", 1, "--threads", 1),
    *("--q-heads", 4, "--kv-heads", 2, "--head-dim", 64),
)
FIELDS = [
    *("task", "name", "tokens", "threads", "seconds", "lower_quartile", "upper_quartile"),
    *("nbytes", "read_seconds", "share_of_read", "base", "relative"),
]
TASKS = {"decode", "floats", "prefill", "fwht", "encode", "block", "few"}

FAKE = """
import os, sys
import numpy as np
import kvcodec as kv

def fht(x, inplace=True, num_threads=1):
    print("a library's own words")
    {body}
    return kv.fwht(x) * np.float32(x.shape[-1] ** 0.5)
"""


@pytest.fixture
def no_peers(monkeypatch):
    """No other library is installed."""
    find_spec = peers.cases.importlib.util.find_spec
    needed = {name for peer in peers.PEERS for name in peer.needs}
    monkeypatch.setattr(
        "kvcodec.benchmark.peers.cases.importlib.util.find_spec",
        lambda name: None if name in needed else find_spec(name),
    )


@pytest.fixture
def fake_peer(monkeypatch, tmp_path):
    """Put a module fht_cpu where it is found, which does something before it transforms."""

    def install(body="pass"):
        (tmp_path / "fht_cpu.py").write_text(FAKE.format(body=body))
        monkeypatch.syspath_prepend(tmp_path)
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        monkeypatch.setenv("PYTHONPATH", path)
        fakes = tuple(peer for peer in peers.PEERS if peer.name == "fht-cpu")
        monkeypatch.setattr("kvcodec.benchmark.peers.compare.PEERS", fakes)

    return install


@pytest.fixture
def tiny():
    """Settings that take no time."""
    return benchmark.make_settings(benchmark.Shape(4, 2, 64), [130], [], [1], 1, quick=True)


# The command


def test_help(run):
    code, out, err = run("bench", "--help")
    assert code == 0
    assert out.startswith("Usage: kvcodec bench")
    assert err == ""


def test_tables(run):
    code, out, err = run(*TINY)
    assert code == 0
    assert err == ""
    assert out.startswith(f"kvcodec {kv.__version__}, ")
    assert "4 query heads, 2 KV heads, head_dim 64; medians of 1 rounds" in out
    for text in ("share of", "int4 in floats", "exact", "in place", "lm4 keys", "append_attend"):
        assert text in out


@pytest.mark.usefixtures("no_peers")
def test_json_holds_everything(run, tmp_path):
    file = tmp_path / "times.json"
    code, out, _ = run(*TINY, "--codec", "lm4/lm2", "--threads", 2, "--peers", "--json", file)
    assert code == 0
    assert "Not measured: torch: torch not installed" in out
    content = json.loads(file.read_text())
    assert list(content) == ["command", "machine", "measurements", "peers", "missing"]
    assert content["peers"] == []
    assert list(content["missing"]) == [peer.name for peer in peers.PEERS]
    assert content["machine"] | {"load": 0} == benchmark.describe_machine() | {"load": 0}
    assert {"processor", "cores", "simd", "version"} < set(content["machine"])
    rows = content["measurements"]
    assert all(list(row) == FIELDS for row in rows)
    assert {row["task"] for row in rows} == TASKS
    decode = [row for row in rows if row["task"] == "decode"]
    assert [(row["name"], row["threads"]) for row in decode] == [
        *(("int4", 1), ("lm4/lm2", 1), ("int4", 2), ("lm4/lm2", 2)),
    ]
    for row in decode:
        assert row["share_of_read"] == pytest.approx(row["read_seconds"] / row["seconds"])
        assert row["base"] == "int4"
    assert decode[0]["relative"] == 1


def test_the_command_in_json_measures_the_same(run):
    first, second = ("command", "measurements")
    _, out, _ = run(*TINY, "--json")
    told = json.loads(out)
    words = told[first].split()
    assert words[:3] == ["kvcodec", "bench", "--quick"]
    _, out, _ = run(*words[1:], "--json", "-")
    again = json.loads(out)
    assert again[first] == told[first]
    assert [row["name"] for row in again[second]] == [row["name"] for row in told[second]]


@pytest.mark.parametrize(("number", "warned"), [(0.5, 0), (None, 0), (0.51, 1), (3.7, 1)])
def test_a_load_before_is_warned_of(run, load, number, warned):
    load(number)
    code, out, err = run(*TINY, "--json")
    assert code == 0
    assert json.loads(out)["machine"]["load"] == number
    assert err.count("\n") == warned
    if warned:
        assert err.startswith(f"Warning: the load of the last minute was {number:.2f}, ")


@pytest.mark.parametrize(
    ("threads", "policy", "advised"), [(1, None, 0), (2, None, 1), (2, "passive", 0)]
)
def test_the_warning_fits_the_run(run, load, monkeypatch, threads, policy, advised):
    load(3)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if policy is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    _, _, err = run(*TINY, "--threads", threads, "--json")
    assert ("makes figures of several threads worthless" in err) == (threads > 1)
    assert ("OMP_WAIT_POLICY=passive" in err) == bool(advised)


def test_codecs_are_measured_once():
    names = ["lm4", "int4/int4", "lm4/lm4", "lm4/lm2"]
    pairs = benchmark.make_settings(codecs=names, quick=True).codecs
    assert [pair.name for pair in pairs] == ["int4", "lm4", "lm4/lm2"]
    pairs = benchmark.make_model_settings("m.gguf", codecs=names).codecs
    assert [pair.name for pair in pairs] == ["int4", "lm4", "lm4/lm2"]


def test_the_bar_tells_what_is_done(tiny):
    told = []
    benchmark.run_benchmark(tiny, lambda *words: told.append(words))
    assert told[0] == (0, "filling caches")
    assert told[-1] == (1, "measuring")
    assert [part for part, _ in told] == sorted(part for part, _ in told)
    # 7 steps of 1 round that counts and 2 that do not.
    assert [doing for _, doing in told] == ["filling caches", *3 * ["measuring"]] * 7


def test_a_picture_is_drawn(run, tmp_path):
    file = tmp_path / "times.svg"
    assert run(*TINY, "--context", 200, "--plot", file)[0] == 0
    assert "<svg" in file.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--context", 0), "0 is not in the range"),
        (("--context", "long"), "'long' is not a valid integer"),
        (("--threads", 0), "0 is not in the range"),
        (("--repeats", 0), "0 is not in the range"),
        (("--q-heads", 7), "q_heads must be a multiple of kv_heads, 8, but 7 was given"),
        (("--head-dim", 100), "must be m * 2^k"),
        (("--head-dim", 7, "--codec", "int8"), "codec 'int4', which is always measured, is not"),
        (
            ("--head-dim", 2, "--codec", "lm4"),
            "codec 'lm4' is not possible: head_dim must be one of",
        ),
        (("--codec", "int5"), "codec must be one of int8"),
        (("--codec", "fp16"), "codec must be one of int8"),
        (("--codec", "lm4", "--head-dim", 8192), "head_dim"),
        (("--json", "/nowhere/times.json"), "/nowhere is no folder"),
        (("--plot", "times.gif"), "plot must be a file ending in .pdf, .png, .svg"),
        (("--json", "times.svg", "--plot", "times.svg"), "must be another file"),
        (("--llama", "/nowhere"), "--llama must be a shared library of ggml"),
        (("--llama", __file__), "cannot be loaded: "),
        (("--ik-llama", os.path.dirname(__file__)), "--ik-llama must be a shared library"),
        (("--peer",), "No such option"),
        (("more",), "unexpected extra argument"),
    ],
)
def test_errors_are_one_line(run, arguments, message):
    code, out, err = run("bench", *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    assert message in err


def test_too_little_memory_is_one_line(run, monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(benchmark, "run_benchmark", fail)
    code, out, err = run(*TINY)
    assert (code, out) == (2, "")
    assert err == "Error: the caches do not fit into memory; take shorter contexts.\n"


@pytest.mark.parametrize(
    ("arguments", "step"),
    [
        (("--context", 2**24), f"context {2**24} needs about 72.0 GB"),
        (("--context", 130, "--context", 2**24), f"context {2**24} needs about"),
        (("--q-heads", 2**24, "--context", 130), "prefill needs about"),
        (("--context", 2**24, "--peers"), f"context {2**24} of other libraries needs about"),
    ],
)
def test_too_little_memory_is_told_before_caches_are_filled(run, monkeypatch, arguments, step):
    monkeypatch.setattr("kvcodec.benchmark.memory.available_bytes", lambda: 10**9)
    monkeypatch.setattr(benchmark, "run_benchmark", None)
    code, out, err = run("bench", "--quick", "--threads", 1, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"Error: the caches do not fit into memory: {step}")
    assert "but 1.0 GB are available" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("available", [None, 10**8])
def test_what_fits_or_is_not_known_to_fit_is_measured(run, monkeypatch, available):
    monkeypatch.setattr("kvcodec.benchmark.memory.available_bytes", lambda: available)
    assert run(*TINY)[0] == 0


def test_the_memory_that_is_needed_is_that_of_the_caches(tiny):
    """Where pages are full: half of it, the other half are the buffers that are read."""
    context = 24 * PAGE_UNITS * TILE + 68
    settings = benchmark.make_settings(tiny.shape, [context], ["int8"], [1], 1, quick=True)
    caches = filled_caches(settings.codecs, tiny.shape, context).values()
    room = sum(cache.memory()["total"] for cache in caches)
    needed = memory.needed_bytes(settings)[f"context {context}"]
    assert needed / 2 == pytest.approx(room, rel=0.1)
    # Two codecs, each with and without integer products, are measured too.
    alone = benchmark.make_settings(tiny.shape, [context], ["int4"], [1], 1, quick=True)
    [pair] = alone.codecs
    assert memory.needed_bytes(alone)[f"context {context}"] >= 4 * attended_bytes(
        pair, tiny.shape, context
    )


def test_memory_that_is_available(monkeypatch, tmp_path):
    nothing = tmp_path / "nothing"
    assert memory.available_bytes() > 0
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemFree: 1 kB\nMemAvailable:  3 kB\n")
    monkeypatch.setattr(memory, "_address_space", lambda: None)
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    assert memory.available_bytes() == 3 * 1024
    monkeypatch.setattr(memory, "_address_space", lambda: 2000)
    assert memory.available_bytes() == 2000
    monkeypatch.setattr(memory, "_address_space", lambda: -5)
    assert memory.available_bytes() == 0
    monkeypatch.setattr(memory, "MEMINFO", nothing)
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PHYS_PAGES": 7}.get(name, 100))
    monkeypatch.setattr(memory, "_address_space", lambda: None)
    assert memory.available_bytes() == 700
    monkeypatch.delattr("os.sysconf")
    assert memory.available_bytes() is None


def test_a_limit_of_the_address_space_is_respected(monkeypatch, tmp_path):
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(memory, "STATM", tmp_path / "statm")
    (tmp_path / "statm").write_text("3 2 1 0 0 0 0\n")
    monkeypatch.setattr("os.sysconf", lambda name: 4096)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (50_000, 60_000))
    assert memory._address_space() == 50_000 - 3 * 4096
    monkeypatch.setattr(memory, "STATM", tmp_path / "nothing")
    assert memory._address_space() == 50_000
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)
    assert memory._address_space() is None


def test_the_reference_can_be_measured(run):
    with kv.config_context(backend="reference"):
        code, out, _ = run(*TINY, "--context", 70)
    assert code == 0
    assert "reference path;" in out


# What is measured


def test_rounds_take_turns():
    order = []
    measures = {name: timed(lambda _, name=name: order.append(name)) for name in "abc"}
    samples = timed_rounds(measures, repeats=3, warmup=1)
    assert "".join(order) == "abcbcacababc"
    assert {name: len(seconds) for name, seconds in samples.items()} == {"a": 3, "b": 3, "c": 3}
    assert all((seconds >= 0).all() for seconds in samples.values())


def test_preparation_is_given_and_not_counted(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr("kvcodec.benchmark.timing.time.perf_counter", lambda: next(clock))
    seen = []
    measure = timed(seen.append, prepare=lambda: next(clock))
    assert measure() == 1
    assert seen == [0]
    assert second_of_two(measure) == 1
    assert seen == [0, 3, 6]
    assert mean_of_calls(lambda: next(clock), 4, lambda: seen.append(next(clock)))() == 5 / 4
    assert seen == [0, 3, 6, 9]


@pytest.mark.parametrize("seconds", [0, 7])
def test_a_turn_is_the_second_call_after_a_while(monkeypatch, seconds):
    clock = iter(range(100))
    monkeypatch.setattr("kvcodec.benchmark.timing.time.perf_counter", lambda: next(clock))
    monkeypatch.setattr("kvcodec.benchmark.timing.SETTLE_SECONDS", seconds)
    begun = []
    measure = timed(begun.append, prepare=lambda: next(clock))
    assert turn(measure) == 1
    assert len(begun) == 2
    assert begun[0] > seconds


def test_ratios_are_taken_within_rounds():
    assert median_ratio(np.array([1.0, 20, 3]), np.array([2.0, 10, 6])) == 0.5


@pytest.mark.parametrize("name", [*CODECS, "kivi4 g128", "int4 plain"])
def test_attended_bytes_are_those_of_memory(name):
    """Where all pages are full; but for the numbers of their tokens, and for room in the tail."""
    shape, pair = benchmark.Shape(4, 2, 64), cache_pair(name)
    packed = 2 * PAGE_UNITS * max(TILE, pair.block)
    memory = filled_caches([pair], shape, packed + 68)[name].memory()["layers"][0]
    body, exact = (
        sum(memory[side][part] for side in ("key", "value") for part in parts)
        for parts in (("body",), ("sinks", "tail"))
    )
    kept = 68 * 2 * 2 * 64 * 4
    numbers = 2 * 2 * 8 * 2 * PAGE_UNITS
    assert attended_bytes(pair, shape, packed + 68) == kept + body - numbers
    assert kept <= exact
    assert attended_bytes(pair, shape, 67) == 67 * 2 * 2 * 64 * 4


def test_data_are_the_same_each_time():
    shape = benchmark.Shape(4, 2, 64)
    first, second = (list(kv_chunks(shape, 1100)) for _ in range(2))
    assert [x.shape for x in first] == [(2, 1, 2, 1024, 64), (2, 1, 2, 76, 64)]
    assert all((x == y).all() for x, y in zip(first, second, strict=True))
    assert (queries(shape, 3) == queries(shape, 3)).all()


def test_a_shape_leaves_out_default_codecs_that_it_does_not_allow():
    names = [
        pair.name for pair in benchmark.make_settings(benchmark.Shape(4, 2, 2), threads=[1]).codecs
    ]
    assert names == ["int4", "int8", "int3", "int2", "kivi4", "kivi2"]


def test_read_all_reads_every_byte():
    x = np.zeros(1003, dtype=np.uint8)
    for i in range(x.size):
        x[i] = 7
        assert read_all(x) == 7 << 8 * (i % 8)
        x[i] = 0


# The report


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 us"), (3.456e-7, "0.346 us"), (1.5e-5, "15.0 us"), (2e-3, "2.00 ms"), (1.5, "1500 ms")],
)
def test_times_have_three_digits(seconds, text):
    assert time_text(seconds) == text


def test_tables_are_at_most_100_columns():
    from rich.console import Console
    from rich.measure import Measurement as Width

    quartiles = (1.2344, 1.2, 1.3)
    rows = [
        benchmark.Measurement(
            task, name, 131072, 64, *quartiles, 987654321, 0.1, 0.95, "int4", 12.34
        )
        for task in TASKS
        for name in ("kivi4/kivi2 unrotated", "append_attend")
    ]
    compared = [
        benchmark.PeerMeasurement(
            peer.name, case.name, case.task, 131072, 64, case.ours, 1.2, 1.2, 123.4, 0.012
        )
        for peer in peers.PEERS
        for case in peer.cases
    ]
    tables = benchmark.make_tables(rows, compared)
    assert len(tables) == 4
    for table in tables:
        console = Console(width=1000)
        assert Width.get(console, console.options, table).minimum <= 100


# Other libraries


def test_a_library_in_another_process(fake_peer, tiny):
    fake_peer()
    rows, missing = benchmark.compare_with_peers(tiny)
    assert missing == {}
    assert [row.name for row in rows] == ["in place", "out of place"]
    for row in rows:
        assert (row.peer, row.task, row.threads) == ("fht-cpu", "fwht", 1)
        assert row.ratio == pytest.approx(row.seconds / row.our_seconds)
        assert row.relative_error < 1e-6


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise RuntimeError('not\\n today')", "RuntimeError: not today"),
        ("return 2 * x", "the output has a relative error of"),
        ("return np.nan * x", "the output has a relative error of nan"),
        ("print('oh', file=sys.stderr); sys.stderr.flush(); os._exit(3)", "exit code 3: oh"),
        ("os.write(2, b'Fatal error\\nleft\\n'); os.abort()", "exit code -6: Fatal error"),
    ],
)
def test_a_library_that_fails_is_told(fake_peer, tiny, body, reason):
    fake_peer(body)
    rows, missing = benchmark.compare_with_peers(tiny)
    assert rows == []
    assert len(missing) == 2
    assert all(reason in told for told in missing.values())


def test_processes_of_libraries_are_not_slowed_down(monkeypatch):
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Prescott")
    monkeypatch.setenv("OPENBLAS_L2_SIZE", "1")
    environment = worker_environment(3)
    assert not {"OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"} & set(environment)
    assert environment["OMP_NUM_THREADS"] == "3"


def test_each_library_has_a_module():
    for peer in peers.PEERS:
        name = f"kvcodec.benchmark.peers.{peer.module}"
        assert callable(__import__(name, fromlist=["prepare"]).prepare)
        assert {case.task for case in peer.cases} <= {"decode", "prefill", "fwht", "encode"}
