"""The attention function and the mask function that are registered as "kvcodec".

A `KVCodecCache` hands the new keys and values to the model as `HandedOver`, which name their layer.
The attention function finds the layer there, appends and attends. Whatever else the model does with
them raises, so that another attention function never takes the new tokens for all tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from kvcodec.integrations._extra import torch
from kvcodec.integrations._padding import NewColumns

if TYPE_CHECKING:
    from kvcodec.integrations._layer import KVCodecLayer

NAME = "kvcodec"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
USE_BOTH = (
    'cache=KVCodecCache(model.config) and model.set_attn_implementation("kvcodec") go together'
)
COMPILE_PARTS = (
    "torch.compile may cover parts without attention, such as each layer.mlp, but not the model"
)
# What models hand on to every attention function and what has no bearing on its result.
IGNORED = frozenset(
    {
        "cache_position",
        "layer_idx",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "return_dict",
        "sliding_window",  # it is that of the mask
        "use_cache",
    }
)
_READABLE = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda")
)


class HandedOver(torch.Tensor):
    """New keys or values on their way from the cache to the attention function."""

    layer: KVCodecLayer
    tensor: torch.Tensor
    taken: bool

    @classmethod
    def of(cls, layer: KVCodecLayer, tensor: torch.Tensor) -> HandedOver:
        """Wrap a tensor without copying it."""
        wrapped = tensor.detach().as_subclass(cls)
        wrapped.layer, wrapped.tensor, wrapped.taken = layer, tensor, False
        return wrapped

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READABLE:
            return super().__torch_function__(func, types, args, kwargs or {})
        raise ValueError(
            f"cache is a KVCodecCache, whose keys and values only the attention function "
            f'"kvcodec" can read, but {getattr(func, "__name__", func)!r} was called on them; '
            f"{USE_BOTH}, and {COMPILE_PARTS}."
        )


def mask(
    batch_size: int,
    q_length: int,
    q_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **_: Any,
) -> NewColumns:
    """What the attention function needs to know of a mask: a few numbers instead of a matrix.

    Parameters are those of Transformers' mask functions. Raises unless the mask is causal, over
    all tokens or a sliding window, with padding on the left of the new tokens.
    """
    if torch.compiler.is_compiling():
        raise ValueError(f'attention "kvcodec" cannot be compiled: {COMPILE_PARTS}.')
    if use_vmap or not allow_is_causal_skip:
        raise ValueError(
            'attention "kvcodec" is causal, over all tokens or over a sliding window, but the '
            "model asked for another mask: packed sequences, chunks, bidirectional parts and "
            "masks of one's own are not supported."
        )
    start = int(q_offset)
    if attention_mask is None:
        return NewColumns(start, q_length, None, None, local_size)
    real = attention_mask.detach().cpu().numpy().astype(bool)
    if real.shape != (batch_size, start + q_length):
        raise ValueError(
            f"attention_mask must cover the {start} tokens of cache and the {q_length} "
            f"new ones, {(batch_size, start + q_length)}, but has shape {real.shape}."
        )
    past, new = real[:, :start], real[:, start:]
    if (new[:, :-1] & ~new[:, 1:]).any():
        raise ValueError(
            "attention_mask must have padding only on the left of the new tokens "
            '(tokenizer.padding_side = "left"), but has some after a token.'
        )
    return NewColumns(
        start,
        q_length,
        None if past.all() else past,
        None if new.all() else new.sum(axis=1),
        local_size,
    )


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: NewColumns | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    position_ids: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Append the new keys and values to their layer and attend over all of its tokens.

    Parameters are those of Transformers' attention functions; returns (batch, tokens, heads,
    head_dim) and no weights.
    """
    layer = _layer_of(key, value)
    _check_call(module, dropout, is_causal, others)
    _check_layers(module, len(layer.owner.layers))
    layer.check_module(module)
    columns = _checked_columns(attention_mask, layer)
    _check_positions(position_ids, columns)
    result = layer.append_attend(
        floats(query, "query"),
        floats(key.tensor, "key"),
        floats(value.tensor, "value"),
        columns,
        scale=scaling,
        softcap=softcap,
        return_lse=s_aux is not None,
    )
    key.taken = True
    if s_aux is not None:
        # A logit more in the softmax, whose value is 0.
        sink = floats(s_aux, "s_aux").reshape(1, -1, 1)
        result = result.output * expit(result.log_sum_exp - sink)[..., None]
    output = torch.from_numpy(result).transpose(1, 2).contiguous()
    return output.to(query.dtype), None


def floats(x: torch.Tensor, name: str) -> NDArray[np.float32]:
    """A tensor as an array of float32, without a copy where that is possible."""
    check_tensor(x, name)
    return x.detach().float().numpy()


def check_tensor(x: torch.Tensor, name: str) -> None:
    """Raise unless a tensor can be taken as an array."""
    if x.device.type != "cpu":
        raise ValueError(
            f'attention "kvcodec" runs on the CPU, but {name} is on {x.device}; '
            'move the model with model.to("cpu").'
        )
    if x.dtype not in DTYPES:
        raise ValueError(
            f'attention "kvcodec" computes in float32, for models in float32, bfloat16 or '
            f"float16, but {name} is {x.dtype}."
        )
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f'attention "kvcodec" has no gradient, but {name} requires one; '
            "run the model in torch.no_grad() or torch.inference_mode()."
        )


def _layer_of(key: torch.Tensor, value: torch.Tensor) -> KVCodecLayer:
    if not isinstance(key, HandedOver) or not isinstance(value, HandedOver):
        raise ValueError(
            f'attention "kvcodec" needs the keys and values of a KVCodecCache, but was given '
            f"others; {USE_BOTH}, and generation that runs the model with other caches too "
            "(guidance_scale, assistant_early_exit) is not supported."
        )
    if key.taken:
        raise ValueError(
            'attention "kvcodec" must be called once for the keys and values that the cache '
            "handed over, but was called again; recomputing them is not supported."
        )
    return key.layer


def _check_call(
    module: torch.nn.Module, dropout: float, is_causal: bool | None, others: dict[str, Any]
) -> None:
    if dropout:
        raise ValueError(
            f'dropout must be 0 with attention "kvcodec", but is {dropout}; call model.eval().'
        )
    if is_causal is False or not getattr(module, "is_causal", True):
        raise ValueError('is_causal must be true with attention "kvcodec", but is false.')
    if others.get("use_cache") is False:
        raise ValueError(
            'use_cache must be true with attention "kvcodec", but is false: generation would '
            "append all earlier tokens to cache again."
        )
    wants_weights = getattr(getattr(module, "config", None), "output_attentions", False)
    if wants_weights or others.get("output_attentions"):
        raise ValueError(
            'output_attentions must be false with attention "kvcodec", which never holds the '
            'attention weights; use attention "eager" and no KVCodecCache for them.'
        )
    for name, given in others.items():
        if name not in IGNORED and given is not None and given is not False:
            raise ValueError(
                f'{name} must be left out with attention "kvcodec", which does not know it, but '
                f"{type(given).__name__} was given."
            )


def _check_layers(module: torch.nn.Module, held: int) -> None:
    count = getattr(getattr(module, "config", None), "num_hidden_layers", held)
    if count != held:
        raise ValueError(
            f"config must be that of the model: cache has {held} layers, but the model {count}."
        )


def _checked_columns(columns: Any, layer: KVCodecLayer) -> NewColumns:
    if not isinstance(columns, NewColumns):
        raise ValueError(
            "attention_mask must be left out or be of shape (batch, tokens), 1 for a token and 0 "
            f'for padding, but {_shape(columns)} was given to attention "kvcodec".'
        )
    if columns.window != layer.window:
        raise ValueError(
            f"config must be that of the model: its sliding window in layer {layer.index} is "
            f"{layer.window}, but the model asked for {columns.window}."
        )
    return columns


def _shape(given: Any) -> str:
    return f"one of shape {tuple(given.shape)}" if hasattr(given, "shape") else repr(given)


def _check_positions(position_ids: torch.Tensor | None, columns: NewColumns) -> None:
    """Positions of the tokens of a row must ascend; several sequences in a row start again."""
    if position_ids is None or position_ids.ndim != 2 or columns.count == 1:
        return
    falls = np.diff(position_ids.numpy(), axis=1) <= 0
    if columns.lengths is not None:
        first = columns.count - columns.lengths
        falls = falls & (np.arange(columns.count - 1) >= first[:, None])
    if falls.any():
        raise ValueError(
            "position_ids must ascend along a row, but do not: several sequences packed into one "
            'row are not supported by attention "kvcodec".'
        )
