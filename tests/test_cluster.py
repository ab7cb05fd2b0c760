"""Evaluation on Dask workers: the same results, also where a worker is lost."""

import os
import signal

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("distributed")

from distributed import Client, LocalCluster
from hf_models import SMALL
from hf_text import saved

from kvcodec.evaluation import (
    ChunkOptions,
    codec_pair,
    cut_chunks,
    load_language_model,
    make_probes,
    read_text,
)
from kvcodec.evaluation.cluster import _model, measure_on_cluster
from kvcodec.evaluation.measure import chunk_units, measure, needle_units
from kvcodec.evaluation.store import Store, file_digest

pytestmark = [
    pytest.mark.hf,
    # What a killed worker leaves open is not of this project.
    pytest.mark.filterwarnings("ignore"),
]
OPTIONS = ChunkOptions(sinks=4, recent=8)
PAIRS = [codec_pair(name, SMALL["block"]) for name in ("int8", "int4", "lm4/lm2")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def model(folder):
    return load_language_model(folder)


@pytest.fixture(scope="module")
def units(model):
    chunks = cut_chunks(model.encode(read_text()), [], 100, 4)
    return chunk_units(chunks, OPTIONS)


@pytest.fixture
def cluster():
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        yield cluster


def without_times(results):
    return {
        name: {key: x for key, x in result.items() if key != "seconds"}
        for name, result in results.items()
    }


def test_the_same_results_though_a_worker_is_killed(cluster, folder, model, units):
    expected = measure(model, units, PAIRS)
    killed, parts = [], []

    def kill_one(part):
        parts.append(part)
        if not killed:
            with Client(cluster.scheduler_address) as client:
                killed.append(min(client.run(os.getpid).values()))
                os.kill(killed[0], signal.SIGKILL)

    found = measure_on_cluster(cluster.scheduler_address, folder, units, PAIRS, progress=kill_one)
    assert without_times(found) == without_times(expected)
    assert len(parts) == 12
    assert parts[-1] == 1
    with pytest.raises(ProcessLookupError):
        os.kill(killed[0], 0)


def test_local_workers_probes_and_a_store(folder, model, tmp_path):
    probes = make_probes(model, read_text(), 300, 4, 0)
    units = needle_units(probes, OPTIONS)
    store = Store(tmp_path / "results", {})
    store.begin()
    expected = measure(model, units[:2], PAIRS, store=store)
    parts = []
    found = measure_on_cluster("local:1", folder, units, PAIRS, store=store, progress=parts.append)
    assert found == measure(model, units, PAIRS)
    assert expected.items() <= found.items()
    assert len(parts) == 6
    assert measure(None, units, PAIRS, store=store) == found


def test_a_scheduler_that_does_not_answer(folder, units, monkeypatch):
    monkeypatch.setattr("kvcodec.evaluation.cluster.SECONDS_TO_CONNECT", 1)
    with pytest.raises(ValueError, match=r"^scheduler 'tcp://127.0.0.1:9' cannot be reached: "):
        measure_on_cluster("tcp://127.0.0.1:9", folder, units, PAIRS)


def test_a_scheduler_that_is_lost(folder, units, monkeypatch):
    monkeypatch.setattr("kvcodec.evaluation.cluster.SECONDS_TO_CONNECT", 1)
    with LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as lost:
        address = lost.scheduler_address
        with pytest.raises(ValueError, match=r"^scheduler 'tcp:.*' was lost, or has cancelled"):
            measure_on_cluster(address, folder, units, PAIRS, progress=lambda _: lost.close())


def test_no_cluster_is_started_for_what_is_stored(folder, model, units, tmp_path, monkeypatch):
    store = Store(tmp_path / "results", {})
    store.begin()
    expected = measure(model, units[:1], PAIRS, store=store)
    monkeypatch.setattr("distributed.LocalCluster", None)
    assert measure_on_cluster("local:1", folder, units[:1], PAIRS, store=store) == expected


def test_a_worker_sees_that_the_model_has_changed(tmp_path):
    folder = saved(tmp_path / "model")
    first = file_digest(folder)
    loaded = _model(str(folder), first)
    assert _model(str(folder), first) is loaded
    (folder / "note").write_text("changed")
    changed = file_digest(folder)
    with pytest.raises(ValueError, match=f"has the digest {changed[:8]} instead of {'0' * 8}"):
        _model(str(folder), "0" * 64)
    assert _model(str(folder), changed) is not loaded
