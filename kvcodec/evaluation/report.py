"""What was measured, as a table, as JSON and as a picture, and how files are written."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcodec.evaluation.attention_quality import AttentionQuality
from kvcodec.evaluation.tensors import Tensors

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.table import Table

__all__ = [
    "check_plot",
    "check_writable",
    "draw_plot",
    "make_table",
    "print_table",
    "to_json",
    "write_file",
]

PLOT_FORMATS = ("pdf", "png", "svg")
LABEL_SIZE = 7
BIT_TICKS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 32)

COLUMNS = (
    ("bits a\nvalue", "bits_per_value", ".2f"),
    ("key\nrelative MSE", "key_relative_mse", ".3g"),
    ("value\nrelative MSE", "value_relative_mse", ".3g"),
    ("mean KL\n(nats)", "mean_kl", ".3g"),
    ("output\nrelative error", "output_relative_error", ".3g"),
    ("output\ncosine", "output_cosine", ".5f"),
    ("bytes per\n1000 tokens", "bytes_per_1000_tokens", ",.0f"),
)

CAPTION = (
    "A name is a preset, or the presets of keys/values. unrotated: not rotated, centered "
    "or equalized; plain: not centered or equalized; centered: not equalized; g128: groups of "
    "128. Means over layers, heads and the queries that see packed tokens."
)


def make_table(rows: Sequence[AttentionQuality], tensors: Tensors) -> Table:
    """A table with a row for each codec.

    Parameters
    ----------
    rows : sequence of AttentionQuality
        What was measured, at least one.
    tensors : Tensors
        What it was measured on.

    Returns
    -------
    rich.table.Table
        To be printed by `print_table`.

    Examples
    --------
    >>> from kvcodec.evaluation import codec_pair, evaluate_attention, make_table, sample_tensors
    >>> tensors = sample_tensors()
    >>> make_table(evaluate_attention(tensors, [codec_pair("fp16")]), tensors).row_count
    1
    """
    layers, kv_heads, tokens, _ = tensors.k.shape
    title = (
        f"{tensors.source}: {layers} layers, {kv_heads} KV heads, {tokens} tokens; "
        f"sinks {rows[0].sinks}, recent {rows[0].recent}"
    )
    return table_of(rows, COLUMNS, title, CAPTION)


def table_of(
    rows: Sequence[Any], columns: Sequence[tuple[str, str, str]], title: str, caption: str
) -> Table:
    """A table of named rows; a column is a heading, an attribute and how it is written.

    What is None or no number is left blank.
    """
    table = new_table(title, caption, ["codec", *(heading for heading, _, _ in columns)])
    for row in rows:
        table.add_row(row.name, *(_cell(getattr(row, name), form) for _, name, form in columns))
    return table


def new_table(title: str, caption: str | None, columns: Sequence[str], texts: int = 1) -> Table:
    """A table of which the first columns hold texts and the others numbers."""
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(title), caption=Text(caption) if caption else None, caption_justify="left"
    )
    for index, heading in enumerate(columns):
        table.add_column(heading, justify="left" if index < texts else "right", no_wrap=True)
    return table


def _cell(value: float | str | None, form: str) -> str:
    blank = value is None or (isinstance(value, float) and math.isnan(value))
    return "" if blank else format(value, form)


def print_table(table: Table) -> None:
    """Print a table on standard output, in full width even where that is no terminal.

    Parameters
    ----------
    table : rich.table.Table
        The table.

    Examples
    --------
    >>> from rich.table import Table
    >>> from kvcodec.evaluation import print_table
    >>> print_table(Table("codec", box=None))
     codec
    """
    from rich.console import Console
    from rich.measure import Measurement

    console = Console()
    unlimited = console.options.update(max_width=sys.maxsize)
    console.width = max(console.width, Measurement.get(console, unlimited, table).maximum)
    console.print(table)


def to_json(rows: Sequence[Any]) -> str:
    """The rows as a JSON list of objects; numbers that are not finite become null.

    Parameters
    ----------
    rows : sequence of AttentionQuality, ModelQuality, NeedleQuality or GreedyQuality
        What was measured.

    Returns
    -------
    str
        With the attributes of a row as keys.

    Examples
    --------
    >>> from kvcodec.evaluation import to_json
    >>> to_json([])
    '[]'
    """
    plain = [
        {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in asdict(row).items()
        }
        for row in rows
    ]
    return json.dumps(plain, indent=2, allow_nan=False)


def check_plot(path: str | os.PathLike[str]) -> None:
    """Raise unless a picture can be drawn to such a file.

    Parameters
    ----------
    path : str or path
        The file that `draw_plot` is to be asked for.

    Raises
    ------
    ValueError
        If its suffix is none of .pdf, .png, .svg, or matplotlib is not installed.

    Examples
    --------
    >>> from kvcodec.evaluation import check_plot
    >>> check_plot("quality.doc")
    Traceback (most recent call last):
    ValueError: plot must be a file ending in .pdf, .png, .svg, but 'quality.doc' was given.
    """
    if _plot_format(path) not in PLOT_FORMATS:
        endings = ", ".join(f".{name}" for name in PLOT_FORMATS)
        raise ValueError(f"plot must be a file ending in {endings}, but {str(path)!r} was given.")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"plot needs matplotlib, which cannot be imported ({error}); "
            'install it with pip install "kvcodec-cpu[plot]".'
        ) from None


def draw_plot(
    rows: Sequence[AttentionQuality], tensors: Tensors, path: str | os.PathLike[str]
) -> None:
    """Draw error and KL against bits a value.

    Errors of exactly zero have no place on a logarithmic axis and are left out.

    Parameters
    ----------
    rows : sequence of AttentionQuality
        What was measured.
    tensors : Tensors
        What it was measured on.
    path : str or path
        A file that `check_plot` accepts.

    Raises
    ------
    ValueError
        As in `check_plot`.
    OSError
        If the file cannot be written.

    Examples
    --------
    >>> import os, tempfile
    >>> from kvcodec.evaluation import codec_pair, draw_plot, evaluate_attention, sample_tensors
    >>> tensors = sample_tensors()
    >>> rows = evaluate_attention(tensors, [codec_pair("fp16")])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     draw_plot(rows, tensors, os.path.join(folder, "quality.svg"))
    """
    title = f"{tensors.source}: sinks {rows[0].sinks}, recent {rows[0].recent}"
    panels = (
        (
            "relative error of the output",
            [row.output_relative_error for row in rows],
            None,
        ),
        ("mean KL of the attention distribution (nats)", [row.mean_kl for row in rows], None),
    )
    draw_panels(rows, panels, title, path)


Panel = tuple[str, Sequence[float], Sequence[float] | None]
"""A label, what is drawn of each row, and its standard errors."""


def draw_panels(
    rows: Sequence[Any], panels: Sequence[Panel], title: str, path: str | os.PathLike[str]
) -> None:
    """Draw panels side by side, each against `bits_per_value` of the rows."""
    check_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 8))
    figure.subplots_adjust(left=0.06, right=0.98, bottom=0.08, top=0.92, wspace=0.15)
    # A file's name may hold what fonts and mathematics cannot show.
    printable = title.encode("ascii", "replace").decode()
    figure.suptitle(printable, parse_math=False)
    for axes, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
        _draw_panel(axes, rows, panel)
    save_picture(figure, path)


def save_picture(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure in the format that the name of the file tells."""
    picture = BytesIO()
    figure.savefig(picture, format=_plot_format(path), dpi=150)
    write_file(path, picture.getvalue())


def _plot_format(path: str | os.PathLike[str]) -> str:
    return Path(path).suffix.removeprefix(".").lower()


def _draw_panel(axes: Axes, rows: Sequence[Any], panel: Panel) -> None:
    label, values, errors = panel
    spreads = [0.0] * len(values) if errors is None else errors
    points = [
        (row.bits_per_value, value, spread, row.name)
        for row, value, spread in zip(rows, values, spreads, strict=True)
        if value > 0 and math.isfinite(value)
    ]
    axes.set(xlabel="bits a value, all metadata counted", ylabel=label)
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(BIT_TICKS, labels=[str(bits) for bits in BIT_TICKS])
    axes.set_xlim(1.9, 2 * max(11, *(row.bits_per_value for row in rows)))
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    for bits, value, spread, text in points:
        marker = "s" if text.startswith("kivi") else "^" if text.startswith("lm") else "o"
        hollow = "none" if text.endswith(("plain", "unrotated")) else None
        # The lower end of a bar that reaches zero has no place on a logarithmic axis.
        bar = [[min(spread, 0.9 * value)], [spread]] if spread else None
        axes.errorbar(bits, value, yerr=bar, fmt=marker, color="C0", markerfacecolor=hollow)
    names = [(bits, value, text) for bits, value, _, text in points]
    _label_points(axes, sorted(names, key=lambda point: -point[1]))
    if not points:
        axes.text(0.5, 0.5, "no error above zero", transform=axes.transAxes, ha="center")


def _label_points(axes: Axes, points: Sequence[tuple[float, float, str]]) -> None:
    """Write each point's name beside it, moved up or down until it covers nothing."""
    axes.autoscale_view()
    to_points = 72 / axes.figure.dpi
    places = [axes.transData.transform(point[:2]) * to_points for point in points]
    taken = [(x - 4, x + 4, y) for x, y in places]
    for (bits, error, text), (x, y) in zip(points, places, strict=True):
        left, right = x + 7, x + 7 + 0.55 * LABEL_SIZE * len(text)
        for shift in sorted(range(-200, 201, 3), key=abs):
            height = y + shift
            near = (box for box in taken if abs(height - box[2]) < LABEL_SIZE + 1)
            if not any(left < box[1] and box[0] < right for box in near):
                break
        taken.append((left, right, height))
        axes.annotate(
            text,
            (bits, error),
            xytext=(7, shift),
            textcoords="offset points",
            fontsize=LABEL_SIZE,
            verticalalignment="center",
            arrowprops={"arrowstyle": "-", "linewidth": 0.4} if shift else None,
        )


def _resolved(path: str | os.PathLike[str]) -> Path:
    try:
        return Path(path).resolve()
    except RuntimeError:  # what pathlib makes of links that lead to themselves
        raise OSError(f"{path} cannot be written: its symbolic links form a loop.") from None


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise unless a file can be written, without changing what is there.

    Parameters
    ----------
    path : str or path
        A file, there already or not.

    Raises
    ------
    OSError
        If it is a folder, may not be written, or lies in no folder that can be written to.

    Examples
    --------
    >>> import tempfile
    >>> from kvcodec.evaluation import check_writable
    >>> check_writable(tempfile.gettempdir())
    Traceback (most recent call last):
    IsADirectoryError: ...
    """
    path = _resolved(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} cannot be written: it is a folder.")
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(f"{path} cannot be written: it is read-only.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: {path.parent} is no folder.")
    if path.is_file() or not path.exists():
        try:
            tempfile.TemporaryFile(dir=path.parent).close()
        except OSError as error:
            raise type(error)(f"{path} cannot be written: {error.strerror}.") from None


def write_file(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file as a whole: until it is complete, what was there before stays.

    Parameters
    ----------
    path : str or path
        A regular file is replaced, keeping its permissions; anything else, such as a pipe, is
        written to.
    content : bytes
        What to write.

    Raises
    ------
    OSError
        If it cannot be written.

    Examples
    --------
    >>> import os, tempfile
    >>> from kvcodec.evaluation import write_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_file(os.path.join(folder, "note"), b"done")
    ...     os.listdir(folder)
    ['note']
    """
    path = _resolved(path)
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    unfinished = path.with_name(f".{os.getpid()}.unfinished")
    try:
        unfinished.write_bytes(content)
        if path.exists():
            shutil.copymode(path, unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
