"""Loading: nothing that is damaged, foreign or contradicts itself is taken."""

import re
import zlib

import numpy as np
import pytest
import safetensors.numpy
from cache_model import read_file
from storage_cases import drop, edit, put, refused, small_cache, state

import kvcodec as kv
from kvcodec.testing import assert_same_bits

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


def test_an_edit_without_a_change_loads(path):
    edit(path, lambda header, arrays: None)
    assert_same_bits(state(kv.KVCache.load(path)), state(small_cache()))


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
