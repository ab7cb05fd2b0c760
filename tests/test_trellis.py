"""Trellis codes against brute force over bits, a shortest path of SciPy, and the shipped tables."""

import json
import subprocess
from importlib.resources import files
from itertools import product

import numpy as np
import pytest
from conftest import relative_error
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import dijkstra
from test_codebooks import COMPILER, run_tool

import kvcodec as kv
from kvcodec.codebook import HEAD_DIMS
from kvcodec.reference import tiles, trellis, trellis_training
from kvcodec.testing import arrays, assert_equivalent, assert_same_bits

pytestmark = pytest.mark.usefixtures("backend")

every_width = pytest.mark.parametrize("bits", [2, 3, 4])
DATA = files("kvcodec.reference") / "data" / "trellis.json"
GOALS = {2: 0.076, 3: 0.0212, 4: 0.0059}


def random(rows, n, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, n)).astype(np.float32)


def windows_of_bits(packed, n, bits):
    """The window of each element of a row, bit by bit."""
    stream = [int(packed[bit // 8]) >> bit % 8 & 1 for bit in range(n * bits)]
    return [
        sum(stream[((i + 1) * bits - 8 + j) % (n * bits)] << j for j in range(8)) for i in range(n)
    ]


# Decoding


@given(data=st.data(), n=st.sampled_from(HEAD_DIMS[:20]))
@every_width
def test_a_window_is_the_last_byte_of_a_ring_of_bits(data, n, bits):
    seed = data.draw(st.integers(0, 2**32 - 1))
    codes = np.random.default_rng(seed).integers(0, 2**bits, (2, n)).astype(np.uint8)
    expected = [windows_of_bits(row, n, bits) for row in kv.pack(codes, bits)]
    levels = kv.trellis_table(bits).levels[np.array(expected)]
    found = kv.dequantize_trellis(codes, np.ones(2, np.float32), bits)
    assert_same_bits(found, levels.astype(np.float32))


@pytest.mark.parametrize("row_bytes", [5, 8, 12, 33])
def test_interleaved_streams_come_back(row_bytes):
    """Byte i of token t lies where attention reads it."""
    rows = np.random.default_rng(row_bytes).integers(0, 256, (2, 3, 64, row_bytes), np.uint8)
    keys, values = tiles.interleave(rows, "key"), tiles.interleave(rows, "value")
    for t, i in product((0, 1, 17, 63), range(row_bytes)):
        key_at, value_at = (i // 4 * 64 + t) * 4 + i % 4, (t // 4 * row_bytes + i) * 4 + t % 4
        assert np.array_equal(keys[..., key_at], rows[:, :, t, i])
        assert np.array_equal(values[..., value_at], rows[:, :, t, i])
    assert_same_bits(tiles.streams(keys, row_bytes, "key"), rows)
    assert_same_bits(tiles.streams(values, row_bytes, "value"), rows)


@given(data=st.data(), side=st.sampled_from(["key", "value"]))
def test_streams_are_written_from_any_slot(data, side):
    slot, count = data.draw(st.integers(0, 127)), data.draw(st.integers(1, 64))
    rows = np.random.default_rng(slot).integers(0, 256, (2, 192, 7), np.uint8)
    held = tiles.interleave(rows.reshape(2, 3, 64, 7), side)
    new = np.random.default_rng(count).integers(0, 256, (2, count, 7), np.uint8)
    tiles.write_streams(held, slot, new, side)
    rows[:, slot : slot + count] = new
    assert_same_bits(tiles.read_streams(held, 150, 7, side), rows[:, :150].copy())


# Encoding


def paths(targets, levels, bits, seam):
    """The least squared error of a closed path from and to a state, by a search in a graph."""
    n, states = len(targets), 256 >> bits
    window = np.arange(256)
    source, sink, weight = [], [], []
    for i, target in enumerate(targets):
        source.append(i * states + window % states)
        sink.append((i + 1) * states + (window >> bits))
        weight.append((target - levels[window].astype(np.float64)) ** 2 + 1e-9)
    edges = (np.concatenate(weight), (np.concatenate(source), np.concatenate(sink)))
    graph = csr_matrix(edges, shape=((n + 1) * states,) * 2)
    return dijkstra(graph, indices=seam)[n * states + seam]


@every_width
@pytest.mark.parametrize("n", [16, 20, 64])
def test_codes_are_a_shortest_path_through_their_seam(bits, n):
    table = kv.trellis_table(bits)
    for x in random(4, n, seed=n):
        codes, scale = kv.quantize_trellis(x, bits, scale_dtype="float32")
        window = trellis.windows(codes, bits)
        targets = np.rint(4 * x / scale) / 4
        error = np.sum((targets - table.levels[window]) ** 2)
        least = paths(targets, table.levels, bits, int(window[0]) % (256 >> bits))
        assert error == pytest.approx(least, rel=1e-6)


@every_width
def test_the_seam_is_nearly_the_best(bits):
    """The error is at most a hundredth above that of the best of all closed paths."""
    table = kv.trellis_table(bits)
    found = best = 0
    for x in random(3, 64, seed=1):
        codes, scale = kv.quantize_trellis(x, bits, scale_dtype="float32")
        targets = np.rint(4 * x / scale) / 4
        found += np.sum((targets - table.levels[trellis.windows(codes, bits)]) ** 2)
        best += min(paths(targets, table.levels, bits, seam) for seam in range(256 >> bits))
    assert best <= found * (1 + 1e-6) <= 1.015 * best


@given(x=arrays((3, 64)), exponent=st.integers(-20, 20))
@every_width
def test_codes_do_not_depend_on_the_scale(x, exponent, bits):
    """Powers of two change the scale alone, as long as they are far from the ends of the range."""
    largest = np.abs(x).max(axis=-1, keepdims=True)
    x = np.where((largest > 1e-15) & (largest < 1e15), x, 0)
    codes, scale = kv.quantize_trellis(x, bits)
    others, other = kv.quantize_trellis(np.ldexp(x, exponent), bits)
    assert_same_bits(codes, others)
    assert_same_bits(np.ldexp(scale, exponent), other)


@given(x=arrays((4, 60)))
@every_width
@pytest.mark.parametrize("scale_rule", ["norm_preserving", "unbiased"])
def test_lengthening_rules_keep_norm_or_projection(x, bits, scale_rule):
    codes, scale = kv.quantize_trellis(x, bits, scale_rule=scale_rule, scale_dtype="float32")
    assert_same_bits(codes, kv.quantize_trellis(x, bits, scale_dtype="float32")[0])
    y = kv.dequantize_trellis(codes, scale, bits).astype(np.float64)
    x = np.where(scale[:, None] > 0, x, 0).astype(np.float64)
    kept = (y * y if scale_rule == "norm_preserving" else y * x).sum(axis=-1)
    np.testing.assert_allclose(kept, (x**2).sum(axis=-1), rtol=1e-6)


@every_width
def test_least_squares_has_the_least_error(bits):
    x = random(50, 128)
    errors = {}
    for rule in ("norm", "least_squares", "norm_preserving", "unbiased"):
        coded = kv.quantize_trellis(x, bits, scale_rule=rule, scale_dtype="float32")
        errors[rule] = np.mean((kv.dequantize_trellis(*coded, bits) - x) ** 2)
    assert min(errors, key=errors.get) == "least_squares"


@every_width
def test_every_build_finds_the_same_codes_of_the_longest_rows(bits):
    x = random(3, 1024)
    x[1] *= np.exp2(np.arange(1024) % 40 - 20)
    x[2, 1:] = 0
    assert_equivalent(kv.quantize_trellis, x, bits)


@pytest.mark.parametrize("rule", ["norm", "least_squares", "norm_preserving", "unbiased"])
@every_width
def test_zeros_and_single_spikes_are_coded_by_every_rule(rule, bits):
    x = np.zeros((4, 1024), np.float32)
    x[1, 5], x[2], x[3, 1023] = 3.0, 1e-42, -1e30
    y = kv.dequantize_trellis(*kv.quantize_trellis(x, bits, scale_rule=rule), bits)
    assert np.isfinite(y).all()
    assert not y[0].any()


# The tables


@every_width
def test_the_newest_bit_of_a_window_is_a_sign(bits):
    levels = kv.trellis_table(bits).levels.astype(int)
    assert levels.shape == (256,)
    assert np.array_equal(levels[128:], -levels[:128])
    assert 110 <= np.abs(levels).max() <= 127
    with pytest.raises(ValueError, match="read-only"):
        kv.trellis_table(bits).levels[0] = 1


@every_width
def test_distortion_is_the_one_the_table_states_and_below_the_goal(bits):
    x = random(400, 128, seed=5)
    decoded = kv.dequantize_trellis(*kv.quantize_trellis(x, bits), bits)
    distortion = relative_error(decoded, x) ** 2
    assert distortion == pytest.approx(kv.trellis_table(bits).mse, rel=0.02)
    assert distortion < GOALS[bits]


@every_width
def test_an_iteration_of_training_moves_levels_little(bits):
    table = kv.trellis_table(bits)
    x = random(300, 128, seed=6)
    moved, error = trellis_training.lloyd_iteration(
        table.levels[:128].astype(float), x, bits, kv._backend.resolve().quantize_trellis
    )
    assert np.sqrt(np.mean((moved - table.levels[:128]) ** 2)) < 2
    assert error == pytest.approx(table.mse, rel=0.02)


@every_width
def test_training_lowers_the_error_and_depends_on_its_seed_alone(bits):
    def run(seed, iterations):
        quantize = kv._backend.resolve().quantize_trellis
        return trellis_training.train(bits, seed, quantize, 20, iterations)

    once, again, other = run(1, 6), run(1, 6), run(2, 6)
    assert np.array_equal(once[0], again[0])
    assert once[1] == again[1]
    assert not np.array_equal(once[0], other[0])
    assert once[1] < 0.98 * run(1, 0)[1]


def test_training_is_the_same_on_every_backend():
    def run(seed):
        quantize = kv._backend.resolve().quantize_trellis
        return trellis_training.train(3, seed, quantize, 10, 3)

    assert_equivalent(run, 4)


C_PROGRAM = r"""
#include <stdio.h>
#include "kvcodec_codebooks.h"

int main(void)
{
    unsigned char stream[64];
    int bits, i, head_dim = 20;
    for (i = 0; i < 64; ++i) stream[i] = (unsigned char)(i * 37 + 11);
    for (bits = 0; bits <= 8; ++bits) {
        const kvcodec_trellis *trellis = kvcodec_find_trellis(bits);
        if (trellis == NULL) continue;
        stream[(head_dim * bits - 1) / 8] &= 15;
        printf("%d %.17g %.17g", trellis->bits, trellis->unit, trellis->mse);
        for (i = 0; i < 128; ++i) printf(" %d", trellis->levels[i]);
        for (i = 0; i < head_dim; ++i)
            printf(" %d", kvcodec_trellis_level(trellis, stream, head_dim, i));
        printf("\n");
    }
    return 0;
}
"""


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_c_header_agrees(tmp_path):
    result = run_tool("--c-header", tmp_path / "kvcodec_codebooks.h")
    assert result.returncode == 0, result.stderr
    (tmp_path / "main.c").write_text(C_PROGRAM, encoding="utf-8")
    flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic"]
    subprocess.run([COMPILER, *flags, "main.c", "-o", "main"], cwd=tmp_path, check=True)
    output = subprocess.run([tmp_path / "main"], capture_output=True, text=True, check=True).stdout
    stream = (np.arange(64) * 37 + 11).astype(np.uint8)
    lines = output.splitlines()
    assert len(lines) == 3
    for bits, line in zip((2, 3, 4), lines, strict=True):
        table = kv.trellis_table(bits)
        stream[(20 * bits - 1) // 8] &= 15
        window = windows_of_bits(stream, 20, bits)
        expected = [bits, table.unit, table.mse, *table.levels[:128], *table.levels[window]]
        assert [float(word) for word in line.split()] == expected


def test_the_file_of_tables_is_formatted_by_the_tool():
    content = json.loads(DATA.read_text(encoding="utf-8"))
    assert list(content["tables"]) == ["2", "3", "4"]
    assert all(len(table["levels"]) == 128 for table in content["tables"].values())
