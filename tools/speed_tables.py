"""Write the tables of speed in README.md and docs/benchmark.md from docs/benchmark.json.

    python tools/speed_tables.py

A table is found by its first line. A test compares both files with what this would write.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvcodec.evaluation import codec_pair

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "docs" / "benchmark.json"
README, PAGE = ROOT / "README.md", ROOT / "docs" / "benchmark.md"
TOKENS, HEAD_DIM = 32768, 128
README_NAMES = (
    *("int8", "int4", "lm4", "tcq4", "lm4/lm2", "lm3", "tcq3", "lm2", "tcq2"),
    *("kivi4", "kivi2"),
)
PAGE_NAMES = (
    *("int8", "int4", "lm4", "lm3", "int3", "lm2", "int2", "lm4/lm2", "tcq4", "tcq3", "tcq2"),
    *("kivi4", "kivi2"),
)
# Other libraries that were measured beside int4: what the benchmark and what the README call them.
PEERS = {
    ("torch", "bf16 matmuls"): "torch, matrix products in bfloat16",
    ("torch", "fp32 SDPA"): "torch, `scaled_dot_product_attention` in float32",
    ("onnxruntime", "GQA int4"): "onnxruntime, `GroupQueryAttention` over int4",
    ("openvino", "SDPA u4"): "openvino, `ScaledDotProductAttention` over u4",
}

Results = dict[str, Any]


def decoding(results: Results, threads: int) -> dict[str, Results]:
    """Attention of one query over 32,768 tokens, by the name of the codec pair."""
    return {
        row["name"]: row
        for row in results["measurements"]
        if (row["task"], row["tokens"], row["threads"]) == ("decode", TOKENS, threads)
    }


def readme_table(results: Results) -> list[str]:
    """Bits, time and share of reading with one thread, other libraries below."""
    ours = decoding(results, 1)
    lines = [
        "| keys/values | bits a value | time, int4 = 1 | share of reading |",
        "|---|---|---|---|",
    ]
    for name in README_NAMES:
        bits = codec_pair(name).bits_per_value(HEAD_DIM, HEAD_DIM)
        row = ours[name]
        lines.append(
            f"| {name} | {bits:.2f} | {row['relative']:.2f} | {row['share_of_read']:.2f} |"
        )
    for (peer, name), text in PEERS.items():
        [ratio] = (
            row["ratio"]
            for row in results["peers"]
            if (row["peer"], row["name"], row["task"]) == (peer, name, "decode")
            and (row["tokens"], row["threads"], row["ours"]) == (TOKENS, 1, "int4")
        )
        lines.append(f"| {text} | | {ratio:.1f} | |")
    return lines


def page_table(results: Results) -> list[str]:
    """Share of reading and time with one and two threads."""
    by_threads = [decoding(results, threads) for threads in (1, 2)]
    lines = [
        "| keys and values | share of reading, 1 thread | 2 threads | time to int4, 1 thread "
        "| 2 threads |",
        "|---|---|---|---|---|",
    ]
    for name in PAGE_NAMES:
        numbers = [
            f"{rows[name][column]:.2f}"
            for column in ("share_of_read", "relative")
            for rows in by_threads
        ]
        lines.append(f"| {name} | {' | '.join(numbers)} |")
    return lines


def with_table(text: str, table: Sequence[str]) -> str:
    """The text with a table in the place of the one that has the same first line."""
    lines = text.split("\n")
    start = stop = lines.index(table[0])
    while lines[stop].startswith("|"):
        stop += 1
    return "\n".join([*lines[:start], *table, *lines[stop:]])


def updated() -> dict[Path, str]:
    """The text that each file should have."""
    results = json.loads(MEASURED.read_text(encoding="utf-8"))
    tables = {README: readme_table(results), PAGE: page_table(results)}
    return {
        path: with_table(path.read_text(encoding="utf-8"), table) for path, table in tables.items()
    }


if __name__ == "__main__":
    for path, text in updated().items():
        path.write_text(text, encoding="utf-8")
