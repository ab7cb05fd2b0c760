"""Saving and loading a KVCache: safetensors with checksums, every number and array checked.

The format is specified in docs/file-format.md. A file is loaded in three steps: read it, check all
of its header and of its arrays, and build the cache; nothing is allocated by the word of a header
that was not checked.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcodec import _backend
from kvcodec._version import __version__
from kvcodec.blocks import Blocks
from kvcodec.cache import KVCache
from kvcodec.encoded import Encoded
from kvcodec.reference._numbers import load as load_floats
from kvcodec.sequence import Layer, Sequence, Tail
from kvcodec.storage_checks import (
    FORMAT,
    FORMAT_VERSION,
    NUMBERS,
    OPTIONS,
    SHARED,
    Arrays,
    Plan,
    Refused,
    Row,
    check_arrays,
    header_of,
    plan_of,
    require,
)

# Names of types in the order that the library's writer gives to their arrays.
DTYPES = {"F64": np.float64, "F32": np.float32, "U16": np.uint16, "I8": np.int8, "U8": np.uint8}

Makers = dict[str, Callable[[], NDArray[Any]]]


def _safetensors() -> ModuleType:
    try:
        import safetensors.numpy as library
    except ImportError:
        raise ImportError(
            "Saving and loading a cache needs safetensors; install the extra 'storage': "
            'pip install "kvcodec-cpu[storage]".'
        ) from None
    return library


def _as_path(path: str | os.PathLike[str]) -> Path:
    try:
        return Path(path)
    except TypeError:
        raise TypeError(f"path must be a string or a path, but {path!r} was given.") from None


def _bytes(array: NDArray[Any]) -> memoryview:
    """The bytes of an array as they are in the file, without a copy where that is possible."""
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return little.reshape(-1).view(np.uint8).data


# Saving


def save(
    cache: KVCache, path: str | os.PathLike[str], notes: Mapping[str, str] | None = None
) -> None:
    """Write a cache to a new file beside `path`, then put it in its place.

    `notes` are further strings for the metadata of the file, by name, which `load` leaves alone.
    """
    library = _safetensors()
    place = _replaceable(path)
    kernels = _backend.resolve(cache._backend)
    # Made one at a time, once for its checksum and once to be written: all together they would
    # take the memory of the cache again.
    makers: Makers = {}
    sequences = [
        [_describe(row, f"{layer}.{index}", makers, kernels) for index, row in enumerate(rows)]
        for layer, rows in enumerate(cache._sequences)
    ]
    about = {name: _about(make()) for name, make in makers.items()}
    header = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "written_by": f"kvcodec {__version__}",
        "options": {name: getattr(cache, f"_{name}") for name in OPTIONS},
        "layers": [_layer_config(layer) for layer in cache._layers],
        "sequences": sequences,
        "checksums": {name: checksum for name, (_, _, _, checksum) in about.items()},
    }
    types = list(DTYPES)
    order = sorted(about, key=lambda name: (types.index(about[name][0]), name))
    table: dict[str, Any] = {"__metadata__": {**(notes or {}), "kvcodec": sealed(header)}}
    start = 0
    for name in order:
        dtype, shape, size, _ = about[name]
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + size]}
        start += size
    try:
        _write(place, table, (makers[name] for name in order), library)
    except OSError as error:
        if error.filename is None:
            raise
        # The name of the temporary file would say nothing to the caller.
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None


def _replaceable(path: str | os.PathLike[str]) -> Path:
    """Where to write, checked before any work."""
    place = _as_path(path).resolve()
    if place.exists() and not place.is_file():
        raise OSError(f"path must be a file that can be replaced, but {str(path)!r} is none.")
    if not place.parent.is_dir():
        raise FileNotFoundError(
            f"path must be in a folder that exists, but that of {path} does not."
        )
    return place


def _about(array: NDArray[Any]) -> tuple[str, tuple[int, ...], int, int]:
    """Type, shape, size and checksum."""
    dtype = next(name for name, dtype in DTYPES.items() if dtype == array.dtype)
    return dtype, array.shape, array.nbytes, zlib.crc32(_bytes(array))


def sealed(header: dict[str, Any]) -> str:
    """The header as JSON behind its checksum."""
    text = json.dumps(header, sort_keys=True)
    return f"{zlib.crc32(text.encode()):08x} {text}"


def _write(
    place: Path,
    table: dict[str, Any],
    makers: Iterable[Callable[[], NDArray[Any]]],
    library: ModuleType,
) -> None:
    """Write a safetensors file as a whole or not at all."""
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    temporary = place.with_name(f".{secrets.token_hex(8)}.unfinished")
    try:
        with open(temporary, "xb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for make in makers:
                file.write(_bytes(make()))
            file.flush()
            os.fsync(file.fileno())
        with library.safe_open(temporary, "np"):
            pass  # nothing is replaced by what the library does not open
        if place.exists():
            shutil.copymode(place, temporary)
        os.replace(temporary, place)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _layer_config(layer: Layer) -> dict[str, Any]:
    config = {name: x for name, x in layer.__dict__.items() if name != "reserve"}
    for side in ("key", "value"):
        config[side] = None if config[side] is None else config[side].to_config()
    return config


def _describe(row: Sequence, prefix: str, makers: Makers, kernels: ModuleType) -> dict[str, Any]:
    """Put what makes the arrays of a sequence into `makers`; returns its numbers."""
    for part in ("sinks", "tail"):
        for index, side in enumerate("kv"):
            makers[f"{prefix}.{part}.{side}"] = partial(_exact, getattr(row, part), index)
    for side in ("keys", "values"):
        blocks = getattr(row, side)
        for name in blocks.steps() if blocks.units else ():
            makers[f"{prefix}.{side}.{name}"] = partial(blocks.joined, name, kernels)
    weights = row.keys.weights
    if weights is not None:
        makers[f"{prefix}.keys.weights"] = lambda: weights
    if row.energy:
        makers[f"{prefix}.energy"] = partial(_energy, row)
    units = row.keys.units
    return {
        **{name: getattr(row, name) for name in NUMBERS},
        "tail_first": row.tail.first,
        "equalized": weights is not None,
        "unit_first": row.keys.first[:units].tolist(),
        "unit_count": row.keys.count[:units].tolist(),
    }


def _exact(tail: Tail, index: int) -> NDArray[Any]:
    """The keys (index 0) or values (1) of exact tokens."""
    return tail.take(tail.first, tail.end)[index]


def _energy(row: Sequence) -> NDArray[np.float64]:
    missing = np.full((row.layer.kv_heads, row.layer.key_dim), np.nan)
    return np.stack([missing if x is None else x for x in row.energy])


# Loading: read


def metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """The strings in the metadata of a file, by name."""
    with _safetensors().safe_open(_readable(path), "np") as file:
        return file.metadata() or {}


def load(path: str | os.PathLike[str], backend: str | None) -> KVCache:
    """Read what `save` wrote, or raise."""
    library = _safetensors()
    kernels = _backend.resolve(backend)
    place = _readable(path)
    try:
        header, arrays = _read(place, library)
        plan = plan_of(header)
        check_arrays(plan, arrays, kernels)
    except Refused as refusal:
        raise ValueError(str(refusal)) from None
    return _build(plan, arrays, backend, kernels)


def _readable(path: str | os.PathLike[str]) -> Path:
    """A file that can be opened."""
    place = _as_path(path)
    if place.exists() and not place.is_file():
        raise OSError(f"path must be a file, but {str(path)!r} is none.")
    with open(place, "rb"):  # the system says best why it cannot be opened
        return place


def _read(place: Path, library: ModuleType) -> tuple[dict[str, Any], Arrays]:
    """The header and the arrays of a file, their checksums checked."""
    try:
        with library.safe_open(place, "np") as file:
            header = header_of(file.metadata())
            names = list(file.keys())
            listed = isinstance(header["checksums"], dict) and set(header["checksums"]) == {*names}
            require(listed, "its list of arrays does not fit")
            arrays = {name: file.get_tensor(name) for name in names}
    except (Refused, OSError, MemoryError):
        raise
    except Exception as error:  # for what it cannot read the library raises errors of many kinds
        raise Refused(f"reading it failed: {error}", "a complete safetensors file") from None
    for name, array in arrays.items():
        fits = zlib.crc32(_bytes(array)) == header["checksums"][name]
        require(fits, f"the array {name} is damaged")
    return header, arrays


# Loading: build


def _build(plan: Plan, arrays: Arrays, backend: str | None, kernels: ModuleType) -> KVCache:
    """The cache, in which every array takes its place and is then let go."""
    layers, first = plan.layers, plan.layers[0]
    cache = KVCache(
        len(layers),
        [layer.kv_heads for layer in layers],
        [layer.key_dim for layer in layers],
        {index: layer.key for index, layer in enumerate(layers)},
        {index: layer.value for index, layer in enumerate(layers)},
        value_head_dim=[layer.value_dim for layer in layers],
        window=[layer.window for layer in layers],
        batch=len(plan.sequences[0]),
        backend=backend,
        **{name: getattr(first, name) for name in SHARED},
        **plan.options,
    )
    for layer, rows in enumerate(plan.sequences):
        for index, row in enumerate(rows):
            _fill(cache._sequences[layer][index], row, f"{layer}.{index}", arrays, kernels)
    return cache


def _fill(sequence: Sequence, row: Row, prefix: str, arrays: Arrays, kernels: ModuleType) -> None:
    """Give an empty sequence its numbers and its arrays, which are taken out of `arrays`."""
    for name in NUMBERS:
        setattr(sequence, name, getattr(row, name))
    for part, number in (("sinks", 0), ("tail", row.tail_first)):
        tail: Tail = getattr(sequence, part)
        tail.restart(number)
        k, v = (load_floats(arrays.pop(f"{prefix}.{part}.{side}")) for side in "kv")
        tail.append(k, v, 0, k.shape[2], kernels)
    keys, packed = sequence.keys, row.packed_end > sequence.layer.sinks
    if keys.codec is not None and packed:
        keys.codec = replace(keys.codec, equalize=row.equalized)
    if row.equalized:
        keys.weights = arrays.pop(f"{prefix}.keys.weights").copy()
    energy = arrays.pop(f"{prefix}.energy", ())
    sequence.energy = [None if np.isnan(x).any() else x.copy() for x in energy]
    if row.units:
        _fill_body(keys, row.units, f"{prefix}.keys", arrays, kernels)
        _fill_body(sequence.values, row.units, f"{prefix}.values", arrays, kernels)


def _fill_body(
    blocks: Blocks,
    units: list[tuple[int, int]],
    prefix: str,
    arrays: Arrays,
    kernels: ModuleType,
) -> None:
    """Fill blocks unit by unit."""
    steps = blocks.steps()
    stored = {name: arrays.pop(f"{prefix}.{name}") for name in steps}
    at = dict.fromkeys(steps, 0)
    for first, count in units:
        piece = {}
        for name, step in steps.items():
            entries = -(-count // step)
            piece[name] = stored[name][:, :, at[name] : at[name] + entries]
            at[name] += entries
        if blocks.codec is None:
            blocks.append_unit(piece["exact"], first, kernels)
        else:
            blocks.append_unit(Encoded(blocks.codec, blocks.head_dim, **piece), first, kernels)
