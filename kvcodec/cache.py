"""KVCache: the keys and values of all layers of a batch of sequences, packed."""

from __future__ import annotations

import os
from collections import abc
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcodec import _backend, _validate, cache_report
from kvcodec.attention import (
    AttentionResult,
    check_probability_bits,
    check_query_bits,
    check_window,
    softmax_scale,
)
from kvcodec.blocks import STORED_AS
from kvcodec.cache_options import (
    MOST_RESERVED,
    CodecChoice,
    check_block,
    check_head_dim,
    check_layer_window,
    codecs_of,
    for_each_layer,
    reserved_tokens,
)
from kvcodec.sequence import Layer, Sequence

__all__ = ["KVCache"]

Floats = NDArray[np.float32]


class KVCache:
    """A transformer's KV cache in packed form, with attention over it.

    Each layer of each sequence keeps its first `sinks` tokens exact, packs the body in blocks, and
    keeps the newest `recent` to ``recent + block - 1`` tokens exact. A token is encoded once and
    its codes never change; any chunking of the same tokens gives the same bytes.

    Parameters
    ----------
    num_layers : int
        Layers of the model.
    num_kv_heads : int or sequence of int
        KV heads, for all layers or for each.
    head_dim : int or sequence of int
        Channels of a key (and of a value, unless `value_head_dim` is given), for all or each layer.
    key, value : str, Codec, None, or mapping from layer to these, default "int4"
        Codec of each side; None leaves it in `exact_dtype`. A mapping must name every layer.
    sinks : int, default 4
        Exact tokens at the beginning.
    recent : int, default 64
        Newest tokens that stay exact.
    block : int, default 64
        Tokens that are packed at a time: a divisor or a multiple of 64, and a multiple of every
        codec's groups of tokens; a `Codec` must be made with the same. 1 packs token by token,
        neither centered nor equalized, which costs accuracy.
    rollback : int, default 0
        A crop to at most so many tokens below the longest length that a sequence has had leaves
        exactly what a fresh cache of the remaining tokens would hold; exact values are kept for it.
    batch : int, default 1
        Sequences.
    max_tokens : int, optional
        Reserve packed memory for so many tokens a sequence (in ring mode for those that it can hold
        at a time), at most 2^24, and raise when more come. Evicted tokens do not count; those that
        have left a ring do, so leave it out to decode without end.
    window : int or sequence of int or None, optional
        Ring mode, of all layers or (a number or None for each) of some: a query sees the sinks,
        itself and the ``window - 1`` tokens before; pages that no query can see any more are given
        back, or used again where they were reserved, and nothing is moved.
    exact_dtype : {"float32", "bfloat16"}, default "float32"
        How exact tokens, and layers without a codec, are kept. bfloat16 takes half the memory and
        is exact for a model that computes in it; other values are rounded to the nearest, and all
        that is done with them later, packing included, sees the rounded ones.
    value_head_dim : int or sequence of int, optional
        Channels of a value, if they differ from those of a key.
    query_bits, probability_bits
        As in `attention`.
    backend : {"auto", "fast", "reference"}, optional
        Which twin runs; see `config_context`.

    Raises
    ------
    ValueError
        If an argument, or a combination of them, is not allowed.

    References
    ----------
    G. Xiao et al., attention sinks, arXiv:2309.17453; Z. Liu et al., KIVI, arXiv:2402.02750, for
    the exact recent tokens.

    Examples
    --------
    >>> import numpy as np
    >>> import kvcodec as kv
    >>> cache = kv.KVCache(1, num_kv_heads=2, head_dim=64, key="int4", value="lm2")
    >>> rng = np.random.default_rng(0)
    >>> k, v = rng.standard_normal((2, 1, 2, 500, 64), dtype=np.float32)
    >>> q = rng.standard_normal((1, 8, 500, 64), dtype=np.float32)
    >>> cache.append_attend(0, q, k, v).shape
    (1, 8, 500, 64)
    >>> cache
    <KVCache of 500 tokens: 1 layer, batch 1, int4 keys (equalized), lm2 values, ...>
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int | abc.Sequence[int],
        head_dim: int | abc.Sequence[int],
        key: CodecChoice | abc.Mapping[int, CodecChoice] = "int4",
        value: CodecChoice | abc.Mapping[int, CodecChoice] = "int4",
        *,
        sinks: int = 4,
        recent: int = 64,
        block: int = 64,
        rollback: int = 0,
        batch: int = 1,
        max_tokens: int | None = None,
        window: int | abc.Sequence[int | None] | None = None,
        exact_dtype: str = "float32",
        value_head_dim: int | abc.Sequence[int] | None = None,
        query_bits: int | None = 8,
        probability_bits: int | str | None = "auto",
        backend: str | None = None,
    ) -> None:
        num_layers = _validate.integer(num_layers, "num_layers", 1)
        each = for_each_layer(num_layers)
        heads = each(num_kv_heads, "num_kv_heads", lambda x, name: _validate.integer(x, name, 1))
        dims = each(head_dim, "head_dim", check_head_dim)
        value_dims = (
            dims
            if value_head_dim is None
            else each(value_head_dim, "value_head_dim", check_head_dim)
        )
        self._max_tokens = (
            None
            if max_tokens is None
            else _validate.integer(max_tokens, "max_tokens", 1, MOST_RESERVED)
        )
        exact = {
            "sinks": _validate.token_count(sinks, "sinks"),
            "recent": _validate.token_count(recent, "recent"),
            "block": check_block(block),
            "rollback": _validate.token_count(rollback, "rollback"),
        }
        windows = each(window, "window", check_layer_window)
        reserves = [reserved_tokens(self._max_tokens, **exact, window=x) for x in windows]
        exact["exact_dtype"] = _validate.choice(exact_dtype, "exact_dtype", tuple(STORED_AS))
        batch = _validate.integer(batch, "batch", 1)
        keys = codecs_of(key, "key", num_layers, block, dims)
        values = codecs_of(value, "value", num_layers, block, value_dims)
        self._query_bits = check_query_bits(query_bits)
        bits = check_probability_bits(probability_bits, 8)
        self._probability_bits = "auto" if isinstance(probability_bits, str) else bits
        self._usual_options = [
            (
                softmax_scale(None, dim),
                None,
                self._query_bits,
                check_probability_bits(probability_bits, 4 if codec is None else codec.bits),
            )
            for dim, codec in zip(dims, values, strict=True)
        ]
        self._backend = backend
        _backend.active_backend(backend)
        self._layers = [
            Layer(*sizes, **exact, window=window, reserve=reserve)
            for *sizes, window, reserve in zip(
                heads, dims, value_dims, keys, values, windows, reserves, strict=True
            )
        ]
        self._sequences = [[Sequence(layer) for _ in range(batch)] for layer in self._layers]

    # What it holds

    @property
    def num_layers(self) -> int:
        """Layers."""
        return len(self._layers)

    @property
    def batch(self) -> int:
        """Sequences."""
        return len(self._sequences[0])

    @property
    def seq_lengths(self) -> NDArray[np.int64]:
        """Tokens of each sequence in each layer, int64 (layers, batch)."""
        return np.array([[row.length for row in rows] for rows in self._sequences], dtype=np.int64)

    @property
    def seq_length(self) -> int:
        """Tokens of the longest sequence; evicted ones do not count, those out of a ring do."""
        return int(self.seq_lengths.max())

    def __len__(self) -> int:
        return self.seq_length

    def __bool__(self) -> bool:
        return True  # an empty cache is a cache

    @property
    def config(self) -> dict[str, Any]:
        """The arguments that make an empty cache like this one: ``KVCache(**cache.config)``."""
        first = self._layers[0]
        sizes = {
            "num_kv_heads": [layer.kv_heads for layer in self._layers],
            "head_dim": [layer.key_dim for layer in self._layers],
            "value_head_dim": [layer.value_dim for layer in self._layers],
            "key": {index: layer.key for index, layer in enumerate(self._layers)},
            "value": {index: layer.value for index, layer in enumerate(self._layers)},
            "window": [layer.window for layer in self._layers],
        }
        shared = ("sinks", "recent", "block", "rollback", "exact_dtype")
        own = ("max_tokens", "query_bits", "probability_bits", "backend")
        return {
            "num_layers": self.num_layers,
            **sizes,
            **{name: getattr(first, name) for name in shared},
            "batch": self.batch,
            **{name: getattr(self, f"_{name}") for name in own},
        }

    @property
    def capacity(self) -> int | None:
        """The most tokens a sequence may have: `max_tokens`, or None for no limit."""
        return self._max_tokens

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, room that is not filled yet included; shared pages count once."""
        return self.memory()["total"]

    def memory(self) -> dict[str, Any]:
        """Bytes by layer, side and part, and their ratio to float16.

        Returns
        -------
        dict
            ``total``; ``fp16``, what the tokens that the next queries may see would take in
            float16; ``ratio``, which is fp16 / total; and ``layers``: for each layer the same three
            and, under "key" and "value", the bytes of "sinks", "body" and "tail" (and, of keys, of
            the "statistics" that equalize them) over all sequences. Pages that copies share count
            once.

        Examples
        --------
        >>> import kvcodec as kv
        >>> memory = kv.KVCache(1, 2, 64).memory()
        >>> memory["fp16"], list(memory["layers"][0]["value"])
        (0, ['sinks', 'body', 'tail'])
        """
        return cache_report.memory_of(self._layers, self._sequences)

    def keys(self, layer: int) -> Floats:
        """Decoded keys as the next query would see them, for inspection.

        In ring mode these are fewer than `seq_length`.

        Parameters
        ----------
        layer : int
            The layer.

        Returns
        -------
        ndarray of float32, shape (batch, kv_heads, tokens, head_dim)
            Rows shorter than the longest are padded with zeros on the left.

        Raises
        ------
        ValueError
            If there is no such layer.

        Examples
        --------
        >>> import kvcodec as kv
        >>> kv.KVCache(1, 2, 64).keys(0).shape
        (1, 2, 0, 64)
        """
        return self._decoded(layer, "key")

    def values(self, layer: int) -> Floats:
        """Decoded values as the next query would see them, for inspection.

        In ring mode these are fewer than `seq_length`.

        Parameters
        ----------
        layer : int
            The layer.

        Returns
        -------
        ndarray of float32, shape (batch, kv_heads, tokens, value head_dim)
            Rows shorter than the longest are padded with zeros on the left.

        Raises
        ------
        ValueError
            If there is no such layer.

        Examples
        --------
        >>> import kvcodec as kv
        >>> kv.KVCache(1, 2, 64, value_head_dim=32).values(0).shape
        (1, 2, 0, 32)
        """
        return self._decoded(layer, "value")

    # Appending and attending

    def append(
        self, layer: int, k: ArrayLike, v: ArrayLike, *, lengths: ArrayLike | None = None
    ) -> None:
        """Add tokens to a layer.

        Keys are not equalized if no queries of the first tokens are given: see `append_attend`.

        Parameters
        ----------
        layer : int
            The layer.
        k : array_like of float, shape (batch, kv_heads, tokens, head_dim)
            Keys, after the rotary embedding.
        v : array_like of float, shape (batch, kv_heads, tokens, value head_dim)
            Values.
        lengths : array_like of int, shape (batch,), optional
            For a batch that is padded on the left: how many tokens of each row, from the right, are
            real; the others may hold anything. Give the same for every layer.

        Raises
        ------
        ValueError
            If shapes do not fit, a value is not finite, or `max_tokens` would be exceeded; the
            cache is then as it was.
        TypeError
            If an array does not hold floats.

        Examples
        --------
        >>> import numpy as np
        >>> import kvcodec as kv
        >>> cache = kv.KVCache(1, 2, 64)
        >>> cache.append(0, np.ones((1, 2, 10, 64)), np.ones((1, 2, 10, 64)))
        >>> len(cache)
        10
        """
        rows, kernels = self._rows(layer), _backend.resolve(self._backend)
        k, v, real = self._new_tokens(layer, k, v, lengths, kernels)
        with _all_or_nothing(map(Sequence.mark, rows, real)):
            for index, row in enumerate(rows):
                row.append(*_last(real[index], index, k, v), None, kernels)
                row.trim()

    def attend(
        self,
        layer: int,
        q: ArrayLike,
        *,
        scale: float | None = None,
        causal: bool = True,
        softcap: float | None = None,
        window: int | None = None,
        lengths: ArrayLike | None = None,
        return_lse: bool = False,
    ) -> Floats | AttentionResult:
        """Attention of queries over what a layer holds.

        Parameters
        ----------
        layer : int
            The layer.
        q : array_like of float, shape (batch, q_heads, q_len, head_dim)
            Queries of the newest tokens, after the rotary embedding.
        scale : float, optional
            Factor of q . k; by default 1 / sqrt(head_dim).
        causal : bool, default True
            Whether a query sees only tokens up to its own.
        softcap : float, optional
            Scores s become ``softcap * tanh(s / softcap)``, before the mask.
        window : int, optional
            A query sees itself and the ``window - 1`` tokens before, sinks not excepted; tokens
            that were evicted count.
        lengths : array_like of int, shape (batch,), optional
            How many queries of each row, from the right, are real; the others give zeros.
        return_lse : bool, default False
            Whether to return the log-sum-exp of the scores too.

        Returns
        -------
        ndarray of float32, shape (batch, q_heads, q_len, value head_dim), or AttentionResult
            The output.

        Raises
        ------
        ValueError
            If shapes do not fit, an option is not allowed, or a value is not finite.
        TypeError
            If q does not hold floats.

        References
        ----------
        T. Dao et al., FlashAttention, arXiv:2205.14135, algorithm 1.

        Examples
        --------
        >>> import numpy as np
        >>> import kvcodec as kv
        >>> cache = kv.KVCache(1, 2, 64)
        >>> cache.append(0, np.ones((1, 2, 10, 64)), np.ones((1, 2, 10, 64)))
        >>> float(cache.attend(0, np.ones((1, 4, 1, 64))).mean())
        1.0
        """
        rows, kernels = self._rows(layer), _backend.resolve(self._backend)
        q = self._queries(layer, q, lengths, kernels)
        options = self._options(layer, scale, softcap, window)
        if causal is not True:
            causal = _validate.boolean(causal, "causal")
            check_window(window, causal)
        tokens = q.shape[2]
        real = [tokens] * len(rows) if lengths is None else self._lengths(lengths, tokens)
        results = []
        for index, row in enumerate(rows):
            self._check_queries(row, real[index])
            (query,) = _last(real[index], index, q)
            results.append(
                kernels.attend_sequence(query, row, row.packed_end, 0, causal, window, *options)
            )
        return _stacked(results, q.shape, self._layers[layer].value_dim, return_lse)

    def append_attend(
        self,
        layer: int,
        q: ArrayLike,
        k: ArrayLike,
        v: ArrayLike,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        window: int | None = None,
        lengths: ArrayLike | None = None,
        exact_prefill: bool = False,
        return_lse: bool = False,
    ) -> Floats | AttentionResult:
        """Add tokens to a layer and attend with their queries, causally.

        Every query sees exactly what decoding one token at a time would have shown it, however the
        sequence is cut into chunks. Equalizing takes its weights from queries given here.

        Parameters
        ----------
        layer : int
            The layer.
        q : array_like of float, shape (batch, q_heads, tokens, head_dim)
            Queries, after the rotary embedding.
        k : array_like of float, shape (batch, kv_heads, tokens, head_dim)
            Keys, after the rotary embedding.
        v : array_like of float, shape (batch, kv_heads, tokens, value head_dim)
            Values.
        scale, softcap, window, lengths, return_lse
            As in `attend`.
        exact_prefill : bool, default False
            Whether the queries see the tokens of this call exactly, even those that are packed by
            then. The result then depends on how the sequence is cut into calls.

        Returns
        -------
        ndarray of float32, shape (batch, q_heads, tokens, value head_dim), or AttentionResult
            The output; zeros for padding.

        Raises
        ------
        ValueError
            If shapes do not fit, an option is not allowed, a value is not finite, or `max_tokens`
            would be exceeded; the cache is then as it was.
        TypeError
            If an array does not hold floats.

        References
        ----------
        T. Dao et al., FlashAttention, arXiv:2205.14135, algorithm 1.

        Examples
        --------
        >>> import numpy as np
        >>> import kvcodec as kv
        >>> cache = kv.KVCache(1, 2, 64)
        >>> x = np.ones((1, 2, 10, 64))
        >>> cache.append_attend(0, x, x, x).shape
        (1, 2, 10, 64)
        """
        rows, kernels = self._rows(layer), _backend.resolve(self._backend)
        q = self._queries(layer, q, lengths, kernels)
        k, v, real = self._new_tokens(layer, k, v, lengths, kernels)
        if q.shape[2] != k.shape[2]:
            raise ValueError(
                f"q must have as many tokens as k, {k.shape[2]}, but has {q.shape[2]}."
            )
        options = self._options(layer, scale, softcap, window)
        exact_prefill = _validate.boolean(exact_prefill, "exact_prefill")
        results = []
        with _all_or_nothing(map(Sequence.mark, rows, real)):
            for index, row in enumerate(rows):
                query, new_k, new_v = _last(real[index], index, q, k, v)
                end, packed_end = row.end, row.packed_end
                row.append(new_k, new_v, query, kernels)
                seen_exactly = max(end - packed_end, 0) if exact_prefill else row.end
                most_blocks = seen_exactly // row.layer.block
                results.append(
                    kernels.attend_sequence(
                        query, row, packed_end, most_blocks, True, window, *options
                    )
                )
                row.trim()
            return _stacked(results, q.shape, self._layers[layer].value_dim, return_lse)

    # Changing what it holds

    def crop(self, length: int | ArrayLike) -> None:
        """Keep the first `length` tokens of every sequence in every layer.

        Nothing is encoded again. At most `rollback` tokens below the longest length so far this
        leaves, bit for bit, what a fresh cache of `length` tokens holds; further back the remaining
        codes stay as they are and the last block is closed short. Shorter sequences stay as they
        are.

        Parameters
        ----------
        length : int or array_like of int, shape (batch,)
            Tokens to keep, of all sequences or of each; a negative number is how many to drop from
            the end of each. **0 keeps none**: where there may be nothing to drop, say how many to
            keep, as in the example.

        Raises
        ------
        ValueError
            If the longest sequence (of several numbers, the sequence itself) has fewer tokens, or a
            sequence has fewer than are to be dropped, or in ring mode if tokens that a query would
            see are gone.

        Examples
        --------
        >>> import numpy as np
        >>> import kvcodec as kv
        >>> cache = kv.KVCache(1, 2, 64)
        >>> cache.append(0, np.ones((1, 2, 10, 64)), np.ones((1, 2, 10, 64)))
        >>> cache.crop(-3)
        >>> rejected = 0
        >>> cache.crop(len(cache) - rejected)
        >>> len(cache)
        7
        """
        lengths = self.seq_lengths
        ranges = zip(-lengths.min(axis=0), lengths.max(axis=0), strict=True)
        given = self._each_row(length, "length", (-lengths.min(), lengths.max()), ranges)
        cuts = []
        for rows in self._sequences:
            for row, kept in zip(rows, given, strict=True):
                kept = row.length + kept if kept < 0 else kept
                if kept < row.length and not row.can_crop(kept):
                    raise ValueError(
                        f"length must keep the tokens that the window of {row.layer.window} "
                        f"needs, but {length!r} was given and tokens before {row.released} are "
                        f"gone."
                    )
                cuts.append((row, kept))
        with _all_or_nothing(map(Sequence.mark, self._all())):
            for row, kept in cuts:
                row.crop(kept)

    def evict(self, tokens: int | ArrayLike) -> None:
        """Drop the oldest tokens after the sinks, of every sequence in every layer.

        Parameters
        ----------
        tokens : int or array_like of int, shape (batch,)
            How many, of all sequences or of each; none may have fewer after its sinks.

        Raises
        ------
        ValueError
            If a sequence has fewer tokens after its sinks.

        Examples
        --------
        >>> import numpy as np
        >>> import kvcodec as kv
        >>> cache = kv.KVCache(1, 2, 64)
        >>> cache.append(0, np.ones((1, 2, 10, 64)), np.ones((1, 2, 10, 64)))
        >>> cache.evict(3)
        >>> len(cache)
        7
        """
        sinks = np.array([[layer.sinks] for layer in self._layers])
        most = np.maximum(self.seq_lengths - sinks, 0).min(axis=0)
        given = self._each_row(tokens, "tokens", (0, most.min()), ((0, each) for each in most))
        with _all_or_nothing(map(Sequence.mark, self._all())):
            for rows in self._sequences:
                for row, count in zip(rows, given, strict=True):
                    row.evict(count)

    def reorder(self, indices: ArrayLike) -> None:
        """Replace the batch by as many of its rows, as beam search does; codes are not changed.

        Parameters
        ----------
        indices : array_like of int, shape (batch,)
            For each new row the old one that it continues.

        Raises
        ------
        ValueError
            If there are not `batch` indices of rows.

        Examples
        --------
        >>> import kvcodec as kv
        >>> kv.KVCache(1, 2, 64, batch=2).reorder([1, 1])
        """
        chosen = self._indices(indices)
        if len(chosen) != self.batch:
            raise ValueError(
                f"indices must be {self.batch}, one for each row, but {len(chosen)} were given."
            )
        self._take(chosen)

    def select(self, indices: ArrayLike) -> None:
        """Keep the given rows of the batch, in the given order.

        Parameters
        ----------
        indices : array_like of int, shape (new batch,)
            Rows to keep; at least one, and a row may be named more than once.

        Raises
        ------
        ValueError
            If there is no index, or one is no row.

        Examples
        --------
        >>> import kvcodec as kv
        >>> cache = kv.KVCache(1, 2, 64, batch=3)
        >>> cache.select([2])
        >>> cache.batch
        1
        """
        self._take(self._indices(indices))

    def repeat(self, times: int) -> None:
        """Repeat each row of the batch, next to itself; the copies share full pages.

        Parameters
        ----------
        times : int
            How often, at least 1.

        Raises
        ------
        ValueError
            If times is no such number.

        Examples
        --------
        >>> import kvcodec as kv
        >>> cache = kv.KVCache(1, 2, 64)
        >>> cache.repeat(4)
        >>> cache.batch
        4
        """
        times = _validate.integer(times, "times", 1)
        self._take([row for row in range(self.batch) for _ in range(times)])

    def reset(self) -> None:
        """Forget all tokens.

        Examples
        --------
        >>> import kvcodec as kv
        >>> kv.KVCache(1, 2, 64).reset()
        """
        self._sequences = [[Sequence(layer) for _ in range(self.batch)] for layer in self._layers]

    def copy(self) -> KVCache:
        """A cache that continues on its own; the packed pages are shared until written to.

        `memory` of either counts the shared pages.

        Returns
        -------
        KVCache
            The copy.

        Examples
        --------
        >>> import kvcodec as kv
        >>> kv.KVCache(1, 2, 64).copy().seq_length
        0
        """
        copied = object.__new__(KVCache)
        copied.__dict__.update(self.__dict__)
        copied._layers = list(self._layers)
        copied._sequences = [[row.copy() for row in rows] for rows in self._sequences]
        return copied

    def __copy__(self) -> KVCache:
        return self.copy()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cache to a safetensors file, as a whole or not at all.

        Pages that rows share are written for each row.

        Parameters
        ----------
        path : path-like
            The file; an existing one is replaced once the new one is complete.

        Raises
        ------
        ImportError
            If safetensors is not installed (extra ``storage``).
        OSError
            If the file cannot be written.

        Examples
        --------
        >>> import tempfile, pathlib
        >>> import kvcodec as kv
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder) / "prompt.safetensors"
        ...     kv.KVCache(1, 2, 64).save(path)
        ...     kv.KVCache.load(path).num_layers
        1
        """
        from kvcodec import storage

        storage.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, backend: str | None = None) -> KVCache:
        """Read a cache that `save` wrote; it continues byte for byte like the saved one.

        Parameters
        ----------
        path : path-like
            The file.
        backend : {"auto", "fast", "reference"}, optional
            Which twin runs; see `config_context`.

        Returns
        -------
        KVCache
            The cache.

        Raises
        ------
        ImportError
            If safetensors is not installed (extra ``storage``).
        ValueError
            If the file is truncated, damaged, of another kind or of another version.
        MemoryError
            If the cache that it describes does not fit into memory.
        OSError
            If the file cannot be read.

        Examples
        --------
        >>> import tempfile, pathlib
        >>> import kvcodec as kv
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder) / "prompt.safetensors"
        ...     kv.KVCache(1, 2, 64, key="int8").save(path)
        ...     kv.KVCache.load(path)
        <KVCache of 0 tokens: 1 layer, batch 1, int8 keys, int4 values, ...>
        """
        from kvcodec import storage

        return storage.load(path, backend)

    # Parts of the above

    def _all(self) -> list[Sequence]:
        return [row for rows in self._sequences for row in rows]

    def _rows(self, layer: int) -> list[Sequence]:
        if type(layer) is not int or not 0 <= layer < len(self._sequences):
            layer = _validate.integer(layer, "layer", 0, self.num_layers - 1)
        return self._sequences[layer]

    def _take(self, chosen: list[int]) -> None:
        """Make these rows the batch; one that is named once is moved and shares nothing."""
        self._sequences = [
            [rows[index] if chosen.count(index) == 1 else rows[index].copy() for index in chosen]
            for rows in self._sequences
        ]

    def _each_row(
        self,
        given: int | ArrayLike,
        name: str,
        range_of_all: tuple[int, int],
        ranges: abc.Iterable[tuple[int, int]],
    ) -> list[int]:
        """One whole number for all rows, or one for each in its range."""
        if np.ndim(given) == 0:
            low, high = range_of_all
            return [_validate.integer(given, name, int(low), int(high))] * self.batch
        array = np.asarray(given)
        if array.shape != (self.batch,) or array.dtype.kind not in "iu":
            raise ValueError(
                f"{name} must be one whole number or {self.batch}, one for each row, "
                f"but {given!r} was given."
            )
        return [
            _validate.integer(int(one), name, int(low), int(high))
            for one, (low, high) in zip(array, ranges, strict=True)
        ]

    def _indices(self, indices: ArrayLike) -> list[int]:
        array = np.asarray(indices)
        if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
            raise ValueError(
                f"indices must be a list of at least one row number, but {indices!r} was given."
            )
        if array.min() < 0 or array.max() >= self.batch:
            raise ValueError(
                f"indices must lie from 0 to {self.batch - 1}, but {indices!r} was given."
            )
        return [int(index) for index in array]

    def _lengths(self, lengths: ArrayLike, tokens: int) -> list[int]:
        array = np.asarray(lengths)
        if array.shape != (self.batch,) or array.dtype.kind not in "iu":
            raise ValueError(
                f"lengths must be {self.batch} whole numbers, one for each row, "
                f"but {lengths!r} was given."
            )
        if array.min() < 0 or array.max() > tokens:
            raise ValueError(f"lengths must lie from 0 to {tokens}, but {lengths!r} was given.")
        return [int(length) for length in array]

    def _new_tokens(
        self,
        layer: int,
        k: Any,
        v: Any,
        lengths: ArrayLike | None,
        kernels: ModuleType,
    ) -> tuple[Floats, Floats, list[int]]:
        """Checked keys and values, and how many tokens of each row are real."""
        about = self._layers[layer]
        batch, heads = len(self._sequences[layer]), about.kv_heads
        tokens = -1
        if lengths is None:
            tokens = kernels.clean_tokens(k, batch, heads, about.key_dim)
            new = kernels.clean_tokens(v, batch, heads, about.value_dim)
        if tokens < 0 or tokens != new or not k.shape[1] == heads == v.shape[1]:
            k, v = self._tokens(k, "k", lengths), self._tokens(v, "v", lengths)
            tokens = k.shape[2]
            _validate.shaped(k, "k", (batch, heads, tokens, about.key_dim))
            _validate.shaped(v, "v", (batch, heads, tokens, about.value_dim))
        real = [tokens] * batch if lengths is None else self._lengths(lengths, tokens)
        if self._max_tokens is not None:
            for row, tokens in zip(self._sequences[layer], real, strict=True):
                if row.length + tokens > self._max_tokens:
                    raise ValueError(
                        f"k must not bring a sequence beyond max_tokens, {self._max_tokens}, "
                        f"but {tokens} tokens were given to one of {row.length}."
                    )
        return k, v, real

    def _tokens(self, x: ArrayLike, name: str, lengths: ArrayLike | None) -> Floats:
        """A checked array of tokens; what is padding by `lengths` is not looked at."""
        if lengths is None:
            return _validate.kv_array(x, name)
        x = _validate.as_array(x, name)
        if x.ndim == 4 and x.shape[0] == self.batch:
            real = self._lengths(lengths, x.shape[2])
            x = x.copy()
            for row, tokens in zip(x, real, strict=True):
                row[:, : x.shape[2] - tokens] = 0
        return _validate.kv_array(x, name)

    def _queries(
        self, layer: int, q: Any, lengths: ArrayLike | None, kernels: ModuleType
    ) -> Floats:
        about = self._layers[layer]
        batch, heads, dim = len(self._sequences[layer]), about.kv_heads, about.key_dim
        if lengths is not None or kernels.clean_tokens(q, batch, heads, dim) < 0:
            q = self._tokens(q, "q", lengths)
            _validate.query_heads(q, (batch, heads, 0, dim))
        return q

    def _check_queries(self, row: Sequence, tokens: int) -> None:
        if tokens > row.length:
            raise ValueError(
                f"q must have at most as many queries as there are tokens, {row.length}, "
                f"but has {tokens}."
            )
        if tokens and not row.can_attend(tokens):
            raise ValueError(
                f"q must be of tokens that saw only what is still there, but has {tokens} queries "
                f"and tokens before number {row.released} are gone."
            )

    def _options(
        self, layer: int, scale: float | None, softcap: float | None, window: int | None
    ) -> tuple[float, float | None, int | None, int | None]:
        """The last arguments of `attend_sequence`."""
        usual = self._usual_options[layer]
        if scale is None and softcap is None and window is None:
            return usual
        if window is not None:
            _validate.token_count(window, "window", 1)
        softcap = None if softcap is None else _validate.positive(softcap, "softcap")
        return softmax_scale(scale, self._layers[layer].key_dim), softcap, *usual[2:]

    def _decoded(self, layer: int, side: str) -> Floats:
        kernels = _backend.resolve(self._backend)
        rows = [row.decoded(side, kernels) for row in self._rows(layer)]
        longest = max(row.shape[1] for row in rows)
        out = np.zeros((len(rows), rows[0].shape[0], longest, rows[0].shape[2]), np.float32)
        for target, row in zip(out, rows, strict=True):
            target[:, longest - row.shape[1] :] = row
        return out

    def __repr__(self) -> str:
        return cache_report.text_of(self, self._layers, self._sequences)

    def _repr_html_(self) -> str:
        return cache_report.table_of(self)


class _all_or_nothing:
    """Take what was done to rows since they were marked back if the block is not completed."""

    def __init__(self, marks: abc.Iterable[abc.Callable[[], None]]) -> None:
        self.marks = list(marks)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            for undo in self.marks:
                undo()


def _last(tokens: int, row: int, *arrays: Floats) -> abc.Sequence[Floats]:
    """The last tokens of one row of arrays of as many tokens, as a batch of 1 in one piece."""
    batch, _, length, _ = arrays[0].shape
    if batch == 1 and length == tokens:
        return arrays
    return [np.ascontiguousarray(x[row : row + 1, :, x.shape[2] - tokens :]) for x in arrays]


def _stacked(
    results: list[tuple[Floats, Floats]], shape: tuple[int, ...], dim: int, return_lse: bool
) -> Floats | AttentionResult:
    """The rows' results as a batch, padded on the left."""
    if len(results) == 1 and results[0][0].shape[2] == shape[2]:
        output, log_sum_exp = results[0]
    else:
        output = np.zeros((*shape[:3], dim), dtype=np.float32)
        log_sum_exp = np.full(shape[:3], -np.inf, dtype=np.float32)
        for row, (part, part_lse) in enumerate(results):
            start = shape[2] - part.shape[2]
            output[row, :, start:], log_sum_exp[row, :, start:] = part[0], part_lse[0]
    return AttentionResult(output, log_sum_exp) if return_lse else output
