"""The command ``kvcodec eval``: on queries, keys and values, or on a language model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from kvcodec import __version__
from kvcodec.cli_output import (
    PATH,
    STANDARD_OUTPUT,
    check_distinct,
    check_environment,
    check_files,
    json_option,
    progress_bar,
    write_json,
)

if TYPE_CHECKING:
    from kvcodec.evaluation import (
        AttentionQuality,
        ChunkOptions,
        CodecPair,
        LanguageModel,
        Tensors,
    )
    from kvcodec.evaluation.measure import Unit
    from kvcodec.evaluation.store import Store

__all__ = ["evaluate"]

DIVERGENCE, NEEDLE, GREEDY = "divergence", "needle", "greedy"
MOST_TOKENS = 2**24
FOR_TENSORS, FOR_MODELS = ("fp16",), ("fp32", "bf16")
EVERYWHERE = {"names", "sinks", "recent", "json_file"}
ON_MODELS = EVERYWHERE | {"model", "task", "text", "chunk", "block"}
IN_UNITS = ON_MODELS | {"seed", "resume", "scheduler"}
ALLOWED = {
    "without --model": EVERYWHERE | {"tensors_file", "plot_file"},
    f"with --task {DIVERGENCE}": IN_UNITS | {"tokens", "chunks", "last", "plot_file"},
    f"with --task {NEEDLE}": IN_UNITS | {"lengths", "probes"},
    f"with --task {GREEDY}": ON_MODELS | {"tokens", "prompts", "new_tokens"},
}


def _lengths(_: click.Context, option: click.Parameter, given: str) -> tuple[int, ...]:
    """Numbers with commas between them."""
    words = given.split(",")
    if not all(word.strip().isdecimal() and 0 < int(word) <= MOST_TOKENS for word in words):
        raise click.BadParameter(
            f"must be numbers from 1 to {MOST_TOKENS} with commas between them, but {given!r} was "
            "given.",
            param=option,
        )
    return tuple(dict.fromkeys(int(word) for word in words))


def _count(
    name: str, default: int, about: str, *, least: int = 1, most: int | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """An option that is a number of things."""
    numbers = click.IntRange(least, most)
    return click.option(name, type=numbers, default=default, show_default=True, help=about)


@click.command("eval")
@click.option(
    "--tensors",
    "tensors_file",
    type=PATH,
    metavar="FILE",
    help="An npz file with the arrays q (layers, q_heads, q_len, head_dim), k and v (layers, "
    "kv_heads, tokens, head_dim) and optionally positions (q_len,), the token of each query. "
    "By default the sample that is shipped.",
)
@click.option(
    "--model",
    metavar="PATH",
    help="Measure on a language model instead: a folder of Transformers or a .gguf file (needs "
    "the extra hf).",
)
@click.option(
    "--task",
    type=click.Choice([DIVERGENCE, NEEDLE, GREEDY]),
    default=DIVERGENCE,
    show_default=True,
    help="With --model: how far predictions of a text are from those of a float32 run, how often "
    "a code that the context mentions once is found, or how long greedy decoding writes the same.",
)
@click.option(
    "--codec",
    "names",
    metavar="NAME",
    multiple=True,
    help="What to measure: a preset (int4), presets of keys and values (lm4/lm2), either with a "
    "word behind it (hadamard, unrotated, plain, centered, g128), fp16 (without --model), or fp32 "
    "or bf16 (with --model). Can be repeated. By default a table of all kinds; with --task needle "
    "fp32, int8, int4 and lm4/lm2, and with --task greedy int8 and int4.",
)
@click.option(
    "--text",
    type=PATH,
    metavar="FILE",
    help="Text in UTF-8 to run the model on. By default the help topics that Python ships.",
)
@_count(
    "--tokens",
    512,
    "Tokens of a chunk of text, and of a prompt of --task greedy.",
    most=MOST_TOKENS,
)
@_count("--chunks", 4, "Chunks of text, evenly spaced.")
@click.option(
    "--last",
    type=click.IntRange(1),
    metavar="N",
    help="Count only the last N predictions of each chunk. By default all.",
)
@click.option(
    "--lengths",
    callback=_lengths,
    default="512,1024",
    show_default=True,
    metavar="N,N",
    help="Tokens of the contexts of --task needle.",
)
@_count("--probes", 100, "Contexts of each length of --task needle.")
@_count("--prompts", 3, "Prompts of --task greedy: chunks of text, evenly spaced.")
@_count(
    "--new-tokens", 24, "Tokens that --task greedy decodes after each prompt.", most=MOST_TOKENS
)
@_count(
    "--chunk", 128, "Tokens that the model is fed in one forward pass. 1 is as slow as generation."
)
@_count("--sinks", 4, "Tokens at the beginning that stay exact.", least=0)
@_count("--recent", 32, "Newest tokens that stay exact.", least=0)
@click.option(
    "--block",
    type=click.IntRange(1),
    metavar="N",
    help="With --model: tokens that are packed at a time. By default those of the codec, 64.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    default=0,
    show_default=True,
    help="With --model: decides the codes and depths of --task needle, and the chunks that are "
    "drawn for standard errors.",
)
@click.option(
    "--resume",
    type=PATH,
    metavar="DIRECTORY",
    help="With --model: keep what is finished in a directory, and go on from there.",
)
@click.option(
    "--scheduler",
    metavar="ADDRESS",
    help="With --model: run on the workers of a Dask scheduler, or on local processes with local "
    "or local:N (needs the extra cluster).",
)
@json_option
@click.option(
    "--plot",
    "plot_file",
    type=PATH,
    metavar="FILE",
    help="Draw error and KL against bits a value, as .pdf, .png or .svg (needs matplotlib).",
)
@click.pass_context
def evaluate(context: click.Context, /, **options: Any) -> None:
    """Measure what codecs do to attention, or to the predictions of a language model.

    Without --model, queries, keys and values of some layers go through causal attention with the
    newest tokens and the first ones exact and whole blocks between them packed. Reported for each
    codec: stored bits, error of the decoded keys and values, KL divergence of the attention
    distribution, and error of the attention output.

    With --model, the model runs on text with its cache packed, as in generation. Reported for each
    codec: KL divergence of the predictions from those of a float32 run, how often the likeliest
    token is the same, perplexity, and speed; or, with --task needle, how often a code is found; or,
    with --task greedy, how many tokens are the same and how close the first other choice was.
    """
    from kvcodec import evaluation

    check_environment()
    _check_together(context, options)
    json_file, plot_file = options["json_file"], options["plot_file"]
    if plot_file is not None:
        evaluation.check_plot(plot_file)
    check_files(json_file, plot_file)
    inputs = {name: options[name] for name in ("tensors_file", "text")}
    check_distinct(**inputs, json_file=json_file, plot_file=plot_file)
    if options["model"] is not None and options["task"] == NEEDLE:
        rows, table = _needle(options)
    elif options["model"] is not None and options["task"] == GREEDY:
        rows, table = _greedy(options)
    else:
        run = _on_tensors if options["model"] is None else _divergence
        rows, table, draw = run(options)
        if plot_file is not None:
            draw(plot_file)
    if json_file is not None:
        write_json(evaluation.to_json(rows), json_file)
    if json_file != STANDARD_OUTPUT:
        evaluation.print_table(table)


def _check_together(context: click.Context, options: dict[str, Any]) -> None:
    """Report an option that would have no effect."""
    mode = "without --model" if options["model"] is None else f"with --task {options['task']}"
    by_default = context.get_parameter_source("task") == ParameterSource.DEFAULT
    for option in context.command.params:
        given = context.get_parameter_source(option.name) == ParameterSource.COMMANDLINE
        if given and option.name not in ALLOWED[mode]:
            possible = " or ".join(
                where for where, names in ALLOWED.items() if option.name in names
            )
            if not possible or option.name in ON_MODELS:
                possible = "with --model"
            message = f"{option.opts[0]} is possible only {possible}"
            if possible not in ("with --model", "without --model"):
                default = ", the default" if options["model"] is not None and by_default else ""
                message += f", not {mode}{default}"
            raise ValueError(f"{message}.")


def _chosen_pairs(
    names: Sequence[str],
    default: Sequence[str],
    number_types: Sequence[str],
    block: int | None = None,
) -> list[CodecPair]:
    from kvcodec.evaluation.codecs import codec_pair, distinct_pairs

    pairs = []
    for name in names or default:
        try:
            pairs.append(codec_pair(name, block, number_types))
        except ValueError as error:
            if names:
                raise
            click.echo(f"Note: left out is {name}: {error}", err=True)
    return distinct_pairs(pairs)


def _possible_pairs(
    pairs: Sequence[CodecPair], check: Callable[[CodecPair], None], source: str
) -> list[CodecPair]:
    """The pairs that a check lets pass; a note says why others are left out."""
    possible = []
    left_out: dict[str, list[str]] = {}
    for pair in pairs:
        try:
            check(pair)
        except ValueError as error:
            reason = str(error).removeprefix(f"{pair.name} ")
            left_out.setdefault(reason, []).append(pair.name)
        else:
            possible.append(pair)
    if not possible:
        raise ValueError(f"no codec can be evaluated on {source}: {next(iter(left_out))}")
    for reason, names in left_out.items():
        click.echo(f"Note: left out are {', '.join(names)}: {reason}", err=True)
    return possible


# On queries, keys and values


def _on_tensors(options: dict[str, Any]) -> tuple[Any, Any, Callable[[str], None]]:
    from kvcodec import evaluation

    file, names = options["tensors_file"], options["names"]
    sinks, recent = options["sinks"], options["recent"]
    pairs = _chosen_pairs(names, evaluation.DEFAULT_NAMES, FOR_TENSORS)
    tensors = evaluation.sample_tensors() if file is None else evaluation.load_tensors(file)
    if not names:
        pairs = _possible_pairs(
            pairs,
            lambda pair: evaluation.check_pair(pair, tensors, sinks, recent),
            tensors.source,
        )
    rows = _evaluate_tensors(tensors, pairs, sinks, recent)
    _note_unequalized(rows, pairs)
    table = evaluation.make_table(rows, tensors)
    return rows, table, lambda file: evaluation.draw_plot(rows, tensors, file)


def _evaluate_tensors(
    tensors: Tensors, pairs: Sequence[CodecPair], sinks: int, recent: int
) -> list[AttentionQuality]:
    from kvcodec.evaluation import evaluate_attention

    with progress_bar("evaluating") as progress:
        return evaluate_attention(tensors, pairs, sinks=sinks, recent=recent, progress=progress)


def _note_unequalized(rows: Sequence[AttentionQuality], pairs: Sequence[CodecPair]) -> None:
    """Say which keys would have been equalized if there had been early queries."""
    names = [
        row.name
        for row, pair in zip(rows, pairs, strict=True)
        if pair.key is not None and row.key is not None
        if pair.key.for_side("key").equalize and not row.key["equalize"]
    ]
    if names:
        click.echo(
            f"Note: the keys of {', '.join(names)} are not equalized, since no query belongs to "
            "the sinks or the first block of tokens, from which the weights are taken; queries of "
            "a file without positions are those of the newest tokens.",
            err=True,
        )


# On a language model


def _divergence(options: dict[str, Any]) -> tuple[Any, Any, Callable[[str], None]]:
    from kvcodec import evaluation
    from kvcodec.evaluation.measure import chunk_units, divergence_rows

    tokens, chunks = options["tokens"], options["chunks"]
    begun = _begin(options, evaluation.MODEL_NAMES, tokens, ("tokens", "chunks"))
    cut = evaluation.cut_chunks(begun.tokens, begun.model.first_tokens, tokens, chunks)
    units = chunk_units(cut, begun.run)
    pairs, results = _measure(options, begun, units)
    rows = divergence_rows(begun.model, results, units, pairs, options["seed"])
    table = evaluation.make_model_table(rows)
    return rows, table, lambda file: evaluation.draw_model_plot(rows, file)


def _needle(options: dict[str, Any]) -> tuple[Any, Any]:
    from kvcodec import evaluation
    from kvcodec.evaluation.measure import needle_rows, needle_units

    lengths, count, seed = options["lengths"], options["probes"], options["seed"]
    about = ("lengths", "probes", "seed")
    begun = _begin(options, evaluation.NEEDLE_NAMES, min(lengths), about)
    probes = [
        each
        for length in lengths
        for each in evaluation.make_probes(begun.model, begun.text, length, count, seed)
    ]
    units = needle_units(probes, begun.run)
    pairs, results = _measure(options, begun, units)
    rows = needle_rows(begun.model, results, units, pairs, seed)
    return rows, evaluation.make_needle_table(rows)


def _greedy(options: dict[str, Any]) -> tuple[Any, Any]:
    from kvcodec import evaluation

    tokens, count, new_tokens = options["tokens"], options["prompts"], options["new_tokens"]
    begun = _begin(options, evaluation.GREEDY_NAMES, tokens + new_tokens - 1)
    cut = evaluation.cut_chunks(begun.tokens, begun.model.first_tokens, tokens, count)
    prompts = [chunk[:-1] for chunk in cut]
    pairs = _fitting_pairs(options, begun)
    with progress_bar("evaluating") as progress:
        rows = evaluation.compare_greedy(
            begun.model, prompts, pairs, new_tokens, begun.run, progress
        )
    return rows, evaluation.make_greedy_table(rows)


@dataclass(frozen=True)
class _Begun:
    """A task whose options have been checked, and the model that it runs."""

    model: LanguageModel
    text: str
    pairs: Sequence[CodecPair]
    run: ChunkOptions
    fed: int
    store: Store | None

    @property
    def tokens(self) -> list[int]:
        return self.model.encode(self.text)


def _begin(
    options: dict[str, Any], default: Sequence[str], fed: int, about: Sequence[str] = ()
) -> _Begun:
    """Check all that can be checked without the model, then load it.

    `fed` are the tokens that are fed at least, `about` what else the results depend on. With
    workers, only they need the weights.
    """
    from kvcodec import evaluation
    from kvcodec.evaluation.cluster import check_scheduler
    from kvcodec.evaluation.measure import check_tokens
    from kvcodec.evaluation.models import check_model_path

    pairs = _chosen_pairs(options["names"], default, FOR_MODELS, options["block"])
    if options["scheduler"] is not None:
        check_scheduler(options["scheduler"])
    text = evaluation.read_text(options["text"])
    names = ("sinks", "recent", "chunk", "last")
    run = evaluation.ChunkOptions(**{name: options[name] for name in names})
    for pair in pairs if options["names"] else ():
        check_tokens(pair, run, fed)
    check_model_path(options["model"])
    store = _store(options, run, text, about)
    weights = options["scheduler"] is None
    model = evaluation.load_language_model(options["model"], weights=weights)
    return _Begun(model, text, pairs, run, fed, store)


def _fitting_pairs(options: dict[str, Any], begun: _Begun) -> list[CodecPair]:
    """The pairs, all of which must be possible if they were chosen; else those that are."""
    from kvcodec.evaluation.language_model import packed_run
    from kvcodec.evaluation.measure import check_tokens

    def check(pair: CodecPair) -> None:
        check_tokens(pair, begun.run, begun.fed)
        packed_run(begun.model, pair, begun.run)

    if not options["names"]:
        return _possible_pairs(begun.pairs, check, begun.model.source)
    for pair in begun.pairs:
        check(pair)
    return list(begun.pairs)


def _measure(
    options: dict[str, Any], begun: _Begun, units: Sequence[Unit]
) -> tuple[list[CodecPair], Any]:
    """The pairs that are possible, and their results."""
    from kvcodec.evaluation.cluster import measure_on_cluster
    from kvcodec.evaluation.measure import measure

    pairs, store = _fitting_pairs(options, begun), begun.store
    if store is not None:
        store.begin()
    with progress_bar("evaluating") as progress:
        if options["scheduler"] is None:
            return pairs, measure(begun.model, units, pairs, store=store, progress=progress)
        scheduler, path = options["scheduler"], options["model"]
        return pairs, measure_on_cluster(
            scheduler, path, units, pairs, store=store, progress=progress
        )


def _store(
    options: dict[str, Any], run: ChunkOptions, text: str, about: Sequence[str]
) -> Store | None:
    """The directory of --resume, with a note of all that results depend on."""
    import hashlib

    from kvcodec.evaluation.store import Store, file_digest

    if options["resume"] is None:
        return None
    return Store(
        options["resume"],
        {
            "kvcodec": __version__,
            "task": options["task"],
            "model": file_digest(Path(options["model"])),
            "text": hashlib.sha256(text.encode()).hexdigest(),
            **{name: list(options[name]) if name == "lengths" else options[name] for name in about},
            **asdict(run),
            "block": options["block"],
        },
    )
