"""Saving and loading: nothing is lost, and nothing that is damaged or foreign is taken.

``tests/data/cache-v1.safetensors`` was written by ``golden_cache().save(GOLDEN)`` from here.
"""

import errno
import json
import os
import re
import sys
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from cache_model import contents, read_file

import kvcodec as kv
from kvcodec import cache as cache_module
from kvcodec import storage
from kvcodec.testing import assert_same_bits

GOLDEN = Path(__file__).parent / "data" / "cache-v1.safetensors"
SIDES = [(name, name) for name in kv.PRESETS]
SIDES += [("int4", "kivi2"), ("kivi4", "int8"), ("lm3", None), (None, "int2"), (None, None)]


def numbers(*shape, step=7919):
    """Floats that every platform makes alike."""
    count = int(np.prod(shape))
    return (((np.arange(count) * step) % 257 - 128) / 64).astype(np.float32).reshape(shape)


def tokens(count, *, batch=1, heads=1, head_dim=16, step=7919):
    """Queries, keys and values."""
    q = numbers(batch, 2 * heads, count, head_dim, step=step)
    k, v = numbers(2, batch, heads, count, head_dim, step=step + 2)
    return q, k, v


def codec(name, side, **options):
    """A preset with blocks of 16 tokens, or None."""
    if name is None:
        return None
    group = {"group_size": 16} if name.startswith("kivi") else {}
    return kv.codec(name, block=16, **group, **options).for_side(side)


def small_cache(key="int4", value="kivi2", **options):
    """A cache of one row that holds sinks, a packed body and a tail."""
    sides = codec(key, "key"), codec(value, "value")
    cache = kv.KVCache(1, 1, 16, *sides, recent=5, block=16, **options)
    cache.append_attend(0, *tokens(45))
    return cache


def golden_cache():
    """The cache of which a file is kept."""
    keys = {0: codec("int4", "key"), 1: codec("kivi4", "key"), 2: None}
    values = {0: codec("lm2", "value", seed=3), 1: None, 2: codec("int3", "value")}
    options = {"sinks": 2, "recent": 5, "block": 16, "rollback": 9, "batch": 2}
    cache = kv.KVCache(3, 1, 16, keys, values, backend="reference", **options)
    for layer in range(3):
        cache.append_attend(layer, *tokens(70, batch=2), lengths=[70, 43])
    cache.crop(50)
    for layer in range(3):
        cache.append(layer, *tokens(20, batch=2, step=104729)[1:])
    cache.evict(3)
    return cache


def state(cache):
    return [[contents(row) for row in rows] for rows in cache._sequences]


def golden_outputs(cache):
    """A few numbers of the attention of every layer."""
    q, _, _ = tokens(1, batch=2, step=31)
    return [cache.attend(layer, q)[:, 0, 0, :3].round(5).tolist() for layer in range(3)]


@pytest.fixture
def path(tmp_path):
    """A file that holds a small cache."""
    small_cache().save(tmp_path / "cache.safetensors")
    return tmp_path / "cache.safetensors"


def refused(path, match="path must be"):
    with pytest.raises(ValueError, match=match):
        kv.KVCache.load(path)


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


# Damage


def test_every_flipped_byte_is_found(path):
    data = path.read_bytes()
    rng = np.random.default_rng(0)
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= rng.integers(1, 256)
        path.write_bytes(flipped)
        refused(path)


def test_every_truncation_is_found(path):
    data = path.read_bytes()
    for size in {*range(0, len(data), 13), *range(24), len(data) - 1}:
        path.write_bytes(data[:size])
        refused(path)


@pytest.mark.parametrize("extra", [b"\0", b"extra" * 100])
def test_what_follows_the_file_is_found(path, extra):
    path.write_bytes(path.read_bytes() + extra)
    refused(path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 8,
        b"\xff" * 200,
        b"a text of a few words, and no more than that",
        (2).to_bytes(8, "little") + b"{}",
        (4).to_bytes(8, "little") + b"null",
        (20).to_bytes(8, "little") + b'{"__metadata__": []}',
        safetensors.numpy.save({"weight": np.zeros(3)}),
        safetensors.numpy.save({"weight": np.zeros(3)}, metadata={"format": "pt"}),
        safetensors.numpy.save({}, metadata={"kvcodec": "a3a6bf43 {}"}),
        safetensors.numpy.save({}, metadata={"kvcodec": "0d4cbb29 []"}),
        safetensors.numpy.save({}, metadata={"kvcodec": "15d54739 {"}),
    ],
)
def test_foreign_files_are_refused(tmp_path, data):
    (tmp_path / "foreign").write_bytes(data)
    refused(tmp_path / "foreign")


def test_an_archive_of_numpy_is_refused(tmp_path):
    np.savez(tmp_path / "foreign.npz", weight=np.zeros(3))
    refused(tmp_path / "foreign.npz")


def test_a_header_that_is_no_json_is_refused_though_its_checksum_fits(tmp_path):
    for text in ("", "{", "[]", "null", "3", '{"format": "kvcodec.KVCache"}'):
        metadata = {"kvcodec": f"{zlib.crc32(text.encode()):08x} {text}"}
        (tmp_path / "foreign").write_bytes(safetensors.numpy.save({}, metadata=metadata))
        refused(tmp_path / "foreign")


def test_a_path_without_a_file_is_an_error_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "missing"))):
        kv.KVCache.load(tmp_path / "missing")
    with pytest.raises(
        OSError, match=f"path must be a file, but {re.escape(repr(str(tmp_path)))} is none"
    ):
        kv.KVCache.load(tmp_path)


@pytest.mark.parametrize("given", [3, None, b"cache.safetensors", ["cache"]])
def test_what_is_no_path_is_named(given):
    for call in (kv.KVCache.load, small_cache().save):
        with pytest.raises(TypeError, match="path must be a string or a path"):
            call(given)


# Headers that contradict themselves or the arrays, with checksums that fit


def edit(path, change):
    """Change the header and the arrays of a file, and give it fitting checksums."""
    metadata, arrays = read_file(path)
    header = json.loads(metadata["kvcodec"].split(" ", 1)[1])
    change(header, arrays)
    sums = {name: zlib.crc32(array.tobytes()) for name, array in arrays.items()}
    header["checksums"] = sums
    text = json.dumps(header, sort_keys=True)
    metadata = {"kvcodec": f"{zlib.crc32(text.encode()):08x} {text}"}
    path.write_bytes(safetensors.numpy.save(arrays, metadata=metadata))


def test_an_edit_without_a_change_loads(path):
    edit(path, lambda header, arrays: None)
    assert_same_bits(state(kv.KVCache.load(path)), state(small_cache()))


def put(*keys_and_value):
    """A change of one entry of the header."""
    *keys, last, value = keys_and_value

    def change(header, arrays):
        for key in keys:
            header = header[key]
        header[last] = value

    return change


def drop(*keys):
    """A change that leaves out one entry of the header."""
    *keys, last = keys

    def change(header, arrays):
        for key in keys:
            header = header[key]
        del header[last]

    return change


def number(name, value):
    """A change of one number of the only sequence."""
    return put("sequences", 0, 0, name, value)


def array(name, make):
    """A change of one array; None leaves it out."""

    def change(header, arrays):
        made = make(arrays.pop(f"0.0.{name}", None))
        if made is not None:
            arrays[f"0.0.{name}"] = np.ascontiguousarray(made)

    return change


def first(value):
    """An array with another first entry."""

    def make(x):
        x = x.copy()
        x.flat[0] = value
        return x

    return make


NAN, INFINITE = 0x7FC0, 0x7F80
EDITS = {
    "version 0": put("format_version", 0),
    "version 2": put("format_version", 2),
    "version no number": put("format_version", "1"),
    "version true": put("format_version", True),
    "no version": drop("format_version"),
    "format": put("format", "kvcodec.Other"),
    "no format": drop("format"),
    "no layers": put("layers", []),
    "layers no list": put("layers", 3),
    "layers left out": drop("layers"),
    "no sequences": put("sequences", []),
    "no rows": put("sequences", [[]]),
    "sequences left out": drop("sequences"),
    "more sequences": lambda header, arrays: header["sequences"].append(header["sequences"][0]),
    "more rows": lambda header, arrays: header["sequences"][0].append(header["sequences"][0][0]),
    "more layers": lambda header, arrays: header["layers"].append(header["layers"][0]),
    "options left out": drop("options"),
    "query bits": put("options", "query_bits", 7),
    "probability bits": put("options", "probability_bits", 9),
    "max_tokens below the length": put("options", "max_tokens", 20),
    "max_tokens negative": put("options", "max_tokens", -1),
    "option left out": drop("options", "query_bits"),
    "kv_heads": put("layers", 0, "kv_heads", 2),
    "kv_heads 0": put("layers", 0, "kv_heads", 0),
    "key_dim": put("layers", 0, "key_dim", 32),
    "value_dim": put("layers", 0, "value_dim", 32),
    "key_dim huge": put("layers", 0, "key_dim", 2**40),
    "sinks": put("layers", 0, "sinks", 3),
    "sinks negative": put("layers", 0, "sinks", -4),
    "sinks text": put("layers", 0, "sinks", "4"),
    "block": put("layers", 0, "block", 32),
    "block 0": put("layers", 0, "block", 0),
    "recent negative": put("layers", 0, "recent", -1),
    "rollback negative": put("layers", 0, "rollback", -1),
    "window 0": put("layers", 0, "window", 0),
    "exact_dtype": put("layers", 0, "exact_dtype", "bfloat16"),
    "exact_dtype unknown": put("layers", 0, "exact_dtype", "float16"),
    "unknown layer option": put("layers", 0, "color", "red"),
    "layer option left out": drop("layers", 0, "rollback"),
    "key of floats": put("layers", 0, "key", None),
    "key no object": put("layers", 0, "key", "int4"),
    "key bits": put("layers", 0, "key", "bits", 3),
    "key bits unknown": put("layers", 0, "key", "bits", 5),
    "key code": put("layers", 0, "key", "code", "lloyd_max"),
    "key code unknown": put("layers", 0, "key", "code", "huffman"),
    "key rotation unknown": put("layers", 0, "key", "rotation", "dct"),
    "key seed without signs": put("layers", 0, "key", "seed", 5),
    "key scales": put("layers", 0, "key", "scale_dtype", "float32"),
    "key side": put("layers", 0, "key", "side", "value"),
    "key side open": put("layers", 0, "key", "side", None),
    "key not centered": put("layers", 0, "key", "center", False),
    "key not equalized": put("layers", 0, "key", "equalize", False),
    "key block": put("layers", 0, "key", "block", 32),
    "key option unknown": put("layers", 0, "key", "color", "red"),
    "key option left out": drop("layers", 0, "key", "bits"),
    "value group": put("layers", 0, "value", "group_size", 8),
    "value bits": put("layers", 0, "value", "bits", 4),
    "end": number("end", 46),
    "end smaller": number("end", 44),
    "end negative": number("end", -1),
    "end huge": number("end", 2**62),
    "end a fraction": number("end", 45.0),
    "end text": number("end", "45"),
    "end true": number("end", True),
    "packed_end": number("packed_end", 20),
    "packed_end beyond": number("packed_end", 52),
    "packed_end negative": number("packed_end", -4),
    "evicted negative": number("evicted", -1),
    "evicted too many": number("evicted", 42),
    "released": number("released", 99),
    "released negative": number("released", -1),
    "tail_first": number("tail_first", 20),
    "tail_first beyond": number("tail_first", 44),
    "unit_first": number("unit_first", [5]),
    "unit_first negative": number("unit_first", [-4]),
    "unit_count": number("unit_count", [31]),
    "unit_count negative": number("unit_count", [-32]),
    "unit_count 0": number("unit_count", [0]),
    "units of different number": number("unit_count", [32, 16]),
    "no units": lambda header, arrays: header["sequences"][0][0].update(
        unit_first=[], unit_count=[]
    ),
    "units that overlap": lambda header, arrays: header["sequences"][0][0].update(
        unit_first=[4, 4], unit_count=[16, 32]
    ),
    "units with a gap": lambda header, arrays: header["sequences"][0][0].update(
        unit_first=[4, 24], unit_count=[16, 12]
    ),
    "units no list": number("unit_count", 32),
    "number left out": drop("sequences", 0, 0, "evicted"),
    "nan scale": array("keys.scale", first(NAN)),
    "infinite scale": array("keys.scale", first(INFINITE)),
    "nan zero point": array("values.zero_point", first(NAN)),
    "nan center scale": array("keys.center_scale", first(NAN)),
    "nan weight": array("keys.weights", first(np.nan)),
    "weight 0": array("keys.weights", first(0)),
    "weight negative": array("keys.weights", first(-1)),
    "weight infinite": array("keys.weights", first(np.inf)),
    "weight huge": array("keys.weights", first(1e30)),
    "nan sink": array("sinks.k", first(np.nan)),
    "infinite tail": array("tail.v", first(np.inf)),
    "tail beyond the range": array("tail.k", first(3e38)),
    "sinks missing": array("sinks.v", lambda x: None),
    "tail missing": array("tail.k", lambda x: None),
    "codes missing": array("keys.packed", lambda x: None),
    "scales missing": array("values.scale", lambda x: None),
    "centers missing": array("keys.center_levels", lambda x: None),
    "weights missing": array("keys.weights", lambda x: None),
    "unknown array": array("keys.color", lambda x: np.zeros(3)),
    "array of no row": lambda header, arrays: arrays.update({"0.1.tail.k": np.zeros(3)}),
    "exact beside codes": array("keys.exact", lambda x: np.zeros((1, 1, 32, 16), np.float32)),
    "weights of values": array("values.weights", lambda x: np.ones((1, 1, 16), np.float32)),
    "energy of wrong shape": array("energy", lambda x: np.zeros((3, 1, 8))),
    "energy negative": array("energy", lambda x: np.full((3, 1, 16), -1.0)),
    "energy nan in places": array("energy", lambda x: np.full((3, 1, 16), [0, np.nan] * 8)),
    "energy too long": array("energy", lambda x: np.zeros((99, 1, 16))),
    "codes short": array("keys.packed", lambda x: x[:, :, :-1]),
    "codes wide": array("keys.packed", lambda x: x.repeat(2, axis=3)),
    "codes signed": array("keys.packed", lambda x: x.view(np.int8)),
    "codes flat": array("keys.packed", lambda x: x.ravel()),
    "scales short": array("keys.scale", lambda x: x[:, :, :-1]),
    "scales float32": array("keys.scale", lambda x: x.astype(np.float32)),
    "scales float16": array("keys.scale", lambda x: x.view(np.float16)),
    "centers long": array("keys.center_levels", lambda x: x.repeat(2, axis=2)),
    "centers unsigned": array("keys.center_levels", lambda x: x.view(np.uint8)),
    "tail float64": array("tail.k", lambda x: x.astype(np.float64)),
    "tail short": array("tail.k", lambda x: x[:, :, :-1]),
    "weights float64": array("keys.weights", lambda x: x.astype(np.float64)),
    "weights of more rows": array("keys.weights", lambda x: x.repeat(2, axis=0)),
}


@pytest.mark.parametrize("change", EDITS.values(), ids=EDITS)
def test_contradictions_are_refused(path, change):
    edit(path, change)
    refused(path)


@pytest.mark.parametrize("version", [0, 2])
def test_the_version_is_named(path, version):
    edit(path, put("format_version", version))
    refused(path, f"of format version 1, but is a kvcodec.KVCache file of version {version}")


def test_checksums_of_other_arrays_are_refused(path):
    metadata, arrays = read_file(path)
    for name in ("0.0.tail.k", "0.0.keys.packed"):
        damaged = {**arrays, name: arrays[name].copy()}
        damaged[name].flat[0] += 1
        path.write_bytes(safetensors.numpy.save(damaged, metadata=metadata))
        refused(path, f"the array {name} is damaged")


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
