"""Memory of KVCache and what it says about itself."""

import pickle

import ml_dtypes
import numpy as np
import pytest
from cache_cases import every_preset, feed, part, sequence, small_cache, state
from cache_model import buffers

import kvcodec as kv
from kvcodec import _backend
from kvcodec.blocks import PAGE_UNITS, TILE, units_of
from kvcodec.testing import assert_same_bits

pytestmark = pytest.mark.usefixtures("twin")

# Growth


@every_preset
def test_pages_never_move_and_are_allocated_as_they_fill(name):
    total = 3 * PAGE_UNITS * 64
    arrays = sequence(total, 1, q_heads=1)
    cache = small_cache(name, num_kv_heads=1)
    row = cache._sequences[0][0]
    addresses = []
    for start in range(0, total, 50):
        cache.append(0, *part(arrays[1:], start, start + 50))
        now = [page["packed"].ctypes.data for page in row.keys.pages]
        assert now[: len(addresses)] == addresses
        assert len(now) == -(-(row.packed_end - 4) // (PAGE_UNITS * 64))
        addresses = now
    assert len(addresses) == 3


@pytest.mark.parametrize(("block", "largest"), [(16, 64), (64, 64), (512, 8), (128, 32)])
def test_pages_grow_with_what_they_hold(block, largest):
    cache = small_cache(num_kv_heads=1, block=block, recent=0)
    unit = max(TILE, block)
    _, k, v = sequence(4 + 160 * unit, 1)
    for first in range(0, k.shape[2], 5 * unit):
        cache.append(0, *part((k, v), first, first + 5 * unit))
    row = cache._sequences[0][0]
    for blocks in (row.keys, row.values):
        room = 0
        for units in map(units_of, blocks.pages):
            assert units == min(max(8, 2 ** ((room // 2).bit_length() - 1)), largest)
            room += units
        assert room == blocks.room >= blocks.units == 160


def test_pages_are_as_large_as_what_is_added_or_reserved_at_once():
    arrays = sequence(4 + 110 * 64, 1)[1:]
    added, reserved = (
        small_cache(num_kv_heads=1, recent=0, **options)
        for options in ({}, {"max_tokens": 4 + 110 * 64})
    )
    added.append(0, *arrays)
    for cache in (added, reserved):
        blocks = cache._sequences[0][0].values
        assert [*map(units_of, blocks.pages)] == [64, 32, 32]


@pytest.mark.parametrize("name", ["int4", "kivi2", "tcq2"])
def test_pages_of_many_sizes_are_read_crossed_cropped_and_given_back(name):
    """Beside a ring, whose pages all have one size."""
    total = 5500
    arrays = sequence(total, 1, q_heads=1)
    whole = small_cache(name, num_kv_heads=1, rollback=700)
    small = small_cache(name, num_kv_heads=1, rollback=700, window=total)
    for cache in (whole, small):
        feed(cache, part(arrays, 0, 4500), range(500, 4500, 500))
    sizes = [len(set(map(units_of, row._sequences[0][0].keys.pages))) for row in (whole, small)]
    assert sizes == [3, 1]
    branch = whole.copy()
    for first in (4500, 5000):
        for cache in (whole, small):
            cache.append(0, *part(arrays[1:], first, first + 500))
        q = arrays[0][:, :, first + 499 : first + 500]
        assert_same_bits(whole.attend(0, q), small.attend(0, q))
        for cache in (whole, small):
            cache.crop(4600)
    branch.append(0, *part(arrays[1:], 4500, 4600))
    q = arrays[0][:, :, :1]
    for tokens in (500, 600, 3000):
        for cache in (whole, branch):
            cache.evict(tokens)
        assert_same_bits(whole.attend(0, q), branch.attend(0, q))


def test_the_exact_tail_stays_small():
    arrays = sequence(2500, 1, q_heads=1)
    cache = small_cache(num_kv_heads=1, rollback=10)
    cache.append(0, *arrays[1:])
    layer = cache.memory()["layers"][0]
    for side in ("key", "value"):
        assert layer[side]["tail"] <= 32 * 4 * 2 * (20 + 10 + 2 * 16 + 64)


def test_max_tokens_reserves_and_is_kept():
    q, k, v = sequence(1100)
    cache = small_cache(max_tokens=1100)
    reserved = cache.nbytes
    assert cache.capacity == 1100
    cache.append(0, *part((k, v), 0, 1000))
    assert cache.memory()["layers"][0]["key"]["body"] <= reserved
    before = state(cache)
    with pytest.raises(ValueError, match="max_tokens, 1100, but 101 tokens were given to one of 1"):
        cache.append(0, *part((k, v), 0, 101))
    with pytest.raises(ValueError, match="max_tokens"):
        cache.append_attend(0, *part((q, k, v), 0, 101))
    assert_same_bits(state(cache), before)
    cache.append(0, *part((k, v), 0, 100))
    assert len(cache) == 1100
    assert small_cache().capacity is None


@pytest.mark.parametrize("max_tokens", [None, 4000])
def test_bytes_are_the_sum_of_the_buffers(max_tokens):
    cache = small_cache("int4", "lm2", batch=2, max_tokens=max_tokens)
    arrays = sequence(100, batch=2)
    for step in range(3):
        feed(cache, arrays)
        memory = cache.memory()
        total = sum(array.nbytes for array in buffers(cache._sequences))
        assert cache.nbytes == memory["total"] == total
        for layer in memory["layers"]:
            parts = sum(sum(layer[side].values()) for side in ("key", "value"))
            assert layer["total"] == parts
            assert layer["ratio"] == layer["fp16"] / parts
        assert sum(layer["total"] for layer in memory["layers"]) == total
        assert memory["fp16"] == 2 * 2 * (step + 1) * 100 * 2 * 64
        assert memory["ratio"] == memory["fp16"] / total
        assert f"{total:,} bytes" in repr(cache)


def test_a_long_cache_is_as_small_as_its_codecs_say():
    cache = kv.KVCache(1, 1, 64, "int4", "int4", max_tokens=1024 * 8 + 4)
    cache.append(0, *sequence(1024 * 8 + 4, 1, 64)[1:])
    memory = cache.memory()["layers"][0]
    layer = cache._layers[0]
    for side in ("key", "value"):
        bits = getattr(layer, side).bits_per_value(64)
        tables = 2 * 8 * (8 * 16)
        assert memory[side]["body"] == bits * 64 * 1024 * 8 / 8 + tables


# What it says about itself


def test_the_repr_tells_whether_keys_are_equalized():
    q, k, v = sequence(150)
    seen, unseen, young = (small_cache() for _ in range(3))
    seen.append_attend(0, q, k, v)
    unseen.append(0, k, v)
    young.append(0, k[:, :, :9], v[:, :, :9])
    assert "int4 keys (equalized)" in repr(seen)
    assert "int4 keys (not equalized" in repr(unseen)
    assert "equalized" not in repr(young)
    assert "equalized" not in repr(small_cache("int8"))


def test_the_repr_names_what_it_holds():
    cache = kv.KVCache(3, 2, 32, "lm4", "kivi2", batch=2)
    assert repr(cache).startswith("<KVCache of 0 tokens: 3 layers, batch 2, lm4 keys, kivi2 values")
    page = cache._repr_html_()
    assert page.count("<tr>") == page.count("</tr>") == 4
    for name in ("layer", "key sinks", "key body", "value body", "value tail", "key statistics"):
        assert f"<th>{name}</th>" in page


def test_sizes_are_told():
    cache = kv.KVCache(3, 2, 32, batch=2)
    cache.append(1, *sequence(10, batch=2)[1:], lengths=[3, 10])
    assert (cache.num_layers, cache.batch, len(cache), cache.seq_length) == (3, 2, 10, 10)
    assert cache.seq_lengths.tolist() == [[0, 0], [3, 10], [0, 0]]
    assert cache.keys(1).shape == (2, 2, 10, 32)
    assert not cache.keys(1)[0, :, :7].any()
    assert cache.keys(0).shape == cache.values(0).shape == (2, 2, 0, 32)


# Reserved room


@pytest.mark.parametrize("name", ["int4", "kivi2", None])
def test_a_ring_uses_the_pages_that_it_reserved_again(name):
    cache = small_cache(name, window=150, max_tokens=10_000, rollback=10)
    blocks = cache._sequences[0][0].keys
    reserved = {id(page) for page in blocks.pages}
    assert 0 < len(reserved) * PAGE_UNITS * 64 < 150 + 10 + 16 + 2 * PAGE_UNITS * 64
    before = cache.nbytes
    for _ in range(40):
        cache.append(0, *sequence(50)[1:])
        assert {id(page) for page in blocks.pages} == reserved
    assert cache.nbytes <= before + 2 * 2 * 32 * 4 * 200
    memory = cache.memory()
    assert memory["fp16"] == 2 * 2 * 2 * 32 * (4 + 149)


@pytest.mark.parametrize("tokens", [500, 5000])
def test_a_copy_has_reserved_pages_of_its_own(tokens):
    cache = small_cache(max_tokens=9000)
    cache.append(0, *sequence(tokens)[1:])
    branch = cache.copy()
    ours, theirs = (one._sequences[0][0].keys for one in (cache, branch))
    used = int(np.searchsorted(np.cumsum([*map(units_of, ours.pages)]), ours.units)) + 1
    assert len(theirs.pages) == len(ours.pages)
    assert theirs.reserved == ours.reserved <= ours.room
    for index, (page, other) in enumerate(zip(ours.pages, theirs.pages, strict=True)):
        assert (page is other) == (index < used)


def test_reordering_copies_only_rows_that_are_named_twice():
    cache = small_cache(batch=3)
    cache.append(0, *sequence(200, batch=3)[1:])
    rows = list(cache._sequences[0])
    cache.reorder([2, 0, 1])
    assert cache._sequences[0] == [rows[2], rows[0], rows[1]]
    assert not any(any(row.keys.shared) for row in rows)
    cache.select([1, 2, 2])
    assert cache._sequences[0][0] is rows[0]
    assert any(rows[1].keys.shared)


# Exact tokens in 16 bits


@pytest.mark.parametrize("name", ["int4", "kivi2", None])
def test_exact_tokens_in_bfloat16_take_half_the_room_and_are_those_of_rounded_input(name):
    arrays = sequence(150)
    rounded = [x.astype(ml_dtypes.bfloat16).astype(np.float32) for x in arrays[1:]]
    half = small_cache(name, exact_dtype="bfloat16")
    whole = small_cache(name)
    outputs = feed(half, arrays, (1, 20, 90))
    assert_same_bits(outputs, feed(whole, [arrays[0], *rounded], (1, 20, 90)))
    assert_same_bits(state(half), state(whole))
    assert_same_bits([half.keys(0), half.values(0)], [whole.keys(0), whole.values(0)])
    for side in ("key", "value"):
        ours, theirs = (cache.memory()["layers"][0][side] for cache in (half, whole))
        assert ours["sinks"] * 2 == theirs["sinks"]
        assert ours["tail"] * 2 == theirs["tail"]
    assert ("bfloat16 keys" in repr(half)) == (name is None)


@pytest.mark.parametrize("name", ["int4", "kivi2", "lm4", "tcq2"])
def test_exact_tokens_that_round_to_the_bound_are_packed(name):
    x = np.full((1, 1, 200, 16), np.nextafter(np.float32(2.0**100), np.float32(0)))
    cache = kv.KVCache(1, 1, 16, name, name, exact_dtype="bfloat16")
    cache.append(0, x, x)
    assert len(cache) == 200
    assert np.isfinite(cache.values(0)).all()


def test_the_config_makes_a_cache_like_it():
    cache = kv.KVCache(
        2, [1, 2], [32, 64], {0: "int4", 1: None}, "lm3", recent=20, window=50, rollback=3
    )
    like = kv.KVCache(**cache.config)
    assert like._layers == cache._layers
    assert like.config == cache.config
    assert like.config["window"] == [50, 50]


def test_an_empty_cache_is_true_and_rows_of_different_length_show():
    cache = small_cache(batch=2)
    assert cache
    cache.append(0, *sequence(9, batch=2)[1:], lengths=[9, 3])
    assert "of 3 to 9 tokens" in repr(cache)


def test_a_cache_comes_back_from_a_pickle_even_in_buffers_that_cannot_be_written():
    cache = small_cache()
    arrays = sequence(100)
    feed(cache, arrays)
    buffers_of_pickle = []
    text = pickle.dumps(cache, protocol=5, buffer_callback=buffers_of_pickle.append)
    readonly = [bytes(buffer.raw()) for buffer in buffers_of_pickle]
    back = pickle.loads(text, buffers=readonly)
    assert_same_bits(state(back), state(cache))
    assert_same_bits(feed(back, arrays), feed(cache, arrays))
    assert_same_bits(state(back), state(cache))


def test_kept_tokens_do_not_go_beyond_their_buffer():
    kept, x = np.zeros((1, 2, 5, 8), dtype=np.float32), np.ones((1, 2, 6, 8), dtype=np.float32)
    keep_tokens = _backend.resolve().keep_tokens
    keep_tokens(kept, 3, x, 1, 3)
    assert (kept != 0).any(axis=(0, 1, 3)).tolist() == [False] * 3 + [True] * 2
    with pytest.raises(ValueError, match=r"room|broadcast"):
        keep_tokens(kept, 3, x, 1, 4)
    kept.flags.writeable = False
    with pytest.raises(ValueError, match=r"writable|read-only"):
        keep_tokens(kept, 0, x, 0, 1)
