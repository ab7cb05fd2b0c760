"""What was measured of decoding on a model, as text and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvcodec.benchmark.model_suite import STEPS, DecodingMeasurement, ModelSettings
from kvcodec.benchmark.report import machine_text
from kvcodec.evaluation.report import new_table

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["describe_model_settings", "make_decoding_table"]

TITLE = "decoding on the model"
CAPTION = (
    "x: threads. mean: with its share of packing blocks. of it context: what a token takes more "
    "than with a cache of a few tokens. MB: all buffers of the cache. faster than: time with a "
    "DynamicCache of a model in float32 (f32) or bfloat16 (bf16), divided by this; a median of the "
    "ratios within each round."
)


def describe_model_settings(
    settings: ModelSettings, machine: Mapping[str, Any], source: str
) -> str:
    """Machine, libraries and model in a few lines.

    Parameters
    ----------
    settings : ModelSettings
        What was measured.
    machine : mapping
        From `describe_machine`.
    source : str
        The name of the model.

    Returns
    -------
    str
        To be printed above the table. Needs the extra ``hf``.

    Examples
    --------
    >>> from kvcodec.benchmark import (
    ...     describe_machine, describe_model_settings, make_model_settings,
    ... )
    >>> settings = make_model_settings("model.gguf")
    >>> print(describe_model_settings(settings, describe_machine(), "model.gguf"))
    kvcodec ...
    model.gguf; medians of 25 rounds of 4 tokens
    """
    import torch
    import transformers

    return (
        f"{machine_text(machine)}\n"
        f"torch {torch.__version__}, Transformers {transformers.__version__}\n"
        f"{source}; medians of {settings.repeats} rounds of {STEPS} tokens"
    )


def make_decoding_table(rows: Sequence[DecodingMeasurement]) -> Table:
    """A table with a row for each cache.

    Parameters
    ----------
    rows : sequence of DecodingMeasurement
        From `run_model_benchmark`.

    Returns
    -------
    rich.table.Table
        To be printed by `kvcodec.evaluation.print_table`, at most 100 columns wide.

    Examples
    --------
    >>> from kvcodec.benchmark import DecodingMeasurement, make_decoding_table
    >>> times = {"seconds": 0.02, "lower_quartile": 0.02, "upper_quartile": 0.02}
    >>> row = DecodingMeasurement("DynamicCache", "float32", 4096, 1, **times, mean_seconds=0.02,
    ...     tokens_per_second=50.0, context_seconds=0.01, nbytes=10**6,
    ...     speedup={"float32": 1.0, "bfloat16": 0.8})
    >>> make_decoding_table([row]).row_count
    1
    """
    columns = ("cache", "model in", "tokens", "x", "tokens a\nsecond", "ms a\ntoken", "mean")
    more = ("of it\ncontext", "MB", "faster\nthan f32", "than\nbf16")
    table = new_table(TITLE, CAPTION, columns + more, texts=2)
    for row in rows:
        table.add_row(
            row.cache,
            row.dtype,
            f"{row.context:,}",
            str(row.threads),
            f"{row.tokens_per_second:.1f}",
            *(f"{1e3 * x:.1f}" for x in (row.seconds, row.mean_seconds, row.context_seconds)),
            f"{row.nbytes / 1e6:.1f}",
            *(f"{row.speedup[dtype]:.2f}" for dtype in ("float32", "bfloat16")),
        )
    return table
