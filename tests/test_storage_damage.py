"""Files that were made to deceive: their checksums fit, and what they say does not."""

import json
import os
import re
import tracemalloc
import zlib

import numpy as np
import pytest
import safetensors.numpy
from cache_model import read_file
from test_storage import codec, drop, edit, put, tokens

import kvcodec as kv
from kvcodec import reference, storage
from kvcodec.encoded import Encoded
from kvcodec.testing import assert_same_bits

# Both sides, head_dim and options of the codecs: each kind of array and each width, with and
# without bits that belong to no code.
CACHES = {
    "int4 kivi2": (("int4", {}), ("kivi2", {}), 16),
    "int2 int8": (("int2", {"rotation": "none"}), ("int8", {}), 17),
    "int4 odd": (("int4", {"rotation": "none", "scale_dtype": "float32"}), ("kivi4", {}), 17),
    "int3 padded": (("int3", {"layout": "padded"}), ("int3", {}), 20),
    "kivi2 lm3": (("kivi2", {"scale_dtype": "float32"}), ("lm3", {"seed": 2**64 - 1}), 20),
    "lm4 lm2": (("lm4", {}), ("lm2", {"scale_dtype": "float32"}), 16),
    "float32 lm3": ((None, {}), ("lm3", {"layout": "padded"}), 20),
    "tcq3 tcq2": (("tcq3", {}), ("tcq2", {"scale_dtype": "float32"}), 20),
    "int8 float32": (("int8", {}), (None, {}), 16),
}


def cache_of(name, **options):
    """A cache that holds every array of its codecs, the energies of queries included."""
    (key, key_options), (value, value_options), head_dim = CACHES[name]
    sides = codec(key, "key", **key_options), codec(value, "value", **value_options)
    options = {"recent": 5, "block": 16, "rollback": 40} | options
    cache = kv.KVCache(1, 2, head_dim, *sides, **options)
    cache.append_attend(0, *tokens(45, heads=2, head_dim=head_dim))
    return cache


def written(name, folder, **options):
    """The file of such a cache."""
    path = folder / "cache.safetensors"
    cache_of(name, **options).save(path)
    return path


@pytest.fixture
def nothing_is_built(monkeypatch):
    """Loading fails where a cache is built."""

    def build(*args, **options):
        raise AssertionError("a cache was built")

    monkeypatch.setattr(storage, "KVCache", build)


def refused(path, match="path must be", limit=200_000):
    """The file is refused, and little memory beyond the size of the file was asked for."""
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=match):
            kv.KVCache.load(path)
        assert tracemalloc.get_traced_memory()[1] < path.stat().st_size + limit
    finally:
        tracemalloc.stop()


# Arrays


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
    row.append(k, v, q, cache._kernels())
    row.trim()
    cache.save(tmp_path / "a.safetensors")
    loaded = kv.KVCache.load(tmp_path / "a.safetensors")
    assert np.isfinite(loaded.keys(0)).all()
    assert np.isfinite(loaded.values(0)).all()
    loaded.save(tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


# Numbers of the header


def leaves(value, *path):
    """The place and the value of everything in a JSON object that is no object or list."""
    if isinstance(value, (dict, list)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(part, *path, key)
    else:
        yield path, value


def header_of(path):
    """The JSON object of a file, without its checksums."""
    header = json.loads(read_file(path)[0]["kvcodec"].split(" ", 1)[1])
    del header["checksums"]
    return header


NUMBERS = (2**70, -1, -(2**70), 0.5, 1e300, float("nan"), "7", True, [], [[]], {})


@pytest.mark.parametrize("name", CACHES)
def test_no_number_can_be_another_kind_of_thing(name, tmp_path, nothing_is_built):
    path = written(name, tmp_path, max_tokens=100)
    whole = path.read_bytes()
    for place, value in leaves(header_of(path)):
        if type(value) is not int:
            continue
        for other in NUMBERS:
            path.write_bytes(whole)
            edit(path, put(*place, other))
            refused(path)


def test_every_number_that_says_what_there_is_must_be_right(tmp_path, nothing_is_built):
    path = written("int4 kivi2", tmp_path)
    whole = path.read_bytes()
    # The first two say what will happen; a group may be longer than a vector.
    free = {"rollback", "recent", "group_size"}
    for place, value in leaves(header_of(path)):
        if type(value) is not int or place[-1] in free:
            continue
        for other in {value + 1, 2 * value + 1, value - 1, 2**20, 2**40} - {value}:
            path.write_bytes(whole)
            edit(path, put(*place, other))
            refused(path)


@pytest.mark.parametrize("name", CACHES)
def test_no_entry_of_the_header_can_be_left_out_or_added(name, tmp_path, nothing_is_built):
    path = written(name, tmp_path)
    whole = path.read_bytes()
    there = header_of(path)
    places = {place[:at] for place, _ in leaves(there) for at in range(1, len(place) + 1)}
    for place in sorted(places, key=str):
        changes = [drop(*place), put(*place, None), put(*place, "other"), put(*place, [place])]
        if isinstance(place[-1], str):
            changes.append(put(*place[:-1], "other", 3))
        for change in changes:
            path.write_bytes(whole)
            edit(path, change)
            if header_of(path) != there and not says_something_else(place, header_of(path)):
                refused(path)


def says_something_else(place, header):
    """Whether an entry was changed to something that is right, too."""
    for key in place:
        if key not in header if isinstance(header, dict) else key >= len(header):
            return False
        header = header[key]
    if place[-1] in ("query_bits", "probability_bits", "window"):
        return header is None
    return place[-1] in ("name", "written_by") and header == "other"


def empty(folder, **options):
    """The file of a cache without tokens."""
    path = folder / "empty.safetensors"
    kv.KVCache(2, 1, 16, batch=3, **options).save(path)
    return path


def all_layers(name, value):
    """A change of one number of all layers."""

    def change(header, arrays):
        for layer in header["layers"]:
            layer[name] = value

    return change


def many_heads(heads):
    """A change to so many heads, of arrays without tokens."""

    def change(header, arrays):
        all_layers("kv_heads", heads)(header, arrays)
        for array in arrays:
            arrays[array] = np.zeros((1, heads, 0, 16), np.float32)

    return change


def many_sinks(sinks):
    """A change to so many sinks, of sequences without tokens."""

    def change(header, arrays):
        all_layers("sinks", sinks)(header, arrays)
        for rows in header["sequences"]:
            for row in rows:
                row.update(packed_end=sinks, released=sinks, tail_first=sinks)

    return change


@pytest.mark.parametrize("change", [many_heads(2**40), many_sinks(2**40)], ids=["heads", "sinks"])
def test_an_empty_cache_cannot_ask_for_all_memory(change, tmp_path, nothing_is_built):
    path = empty(tmp_path)
    edit(path, change)
    refused(path, "ask for more memory than there can be")


@pytest.mark.parametrize("change", [many_heads(2), many_sinks(9)], ids=["heads", "sinks"])
def test_an_empty_cache_can_say_what_it_is(change, tmp_path):
    path = empty(tmp_path)
    edit(path, change)
    assert kv.KVCache.load(path).seq_length == 0


def test_max_tokens_is_refused_beyond_its_limit(tmp_path, nothing_is_built):
    path = empty(tmp_path, max_tokens=100)
    for most in (0, 2**24 + 1, 2**60):

        def change(header, arrays, most=most):
            header["options"]["max_tokens"] = most

        edit(path, change)
        refused(path, "max_tokens must be a whole number from 1 to 16777216")


CONTRADICTIONS = {
    "equalized before anything is packed": ("int4 kivi2", {"equalized": True}, 4),
    "released before the evicted": ("int4 kivi2", {"evicted": 3}, 45),
    "released without a window": ("int4 kivi2", {"released": 9}, 45),
    "a tail that should be packed": ("int4 kivi2", {"end": 2**30}, 45),
    "equalized keys of a codec that does not": ("int8 float32", {"equalized": True}, 45),
    "equalized float32": ("float32 lm3", {"equalized": True}, 45),
}


@pytest.mark.parametrize(("name", "numbers", "end"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_numbers_that_contradict_each_other_are_refused(
    name, numbers, end, tmp_path, nothing_is_built
):
    path = tmp_path / "cache.safetensors"
    cache = cache_of(name)
    cache.crop(end)
    cache.save(path)

    def change(header, arrays):
        header["sequences"][0][0].update(numbers)

    edit(path, change)
    refused(path, "the numbers of sequence 0.0 contradict each other")


def test_a_header_that_is_deeply_nested_is_refused(tmp_path):
    for depth in (500, 100_000):
        for opened, closed in (("[", "]"), ('{"a":', "}")):
            nested = opened * depth + "1" + closed * depth
            for text in (nested, f'{{"format": {nested}}}'):
                metadata = {"kvcodec": f"{zlib.crc32(text.encode()):08x} {text}"}
                path = tmp_path / "foreign"
                path.write_bytes(safetensors.numpy.save({}, metadata=metadata))
                refused(path, limit=50_000_000)


# Whatever is taken can be used


def usable(path):
    """Load a file and use the cache; whether it was taken."""
    try:
        loaded = kv.KVCache.load(path)
    except ValueError:
        refused(path)
        return False
    assert np.isfinite(loaded.keys(0)).all()
    assert np.isfinite(loaded.values(0)).all()
    again = path.with_name("again.safetensors")
    loaded.save(again)
    np.testing.assert_equal(read_file(again)[1], read_file(path)[1])
    return True


@pytest.mark.parametrize("name", CACHES)
def test_flipped_bits_with_checksums_that_fit_are_refused_or_harmless(name, tmp_path):
    path = written(name, tmp_path)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)

    def change(header, arrays):
        flipped = rng.choice(sorted(arrays))
        x = arrays[flipped].copy()
        x.reshape(-1).view(np.uint8)[rng.integers(x.nbytes)] ^= np.uint8(1 << rng.integers(8))
        arrays[flipped] = x

    taken = []
    for _ in range(150):
        path.write_bytes(whole)
        edit(path, change)
        taken.append(usable(path))
    assert {True, False} == set(taken)


def test_headers_of_nonsense_are_refused_or_harmless(tmp_path):
    path = written("int4 kivi2", tmp_path)
    whole = path.read_bytes()
    places = [place for place, _ in leaves(header_of(path))]
    values = [0, 1, 2, 16, 45, 2**31, 2**63, None, True, "", "key", "int8", [], {}, [1], 1.5]
    rng = np.random.default_rng(0)
    for _ in range(400):
        path.write_bytes(whole)
        place, value = places[rng.integers(len(places))], values[rng.integers(len(values))]
        edit(path, put(*place, value))
        usable(path)


def test_flipped_bits_anywhere_are_found(tmp_path, nothing_is_built):
    path = written("int4 kivi2", tmp_path)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for flips in rng.integers(1, 9, 300):
        data = np.frombuffer(whole, np.uint8).copy()
        at = rng.choice(len(data), flips, replace=False)
        data[at] ^= (1 << rng.integers(0, 8, flips)).astype(np.uint8)
        path.write_bytes(data.tobytes())
        refused(path)


def test_truncation_anywhere_is_found(tmp_path, nothing_is_built):
    path = written("kivi2 lm3", tmp_path)
    whole = path.read_bytes()
    for size in {*range(16), *range(0, len(whole), 97), *range(len(whole) - 9, len(whole))}:
        path.write_bytes(whole[:size])
        refused(path, "a complete safetensors file")


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F4", "NONE"])
def test_types_that_numpy_does_not_have_are_refused(dtype, tmp_path, nothing_is_built):
    metadata, _ = read_file(written("int4 kivi2", tmp_path))
    header = json.loads(metadata["kvcodec"].split(" ", 1)[1])
    header["checksums"] = {"x": 0}
    text = json.dumps(header)
    table = {
        "__metadata__": {"kvcodec": f"{zlib.crc32(text.encode()):08x} {text}"},
        "x": {
            "dtype": dtype,
            "shape": [8],
            "data_offsets": [0, {"BF16": 16, "F4": 4}.get(dtype, 8)],
        },
    }
    data = json.dumps(table).encode()
    size = table["x"]["data_offsets"][1]
    path = tmp_path / "foreign"
    path.write_bytes(len(data).to_bytes(8, "little") + data + bytes(size))
    refused(path, "a complete safetensors file|the array x is")


# What is no file


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_or_a_directory_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        name = re.escape(repr(str(path)))
        with pytest.raises(OSError, match=f"path must be a file, but {name} is none"):
            kv.KVCache.load(path)
        with pytest.raises(OSError, match=f"path must be a file that .*, but {name} is none"):
            cache_of("int4 kivi2").save(path)
    assert os.listdir(tmp_path) == ["pipe"]


def test_exact_tokens_that_round_to_the_bound_come_back(tmp_path):
    largest = np.nextafter(np.float32(2.0**100), np.float32(0))
    x = np.full((1, 1, 200, 16), largest)
    cache = kv.KVCache(1, 1, 16, exact_dtype="bfloat16")
    cache.append_attend(0, x, x, -x)
    cache.save(tmp_path / "cache.safetensors")
    loaded = kv.KVCache.load(tmp_path / "cache.safetensors")
    assert_same_bits(loaded.keys(0), cache.keys(0))
    assert np.isfinite(loaded.attend(0, x[:, :, :1])).all()


def test_many_short_units_count_as_the_memory_that_they_take(tmp_path, nothing_is_built):
    path = empty(tmp_path, block=4096)

    def change(header, arrays):
        for layer in header["layers"]:
            layer["kv_heads"] = 2**30
        for rows in header["sequences"]:
            for row in rows:
                units = 2**10
                row |= {"end": 4 + units, "packed_end": 4 + units, "tail_first": 4 + units}
                row |= {"unit_first": list(range(4, 4 + units)), "unit_count": [1] * units}

    edit(path, change)
    refused(path, "more memory than there can be", limit=2_000_000)
