"""A call that is interrupted leaves the cache as it was; copies of all kinds work."""

import copy
import itertools
import pickle
import weakref
from contextlib import suppress

import numpy as np
import pytest
from cache_model import contents as contents_of_row

import kvcodec as kv
from kvcodec import _backend
from kvcodec.blocks import Blocks
from kvcodec.sequence import Sequence, Tail
from kvcodec.testing import assert_same_bits

pytestmark = pytest.mark.usefixtures("backend")


def contents(cache):
    return [contents_of_row(row) for rows in cache._sequences for row in rows]


def tokens(count, batch=2, heads=2, head_dim=16):
    rng = np.random.default_rng(count)
    return rng.standard_normal((3, batch, heads, count, head_dim), dtype=np.float32)


def filled(count=150, **options):
    options = {"recent": 10, "batch": 2} | options
    cache = kv.KVCache(1, 2, 16, "int4", "int4", **options)
    cache.append_attend(0, *tokens(count))
    return cache


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Blocks, "append"),
        (Blocks, "_add_page"),
        (Blocks, "_write"),
        (Tail, "_move"),
        (Sequence, "_pack"),
        (Sequence, "trim"),
        (Tail, "append"),
    ],
)
@pytest.mark.parametrize("calls_before", [0, 1, 3])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("start", [0, 150])
def test_an_interrupted_append_is_done_whole_or_not_at_all(
    monkeypatch, owner, name, calls_before, error, start
):
    cache, twin = filled(start), filled(start)
    before = contents(cache)
    original, calls = getattr(owner, name), []

    def interrupted(self, *args, **kwargs):
        calls.append(name)
        if len(calls) > calls_before:
            raise error
        return original(self, *args, **kwargs)

    new = tokens(400)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with suppress(error):
            cache.append_attend(0, *new)
    if len(cache) == start:
        assert_same_bits(contents(cache), before)
    else:
        twin.append_attend(0, *new)
    assert_same_bits(cache.append_attend(0, *new), twin.append_attend(0, *new))
    assert_same_bits(contents(cache), contents(twin))


@pytest.mark.parametrize("options", [{}, {"rollback": 40}, {"window": 50}, {"batch": 1}])
@pytest.mark.parametrize("before", [0, 3, 4, 40, 77, 78, 150])
@pytest.mark.parametrize("count", [1, 2, 100])
def test_tokens_whose_attention_fails_are_taken_back(monkeypatch, options, before, count):
    def failing(*args):
        raise MemoryError

    batch = options.get("batch", 2)
    cache, twin = (kv.KVCache(1, 2, 16, recent=10, **{"batch": batch} | options) for _ in range(2))
    for each in (cache, twin):
        each.append_attend(0, *tokens(before, batch))
    for _ in range(3):
        new = tokens(count, batch)
        with monkeypatch.context() as patch:
            patch.setattr(_backend.resolve(), "attend_sequence", failing)
            with pytest.raises(MemoryError):
                cache.append_attend(0, *new)
        assert_same_bits(contents(cache), contents(twin))
        assert_same_bits(cache.append_attend(0, *new), twin.append_attend(0, *new))
    assert_same_bits(contents(cache), contents(twin))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_cache_that_was_attended_can_be_pickled_and_copied_deeply(duplicate):
    cache = filled()
    twin = duplicate(cache)
    new = tokens(100)
    assert_same_bits(twin.append_attend(0, *new), cache.append_attend(0, *new))
    assert_same_bits(contents(twin), contents(cache))


@pytest.mark.parametrize("queries", [2, 100, 2995, 2996, 3000])
def test_a_ring_refuses_queries_that_saw_what_is_gone(queries):
    cache = kv.KVCache(1, 2, 16, None, None, window=8, sinks=4, recent=0)
    q, k, v = tokens(3000, batch=1)
    cache.append(0, k, v)
    assert cache.attend(0, q[:, :, -1:]).shape == (1, 2, 1, 16)
    with pytest.raises(ValueError, match="q must be of tokens that saw only what is still there"):
        cache.attend(0, q[:, :, -queries:])


def test_integers_of_numpy_make_a_cache_that_can_be_saved(tmp_path):
    cache = kv.KVCache(
        np.int64(1),
        np.int32(2),
        np.int64(16),
        max_tokens=np.uint8(200),
        sinks=np.int64(4),
        probability_bits=np.int64(14),
    )
    cache.save(tmp_path / "cache")
    assert kv.KVCache.load(tmp_path / "cache").capacity == 200


def test_the_table_for_notebooks_shows_names_as_they_are():
    named = kv.Codec.from_config(kv.codec("int4").to_config() | {"name": "<b>int4</b>"})
    table = kv.KVCache(1, 2, 16, named, "int4")._repr_html_()
    assert "<b>" not in table
    assert "&lt;b&gt;int4" in table


@pytest.mark.parametrize("options", [{}, {"recent": 0}, {"rollback": 40}, {"window": 50}])
@pytest.mark.parametrize("attends", [False, True])
def test_a_prompt_is_neither_kept_nor_read_again(options, attends):
    cache, twin = (kv.KVCache(1, 2, 16, **options) for _ in range(2))
    q, k, v = (x.copy() for x in tokens(300, batch=1))
    given = (q, k, v) if attends else (k, v)
    for each in (cache, twin):
        (each.append_attend if attends else each.append)(0, *given)
    held = weakref.ref(k), weakref.ref(v)
    k[...], v[...] = 1, 1
    assert_same_bits(contents(cache), contents(twin))
    new = tokens(100, batch=1)
    assert_same_bits(cache.append_attend(0, *new), twin.append_attend(0, *new))
    del k, v, given
    assert [x() for x in held] == [None, None]


def test_tokens_of_one_channel_may_have_any_last_stride():
    x = np.random.default_rng(0).standard_normal((1, 2, 200, 1), dtype=np.float32)
    odd = np.lib.stride_tricks.as_strided(x, x.shape, (*x.strides[:3], 0))
    outputs = [kv.KVCache(1, 2, 1, "int8", "int8").append_attend(0, y, y, y) for y in (x, odd)]
    assert_same_bits(*outputs)


def test_a_prompt_may_follow_tokens_that_are_all_packed():
    caches = [kv.KVCache(1, 2, 16, recent=0, sinks=0) for _ in range(2)]
    q, k, v = tokens(64 * 4, batch=1)
    cuts = ([0, 128, 256], [0, 1, 64, 100, 256])
    outputs = []
    for cache, ends in zip(caches, cuts, strict=True):
        parts = [slice(a, b) for a, b in itertools.pairwise(ends)]
        outputs.append([cache.append_attend(0, *(x[:, :, p] for x in (q, k, v))) for p in parts])
    assert_same_bits(*(np.concatenate(part, axis=2)[:, :, 128:] for part in outputs))


@pytest.mark.parametrize("exact_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"recent": 0}, {"rollback": 40}, {"window": 50}])
@pytest.mark.parametrize("before", [0, 3, 4, 5])
def test_a_prompt_in_one_piece_leaves_what_token_by_token_does(exact_dtype, options, before):
    options = {"block": 32, "exact_dtype": exact_dtype} | options
    codecs = [kv.codec("int4", block=32, equalize=False, side=side) for side in ("key", "value")]
    caches = [kv.KVCache(1, 2, 16, *codecs, **options) for _ in range(2)]
    q, k, v = tokens(before + 200, batch=1)
    outputs = []
    for cache, step in zip(caches, (200, 1), strict=True):
        cuts = [0, *range(before, before + 201, step)]
        parts = [slice(a, b) for a, b in itertools.pairwise(cuts) if a < b]
        outputs.append([cache.append_attend(0, *(x[:, :, p] for x in (q, k, v))) for p in parts])
    whole, single = (np.concatenate(part, axis=2) for part in outputs)
    assert_same_bits(whole[:, :, before:], single[:, :, before:])
    assert_same_bits(contents(caches[0]), contents(caches[1]))


def test_room_for_a_prompt_is_given_back():
    cache = kv.KVCache(1, 2, 16, batch=1)
    cache.append(0, *tokens(5000, batch=1)[1:])
    tail = cache.memory()["layers"][0]["key"]["tail"]
    assert tail <= (127 + 32 + 128) * 2 * 2 * 16 * 4
    cache.crop(0)
    assert cache.memory()["layers"][0]["key"]["tail"] <= tail
