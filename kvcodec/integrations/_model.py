"""What the config of a model says of its layers, and which models are refused."""

from __future__ import annotations

from typing import Any

from kvcodec.integrations._extra import transformers

SUPPORTED = (
    "supported are decoders whose layers are full or sliding-window attention with keys and "
    "values of their own, such as Llama, Qwen2, Qwen3, Mistral, Gemma 2, Gemma 3 and GPT-OSS"
)
FULL, SLIDING = "full_attention", "sliding_attention"


def layers_of(config: Any) -> dict[str, list[Any]]:
    """`num_kv_heads`, `head_dim`, `value_head_dim` and `window`, each a list over the layers.

    Raises if the config is none, or of a model that is not supported.
    """
    if not isinstance(config, transformers.PretrainedConfig):
        raise TypeError(f"config must be that of a model, model.config, but is {type(config)}.")
    if config.is_encoder_decoder:
        raise _refused("an encoder-decoder model")
    try:
        return _layers(config.get_text_config(decoder=True))
    # What Transformers raises for an attribute that differs from layer to layer.
    except RuntimeError as error:
        reason = str(error).split("\n")[0].rstrip(".")
        raise _refused(f"a model whose layers differ in more than their sizes ({reason})") from None


def _layers(config: Any) -> dict[str, list[Any]]:
    """The sizes and windows of a decoder."""
    if _has_alibi(config):
        raise _refused("a model with ALiBi, a bias of attention by distance")
    if getattr(config, "kv_lora_rank", None) is not None:
        raise _refused("a model with multi-head latent attention")
    if getattr(config, "use_bidirectional_attention", False) or not getattr(
        config, "is_causal", True
    ):
        raise _refused("a model whose attention is not causal")
    shared = "reuse" in (getattr(config, "kv_sharing_modes", None) or ())
    if shared or getattr(config, "num_kv_shared_layers", None):
        raise _refused("a model with layers that share the keys and values of others")
    for name in ("num_hidden_layers", "num_attention_heads"):
        if not hasattr(config, name):
            raise _refused(f"a model without {name}")
    count = config.num_hidden_layers
    each = getattr(config, "per_layer_config", None) or [config] * count
    types = _layer_types(config, count)
    sizes = [_sizes(layer) for layer in each]
    windows = [
        layer.sliding_window if kind == SLIDING else None
        for layer, kind in zip(each, types, strict=True)
    ]
    names = ("num_kv_heads", "head_dim", "value_head_dim")
    return {
        **{name: list(x) for name, x in zip(names, zip(*sizes, strict=True), strict=True)},
        "window": windows,
    }


def _has_alibi(config: Any) -> bool:
    """Whether attention has linear biases, which Bloom has without a word in its config."""
    own = (config, getattr(config, "attn_config", None))
    return config.model_type == "bloom" or any(getattr(each, "alibi", False) for each in own)


def _refused(what: str) -> ValueError:
    return ValueError(
        f"config must be of a model that is supported, but is of {what}; {SUPPORTED}."
    )


def _layer_types(config: Any, count: int) -> list[str]:
    """The kind of each layer."""
    types = getattr(config, "layer_types", None)
    if types is None:
        if getattr(config, "attention_chunk_size", None) is not None:
            types = ["chunked_attention"] * count
        elif getattr(config, "sliding_window", None) is not None:
            types = [SLIDING] * count
        else:
            types = [FULL] * count
    for kind in types:
        if kind not in (FULL, SLIDING):
            raise _refused(f"a model with layers of {str(kind).replace('_', ' ')}")
    return list(types)


def _sizes(config: Any) -> tuple[int, int, int]:
    """KV heads, channels of a key and channels of a value."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    key_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return kv_heads, key_dim, getattr(config, "v_head_dim", None) or key_dim
