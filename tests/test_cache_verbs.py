"""Verbs of KVCache: rows, rings, crop, evict and copies."""

import numpy as np
import pytest
from cache_cases import FLOATS, every_preset, feed, part, saved, sequence, small, small_cache, state
from cache_model import Row, Rules, contents

from kvcodec import _backend
from kvcodec.blocks import PAGE_UNITS
from kvcodec.testing import assert_same_bits, exact_attention

pytestmark = pytest.mark.usefixtures("twin")

# Rows of a batch


@every_preset
def test_a_row_of_a_left_padded_batch_equals_it_alone(name):
    lengths = [90, 37, 0, 64]
    q, k, v = sequence(90, batch=4)
    later = sequence(40, batch=4, seed=1)
    together = small_cache(name, batch=4)
    first = together.append_attend(0, q, k, v, lengths=lengths, return_lse=True)
    second = feed(together, later)
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        alone = small_cache(name)
        expected = feed(alone, [x[one, :, 90 - length :] for x in (q, k, v)])
        assert_same_bits([x[one, :, 90 - length :] for x in first], expected)
        assert not first.output[one, :, : 90 - length].any()
        assert np.isneginf(first.log_sum_exp[one, :, : 90 - length]).all()
        assert_same_bits([x[one] for x in second], feed(alone, [x[one] for x in later]))
        assert_same_bits(state(together)[0][row], state(alone)[0][0])


def test_lengths_of_queries_leave_the_padding_zero():
    q, k, v = sequence(30, batch=2)
    cache = small_cache(batch=2)
    cache.append(0, k, v, lengths=[30, 12])
    result = cache.attend(0, q[:, :, -3:], lengths=[1, 3], return_lse=True)
    assert not result.output[0, :, :2].any()
    assert np.isneginf(result.log_sum_exp[0, :, :2]).all()
    alone = cache.copy()
    alone.select([0])
    assert_same_bits(
        alone.attend(0, q[:1, :, -1:], return_lse=True).output, result.output[:1, :, -1:]
    )


def test_rows_are_reordered_selected_and_repeated():
    arrays = sequence(60, batch=3)
    cache = small_cache(batch=3)
    cache.append_attend(0, *arrays, lengths=[60, 50, 20])
    rows = state(cache)[0]
    cache.reorder([2, 0, 0])
    assert_same_bits(state(cache)[0], [rows[2], rows[0], rows[0]])
    cache.select([1, 0])
    assert_same_bits(state(cache)[0], [rows[0], rows[2]])
    cache.repeat(2)
    assert_same_bits(state(cache)[0], [rows[0], rows[0], rows[2], rows[2]])
    cache.append(0, *part(sequence(40, batch=4)[1:], 0, 40))
    assert cache.seq_lengths.tolist() == [[100, 100, 60, 60]]


# Ring


def ring_model(name, arrays, window):
    """Outputs of the model, decoding with a ring."""
    row = Row(Rules(1, 32, 32, small(name, "key"), small(name, "value"), 4, 20, 16, 0, window))
    q, k, v = arrays
    row.append(k, v, q)
    return row.attend(q, lambda block, own: block.end + 20 <= own + 1)


@every_preset
def test_a_ring_with_sinks_over_many_wraps_equals_the_windowed_model(name):
    arrays = sequence(300, 1, q_heads=2)
    cache = small_cache(name, num_kv_heads=1, window=50, **FLOATS)
    result = feed(cache, arrays, (1, 2, 120))
    for actual, exact in zip(result, ring_model(name, arrays, 50), strict=True):
        np.testing.assert_allclose(actual, exact, atol=1e-5, rtol=1e-6)
    single = small_cache(name, num_kv_heads=1, window=50, **FLOATS)
    assert_same_bits(feed(single, arrays, range(1, 300)), result)


@pytest.mark.parametrize("name", ["int4", "kivi2"])
def test_a_ring_gives_pages_back_and_moves_none(name):
    arrays = sequence(5000, 1, q_heads=1)
    cache = small_cache(name, num_kv_heads=1, window=100, **FLOATS)
    results, pages = [], {}
    for start in range(0, 5000, 250):
        results.append(feed(cache, part(arrays, start, start + 250)))
        row = cache._sequences[0][0]
        assert len(row.keys.pages) == len(row.values.pages) <= 2
        for number, page in zip(row.keys.first[::PAGE_UNITS], row.keys.pages, strict=False):
            address = page["packed"].ctypes.data
            assert pages.setdefault(int(number), address) == address
    output = np.concatenate([result[0] for result in results], axis=2)
    expected, _ = ring_model(name, arrays, 100)
    np.testing.assert_allclose(output, expected, atol=1e-5)
    assert cache.nbytes < 0.5 * small_size(name, arrays)


def small_size(name, arrays):
    """Bytes of a cache that keeps all tokens."""
    cache = small_cache(name, num_kv_heads=1)
    cache.append(0, *arrays[1:])
    return cache.nbytes


@every_preset
def test_a_ring_that_gave_all_pages_back_keeps_its_codec(name):
    arrays = sequence(4 + 1024 + 20 + 200, 1, q_heads=1)
    cache = small_cache(name, num_kv_heads=1, window=10)
    feed(cache, part(arrays, 0, 400))
    row = cache._sequences[0][0]
    before = row.keys.codec, row.keys.weights
    feed(cache, part(arrays, 400, 1048))
    assert row.packed_end == 1028
    assert not row.keys.pages
    feed(cache, part(arrays, 1048, 1248))
    assert_same_bits((row.keys.codec, row.keys.weights), before)


def test_a_ring_refuses_a_crop_to_where_tokens_are_gone():
    arrays = sequence(300)
    cache = small_cache(window=50, rollback=10)
    feed(cache, arrays)
    before = state(cache)
    with pytest.raises(ValueError, match="length must keep the tokens that the window"):
        cache.crop(200)
    assert_same_bits(state(cache), before)
    cache.crop(290)
    fresh = small_cache(window=50, rollback=10)
    feed(fresh, part(arrays, 0, 290))
    later = sequence(70, seed=1)
    assert_same_bits(feed(cache, later), feed(fresh, later))


# Crop and evict


@every_preset
@pytest.mark.parametrize("rollback", [1, 17, 64])
def test_a_crop_within_the_rollback_leaves_a_fresh_cache(name, rollback, tmp_path):
    arrays, later = sequence(100), sequence(40, seed=1)
    for kept in {100 - rollback, 100 - rollback // 2, 99, 100}:
        cache, fresh = (small_cache(name, rollback=rollback) for _ in range(2))
        feed(cache, arrays)
        cache.crop(kept)
        feed(fresh, part(arrays, 0, kept), range(1, kept))
        compare = state(cache), state(fresh)
        for held in compare:
            del held[0][0]["tail"]
            held[0][0]["numbers"] = held[0][0]["numbers"][:3]
        assert_same_bits(*compare)
        assert_same_bits(cache.keys(0), fresh.keys(0))
        assert_same_bits(cache.values(0), fresh.values(0))
        assert_same_bits(feed(cache, later), feed(fresh, later))
        assert_same_bits(state(cache), state(fresh))
        assert_same_bits(saved(cache, tmp_path), saved(fresh, tmp_path))


def test_crops_by_parts_of_the_rollback_equal_one_crop():
    arrays = sequence(100)
    once, twice = (small_cache(rollback=40) for _ in range(2))
    for cache, cuts in ((once, (60,)), (twice, (90, 75, 60))):
        feed(cache, arrays)
        for kept in cuts:
            cache.crop(kept)
    assert_same_bits(state(twice), state(once))


@every_preset
def test_a_crop_beyond_the_rollback_keeps_the_codes_and_closes_the_last_block(name):
    arrays, later = sequence(150), sequence(80, seed=1)
    cache = small_cache(name)
    feed(cache, arrays)
    before = contents(cache._sequences[0][0])
    cache.crop(61)
    row = cache._sequences[0][0]
    after = contents(row)
    assert after["numbers"] == (61, 61, 61, 61)
    for side in ("keys", "values"):
        for stored, array in before[side].items():
            kept = -(-57 * array.shape[2] // 112)
            assert_same_bits(after[side][stored], array[:, :, :kept])
    feed(cache, later)
    assert row.packed_end == 61 + 48
    settled = row.keys.codec
    options = {"weights": row.keys.weights} if settled.equalize else {}
    first = settled.encode(later[1][:, :, :16], **options)
    packed = contents(row)["keys"]["packed"]
    assert_same_bits(packed[:, :, 57:73], first.packed)


@every_preset
@pytest.mark.parametrize("kept", [0, 3, 4])
def test_a_crop_to_the_sinks_or_less_starts_the_body_again(name, kept):
    arrays = sequence(150)
    cache, fresh = (small_cache(name, "int8") for _ in range(2))
    feed(cache, arrays)
    cache.crop(kept)
    _, k, v = sequence(100, seed=1)
    fresh.append(0, *part(arrays[1:], 0, kept))
    for one in (cache, fresh):
        one.append(0, k, v)
    assert_same_bits(state(cache), state(fresh))


def test_a_crop_takes_back_that_a_query_was_seen():
    q, k, v = sequence(150)
    cache, fresh = (small_cache() for _ in range(2))
    cache.append(0, *part((k, v), 0, 9))
    cache.append_attend(0, *part((q, k, v), 9, 10))
    cache.crop(9)
    fresh.append(0, *part((k, v), 0, 9))
    for one in (cache, fresh):
        one.append(0, *part((k, v), 9, 150))
    assert_same_bits(state(cache), state(fresh))
    assert repr(cache) == repr(fresh)


def test_negative_lengths_count_from_the_end():
    arrays = sequence(100)
    cache = small_cache(rollback=10)
    feed(cache, arrays)
    cache.crop(-7)
    assert len(cache) == 93
    cache.crop(93)
    assert len(cache) == 93


def test_shorter_rows_stay_as_they_are():
    cache = small_cache(batch=2)
    cache.append(0, *sequence(60, batch=2)[1:], lengths=[60, 25])
    short = state(cache)[0][1]
    cache.crop(30)
    assert cache.seq_lengths.tolist() == [[30, 25]]
    assert_same_bits(state(cache)[0][1], short)


@pytest.mark.parametrize("name", ["int4", "kivi2", "int8"])
@pytest.mark.parametrize("evicted", [0, 1, 30, 100, 146])
def test_evicted_tokens_are_not_seen(name, evicted):
    q, k, v = sequence(150)
    cache = small_cache(name, **FLOATS)
    cache.append_attend(0, q, k, v)
    seen_k, seen_v = cache.keys(0), cache.values(0)
    cache.evict(evicted)
    kept = np.r_[0:4, 4 + evicted : 150]
    assert len(cache) == len(kept)
    assert_same_bits(cache.keys(0), seen_k[:, :, kept])
    assert_same_bits(cache.values(0), seen_v[:, :, kept])
    output = cache.attend(0, q[:, :, -1:])
    expected, _ = exact_attention(q[:, :, -1:], seen_k[:, :, kept], seen_v[:, :, kept])
    np.testing.assert_allclose(output, expected, atol=5e-6)


def test_eviction_gives_pages_back():
    cache = small_cache()
    cache.append(0, *sequence(3000)[1:])
    before = cache.nbytes
    cache.evict(2500)
    assert cache.nbytes < 0.5 * before


def test_reset_forgets_everything(tmp_path):
    arrays = sequence(150)
    cache = small_cache()
    fresh = saved(cache, tmp_path)
    feed(cache, arrays)
    cache.reset()
    assert len(cache) == 0
    assert_same_bits(saved(cache, tmp_path), fresh)


# Copies


@every_preset
def test_branches_do_not_disturb_each_other(name, tmp_path):
    prompt, one, two = sequence(150), sequence(60, seed=1), sequence(60, seed=2)
    cache = small_cache(name, rollback=10)
    feed(cache, prompt)
    branch = cache.copy()
    before = saved(cache, tmp_path)
    second = feed(branch, two, range(1, 60))
    assert_same_bits(saved(cache, tmp_path), before)
    first = feed(cache, one, range(1, 60))
    for continuation, expected in ((one, first), (two, second)):
        alone = small_cache(name, rollback=10)
        feed(alone, prompt)
        assert_same_bits(feed(alone, continuation), expected)


@pytest.mark.parametrize("verb", ["copy", "repeat", "reorder"])
def test_copies_share_full_pages_and_copy_the_one_they_write_to(verb):
    cache = small_cache(block=64, recent=0)
    page, arrays = PAGE_UNITS * 64, sequence(2 * PAGE_UNITS * 64 + 100)
    for first in range(0, 3 * page, page):
        cache.append(0, *part(arrays[1:], first, first + page))
    if verb == "copy":
        rows = [cache._sequences[0][0], cache.copy()._sequences[0][0]]
    else:
        cache.repeat(2)
        if verb == "reorder":
            cache.reorder([1, 0])
        rows = cache._sequences[0]
    for blocks in ("keys", "values"):
        one, two = (getattr(row, blocks).pages for row in rows)
        assert len(one) == len(two) == 3
        for left, right in zip(one, two, strict=True):
            assert np.shares_memory(left["packed"], right["packed"])
    _, k, v = sequence(100, seed=1)
    rows[1].append(k, v, None, _backend.resolve())
    one, two = (row.keys.pages for row in rows)
    assert np.shares_memory(one[1]["packed"], two[1]["packed"])
    assert not np.shares_memory(one[2]["packed"], two[2]["packed"])


@pytest.mark.parametrize("change", ["crop", "evict", "reset", "select", "append"])
def test_a_copy_survives_what_happens_to_the_other(change, tmp_path):
    arrays = sequence(150)
    cache = small_cache()
    feed(cache, arrays)
    branch = cache.copy()
    expected = saved(branch, tmp_path)
    verbs = {
        "crop": lambda: cache.crop(20),
        "evict": lambda: cache.evict(100),
        "reset": cache.reset,
        "select": lambda: cache.select([0, 0]),
        "append": lambda: None,
    }
    verbs[change]()
    cache.append(0, *(x.repeat(cache.batch, axis=0) for x in sequence(200, seed=1)[1:]))
    assert_same_bits(saved(branch, tmp_path), expected)


# Cutting rows apart


@pytest.mark.parametrize("name", ["int4", "kivi2", "lm3"])
def test_rows_are_cropped_and_evicted_as_if_alone(name):
    lengths = [150, 90]
    arrays, new = sequence(150, batch=2), sequence(5, batch=2, seed=1)
    cuts = {"crop": ([-20, -3], -7, [60, 30]), "evict": ([30, 2], 11)}
    for verb, choices in cuts.items():
        for given in choices:
            together = small_cache(name, batch=2, rollback=8)
            together.append_attend(0, *arrays, lengths=lengths)
            getattr(together, verb)(given)
            outputs = together.append_attend(0, *new)
            for row, length in enumerate(lengths):
                one = slice(row, row + 1)
                alone = small_cache(name, rollback=8)
                feed(alone, [x[one, :, 150 - length :] for x in arrays])
                getattr(alone, verb)(given if isinstance(given, int) else given[row])
                assert_same_bits(outputs[one], alone.append_attend(0, *[x[one] for x in new]))
                assert_same_bits(state(together)[0][row], state(alone)[0][0])


@pytest.mark.parametrize("given", [[1], [1, 2, 3], [[1, 2]], [1.0, 2.0], [-31, 0], [0, 31], "12"])
def test_a_bad_cut_changes_no_row(given):
    cache = small_cache(batch=2)
    feed(cache, sequence(30, batch=2))
    before = state(cache)
    for verb in ("crop", "evict"):
        with pytest.raises(ValueError, match="must"):
            getattr(cache, verb)(given)
    assert_same_bits(state(cache), before)


@pytest.mark.parametrize("verb", ["crop", "evict"])
def test_a_cut_that_fails_in_one_row_is_taken_back_in_all(verb, monkeypatch):
    cache = small_cache(batch=3, rollback=8)
    feed(cache, sequence(150, batch=3))
    before = state(cache)
    rows, done = cache._sequences[0], []
    original = getattr(type(rows[0]), verb)

    def failing(row, count):
        if done:
            raise KeyboardInterrupt
        done.append(row)
        original(row, count)

    monkeypatch.setattr(type(rows[0]), verb, failing)
    with pytest.raises(KeyboardInterrupt):
        getattr(cache, verb)(20)
    assert_same_bits(state(cache), before)


def test_queries_after_an_eviction_are_those_of_the_tokens_that_are_left():
    q, k, v = sequence(60)
    cache = small_cache(None, sinks=4)
    cache.append(0, k, v)
    cache.evict(50)
    kept = [*range(4), *range(54, 60)]
    visible = np.tri(10, dtype=bool)
    expected = exact_attention(q[:, :, kept], k[:, :, kept], v[:, :, kept], visible=visible)
    np.testing.assert_allclose(cache.attend(0, q[:, :, kept]), expected[0], atol=2e-6)
    with pytest.raises(ValueError, match="at most as many queries as there are tokens, 10"):
        cache.attend(0, q[:, :, :11])


def test_a_ring_refuses_the_first_query_after_the_sinks_once_its_tokens_are_gone():
    cache = small_cache("int8", window=1, recent=1)
    q, k, v = sequence(40 + PAGE_UNITS * 64)
    cache.append(0, k, v)
    assert cache._sequences[0][0].released > 4
    with pytest.raises(ValueError, match="saw only what is still there"):
        cache.attend(0, q[:, :, 4:])
    assert cache.attend(0, q[:, :, -1:]).shape[2] == 1
