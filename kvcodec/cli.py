"""The command ``kvcodec``: ``eval`` and ``bench`` measure, ``info`` says what is installed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvcodec import PRESETS, __version__, get_config

if TYPE_CHECKING:
    from kvcodec.benchmark import PeerMeasurement
    from kvcodec.evaluation import AttentionQuality, CodecPair, Tensors

__all__ = ["main"]

STANDARD_OUTPUT = "-"


class _UserError(click.ClickException):
    """Something that the user can put right: one line on standard error, exit code 2."""

    exit_code = 2

    def format_message(self) -> str:
        return " ".join(self.message.split())


@contextmanager
def _user_errors() -> Iterator[None]:
    """Turn what the package, click and the system say about wrong input into a `_UserError`.

    A TypeError stays what it is: nothing that is given on a command line leads to one.
    """
    try:
        yield
    except click.ClickException as error:
        raise _UserError(error.format_message()) from None
    except BrokenPipeError:
        raise
    except OSError as error:
        file = f"{error.filename}: " if error.filename else ""
        raise _UserError(f"{file}{error.strerror or error}") from None
    except ValueError as error:
        raise _UserError(str(error)) from None


class _Commands(click.Group):
    """A group of commands that report every user error in one line."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _user_errors():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _user_errors():
            return super().invoke(ctx)


def _json_option(command: Callable[..., None]) -> Callable[..., None]:
    return click.option(
        "--json",
        "json_file",
        metavar="[FILE]",
        is_flag=False,
        flag_value=STANDARD_OUTPUT,
        help="Write JSON to FILE, or print it instead of the text if FILE is - or left out.",
    )(command)


@click.group(cls=_Commands, invoke_without_command=True)
@click.version_option(__version__, prog_name="kvcodec")
@click.pass_context
def main(context: click.Context) -> None:
    """Keep a transformer's KV cache in 2 to 8 bits."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@main.command("eval")
@click.option(
    "--tensors",
    "tensors_file",
    metavar="FILE",
    help="An npz file with the arrays q (layers, q_heads, q_len, head_dim), k and v (layers, "
    "kv_heads, tokens, head_dim) and optionally positions (q_len,), the token of each query. "
    "By default the sample that is shipped.",
)
@click.option(
    "--codec",
    "names",
    metavar="NAME",
    multiple=True,
    help="What to measure: a preset (int4), presets of keys and values (lm4/lm2), either with a "
    "word behind it (unrotated, plain, centered, g128), or fp16. Can be repeated. By default a "
    "table of all kinds.",
)
@click.option(
    "--sinks",
    type=click.IntRange(min=0),
    default=4,
    show_default=True,
    help="Tokens at the beginning that stay exact.",
)
@click.option(
    "--recent",
    type=click.IntRange(min=0),
    default=32,
    show_default=True,
    help="Newest tokens that stay exact.",
)
@_json_option
@click.option(
    "--plot",
    "plot_file",
    metavar="FILE",
    help="Draw error and KL against bits a value, as .pdf, .png or .svg (needs matplotlib).",
)
def evaluate(
    tensors_file: str | None,
    names: tuple[str, ...],
    sinks: int,
    recent: int,
    json_file: str | None,
    plot_file: str | None,
) -> None:
    """Measure what codecs do to attention.

    Queries, keys and values of some layers go through causal attention with the newest tokens and
    the first ones exact and whole blocks between them packed. Reported for each codec: stored bits,
    error of the decoded keys and values, KL divergence of the attention distribution, and error of
    the attention output.
    """
    from kvcodec import evaluation

    _check_environment()
    pairs = _chosen_pairs(names)
    if plot_file is not None:
        evaluation.check_plot(plot_file)
    _check_files(json_file, plot_file)
    _check_distinct(tensors_file=tensors_file, json_file=json_file, plot_file=plot_file)
    tensors = (
        evaluation.sample_tensors()
        if tensors_file is None
        else evaluation.load_tensors(tensors_file)
    )
    if not names:
        pairs = _possible_pairs(pairs, tensors, sinks, recent)
    rows = _evaluate_with_progress(tensors, pairs, sinks, recent)
    _note_unequalized(rows, pairs, sinks)
    if plot_file is not None:
        evaluation.draw_plot(rows, tensors, plot_file)
    if json_file is not None:
        _write_json(evaluation.to_json(rows), json_file)
    if json_file != STANDARD_OUTPUT:
        evaluation.print_table(evaluation.make_table(rows, tensors))


@main.command("bench")
@click.option(
    "--context",
    "contexts",
    type=click.IntRange(1, 2**24),
    metavar="N",
    multiple=True,
    help="Tokens that a decoded query attends to. Can be repeated. By default 4096 and 32768.",
)
@click.option(
    "--codec",
    "names",
    metavar="NAME",
    multiple=True,
    help="What to measure beside int4, by a name as of kvcodec eval: int8, lm4/lm2. Can be "
    "repeated. By default all presets.",
)
@click.option(
    "--threads",
    type=click.IntRange(1, 1024),
    metavar="N",
    multiple=True,
    help="Threads. Can be repeated. By default as many as other calls use.",
)
@click.option("--q-heads", type=click.IntRange(1), default=32, show_default=True)
@click.option("--kv-heads", type=click.IntRange(1), default=8, show_default=True)
@click.option("--head-dim", type=click.IntRange(1), default=128, show_default=True)
@click.option(
    "--repeats",
    type=click.IntRange(1),
    metavar="N",
    help="Rounds that each median is taken of. By default 25.",
)
@click.option("--quick", is_flag=True, help="Few codecs, small sizes, 5 rounds: a look, no figure.")
@_json_option
@click.option(
    "--plot",
    "plot_file",
    metavar="FILE",
    help="Draw time against context, as .pdf, .png or .svg (needs matplotlib).",
)
@click.option(
    "--peers",
    is_flag=True,
    help="Measure other libraries too, those of torch, onnxruntime, openvino, llama-cpp-python, "
    "fht-cpu and faiss-cpu that are installed (extra bench).",
)
@click.option("--llama", metavar="PATH", help="--peers, with the ggml of llama.cpp from here.")
@click.option("--ik-llama", metavar="PATH", help="--peers, with the ggml of ik_llama.cpp too.")
def bench(
    contexts: tuple[int, ...],
    names: tuple[str, ...],
    threads: tuple[int, ...],
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    repeats: int | None,
    quick: bool,
    json_file: str | None,
    plot_file: str | None,
    peers: bool,
    llama: str | None,
    ik_llama: str | None,
) -> None:
    """Measure how fast codecs and attention are.

    What is compared takes turns in rounds, and a ratio is the median of those within each round:
    to a plain loop that reads as many bytes, to int4, or to another library. Single times are of
    no use where others share the machine.
    """
    from kvcodec import benchmark
    from kvcodec.evaluation import check_plot, print_table

    _check_environment()
    shape = benchmark.Shape(q_heads, kv_heads, head_dim)
    settings = benchmark.make_settings(shape, contexts, names, threads, repeats, quick)
    libraries = _ggml_libraries(llama, ik_llama)
    if plot_file is not None:
        check_plot(plot_file)
    _check_files(json_file, plot_file)
    _check_distinct(json_file=json_file, plot_file=plot_file)
    machine = benchmark.describe_machine()
    try:
        with _progress("measuring") as progress:
            rows = benchmark.run_benchmark(settings, progress)
    except MemoryError:
        raise ValueError("the caches do not fit into memory; take shorter contexts.") from None
    compared: list[PeerMeasurement] = []
    missing: dict[str, str] = {}
    if peers or libraries:
        with _progress("measuring other libraries") as progress:
            compared, missing = benchmark.compare_with_peers(settings, libraries, progress)
    if plot_file is not None:
        benchmark.draw_times(rows, settings, plot_file)
    if json_file is not None:
        command = settings.command(*_peer_words(peers, llama, ik_llama))
        _write_json(benchmark.results_to_json(command, machine, rows, compared, missing), json_file)
    if json_file != STANDARD_OUTPUT:
        click.echo(benchmark.describe_settings(settings, machine))
        for table in benchmark.make_tables(rows, compared):
            print_table(table)
        for name, reason in missing.items():
            click.echo(f"Not measured: {name}: {reason}")


@main.command()
@_json_option
def info(json_file: str | None) -> None:
    """Say what is installed and which presets there are."""
    _check_environment()
    _check_files(json_file)
    facts = get_config()
    if json_file is not None:
        _write_json(json.dumps(facts | {"presets": PRESETS}, indent=2), json_file)
    if json_file != STANDARD_OUTPUT:
        for name, value in facts.items():
            click.echo(f"{name}: {', '.join(value) if isinstance(value, list) else value}")
        click.echo("presets:")
        for name, options in PRESETS.items():
            described = ", ".join(f"{option}={value}" for option, value in options.items())
            click.echo(f"  {name}: {described}")


def _check_environment() -> None:
    """Report a backend that was asked for in the environment and is not there."""
    try:
        get_config()
    except RuntimeError as error:
        raise _UserError(str(error)) from None


def _check_files(*files: str | None) -> None:
    """Report a file that could not be written, before there is anything to write."""
    from kvcodec.evaluation import check_writable

    for file in files:
        if file not in (None, STANDARD_OUTPUT):
            check_writable(file)


def _check_distinct(**files: str | None) -> None:
    """Report an output that would replace the input or the other output."""
    seen: dict[Path, str] = {}
    for name, file in files.items():
        if file in (None, STANDARD_OUTPUT):
            continue
        option = f"--{name.removesuffix('_file')}"
        path = Path(file).resolve()
        if path in seen and (path.is_file() or not path.exists()):
            raise ValueError(
                f"{option} must be another file than {seen[path]}, but both are {file}."
            )
        seen[path] = option


def _ggml_libraries(llama: str | None, ik_llama: str | None) -> dict[str, str]:
    """The libraries that are given by their paths, by the names of the peers."""
    from kvcodec.benchmark.peers.cases import check_library

    given = (("llama.cpp", llama, "--llama"), ("ik_llama", ik_llama, "--ik-llama"))
    return {name: check_library(path, option) for name, path, option in given if path is not None}


def _peer_words(peers: bool, llama: str | None, ik_llama: str | None) -> list[str]:
    """The words of the command that ask for other libraries."""
    words = ["--peers"] if peers else []
    for option, path in (("--llama", llama), ("--ik-llama", ik_llama)):
        words += [] if path is None else [option, path]
    return words


def _chosen_pairs(names: Sequence[str]) -> list[CodecPair]:
    from kvcodec.evaluation import DEFAULT_NAMES, codec_pair

    return list({pair.name: pair for pair in map(codec_pair, names or DEFAULT_NAMES)}.values())


def _possible_pairs(
    pairs: Sequence[CodecPair], tensors: Tensors, sinks: int, recent: int
) -> list[CodecPair]:
    """The pairs that these tensors allow; a note says why others are left out."""
    from kvcodec.evaluation import check_pair

    possible = []
    left_out: dict[str, list[str]] = {}
    for pair in pairs:
        try:
            check_pair(pair, tensors, sinks, recent)
        except ValueError as error:
            left_out.setdefault(str(error), []).append(pair.name)
        else:
            possible.append(pair)
    for reason, names in left_out.items():
        click.echo(f"Note: left out are {', '.join(names)}: {reason}", err=True)
    if not possible:
        raise ValueError(f"no codec can be evaluated on {tensors.source}.")
    return possible


def _evaluate_with_progress(
    tensors: Tensors, pairs: Sequence[CodecPair], sinks: int, recent: int
) -> list[AttentionQuality]:
    from kvcodec.evaluation import evaluate_attention

    with _progress("evaluating") as progress:
        return evaluate_attention(tensors, pairs, sinks=sinks, recent=recent, progress=progress)


@contextmanager
def _progress(what: str) -> Iterator[Callable[[float], None]]:
    """A bar on a terminal, and what tells it the part that is done."""
    from rich.console import Console
    from rich.progress import Progress

    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    bar = Progress(console=Console(stderr=True), transient=True, disable=not is_terminal)
    with bar:
        task = bar.add_task(what, total=1.0)
        yield lambda done: bar.update(task, completed=done)


def _note_unequalized(
    rows: Sequence[AttentionQuality], pairs: Sequence[CodecPair], sinks: int
) -> None:
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
            "the sinks or the first block of tokens, from which the weights are taken.",
            err=True,
        )


def _write_json(text: str, file: str) -> None:
    from kvcodec.evaluation import write_file

    if file == STANDARD_OUTPUT:
        click.echo(text)
    else:
        write_file(file, f"{text}\n".encode())
