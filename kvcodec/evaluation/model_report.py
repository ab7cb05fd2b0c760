"""Measurements on models as tables and as a picture."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvcodec.evaluation.greedy import GreedyQuality
from kvcodec.evaluation.model_quality import ModelQuality
from kvcodec.evaluation.needle import NeedleQuality
from kvcodec.evaluation.report import draw_panels, table_of

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["draw_model_plot", "make_greedy_table", "make_model_table", "make_needle_table"]

MODEL_COLUMNS = (
    ("bits a\nvalue", "bits_per_value", ".2f"),
    ("bytes a\ntoken", "bytes_per_token", ",.0f"),
    ("mean KL\n(nats)", "mean_kl", ".3g"),
    ("±", "mean_kl_error", ".1g"),
    ("median\nKL", "median_kl", ".2g"),
    ("90%\nKL", "kl_90", ".2g"),
    ("99%\nKL", "kl_99", ".2g"),
    ("99.9%\nKL", "kl_999", ".2g"),
    ("same\ntop", "same_top", ".2%"),
    ("RMS\nΔp", "rms_probability_change", ".2%"),
    ("perplexity\nratio", "perplexity_ratio", ".4f"),
    ("±", "perplexity_ratio_error", ".1g"),
    ("left\nout", "left_out", "d"),
    ("tokens a\nsecond", "tokens_per_second", ".0f"),
)
NEEDLE_COLUMNS = (
    ("bits a\nvalue", "bits_per_value", ".2f"),
    ("context\n(tokens)", "length", ",d"),
    ("found", "found", "d"),
    ("of", "probes", "d"),
    ("share", "share", ".1%"),
    ("95% from", "share_low", ".1%"),
    ("to", "share_high", ".1%"),
    ("ends as\nwith fp32", "same_as_exact", ".1%"),
)
GREEDY_COLUMNS = (
    ("bits a\nvalue", "bits_per_value", ".2f"),
    ("prompt", "prompt", "d"),
    ("tokens", "prompt_tokens", ",d"),
    ("same", "same", "d"),
    ("of", "new_tokens", "d"),
    ("fp32 goes\non with", "exact_token", "s"),
    ("this\nwith", "token", "s"),
    ("margin\n(nats)", "margin", ".3f"),
    ("own\nmargin", "own_margin", ".3f"),
)


def make_model_table(rows: Sequence[ModelQuality]) -> Table:
    """A table with a row for each codec.

    Parameters
    ----------
    rows : sequence of ModelQuality
        What was measured, at least one.

    Returns
    -------
    rich.table.Table
        To be printed by `print_table`.

    Examples
    --------
    >>> from kvcodec.evaluation import ChunkOptions, Predictions, make_model_table, summarize
    >>> predictions = Predictions(
    ...     "int4", None, None, bits_per_value=4.25, bytes_per_token=544.0, kl=[0.125, 0.375],
    ...     same_top=[True, False], exact_log_probability=[-1.0, -2.0],
    ...     log_probability=[-1.5, -2.5], tokens=2, seconds=0.5,
    ... )
    >>> row = summarize("model", [predictions], ChunkOptions(), block=64, seed=0)
    >>> make_model_table([row]).row_count
    1
    """
    first = rows[0]
    title = (
        f"{first.model}: {first.chunks} chunks of {first.tokens} tokens, {first.predictions} "
        f"predictions; sinks {first.sinks}, recent {first.recent}"
    )
    caption = (
        "Against a float32 run of the same model on the same text, whose perplexity is "
        f"{first.exact_perplexity:.4g}. ±: standard error over chunks. Bits and bytes are those of "
        "packed tokens, all metadata counted."
    )
    return table_of(rows, MODEL_COLUMNS, title, caption)


def make_needle_table(rows: Sequence[NeedleQuality]) -> Table:
    """A table with a row for each codec and length.

    Parameters
    ----------
    rows : sequence of NeedleQuality
        What was measured, at least one.

    Returns
    -------
    rich.table.Table
        To be printed by `print_table`.

    Examples
    --------
    >>> from kvcodec.evaluation import NeedleQuality, make_needle_table
    >>> row = NeedleQuality(
    ...     "model", "int4", None, None, bits_per_value=4.25, length=512, found=9, probes=10,
    ...     share=0.9, share_low=0.6, share_high=0.98, same_as_exact=None, sinks=4, recent=32,
    ...     block=64, seed=0,
    ... )
    >>> make_needle_table([row]).row_count
    1
    """
    first = rows[0]
    title = (
        f"{first.model}: retrieval of a code; sinks {first.sinks}, recent {first.recent}, "
        f"seed {first.seed}"
    )
    caption = "95%: Wilson interval of the share. fp32: the misses of the model itself."
    return table_of(rows, NEEDLE_COLUMNS, title, caption)


def make_greedy_table(rows: Sequence[GreedyQuality]) -> Table:
    """A table with a row for each codec and prompt.

    Parameters
    ----------
    rows : sequence of GreedyQuality
        What was measured, at least one.

    Returns
    -------
    rich.table.Table
        To be printed by `print_table`.

    Examples
    --------
    >>> from kvcodec.evaluation import GreedyQuality, make_greedy_table
    >>> row = GreedyQuality(
    ...     "model", "int4", None, None, bits_per_value=4.25, prompt=1, prompt_tokens=512, same=20,
    ...     new_tokens=24, exact_token=" the", token=" a", margin=0.01, own_margin=0.02, sinks=4,
    ...     recent=32, block=64,
    ... )
    >>> make_greedy_table([row]).row_count
    1
    """
    first = rows[0]
    title = f"{first.model}: greedy decoding; sinks {first.sinks}, recent {first.recent}"
    caption = (
        "same: tokens until the first that is not that of the float32 run. margin: there, the log "
        "probability of the float32 run's token less that of the other, in the float32 run; own "
        "margin: the other way round, in this one."
    )
    shown = [
        replace(row, exact_token=_shown(row.exact_token), token=_shown(row.token)) for row in rows
    ]
    return table_of(shown, GREEDY_COLUMNS, title, caption)


def _shown(token: str | None) -> str | None:
    """A token in quotation marks, with what does not print written out."""
    return None if token is None else ascii(token)


def draw_model_plot(rows: Sequence[ModelQuality], path: str | os.PathLike[str]) -> None:
    """Draw mean KL, with its error, and what 99% of KL stay below, against bits a value.

    Parameters
    ----------
    rows : sequence of ModelQuality
        What was measured.
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
    >>> from kvcodec.evaluation import ChunkOptions, Predictions, draw_model_plot, summarize
    >>> predictions = Predictions(
    ...     "int4", None, None, bits_per_value=4.25, bytes_per_token=544.0, kl=[0.125, 0.375],
    ...     same_top=[True, False], exact_log_probability=[-1.0, -2.0],
    ...     log_probability=[-1.5, -2.5], tokens=2, seconds=0.5,
    ... )
    >>> row = summarize("model", [predictions], ChunkOptions(), block=64, seed=0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     draw_model_plot([row], os.path.join(folder, "quality.svg"))
    """
    errors = [row.mean_kl_error if math.isfinite(row.mean_kl_error) else 0.0 for row in rows]
    panels = (
        ("mean KL of the predictions (nats)", [row.mean_kl for row in rows], errors),
        ("99% KL (nats)", [row.kl_99 for row in rows], None),
    )
    title = f"{rows[0].model}: sinks {rows[0].sinks}, recent {rows[0].recent}"
    draw_panels(rows, panels, title, path)
