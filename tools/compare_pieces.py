"""Compare a model's logits when a text is fed token by token and in pieces.

The projections of a piece round otherwise than those of a single row, by which a number may get the
neighboring code. Float caches show what rounding alone does. Needs the extra ``hf``.
"""

from __future__ import annotations

from typing import Any

import click
import torch

from kvcodec import evaluation
from kvcodec.evaluation.language_model import Run, exact_run, packed_run, pieces

START = 1000  # tokens of the default text that are skipped


def logits_of(run: Run, tokens: list[int], piece: int) -> Any:
    """Logits after each token, fed so many at a time."""
    return torch.cat([run.feed(tokens[a:b], b - a) for a, b in pieces(len(tokens), piece)])


@click.command()
@click.option("--model", "path", required=True, help="A folder or a GGUF file.")
@click.option("--tokens", default=230, show_default=True, type=click.IntRange(2))
@click.option("--piece", default=128, show_default=True, type=click.IntRange(2))
@click.option("--codec", "codecs", multiple=True, default=("fp32", "int8", "int4"))
def main(path: str, tokens: int, piece: int, codecs: tuple[str, ...]) -> None:
    """Print the largest difference of the logits, and the mean KL, for each cache."""
    model = evaluation.load_language_model(path)
    text = [*model.first_tokens, *model.encode(evaluation.read_text())][START : START + tokens]
    click.echo(f"{model.source}, {len(text)} tokens, pieces of {piece} against single tokens")
    for name in ("DynamicCache", *codecs):
        runs = [
            exact_run(model)
            if name == "DynamicCache"
            else packed_run(model, evaluation.codec_pair(name), evaluation.ChunkOptions())
            for _ in range(2)
        ]
        single, whole = (
            logits_of(run, text, size) for run, size in zip(runs, (1, piece), strict=True)
        )
        log_p, log_q = (x.double().log_softmax(-1) for x in (single, whole))
        divergence = float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
        click.echo(
            f"{name:12s} logits up to {single.abs().max():.1f}, "
            f"differences up to {(single - whole).abs().max():.1e}, mean KL {divergence:.1e}"
        )


if __name__ == "__main__":
    main()
