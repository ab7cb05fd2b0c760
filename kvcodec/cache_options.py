"""What a KVCache may be made of: checks of its arguments, one message each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kvcodec import _validate
from kvcodec.blocks import PAGE_UNITS, TILE
from kvcodec.codec import PRESETS, Codec, codec

CodecChoice = str | Codec | None
MOST_RESERVED = 2**24


def for_each_layer(num_layers: int) -> Callable[..., list[Any]]:
    """A function that checks a value for all layers, or one for each."""

    def each(value: Any, name: str, check: Callable[[Any, str], Any]) -> list[Any]:
        if isinstance(value, (list, tuple, np.ndarray)):
            if len(value) != num_layers:
                raise ValueError(
                    f"{name} must be one number or {num_layers}, one for each layer, "
                    f"but {len(value)} were given."
                )
            return [check(one, name) for one in value]
        return [check(value, name)] * num_layers

    return each


def check_head_dim(value: Any, name: str) -> int:
    """Channels of a vector."""
    return _validate.integer(value, name, 1, _validate.LARGEST_HEAD_DIM)


def check_layer_window(value: Any, name: str) -> int | None:
    """Tokens that a query sees, or None for all."""
    return None if value is None else _validate.token_count(value, name, 1)


def check_block(block: Any, name: str = "block") -> int:
    """Tokens that are packed at a time."""
    block = _validate.integer(block, name, 1, _validate.LARGEST_GROUP)
    if TILE % block and block % TILE:
        raise ValueError(f"{name} must be a divisor or a multiple of {TILE}, but is {block}.")
    return block


def codecs_of(
    choice: CodecChoice | Mapping[int, CodecChoice],
    side: str,
    num_layers: int,
    block: int,
    dims: list[int],
) -> list[Codec | None]:
    """The codec of each layer for one side, settled and with the cache's block."""
    if isinstance(choice, Mapping):
        if set(choice) != set(range(num_layers)):
            raise ValueError(
                f"{side} must name every layer from 0 to {num_layers - 1} once, "
                f"but names {sorted(choice)}."
            )
        chosen = [choice[layer] for layer in range(num_layers)]
    else:
        chosen = [choice] * num_layers
    return [_settled(one, side, block, dim) for one, dim in zip(chosen, dims, strict=True)]


def _settled(choice: CodecChoice, side: str, block: int, dim: int) -> Codec | None:
    if choice is None:
        return None
    if isinstance(choice, str):
        choice = codec(_validate.choice(choice, side, (*PRESETS, None)), block=block)
    elif not isinstance(choice, Codec):
        raise TypeError(f"{side} must be the name of a preset, a Codec or None, but is {choice!r}.")
    elif choice.block != block:
        raise ValueError(
            f"block must be that of the {side} codec, {choice.block}, but {block} was given."
        )
    settled = choice.for_side(side)
    settled.check_head_dim(dim, f"head_dim of the {side}s")
    return settled


def reserved_tokens(
    max_tokens: int | None,
    sinks: int,
    recent: int,
    block: int,
    rollback: int,
    window: int | None,
) -> int:
    """Packed tokens to reserve room for."""
    if max_tokens is None:
        return 0
    most = max(max_tokens - sinks - recent, 0)
    if window is None:
        return most
    # A page is given back once all of its tokens are out of reach.
    return min(most, window + rollback + block + PAGE_UNITS * max(TILE, block))
