"""What a file of a KVCache must be: every number of its header, every value of its arrays.

Nothing is allocated here by the word of a number that was not checked.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcodec import _validate
from kvcodec.attention import check_probability_bits, check_query_bits
from kvcodec.blocks import STORED_AS, TILE, Blocks
from kvcodec.cache_options import MOST_RESERVED, check_block, reserved_tokens
from kvcodec.codec import Codec
from kvcodec.encoded import layout_of
from kvcodec.reference._numbers import load as load_floats
from kvcodec.reference._numbers import store
from kvcodec.reference.equalize import LARGEST_WEIGHT
from kvcodec.reference.packing import pack
from kvcodec.sequence import Layer

FORMAT = "kvcodec.KVCache"
FORMAT_VERSION = 1
HEADER = (
    "format",
    "format_version",
    "written_by",
    "options",
    "layers",
    "sequences",
    "checksums",
)
OPTIONS = ("query_bits", "probability_bits", "max_tokens")
SHARED = ("sinks", "recent", "block", "rollback", "exact_dtype")
NUMBERS = ("end", "packed_end", "evicted", "released")
ROW = (*NUMBERS, "tail_first", "equalized", "unit_first", "unit_count")
RESERVE_DEPENDS_ON = ("sinks", "recent", "block", "rollback", "window")

# Keys below 2^100 with 1024 channels and weights up to 64 have a norm below 2^111, and no code
# decodes to more than twice the norm. What is below this bound decodes to finite numbers.
LARGEST_CODED = 2.0**112
LARGEST_CENTER_LEVEL = 127
MOST_BYTES = 2**48
CHECKED_BYTES = 2**20

Arrays = dict[str, NDArray[Any]]


class Refused(Exception):
    """Why a file is not taken; `load` turns it into a ValueError."""

    def __init__(self, reason: str, wanted: str = "an undamaged cache file") -> None:
        super().__init__(f"path must be {wanted}, but {reason}.")


def require(condition: bool, reason: str) -> None:
    if not condition:
        raise Refused(reason)


def header_of(metadata: dict[str, str] | None) -> dict[str, Any]:
    """The JSON header, its checksum, version and entries checked."""
    checksum, space, text = (metadata or {}).get("kvcodec", "").partition(" ")
    if not space:
        raise Refused("it has no such header", "a file written by KVCache.save")
    require(f"{zlib.crc32(text.encode()):08x}" == checksum, "its header is damaged")
    try:
        header: Any = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    require(isinstance(header, dict), "its header is no JSON object")
    form, version = header.get("format"), header.get("format_version")
    if form != FORMAT or type(version) is not int or version != FORMAT_VERSION:
        raise Refused(
            f"is a {form} file of version {version}",
            f"a {FORMAT} file of format version {FORMAT_VERSION}",
        )
    return _object(header, HEADER, "its header")


# The header


@dataclass(frozen=True)
class Row:
    """What the header says of one sequence."""

    end: int
    packed_end: int
    evicted: int
    released: int
    tail_first: int
    equalized: bool
    units: list[tuple[int, int]]


@dataclass(frozen=True)
class Plan:
    """What the header says, checked."""

    options: dict[str, Any]
    layers: list[Layer]
    sequences: list[list[Row]]


def plan_of(header: dict[str, Any]) -> Plan:
    try:
        return _checked(header)
    except (ValueError, RecursionError) as error:  # of a check that the package shares
        raise Refused(f"its header is wrong: {str(error).rstrip('.')}") from None


def _object(value: Any, names: Iterable[str], what: str) -> dict[str, Any]:
    """An object of JSON with just these entries."""
    fits = isinstance(value, dict) and set(value) == set(names)
    require(fits, f"{what} has entries too many or too few")
    return value


def _list(value: Any, what: str) -> list[Any]:
    require(isinstance(value, list), f"{what} are no list")
    return value


def _checked(header: dict[str, Any]) -> Plan:
    require(isinstance(header["written_by"], str), "its writer has no name")
    options = _object(header["options"], OPTIONS, "the object of options")
    check_query_bits(options["query_bits"])
    check_probability_bits(options["probability_bits"], 8)
    most = options["max_tokens"]
    if most is not None:
        _validate.integer(most, "max_tokens", 1, MOST_RESERVED)

    layers = [
        _layer(config, most, f"layer {index}")
        for index, config in enumerate(_list(header["layers"], "its layers"))
    ]
    alike = {tuple(getattr(layer, name) for name in SHARED) for layer in layers}
    require(len(alike) == 1, "its layers do not fit together")

    given = [_list(rows, "its rows") for rows in _list(header["sequences"], "its sequences")]
    batch = len(given[0]) if given else 0
    complete = batch > 0 and [len(rows) for rows in given] == [batch] * len(layers)
    require(complete, "sequences are missing or too many")
    sequences = [
        [_row(row, layer, most, f"sequence {at}.{index}") for index, row in enumerate(rows)]
        for at, (layer, rows) in enumerate(zip(layers, given, strict=True))
    ]
    room = 0
    for layer, rows in zip(layers, sequences, strict=True):
        units = max(TILE, layer.block) * sum(len(row.units) for row in rows)
        tokens = batch * (layer.sinks + layer.reserve) + units
        room += layer.kv_heads * tokens * (layer.key_dim + layer.value_dim)
    require(4 * room <= MOST_BYTES, "its numbers ask for more memory than there can be")
    return Plan(options, layers, sequences)


def _layer(config: Any, max_tokens: int | None, name: str) -> Layer:
    _object(config, [field.name for field in fields(Layer) if field.name != "reserve"], name)
    _validate.integer(config["kv_heads"], f"kv_heads of {name}", 1)
    for dim in ("key_dim", "value_dim"):
        _validate.integer(config[dim], f"{dim} of {name}", 1, _validate.LARGEST_HEAD_DIM)
    for number in ("sinks", "recent", "rollback"):
        _validate.token_count(config[number], f"{number} of {name}")
    if config["window"] is not None:
        _validate.token_count(config["window"], f"window of {name}", 1)
    check_block(config["block"], f"block of {name}")
    _validate.choice(config["exact_dtype"], f"exact_dtype of {name}", tuple(STORED_AS))
    about = {number: config[number] for number in RESERVE_DEPENDS_ON}
    reserve = reserved_tokens(max_tokens, **about)
    codecs = {side: _codec(config[side], side, config, name) for side in ("key", "value")}
    return Layer(**{**config, **codecs, "reserve": reserve})


def _codec(options: Any, side: str, layer: dict[str, Any], name: str) -> Codec | None:
    """A codec that is settled for its side and fits the layer."""
    if options is None:
        return None
    _object(options, [field.name for field in fields(Codec)], f"the {side} codec of {name}")
    codec = Codec.from_config(options)
    fits = codec == codec.for_side(side) and codec.block == layer["block"]
    require(fits, f"the {side} codec of {name} does not fit")
    codec.check_head_dim(layer[f"{side}_dim"], f"{side}_dim of {name}")
    return codec


def _row(given: Any, layer: Layer, max_tokens: int | None, name: str) -> Row:
    _object(given, ROW, name)
    numbers = {
        number: _validate.token_count(given[number], f"{number} of {name}")
        for number in (*NUMBERS, "tail_first")
    }
    equalized = _validate.boolean(given["equalized"], f"equalized of {name}")
    row = Row(**numbers, equalized=equalized, units=_units(given, layer, name))
    require(_is_consistent(row, layer), f"the numbers of {name} contradict each other")
    room = max_tokens is None or row.end - row.evicted <= max_tokens
    require(room, f"{name} is longer than max_tokens")
    return row


def _units(given: dict[str, Any], layer: Layer, name: str) -> list[tuple[int, int]]:
    """First token and number of tokens of each unit."""
    firsts, counts = (
        _list(given[part], f"{part} of {name}") for part in ("unit_first", "unit_count")
    )
    require(len(firsts) == len(counts), f"the units of {name} do not fit")
    largest = max(TILE, layer.block)
    return [
        (
            _validate.token_count(first, f"unit_first of {name}"),
            _validate.integer(count, f"unit_count of {name}", 1, largest),
        )
        for first, count in zip(firsts, counts, strict=True)
    ]


def _is_consistent(row: Row, layer: Layer) -> bool:
    """Whether a sequence can come to have these numbers."""
    sinks = layer.sinks
    after_sinks = max(row.end, sinks)
    evicted_to = sinks + row.evicted
    equalizes = layer.key is not None and layer.key.equalize and row.packed_end > sinks
    # Units ascend without gaps from a token before which some may be gone to the last packed one.
    expected = row.units[0][0] if row.units else row.packed_end
    ascends = sinks <= expected <= row.released
    for first, count in row.units:
        ascends = ascends and first == expected
        expected = first + count
    return (
        sinks <= row.tail_first <= row.packed_end <= after_sinks
        and row.end - row.packed_end < layer.recent + layer.block
        and evicted_to <= row.released <= after_sinks
        and (layer.window is not None or row.released == evicted_to)
        and (equalizes or not row.equalized)
        and ascends
        and expected == row.packed_end
    )


# The arrays


@dataclass(frozen=True)
class _Expected:
    """What an array must be."""

    dtype: Any
    shape: tuple[int, ...]
    fits: Callable[[NDArray[Any]], bool]


def check_arrays(plan: Plan, arrays: Arrays, kernels: ModuleType) -> None:
    """All arrays that the header asks for are there, none besides, and their values are allowed."""
    expected: dict[str, _Expected] = {}
    for layer, (about, rows) in enumerate(zip(plan.layers, plan.sequences, strict=True)):
        for index, row in enumerate(rows):
            expected |= _expected(about, row, f"{layer}.{index}", arrays, kernels)
    for name in expected:
        require(name in arrays, f"the array {name} is missing")
    for name, array in arrays.items():
        require(name in expected, f"it holds an unknown array, {name}")
        wanted = expected[name]
        require(
            array.dtype == wanted.dtype and array.shape == wanted.shape,
            f"the array {name} is {array.dtype} {array.shape} and not "
            f"{np.dtype(wanted.dtype)} {wanted.shape}",
        )
        require(wanted.fits(array), f"the array {name} has values that are not allowed")


def _expected(
    layer: Layer, row: Row, prefix: str, arrays: Arrays, kernels: ModuleType
) -> dict[str, _Expected]:
    """The arrays of one sequence."""
    heads, dims = layer.kv_heads, (layer.key_dim, layer.value_dim)
    stored = STORED_AS[layer.exact_dtype]
    held = {
        "sinks": min(row.end, layer.sinks),
        "tail": max(row.end, layer.sinks) - row.tail_first,
    }
    expected = {
        f"{prefix}.{part}.{side}": _Expected(stored, (1, heads, tokens, dim), _is_exact)
        for part, tokens in held.items()
        for side, dim in zip("kv", dims, strict=True)
    }
    bodies = zip(("keys", "values"), (layer.key, layer.value), dims, strict=True)
    for side, codec, dim in bodies if row.units else ():
        blocks = Blocks(codec, heads, dim, layer.block, layer.exact_dtype)
        for name, wanted in _expected_body(blocks, row.units, kernels).items():
            expected[f"{prefix}.{side}.{name}"] = wanted
    if row.equalized:
        shape = (1, heads, layer.key_dim)
        expected[f"{prefix}.keys.weights"] = _Expected(np.float32, shape, _are_weights)
    name = f"{prefix}.energy"
    if name in arrays and layer.key is not None and layer.key.equalize:
        tokens = arrays[name].shape[0] if arrays[name].ndim else 0
        require(
            1 <= tokens <= min(row.end, layer.sinks + layer.block),
            f"the array {name} is of too many or too few tokens",
        )
        shape = (tokens, heads, layer.key_dim)
        expected[name] = _Expected(np.float64, shape, _are_energies)
    return expected


def _expected_body(
    blocks: Blocks, units: list[tuple[int, int]], kernels: ModuleType
) -> dict[str, _Expected]:
    """The arrays of one side of a packed body: each unit has entries of its own."""
    codec, heads, dim = blocks.codec, blocks.heads, blocks.head_dim
    entries = {
        name: sum(-(-count // step) for _, count in units) for name, step in blocks.steps().items()
    }
    if codec is None:
        stored = STORED_AS[blocks.exact_dtype]
        return {"exact": _Expected(stored, (1, heads, entries["exact"], dim), _is_exact)}
    checks = _checks(codec, dim, kernels)
    return {
        name: _Expected(dtype, (*shape[:2], entries[name], *shape[3:]), checks[name])
        for name, (shape, dtype) in layout_of(codec, (1, heads, blocks.unit, dim)).items()
    }


def _checks(
    codec: Codec, head_dim: int, kernels: ModuleType
) -> dict[str, Callable[[NDArray[Any]], bool]]:
    """For each array of a codec, whether the encoder could have made its values."""
    largest = 2**codec.bits - 1
    if codec.code != "asymmetric":
        largest = int(np.abs(codec.levels(head_dim).astype(np.int64)).max())
    return {
        "packed": lambda x: _are_codes(x, codec, head_dim, kernels),
        "scale": lambda x: _are_scales(x, LARGEST_CODED / largest, bool(codec.center)),
        "zero_point": lambda x: _are_scales(x, LARGEST_CODED, True),
        "center_levels": lambda x: bool(x.min(initial=0) >= -LARGEST_CENTER_LEVEL),
        "center_scale": lambda x: _are_scales(x, LARGEST_CODED / LARGEST_CENTER_LEVEL, False),
    }


def _are_codes(packed: NDArray[np.uint8], codec: Codec, head_dim: int, kernels: ModuleType) -> bool:
    """Bits of no code are 0, and symmetric codes leave the most negative level, code 0, out."""
    ones = np.full(head_dim, 2**codec.bits - 1, dtype=np.uint8)
    unused = ~pack(ones, codec.bits, codec.layout)
    rows = packed.reshape(-1, len(unused))
    step = max(CHECKED_BYTES // head_dim, 1)
    for start in range(0, len(rows), step):
        piece = rows[start : start + step]
        if (piece & unused).any():
            return False
        if codec.code == "symmetric":
            codes = kernels.unpack(piece, head_dim, codec.bits, codec.layout)
            if not codes.all():
                return False
    return True


def _are_scales(x: NDArray[Any], largest: float, signed: bool) -> bool:
    """Magnitudes up to `largest`, and no sign unless it may have one.

    Compares bit patterns: without their sign, floats are in the order of their values, NaN last.
    """
    dtype = "bfloat16" if x.dtype == np.uint16 else "float32"
    bits = x.view(f"u{x.itemsize}")
    bound = store(np.array(largest), dtype).view(bits.dtype)
    if signed:
        bits = bits & bits.dtype.type(2 ** (8 * x.itemsize - 1) - 1)
    return bool(bits.max(initial=0) <= bound)


def _is_exact(x: NDArray[Any]) -> bool:
    floats = load_floats(x)
    largest = max(floats.max(initial=0), -floats.min(initial=0))
    # Rounding to bfloat16 may arrive at the bound.
    rounded = x.dtype == np.uint16 and largest == _validate.LARGEST_MAGNITUDE
    return bool(largest < _validate.LARGEST_MAGNITUDE or rounded)


def _are_weights(x: NDArray[np.float32]) -> bool:
    return bool(((x >= 1 / LARGEST_WEIGHT) & (x <= LARGEST_WEIGHT)).all())


def _are_energies(x: NDArray[np.float64]) -> bool:
    """Energies of tokens, or NaN for a token whose query was not given."""
    known = ((x >= 0) & (x < np.inf)).all(axis=(1, 2))
    return bool((known | np.isnan(x).all(axis=(1, 2))).all())
