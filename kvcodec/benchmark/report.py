"""What was measured, as tables, as JSON and as a picture."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvcodec.benchmark.model_suite import DecodingMeasurement
from kvcodec.benchmark.peers import PeerMeasurement
from kvcodec.benchmark.settings import Settings
from kvcodec.benchmark.suite import Measurement
from kvcodec.evaluation.report import check_plot, new_table, save_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

__all__ = ["describe_settings", "draw_times", "make_tables", "results_to_json"]

TASKS = {
    "prefill": "prefill",
    "fwht": "fwht",
    "encode": "encode",
    "block": "encode a block",
    "few": "few tokens",
}
DECODE_TITLE = "attention of one query over a cache"
DECODE_CAPTION = (
    "MB: the packed and exact bytes that it has to read. share of reading: the time of a plain "
    "loop that reads as many, divided by this. Ratios are medians of those within each round."
)
FLOATS_TITLE = "the same with float query and probabilities"
OTHER_TITLE = "other calls"
OTHER_CAPTION = (
    "GB/s: of the float32 input. fwht and encode: vectors; encoding is of one thread. prefill: a "
    "prompt into an empty cache, with attention (exact: without codecs)."
)
PEERS_TITLE = "other libraries, each in a process of its own"
PEERS_CAPTION = (
    "vs: our codec. x: threads. ratio: their time divided by ours, a median of those within each "
    "round; above 1 kvcodec is faster. error: relative error of their output against float64."
)


def describe_settings(settings: Settings, machine: Mapping[str, Any]) -> str:
    """Machine and shapes in a few lines.

    Parameters
    ----------
    settings : Settings
        What was measured.
    machine : mapping
        From `describe_machine`.

    Returns
    -------
    str
        To be printed above the tables.

    Examples
    --------
    >>> from kvcodec.benchmark import describe_machine, describe_settings, make_settings
    >>> print(describe_settings(make_settings(), describe_machine()))
    kvcodec ...
    """
    shape = settings.shape
    return (
        f"{machine_text(machine)}\n"
        f"{shape.q_heads} query heads, {shape.kv_heads} KV heads, head_dim {shape.head_dim}; "
        f"medians of {settings.repeats} rounds"
    )


def machine_text(machine: Mapping[str, Any]) -> str:
    """What kvcodec runs on, in two lines."""
    path = f"{machine['backend']} path" + (f" ({machine['simd']})" if machine["simd"] else "")
    return (
        f"kvcodec {machine['version']}, {path}; Python {machine['python']}, "
        f"NumPy {machine['numpy']}\n"
        f"{machine['processor']}, {machine['cores']} cores (load {machine['load']} before), "
        f"{machine['machine']}"
    )


def make_tables(rows: Sequence[Measurement], peers: Sequence[PeerMeasurement] = ()) -> list[Table]:
    """Tables of decoding, of float products, of other calls and of other libraries.

    Parameters
    ----------
    rows : sequence of Measurement
        From `run_benchmark`.
    peers : sequence of PeerMeasurement
        From `compare_with_peers`.

    Returns
    -------
    list of rich.table.Table
        To be printed by `kvcodec.evaluation.print_table`, at most 100 columns wide.

    Examples
    --------
    >>> from kvcodec.benchmark import Measurement, make_tables
    >>> row = Measurement("few", "attend", 16, 1, 1e-5, 9e-6, 2e-5)
    >>> [table.row_count for table in make_tables([row])]
    [1]
    """
    tables = [
        _decode_table([row for row in rows if row.task == "decode"]),
        _floats_table([row for row in rows if row.task == "floats"]),
        _other_table([row for row in rows if row.task in TASKS]),
        _peer_table(peers),
    ]
    return [table for table in tables if table.row_count]


def _decode_table(rows: Sequence[Measurement]) -> Table:
    columns = ("keys/values", "tokens", "threads", "time", "MB", "GB/s")
    ratios = ("share of\nreading", "time to\nint4")
    table = new_table(DECODE_TITLE, DECODE_CAPTION, columns + ratios)
    for row in rows:
        nbytes = row.nbytes or 0
        table.add_row(
            row.name,
            f"{row.tokens:,}",
            str(row.threads),
            time_text(row.seconds),
            f"{nbytes / 1e6:.2f}",
            f"{nbytes / row.seconds / 1e9:.1f}",
            _ratio_text(row.share_of_read),
            _ratio_text(row.relative),
        )
    return table


def _floats_table(rows: Sequence[Measurement]) -> Table:
    columns = ("keys/values", "tokens", "threads", "time", "time to\nintegers")
    table = new_table(FLOATS_TITLE, None, columns)
    for row in rows:
        table.add_row(
            row.name,
            f"{row.tokens:,}",
            str(row.threads),
            time_text(row.seconds),
            _ratio_text(row.relative),
        )
    return table


def _other_table(rows: Sequence[Measurement]) -> Table:
    columns = ("call", "of", "tokens", "threads", "time", "GB/s", "share of\nreading")
    table = new_table(OTHER_TITLE, OTHER_CAPTION, (*columns, "time to\nint4"), texts=2)
    for row in rows:
        table.add_row(
            TASKS[row.task],
            row.name,
            f"{row.tokens:,}",
            str(row.threads),
            time_text(row.seconds),
            f"{row.nbytes / row.seconds / 1e9:.2f}" if row.nbytes else "",
            _ratio_text(row.share_of_read),
            _ratio_text(row.relative),
        )
    return table


def _peer_table(rows: Sequence[PeerMeasurement]) -> Table:
    columns = ("library", "what", "call", "vs", "tokens", "x", "theirs", "ours")
    table = new_table(PEERS_TITLE, PEERS_CAPTION, (*columns, "ratio", "error"), texts=4)
    for row in rows:
        table.add_row(
            row.peer,
            row.name,
            row.task,
            "" if row.ours == row.name else row.ours,
            f"{row.tokens:,}",
            str(row.threads),
            time_text(row.seconds),
            time_text(row.our_seconds),
            _ratio_text(row.ratio),
            "" if row.relative_error is None else f"{row.relative_error:.1g}",
        )
    return table


def time_text(seconds: float) -> str:
    """A time with three digits, in milliseconds or microseconds."""
    value, unit = (seconds * 1e6, "us") if seconds < 1e-3 else (seconds * 1e3, "ms")
    return f"{value:.{max(2 - math.floor(math.log10(value)), 0)}f} {unit}" if value > 0 else "0 us"


def _ratio_text(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def results_to_json(
    command: str,
    machine: Mapping[str, Any],
    rows: Sequence[Measurement | DecodingMeasurement],
    peers: Sequence[PeerMeasurement] = (),
    missing: Mapping[str, str] | None = None,
) -> str:
    """Everything that was measured, as one JSON object.

    Parameters
    ----------
    command : str
        The command that measured it, as the settings tell it.
    machine : mapping
        From `describe_machine`.
    rows : sequence of Measurement or DecodingMeasurement
        From `run_benchmark` or `run_model_benchmark`.
    peers : sequence of PeerMeasurement
        From `compare_with_peers`.
    missing : mapping, optional
        What did not run, and why.

    Returns
    -------
    str
        With the keys command, machine, measurements, peers and missing.

    Examples
    --------
    >>> import json
    >>> from kvcodec.benchmark import make_settings, results_to_json
    >>> list(json.loads(results_to_json(make_settings().command(), {}, [])))
    ['command', 'machine', 'measurements', 'peers', 'missing']
    """
    content = {
        "command": command,
        "machine": dict(machine),
        "measurements": [asdict(row) for row in rows],
        "peers": [asdict(row) for row in peers],
        "missing": dict(missing or {}),
    }
    return json.dumps(content, indent=2, allow_nan=False)


def draw_times(
    rows: Sequence[Measurement], settings: Settings, path: str | os.PathLike[str]
) -> None:
    """Draw the time of a decoded query against its context, a line a codec.

    A dashed line is the time of reading what int4 packs: no attention over it can be faster.

    Parameters
    ----------
    rows : sequence of Measurement
        From `run_benchmark`.
    settings : Settings
        What was measured.
    path : str or path
        A file that `kvcodec.evaluation.check_plot` accepts.

    Raises
    ------
    ValueError
        As in `check_plot`.
    OSError
        If the file cannot be written.

    Examples
    --------
    >>> import os, tempfile
    >>> from kvcodec.benchmark import Measurement, draw_times, make_settings
    >>> row = Measurement("decode", "int4", 1024, 1, 3e-4, 2e-4, 4e-4, 10**6, 1e-4, 0.3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     draw_times([row], make_settings(threads=[1]), os.path.join(folder, "times.svg"))
    """
    check_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7 * len(settings.threads), 6), layout="constrained")
    panels = figure.subplots(1, len(settings.threads), squeeze=False, sharey=True)[0]
    for axes, threads in zip(panels, settings.threads, strict=True):
        _draw_panel(
            axes, [row for row in rows if row.task == "decode" and row.threads == threads], threads
        )
    save_picture(figure, path)


def _draw_panel(axes: Axes, rows: Sequence[Measurement], threads: int) -> None:
    axes.set(xlabel="tokens", ylabel="milliseconds a query", xscale="log", yscale="log")
    axes.set_title(f"{threads} thread{'s' if threads > 1 else ''}")
    axes.grid(alpha=0.3)
    for name in dict.fromkeys(row.name for row in rows):
        points = sorted((row.tokens, row.seconds * 1e3) for row in rows if row.name == name)
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    bound = sorted(
        (row.tokens, row.read_seconds * 1e3)
        for row in rows
        if row.name == row.base and row.read_seconds
    )
    if bound:
        axes.plot(
            *zip(*bound, strict=True), "k--", marker="x", label=f"reading what {rows[0].name} packs"
        )
    ticks = sorted({row.tokens for row in rows})
    axes.set_xticks(ticks, labels=[f"{tick:,}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.legend()
