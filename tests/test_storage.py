"""Saving and loading: nothing is lost, and a file is written as a whole or not at all."""

import errno
import json
import os
import sys
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from cache_model import read_file
from storage_cases import GOLDEN, golden_cache, golden_outputs, small_cache, state, tokens

import kvcodec as kv
from kvcodec import cache as cache_module
from kvcodec import storage
from kvcodec.testing import assert_same_bits

SIDES = [(name, name) for name in kv.PRESETS]
SIDES += [("int4", "kivi2"), ("kivi4", "int8"), ("lm3", None), (None, "int2"), (None, None)]


# Round trips


@pytest.mark.parametrize(("key", "value"), SIDES)
@pytest.mark.parametrize("options", [{}, {"rollback": 20, "max_tokens": 900}, {"window": 30}])
def test_a_loaded_cache_continues_like_the_saved_one(key, value, options, backend, tmp_path):
    cache = small_cache(key, value, **options)
    cache.save(tmp_path / "a.safetensors")
    loaded = kv.KVCache.load(tmp_path / "a.safetensors")
    assert_same_bits(state(loaded), state(cache))
    assert loaded._layers == cache._layers
    assert loaded.capacity == cache.capacity
    more = tokens(100, step=104729)
    for one in (cache, loaded):
        if "rollback" in options:
            one.crop(-20)
    results = [one.append_attend(0, *more, return_lse=True) for one in (cache, loaded)]
    assert_same_bits(*results)
    assert_same_bits(state(loaded), state(cache))
    for name, one in (("a", cache), ("b", loaded)):
        one.save(tmp_path / f"{name}.safetensors")
    assert_same_bits(*(read_file(tmp_path / f"{name}.safetensors") for name in "ab"))


def test_empty_cropped_and_evicted_caches_come_back(tmp_path):
    cache = kv.KVCache(2, [1, 2], 16, recent=5, batch=3, query_bits=None, probability_bits=14)
    file = tmp_path / "cache.safetensors"
    verbs = [
        lambda: None,
        lambda: cache.append(1, *tokens(2, batch=3, heads=2)[1:]),
        lambda: cache.append(0, *tokens(300, batch=3)[1:], lengths=[300, 200, 2]),
        lambda: cache.append(1, *tokens(300, batch=3, heads=2)[1:]),
        lambda: cache.crop(111),
        lambda: cache.append(0, *tokens(100, batch=3)[1:]),
        lambda: cache.evict(50),
        lambda: cache.crop(1),
    ]
    for verb in verbs:
        verb()
        cache.save(file)
        loaded = kv.KVCache.load(file)
        assert_same_bits(state(loaded), state(cache))
        loaded.save(tmp_path / "again.safetensors")
        assert_same_bits(read_file(tmp_path / "again.safetensors"), read_file(file))


def test_a_ring_that_gave_pages_back_comes_back(tmp_path):
    cache = small_cache(window=40)
    cache.append(0, *tokens(3000)[1:])
    cache.save(tmp_path / "cache.safetensors")
    loaded = kv.KVCache.load(tmp_path / "cache.safetensors")
    assert_same_bits(loaded.keys(0), cache.keys(0))
    results = [one.append_attend(0, *tokens(90, step=31)) for one in (cache, loaded)]
    assert_same_bits(*results)


def test_saving_twice_gives_the_same_bytes(tmp_path):
    cache = small_cache()
    files = [tmp_path / f"{i}.safetensors" for i in range(16)]
    for file in files:
        cache.save(file)
    assert len({file.read_bytes() for file in files}) == 1


def test_saving_does_not_change_the_cache(tmp_path):
    cache = small_cache()
    before, size = state(cache), cache.nbytes
    cache.save(str(tmp_path / "cache.safetensors"))
    assert_same_bits(state(cache), before)
    assert cache.nbytes == size


def test_backends_write_the_same_file(tmp_path):
    files = []
    for backend in ("reference", "auto"):
        with kv.config_context(backend=backend):
            small_cache().save(tmp_path / "cache.safetensors")
        files.append(read_file(tmp_path / "cache.safetensors"))
    assert_same_bits(*files)


def test_the_backend_of_a_loaded_cache_can_be_chosen(path):
    loaded = kv.KVCache.load(path, backend="reference")
    assert_same_bits(state(loaded), state(small_cache(backend="reference")))
    with pytest.raises(ValueError, match="backend"):
        kv.KVCache.load(path, backend="gpu")


# Cost


def large_cache():
    """A cache of several MB in many layers."""
    cache = kv.KVCache(12, 2, 64, "int8", "kivi4", block=64)
    for layer in range(12):
        cache.append(layer, *tokens(2000, heads=2, head_dim=64)[1:])
    return cache


def test_saving_makes_no_copy_of_the_cache(tmp_path):
    cache = large_cache()
    tracemalloc.start()
    cache.save(tmp_path / "cache.safetensors")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.3 * cache.nbytes


def test_loading_makes_no_copy_of_the_file(tmp_path):
    path = tmp_path / "cache.safetensors"
    large_cache().save(path)
    tracemalloc.start()
    loaded = kv.KVCache.load(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.3 * loaded.nbytes + max(path.stat().st_size, loaded.nbytes)


def test_each_sequence_is_built_once(tmp_path, monkeypatch):
    built = []

    class Counted(cache_module.Sequence):
        def __init__(self, layer):
            built.append(layer)
            super().__init__(layer)

    monkeypatch.setattr(cache_module, "Sequence", Counted)
    golden = kv.KVCache.load(GOLDEN)
    assert built == [layer for layer in golden._layers for _ in range(2)]


# The golden file


def test_the_golden_file_loads_with_its_codes(backend):
    loaded = kv.KVCache.load(GOLDEN)
    assert loaded.seq_lengths.tolist() == [[67, 60]] * 3
    sums = [
        zlib.crc32(part.tobytes())
        for rows in state(loaded)
        for held in rows
        for side in ("keys", "values")
        for part in held[side].values()
    ]
    assert sums == GOLDEN_SUMS
    np.testing.assert_allclose(golden_outputs(loaded), GOLDEN_OUTPUTS, atol=2e-3)


def test_what_is_written_now_is_the_golden_file(tmp_path):
    golden_cache().save(tmp_path / "cache.safetensors")
    now, then = (read_file(file) for file in (tmp_path / "cache.safetensors", GOLDEN))
    assert_same_bits(now[1], then[1])
    headers = [json.loads(metadata["kvcodec"].split(" ", 1)[1]) for metadata, _ in (now, then)]
    writers = [header.pop("written_by") for header in headers]
    assert headers[0] == headers[1]
    if writers[0] == writers[1]:
        assert (tmp_path / "cache.safetensors").read_bytes() == GOLDEN.read_bytes()
    assert GOLDEN.stat().st_size < 50_000


# Writing


def test_where_nothing_can_be_written_is_found_before_any_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr(storage, "_describe")
    cache = small_cache()
    message = "path must be in a folder that exists, but that of missing/a does not"
    with pytest.raises(FileNotFoundError, match=message):
        cache.save("missing/a")
    Path("file").touch()
    with pytest.raises(FileNotFoundError, match="but that of file/a does not"):
        cache.save("file/a")
    Path("folder").mkdir()
    with pytest.raises(OSError, match="path must be a file that can be replaced, but 'folder' is"):
        cache.save("folder")
    assert sorted(os.listdir()) == ["file", "folder"]


@pytest.mark.parametrize("step", ["open", "replace"])
def test_an_error_of_the_system_names_the_path_that_was_given(path, monkeypatch, step):
    def fail(name, *args):
        raise PermissionError(errno.EACCES, "Permission denied", str(name))

    monkeypatch.chdir(path.parent)
    monkeypatch.setattr(*((storage, "open", fail) if step == "open" else (os, step, fail)), False)
    with pytest.raises(PermissionError) as caught:
        small_cache().save(path.name)
    assert caught.value.filename == path.name
    assert os.listdir() == [path.name]


def test_nothing_is_replaced_by_what_the_library_does_not_open(path, monkeypatch):
    def refuse(*args):
        raise RuntimeError("no such file is known")

    before = path.read_bytes()
    monkeypatch.setattr(safetensors.numpy, "safe_open", refuse)
    with pytest.raises(RuntimeError, match="no such file is known"):
        small_cache("int8").save(path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_link_is_followed_and_stays(path):
    link = path.with_name("link")
    link.symlink_to(path.name)
    small_cache("int8").save(link)
    assert link.is_symlink()
    assert kv.KVCache.load(path)._layers[0].key.name == "int8"


@pytest.mark.parametrize("step", ["replace", "fsync"])
def test_a_crash_while_writing_leaves_the_old_file(path, monkeypatch, step):
    before = path.read_bytes()

    def crash(*args):
        raise OSError("the disk is gone")

    monkeypatch.setattr(os, step, crash)
    with pytest.raises(OSError, match="the disk is gone"):
        small_cache("int8").save(path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_an_interrupt_while_writing_leaves_the_old_file(path, monkeypatch):
    before = path.read_bytes()

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        small_cache("int8").save(path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_the_file_is_flushed_before_it_takes_its_place(path, monkeypatch):
    steps = []
    for step in ("fsync", "replace"):
        original = getattr(os, step)
        monkeypatch.setattr(
            os, step, lambda *args, step=step, do=original: (steps.append(step), do(*args))
        )
    small_cache("int8").save(path)
    assert [step for step in steps if step == "replace"] == ["replace"]
    assert steps.index("fsync") < steps.index("replace")
    assert os.listdir(path.parent) == [path.name]
    assert kv.KVCache.load(path)._layers[0].key.name == "int8"


def test_a_new_file_can_be_read_by_whom_the_umask_allows(tmp_path):
    small_cache().save(tmp_path / "cache.safetensors")
    (tmp_path / "other").write_bytes(b"")
    modes = [(tmp_path / name).stat().st_mode for name in ("cache.safetensors", "other")]
    assert modes[0] == modes[1]


def test_without_safetensors_the_extra_is_named(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    for call in (lambda: kv.KVCache.load(path), lambda: small_cache().save(path)):
        with pytest.raises(ImportError, match="storage"):
            call()


GOLDEN_SUMS = [
    2930511596,
    52577052,
    3590313641,
    1476854455,
    2320965311,
    567655602,
    342213705,
    3886418878,
    1447869969,
    1941130735,
    1743245061,
    2285192952,
    3431510595,
    881705831,
    3779773141,
    575069438,
    3031118381,
    3239485177,
    1044132930,
    858938589,
    2532186271,
    1758356561,
    1809380173,
    1695583062,
    2251498150,
    3133470125,
]
GOLDEN_OUTPUTS = [
    [
        [-0.26438000798225403, -0.411980003118515, 0.49298998713493347],
        [-0.3041999936103821, -0.011579999700188637, 0.416269987821579],
    ],
    [
        [-0.45350000262260437, -0.22548000514507294, 0.42239999771118164],
        [-0.24337999522686005, 0.07827000319957733, 0.3460099995136261],
    ],
    [
        [-0.5169699788093567, -0.2058500051498413, 0.38710999488830566],
        [-0.2958199977874756, 0.09685000032186508, 0.27458998560905457],
    ],
]
