"""Every supported architecture computes on the packed cache what it computes without it."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from hf_models import (
    EXACT,
    INT8,
    WINDOW,
    cache_of,
    codec_blocks,
    every_architecture,
    generate,
    logits,
    packed,
    prompt,
    relative,
    tiny,
)

pytestmark = pytest.mark.hf
TOKENS = 90
STEPWISE = [30, *range(31, 45), 52, 80]  # a prompt, single tokens, chunks


@every_architecture
def test_logits_of_prompt_steps_and_chunks(name):
    model, ids = tiny(name), prompt(TOKENS, batch=2)
    truth = logits(model, ids)
    packed(model)
    for cuts in ((), STEPWISE):
        exact = cache_of(model, **EXACT)
        assert relative(logits(model, ids, cuts, exact), truth) < 1e-4
        assert exact.get_seq_length() == TOKENS
    for codec, bound in (("int8", 0.02), ("int4", 0.2)):
        cache = cache_of(model, key=codec, value=codec)
        error = relative(logits(model, ids, STEPWISE, cache), truth)
        assert 1e-6 < error < bound
        assert min(codec_blocks(cache)) > 0


@every_architecture
def test_chunks_see_what_steps_see(name):
    model, ids = tiny(name), prompt(TOKENS)
    truth = logits(model, ids)
    packed(model)
    first = logits(model, ids, (), cache_of(model))
    second = logits(model, ids, STEPWISE, cache_of(model))
    # The projections of a chunk round differently, by which a key may get another code.
    assert relative(second, first) < 0.1 * relative(first, truth)


@every_architecture
def test_greedy_tokens(name):
    model, ids = tiny(name), prompt(40)
    expected = generate(model, ids)
    packed(model)
    assert torch.equal(generate(model, ids, cache_of(model, **EXACT)), expected)
    assert generate(model, ids, cache_of(model, **INT8)).shape == expected.shape


@every_architecture
def test_bfloat16(name):
    model, ids = tiny(name, torch.bfloat16), prompt(TOKENS)
    truth = logits(tiny(name), ids)
    near = relative(logits(model, ids), truth)
    cache = cache_of(packed(model), **EXACT)
    assert relative(logits(model, ids, STEPWISE, cache), truth) < 2 * near
    assert cache.kv.config["exact_dtype"] == "bfloat16"


def test_float16_is_computed_in_float32():
    model, ids = tiny("Llama", torch.float16), prompt(TOKENS)
    truth = logits(model, ids)
    cache = cache_of(packed(model), **EXACT)
    assert relative(logits(model, ids, STEPWISE, cache), truth) < 0.01
    assert cache.kv.config["exact_dtype"] == "float32"


@pytest.mark.parametrize("name", ["Mistral", "Gemma3"])
def test_a_sliding_window_drops_what_it_does_not_see(name):
    model, ids = packed(tiny(name)), prompt(20 * WINDOW)
    cache = cache_of(model, **EXACT, max_tokens=20 * WINDOW)
    assert relative(logits(model, ids, [200], cache), logits(tiny(name), ids)) < 1e-4
    seen = [cache.kv.keys(layer).shape[2] for layer in range(2)]
    full = 20 * WINDOW
    window = WINDOW - 1 + 4  # what the next query sees, and the sinks
    assert seen == ([window, window] if name == "Mistral" else [window, full])


def test_codecs_of_single_layers():
    model, ids = packed(tiny("Llama")), prompt(TOKENS)
    cache = cache_of(model, key={0: None, 1: "int8"}, value={0: "int8", 1: "lm4"})
    assert relative(logits(model, ids, (), cache), logits(tiny("Llama"), ids)) < 0.1
    assert "float32 or int8 keys, int8 or lm4 values" in repr(cache)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(4, 4, 64), (8, 2, 80), (7, 1, 96), (14, 2, 128), (8, 1, 32)],
)
def test_heads(heads, kv_heads, head_dim):
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": 8 * heads,
    }
    model, ids = tiny("Llama", **sizes), prompt(TOKENS)
    truth = logits(model, ids)
    packed(model)
    assert relative(logits(model, ids, STEPWISE, cache_of(model, **EXACT)), truth) < 1e-4
    assert 0 < relative(logits(model, ids, STEPWISE, cache_of(model)), truth) < 0.2


@torch.inference_mode()
def test_text_and_images_of_a_model_with_an_encoder():
    """The encoder keeps its attention; images whose tokens see each other raise."""
    text = tiny("Gemma3").config
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    parts = {"text_config": text, "vision_config": vision, "mm_tokens_per_image": 4}
    tokens = {"image_token_id": 100, "pad_token_id": 0, "eos_token_id": None}
    config = transformers.Gemma3Config(**parts, **tokens)
    model, ids = transformers.Gemma3ForConditionalGeneration(config).eval(), prompt(60)
    ids[ids == 100] = 1
    expected = generate(model, ids)
    model.set_attn_implementation({"text_config": "kvcodec"})
    assert torch.equal(generate(model, ids, cache_of(model, **EXACT)), expected)
    ids[0, 10:14] = 100
    image = {"pixel_values": torch.ones(1, 3, 28, 28), "token_type_ids": (ids == 100).long()}
    with pytest.raises(ValueError, match="the model asked for another mask"):
        generate(model, ids, cache_of(model), **image)
