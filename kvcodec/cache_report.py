"""What a KVCache says of itself: its memory by layer, side and part, as text and as a table."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from kvcodec.sequence import Layer, Sequence

if TYPE_CHECKING:
    from kvcodec.cache import KVCache


def memory_of(layers: list[Layer], sequences: list[list[Sequence]]) -> dict[str, Any]:
    """Bytes of a cache, those of buffers that rows share once."""
    counted: set[int] = set()
    parts = [
        _memory_of_layer(layer, rows, counted)
        for layer, rows in zip(layers, sequences, strict=True)
    ]
    total, fp16 = (sum(part[name] for part in parts) for name in ("total", "fp16"))
    return {"total": total, "fp16": fp16, "ratio": _ratio(fp16, total), "layers": parts}


def _ratio(fp16: int, total: int) -> float:
    return fp16 / total if total else float("nan")


def _memory_of_layer(layer: Layer, rows: list[Sequence], counted: set[int]) -> dict[str, Any]:
    """Bytes of a layer; buffers whose identity is in `counted` are left out, the others added."""
    sides: dict[str, dict[str, int]] = {"key": {}, "value": {}}
    for row in rows:
        for side, parts in row.buffers().items():
            for part, buffers in parts.items():
                new = {id(x): x.nbytes for x in buffers if id(x) not in counted}
                counted.update(new)
                sides[side][part] = sides[side].get(part, 0) + sum(new.values())
    total = sum(sum(parts.values()) for parts in sides.values())
    tokens = sum(row.held for row in rows)
    fp16 = 2 * tokens * layer.kv_heads * (layer.key_dim + layer.value_dim)
    return {"total": total, "fp16": fp16, "ratio": _ratio(fp16, total), **sides}


def text_of(cache: KVCache, layers: list[Layer], sequences: list[list[Sequence]]) -> str:
    """One line: tokens, layers, codecs, bytes."""
    count = f"{len(layers)} layer{'s' if len(layers) > 1 else ''}"
    shortest, longest = int(cache.seq_lengths.min()), cache.seq_length
    tokens = f"{shortest} to {longest}" if shortest < longest else str(longest)
    memory = cache.memory()
    ratio = f", {100 / memory['ratio']:.0f}% of fp16" if memory["fp16"] else ""
    return (
        f"<KVCache of {tokens} tokens: {count}, batch {cache.batch}, "
        f"{_names(layers, 'key')} keys{_equalized(sequences)}, {_names(layers, 'value')} values, "
        f"{memory['total']:,} bytes{ratio}>"
    )


def _names(layers: list[Layer], side: str) -> str:
    codecs = [(layer, getattr(layer, side)) for layer in layers]
    names = dict.fromkeys(
        layer.exact_dtype if codec is None else codec.name for layer, codec in codecs
    )
    return " or ".join(names)


def _equalized(sequences: list[list[Sequence]]) -> str:
    """Whether the keys that would be equalized are."""
    every = [row for rows in sequences for row in rows]
    packed = [row for row in every if row.layer.key and row.layer.key.equalize and row.keys.units]
    if not packed:
        return ""
    if all(row.keys.weights is not None for row in packed):
        return " (equalized)"
    return " (not equalized: no queries were seen)"


def table_of(cache: KVCache) -> str:
    """An HTML table of the bytes by layer, side and part."""
    layers = cache.memory()["layers"]
    parts = [(side, part) for side in ("key", "value") for part in layers[0][side]]
    head = ["layer", *(f"{side} {part}" for side, part in parts), "total", "fp16 / total"]
    rows = [
        [
            f"{index}",
            *(f"{layer[side][part]:,}" for side, part in parts),
            f"{layer['total']:,}",
            f"{layer['ratio']:.2f}" if layer["fp16"] else "",
        ]
        for index, layer in enumerate(layers)
    ]
    table = _table_row("th", head) + "".join(_table_row("td", row) for row in rows)
    text = html.escape(repr(cache).strip("<>"))
    return f"<p>{text}</p><table>{table}</table><p>Bytes by layer, side and part.</p>"


def _table_row(cell: str, texts: list[str]) -> str:
    return f"<tr>{''.join(f'<{cell}>{text}</{cell}>' for text in texts)}</tr>"
