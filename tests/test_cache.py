"""What KVCache promises: chunks, heads, layers, what is exact, threads."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from cache_cases import (
    EVERY,
    FLOATS,
    KIVI,
    every_preset,
    feed,
    part,
    saved,
    sequence,
    small,
    small_cache,
    state,
)
from cache_model import contents

import kvcodec as kv
from kvcodec import _backend
from kvcodec.testing import assert_same_bits, exact_attention

pytestmark = pytest.mark.usefixtures("twin")

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
    assert cache.seq_lengths.tolist() == [[100], [50]]
    assert len(cache) == cache.seq_length == 100


def test_int8_is_not_rotated_and_int4_is():
    rotations = {}
    for name in ("int8", "int4"):
        layer = kv.KVCache(1, 2, 32, name, name)._layers[0]
        rotations[name] = (layer.key.rotation, layer.value.rotation)
    assert rotations == {"int8": ("none", "none"), "int4": ("hadamard", "hadamard")}


@pytest.mark.parametrize("rotation", ["none", "hadamard", "srht"])
def test_the_rotation_is_the_callers_choice(rotation):
    cache = kv.KVCache(1, 2, 32, kv.codec("int8", rotation=rotation), "int4")
    cache.append(0, *sequence(200)[1:])
    assert cache._layers[0].key.rotation == rotation
    assert cache._sequences[0][0].keys.codec.rotation == rotation


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
        row = cache._sequences[0][0]
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
    before = contents(cache._sequences[0][0])
    for token in range(100, 200):
        cache.append_attend(0, *part(arrays, token, token + 1))
    after = contents(cache._sequences[0][0])
    for side in ("keys", "values"):
        for stored, array in before[side].items():
            assert_same_bits(after[side][stored][:, :, : array.shape[2]], array)
    assert_same_bits(after["weights"], before["weights"])


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
    if _backend.active_backend() == "fast":
        assert_same_bits(results, expected)
    for result, exact in zip(results, expected, strict=True):  # NumPy's products may differ
        np.testing.assert_allclose(result, exact, atol=1e-6)


@pytest.mark.parametrize("name", ["int4", "int8", "kivi2", None])
def test_threads_share_a_kv_head_without_changing_a_bit(name, monkeypatch):
    monkeypatch.setattr(_backend, "PARALLEL_FROM", 0)
    q, k, v = sequence(3500, 1, q_heads=3)
    cache = small_cache(name, num_kv_heads=1, block=64)
    cache.append(0, k, v)
    results = []
    for threads in (1, 2, 3):
        with kv.config_context(num_threads=threads):
            result = cache.attend(0, q[:, :, -2:], window=3000, return_lse=True)
            results.append(list(result))
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


@pytest.mark.parametrize("head_dim", [1, 2, 4])
def test_chunks_do_not_count_with_many_query_heads(head_dim, tmp_path):
    arrays = sequence(40, 1, head_dim, q_heads=37)
    key = kv.codec("int4", block=16, rotation="none", equalize=True)
    caches = [kv.KVCache(1, 1, head_dim, key, None, block=16, recent=50) for _ in range(2)]
    feed(caches[0], arrays)
    feed(caches[1], arrays, range(1, 40))
    files = [saved(cache, tmp_path) for cache in caches]
    assert_same_bits(files[1], files[0])
