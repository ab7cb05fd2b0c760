"""The caches that decoding on a model is measured with, and the memory that each takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvcodec.evaluation.codecs import CodecPair
from kvcodec.evaluation.language_model import ChunkOptions, Run, exact_run, packed_run
from kvcodec.evaluation.models import LanguageModel

__all__ = ["DTYPES", "DYNAMIC", "CacheKind", "cache_bytes", "cache_kinds", "copied", "in_dtypes"]

DTYPES = ("float32", "bfloat16")
DYNAMIC = "DynamicCache"
WINDOWS = ChunkOptions(sinks=4, recent=64)
# Of each library the axis that the documentation of Transformers recommends.
QUANTIZED: Mapping[str, Mapping[str, Any]] = {
    "quanto": {"axis_key": 0, "axis_value": 0},
    "hqq": {"axis_key": 1, "axis_value": 1},
}


@dataclass(frozen=True, eq=False)
class CacheKind:
    """A cache that a model in some number type decodes with.

    Attributes
    ----------
    name : str
        The class, with the codec or the library that packs.
    dtype : {"float32", "bfloat16"}
        What the weights of the model are in, and what it computes in.
    start : callable
        Gives a `Run` with an empty cache; raises a ValueError if a codec does not fit the model.
    """

    name: str
    dtype: str
    start: Callable[[], Run]


def in_dtypes(model: LanguageModel) -> dict[str, LanguageModel]:
    """The float32 model, and a copy of it in bfloat16."""
    import torch

    copies = {"bfloat16": replace(model, model=deepcopy(model.model).to(torch.bfloat16))}
    return {"float32": model, **copies}


def cache_kinds(
    models: Mapping[str, LanguageModel], pairs: Sequence[CodecPair]
) -> tuple[list[CacheKind], dict[str, str]]:
    """The kinds that this model can decode with, and why others cannot be measured."""
    kinds = []
    missing: dict[str, str] = {}
    for dtype, model in models.items():
        kinds.append(CacheKind(DYNAMIC, dtype, partial(exact_run, model)))
        for pair in pairs:
            start = partial(packed_run, model, pair, WINDOWS)
            kinds.append(CacheKind(f"KVCodecCache {pair.name}", dtype, start))
        for library, options in QUANTIZED.items():
            name = f"QuantizedCache {library}"
            start = partial(_quantized_run, model, library, options)
            try:
                start()
            # What is missing or refused raises errors of many kinds, all of which are reasons.
            except Exception as error:
                missing[name] = " ".join(str(error).split()) or type(error).__name__
            else:
                kinds.append(CacheKind(name, dtype, start))
    return kinds, missing


def _quantized_run(model: LanguageModel, library: str, options: Mapping[str, Any]) -> Run:
    """The model with Transformers' own packed cache of 4 bits."""
    import transformers

    cache = transformers.QuantizedCache(library, model.model.config, nbits=4, **options)
    return Run(model.model, model.exact_attention, cache)


def copied(run: Run) -> Run:
    """A run that continues with a copy of the cache.

    Caches of Transformers replace their tensors and never write to them, so that copies share
    them; packed tensors of other libraries cannot be copied at all.
    """
    if hasattr(run.cache, "kv"):
        return Run(run.model, run.attention, deepcopy(run.cache))
    cache = copy(run.cache)
    cache.layers = [copy(layer) for layer in run.cache.layers]
    return Run(run.model, run.attention, cache)


def cache_bytes(cache: Any) -> int:
    """Bytes of all buffers of a cache, room that is not filled yet included."""
    own = getattr(cache, "nbytes", None)
    if own is not None:
        return int(own)
    found = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for layer in cache.layers
        for tensor in _tensors(vars(layer))
    }
    return sum(found.values())


def _tensors(content: Any) -> Iterator[Any]:
    """All plain tensors in dicts, sequences and tensors that are made of others."""
    import torch

    if isinstance(content, torch.Tensor):
        if hasattr(content, "__tensor_flatten__"):
            names, _ = content.__tensor_flatten__()
            for name in names:
                yield from _tensors(getattr(content, name))
        else:
            yield content
    elif isinstance(content, Mapping):
        yield from _tensors(list(content.values()))
    elif isinstance(content, list | tuple):
        for each in content:
            yield from _tensors(each)
