"""Compare what int4 does to a model's predictions with what llama.cpp's packed caches do.

Both read the same GGUF file and are fed the same tokens, those of ``kvcodec eval``. Each is
compared with a run of its own: llama.cpp, which rounds activations to 8 bits, with a float32 cache
of llama.cpp, kvcodec with the float32 run of ``kvcodec eval``. A float16 cache shows what rounding
alone does in llama.cpp. Its caches pack each token at once, queries' own tokens included, so that
int4 is measured without exact windows: block by block, and token by token.

Needs the extra ``hf`` and llama-cpp-python, of a release whose quantized caches are rotated.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import click
import llama_cpp
import numpy as np
import torch

from kvcodec import evaluation
from kvcodec.evaluation.language_model import ExactPiece

ROTATION_SWITCH = "LLAMA_ATTN_ROT_DISABLE"
UBATCH = 512
BLOCKS = (1, 64)
SILENT = llama_cpp.llama_log_callback(lambda *_: None)


@dataclass(frozen=True)
class LlamaCache:
    """A cache of llama.cpp: its name here, number type, rotation, and bits a value."""

    name: str
    ggml_type: int
    rotated: bool
    bits: float


EXACT = LlamaCache("llama.cpp f32", llama_cpp.GGML_TYPE_F32, False, 32.0)
CACHES = (
    LlamaCache("llama.cpp f16", llama_cpp.GGML_TYPE_F16, False, 16.0),
    LlamaCache("llama.cpp q8_0", llama_cpp.GGML_TYPE_Q8_0, True, 8.5),
    LlamaCache("llama.cpp q4_0", llama_cpp.GGML_TYPE_Q4_0, True, 4.5),
    LlamaCache("llama.cpp q4_0 unrotated", llama_cpp.GGML_TYPE_Q4_0, False, 4.5),
)


@contextmanager
def llama_model(path: str) -> Iterator[Any]:
    """The model in llama.cpp."""
    llama_cpp.llama_log_set(SILENT, None)
    options = llama_cpp.llama_model_default_params()
    # Weights as they lie in the file: kernels for other layouts crash on some virtual machines.
    options.use_extra_bufts = False
    model = llama_cpp.llama_model_load_from_file(path.encode(), options)
    if not model:
        raise click.ClickException(f"llama.cpp cannot load {path}.")
    try:
        yield model
    finally:
        llama_cpp.llama_model_free(model)


def llama_logits(model: Any, cache: LlamaCache, tokens: Sequence[int]) -> Any:
    """Logits after each of some tokens, float32 (tokens, vocabulary)."""
    os.environ[ROTATION_SWITCH] = "0" if cache.rotated else "1"
    count = len(tokens)
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_outputs_max = count
    options.n_ubatch = UBATCH
    options.n_threads = options.n_threads_batch = torch.get_num_threads()
    options.type_k = options.type_v = cache.ggml_type
    options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED  # for packed values
    context = llama_cpp.llama_init_from_model(model, options)
    if not context:
        raise click.ClickException(f"llama.cpp has no cache for {cache.name}.")
    batch = llama_cpp.llama_batch_init(count, 0, 1)
    try:
        batch.n_tokens = count
        for place, token in enumerate(tokens):
            batch.token[place], batch.pos[place] = token, place
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
            batch.logits[place] = True
        if llama_cpp.llama_decode(context, batch):
            raise click.ClickException(f"llama.cpp cannot run {cache.name}.")
        vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        found = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (count, vocabulary))
        return torch.from_numpy(found.copy())
    finally:
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)


def llama_rows(
    path: str, source: str, chunks: Sequence[Sequence[int]], config: dict[str, Any]
) -> list[evaluation.ModelQuality]:
    """The figures of the caches of llama.cpp."""
    options = evaluation.ChunkOptions(sinks=0, recent=0, chunk=UBATCH)
    numbers = sum(
        heads * (key_dim + value_dim)
        for heads, key_dim, value_dim in zip(
            config["num_kv_heads"], config["head_dim"], config["value_head_dim"], strict=True
        )
    )
    size = numbers / 8
    found = {
        cache: [
            evaluation.Predictions(cache.name, None, None, cache.bits, cache.bits * size)
            for _ in chunks
        ]
        for cache in CACHES
    }
    with llama_model(path) as model:
        for index, tokens in enumerate(chunks):
            exact = ExactPiece(llama_logits(model, EXACT, tokens[:-1]), tokens[1:])
            for cache, of_chunks in found.items():
                predictions = of_chunks[index]
                exact.compare(predictions, llama_logits(model, cache, tokens[:-1]))
                predictions.tokens, predictions.seconds = len(tokens) - 1, math.nan
    return [
        evaluation.summarize(source, of_chunks, options, block=1, seed=0)
        for of_chunks in found.values()
    ]


def own_rows(
    model: evaluation.LanguageModel, chunks: Sequence[Sequence[int]]
) -> tuple[list[evaluation.ModelQuality], dict[str, Any]]:
    """The figures of int4, of tcq4 token by token, and the config of a cache of the model."""
    from kvcodec.integrations.transformers import KVCodecCache

    rows = []
    for block in BLOCKS:
        options = evaluation.ChunkOptions(sinks=0, recent=0)
        names = ["int4", "tcq4"] if block == 1 else ["int4 plain", "int4"]
        pairs = [evaluation.codec_pair(name, block) for name in names]
        results = [evaluation.evaluate_chunk(model, tokens, pairs, options) for tokens in chunks]
        for of_pair in zip(*results, strict=True):
            for predictions in of_pair:
                predictions.codec += f", block {block}"
            rows.append(evaluation.summarize(model.source, of_pair, options, block, seed=0))
    return rows, KVCodecCache(model.model.config).kv.config


@click.command()
@click.option("--model", "path", metavar="FILE", required=True, help="A .gguf file.")
@click.option("--text", metavar="FILE", help="Text in UTF-8, by default that of kvcodec eval.")
@click.option("--tokens", type=click.IntRange(64), default=512, show_default=True)
@click.option("--chunks", "count", type=click.IntRange(1), default=4, show_default=True)
@click.option("--json", "json_file", metavar="FILE", help="Write the figures to FILE as JSON.")
def main(path: str, text: str | None, tokens: int, count: int, json_file: str | None) -> None:
    """Print the divergence of both, each from its own run with a float32 cache."""
    model = evaluation.load_language_model(path)
    content = model.encode(evaluation.read_text(text))
    chunks = evaluation.cut_chunks(content, model.first_tokens, tokens, count)
    rows, config = own_rows(model, chunks)
    rows += llama_rows(path, model.source, chunks, config)
    if json_file is not None:
        evaluation.write_file(json_file, f"{evaluation.to_json(rows)}\n".encode())
    click.echo(f"llama-cpp-python {llama_cpp.__version__}")
    evaluation.print_table(evaluation.make_model_table(rows))


if __name__ == "__main__":
    main()
