"""Whether greedy decoding writes the same tokens with a packed cache as with a float32 one.

Where it does not, the first other token tells how close the choice was: up to there both runs were
fed the same tokens, so that their predictions of that place can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvcodec import _validate
from kvcodec.evaluation.codecs import CodecPair
from kvcodec.evaluation.language_model import (
    ChunkOptions,
    Predictions,
    Run,
    exact_run,
    packed_run,
    pieces,
)
from kvcodec.evaluation.models import LanguageModel

__all__ = ["GreedyQuality", "compare_greedy"]


@dataclass(frozen=True)
class GreedyQuality:
    """How long one codec writes what the float32 run writes, after one prompt.

    Attributes
    ----------
    model : str
        The name of the model.
    name : str
        The name of the codec pair.
    key, value : dict or None
        What `Codec.from_config` makes the codec of each side from; None without a codec.
    bits_per_value : float
        Stored bits a number of a packed token, all metadata counted.
    prompt : int
        Number of the prompt, from 1.
    prompt_tokens : int
        Its tokens.
    same, new_tokens : int
        Tokens that are the same, from the first to before the first other one, and all that the
        float32 run wrote.
    exact_token, token : str or None
        What the float32 run and this one wrote at the first difference, if there is one.
    margin : float or None
        There, the log probability of `exact_token` less that of `token`, in the float32 run: near
        0, the two were almost as likely. In nats.
    own_margin : float or None
        There, the log probability of `token` less that of `exact_token`, in this run.
    sinks, recent, block : int
        How it was measured.
    """

    model: str
    name: str
    key: dict[str, Any] | None
    value: dict[str, Any] | None
    bits_per_value: float
    prompt: int
    prompt_tokens: int
    same: int
    new_tokens: int
    exact_token: str | None
    token: str | None
    margin: float | None
    own_margin: float | None
    sinks: int
    recent: int
    block: int


def compare_greedy(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    pairs: Sequence[CodecPair],
    new_tokens: int,
    options: ChunkOptions,
    progress: Callable[[float], None] = lambda done: None,
) -> list[GreedyQuality]:
    """Decode greedily after some prompts, once in float32 and once with each codec.

    A token that ends a text counts like any other, so that all runs are of one length.

    Parameters
    ----------
    model : LanguageModel
        The model.
    prompts : sequence of sequence of int
        Tokens, at least one each.
    pairs : sequence of CodecPair
        The codecs.
    new_tokens : int
        How many tokens are decoded, at least 1.
    options : ChunkOptions
        How the cache is set up and the prompt is fed.
    progress : callable, optional
        Called with the part that is done, from 0 to 1.

    Returns
    -------
    list of GreedyQuality
        By codec and prompt.

    Raises
    ------
    ValueError
        If a codec does not fit the model, or a number is not possible.
    """
    _validate.integer(new_tokens, "new_tokens", 1)
    by_pair: list[list[GreedyQuality]] = [[] for _ in pairs]
    for number, prompt in enumerate(prompts, 1):

        def advance(place: int, done: int = number - 1) -> None:
            progress((done + place / new_tokens) / len(prompts))

        runs = [packed_run(model, pair, options) for pair in pairs]
        parted = _part(model, prompt, runs, new_tokens, options.chunk, advance)
        for pair, run, difference, rows in zip(pairs, runs, parted, by_pair, strict=True):
            about = Predictions.of(pair, run.cache.kv.config)
            rows.append(
                GreedyQuality(
                    model=model.source,
                    name=about.codec,
                    key=about.key,
                    value=about.value,
                    bits_per_value=about.bits_per_value,
                    prompt=number,
                    prompt_tokens=len(prompt),
                    new_tokens=new_tokens,
                    **difference,
                    sinks=options.sinks,
                    recent=options.recent,
                    block=pair.block,
                )
            )
    return [row for rows in by_pair for row in rows]


def _part(
    model: LanguageModel,
    prompt: Sequence[int],
    runs: Sequence[Run],
    new_tokens: int,
    chunk: int,
    advance: Callable[[int], None],
) -> list[dict[str, Any]]:
    """Where each run parts from the float32 run, and by how much; it is then left alone."""
    nothing = dict.fromkeys(("exact_token", "token", "margin", "own_margin"))
    found = [{"same": new_tokens, **nothing} for _ in runs]
    exact = decoded(exact_run(model), prompt, chunk)
    packed = {index: decoded(run, prompt, chunk) for index, run in enumerate(runs)}
    for place, (wanted, p) in zip(range(new_tokens), exact, strict=False):
        for index, tokens in list(packed.items()):
            written, q = next(tokens)
            if written != wanted:
                found[index] = {
                    "same": place,
                    "exact_token": model.tokenizer.decode([wanted]),
                    "token": model.tokenizer.decode([written]),
                    "margin": float(p[wanted] - p[written]),
                    "own_margin": float(q[written] - q[wanted]),
                }
                del packed[index]
        advance(place + 1)
        if not packed:
            break
    advance(new_tokens)
    return found


def decoded(run: Run, prompt: Sequence[int], chunk: int) -> Iterator[tuple[int, Any]]:
    """The likeliest tokens one after the other, and the log probabilities that each is of."""
    for start, stop in pieces(len(prompt), chunk):
        logits = run.feed(prompt[start:stop], 1)
    while True:
        log_probabilities = logits[0].double().log_softmax(-1)
        token = int(log_probabilities.argmax())
        yield token, log_probabilities
        logits = run.feed([token], 1)
