"""The command ``kvcodec``: ``eval`` and ``bench`` measure, ``info`` says what is installed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from kvcodec import PRESETS, __version__, get_config
from kvcodec.cli_eval import evaluate
from kvcodec.cli_output import (
    PATH,
    STANDARD_OUTPUT,
    UserError,
    check_distinct,
    check_environment,
    check_files,
    json_option,
    progress_bar,
    write_json,
)

if TYPE_CHECKING:
    from kvcodec.benchmark import ModelSettings, PeerMeasurement

__all__ = ["main"]

ON_MODELS = {"model", "contexts", "names", "threads", "repeats", "json_file"}
MOST_LOAD = 0.5


@contextmanager
def _user_errors() -> Iterator[None]:
    """Turn what the package, click and the system say about wrong input into a `UserError`.

    A TypeError stays what it is: nothing that is given on a command line leads to one.
    """
    try:
        yield
    except click.ClickException as error:
        raise UserError(error.format_message()) from None
    except BrokenPipeError:
        raise
    except OSError as error:
        file = f"{error.filename}: " if error.filename else ""
        raise UserError(f"{file}{error.strerror or error}") from None
    except ValueError as error:
        raise UserError(str(error)) from None


class _Commands(click.Group):
    """A group of commands that report every user error in one line."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _user_errors():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _user_errors():
            return super().invoke(ctx)


@click.group(cls=_Commands, invoke_without_command=True)
@click.version_option(__version__, prog_name="kvcodec")
@click.pass_context
def main(context: click.Context) -> None:
    """Keep a transformer's KV cache in 2 to 8 bits."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


main.add_command(evaluate)


def _shape_option(name: str, default: int, description: str) -> Callable[[Any], Any]:
    """An option for a part of the shape that is measured."""
    return click.option(
        name,
        type=click.IntRange(1),
        metavar="N",
        default=default,
        show_default=True,
        help=description,
    )


@main.command("bench")
@click.option(
    "--model",
    metavar="PATH",
    help="Measure decoding on a language model instead, beside other caches of Transformers: a "
    "folder of Transformers or a .gguf file (needs the extra hf). Goes with --context, --codec, "
    "--threads, --repeats and --json.",
)
@click.option(
    "--context",
    "contexts",
    type=click.IntRange(1, 2**24),
    metavar="N",
    multiple=True,
    help="Tokens that a decoded query attends to. Can be repeated. By default 4096 and 32768, "
    "and with --model 4096 and 8000.",
)
@click.option(
    "--codec",
    "names",
    metavar="NAME",
    multiple=True,
    help="What to measure beside int4, by a name as of kvcodec eval: int8, lm4/lm2. Can be "
    "repeated. By default all presets and lm4/lm2, and with --model int8.",
)
@click.option(
    "--threads",
    type=click.IntRange(1, 1024),
    metavar="N",
    multiple=True,
    help="Threads. Can be repeated. By default KVCODEC_NUM_THREADS, or one for each processor.",
)
@_shape_option("--q-heads", 32, "Query heads, a multiple of the KV heads.")
@_shape_option("--kv-heads", 8, "Heads of keys and values.")
@_shape_option(
    "--head-dim",
    128,
    "Channels of a head; codecs that rotate need one that a Hadamard matrix is known for.",
)
@click.option(
    "--repeats",
    type=click.IntRange(1),
    metavar="N",
    help="Rounds that each median is taken of. By default 25.",
)
@click.option("--quick", is_flag=True, help="Few codecs, small sizes, 5 rounds: a look, no figure.")
@json_option
@click.option(
    "--plot",
    "plot_file",
    type=PATH,
    metavar="FILE",
    help="Draw time against context, as .pdf, .png or .svg (needs matplotlib).",
)
@click.option(
    "--peers",
    is_flag=True,
    help="Measure other libraries too, those of torch, onnxruntime, openvino, fht-cpu, faiss-cpu "
    "(extra bench) and llama-cpp-python that are installed.",
)
@click.option(
    "--llama",
    type=PATH,
    metavar="PATH",
    help="Turns on --peers, with the ggml of llama.cpp at PATH: its library or the folder of it.",
)
@click.option(
    "--ik-llama",
    type=PATH,
    metavar="PATH",
    help="Turns on --peers, with the ggml of ik_llama.cpp at PATH too.",
)
@click.pass_context
def bench(
    context: click.Context,
    /,
    model: str | None,
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

    With --model, the model decodes the same tokens with a KVCodecCache, a DynamicCache and a
    QuantizedCache, in float32 and in bfloat16.
    """
    from kvcodec import benchmark
    from kvcodec.benchmark.memory import check_memory
    from kvcodec.evaluation import check_plot, print_table

    check_environment()
    if model is not None:
        _check_together(context)
        _bench_model(
            benchmark.make_model_settings(model, contexts, names, threads, repeats), json_file
        )
        return
    shape = benchmark.Shape(q_heads, kv_heads, head_dim)
    settings = benchmark.make_settings(shape, contexts, names, threads, repeats, quick)
    libraries = _ggml_libraries(llama, ik_llama)
    if plot_file is not None:
        check_plot(plot_file)
    check_files(json_file, plot_file)
    check_distinct(json_file=json_file, plot_file=plot_file)
    check_memory(settings, peers or bool(libraries))
    machine = benchmark.describe_machine()
    _warn_of_load(machine["load"], settings.threads)
    try:
        with progress_bar("measuring") as progress:
            rows = benchmark.run_benchmark(settings, progress)
    except MemoryError:
        raise ValueError("the caches do not fit into memory; take shorter contexts.") from None
    compared: list[PeerMeasurement] = []
    missing: dict[str, str] = {}
    if peers or libraries:
        with progress_bar("measuring other libraries") as progress:
            compared, missing = benchmark.compare_with_peers(settings, libraries, progress)
    if plot_file is not None:
        benchmark.draw_times(rows, settings, plot_file)
    if json_file is not None:
        command = settings.command(*_peer_words(peers, llama, ik_llama))
        write_json(benchmark.results_to_json(command, machine, rows, compared, missing), json_file)
    if json_file != STANDARD_OUTPUT:
        click.echo(benchmark.describe_settings(settings, machine))
        for table in benchmark.make_tables(rows, compared):
            print_table(table)
        for name, reason in missing.items():
            click.echo(f"Not measured: {name}: {reason}")


def _warn_of_load(load: float | None, threads: Sequence[int]) -> None:
    """Say that figures will be of little use while other work runs."""
    if load is None or load <= MOST_LOAD:
        return
    several = max(threads) > 1
    harm = "makes figures of several threads worthless" if several else "disturbs figures"
    warning = f"Warning: the load of the last minute was {load:.2f}, and above {MOST_LOAD} other "
    warning += f"work {harm}"
    if several and os.environ.get("OMP_WAIT_POLICY", "").lower() != "passive":
        warning += "; OMP_WAIT_POLICY=passive in the environment makes threads that wait sleep"
    click.echo(f"{warning}.", err=True)


def _check_together(context: click.Context) -> None:
    """Report an option that would have no effect with --model."""
    for option in context.command.params:
        given = context.get_parameter_source(option.name) == ParameterSource.COMMANDLINE
        if given and option.name not in ON_MODELS:
            raise ValueError(
                f"{option.opts[0]} is not possible with --model, which goes with --context, "
                "--codec, --threads, --repeats and --json."
            )


def _bench_model(settings: ModelSettings, json_file: str | None) -> None:
    """Measure decoding on a language model."""
    from kvcodec import benchmark
    from kvcodec.evaluation import load_language_model, print_table

    check_files(json_file)
    machine = benchmark.describe_machine()
    model = load_language_model(settings.path)
    _warn_of_load(machine["load"], settings.threads)
    with progress_bar("measuring") as progress:
        rows, missing = benchmark.run_model_benchmark(model, settings, progress)
    if json_file is not None:
        command = settings.command()
        write_json(benchmark.results_to_json(command, machine, rows, missing=missing), json_file)
    if json_file != STANDARD_OUTPUT:
        click.echo(benchmark.describe_model_settings(settings, machine, model.source))
        print_table(benchmark.make_decoding_table(rows))
        for name, reason in missing.items():
            click.echo(f"Not measured: {name}: {reason}")


@main.command()
@json_option
def info(json_file: str | None) -> None:
    """Say what is installed and which presets there are."""
    check_environment()
    check_files(json_file)
    facts = get_config()
    if json_file is not None:
        write_json(json.dumps(facts | {"presets": PRESETS}, indent=2), json_file)
    if json_file != STANDARD_OUTPUT:
        for name, value in facts.items():
            click.echo(f"{name}: {', '.join(value) if isinstance(value, list) else value}")
        click.echo("presets:")
        for name, options in PRESETS.items():
            described = ", ".join(f"{option}={value}" for option, value in options.items())
            click.echo(f"  {name}: {described}")


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
