"""What KVCache promises: chunks, rows, windows, verbs, errors, memory and threads."""

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from cache_model import Row, Rules, buffers, contents, read_file

import kvcodec as kv
from kvcodec import _backend
from kvcodec.blocks import PAGE_UNITS
from kvcodec.testing import assert_same_bits, backends, exact_attention

pytestmark = pytest.mark.usefixtures("twin")

every_preset = pytest.mark.parametrize("name", kv.PRESETS)
EVERY = backends(threads=[1])
FLOATS = {"query_bits": None, "probability_bits": None}
KIVI = ("kivi4", "kivi2")


@pytest.fixture(params=EVERY[:1] + EVERY[1:][-1:], ids=lambda backend: backend.label)
def twin(request):
    """Run the test on the reference, and on the fast path at its highest SIMD level."""
    with request.param.context():
        yield


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
    k[..., 3] += 5
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
    return [[contents(row) for row in rows] for rows in cache.sequences]


def saved(cache, folder):
    cache.save(folder / "cache.safetensors")
    return read_file(folder / "cache.safetensors")


def small(name, side, block=16):
    """A preset for one side with small blocks."""
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


# Chunks


@every_preset
@pytest.mark.parametrize("block", [16, 64, 128])
def test_chunks_do_not_count(name, block):
    arrays = sequence(170)
    whole = small_cache(name, block=block)
    expected = feed(whole, arrays)
    for cuts in (range(1, 170), (3, 4, 67, 130), (64, 128), (169,)):
        cache = small_cache(name, block=block)
        assert_same_bits(feed(cache, arrays, cuts), expected)
        assert_same_bits(state(cache), state(whole))


@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
def test_chunks_do_not_count_without_blocks(name):
    arrays = sequence(60)
    options = {"block": 1, "recent": 5}
    whole = small_cache(name, **options)
    expected = feed(whole, arrays)
    cache = small_cache(name, **options)
    assert_same_bits(feed(cache, arrays, range(1, 60)), expected)
    assert_same_bits(state(cache), state(whole))


@every_preset
def test_appending_without_queries_gives_the_same_codes_in_any_chunks(name):
    _, k, v = sequence(150)
    whole, single = small_cache(name), small_cache(name)
    whole.append(0, k, v)
    for token in range(150):
        single.append(0, *part((k, v), token, token + 1))
    assert_same_bits(state(single), state(whole))


@every_preset
def test_a_prompt_equals_windowed_attention(name):
    arrays = sequence(150)
    options = {"recent": 20, "softcap": 5.0, "scale": 0.3, "window": 70}
    for products in ({}, FLOATS):
        cache = small_cache(name, **products)
        result = feed(cache, arrays, softcap=5.0, scale=0.3, window=70)
        expected = kv.windowed_attention(
            *arrays,
            small(name, "key"),
            small(name, "value"),
            return_lse=True,
            **options,
            **products,
        )
        for actual, exact in zip(result, expected, strict=True):
            np.testing.assert_allclose(actual, exact, atol=2e-6, rtol=1e-6)


@every_preset
def test_exact_prefill_shows_the_chunk_itself_exactly(name):
    arrays = sequence(150)
    cache = small_cache(name)
    output = cache.append_attend(0, *arrays, exact_prefill=True)
    visible = np.tri(150, dtype=bool)
    np.testing.assert_allclose(output, exact_attention(*arrays, visible=visible)[0], atol=2e-6)
    ordinary = small_cache(name)
    feed(ordinary, arrays)
    assert_same_bits(state(cache), state(ordinary))


@pytest.mark.parametrize("name", ["int4", "kivi2", "lm3"])
def test_attending_equals_the_last_step_of_append_attend(name):
    q, k, v = sequence(150)
    cache, other = small_cache(name), small_cache(name)
    expected = feed(cache, (q, k, v))
    feed(other, part((q, k, v), 0, 149))
    other.append(0, *part((k, v), 149, 150))
    for one in (cache, other):
        result = one.attend(0, q[:, :, -1:], return_lse=True)
        assert_same_bits(list(result), part(expected, 149, 150))


@every_preset
def test_simd_levels_do_not_count(name):
    results = []
    for backend in EVERY[1:]:
        with backend.context():
            cache = small_cache(name)
            results.append((feed(cache, sequence(150)), state(cache)))
    for result in results[1:]:
        assert_same_bits(result, results[0])


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
    assert cache.lengths.tolist() == [[100, 100, 60, 60]]


# Heads, layers and dimensions


@pytest.mark.parametrize(
    ("q_heads", "kv_heads"), [(2, 2), (4, 2), (8, 2), (14, 2), (16, 2), (8, 1), (7, 1)]
)
@pytest.mark.parametrize("name", ["int8", "int4", "kivi4", "lm2"])
def test_query_heads_share_kv_heads(name, q_heads, kv_heads):
    q, k, v = sequence(70, kv_heads, q_heads=q_heads)
    cache = small_cache(name, num_kv_heads=kv_heads, **FLOATS)
    cache.append_attend(0, q, k, v)
    output = cache.attend(0, q[:, :, -2:])
    seen = np.arange(70) <= np.array([[68], [69]])
    expected, _ = exact_attention(q[:, :, -2:], cache.keys(0), cache.values(0), visible=seen)
    np.testing.assert_allclose(output, expected, atol=5e-6)


def test_layers_differ_in_codecs_heads_and_dimensions():
    heads, dims, value_dims = [2, 1, 3], [32, 64, 16], [16, 64, 48]
    keys = {0: "int4", 1: None, 2: kv.codec("kivi2", group_size=16)}
    values = {0: "lm3", 1: "int8", 2: None}
    cache = kv.KVCache(3, heads, dims, keys, values, value_head_dim=value_dims, recent=8, **FLOATS)
    for layer in range(3):
        q, k, v = sequence(
            150, heads[layer], dims[layer], q_heads=2 * heads[layer], value_dim=value_dims[layer]
        )
        cache.append_attend(layer, q, k, v)
        seen_k, seen_v = cache.keys(layer), cache.values(layer)
        assert seen_k.shape == k.shape
        assert seen_v.shape == v.shape
        assert (seen_k != k).any() == (keys[layer] is not None)
        assert (seen_v != v).any() == (values[layer] is not None)
        output = cache.attend(layer, q[:, :, -1:])
        expected, _ = exact_attention(q[:, :, -1:], seen_k, seen_v)
        np.testing.assert_allclose(output, expected, atol=5e-6)
    assert "int4 or float32 or kivi2 keys" in repr(cache)
    assert "lm3 or int8 or float32 values" in repr(cache)


def test_layers_are_independent():
    q, k, v = sequence(100)
    cache, alone = (kv.KVCache(layers, 2, 32, recent=8) for layers in (2, 1))
    cache.append_attend(1, q[:, :, :50], k[:, :, :50], v[:, :, :50])
    expected = feed(alone, (q, k, v))
    assert_same_bits(feed(cache, (q, k, v)), expected)
    assert_same_bits(state(cache)[0], state(alone)[0])
    assert cache.lengths.tolist() == [[100], [50]]
    assert len(cache) == cache.seq_length == 100


def test_int8_is_not_rotated_and_int4_is():
    rotations = {}
    for name in ("int8", "int4"):
        layer = kv.KVCache(1, 2, 32, name, name).layers[0]
        rotations[name] = (layer.key.rotation, layer.value.rotation)
    assert rotations == {"int8": ("none", "none"), "int4": ("hadamard", "hadamard")}


@pytest.mark.parametrize("rotation", ["none", "hadamard", "srht"])
def test_the_rotation_is_the_callers_choice(rotation):
    cache = kv.KVCache(1, 2, 32, kv.codec("int8", rotation=rotation), "int4")
    cache.append(0, *sequence(200)[1:])
    assert cache.layers[0].key.rotation == rotation
    assert cache.sequences[0][0].keys.codec.rotation == rotation


# What is exact


@every_preset
@pytest.mark.parametrize("tokens", [1, 4, 5, 24, 35, 36, 52, 53, 150])
def test_sinks_and_recent_tokens_are_exact_after_any_prefill(name, tokens):
    q, k, v = sequence(tokens)
    cache = small_cache(name)
    cache.append_attend(0, q, k, v)
    body = slice(4, 4 + max(tokens - 24, 0) // 16 * 16)
    for decoded, x in ((cache.keys(0), k), (cache.values(0), v)):
        assert_same_bits(decoded[:, :, : body.start], x[:, :, : body.start])
        assert_same_bits(decoded[:, :, body.stop :], x[:, :, body.stop :])
        assert (decoded[:, :, body] != x[:, :, body]).any(axis=(1, 3)).all()


@pytest.mark.parametrize("name", KIVI)
def test_kivi_packs_whole_groups_and_its_tail_is_bounded(name):
    arrays = sequence(150)
    cache = small_cache(name, block=32)
    for token in range(150):
        cache.append_attend(0, *part(arrays, token, token + 1))
        row = cache.sequences[0][0]
        packed = row.packed_end - 4
        assert packed % 32 == 0
        assert row.end - row.packed_end < 20 + 32 or row.end < 4
        if packed:
            held = contents(row)
            assert held["keys"]["scale"].shape[2] == packed // 16
            assert held["values"]["scale"].shape[2] == packed
            assert row.end - row.packed_end >= 20


@every_preset
def test_history_is_never_encoded_again(name):
    arrays = sequence(200)
    cache = small_cache(name)
    feed(cache, part(arrays, 0, 100))
    before = contents(cache.sequences[0][0])
    for token in range(100, 200):
        cache.append_attend(0, *part(arrays, token, token + 1))
    after = contents(cache.sequences[0][0])
    for side in ("keys", "values"):
        for stored, array in before[side].items():
            assert_same_bits(after[side][stored][:, :, : array.shape[2]], array)
    assert_same_bits(after["weights"], before["weights"])


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
        row = cache.sequences[0][0]
        assert len(row.keys.pages) == len(row.values.pages) <= 2
        for number, page in zip(row.keys.first[::PAGE_UNITS], row.keys.pages, strict=False):
            address = page.packed.ctypes.data
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
    row = cache.sequences[0][0]
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
    before = contents(cache.sequences[0][0])
    cache.crop(61)
    row = cache.sequences[0][0]
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
    assert cache.lengths.tolist() == [[30, 25]]
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
    cache.append(0, *sequence(1500)[1:])
    if verb == "copy":
        rows = [cache.sequences[0][0], cache.copy().sequences[0][0]]
    else:
        cache.repeat(2)
        if verb == "reorder":
            cache.reorder([1, 0])
        rows = cache.sequences[0]
    for blocks in ("keys", "values"):
        one, two = (getattr(row, blocks).pages for row in rows)
        assert len(one) == len(two) == 6
        for left, right in zip(one, two, strict=True):
            assert np.shares_memory(left.packed, right.packed)
    _, k, v = sequence(100, seed=1)
    rows[1].append(k, v, None, _backend.resolve())
    one, two = (row.keys.pages for row in rows)
    assert np.shares_memory(one[0].packed, two[0].packed)
    assert not np.shares_memory(one[5].packed, two[5].packed)


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


# Growth


@every_preset
def test_pages_never_move_and_are_allocated_as_they_fill(name):
    arrays = sequence(2500, 1, q_heads=1)
    cache = small_cache(name, num_kv_heads=1)
    row = cache.sequences[0][0]
    addresses = []
    for start in range(0, 2500, 50):
        cache.append(0, *part(arrays[1:], start, start + 50))
        now = [page.packed.ctypes.data for page in row.keys.pages]
        assert now[: len(addresses)] == addresses
        assert len(now) == -(-(row.packed_end - 4) // (PAGE_UNITS * 64))
        addresses = now
    assert len(addresses) == 10


def test_the_exact_tail_stays_small():
    arrays = sequence(2500, 1, q_heads=1)
    cache = small_cache(num_kv_heads=1, rollback=10)
    cache.append(0, *arrays[1:])
    tail = cache.memory()["layers"][0]["tail"]
    assert tail <= 2 * 32 * 4 * 2 * (20 + 10 + 2 * 16 + 64)


def test_max_tokens_reserves_and_is_kept():
    q, k, v = sequence(1100)
    cache = small_cache(max_tokens=1100)
    reserved = cache.nbytes
    assert cache.capacity == 1100
    cache.append(0, *part((k, v), 0, 1000))
    assert cache.memory()["layers"][0]["key_body"] <= reserved
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
        total = sum(array.nbytes for array in buffers(cache.sequences))
        assert cache.nbytes == memory["total"] == total
        assert sum(sum(layer.values()) for layer in memory["layers"]) == total
        assert memory["fp16"] == 2 * 2 * (step + 1) * 100 * 2 * 64
        assert memory["ratio"] == memory["fp16"] / total
        assert f"{total:,} bytes" in repr(cache)


def test_a_long_cache_is_as_small_as_its_codecs_say():
    cache = kv.KVCache(1, 1, 64, "int4", "int4", max_tokens=1024 * 8 + 4)
    cache.append(0, *sequence(1024 * 8 + 4, 1, 64)[1:])
    memory = cache.memory()["layers"][0]
    layer = cache.layers[0]
    for side in ("key", "value"):
        bits = getattr(layer, side).bits_per_value(64)
        tables = 2 * 8 * (8 * 16)
        assert memory[f"{side}_body"] == bits * 64 * 1024 * 8 / 8 + tables


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
    for name in ("layer", "sinks", "key body", "value body", "tail", "statistics"):
        assert f"<th>{name}</th>" in page


def test_sizes_are_told():
    cache = kv.KVCache(3, 2, 32, batch=2)
    cache.append(1, *sequence(10, batch=2)[1:], lengths=[3, 10])
    assert (cache.num_layers, cache.batch, len(cache), cache.seq_length) == (3, 2, 10, 10)
    assert cache.lengths.tolist() == [[0, 0], [3, 10], [0, 0]]
    assert cache.keys(1).shape == (2, 2, 10, 32)
    assert not cache.keys(1)[0, :, :7].any()
    assert cache.keys(0).shape == cache.values(0).shape == (2, 2, 0, 32)


# Errors


def nan(x):
    x = x.copy()
    x[-1, -1, -1, -1] = np.nan
    return x


Q, K, V = sequence(20, batch=2, seed=7)
BAD_CALLS = {
    "no layer": ("append", (5, K, V), {}, ValueError, "layer"),
    "negative layer": ("append", (-1, K, V), {}, ValueError, "layer"),
    "layer no number": ("attend", ("0", Q), {}, ValueError, "layer"),
    "nan key": ("append", (0, nan(K), V), {}, ValueError, "k must hold finite"),
    "nan value": ("append", (0, K, nan(V)), {}, ValueError, "v must hold finite"),
    "infinite key": ("append", (0, K * np.inf, V), {}, ValueError, "k must hold finite"),
    "integer key": ("append", (0, K.astype(int), V), {}, TypeError, "k must be an array of floats"),
    "text value": ("append", (0, K, "v"), {}, TypeError, "v must be an array of floats"),
    "key heads": ("append", (0, K[:, :1], V), {}, ValueError, "k must have shape"),
    "key batch": ("append", (0, K[:1], V[:1]), {}, ValueError, "k must have shape"),
    "key channels": ("append", (0, K[..., :16], V), {}, ValueError, "k must have shape"),
    "value tokens": ("append", (0, K, V[:, :, 1:]), {}, ValueError, "v must have shape"),
    "key dimensions": ("append", (0, K[0], V), {}, ValueError, "k must have 4 dimensions"),
    "too many tokens": (
        "append",
        (0, K.repeat(9, axis=2), V.repeat(9, axis=2)),
        {},
        ValueError,
        "max_tokens",
    ),
    "too many for one row": (
        "append_attend",
        (0, *(x.repeat(8, axis=2) for x in (Q, K, V))),
        {"lengths": [1, 121]},
        ValueError,
        "max_tokens",
    ),
    "lengths too long": ("append", (0, K, V), {"lengths": [1, 21]}, ValueError, "lengths"),
    "lengths negative": ("append", (0, K, V), {"lengths": [-1, 2]}, ValueError, "lengths"),
    "lengths for one": ("append", (0, K, V), {"lengths": [1]}, ValueError, "lengths"),
    "lengths no integers": ("append", (0, K, V), {"lengths": [1.0, 2.0]}, ValueError, "lengths"),
    "nan query": ("append_attend", (0, nan(Q), K, V), {}, ValueError, "q must hold finite"),
    "query tokens": (
        "append_attend",
        (0, Q[:, :, 1:], K, V),
        {},
        ValueError,
        "q must have as many",
    ),
    "query heads": ("append_attend", (0, Q[:, :3], K, V), {}, ValueError, "q must have shape"),
    "integer query": (
        "append_attend",
        (0, Q.astype(int), K, V),
        {},
        TypeError,
        "q must be an array",
    ),
    "nan new key": ("append_attend", (0, Q, nan(K), V), {}, ValueError, "k must hold finite"),
    "nan new value": ("append_attend", (0, Q, K, nan(V)), {}, ValueError, "v must hold finite"),
    "scale": ("append_attend", (0, Q, K, V), {"scale": 0}, ValueError, "scale"),
    "softcap": ("append_attend", (0, Q, K, V), {"softcap": -1.0}, ValueError, "softcap"),
    "window": ("append_attend", (0, Q, K, V), {"window": 0}, ValueError, "window"),
    "exact prefill": ("append_attend", (0, Q, K, V), {"exact_prefill": 1}, ValueError, "exact_pre"),
    "attend nan": ("attend", (0, nan(Q)), {}, ValueError, "q must hold finite"),
    "attend too many": (
        "attend",
        (0, Q.repeat(6, axis=2)),
        {},
        ValueError,
        "q must have at most",
    ),
    "attend causal": ("attend", (0, Q[:, :, :1]), {"causal": 1}, ValueError, "causal"),
    "attend window": ("attend", (0, Q[:, :, :1]), {"window": 1.5}, ValueError, "window"),
    "attend lengths": ("attend", (0, Q), {"lengths": [0, 21]}, ValueError, "lengths"),
    "crop beyond": ("crop", (101,), {}, ValueError, "length"),
    "crop far back": ("crop", (-101,), {}, ValueError, "length"),
    "crop no number": ("crop", (3.0,), {}, ValueError, "length"),
    "evict too many": ("evict", (56,), {}, ValueError, "tokens"),
    "evict negative": ("evict", (-1,), {}, ValueError, "tokens"),
    "reorder too few": ("reorder", ([0],), {}, ValueError, "indices"),
    "reorder no row": ("reorder", ([0, 2],), {}, ValueError, "indices"),
    "reorder negative": ("reorder", ([0, -1],), {}, ValueError, "indices"),
    "select nothing": ("select", ([],), {}, ValueError, "indices"),
    "select no row": ("select", ([5],), {}, ValueError, "indices"),
    "select floats": ("select", ([0.0],), {}, ValueError, "indices"),
    "select truth values": ("select", ([True, False],), {}, ValueError, "indices"),
    "select a number": ("select", (0,), {}, ValueError, "indices"),
    "repeat never": ("repeat", (0,), {}, ValueError, "times"),
    "repeat a fraction": ("repeat", (1.5,), {}, ValueError, "times"),
    "keys of no layer": ("keys", (2,), {}, ValueError, "layer"),
    "values of no layer": ("values", (None,), {}, ValueError, "layer"),
}


@pytest.mark.parametrize(
    ("verb", "args", "options", "error", "message"), BAD_CALLS.values(), ids=BAD_CALLS
)
def test_an_error_leaves_the_cache_as_it_was(verb, args, options, error, message, tmp_path):
    cache = kv.KVCache(2, 2, 32, recent=8, block=16, rollback=5, batch=2, max_tokens=220)
    cache.append_attend(0, *sequence(100, batch=2), lengths=[60, 100])
    before, size = saved(cache, tmp_path), cache.nbytes
    with pytest.raises(error, match=message):
        getattr(cache, verb)(*args, **options)
    assert_same_bits(saved(cache, tmp_path), before)
    assert cache.nbytes == size


BAD_CACHES = {
    "layers": ((0, 2, 32), {}, "num_layers"),
    "heads": ((1, 0, 32), {}, "num_kv_heads"),
    "heads of layers": ((2, [1, 2, 3], 32), {}, "num_kv_heads must be one number or 2"),
    "head_dim": ((1, 2, 0), {}, "head_dim"),
    "large head_dim": ((1, 2, 2000), {}, "head_dim"),
    "rotated head_dim": ((1, 2, 7), {}, "head_dim of the keys"),
    "rotated value_head_dim": ((1, 2, 32), {"value_head_dim": 7}, "head_dim of the values"),
    "unknown preset": ((1, 2, 32, "int5"), {}, "int5"),
    "value side": ((1, 2, 32, kv.codec("int4", side="value")), {}, "side"),
    "missing layer": ((2, 2, 32, {0: "int4"}), {}, "key must name every layer"),
    "unknown layer": ((1, 2, 32, {0: None, 1: None}), {}, "key must name every layer"),
    "block": ((1, 2, 32), {"block": 24}, "block must be a divisor or a multiple of 64"),
    "other block": ((1, 2, 32, kv.codec("int4", block=32)), {}, "block must be that of the key"),
    "kivi block": ((1, 2, 32, "kivi4"), {"block": 16}, "block must be a multiple of group_size"),
    "sinks": ((1, 2, 32), {"sinks": -1}, "sinks"),
    "recent": ((1, 2, 32), {"recent": -1}, "recent"),
    "rollback": ((1, 2, 32), {"rollback": 0.5}, "rollback"),
    "batch": ((1, 2, 32), {"batch": 0}, "batch"),
    "max_tokens": ((1, 2, 32), {"max_tokens": 0}, "max_tokens"),
    "window": ((1, 2, 32), {"window": 0}, "window"),
    "query bits": ((1, 2, 32), {"query_bits": 7}, "query_bits"),
    "probability bits": ((1, 2, 32), {"probability_bits": 8}, "probability_bits"),
    "backend": ((1, 2, 32), {"backend": "gpu"}, "backend"),
}


@pytest.mark.parametrize(("args", "options", "message"), BAD_CACHES.values(), ids=BAD_CACHES)
def test_a_cache_that_cannot_be_is_refused_when_it_is_made(args, options, message):
    with pytest.raises(ValueError, match=message):
        kv.KVCache(*args, **options)


def test_a_codec_must_be_a_codec():
    with pytest.raises(TypeError, match="value must be"):
        kv.KVCache(1, 2, 32, "int4", 4)


# Special input


@every_preset
def test_zeros_come_back_exactly(name):
    cache = small_cache(name)
    zeros = np.zeros((1, 2, 100, 32), np.float32)
    output = cache.append_attend(0, zeros, zeros, zeros)
    assert not output.any()
    assert not cache.keys(0).any()
    assert not cache.values(0).any()


@every_preset
@pytest.mark.parametrize("magnitude", [1e-30, 1e30])
def test_extreme_magnitudes_stay_finite(name, magnitude):
    q, k, v = (x * np.float32(magnitude) / 10 for x in sequence(100))
    cache = small_cache(name)
    output = cache.append_attend(0, q, k, v)
    assert np.isfinite(output).all()
    assert np.isfinite(cache.keys(0)).all()


def test_any_floats_and_strides_are_taken():
    q, k, v = sequence(100)
    expected = small_cache().append_attend(0, *(x.astype(np.float16) for x in (q, k, v)))
    wide = [x.astype(np.float16).astype(np.float64) for x in (q, k, v)]
    assert_same_bits(small_cache().append_attend(0, *wide), expected)
    backwards = [np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2) for x in wide]
    assert_same_bits(small_cache().append_attend(0, *backwards), expected)


def test_what_was_given_may_change_afterwards():
    _, k, v = sequence(30)
    cache = small_cache()
    cache.append(0, k, v)
    seen = cache.keys(0)
    k[:] = 0
    assert_same_bits(cache.keys(0), seen)
    seen[:] = 0
    assert cache.keys(0).any()


def test_no_tokens_change_nothing():
    q, k, v = sequence(60)
    cache = small_cache()
    cache.append_attend(0, q, k, v)
    before = state(cache)
    assert cache.append_attend(0, *part((q, k, v), 0, 0)).shape == (1, 4, 0, 32)
    cache.append(0, *part((k, v), 0, 0))
    assert_same_bits(state(cache), before)


# Threads


@every_preset
def test_thread_counts_do_not_count(name, monkeypatch):
    monkeypatch.setattr(_backend, "PARALLEL_FROM", 0)
    arrays = sequence(150, batch=2)
    results = []
    for threads in (1, 2):
        with kv.config_context(num_threads=threads):
            cache = small_cache(name, batch=2)
            outputs = feed(cache, arrays, (1, 90))
            outputs.append(cache.attend(0, arrays[0][:, :, -3:]))
            results.append((outputs, state(cache)))
    assert_same_bits(*results)


@pytest.mark.parametrize("name", ["int4", "kivi2"])
def test_threads_attend_on_one_cache_at_once(name):
    q, k, v = sequence(1500, 1, q_heads=2)
    caches = [small_cache(name, num_kv_heads=1) for _ in range(2)]
    for cache in caches:
        cache.append(0, k, v)
    queries = [q[:, :, i : i + 1] for i in range(8)]
    expected = [caches[0].attend(0, query) for query in queries]
    start = threading.Barrier(8)

    def attend(query):
        start.wait()
        return caches[1].attend(0, query)

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(attend, queries))
    for result, exact in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, exact, atol=1e-6)
