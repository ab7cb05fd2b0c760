"""Measurements on a model, cut into units that can be stored, resumed and run elsewhere.

A unit is a chunk of text or the probes of one depth; the result of a unit with one codec is a dict
that JSON can hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvcodec.evaluation.codecs import CodecPair
from kvcodec.evaluation.language_model import (
    ChunkOptions,
    Predictions,
    evaluate_chunk,
    packed_run,
    pieces,
)
from kvcodec.evaluation.model_quality import ModelQuality, summarize
from kvcodec.evaluation.models import LanguageModel
from kvcodec.evaluation.needle import NeedleQuality, Probes, run_probes, wilson_interval
from kvcodec.evaluation.store import Store

__all__ = [
    "Unit",
    "check_tokens",
    "chunk_units",
    "divergence_rows",
    "measure",
    "needle_rows",
    "needle_units",
]

Results = dict[tuple[str, str], dict[str, Any]]
EXACT_NAME = "fp32"


@dataclass(frozen=True)
class Unit:
    """A piece of a measurement.

    Attributes
    ----------
    name : str
        Its name in the measurement.
    work : list of int or Probes
        The tokens of a chunk, or probes.
    options : ChunkOptions
        How it is run.
    """

    name: str
    work: list[int] | Probes
    options: ChunkOptions

    @property
    def tokens(self) -> int:
        """Tokens of the longest context."""
        return self.work.length if isinstance(self.work, Probes) else len(self.work) - 1

    @property
    def steps(self) -> int:
        """How often progress is told for each codec."""
        if isinstance(self.work, Probes):
            return len(self.work.rests)
        return len(pieces(self.tokens, self.options.chunk))

    def run(
        self, model: LanguageModel, pairs: Sequence[CodecPair], advance: Callable[[], None]
    ) -> list[dict[str, Any]]:
        """Run it with some codecs.

        Parameters
        ----------
        model : LanguageModel
            The model.
        pairs : sequence of CodecPair
            The codecs.
        advance : callable
            Is called after each step of each codec.

        Returns
        -------
        list of dict
            The result with each codec.

        Raises
        ------
        ValueError
            If a codec does not fit the model.
        """
        if not isinstance(self.work, Probes):
            found = evaluate_chunk(model, self.work, pairs, self.options, advance)
            return [predictions.to_dict() for predictions in found]
        return [
            {"found": run_probes(model, self.work, pair, self.options, advance)} for pair in pairs
        ]

    def can_be_result(self, codec: str, result: Any) -> bool:
        """Whether `run` can have given this.

        Parameters
        ----------
        codec : str
            The name of the codec pair.
        result : object
            What JSON held.

        Returns
        -------
        bool
            Whether names, kinds and counts are right.
        """
        if not isinstance(self.work, Probes):
            last = self.options.last
            counted = self.tokens if last is None else min(last, self.tokens)
            return Predictions.can_be_dict(result, codec, self.tokens, counted)
        return (
            isinstance(result, dict)
            and set(result) == {"found"}
            and isinstance(result["found"], list)
            and [type(each) for each in result["found"]] == [bool] * len(self.work.rests)
        )


def chunk_units(chunks: Sequence[list[int]], options: ChunkOptions) -> list[Unit]:
    """A unit for each chunk of a text.

    Parameters
    ----------
    chunks : sequence of list of int
        Of `cut_chunks`.
    options : ChunkOptions
        How they are run.

    Returns
    -------
    list of Unit
        One for each chunk, in order.

    Examples
    --------
    >>> from kvcodec.evaluation import ChunkOptions
    >>> from kvcodec.evaluation.measure import chunk_units
    >>> [(unit.name, unit.tokens) for unit in chunk_units([[1, 2, 3]], ChunkOptions())]
    [('chunk 0', 2)]
    """
    return [Unit(f"chunk {index}", chunk, options) for index, chunk in enumerate(chunks)]


def needle_units(probes: Sequence[Probes], options: ChunkOptions) -> list[Unit]:
    """A unit for each depth.

    Parameters
    ----------
    probes : sequence of Probes
        Of `make_probes`, of one or more lengths.
    options : ChunkOptions
        How they are run.

    Returns
    -------
    list of Unit
        One for each depth, in order.

    Examples
    --------
    >>> from kvcodec.evaluation import ChunkOptions, Probes
    >>> from kvcodec.evaluation.measure import needle_units
    >>> [unit.name for unit in needle_units([Probes(512, 0.25, [], [], [])], ChunkOptions())]
    ['length 512, depth 0.250000']
    """
    return [Unit(f"length {each.length}, depth {each.depth:.6f}", each, options) for each in probes]


def check_tokens(pair: CodecPair, options: ChunkOptions, tokens: int) -> None:
    """Raise a ValueError that says why a codec pair cannot be measured, whatever the model.

    Parameters
    ----------
    pair : CodecPair
        The codecs.
    options : ChunkOptions
        How the cache is made.
    tokens : int
        Tokens that are fed at least.

    Raises
    ------
    ValueError
        If the pair is for tensors only, or no query would see a packed token.
    """
    if pair.key is None and pair.exact_dtype is None:
        raise ValueError(f"{pair.name} is for tensors; a cache keeps exact tokens as fp32 or bf16.")
    needed = options.sinks + options.recent + pair.block
    if pair.key is not None and tokens < needed:
        raise ValueError(
            f"no query sees a packed token: with sinks={options.sinks}, recent={options.recent} "
            f"and blocks of {pair.block} it takes {needed} tokens, but {tokens} are given."
        )


def measure(
    model: LanguageModel,
    units: Sequence[Unit],
    pairs: Sequence[CodecPair],
    *,
    store: Store | None = None,
    progress: Callable[[float], None] | None = None,
) -> Results:
    """Run units with codecs, one after the other, all codecs of a unit together.

    Parameters
    ----------
    model : LanguageModel
        The model.
    units : sequence of Unit
        What is run.
    pairs : sequence of CodecPair
        The codecs.
    store : Store, optional
        Gives results that are there already and keeps new ones.
    progress : callable, optional
        Is called with the part of the work that is done, from 0 to 1.

    Returns
    -------
    dict
        The result of each name of a unit and name of a codec.

    Raises
    ------
    ValueError
        If a codec does not fit the model.
    """
    results, missing = stored_results(units, pairs, store)
    steps = sum(unit.steps * len(lacking) for unit, lacking in missing)
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done / steps)

    for unit, lacking in missing:
        found = unit.run(model, lacking, advance)
        for pair, result in zip(lacking, found, strict=True):
            keep_result(results, store, unit, pair, result)
    return results


def stored_results(
    units: Sequence[Unit], pairs: Sequence[CodecPair], store: Store | None
) -> tuple[Results, list[tuple[Unit, list[CodecPair]]]]:
    """What a store has already, and the codecs that each unit lacks."""
    results: Results = {}
    missing = []
    for unit in units:
        lacking = []
        for pair in pairs:
            found = None if store is None else _stored_result(store, unit, pair)
            if found is None:
                lacking.append(pair)
            else:
                results[unit.name, pair.name] = found
        if lacking:
            missing.append((unit, lacking))
    return results, missing


def _stored_result(store: Store, unit: Unit, pair: CodecPair) -> dict[str, Any] | None:
    """What a store has of a unit and codec; raises if it cannot be that."""
    name = _stored_name(unit, pair)
    found = store.get(name)
    if found is not None and not unit.can_be_result(pair.name, found):
        raise store.damaged(name)
    return found


def _stored_name(unit: Unit, pair: CodecPair) -> str:
    return f"{unit.name}, {pair.name}"


def keep_result(
    results: Results, store: Store | None, unit: Unit, pair: CodecPair, result: dict[str, Any]
) -> None:
    """Add a result, and store it."""
    results[unit.name, pair.name] = result
    if store is not None:
        store.put(_stored_name(unit, pair), result)


def divergence_rows(
    model: LanguageModel,
    results: Results,
    units: Sequence[Unit],
    pairs: Sequence[CodecPair],
    seed: int,
) -> list[ModelQuality]:
    """The figures of each codec over the chunks.

    Parameters
    ----------
    model : LanguageModel
        The model that was measured.
    results : dict
        Of `measure`.
    units, pairs
        What was measured.
    seed : int
        Seed of the drawing that gives the errors.

    Returns
    -------
    list of ModelQuality
        One for each pair.
    """
    return [
        summarize(
            model.source,
            [Predictions(**results[unit.name, pair.name]) for unit in units],
            units[0].options,
            pair.block,
            seed,
        )
        for pair in pairs
    ]


def needle_rows(
    model: LanguageModel,
    results: Results,
    units: Sequence[Unit],
    pairs: Sequence[CodecPair],
    seed: int,
) -> list[NeedleQuality]:
    """How often each codec lets the model find the code, at each length.

    Parameters
    ----------
    model : LanguageModel
        The model that was measured.
    results : dict
        Of `measure`.
    units, pairs
        What was measured.
    seed : int
        The seed of the probes.

    Returns
    -------
    list of NeedleQuality
        One for each pair and length.
    """
    rows = []
    lengths = sorted({unit.tokens for unit in units})
    for pair in pairs:
        run = packed_run(model, pair, units[0].options)
        about = Predictions.of(pair, run.cache.kv.config)
        for length in lengths:
            of_length = [unit for unit in units if unit.tokens == length]
            found = _found(results, of_length, pair.name)
            exact = _found(results, of_length, EXACT_NAME)
            low, high = wilson_interval(sum(found), len(found))
            rows.append(
                NeedleQuality(
                    model=model.source,
                    name=pair.name,
                    key=about.key,
                    value=about.value,
                    bits_per_value=about.bits_per_value,
                    length=length,
                    found=sum(found),
                    probes=len(found),
                    share=sum(found) / len(found),
                    share_low=low,
                    share_high=high,
                    same_as_exact=_agreement(found, exact),
                    sinks=units[0].options.sinks,
                    recent=units[0].options.recent,
                    block=pair.block,
                    seed=seed,
                )
            )
    return rows


def _found(results: Results, units: Sequence[Unit], name: str) -> list[bool]:
    """Of every probe of some units; empty if the codec was not measured."""
    there = [results[unit.name, name] for unit in units if (unit.name, name) in results]
    return [found for result in there for found in result["found"]]


def _agreement(found: Sequence[bool], exact: Sequence[bool]) -> float | None:
    if len(exact) != len(found):
        return None
    return sum(a == b for a, b in zip(found, exact, strict=True)) / len(found)
