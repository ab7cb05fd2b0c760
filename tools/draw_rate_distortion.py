"""Draw the figure of the README: what each preset takes and what it loses, on the shipped sample.

    python tools/draw_rate_distortion.py

The figure holds the numbers that it was drawn from, so that ``--check`` (and a test) can tell
whether the codecs still give them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np

import kvcodec as kv
from kvcodec.evaluation import codec_pair, evaluate_attention, sample_tensors

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIGURE = Path(__file__).parents[1] / "docs" / "rate-distortion.svg"
NAMES = (
    *("int8", "int4", "int3", "int2", "lm4", "lm3", "lm2", "lm4/lm2", "kivi4", "kivi2"),
    *("tcq4", "tcq3", "tcq2"),
)
PLAIN = ("int4 plain", "int3 plain", "lm4 plain", "lm3 plain", "lm2 plain")
FAMILIES = {
    "int": ("symmetric INTn", "o", "#0072B2"),
    "lm": ("Lloyd-Max", "D", "#D55E00"),
    "kivi": ("KIVI", "s", "#009E73"),
    "tcq": ("trellis", "^", "#CC79A7"),
}
LABELS = {"int": (6, 3), "lm": (6, -9), "kivi": (6, 2), "tcq": (-22, -11), "lm4/lm2": (-16, -13)}
TOLERANCE = 1e-3
Points = dict[str, tuple[float, float, float]]


def measure(names: Sequence[str] = (*NAMES, *PLAIN)) -> Points:
    """Bits a value, relative squared error of keys and mean KL, by the name of a codec pair."""
    rows = evaluate_attention(sample_tensors(), [codec_pair(name) for name in names])
    return {row.name: (row.bits_per_value, row.key_relative_mse, row.mean_kl) for row in rows}


def drawn_points(path: Path) -> Points:
    """The numbers that a figure was drawn from."""
    text = re.search(r"<dc:description>(.*?)</dc:description>", path.read_text("utf-8"), re.DOTALL)
    if not text:
        raise click.ClickException(f"{path} must hold the numbers that it was drawn from.")
    return {name: tuple(numbers) for name, numbers in json.loads(unescape(text[1])).items()}


def same(found: Points, drawn: Points) -> bool:
    """Whether two sets of points would be drawn at the same places."""
    return found.keys() == drawn.keys() and all(
        np.allclose(found[name], drawn[name], rtol=TOLERANCE, atol=0) for name in found
    )


def draw(points: Points, path: Path) -> None:
    """Draw both panels on white, which is readable on light and dark pages alike."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style = {"svg.hashsalt": "kvcodec", "axes.spines.top": False, "axes.spines.right": False}
    with mpl.rc_context(style):
        figure = Figure(figsize=(9, 4.2), layout="constrained", facecolor="white")
        left, right = figure.subplots(1, 2)
        rates = np.linspace(2, 9, 50)
        left.plot(rates, 4.0**-rates, color="0.4", label="Shannon, normal numbers")
        optimal = {bits: kv.codebook(64, bits).unsnapped_mse for bits in (2, 3, 4)}
        left.plot(*zip(*optimal.items(), strict=True), ":", color="0.4", label="best scalar code")
        keys = [name for name in points if "/" not in name]
        _draw_panel(left, {name: points[name][:2] for name in keys})
        _draw_panel(right, {name: points[name][::2] for name in points})
        left.set(ylabel="relative squared error of keys", title="Keys", ylim=(2e-5, 1))
        right.set(ylabel="mean KL (nats)", title="Attention", ylim=(1e-4, 1))
        left.legend(loc="lower left", fontsize=8, frameon=False)
        metadata = {"Date": None, "Creator": None, "Description": json.dumps(points)}
        figure.savefig(path, format="svg", metadata=metadata)


def _draw_panel(axes: Axes, places: dict[str, tuple[float, float]]) -> None:
    for family, (label, marker, color) in FAMILIES.items():
        names = [name for name in places if name.startswith(family)]
        for name in names:
            hollow = {"markerfacecolor": "white"} if name in PLAIN else {}
            axes.plot(*places[name], marker, color=color, **hollow)
            if name not in PLAIN:
                side = {"xytext": LABELS.get(name, LABELS[family]), "textcoords": "offset points"}
                axes.annotate(name, places[name], fontsize=8, **side)
        axes.plot([], [], marker, color=color, label=label)
    axes.plot(
        [], [], "o", color="0.4", markerfacecolor="white", label="neither centered nor equalized"
    )
    axes.set(yscale="log", xlabel="bits a value, all metadata counted", xlim=(1.8, 9))


@click.command(help=__doc__.split("\n\n")[0])
@click.option("--check", is_flag=True, help="Only compare the numbers of the figure.")
def main(check: bool) -> None:
    """Write the figure, or compare it."""
    points = measure()
    if not check:
        draw(points, FIGURE)
    elif not same(points, drawn_points(FIGURE)):
        print(f"{FIGURE} is out of date; run {Path(__file__).name}.")
        sys.exit(1)


if __name__ == "__main__":
    main()
