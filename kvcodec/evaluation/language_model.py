"""What a codec does to the predictions of a language model, in lockstep with a float32 run.

Both runs see the same text, token by token or in pieces, and predict every next token. The float32
run keeps its keys and values in a `DynamicCache`, the others in a `KVCodecCache` and attend over
its packed bytes, as in generation.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from time import perf_counter
from typing import Any

from kvcodec import _validate
from kvcodec.evaluation.codecs import CodecPair
from kvcodec.evaluation.models import LanguageModel

__all__ = ["ChunkOptions", "Predictions", "evaluate_chunk"]

ENTRIES_AT_ONCE = 2**22


@dataclass(frozen=True)
class ChunkOptions:
    """How chunks of text are run.

    Attributes
    ----------
    sinks, recent : int
        Exact tokens at the beginning, and of the newest.
    chunk : int
        Tokens that are fed in one forward pass.
    last : int or None
        Count only so many predictions at the end of each chunk; None counts all.
    """

    sinks: int = 4
    recent: int = 32
    chunk: int = 128
    last: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("sinks", 0), ("recent", 0), ("chunk", 1)):
            _validate.integer(getattr(self, name), name, least)
        if self.last is not None:
            _validate.integer(self.last, "last", 1)


@dataclass(eq=False)
class Predictions:
    """What one codec predicted in one chunk; plain numbers, to be stored as JSON.

    Attributes
    ----------
    codec : str
        The name of the codec pair.
    key, value : dict or None
        What `Codec.from_config` makes the codec of each side from; None without a codec.
    kl : list of float
        For each counted position, the Kullback-Leibler divergence of the predicted distribution
        from that of the float32 run, in nats.
    same_top : list of bool
        Whether the likeliest token is that of the float32 run.
    exact_log_probability, log_probability : list of float
        Of the token that the text has next, in the float32 run and in this one.
    left_out : int
        Entries of the vocabulary that were not finite in either run, summed over positions.
    bits_per_value, bytes_per_token : float
        Of a packed token, all metadata counted: bits a number, and bytes in all layers.
    tokens : int
        Tokens fed.
    seconds : float
        Time of the forward passes.
    """

    codec: str
    key: dict[str, Any] | None
    value: dict[str, Any] | None
    bits_per_value: float
    bytes_per_token: float
    kl: list[float] = field(default_factory=list)
    same_top: list[bool] = field(default_factory=list)
    exact_log_probability: list[float] = field(default_factory=list)
    log_probability: list[float] = field(default_factory=list)
    left_out: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, pair: CodecPair, config: Mapping[str, Any]) -> Predictions:
        """Of a pair of codecs before anything was predicted.

        Parameters
        ----------
        pair : CodecPair
            The codecs.
        config : mapping
            `KVCache.config` of a cache that was made with them.

        Returns
        -------
        Predictions
            With names, bits and bytes, and without a prediction.

        Examples
        --------
        >>> import kvcodec as kv
        >>> from kvcodec.evaluation import Predictions, codec_pair
        >>> pair = codec_pair("int4 plain")
        >>> cache = kv.KVCache(2, num_kv_heads=4, head_dim=64, key=pair.key, value=pair.value)
        >>> predictions = Predictions.of(pair, cache.config)
        >>> predictions.bits_per_value, predictions.bytes_per_token
        (4.25, 544.0)
        """
        bits = values = 0.0
        for heads, key_dim, value_dim in zip(
            config["num_kv_heads"], config["head_dim"], config["value_head_dim"], strict=True
        ):
            values += heads * (key_dim + value_dim)
            bits += heads * (key_dim + value_dim) * pair.bits_per_value(key_dim, value_dim)
        sides = (config["key"][0], config["value"][0])
        key, value = (None if side is None else side.to_config() for side in sides)
        return cls(pair.name, key, value, bits / values, bits / 8)

    def to_dict(self) -> dict[str, Any]:
        """As plain numbers and lists.

        Returns
        -------
        dict
            The attributes by name, as JSON can hold them.
        """
        return asdict(self)

    @classmethod
    def can_be_dict(cls, given: Any, codec: str, tokens: int, counted: int) -> bool:
        """Whether `to_dict` can have given this.

        Parameters
        ----------
        given : object
            What JSON held.
        codec : str
            The name of the codec pair.
        tokens, counted : int
            Tokens fed and predictions counted.

        Returns
        -------
        bool
            Whether names, kinds and counts are right.
        """
        if not isinstance(given, dict) or set(given) != {each.name for each in fields(cls)}:
            return False
        kinds = {
            "bits_per_value": float,
            "bytes_per_token": float,
            "seconds": float,
            "left_out": int,
        }
        lists = {
            "kl": float,
            "same_top": bool,
            "exact_log_probability": float,
            "log_probability": float,
        }
        return (
            (given["codec"], given["tokens"]) == (codec, tokens)
            and all(isinstance(given[side], dict | None) for side in ("key", "value"))
            and all(type(given[name]) is kind for name, kind in kinds.items())
            and given["seconds"] > 0
            and all(
                isinstance(given[name], list)
                and [type(each) for each in given[name]] == [kind] * counted
                for name, kind in lists.items()
            )
        )


class Run:
    """A model with a cache of its own, fed piece by piece."""

    def __init__(self, model: Any, attention: str, cache: Any) -> None:
        self.model, self.attention, self.cache = model, attention, cache
        # Releases of Transformers differ in the name of the argument.
        known = inspect.signature(model.forward).parameters
        self._name = "cache" if "cache" in known else "past_key_values"
        self._takes_kept = "logits_to_keep" in known
        self.seconds = 0.0

    def feed(self, tokens: Sequence[int], keep: int) -> Any:
        """Logits after the last `keep` of these tokens, float32 (keep, vocabulary)."""
        import torch

        kept = {"logits_to_keep": max(keep, 1)} if self._takes_kept else {}
        # Configs of models from training often say false.
        options = {self._name: self.cache, "use_cache": True, **kept}
        with torch.inference_mode(), _attention(self.model, self.attention):
            start = perf_counter()
            answer = self.model(torch.tensor([tokens]), **options)
            self.seconds += perf_counter() - start
        return answer.logits[0, answer.logits.shape[1] - keep :].float()


@contextmanager
def _attention(model: Any, name: str) -> Iterator[None]:
    """The attention function of a model for a while."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def exact_run(model: LanguageModel) -> Run:
    """The model with keys and values in float32."""
    import transformers

    cache = transformers.DynamicCache(config=model.model.config)
    return Run(model.model, model.exact_attention, cache)


def packed_run(model: LanguageModel, pair: CodecPair, options: ChunkOptions) -> Run:
    """The model with keys and values in a `KVCodecCache`.

    Raises a ValueError if the codecs do not fit the model.
    """
    from kvcodec.integrations.transformers import KVCodecCache

    try:
        cache = KVCodecCache(
            model.model.config,
            key=pair.key,
            value=pair.value,
            sinks=options.sinks,
            recent=options.recent,
            block=pair.block,
            exact_dtype=pair.exact_dtype,
        )
    except ValueError as error:
        raise ValueError(f"{pair.name} cannot be evaluated on this model: {error}") from None
    except MemoryError:
        raise ValueError(
            f"sinks and recent must be exact tokens that fit into memory, but sinks="
            f"{options.sinks} and recent={options.recent} were given."
        ) from None
    return Run(model.model, "kvcodec", cache)


def evaluate_chunk(
    model: LanguageModel,
    tokens: Sequence[int],
    pairs: Sequence[CodecPair],
    options: ChunkOptions,
    advance: Callable[[], None] = lambda: None,
) -> list[Predictions]:
    """Run codecs over a chunk of text beside one float32 run.

    The logits of one piece of `options.chunk` tokens are held at a time, those of the float32 run
    once for all codecs.

    Parameters
    ----------
    model : LanguageModel
        The model.
    tokens : sequence of int
        The chunk; its last token is only predicted.
    pairs : sequence of CodecPair
        The codecs.
    options : ChunkOptions
        How it is run.
    advance : callable, optional
        Is called after each piece of each codec.

    Returns
    -------
    list of Predictions
        One for each pair.

    Raises
    ------
    ValueError
        If a codec does not fit the model.

    Examples
    --------
    A model with random weights, and a token for each byte:

    >>> import transformers
    >>> from kvcodec.evaluation import ChunkOptions, LanguageModel, codec_pair, evaluate_chunk
    >>> config = transformers.LlamaConfig(
    ...     vocab_size=384, hidden_size=128, intermediate_size=64, num_hidden_layers=2,
    ...     num_attention_heads=4, num_key_value_heads=2,
    ... )
    >>> model = LanguageModel(
    ...     transformers.LlamaForCausalLM(config).eval(), transformers.ByT5Tokenizer(), "random"
    ... )
    >>> tokens = model.encode("One token a byte, so this is a chunk of 122 tokens. " * 3)[:123]
    >>> pairs = [codec_pair("int8"), codec_pair("int2")]
    >>> int8, int2 = evaluate_chunk(model, tokens, pairs, ChunkOptions())
    >>> len(int8.kl), sum(int8.kl) < sum(int2.kl)
    (122, True)
    """
    fed = len(tokens) - 1
    counted = fed if options.last is None else min(options.last, fed)
    runs = [packed_run(model, pair, options) for pair in pairs]
    found = [
        Predictions.of(pair, run.cache.kv.config) for pair, run in zip(pairs, runs, strict=True)
    ]
    exact = exact_run(model)
    for start, stop in pieces(fed, options.chunk):
        keep = max(stop - max(start, fed - counted), 0)
        targets = tokens[stop + 1 - keep : stop + 1]
        piece = ExactPiece(exact.feed(tokens[start:stop], keep), targets)
        for run, predictions in zip(runs, found, strict=True):
            piece.compare(predictions, run.feed(tokens[start:stop], keep))
            advance()
    for run, predictions in zip(runs, found, strict=True):
        predictions.tokens, predictions.seconds = fed, run.seconds
    return found


def pieces(tokens: int, size: int) -> list[tuple[int, int]]:
    """Start and end of the pieces in which tokens are fed."""
    return [(start, min(start + size, tokens)) for start in range(0, tokens, size)]


class ExactPiece:
    """Predictions of the float32 run after some tokens, and what they are compared by.

    Parameters
    ----------
    logits : torch.Tensor of float32, shape (positions, vocabulary)
        Its logits.
    targets : sequence of int
        The token that the text has next, of each position.
    """

    def __init__(self, logits: Any, targets: Sequence[int]) -> None:
        import torch

        self.logits, self.targets = logits, torch.tensor(targets, dtype=torch.int64)
        self.finite = bool(torch.isfinite(logits).all())
        if self.finite:
            log_p = logits.double()
            log_p -= log_p.logsumexp(-1, keepdim=True)
            self.target = _of_targets(log_p, self.targets)
            self.p = log_p.exp()
            self.negative_entropy = log_p.mul_(self.p).sum(-1)
            self.top = logits.argmax(-1)

    def compare(self, predictions: Predictions, logits: Any) -> None:
        """Add what the logits of another run say, a few positions at a time."""
        import torch

        rows = max(ENTRIES_AT_ONCE // logits.shape[-1], 1)
        for start in range(0, len(self.targets), rows):
            part = slice(start, start + rows)
            if self.finite and bool(torch.isfinite(logits[part]).all()):
                self._compare_finite(predictions, logits[part], part)
            else:
                self._compare_others(predictions, logits[part], part)

    def _compare_finite(self, predictions: Predictions, logits: Any, part: slice) -> None:
        """KL as sum p log p - sum p log q, which needs no log q of each entry."""
        q = logits.double()
        sums = q.logsumexp(-1)
        cross = (self.p[part].unsqueeze(1) @ q.unsqueeze(2))[:, 0, 0] - sums
        predictions.kl += (self.negative_entropy[part] - cross).tolist()
        predictions.same_top += (self.top[part] == logits.argmax(-1)).tolist()
        predictions.exact_log_probability += self.target[part].tolist()
        target = _of_targets(q, self.targets[part]) - sums
        predictions.log_probability += target.tolist()

    def _compare_others(self, predictions: Predictions, logits: Any, part: slice) -> None:
        """Leave entries that are not finite in one of the runs out of both."""
        import torch

        left_out = ~(torch.isfinite(self.logits[part]) & torch.isfinite(logits))
        nothing_left = left_out.all(-1)
        p, q = (
            x.double().masked_fill(left_out, -torch.inf).log_softmax(-1)
            for x in (self.logits[part], logits)
        )
        kl = (p.exp() * (p - q)).masked_fill(left_out, 0.0).sum(-1)
        same_top = (p.argmax(-1) == q.argmax(-1)) & ~nothing_left
        predictions.left_out += int(left_out.sum())
        predictions.kl += kl.masked_fill(nothing_left, torch.inf).tolist()
        predictions.same_top += same_top.tolist()
        for name, x in (("exact_log_probability", p), ("log_probability", q)):
            getattr(predictions, name).extend(_of_targets(x, self.targets[part]).tolist())


def _of_targets(x: Any, targets: Any) -> Any:
    """The entry of each row that belongs to its target."""
    return x.gather(1, targets[:, None])[:, 0]
