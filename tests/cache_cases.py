"""Caches, tokens and views of them that the tests of KVCache share."""

from itertools import pairwise

import numpy as np
import pytest
from cache_model import contents, read_file

import kvcodec as kv
from kvcodec.testing import backends

every_preset = pytest.mark.parametrize("name", kv.PRESETS)
EVERY = backends(threads=[1])
FLOATS = {"query_bits": None, "probability_bits": None}
KIVI = ("kivi4", "kivi2")


def sequence(tokens, kv_heads=2, head_dim=32, *, q_heads=4, value_dim=None, batch=1, seed=0):
    """Queries, keys and values of a whole sequence, with a large offset in one key channel."""
    rng = np.random.default_rng(seed)
    q, k, v = (
        rng.standard_normal((batch, heads, tokens, dim), dtype=np.float32)
        for heads, dim in (
            (q_heads, head_dim),
            (kv_heads, head_dim),
            (kv_heads, value_dim or head_dim),
        )
    )
    k[..., min(3, head_dim - 1)] += 5
    return q, k, v


def part(arrays, start, stop):
    return [x[:, :, start:stop] for x in arrays]


def feed(cache, arrays, cuts=(), **options):
    """Append and attend in chunks that end at these tokens and at the end; outputs and LSEs."""
    edges = [0, *cuts, arrays[0].shape[2]]
    results = [
        cache.append_attend(0, *part(arrays, start, stop), return_lse=True, **options)
        for start, stop in pairwise(edges)
    ]
    return [np.concatenate(parts, axis=2) for parts in zip(*results, strict=True)]


def state(cache):
    """Everything that is held, of every row."""
    return [[contents(row) for row in rows] for rows in cache._sequences]


def saved(cache, folder):
    cache.save(folder / "cache.safetensors")
    return read_file(folder / "cache.safetensors")


def small(name, side, block=16):
    """A preset for one side with small blocks."""
    if name is None:
        return None
    group = {"group_size": min(block, 16)} if name in KIVI else {}
    return kv.codec(name, block=block, **group).for_side(side)


def small_cache(name="int4", value=None, **options):
    """A cache of one layer with blocks of 16 tokens, unless told otherwise."""
    options = {"recent": 20, "block": 16} | options
    sides = [
        small(preset, side, options["block"])
        for preset, side in ((name, "key"), (value or name, "value"))
    ]
    heads, head_dim = options.pop("num_kv_heads", 2), options.pop("head_dim", 32)
    return kv.KVCache(1, heads, head_dim, *sides, **options)
