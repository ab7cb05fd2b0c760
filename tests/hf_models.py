"""Tiny randomly initialized models of each supported architecture, and how the tests run them."""

import inspect
import os
from itertools import pairwise

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import transformers

import kvcodec as kv
from kvcodec.integrations.transformers import KVCodecCache

MIXED = ["sliding_attention", "full_attention"]
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.1,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
WINDOW = 24
SLIDING = {"sliding_window": WINDOW, "layer_types": MIXED}
ARCHITECTURES = {
    "Llama": {},
    "Qwen2": {},
    "Qwen2 with sliding windows": SLIDING | {"use_sliding_window": True},
    "Qwen3": {},
    "Mistral": {"sliding_window": WINDOW},
    "Gemma2": SLIDING | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 9},
    "Gemma3": SLIDING | {"head_dim": 256, "query_pre_attn_scalar": 196},
    "GptOss": SLIDING | {"num_local_experts": 2, "num_experts_per_tok": 2},
}
every_architecture = pytest.mark.parametrize("name", ARCHITECTURES)
# Small windows, so that a few dozen tokens are packed and leave rings.
SMALL = {"sinks": 4, "recent": 8, "block": 16}
EXACT = {"key": None, "value": None} | SMALL
INT8 = {"key": "int8", "value": "int8"} | SMALL
# Releases of Transformers differ in the name of the argument.
_names = inspect.signature(transformers.LlamaModel.forward).parameters
CACHE = "cache" if "cache" in _names else "past_key_values"


def tiny(name, dtype=torch.float32, **changes):
    """A model in evaluation mode, with attention "sdpa" or, where that is not exact, "eager"."""
    kind = name.split()[0]
    options = SIZES | ARCHITECTURES[name] | changes
    config_class = "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config"
    config = getattr(transformers, config_class)(**options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for module_name, x in model.named_parameters():
        if module_name.endswith("sinks"):
            torch.nn.init.normal_(x)
    model.set_attn_implementation("eager" if kind in ("Gemma2", "GptOss") else "sdpa")
    return model.to(dtype)


def packed(model):
    """The same model with attention "kvcodec"."""
    model.set_attn_implementation("kvcodec")
    return model


def prompt(tokens, batch=1, seed=0):
    """Random tokens, none of them padding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, SIZES["vocab_size"], (batch, tokens), generator=generator)


def cache_of(model, **options):
    return KVCodecCache(model.config, **(SMALL | options))


@torch.inference_mode()
def logits(model, ids, cuts=(), cache=None, mask=None, positions=None):
    """Logits of all tokens, in forward passes that end at these tokens and at the end."""
    edges = [0, *cuts, ids.shape[1]]
    parts = []
    for start, stop in pairwise(edges):
        options = {} if cache is None else {CACHE: cache}
        if mask is not None:
            options["attention_mask"] = mask[:, :stop]
        if positions is not None:
            options["position_ids"] = positions[:, start:stop]
        parts.append(model(ids[:, start:stop], **options).logits.float())
    return torch.cat(parts, 1)


def generate(model, ids, cache=None, tokens=24, **options):
    """The new tokens of `generate`."""
    if cache is not None:
        options[CACHE] = cache
    options = {"do_sample": False, "max_new_tokens": tokens} | options
    options.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, **options)[:, ids.shape[1] :]


def left_padded(ids, lengths):
    """Tokens, mask and positions of a batch in which rows keep so many tokens, from the right."""
    mask = torch.zeros_like(ids)
    for row, length in zip(mask, lengths, strict=True):
        row[ids.shape[1] - length :] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return ids * mask, mask, positions


def relative(found, truth):
    """Largest difference, relative to the largest of the truth."""
    return float((found - truth).abs().max() / truth.abs().max())


def codec_blocks(cache):
    """Packed blocks of each layer, of the first row."""
    return [rows[0].keys.units for rows in cache.kv._sequences]


def hard_keys(model, offsets=(400.0, -250.0)):
    """Give two channels of every KV head a large constant offset, as Qwen2.5 has them.

    The channels turn slowest in the rotary embedding, so that the offset stays one.
    """
    config = model.config
    half = config.head_dim // 2
    with torch.no_grad():
        for layer in model.model.layers:
            bias = layer.self_attn.k_proj.bias.view(config.num_key_value_heads, config.head_dim)
            bias[:, half - 1] += offsets[0]
            bias[:, 2 * half - 1] += offsets[1]
    return model


def int4(center):
    """int4 keys, rotated and not equalized."""
    return kv.codec("int4", block=SMALL["block"], center=center, equalize=False)
