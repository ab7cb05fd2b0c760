"""docs/file-format.md: its example runs, and a reader that follows its text reads every file."""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from cache_model import read_file
from conftest import splitmix64, unpack_row
from storage_cases import GOLDEN, codec, golden_cache, small_cache, tokens

import kvcodec as kv
from kvcodec import _backend, reference

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "file-format.md").read_text(encoding="utf-8")
BOOKS = ROOT / "kvcodec" / "reference" / "data" / "codebooks.json"
TABLES = BOOKS.with_name("trellis.json")


def test_the_example_decodes_a_key_of_the_golden_file(monkeypatch, capsys):
    (example,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert not re.search(r"^\s*(import|from) kvcodec", example, re.MULTILINE)
    monkeypatch.chdir(ROOT)
    names = {}
    exec(example, names)
    cache = kv.KVCache.load(GOLDEN)
    layer, row, head, token = (names[name] for name in ("layer", "row", "head", "token"))
    sequence = cache._sequences[layer][row]
    assert sequence.visible_from <= token < sequence.packed_end
    key = sequence.decoded("key", _backend.resolve())[head, token - sequence.evicted]
    np.testing.assert_allclose(names["key"], key, rtol=1e-5, atol=1e-6)
    assert str(names["key"].round(3)) in capsys.readouterr().out


def test_every_entry_of_a_file_is_described():
    header = json.loads(read_file(GOLDEN)[0]["kvcodec"].split(" ", 1)[1])
    layer = header["layers"][0]
    objects = [header, header["options"], layer, layer["key"], header["sequences"][0][0]]
    described = set(re.findall(r"`(\w+)`", TEXT))
    for names in objects:
        assert set(names) <= described
    cache = small_cache(rollback=30)
    makers = {}
    kv.storage._describe(cache._sequences[0][0], "0.0", makers, reference)
    parts = {name.removeprefix("0.0.") for name in makers} | {"keys.exact", "values.exact"}
    assert parts <= set(re.findall(r"`((?:keys\.|values\.|sinks\.|tail\.)\w+|energy)`", TEXT))


# A reader that is written from the text, with nothing of the package


def chi(a, q):
    """1 for squares modulo q other than 0, 0 for multiples of q, else -1."""
    return 0 if a % q == 0 else 1 if any(i * i % q == a % q for i in range(1, q)) else -1


def paley(m):
    """P_m."""
    if m == 1:
        return np.ones((1, 1))
    if m in (28, 36):
        q = m // 2 - 1
        blocks = {1: [[1, 1], [1, -1]], -1: [[-1, -1], [-1, 1]], 0: [[1, -1], [-1, -1]]}
        small = np.ones((q + 1, q + 1), int)
        small[0, 0] = 0
        for i, j in itertools.product(range(q), repeat=2):
            small[1 + i, 1 + j] = chi(j - i, q)
        return np.block([[np.array(blocks[entry]) for entry in row] for row in small.tolist()])
    q = m - 1
    matrix = np.ones((m, m))
    for i, j in itertools.product(range(q), repeat=2):
        matrix[1 + i, 1 + j] = -1 if (i + j) % q == 0 else -chi(i + j, q)
    return matrix


def hadamard(order):
    """H."""
    m = next(
        m for m in (1, 12, 20, 28, 36, 44, 60) if order % m == 0 and (order // m).bit_count() == 1
    )
    size = order // m
    sylvester = [[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    return np.kron(paley(m), sylvester)


@pytest.mark.parametrize("order", [1, 2, 64, 12, 24, 20, 28, 112, 36, 44, 60, 120])
def test_the_matrices_are_those_of_the_text(order):
    np.testing.assert_allclose(
        hadamard(order) / np.sqrt(order), kv.hadamard_matrix(order), atol=1e-7
    )


def levels_of(codec, dim):
    """The level of each code, or of each window of a trellis code."""
    if codec["code"] == "symmetric":
        return np.arange(2 ** codec["bits"]) - 2 ** (codec["bits"] - 1)
    if codec["code"] == "trellis":
        tables = json.loads(TABLES.read_text(encoding="utf-8"))["tables"]
        half = np.array(tables[str(codec["bits"])]["levels"])
        return np.concatenate([half, -half])
    books = json.loads(BOOKS.read_text(encoding="utf-8"))["codebooks"]
    half = np.array(books[str(dim)][str(codec["bits"])]["levels"])
    return np.concatenate([-half[::-1], half])


def windows(codes, bits):
    """The last eight bits up to those of each code, of a ring."""
    ring = [int(code) for code in codes]
    found = []
    for i in range(len(ring)):
        stream = sum(ring[i - j] << bits * (4 - j) for j in range(5))
        found.append(stream >> (5 * bits - 8) & 255)
    return found


def floats(stored):
    """Scales of either type."""
    if stored.dtype == np.float32:
        return stored
    return (stored.astype(np.uint32) << 16).view(np.float32)


def entries(sequence, members):
    """For each packed token the entry of an array that has one for so many members."""
    at, start = [], 0
    for count in sequence["unit_count"]:
        at += [start + i // members for i in range(count)]
        start += -(-count // members)
    return at


def read_body(header, arrays, layer, row, head, side):
    """The packed tokens of one head, float64 (tokens, D)."""
    about, sequence = header["layers"][layer], header["sequences"][layer][row]
    part = {
        name: arrays.get(f"{layer}.{row}.{side}s.{name}")
        for name in (
            "exact",
            "packed",
            "scale",
            "zero_point",
            "center_levels",
            "center_scale",
            "weights",
        )
    }
    codec, dim = about[side], about[f"{side}_dim"]
    if codec is None:
        return part["exact"][0, head]
    width = 4 if codec["layout"] == "padded" else codec["bits"]
    codes = np.array([unpack_row(x, dim, width) for x in part["packed"][0, head]])
    scale = floats(part["scale"])[0, head].astype(np.float64)
    if codec["code"] == "asymmetric":
        zero = floats(part["zero_point"])[0, head].astype(np.float64)
        if side == "key":
            at = entries(sequence, codec["group_size"])
            scale, zero = scale[at], zero[at]
        else:
            at = np.arange(dim) // codec["group_size"]
            scale, zero = scale[:, at], zero[:, at]
        x = zero + codes * scale
    else:
        if codec["code"] == "trellis":
            codes = np.array([windows(row, width) for row in codes])
        x = np.abs(scale)[:, None] * levels_of(codec, dim)[codes]
    if codec["rotation"] != "none":
        x = x @ hadamard(dim) / np.sqrt(dim)
    if codec["rotation"] == "srht":
        tops = [splitmix64((codec["seed"] + c) % 2**64) >> 63 for c in range(dim)]
        x = x * np.where(tops, -1, 1)
    if sequence["equalized"] and side == "key":
        x = x / part["weights"][0, head]
    if codec["center"]:
        center = part["center_levels"][0, head] * floats(part["center_scale"])[0, head][:, None]
        at = entries(sequence, codec["block"])
        x = np.where(np.signbit(scale)[:, None], x, x + center[at])
    return x


def read(path, layer, row, head, side):
    """What a query sees of one side."""
    metadata, arrays = read_file(path)
    header = json.loads(metadata["kvcodec"].split(" ", 1)[1])
    sequence, sinks = header["sequences"][layer][row], header["layers"][layer]["sinks"]
    first = sinks + sequence["evicted"]
    exact = {part: arrays[f"{layer}.{row}.{part}.{side[0]}"][0, head] for part in ("sinks", "tail")}
    parts = [exact["sinks"]]
    if sequence["unit_count"]:
        body = read_body(header, arrays, layer, row, head, side)
        parts.append(body[max(first - sequence["unit_first"][0], 0) :])
    parts.append(exact["tail"][max(sequence["packed_end"], first) - sequence["tail_first"] :])
    return np.concatenate(parts)


OPTIONS = [
    ("int8", {}, 17),
    ("int4", {}, 24),
    ("int4", {"rotation": "none", "scale_dtype": "float32"}, 17),
    ("int3", {}, 20),
    ("int3", {"layout": "padded", "rotation": "srht", "seed": 2**64 - 3}, 28),
    ("int2", {"rotation": "srht", "seed": 5}, 36),
    ("int2", {"rotation": "none"}, 17),
    ("kivi4", {}, 40),
    ("kivi2", {"rotation": "hadamard", "scale_dtype": "float32"}, 44),
    ("lm4", {"scale_dtype": "float32"}, 16),
    ("lm3", {}, 20),
    ("lm3", {"layout": "padded", "seed": 7}, 60),
    ("lm2", {"center": False}, 64),
    ("tcq4", {"scale_dtype": "float32"}, 16),
    ("tcq3", {"seed": 9}, 20),
    ("tcq2", {"center": False}, 60),
    (None, {}, 5),
]


@pytest.mark.parametrize(("name", "options", "dim"), OPTIONS)
def test_a_reader_written_from_the_text_reads_every_code(name, options, dim, tmp_path):
    sides = (codec(name, side, **drop_center(options, side)) for side in ("key", "value"))
    cache = kv.KVCache(1, 2, dim, *sides, sinks=3, recent=5, block=16, rollback=20)
    cache.append_attend(0, *tokens(150, heads=2, head_dim=dim))
    cache.crop(101)  # leaves a short unit
    cache.append(0, *tokens(60, heads=2, head_dim=dim, step=104729)[1:])
    cache.evict(9)
    path = tmp_path / "cache.safetensors"
    cache.save(path)
    assert cache._sequences[0][0].keys.count.tolist()[1] % 16
    assert_read(path, cache)


def drop_center(options, side):
    """Options of keys are not for values."""
    return {key: value for key, value in options.items() if side == "key" or key != "center"}


def test_a_reader_written_from_the_text_reads_the_golden_file():
    assert_read(GOLDEN, golden_cache())


def assert_read(path, cache):
    """The reader's numbers are the cache's, up to rounding."""
    for layer, rows in enumerate(cache._sequences):
        for row, sequence in enumerate(rows):
            for side, head in itertools.product(("key", "value"), range(sequence.layer.kv_heads)):
                truth = sequence.decoded(side, _backend.resolve())[head]
                found = read(path, layer, row, head, side)
                np.testing.assert_allclose(found, truth, rtol=1e-4, atol=1e-5)
