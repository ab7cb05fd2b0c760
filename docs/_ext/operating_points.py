"""The table of operating points: quality is measured as the pages are built, speed was before."""

from __future__ import annotations

import json
from pathlib import Path

from IPython.display import Markdown

from kvcodec.evaluation import codec_pair, evaluate_attention, sample_tensors

TIMES = Path(__file__).parents[1] / "benchmark.json"
TOKENS = 32768
HEAD_DIM = 128


def decode_times() -> dict[str, float]:
    """Time of attention of one query over 32,768 tokens beside that of int4, one thread."""
    measured = json.loads(TIMES.read_text(encoding="utf-8"))["measurements"]
    return {
        each["name"]: each["relative"]
        for each in measured
        if (each["task"], each["tokens"], each["threads"]) == ("decode", TOKENS, 1)
    }


def operating_points(names: list[str]) -> Markdown:
    """A row for each codec pair: bits, memory, KL, error of the output, time."""
    pairs = [codec_pair(name) for name in names]
    times = decode_times()
    lines = [
        "| keys/values | bits a value | times smaller than float16 | mean KL (nats) "
        "| error of the output | time to int4 |",
        "|---|---|---|---|---|---|",
    ]
    for pair, quality in zip(pairs, evaluate_attention(sample_tensors(), pairs), strict=True):
        bits = pair.bits_per_value(HEAD_DIM, HEAD_DIM)
        time = f"{times[pair.name]:.2f}" if pair.name in times else ""
        lines.append(
            f"| `{pair.name}` | {bits:.2f} | {16 / bits:.1f} | {quality.mean_kl:.2g} "
            f"| {quality.output_relative_error:.1%} | {time} |"
        )
    return Markdown("\n".join(lines))


def conditions() -> Markdown:
    """Where the times come from."""
    about = json.loads(TIMES.read_text(encoding="utf-8"))
    machine = about["machine"]
    return Markdown(
        f"Times: `{about['command']}` on {machine['processor']} ({machine['machine']}, "
        f"{machine['simd']}), a virtual machine whose other work was halted; each is "
        "the median of ratios within a round."
    )
