"""What is measured: shapes, codecs, threads and how often."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcodec import _validate
from kvcodec._backend import num_threads
from kvcodec.evaluation.codecs import CodecPair, codec_pair, distinct_pairs

__all__ = ["BASE", "Settings", "Shape", "make_settings"]

BASE = "int4"
"""What other codecs are compared with."""

CONTEXTS = (4096, 32768)
CODECS = (
    *("int4", "int8", "int3", "int2", "kivi4", "kivi2"),
    *("lm4", "lm3", "lm2", "lm4/lm2", "tcq4", "tcq3", "tcq2"),
)
REPEATS = 25
PREFILL_TOKENS, ENCODE_ROWS, FWHT_ROWS = 2048, 32768, 4096
QUICK_CONTEXTS = (1024,)
QUICK_CODECS = ("int4", "lm4")
QUICK_REPEATS = 5
QUICK_PREFILL_TOKENS, QUICK_ENCODE_ROWS, QUICK_FWHT_ROWS = 256, 4096, 512
WARMUP = 2


@dataclass(frozen=True)
class Shape:
    """Heads and channels of a layer.

    Attributes
    ----------
    q_heads, kv_heads : int
        Query heads, and the KV heads that they share.
    head_dim : int
        Channels.
    """

    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128


@dataclass(frozen=True)
class Settings:
    """What `run_benchmark` measures.

    Attributes
    ----------
    shape : Shape
        Heads and channels.
    contexts : tuple of int
        Tokens that a decoded query attends to.
    codecs : tuple of CodecPair
        The codecs, int4 first.
    threads : tuple of int
        Numbers of threads.
    repeats : int
        Rounds that count, after `WARMUP` that do not.
    quick : bool
        Whether everything else is small too.
    """

    shape: Shape
    contexts: tuple[int, ...]
    codecs: tuple[CodecPair, ...]
    threads: tuple[int, ...]
    repeats: int
    quick: bool

    @property
    def prefill_tokens(self) -> int:
        """Tokens of a prompt."""
        return QUICK_PREFILL_TOKENS if self.quick else PREFILL_TOKENS

    @property
    def encode_rows(self) -> int:
        """Vectors that are encoded at once."""
        return QUICK_ENCODE_ROWS if self.quick else ENCODE_ROWS

    @property
    def fwht_rows(self) -> int:
        """Vectors that are transformed at once."""
        return QUICK_FWHT_ROWS if self.quick else FWHT_ROWS

    def command(self, *more: str) -> str:
        """The command that measures this.

        Parameters
        ----------
        *more : str
            Further words of the command.

        Returns
        -------
        str
            A line for a shell.

        Examples
        --------
        >>> from kvcodec.benchmark import make_settings
        >>> make_settings(quick=True).command("--json", "times.json")
        'kvcodec bench --quick ... --json times.json'
        """
        options = {
            "context": self.contexts,
            "codec": [pair.name for pair in self.codecs],
            "threads": self.threads,
            "q-heads": [self.shape.q_heads],
            "kv-heads": [self.shape.kv_heads],
            "head-dim": [self.shape.head_dim],
            "repeats": [self.repeats],
        }
        return bench_command(["--quick"] if self.quick else [], options, more)


def bench_command(
    first: Sequence[str], options: Mapping[str, Sequence[Any]], more: Sequence[str] = ()
) -> str:
    """The command with some words, each value of each option, and further words."""
    words = [
        word
        for option, values in options.items()
        for value in values
        for word in (f"--{option}", str(value))
    ]
    return shlex.join(["kvcodec", "bench", *first, *words, *more])


def make_settings(
    shape: Shape | None = None,
    contexts: Sequence[int] = (),
    codecs: Sequence[str] = (),
    threads: Sequence[int] = (),
    repeats: int | None = None,
    quick: bool = False,
) -> Settings:
    """Settings, with defaults where nothing is chosen.

    Parameters
    ----------
    shape : Shape, optional
        Heads and channels; by default 32 query heads, 8 KV heads and 128 channels.
    contexts : sequence of int
        Tokens that a decoded query attends to.
    codecs : sequence of str
        Names as `codec_pair` takes them; int4 is measured too.
    threads : sequence of int
        Numbers of threads; by default that of `kvcodec.num_threads`.
    repeats : int, optional
        Rounds.
    quick : bool, default False
        Whether defaults are small.

    Returns
    -------
    Settings
        For `run_benchmark`.

    Raises
    ------
    ValueError
        If a value, or a codec for the shape, is not possible.

    Examples
    --------
    >>> from kvcodec.benchmark import make_settings
    >>> make_settings(codecs=["lm4/lm2"], threads=[1], quick=True).contexts
    (1024,)
    """
    shape = Shape() if shape is None else shape
    if shape.q_heads % shape.kv_heads:
        raise ValueError(
            f"q_heads must be a multiple of kv_heads, {shape.kv_heads}, but {shape.q_heads} was "
            "given."
        )
    contexts = contexts or (QUICK_CONTEXTS if quick else CONTEXTS)
    for context in contexts:
        _validate.token_count(context, "context", 1)
    return Settings(
        shape=shape,
        contexts=tuple(dict.fromkeys(contexts)),
        codecs=_chosen_codecs(codecs, shape, quick),
        threads=chosen_threads(threads),
        repeats=chosen_repeats(repeats, QUICK_REPEATS if quick else REPEATS),
        quick=quick,
    )


def chosen_threads(threads: Sequence[int]) -> tuple[int, ...]:
    """Each number of threads once; where none is chosen, that of `kvcodec.num_threads`."""
    counts = [_validate.integer(count, "threads", 1) for count in threads] or [num_threads()]
    return tuple(dict.fromkeys(counts))


def chosen_repeats(repeats: int | None, default: int) -> int:
    """The number of rounds."""
    return default if repeats is None else _validate.integer(repeats, "repeats", 1)


def _chosen_codecs(names: Sequence[str], shape: Shape, quick: bool) -> tuple[CodecPair, ...]:
    """The pairs, each once, int4 first; of the default ones those that the shape allows."""
    pairs = [cache_pair(name) for name in (BASE, *names)]
    for pair in pairs:
        try:
            pair.check_head_dims(shape.head_dim, shape.head_dim)
        except ValueError as error:
            always = ", which is always measured," if pair.name == BASE else ""
            raise ValueError(f"codec {pair.name!r}{always} is not possible: {error}") from None
    if not names:
        pairs += possible_pairs(QUICK_CODECS if quick else CODECS, shape)
    return tuple(distinct_pairs(pairs))


def possible_pairs(names: Sequence[str], shape: Shape) -> list[CodecPair]:
    """The pairs that can encode such vectors."""
    possible = []
    for pair in map(cache_pair, names):
        try:
            pair.check_head_dims(shape.head_dim, shape.head_dim)
        except ValueError:
            continue
        possible.append(pair)
    return possible


def cache_pair(name: str) -> CodecPair:
    """The codecs of a name, which must be packed."""
    return codec_pair(name, number_types=())
