"""What is not supported raises at once, in a sentence that says so, and changes nothing."""

import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np
import torch
import transformers
from hf_models import (
    CACHE,
    EXACT,
    SIZES,
    cache_of,
    generate,
    left_padded,
    logits,
    packed,
    prompt,
    relative,
    tiny,
)

import kvcodec as kv
from kvcodec.integrations.transformers import KVCodecCache

pytestmark = pytest.mark.hf


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["Llama", "Gemma3", "GptOss"])
def test_the_cache_without_the_attention_function(name, attention):
    if (name, attention) == ("GptOss", "sdpa"):
        pytest.skip("Transformers has no such attention for GPT-OSS")
    model = tiny(name)
    model.set_attn_implementation(attention)
    cache = cache_of(model)
    with pytest.raises(ValueError, match=r"set_attn_implementation\(\"kvcodec\"\) go together"):
        logits(model, prompt(20), cache=cache)
    assert cache.get_seq_length() == 0
    assert relative(logits(packed(model), prompt(20), cache=cache), logits(tiny(name), prompt(20)))


@pytest.mark.parametrize("kind", ["none", "dynamic", "static", "generate"])
@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_the_attention_function_without_the_cache(name, kind):
    model, ids = packed(tiny(name)), prompt(20)
    with pytest.raises(ValueError, match="go together"):  # noqa: PT012
        if kind == "generate":
            generate(model, ids)
        elif kind == "none":
            logits(model, ids)
        elif kind == "dynamic":
            logits(model, ids, cache=transformers.DynamicCache(config=model.config))
        else:
            cache = transformers.StaticCache(config=model.config, max_cache_len=64)
            logits(model, ids, cache=cache)


def raises_and_leaves(match, model, **options):
    """A second forward pass raises, and the cache continues as if it had not been."""
    ids = prompt(60)
    cache = cache_of(model, **EXACT)
    logits(model, ids[:, :40], cache=cache)
    with torch.inference_mode(), pytest.raises(ValueError, match=match):
        model(ids[:, 40:], **{CACHE: cache}, **options)
    expected = cache_of(model, **EXACT)
    first = logits(model, ids, [40], expected)[:, 40:]
    assert relative(logits(model, ids[:, 40:], cache=cache), first) < 1e-5


@pytest.mark.parametrize(
    ("match", "options"),
    [
        ("attention_mask must be left out or be of", {"attention_mask": torch.ones(1, 1, 20, 60)}),
        ("attention_mask must cover the 40 tokens", {"attention_mask": torch.ones(1, 20)}),
        ("attention_mask must cover the 40 tokens", {"attention_mask": torch.ones(1, 70)}),
        (
            "attention_mask must have padding only on the left",
            {"attention_mask": torch.tensor([[1] * 50 + [0] * 10])},
        ),
        (
            "attention_mask must be what it was",
            {"attention_mask": torch.tensor([[0] * 10 + [1] * 50])},
        ),
        ("position_ids must ascend", {"position_ids": torch.arange(20)[None] % 10}),
        ("position_ids must ascend", {"position_ids": torch.zeros(1, 20, dtype=torch.long)}),
        ("output_attentions must be false", {"output_attentions": True}),
        ("is_causal must be true|is causal, over all", {"is_causal": False}),
        ("cu_seq_lens_q must be left out", {"cu_seq_lens_q": torch.tensor([0, 20])}),
        ("seq_idx must be left out", {"seq_idx": torch.zeros(1, 20, dtype=torch.int32)}),
    ],
)
@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_what_a_forward_pass_may_not_be_given(name, match, options):
    raises_and_leaves(match, packed(tiny(name)), **options)


def test_attention_weights_that_the_config_asks_for():
    model = tiny("Llama")
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    with pytest.raises(ValueError, match="output_attentions must be false"):
        logits(packed(model), prompt(20), cache=cache_of(model))


def test_generation_that_would_feed_all_tokens_again():
    model = packed(tiny("Llama"))
    cache = cache_of(model)
    with pytest.raises(ValueError, match=r"use_cache must be true .* but is false"):
        generate(model, prompt(20), cache, use_cache=False)
    model.config.use_cache = False
    with pytest.raises(ValueError, match=r"use_cache must be true .* but is false"):
        logits(model, prompt(20), cache=cache)
    assert cache.get_seq_length() == 0


def test_packed_sequences():
    model, ids = packed(tiny("Llama")), prompt(20)
    positions = torch.cat([torch.arange(12), torch.arange(8)])[None]
    with pytest.raises(ValueError, match="position_ids must ascend"):
        logits(model, ids, positions=positions, cache=cache_of(model))


def test_right_padding_of_a_prompt():
    model, ids = packed(tiny("Llama")), prompt(20, 2)
    mask = torch.ones_like(ids)
    mask[1, 15:] = 0
    cache = cache_of(model)
    with pytest.raises(ValueError, match='padding_side = "left"'):
        logits(model, ids, mask=mask, cache=cache)
    assert cache.get_seq_length() == 0


def test_a_mask_that_is_forgotten_in_the_second_call():
    model = packed(tiny("Llama"))
    ids, mask, _ = left_padded(prompt(20, 2), [20, 11])
    cache = cache_of(model)
    logits(model, ids, mask=mask, cache=cache)
    with pytest.raises(ValueError, match="attention_mask must be what it was"):
        logits(model, ids[:, :1], cache=cache)


def test_gradients_and_dropout():
    model, ids = packed(tiny("Llama")), prompt(20)
    cache = cache_of(model)
    with pytest.raises(ValueError, match=r"torch\.inference_mode\(\)"):
        model(ids, **{CACHE: cache})
    training = packed(tiny("Llama", attention_dropout=0.1)).train()
    with pytest.raises(ValueError, match=r"dropout must be 0 .* is 0\.1; call model\.eval\(\)"):
        logits(training, ids, cache=cache)
    assert cache.get_seq_length() == 0


def test_float64_and_devices():
    model, ids = packed(tiny("Llama", torch.float64)), prompt(20)
    with pytest.raises(ValueError, match=r"float16, but key is torch\.float64"):
        logits(model, ids, cache=cache_of(model))
    elsewhere = packed(tiny("Llama")).to("meta")
    with pytest.raises(ValueError, match=r"runs on the CPU, but key is on meta"):
        logits(elsewhere, ids.to("meta"), cache=cache_of(elsewhere))


def test_a_value_that_is_not_finite_leaves_layers_that_can_be_evened_out():
    model, ids = packed(tiny("Llama")), prompt(60)
    cache = cache_of(model, **EXACT)
    logits(model, ids[:, :40], cache=cache)
    weight = model.model.layers[1].self_attn.k_proj.weight
    with torch.no_grad():
        kept, weight[0, 0] = weight[0, 0].clone(), float("nan")
    with pytest.raises(ValueError, match="k must hold finite values"):
        logits(model, ids[:, 40:50], cache=cache)
    with torch.no_grad():
        weight[0, 0] = kept
    with pytest.raises(ValueError, match=r"as many tokens in every layer.*crop\(0\)"):
        logits(model, ids[:, 50:], cache=cache)
    cache.crop(0)
    truth = logits(tiny("Llama"), ids)[:, 40:]
    assert relative(logits(model, ids[:, 40:], cache=cache), truth) < 1e-4


def test_the_config_of_another_model():
    model = packed(tiny("Llama"))
    other = KVCodecCache(tiny("Llama", num_key_value_heads=4).config)
    with pytest.raises(ValueError, match="k must have shape"):
        logits(model, prompt(20), cache=other)
    with pytest.raises(ValueError, match=r"its sliding window in layer 0 is 24, but .* for None"):
        logits(model, prompt(20), cache=KVCodecCache(tiny("Mistral").config))
    with pytest.raises(ValueError, match=r"its sliding window in layer 0 is None, but .* for 24"):
        logits(packed(tiny("Mistral")), prompt(20), cache=KVCodecCache(model.config))


@pytest.mark.parametrize("layers", [1, 3])
def test_a_model_with_another_number_of_layers(layers):
    model = packed(tiny("Llama", num_hidden_layers=layers))
    cache = cache_of(tiny("Llama"))
    with pytest.raises(ValueError, match=f"cache has 2 layers, but the model {layers}"):
        logits(model, prompt(20), cache=cache)
    assert (cache.kv.seq_lengths == 0).all()
    assert [layer.columns.count for layer in cache.layers] == [0, 0]


def test_attempts_after_an_interrupted_pass_append_nothing():
    model = packed(tiny("Llama"))
    cache = cache_of(model)
    logits(model, prompt(20), cache=cache)

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        logits(model, prompt(5), cache=cache)
    hook.remove()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"layers hold 20 to 25; crop\(0\)"):
            logits(model, prompt(5), cache=cache)
    assert [layer.columns.count for layer in cache.layers] == [25, 20]
    cache.crop(0)
    assert [layer.columns.count for layer in cache.layers] == [20, 20]


def test_a_batch_of_another_size():
    model = packed(tiny("Llama"))
    cache = cache_of(model)
    logits(model, prompt(20, 2), cache=cache)
    with pytest.raises(ValueError, match="as many rows as the batch, 3, but has 2"):
        logits(model, prompt(20, 3), cache=cache)
    cache.reset()
    logits(model, prompt(20, 3), cache=cache)
    assert cache.batch_size == 3


def test_more_tokens_than_were_reserved():
    model = packed(tiny("Llama"))
    cache = cache_of(model, max_tokens=30)
    assert cache.get_max_length() == 30
    logits(model, prompt(30), cache=cache)
    with pytest.raises(ValueError, match="max_tokens, 30"):
        logits(model, prompt(1), cache=cache)


def test_assisted_decoding_needs_rollback():
    model, ids = packed(tiny("Llama")), prompt(12).repeat(1, 4)
    with pytest.raises(ValueError, match="rollback must be at least the longest draft"):
        generate(model, ids, cache_of(model), prompt_lookup_num_tokens=4)
    assistant = tiny("Llama", num_hidden_layers=1)
    assistant.generation_config.assistant_confidence_threshold = 0.0
    with pytest.raises(ValueError, match=r"takes back, \d+, but is 1; make the cache with more"):
        generate(model, ids, cache_of(model, rollback=1), assistant_model=assistant)


def test_assisted_decoding_is_forgotten_by_reset_and_kept_by_copies():
    model = packed(tiny("Llama"))
    cache = cache_of(model, rollback=3)
    cache.activate_past_recording()
    logits(model, prompt(20), cache=cache)
    copied = cache.copy()
    for each in (cache, copied):
        with pytest.raises(ValueError, match=r"assisted decoding takes back, 4, but is 3"):
            each.crop(-4)
    cache.reset()
    logits(model, prompt(20), cache=cache)
    cache.crop(-4)
    assert cache.get_seq_length() == 16
    assert copied.is_recording_past(0)


@pytest.mark.parametrize("count", [-21, 1, -1.5, None, True, "-1"])
def test_crop_has_bounds(count):
    model = packed(tiny("Llama"))
    cache = cache_of(model)
    logits(model, prompt(20), cache=cache)
    with pytest.raises(ValueError, match=r"^tokens_to_remove must be .* number from -20 to 0, but"):
        cache.crop(count)
    assert cache.get_seq_length() == 20


@pytest.mark.parametrize("repeats", [0, 1.5])
@pytest.mark.parametrize("tokens", [0, 20])
def test_rows_are_repeated_a_whole_number_of_times(repeats, tokens):
    model = packed(tiny("Llama"))
    cache = cache_of(model)
    if tokens:
        logits(model, prompt(tokens), cache=cache)
    with pytest.raises(ValueError, match=r"^repeats must be a whole number of at least 1"):
        cache.batch_repeat_interleave(repeats)


@pytest.mark.parametrize("change", ["reorder_cache", "batch_select_indices"])
def test_rows_are_given_as_any_list_of_numbers(change):
    model = packed(tiny("Llama"))
    for rows in ([1, 1], (1, 1), np.array([1, 1]), torch.tensor([1, 1])):
        cache = cache_of(model)
        logits(model, prompt(20, 2), cache=cache)
        getattr(cache, change)(rows)
        np.testing.assert_array_equal(*(cache.kv.keys(0)))
    for wrong in ([], [2, 0], [-1, 0], [0.5, 1.0], ["0", "1"], [[0, 1]], 1, None):
        with pytest.raises(ValueError, match=r"^indices must "):
            getattr(cache, change)(wrong)
    assert cache.batch_size == 2


@pytest.mark.parametrize("options", [{"guidance_scale": 1.5}, {"assistant_early_exit": 1}])
def test_generation_that_runs_the_model_with_other_caches(options):
    model = packed(tiny("Llama"))
    with pytest.raises(ValueError, match=f"{next(iter(options))}.* is not supported"):
        generate(model, prompt(20), cache_of(model, rollback=20), **options)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_compiled_model(fullgraph):
    torch.compiler.reset()
    model = packed(tiny("Llama"))
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=fullgraph)
    with pytest.raises(Exception, match=r"torch\.compile may cover parts without attention"):
        logits(model, prompt(20), cache=cache_of(model))


def test_parts_without_attention_can_be_compiled():
    model = packed(tiny("Llama"))
    expected = logits(model, prompt(40), cache=cache_of(model))
    for layer in model.model.layers:
        layer.mlp.compile(backend="eager")
    assert relative(logits(model, prompt(40), (30, 31), cache=cache_of(model)), expected) < 0.1


def test_rows_of_an_interrupted_first_pass():
    model = packed(tiny("Llama"))
    cache = cache_of(model)

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            logits(model, prompt(20), cache=cache)
    finally:
        hook.remove()
    assert cache.batch_size == 1
    with pytest.raises(ValueError, match="indices"):
        cache.batch_select_indices(torch.tensor([5]))
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 2
    assert (cache.kv.seq_lengths == [[20, 20], [0, 0]]).all()


@pytest.mark.parametrize("count", [None, -1.0, "-1"])
def test_crop_takes_whole_numbers(count):
    model = packed(tiny("Llama"))
    cache = cache_of(model)
    logits(model, prompt(20), cache=cache)
    with pytest.raises(ValueError, match="tokens_to_remove must be a whole number"):
        cache.crop(count)
    assert cache.get_seq_length() == 20


def test_crop_takes_a_tensor_with_one_number():
    model, ids = packed(tiny("Llama")), prompt(20)
    cache, other = cache_of(model, rollback=2), cache_of(model, rollback=2)
    for each, count in ((cache, torch.tensor(-2)), (other, -2)):
        logits(model, ids, cache=each)
        each.crop(count)
    assert type(cache.get_seq_length()) is int
    assert torch.equal(logits(model, ids, cache=cache), logits(model, ids, cache=other))


def test_a_ring_cannot_be_cropped_beyond_what_is_there():
    model = packed(tiny("Mistral"))
    cache = cache_of(model)
    logits(model, prompt(200), cache=cache)
    with pytest.raises(ValueError, match="length must keep the tokens that the window of 24"):
        cache.crop(-100)
    assert cache.get_seq_length() == 200
    assert (cache.kv.seq_lengths == 200).all()


def test_keys_are_appended_once(monkeypatch):
    """A model that attends twice with the same keys would append them twice."""
    attend = transformers.AttentionInterface()["kvcodec"]

    def twice(*args, **options):
        attend(*args, **options)
        return attend(*args, **options)

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "kvcodec", twice)
    with pytest.raises(ValueError, match="called once for the keys and values"):
        logits(packed(tiny("Llama")), prompt(20), cache=cache_of(tiny("Llama")))


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        ("DeepseekV3", {}, "multi-head latent attention"),
        ("T5", {}, "an encoder-decoder model"),
        ("Llama4Text", {}, "layers of chunked attention"),
        ("Qwen3Next", {}, "layers of linear attention"),
        ("Gemma3Text", {"use_bidirectional_attention": True}, "not causal"),
        ("Gemma3nText", {}, "share the keys and values"),
        ("Rwkv", {}, "a model without num_attention_heads"),
        ("Bloom", {}, "ALiBi"),
        ("Mpt", {}, "ALiBi"),
        ("Falcon", {"alibi": True}, "ALiBi"),
        ("Dots3Note", {}, "a model whose layers differ"),
    ],
)
def test_models_that_are_not_supported(kind, options, named):
    config_class = getattr(transformers, f"{kind}Config", None)
    if config_class is None:
        pytest.skip(f"this release of Transformers has no {kind}")
    config = config_class(**options)
    with pytest.raises(ValueError, match=f"config must be .*{named}.*; supported are decoders"):
        KVCodecCache(config)


def test_arguments_of_the_cache():
    config = transformers.LlamaConfig(**SIZES)
    with pytest.raises(TypeError, match="config must be that of a model"):
        KVCodecCache("llama")
    for match, options in (
        ("key must be", {"key": "int5"}),
        ("value must name every layer from 0 to 1", {"value": {0: "int4"}}),
        ("exact_dtype must be", {"exact_dtype": "float16"}),
        ("recent must be", {"recent": -1}),
        ("block must be", {"block": 5}),
        ("rollback must be", {"rollback": 1.5}),
    ):
        with pytest.raises(ValueError, match=match):
            KVCodecCache(config, **options)


def test_tensors_that_numpy_does_not_take():
    cache = kv.KVCache(1, 2, 64)
    x = torch.ones(1, 2, 5, 64)
    for tensor, hint in (
        (x.bfloat16(), r"give k.float\(\) of a tensor of torch.bfloat16"),
        (x.to(torch.float8_e4m3fn), r"give k.float\(\) of a tensor of torch.float8_e4m3fn"),
        (x.requires_grad_(), r"Use tensor.detach\(\).numpy\(\) instead.$"),
    ):
        with pytest.raises(TypeError, match=f"^k must be an array of floats, .*{hint}"):
            cache.append(0, tensor, tensor)
    cache.append(0, x.detach(), x.detach().half())
    assert len(cache) == 5


def test_importing_kvcodec_imports_neither_torch_nor_transformers():
    code = "import sys, kvcodec; print([x for x in ('torch', 'transformers') if x in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_a_missing_library_is_named_with_its_extra(missing):
    code = f"""import sys
sys.modules[{missing!r}] = None
try:
    import kvcodec.integrations.transformers
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"of which {missing} is missing" in done.stdout
    assert 'pip install "kvcodec-cpu[hf]"' in done.stdout


def test_a_release_that_is_too_old_is_named():
    code = """import transformers
transformers.__version__ = "5.19.3"
try:
    import kvcodec.integrations.transformers
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "needs transformers 5.20 or newer, but 5.19.3 is installed" in done.stdout
