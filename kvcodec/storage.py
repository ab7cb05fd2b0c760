"""Saving and loading a KVCache: safetensors with checksums, every array checked.

The format is specified in docs/file-format.md.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import zlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcodec import _backend
from kvcodec._validate import LARGEST_MAGNITUDE, MOST_TOKENS
from kvcodec._version import __version__
from kvcodec.blocks import Blocks
from kvcodec.cache import KVCache
from kvcodec.codec import LARGEST_WEIGHT, LEAST_WEIGHT, Codec
from kvcodec.encoded import ARRAYS, Encoded, layout_of
from kvcodec.reference._numbers import load as load_scales
from kvcodec.sequence import Layer, Sequence, Tail

FORMAT = "kvcodec.KVCache"
FORMAT_VERSION = 1
NUMBERS = ("end", "packed_end", "evicted", "released")
OPTIONS = ("query_bits", "probability_bits", "max_tokens")
LARGEST_SCALE = 2.0**116
DAMAGE = (
    ValueError,
    KeyError,
    TypeError,
    IndexError,
    AttributeError,
    OverflowError,
    MemoryError,
    RecursionError,
)
Arrays = dict[str, NDArray[Any]]


def _safetensors() -> ModuleType:
    try:
        import safetensors.numpy as library
    except ImportError:
        raise ImportError(
            "Saving and loading a cache needs safetensors; install the extra 'storage': "
            'pip install "kvcodec-cpu[storage]".'
        ) from None
    return library


def save(cache: KVCache, path: str | os.PathLike[str]) -> None:
    """Write a cache to a new file beside `path`, then put it in its place."""
    library = _safetensors()
    arrays: Arrays = {}
    sequences = [
        [_describe(row, f"{layer}.{index}", arrays) for index, row in enumerate(rows)]
        for layer, rows in enumerate(cache._sequences)
    ]
    header = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "written_by": f"kvcodec {__version__}",
        "options": {name: getattr(cache, f"_{name}") for name in OPTIONS},
        "layers": [_layer_config(layer) for layer in cache._layers],
        "sequences": sequences,
        "checksums": {name: zlib.crc32(array.tobytes()) for name, array in arrays.items()},
    }
    text = json.dumps(header, sort_keys=True)
    # One entry, since the library writes several in an order that differs from run to run.
    metadata = {"kvcodec": f"{zlib.crc32(text.encode()):08x} {text}"}
    data = library.save(arrays, metadata=metadata)

    path = Path(path).resolve()
    if path.exists() and not path.is_file():
        raise OSError(f"path must be a file that can be replaced, but {path} is none.")
    temporary = path.with_name(f".{secrets.token_hex(8)}.unfinished")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def load(path: str | os.PathLike[str], backend: str | None) -> KVCache:
    """Read what `save` wrote, or raise."""
    library = _safetensors()
    _backend.active_backend(backend)
    data = Path(path).read_bytes()
    try:
        header = _header(data)
        arrays = library.load(data)
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"path must be a complete safetensors file, but: {error}.") from None
    sums = header.get("checksums")
    listed = isinstance(sums, dict) and set(sums) == set(arrays)
    _require(listed, "its list of arrays does not fit")
    for name, array in arrays.items():
        fits = zlib.crc32(array.tobytes()) == sums[name]
        _require(fits, f"the array {name} is damaged")
    try:
        return _build(header, arrays, backend)
    except DAMAGE as error:
        if str(error).startswith("path must be"):
            raise
        reason = str(error) if isinstance(error, ValueError) else repr(error)
        raise ValueError(f"path must be a complete cache file, but: {reason}") from None


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(f"path must be an undamaged cache file, but {problem}.")


def _header(data: bytes) -> dict[str, Any]:
    """The JSON header of a file, its checksum and its version checked."""
    size = int.from_bytes(data[:8], "little")
    _require(len(data) >= 8 and size <= len(data) - 8, "it is truncated or no safetensors file")
    try:
        metadata = json.loads(data[8 : 8 + size]).get("__metadata__", {})
        checksum, text = metadata["kvcodec"].split(" ", 1)
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ValueError(
            f"path must be a file written by KVCache.save, but {data[:16]!r}... has no such header."
        ) from None
    _require(f"{zlib.crc32(text.encode()):08x}" == checksum, "its header is damaged")
    try:
        header: Any = json.loads(text)
    except ValueError:
        header = None
    _require(isinstance(header, dict), "its header is no JSON object")
    version = header.get("format_version")
    if header.get("format") != FORMAT or type(version) is not int or version != FORMAT_VERSION:
        raise ValueError(
            f"path must be a {FORMAT} file of format version {FORMAT_VERSION}, but is a "
            f"{header.get('format')} file of version {header.get('format_version')}."
        )
    return header


def _layer_config(layer: Layer) -> dict[str, Any]:
    config = dict(layer.__dict__)
    for side in ("key", "value"):
        config[side] = None if config[side] is None else config[side].to_config()
    return config


def _describe(row: Sequence, prefix: str, arrays: Arrays) -> dict[str, Any]:
    """Put the arrays of a sequence into `arrays`; returns its numbers."""
    for part in ("sinks", "tail"):
        tail: Tail = getattr(row, part)
        for side, x in zip("kv", tail.take(tail.first, tail.end), strict=True):
            arrays[f"{prefix}.{part}.{side}"] = np.ascontiguousarray(x)
    for side in ("keys", "values"):
        for name, array in _canonical(getattr(row, side)).items():
            arrays[f"{prefix}.{side}.{name}"] = array
    if row.keys.weights is not None:
        arrays[f"{prefix}.keys.weights"] = row.keys.weights
    if row.energy:
        shape = (row.layer.kv_heads, row.layer.key_dim)
        missing = np.full(shape, np.nan)
        arrays[f"{prefix}.energy"] = np.stack([missing if x is None else x for x in row.energy])
    units = row.keys.units
    return {
        **{name: getattr(row, name) for name in NUMBERS},
        "tail_first": row.tail.first,
        "equalized": row.keys.weights is not None,
        "unit_first": row.keys.first[:units].tolist(),
        "unit_count": row.keys.count[:units].tolist(),
    }


def _canonical(blocks: Blocks) -> Arrays:
    """All units, token-major, one after the other along the third axis."""
    units = [unit for _, unit in blocks]
    if not units:
        return {}
    if blocks.codec is None:
        return {"exact": np.concatenate(units, axis=2)}
    return {
        name: np.concatenate([getattr(unit, name) for unit in units], axis=2)
        for name in ARRAYS
        if name != "weights" and getattr(units[0], name) is not None
    }


def _build(header: dict[str, Any], arrays: Arrays, backend: str | None) -> KVCache:
    configs = header["layers"]
    for config in configs:
        for side in ("key", "value"):
            config[side] = None if config[side] is None else Codec.from_config(config[side])
    first, batch = configs[0], len(header["sequences"][0])
    options = header["options"]
    cache = KVCache(
        len(configs),
        [config["kv_heads"] for config in configs],
        [config["key_dim"] for config in configs],
        {index: config["key"] for index, config in enumerate(configs)},
        {index: config["value"] for index, config in enumerate(configs)},
        value_head_dim=[config["value_dim"] for config in configs],
        batch=batch,
        backend=backend,
        **{name: first[name] for name in ("sinks", "recent", "block", "rollback", "window")},
        **{name: options[name] for name in OPTIONS},
    )
    _require(
        [_layer_config(layer) for layer in cache._layers] == [_plain(config) for config in configs],
        "its layers do not fit together",
    )
    remaining = dict(arrays)
    _require(len(header["sequences"]) == len(configs), "sequences are missing")
    for layer, rows in enumerate(header["sequences"]):
        _require(len(rows) == batch, "sequences are missing")
        for index, numbers in enumerate(rows):
            prefix = f"{layer}.{index}"
            row = _sequence(cache._layers[layer], prefix, numbers, remaining)
            room = cache.capacity is None or row.length <= cache.capacity
            _require(room, f"sequence {prefix} is longer than max_tokens")
            cache._sequences[layer][index] = row
    _require(not remaining, f"it holds unknown arrays: {', '.join(sorted(remaining))}")
    return cache


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    sides = ("key", "value")
    codecs = {side: None if config[side] is None else config[side].to_config() for side in sides}
    return config | codecs


def _sequence(layer: Layer, prefix: str, numbers: dict[str, Any], arrays: Arrays) -> Sequence:
    row = Sequence(layer)
    whole = (*NUMBERS, "tail_first")
    _require(
        all(type(numbers[name]) is int and numbers[name] <= MOST_TOKENS for name in whole),
        "a number is not whole or too large",
    )
    end, packed_end, tail_first = (numbers[n] for n in ("end", "packed_end", "tail_first"))
    after_sinks = max(end, layer.sinks)
    _require(
        end >= 0
        and layer.sinks <= tail_first <= packed_end <= after_sinks
        and 0 <= numbers["evicted"] <= max(end - layer.sinks, 0)
        and layer.sinks <= numbers["released"] <= after_sinks,
        f"the numbers of sequence {prefix} contradict each other",
    )
    for name in NUMBERS:
        setattr(row, name, numbers[name])

    _fill(row.sinks, 0, min(end, layer.sinks), f"{prefix}.sinks", arrays)
    _fill(row.tail, tail_first, after_sinks, f"{prefix}.tail", arrays)
    units = list(zip(numbers["unit_first"], numbers["unit_count"], strict=True))
    _check_units(units, row, prefix)
    equalized = numbers["equalized"]
    _require(type(equalized) is bool, "a number is not whole")
    _restore(row.keys, units, f"{prefix}.keys", arrays, equalized)
    _restore(row.values, units, f"{prefix}.values", arrays, False)
    if row.keys.codec is not None and packed_end > layer.sinks:
        row.keys.codec = replace(row.keys.codec, equalize=equalized)
    if f"{prefix}.energy" in arrays:
        energy = _taken(arrays, f"{prefix}.energy", np.float64, None)
        _require(
            energy.ndim == 3
            and energy.shape[1:] == (layer.kv_heads, layer.key_dim)
            and len(energy) <= layer.sinks + layer.block
            and all(_is_energy(x) or np.isnan(x).all() for x in energy),
            f"the statistics of sequence {prefix} have wrong shape or values",
        )
        row.energy = [x if _is_energy(x) else None for x in energy]
    return row


def _taken(arrays: Arrays, name: str, dtype: Any, shape: tuple[int, ...] | None) -> NDArray[Any]:
    """Take an array out of those of the file, its type and shape checked."""
    _require(name in arrays, f"the array {name} is missing")
    array = arrays.pop(name)
    _require(
        array.dtype == dtype and (shape is None or array.shape == shape),
        f"the array {name} is {array.dtype} {array.shape} and not {np.dtype(dtype)} {shape}",
    )
    return array


def _is_energy(x: NDArray[np.float64]) -> bool:
    return bool(((x >= 0) & (x < np.inf)).all())


def _in_range(x: NDArray[np.float32]) -> bool:
    return bool((np.abs(x) < LARGEST_MAGNITUDE).all())


def _fill(tail: Tail, first: int, end: int, prefix: str, arrays: Arrays) -> None:
    tail.restart(first)
    sides = []
    for side, empty in (("k", tail.k), ("v", tail.v)):
        shape = (*empty.shape[:2], end - first, empty.shape[3])
        x = _taken(arrays, f"{prefix}.{side}", np.float32, shape)
        _require(_in_range(x), f"the array {prefix}.{side} is out of range")
        sides.append(x)
    tail.append(*sides)


def _check_units(units: list[tuple[int, int]], row: Sequence, prefix: str) -> None:
    """Units ascend without gaps and end where the packed body does."""
    size = row.keys.unit
    whole = all(type(number) is int for unit in units for number in unit)
    expected = units[0][0] if units else row.packed_end
    fits = whole and row.layer.sinks <= expected <= max(row.released, row.layer.sinks)
    for first, count in units:
        fits = fits and first == expected and 0 < count <= size
        expected = first + count
    _require(fits and expected == row.packed_end, f"the units of sequence {prefix} do not fit")


def _restore(
    blocks: Blocks,
    units: list[tuple[int, int]],
    prefix: str,
    arrays: Arrays,
    equalized: bool,
) -> None:
    """Fill blocks from canonical arrays, unit by unit."""
    heads, dim = blocks.heads, blocks.head_dim
    if equalized:
        weights = _taken(arrays, f"{prefix}.weights", np.float32, (1, heads, dim))
        fits = ((weights >= LEAST_WEIGHT) & (weights <= LARGEST_WEIGHT)).all()
        _require(bool(fits), f"{prefix}.weights is out of range")
        _require(bool(blocks.codec and blocks.codec.equalize), f"{prefix}.weights is unexpected")
        blocks.weights = weights
    if not units:
        return
    steps = blocks.steps()
    totals = {name: sum(-(-count // step) for _, count in units) for name, step in steps.items()}
    if blocks.codec is None:
        stored: Arrays = {
            "exact": _taken(arrays, f"{prefix}.exact", np.float32, (1, heads, totals["exact"], dim))
        }
        _require(_in_range(stored["exact"]), f"the array {prefix}.exact is out of range")
    else:
        stored = {}
        for name, (unit, dtype) in layout_of(blocks.codec, (1, heads, blocks.unit, dim)).items():
            shape = (*unit[:2], totals[name], *unit[3:])
            stored[name] = _taken(arrays, f"{prefix}.{name}", dtype, shape)
            if name in ("scale", "zero_point", "center_scale"):
                fits = bool((np.abs(load_scales(stored[name])) <= LARGEST_SCALE).all())
                _require(fits, f"the array {prefix}.{name} is out of range")
    at = dict.fromkeys(steps, 0)
    for first, count in units:
        piece = {}
        for name, step in steps.items():
            members = -(-count // step)
            piece[name] = stored[name][:, :, at[name] : at[name] + members]
            at[name] += members
        if blocks.codec is None:
            blocks.append_unit(piece["exact"], first)
        else:
            encoded = Encoded(codec=blocks.codec, head_dim=dim, **piece)
            blocks.append_unit(encoded, first)
