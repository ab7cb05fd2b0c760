"""Caches, files and edits of files that the tests of saving and loading share.

``tests/data/cache-v1.safetensors`` was written by ``golden_cache().save(GOLDEN)`` from here.
"""

import json
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from cache_model import contents, read_file

import kvcodec as kv

GOLDEN = Path(__file__).parent / "data" / "cache-v1.safetensors"


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


def refused(path, match="path must be"):
    with pytest.raises(ValueError, match=match):
        kv.KVCache.load(path)


# Edits with checksums that fit


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


def header_of(path):
    """The JSON object of a file, without its checksums."""
    header = json.loads(read_file(path)[0]["kvcodec"].split(" ", 1)[1])
    del header["checksums"]
    return header


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


def refused_cheaply(path, match="path must be", limit=200_000):
    """The file is refused, and little memory beyond the size of the file was asked for."""
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=match):
            kv.KVCache.load(path)
        assert tracemalloc.get_traced_memory()[1] < path.stat().st_size + limit
    finally:
        tracemalloc.stop()
