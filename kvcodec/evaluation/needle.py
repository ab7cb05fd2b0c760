"""Whether a model still finds a code that a long context mentions once.

A probe is a text with one sentence that gives a code, at some depth, and the question for it at the
end. It counts as found if greedy decoding would write exactly the code: the likeliest token is the
right one at each of its places. Probes of one depth share the text before the sentence, which is
computed once and continued from copies of the cache; a copy gives what a run of its own would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.special import ndtri

from kvcodec.evaluation.codecs import CodecPair
from kvcodec.evaluation.language_model import ChunkOptions, Run, packed_run, pieces
from kvcodec.evaluation.models import LanguageModel

__all__ = ["NeedleQuality", "Probes", "make_probes", "run_probes", "wilson_interval"]

SENTENCE = " The secret code is {code}. Remember it. The secret code is {code}. "
INSTRUCTION = "Read the text and remember the secret code in it.\n\n"
QUESTION = "\n\nWhat is the secret code that the text mentions? Answer with the code only."
ANSWER = "The secret code is "
DIGITS = 5
DEPTHS = 10
CONFIDENCE = 0.95


class Probes(NamedTuple):
    """Probes of one length that share a depth, all as tokens.

    Attributes
    ----------
    length : int
        Tokens of the context: of everything before the answer's code.
    depth : float
        Where the code is, from 0 for the beginning to 1 for the end of the text.
    prefix : list of int
        What all probes begin with.
    rests : list of list of int
        What follows in each probe, the code at its end.
    code_tokens : list of int
        Tokens of the code at the end of each rest.
    """

    length: int
    depth: float
    prefix: list[int]
    rests: list[list[int]]
    code_tokens: list[int]


@dataclass(frozen=True)
class NeedleQuality:
    """How often one codec lets the model find the code, at one length.

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
    length : int
        Tokens of the context.
    found, probes : int
        Probes whose code was found, and all.
    share, share_low, share_high : float
        Their ratio and its Wilson interval of 95%.
    same_as_exact : float or None
        Share of the probes that end as they do with exact keys and values ("fp32"), if that was
        measured too.
    sinks, recent, block, seed : int
        How it was measured.
    """

    model: str
    name: str
    key: dict[str, Any] | None
    value: dict[str, Any] | None
    bits_per_value: float
    length: int
    found: int
    probes: int
    share: float
    share_low: float
    share_high: float
    same_as_exact: float | None
    sinks: int
    recent: int
    block: int
    seed: int


def wilson_interval(found: int, probes: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The Wilson score interval of a share.

    Parameters
    ----------
    found, probes : int
        Successes, and trials, at least one.
    confidence : float, default 0.95
        How often the interval holds the true share.

    Returns
    -------
    tuple of float
        Its ends.

    References
    ----------
    E. B. Wilson, J. Am. Stat. Assoc. 22 (1927) 209.

    Examples
    --------
    >>> from kvcodec.evaluation import wilson_interval
    >>> [round(end, 3) for end in wilson_interval(90, 100)]
    [0.826, 0.945]
    """
    z2 = float(ndtri((1 + confidence) / 2)) ** 2
    share = found / probes
    middle = share + z2 / (2 * probes)
    half = math.sqrt(z2 * (share * (1 - share) / probes + z2 / (4 * probes**2)))
    size = 1 + z2 / probes
    return max((middle - half) / size, 0.0), min((middle + half) / size, 1.0)


def make_probes(
    model: LanguageModel, text: str, length: int, probes: int, seed: int
) -> list[Probes]:
    """Contexts of one length, each with a code somewhere in it.

    Depths are spread evenly, one drawn in each of at most 10 equal parts of the text, and each has
    a stretch of text and codes of its own. Where the tokenizer has a template for conversations,
    text and question are what the user says.

    Parameters
    ----------
    model : LanguageModel
        Whose tokenizer makes the tokens.
    text : str
        What the codes are hidden in.
    length : int
        Tokens of a context.
    probes : int
        How many contexts.
    seed : int
        Decides codes, depths and stretches of text.

    Returns
    -------
    list of Probes
        Those of each depth.

    Raises
    ------
    ValueError
        If the text or the length is too short.

    Examples
    --------
    Only the tokenizer is used, here one with a token for each byte:

    >>> import transformers
    >>> from kvcodec.evaluation import LanguageModel, make_probes, read_text
    >>> model = LanguageModel(None, transformers.ByT5Tokenizer(), "bytes")
    >>> probes = make_probes(model, read_text(), 400, 20, seed=0)
    >>> len(probes), [len(each.rests) for each in probes[:2]]
    (10, [2, 2])
    """
    rng = np.random.default_rng([seed, length])
    tokens = model.encode(text)
    before, after = _frame(model)
    groups = np.array_split(np.arange(probes), min(DEPTHS, probes))
    made = []
    for index, group in enumerate(groups):
        depth = float((index + rng.random()) / len(groups))
        start = float(rng.random())
        codes = rng.integers(10 ** (DIGITS - 1), 10**DIGITS, size=len(group)).tolist()
        made.append(_group(model, tokens, (before, after), length, depth, start, codes))
    return made


def _group(
    model: LanguageModel,
    tokens: Sequence[int],
    frame: tuple[list[int], list[int]],
    length: int,
    depth: float,
    start: float,
    codes: Sequence[int],
) -> Probes:
    before, after = frame
    sentences = [model.encode(SENTENCE.format(code=code)) for code in codes]
    # The codes of a depth may differ in tokens; what follows them makes up for it.
    rooms = [length - len(before) - len(after) - len(sentence) for sentence in sentences]
    least, most = min(rooms), max(rooms)
    if least < 1:
        raise ValueError(
            f"lengths must leave room for text beside sentence and question, at least "
            f"{length - least + 1} tokens, but {length} was given."
        )
    if most > len(tokens):
        raise ValueError(
            f"text must have at least {most} tokens for a context of {length}, but has "
            f"{len(tokens)}."
        )
    first = int(start * (len(tokens) - most + 1))
    stretch = list(tokens[first : first + most])
    cut = round(depth * least)
    answers = [model.encode(str(code)) for code in codes]
    rests = [
        [*sentence, *stretch[cut:room], *after, *answer]
        for sentence, room, answer in zip(sentences, rooms, answers, strict=True)
    ]
    return Probes(length, depth, [*before, *stretch[:cut]], rests, [len(x) for x in answers])


def _frame(model: LanguageModel) -> tuple[list[int], list[int]]:
    """Tokens before the text, and those after it up to the code."""
    if model.tokenizer.chat_template is None:
        before = [*model.first_tokens, *model.encode(INSTRUCTION)]
        return before, model.encode(f"{QUESTION}\n\n{ANSWER}")
    mark = "\N{BLACK SQUARE}"
    said = [{"role": "user", "content": f"{INSTRUCTION}{mark}{QUESTION}"}]
    prompt = model.tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    before, _, after = prompt.partition(mark)
    return model.encode(before), model.encode(after + ANSWER)


def run_probes(
    model: LanguageModel,
    probes: Probes,
    pair: CodecPair,
    options: ChunkOptions,
    advance: Callable[[], None] = lambda: None,
) -> list[bool]:
    """Whether each code is found.

    Parameters
    ----------
    model : LanguageModel
        The model.
    probes : Probes
        Probes of one depth.
    pair : CodecPair
        The codecs.
    options : ChunkOptions
        How the cache is made and how many tokens are fed at a time.
    advance : callable, optional
        Is called after each probe.

    Returns
    -------
    list of bool
        One for each probe.

    Raises
    ------
    ValueError
        If a codec does not fit the model.

    Examples
    --------
    A model with random weights finds nothing:

    >>> import transformers
    >>> from kvcodec.evaluation import (
    ...     ChunkOptions, LanguageModel, codec_pair, make_probes, read_text, run_probes,
    ... )
    >>> config = transformers.LlamaConfig(
    ...     vocab_size=384, hidden_size=128, intermediate_size=64, num_hidden_layers=2,
    ...     num_attention_heads=4, num_key_value_heads=2,
    ... )
    >>> model = LanguageModel(
    ...     transformers.LlamaForCausalLM(config).eval(), transformers.ByT5Tokenizer(), "random"
    ... )
    >>> [probes] = make_probes(model, read_text(), 400, 1, seed=0)
    >>> run_probes(model, probes, codec_pair("int4"), ChunkOptions())
    [False]
    """
    shared = packed_run(model, pair, options)
    for start, stop in pieces(len(probes.prefix), options.chunk):
        shared.feed(probes.prefix[start:stop], 0)
    found = []
    for rest, code_tokens in zip(probes.rests, probes.code_tokens, strict=True):
        run = Run(shared.model, shared.attention, shared.cache.copy())
        found.append(_writes_code(run, rest, code_tokens, options.chunk))
        advance()
    return found


def _writes_code(run: Run, rest: Sequence[int], code_tokens: int, chunk: int) -> bool:
    fed, code = rest[:-1], list(rest[len(rest) - code_tokens :])
    likeliest: list[int] = []
    for start, stop in pieces(len(fed), chunk):
        keep = max(stop - max(start, len(fed) - code_tokens), 0)
        likeliest += run.feed(fed[start:stop], keep).argmax(-1).tolist()
    return likeliest == code
