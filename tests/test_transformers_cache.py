"""What a KVCodecCache is and does beside generation: copies, files, memory, reports."""

import copy
import gc
import json
import pickle
import weakref
import zlib

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np
import torch
from hf_models import (
    CACHE,
    SMALL,
    cache_of,
    every_architecture,
    left_padded,
    logits,
    packed,
    prompt,
    tiny,
)

import kvcodec as kv
from kvcodec import storage
from kvcodec.integrations.transformers import KVCodecCache
from kvcodec.testing import assert_same_bits

pytestmark = pytest.mark.hf


def filled(name="Gemma3", tokens=70, **options):
    model = packed(tiny(name))
    ids, mask, positions = left_padded(prompt(tokens + 20, 2), [tokens + 20, tokens - 10])
    cache = cache_of(model, **options)
    logits(model, ids[:, :tokens], [40], cache, mask, positions)
    return model, cache, (ids, mask, positions)


def rest(model, cache, text):
    """The logits of the remaining tokens, one by one."""
    ids, mask, positions = text
    start = cache.get_seq_length()
    with torch.inference_mode():
        parts = [
            model(
                ids[:, at : at + 1],
                attention_mask=mask[:, : at + 1],
                position_ids=positions[:, at : at + 1],
                **{CACHE: cache},
            ).logits
            for at in range(start, ids.shape[1])
        ]
    return torch.cat(parts, 1).numpy()


@every_architecture
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_cache_continues_bit_for_bit(name, dtype, tmp_path):
    model = packed(tiny(name, dtype))
    ids = prompt(90)
    cache = cache_of(model)
    logits(model, ids[:, :70], [40], cache)
    cache.save(tmp_path / "prompt.kv")
    loaded = KVCodecCache.load(tmp_path / "prompt.kv", model.config)
    assert loaded.get_seq_length() == 70
    assert loaded.kv.config == cache.kv.config
    expected = logits(model, ids[:, 70:], cache=cache)
    assert torch.equal(logits(model, ids[:, 70:], cache=loaded), expected)


def test_padding_is_saved(tmp_path):
    model, cache, text = filled()
    cache.save(tmp_path / "prompt.kv")
    loaded = KVCodecCache.load(tmp_path / "prompt.kv", model.config)
    assert_same_bits(rest(model, loaded, text), rest(model, cache, text))
    assert loaded.kv.seq_lengths.tolist() == [[90, 60], [90, 60]]


def test_a_saved_cache_is_a_file_of_a_kvcache(tmp_path):
    _, cache, _ = filled()
    cache.save(tmp_path / "prompt.kv")
    plain = kv.KVCache.load(tmp_path / "prompt.kv")
    assert_same_bits(plain.keys(1), cache.kv.keys(1))


@pytest.mark.parametrize(
    ("name", "changes", "differs"),
    [
        ("Gemma3", {"num_key_value_heads": 4}, "num_kv_heads is"),
        ("Gemma3", {"head_dim": 128}, "head_dim is"),
        (
            "Gemma3",
            {"sliding_window": 30},
            r"window is \[30, None\], but the file has \[24, None\]",
        ),
        (
            "Qwen2 with sliding windows",
            {"head_dim": 256},
            "model_type is qwen2, but .* gemma3_text",
        ),
    ],
)
def test_a_file_of_another_model_is_refused(name, changes, differs, tmp_path):
    _, cache, _ = filled()
    cache.save(tmp_path / "prompt.kv")
    other = tiny(name, **changes).config
    with pytest.raises(ValueError, match=f"config must be of a model like.*{differs}"):
        KVCodecCache.load(tmp_path / "prompt.kv", other)


def test_files_that_are_none_of_this_cache(tmp_path):
    model, cache, _ = filled()
    path = tmp_path / "prompt.kv"
    cache.kv.save(path)
    with pytest.raises(ValueError, match=r"written by KVCodecCache\.save"):
        KVCodecCache.load(path, model.config)
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="path must be"):
        KVCodecCache.load(path, model.config)
    for change in (
        {"version": 2},
        {"version": "1"},
        {"columns": -1},
        {"columns": 71},
        {"padding": []},
        {"padding": 5},
        {"padding": [[0, [0, "x"]]]},
        {"padding": [[0, [0, 30, 1]]]},
        {"padding": [[50, [0, 30]]]},
        {"padding": [[0, [0, 20]], [10, [0, 10]]]},
        {"extra": 1},
    ):
        notes = {"version": 1, "model_type": "gemma3_text", **cache.layers[0].columns.to_config()}
        text = json.dumps(notes | change)
        sealed = f"{zlib.crc32(text.encode()):08x} {text}"
        storage.save(cache.kv, path, {"kvcodec.transformers": sealed})
        with pytest.raises(ValueError, match="wrong or of another version"):
            KVCodecCache.load(path, model.config)


def pickled(cache):
    return pickle.loads(pickle.dumps(cache))


@pytest.mark.parametrize("copied", [KVCodecCache.copy, copy.copy, copy.deepcopy, pickled])
def test_a_copy_continues_on_its_own(copied):
    model, cache, text = filled()
    branch = copied(cache)
    expected = rest(model, cache, text)
    assert branch.get_seq_length() == 70
    assert_same_bits(rest(model, branch, text), expected)


def test_the_memory_is_free_as_soon_as_the_cache_is_gone():
    model = packed(tiny("Gemma3"))
    enabled = gc.isenabled()
    gc.disable()
    try:
        cache = cache_of(model)
        with torch.inference_mode():
            output = model(prompt(70), **{CACHE: cache})
        copied = cache.copy()
        held = [weakref.ref(each) for one in (cache, copied) for each in (one, one.kv)]
        layer = cache.layers[0]
        del cache, copied, output
        assert [each() for each in held] == [None] * 4
    finally:
        if enabled:
            gc.enable()
    with pytest.raises(ReferenceError, match="cache must be kept as long as its layers are used"):
        layer.get_max_length()


def test_rows_are_chosen_with_their_padding():
    model, cache, (ids, mask, positions) = filled()
    expected = rest(model, cache.copy(), (ids, mask, positions))
    cache.reorder_cache(torch.tensor([1, 0]))
    swapped = tuple(x[[1, 0]] for x in (ids, mask, positions))
    found = rest(model, cache.copy(), swapped)
    np.testing.assert_allclose(found[[1, 0]], expected, atol=1e-4)
    cache.batch_select_indices(torch.tensor([0]))
    np.testing.assert_allclose(
        rest(model, cache, [x[:1] for x in swapped])[0], expected[1], atol=1e-4
    )


def test_a_crop_into_padding_and_to_nothing():
    model, cache, (ids, mask, positions) = filled("Llama", key=None, value=None)
    cache.crop(-65)
    assert cache.get_seq_length() == 5
    assert cache.kv.seq_lengths.tolist() == [[5, 0], [5, 0]]
    fresh = cache_of(model, key=None, value=None)
    expected = logits(model, ids, [5], fresh, mask, positions)[:, 5:]
    np.testing.assert_allclose(rest(model, cache, (ids, mask, positions)), expected, atol=1e-4)
    cache.crop(-cache.get_seq_length())
    assert (cache.get_seq_length(), cache.batch_size) == (0, -1)
    cache.reorder_cache(torch.tensor([0]))  # of an empty cache no row is known


def test_memory_and_repr():
    _, cache, _ = filled("Llama", key="lm4", value="lm2")
    memory = cache.memory()
    assert cache.nbytes == memory["total"] == sum(x["total"] for x in memory["layers"])
    assert cache.nbytes == cache.kv.nbytes > 0
    assert repr(cache).startswith("<KVCodecCache of 40 to 70 tokens: 2 layers, batch 2, lm4 keys")
    assert "(equalized)" in repr(cache)
    assert "<table>" in cache._repr_html_()


def test_exact_numbers_are_kept_as_the_model_has_them():
    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        model = packed(tiny("Llama", dtype))
        for asked, kept in ((None, name), ("float32", "float32"), ("bfloat16", "bfloat16")):
            cache = KVCodecCache(model.config, exact_dtype=asked, **SMALL)
            logits(model, prompt(10), cache=cache)
            assert cache.kv.config["exact_dtype"] == kept


def test_arguments_reach_the_cache():
    config = tiny("Gemma3").config
    options = {
        "sinks": 3,
        "recent": 17,
        "rollback": 5,
        "max_tokens": 400,
        "exact_dtype": "bfloat16",
        "query_bits": None,
        "probability_bits": 14,
        "backend": "reference",
    }
    held = KVCodecCache(config, "lm3", "kivi4", **options).kv.config
    for name, given in options.items():
        assert held[name] == given
    assert [held[side][1].name for side in ("key", "value")] == ["lm3", "kivi4"]
    assert held["window"] == [24, None]
    assert KVCodecCache(config, block=32).kv.config["block"] == 32
