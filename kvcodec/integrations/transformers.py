"""A KV cache for models of Hugging Face's Transformers, and attention over its packed bytes.

Importing this module registers the attention function "kvcodec" with Transformers.
"""

from __future__ import annotations

import json
import operator
import os
import zlib
from collections import abc
from contextlib import suppress
from typing import Any

import numpy as np

from kvcodec import _validate, storage
from kvcodec.cache import KVCache
from kvcodec.cache_options import CodecChoice
from kvcodec.integrations._attention import NAME, attention, mask
from kvcodec.integrations._extra import torch, transformers
from kvcodec.integrations._layer import KVCodecLayer
from kvcodec.integrations._model import layers_of
from kvcodec.integrations._padding import Columns

__all__ = ["KVCodecCache"]

NOTES = "kvcodec.transformers"
NOTES_VERSION = 1

transformers.AttentionInterface.register(NAME, attention)
transformers.AttentionMaskInterface.register(NAME, mask)


class KVCodecCache(transformers.Cache):
    """A packed KV cache for a model of Transformers, used with attention ``"kvcodec"``.

    Holds one `KVCache` of all layers; layers with a sliding window are rings in it. Padding on the
    left of a batch does not enter it. The attention function, which importing this module
    registers, appends new tokens and attends over the packed bytes; either without the other
    raises.

    Parameters
    ----------
    config : transformers.PretrainedConfig
        The config of the model.
    key, value : str, Codec, None, or mapping from layer to these, default "int4"
        Codec of each side, as in `KVCache`.
    sinks, recent, block, max_tokens, query_bits, probability_bits, backend
        As in `KVCache`. A query sees the sinks of a layer with a sliding window only as long as
        they lie in it, like every other token.
    rollback : int, default 0
        Tokens that a crop may take back without a trace, as in `KVCache`. Assisted decoding takes
        back drafts of tokens: give at least the longest draft (``num_assistant_tokens``, 20 by
        default, or ``prompt_lookup_num_tokens``).
    exact_dtype : {"float32", "bfloat16"}, optional
        How exact tokens are kept; by default bfloat16 for a model that computes in bfloat16, which
        loses nothing, and float32 for others.

    Attributes
    ----------
    kv : KVCache
        What holds the tokens. Made anew when the first tokens of a batch of another size come.

    Raises
    ------
    TypeError
        If config is no config.
    ValueError
        If the model is not supported, or an argument, or a combination of them, is not allowed.

    Examples
    --------
    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from kvcodec.integrations.transformers import KVCodecCache
    >>> config = LlamaConfig(
    ...     vocab_size=100, hidden_size=128, intermediate_size=64, num_hidden_layers=2,
    ...     num_attention_heads=4, num_key_value_heads=2,
    ... )
    >>> model = LlamaForCausalLM(config).eval()
    >>> model.set_attn_implementation("kvcodec")
    >>> cache = KVCodecCache(model.config, key="int4", value="int4")
    >>> with torch.inference_mode():
    ...     output = model(torch.arange(50)[None], cache=cache)
    >>> cache.get_seq_length()
    50
    """

    def __init__(
        self,
        config: Any,
        key: CodecChoice | abc.Mapping[int, CodecChoice] = "int4",
        value: CodecChoice | abc.Mapping[int, CodecChoice] = "int4",
        *,
        sinks: int = 4,
        recent: int = 64,
        block: int = 64,
        rollback: int = 0,
        max_tokens: int | None = None,
        exact_dtype: str | None = None,
        query_bits: int | None = 8,
        probability_bits: int | str | None = "auto",
        backend: str | None = None,
    ) -> None:
        sizes = layers_of(config)
        kv = KVCache(
            len(sizes["window"]),
            key=key,
            value=value,
            **sizes,
            sinks=sinks,
            recent=recent,
            block=block,
            rollback=rollback,
            max_tokens=max_tokens,
            exact_dtype="float32" if exact_dtype is None else exact_dtype,
            query_bits=query_bits,
            probability_bits=probability_bits,
            backend=backend,
        )
        self._hold(kv, exact_dtype, _model_type(config))

    def _hold(self, kv: KVCache, exact_dtype: str | None, model_type: str) -> None:
        """Be a cache of these tokens."""
        windows = kv.config["window"]
        layers = [KVCodecLayer(self, index, window) for index, window in enumerate(windows)]
        super().__init__(layers=layers)
        self.kv = kv
        self._exact_dtype = exact_dtype
        self._model_type = model_type

    def _begin(self, batch: int, dtype: torch.dtype) -> None:
        """Fit the empty cache to a batch; one with tokens keeps its rows."""
        if self._holds_tokens():
            if batch != self.kv.batch:
                raise ValueError(
                    f"cache must have as many rows as the batch, {batch}, but has "
                    f"{self.kv.batch}; see batch_repeat_interleave and batch_select_indices."
                )
            return
        exact_dtype = self._exact_dtype
        if exact_dtype is None:
            exact_dtype = "bfloat16" if dtype == torch.bfloat16 else "float32"
        config = self.kv.config
        if (config["batch"], config["exact_dtype"]) != (batch, exact_dtype):
            self.kv = KVCache(**{**config, "batch": batch, "exact_dtype": exact_dtype})

    def _check_even(self) -> None:
        """Raise unless every layer has seen as many columns."""
        counts = [layer.columns.count for layer in self.layers]
        if min(counts) != max(counts):
            raise ValueError(
                f"cache must hold as many tokens in every layer, but a forward pass was "
                f"interrupted and layers hold {min(counts)} to {max(counts)}; crop(0) makes them "
                "equal."
            )

    # What it holds

    @property
    def rollback(self) -> int:
        """Tokens that a crop may take back without a trace."""
        return self.kv.config["rollback"]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, as in `KVCache`."""
        return self.kv.nbytes

    def memory(self) -> dict[str, Any]:
        """Bytes by layer, side and part, and their ratio to float16.

        Returns
        -------
        dict
            As of `KVCache.memory`.
        """
        return self.kv.memory()

    @property
    def batch_size(self) -> int:
        """Rows, or -1 as long as there is no token."""
        return self.kv.batch if self._holds_tokens() else -1

    def _holds_tokens(self) -> bool:
        """Whether a layer does; after an interrupted forward pass others may not."""
        return any(layer.columns.count for layer in self.layers)

    def _columns(self) -> int:
        """Columns that every layer has seen."""
        return min(layer.columns.count for layer in self.layers)

    # Changing what it holds

    def crop(self, tokens_to_remove: int) -> None:
        """Take tokens back from the end; 0 evens out layers after an interrupted forward pass.

        At most `rollback` tokens back, this leaves what a cache that never saw them would hold, bit
        for bit; further back, codes stay as they are.

        Parameters
        ----------
        tokens_to_remove : int
            How many, as a negative number, or 0.

        Raises
        ------
        ValueError
            If it is no such number, there are not so many tokens, a sliding window would need
            tokens that are gone, or assisted decoding, since the last `reset`, takes back more than
            `rollback`; the cache is then as it was.
        """
        with suppress(TypeError):  # of a tensor with one number, as assisted decoding gives it
            tokens_to_remove = operator.index(tokens_to_remove)
        held = self._columns()
        longest = max(layer.columns.count for layer in self.layers)
        tokens_to_remove = _validate.integer(tokens_to_remove, "tokens_to_remove", -held, 0)
        kept = held + tokens_to_remove
        if self.layers[0].record_past and held - kept > self.rollback:
            raise ValueError(
                f"rollback must be at least the tokens that assisted decoding takes back, "
                f"{held - kept}, but is {self.rollback}; make the cache with more."
            )
        if kept == longest:
            return
        if kept == 0:
            self._forget()
            return
        columns = [layer.columns.cropped(kept) for layer in self.layers]
        self.kv.crop(columns[0].lengths(self.kv.batch))
        for layer, seen in zip(self.layers, columns, strict=True):
            layer.columns = seen

    def reset(self) -> None:
        """Forget all tokens and assisted decoding; the next batch may have another size."""
        self._forget()
        for layer in self.layers:
            layer.record_past = False

    def _forget(self) -> None:
        self.kv.reset()
        for layer in self.layers:
            layer.columns = Columns()
            layer.module = None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Continue the chosen rows, as beam search does; codes are not changed.

        Parameters
        ----------
        beam_idx : torch.Tensor or array-like of int, shape (batch,)
            For each new row the old one that it continues.

        Raises
        ------
        ValueError
            If there are not as many indices of rows as rows.
        """
        self._take(beam_idx, self.kv.reorder)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the given rows of the batch.

        Parameters
        ----------
        indices : torch.Tensor or array-like of int, shape (new batch,)
            Rows to keep; at least one.

        Raises
        ------
        ValueError
            If there is no index, or one is no row.
        """
        self._take(indices, self.kv.select)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Put copies of each row next to it; they share full pages.

        Parameters
        ----------
        repeats : int
            How often each row is there afterwards, at least 1.

        Raises
        ------
        ValueError
            If repeats is no such number.
        """
        repeats = _validate.integer(repeats, "repeats", 1)
        indices = np.repeat(np.arange(self.kv.batch), repeats)
        self._take(indices, lambda _: self.kv.repeat(repeats))

    def _take(self, indices: Any, change: abc.Callable[[Any], None]) -> None:
        if not self._holds_tokens():
            return  # the size of the batch is not known yet
        indices = np.asarray(indices.cpu() if isinstance(indices, torch.Tensor) else indices)
        change(indices)
        for layer in self.layers:
            layer.columns = layer.columns.rows(indices)

    def activate_past_recording(self) -> None:
        """Assisted decoding says by this that it will take tokens back; it holds until `reset`.

        Raises
        ------
        ValueError
            If `rollback` is 0.
        """
        if not self.rollback:
            raise ValueError(
                "rollback must be at least the longest draft for assisted decoding, but is 0; "
                "make the cache with, for instance, rollback=20."
            )
        super().activate_past_recording()
        for layer in self.layers:
            layer.record_past = True

    # Copies and files

    def copy(self) -> KVCodecCache:
        """A cache that continues on its own; the packed pages are shared until written to.

        Returns
        -------
        KVCodecCache
            The copy.
        """
        copied = object.__new__(type(self))
        copied.__setstate__(self.__getstate__() | {"kv": self.kv.copy()})
        for layer, own in zip(copied.layers, self.layers, strict=True):
            layer.module = own.module
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {
            "kv": self.kv,
            "exact_dtype": self._exact_dtype,
            "model_type": self._model_type,
            "columns": [layer.columns.cropped(layer.columns.count) for layer in self.layers],
            "record_past": self.layers[0].record_past,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._hold(state["kv"], state["exact_dtype"], state["model_type"])
        for layer, columns in zip(self.layers, state["columns"], strict=True):
            layer.columns, layer.record_past = columns, state["record_past"]

    def __copy__(self) -> KVCodecCache:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCodecCache:
        return self.copy()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tokens of all layers to one file, as a whole or not at all.

        It is a file of `KVCache.save` with a note on padding and on the kind of model.

        Parameters
        ----------
        path : path-like
            The file; an existing one is replaced once the new one is complete.

        Raises
        ------
        ValueError
            If layers differ in length after an interrupted forward pass.
        ImportError
            If safetensors is not installed.
        OSError
            If the file cannot be written.
        """
        columns = [layer.columns.to_config() for layer in self.layers]
        if any(seen != columns[0] for seen in columns):
            raise ValueError(
                "cache must hold as many tokens in every layer to be saved, but a "
                "forward pass was interrupted; crop(0) makes them equal."
            )
        notes = {"version": NOTES_VERSION, "model_type": self._model_type, **columns[0]}
        storage.save(self.kv, path, {NOTES: storage.sealed(notes)})

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], config: Any, *, backend: str | None = None
    ) -> KVCodecCache:
        """Read a cache that `save` wrote; it continues byte for byte like the saved one.

        Two models of one kind and shape cannot be told apart: load it into the one that made it.

        Parameters
        ----------
        path : path-like
            The file.
        config : transformers.PretrainedConfig
            The config of the model.
        backend : {"auto", "fast", "reference"}, optional
            Which twin runs.

        Returns
        -------
        KVCodecCache
            The cache.

        Raises
        ------
        TypeError
            If config is no config.
        ValueError
            If the file is damaged or of another kind, or of a model that does not fit the config.
        ImportError
            If safetensors is not installed.
        OSError
            If the file cannot be read.
        """
        sizes, model_type = layers_of(config), _model_type(config)
        kv = KVCache.load(path, backend=backend)
        kind, columns = _read_notes(path, kv)
        stored = kv.config
        found = {"model_type": kind, **{name: stored[name] for name in sizes}}
        for name, wanted in {"model_type": model_type, **sizes}.items():
            if found[name] != wanted:
                raise ValueError(
                    f"config must be of a model like the one whose cache {os.fspath(path)!r} is: "
                    f"its {name} is {wanted}, but the file has {found[name]}."
                )
        loaded = object.__new__(cls)
        loaded._hold(kv, stored["exact_dtype"], model_type)
        for layer in loaded.layers:
            layer.columns = columns.cropped(columns.count)
        return loaded

    def __repr__(self) -> str:
        return repr(self.kv).replace("KVCache", "KVCodecCache", 1)

    def _repr_html_(self) -> str:
        return self.kv._repr_html_()


def _model_type(config: Any) -> str:
    return str(config.get_text_config(decoder=True).model_type)


def _read_notes(path: str | os.PathLike[str], kv: KVCache) -> tuple[Any, Columns]:
    """Kind of model and columns, from the note that `save` put into the file."""
    checksum, _, text = storage.metadata(path).get(NOTES, "").partition(" ")
    if f"{zlib.crc32(text.encode()):08x}" != checksum:
        raise ValueError(
            f"path must be a file written by KVCodecCache.save, but {os.fspath(path)!r} has no "
            f"such note."
        )
    try:
        notes = json.loads(text)
        version, kind = notes.pop("version"), notes.pop("model_type")
        columns = Columns.from_config(notes, kv.batch)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        version = None
    if version != NOTES_VERSION or (kv.seq_lengths != columns.lengths(kv.batch)).any():
        raise ValueError(
            f"path must be an undamaged file of KVCodecCache.save with a note of version "
            f"{NOTES_VERSION}, but the note of {os.fspath(path)!r} is wrong or of another version."
        )
    return kind, columns
