"""Files with arrays that were made to deceive: their checksums fit, and their contents do not."""

import numpy as np
import pytest
from cache_model import read_file
from storage_cases import CACHES, cache_of, codec, edit, written
from storage_cases import refused_cheaply as refused

import kvcodec as kv
from kvcodec import _backend, reference, storage
from kvcodec.encoded import Encoded


def arrays_of(name):
    """Names of the arrays in the file of a cache."""
    makers = {}
    storage._describe(cache_of(name)._sequences[0][0], "0.0", makers, reference)
    return list(makers)


ARRAYS = [(name, array) for name in CACHES for array in arrays_of(name)]
OTHER_TYPE = {
    "float64": np.int64,
    "float32": np.int32,
    "uint16": np.int16,
    "int8": np.uint8,
    "uint8": np.int8,
}


def longer(x, axis):
    """With the last entry of an axis twice."""
    return np.concatenate([x, x.take([-1], axis=axis)], axis=axis)


DAMAGES = {
    "type": lambda x: x.view(OTHER_TYPE[x.dtype.name]),
    "wider type": lambda x: x.astype(np.float64 if x.dtype != np.float64 else np.float32),
    "missing": lambda x: None,
    "flat": lambda x: x.ravel(),
    "one axis more": lambda x: x[None],
    "scalar": lambda x: x.ravel()[0],
    "axes in another order": lambda x: np.moveaxis(x, 0, -1),
    "empty": lambda x: x[..., :0],
    **{f"axis {axis} longer": lambda x, axis=axis: longer(x, axis) for axis in range(3)},
    **{
        f"axis {axis} shorter": lambda x, axis=axis: x.take(range(x.shape[axis] - 1), axis)
        for axis in range(3)
    },
    "last axis longer": lambda x: longer(x, x.ndim - 1),
    "last axis shorter": lambda x: x[..., :-1],
}


def change_array(name, make):
    """A change of one array."""

    def change(header, arrays):
        made = make(arrays.pop(name))
        if made is not None:
            arrays[name] = np.ascontiguousarray(made).reshape(np.shape(made))

    return change


@pytest.mark.parametrize(("name", "array"), ARRAYS)
def test_an_array_of_another_kind_is_refused(name, array, tmp_path, nothing_is_built):
    path = written(name, tmp_path)
    whole = path.read_bytes()
    for damage, make in DAMAGES.items():
        if array.endswith("energy") and damage in ("missing", "axis 0 shorter"):
            continue  # for how many tokens there are energies, only the array says
        path.write_bytes(whole)
        edit(path, change_array(array, make))
        refused(path, f"the array {array} is")


@pytest.mark.parametrize("name", CACHES)
def test_an_array_that_does_not_belong_is_refused(name, tmp_path, nothing_is_built):
    path = written(name, tmp_path)
    whole = path.read_bytes()
    _, there = read_file(path)
    parts = [
        f"{side}.{part}" for side in ("keys", "values") for part in (*storage_parts(), "exact")
    ]
    for extra in (
        "",
        "0",
        "0.0",
        "0.1.tail.k",
        "1.0.tail.k",
        "0.0.energy",
        *(f"0.0.{part}" for part in parts),
    ):
        if extra in there:
            continue
        path.write_bytes(whole)
        edit(path, lambda header, arrays, extra=extra: arrays.update({extra: np.ones((1, 2, 3))}))
        refused(path, "it holds an unknown array")


def storage_parts():
    """Names of the arrays of an `Encoded`."""
    return [name for name in Encoded.__dataclass_fields__ if name not in ("codec", "head_dim")]


def entry(value, at=0):
    """A change of one entry of an array."""

    def make(x):
        x = x.copy()
        x.flat[at] = value
        return x

    return make


def with_bit(bit, at=0):
    """A change of one bit of one entry of an array."""

    def make(x):
        bits = x.copy().view(f"u{x.itemsize}")
        bits.flat[at] ^= bits.dtype.type(1 << bit)
        return bits.view(x.dtype)

    return make


def first_code(value, bits):
    """A change of the first code."""

    def make(x):
        x = x.copy()
        x.flat[0] = (x.flat[0] & ~np.uint8(2**bits - 1)) | value
        return x

    return make


def scale(value):
    """A change of the last scale to a float."""

    def make(x):
        x = x.copy()
        bits = np.array(value, dtype=np.float32).view(np.uint32)
        x.flat[-1] = value if x.dtype == np.float32 else bits >> 16
        return x

    return make


EXACT = [entry(np.nan), entry(np.inf), entry(-np.inf, -1), entry(2.0**100), entry(-(2.0**100), -1)]
NO_SCALES = [scale(np.nan), scale(np.inf), scale(-np.inf), scale(2.0**113)]
VALUES = {
    **{("int4 kivi2", f"{part}.{side}"): EXACT for part in ("sinks", "tail") for side in "kv"},
    ("float32 lm3", "keys.exact"): EXACT,
    ("int8 float32", "values.exact"): EXACT,
    ("int4 kivi2", "keys.weights"): [entry(x) for x in (0, -1, 65, 1 / 65, np.nan, np.inf)],
    ("int4 kivi2", "energy"): [entry(x) for x in (-1, np.nan, np.inf)],
    ("int4 kivi2", "keys.center_levels"): [entry(-128), entry(-128, -1)],
    ("int4 kivi2", "keys.center_scale"): [*NO_SCALES, scale(-1.0), scale(2.0**106)],
    ("int4 odd", "keys.center_scale"): [*NO_SCALES, scale(-1.0)],
    # Centered codecs give a scale a sign; all others do not.
    ("int4 kivi2", "keys.scale"): [*NO_SCALES, scale(-(2.0**113))],
    ("int4 odd", "keys.scale"): [*NO_SCALES, scale(-(2.0**113))],
    ("int8 float32", "keys.scale"): [*NO_SCALES, scale(-1.0), scale(-0.0), scale(2.0**107)],
    ("int3 padded", "values.scale"): [*NO_SCALES, scale(-1.0)],
    ("lm4 lm2", "values.scale"): [*NO_SCALES, scale(-1.0), scale(2.0**107)],
    ("int4 kivi2", "values.scale"): [*NO_SCALES, scale(-1.0)],
    ("kivi2 lm3", "keys.scale"): [*NO_SCALES, scale(-1.0)],
    ("int4 kivi2", "values.zero_point"): [*NO_SCALES, scale(-(2.0**113))],
    ("kivi2 lm3", "keys.zero_point"): [*NO_SCALES, scale(-(2.0**113))],
    # Symmetric codes leave out code 0.
    ("int4 kivi2", "keys.packed"): [first_code(0, 4)],
    ("int2 int8", "keys.packed"): [first_code(0, 2), with_bit(2, -1), with_bit(7, -1)],
    ("int2 int8", "values.packed"): [first_code(0, 8), entry(0, -1)],
    ("int4 odd", "keys.packed"): [first_code(0, 4), with_bit(4, -1), with_bit(7, 8)],
    ("int4 odd", "values.packed"): [with_bit(4, -1), with_bit(7, 8)],
    ("int3 padded", "keys.packed"): [first_code(0, 3), with_bit(3), with_bit(7, -1)],
    ("int3 padded", "values.packed"): [first_code(0, 3), with_bit(4, -1), with_bit(7, 7)],
    ("kivi2 lm3", "values.packed"): [with_bit(4, -1), with_bit(7, 7)],
    ("float32 lm3", "values.packed"): [with_bit(3), with_bit(7, -1)],
}


@pytest.mark.parametrize(("where", "changes"), VALUES.items(), ids=map(" ".join, VALUES))
def test_values_that_no_encoder_makes_are_refused(where, changes, tmp_path, nothing_is_built):
    name, array = where
    path = written(name, tmp_path)
    whole = path.read_bytes()
    for change in changes:
        path.write_bytes(whole)
        edit(path, change_array(f"0.0.{array}", change))
        refused(path, f"the array 0.0.{array} has values that are not allowed")


def test_what_is_on_the_bounds_is_taken(tmp_path):
    changes = {
        "0.0.keys.packed": first_code(1, 4),
        "0.0.keys.scale": scale(-(2.0**109)),
        "0.0.keys.center_levels": entry(-127),
        "0.0.values.scale": scale(2.0**110),
        "0.0.values.packed": entry(0xFF),
        "0.0.keys.weights": entry(64),
        "0.0.tail.k": entry(np.nextafter(np.float32(2.0**100), np.float32(0))),
    }
    path = written("int4 kivi2", tmp_path)
    for array, change in changes.items():
        edit(path, change_array(array, change))
    loaded = kv.KVCache.load(path)
    assert np.isfinite(loaded.keys(0)).all()
    assert np.isfinite(loaded.values(0)).all()


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("size", ["zero", "tiny", "largest", "all of them"])
def test_what_the_encoder_makes_of_extremes_is_taken(name, size, backend, tmp_path):
    (key, key_options), (value, value_options), head_dim = CACHES[name]
    head_dim *= 1 if head_dim == 17 else 16
    sides = codec(key, "key", **key_options), codec(value, "value", **value_options)
    cache = kv.KVCache(1, 2, head_dim, *sides, recent=5, block=16)
    rng = np.random.default_rng(0)
    largest = np.nextafter(np.float32(2.0**100), np.float32(0))
    factor = {
        "zero": np.zeros(45),
        "tiny": np.full(45, 2.0**-240),
        "largest": np.ones(45),
        "all of them": 2.0 ** -rng.integers(0, 250, 45),
    }[size][:, None]
    k, v = (rng.choice([-1, 1, 0.3], (2, 1, 2, 45, head_dim)) * factor * largest).astype(np.float32)
    row = cache._sequences[0][0]
    q = rng.standard_normal(k.shape, dtype=np.float32)
    row.append(k, v, q, _backend.resolve())
    row.trim()
    cache.save(tmp_path / "a.safetensors")
    loaded = kv.KVCache.load(tmp_path / "a.safetensors")
    assert np.isfinite(loaded.keys(0)).all()
    assert np.isfinite(loaded.values(0)).all()
    loaded.save(tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
