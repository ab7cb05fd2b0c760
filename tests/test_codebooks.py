"""Lloyd-Max codebooks against independent oracles, the shipped data and the C header."""

import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import beta, norm

from kvcodec.codebook import BITS, HEAD_DIMS, codebook
from kvcodec.reference import codebook_solver as solver

ROOT = Path(__file__).resolve().parents[1]
TOOL = ROOT / "tools" / "gen_codebooks.py"
DATA = Path(str(files("kvcodec.reference") / "data" / "codebooks.json"))
COMPILER = next(filter(shutil.which, ("cc", "gcc", "clang")), None)

every_book = pytest.mark.parametrize(
    "book",
    [codebook(dim, bits) for dim in HEAD_DIMS for bits in BITS],
    ids=lambda book: f"{book.head_dim}-{book.bits}",
)
few_dims = pytest.mark.parametrize("head_dim", [2, 3, 4, 5, 16, 60, 128, 1024])
every_width = pytest.mark.parametrize("bits", BITS)


def unit_vectors(count, head_dim, seed):
    x = np.random.default_rng(seed).standard_normal((count, head_dim))
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def coordinate(head_dim):
    """The coordinate's distribution on [-1, 1], from SciPy's Beta((d-1)/2, (d-1)/2)."""
    shape = 0.5 * (head_dim - 1)
    return beta(shape, shape, loc=-1, scale=2)


def integral(function, head_dim, low, high):
    """Integrate against the density in terms of the angle, where it is smooth for every d."""
    low, high = np.arcsin([low, high])
    weight = quad(lambda t: np.cos(t) ** (head_dim - 2), -np.pi / 2, np.pi / 2, epsabs=0)[0]
    value = quad(
        lambda t: function(np.sin(t)) * np.cos(t) ** (head_dim - 2), low, high, epsabs=1e-15
    )[0]
    return value / weight


def test_head_dims_are_the_transform_orders():
    expected = [
        *(16, 20, 24, 28, 32, 36, 40, 44, 48, 56, 60, 64, 72, 80, 88, 96, 112, 120, 128, 144),
        *(160, 176, 192, 224, 240, 256, 288, 320, 352, 384, 448, 480, 512, 576, 640, 704, 768),
        *(896, 960, 1024),
    ]
    assert list(HEAD_DIMS) == expected
    shipped = json.loads(DATA.read_text(encoding="utf-8"))["codebooks"]
    assert list(shipped) == [str(dim) for dim in expected]
    assert all(list(books) == [str(bits) for bits in BITS] for books in shipped.values())


# The density


@few_dims
def test_density_mass_and_moment_match_scipy(head_dim):
    oracle = coordinate(head_dim)
    x = np.linspace(0, 0.95, 20)
    np.testing.assert_allclose(solver.density(head_dim, x), oracle.pdf(x), rtol=1e-9)
    np.testing.assert_allclose(solver.upper_mass(head_dim, x), oracle.sf(x), rtol=1e-9)
    for low in (0.0, 0.5 * head_dim**-0.5, 1.25 * head_dim**-0.5):
        high = min(1.0, 8.0 * head_dim**-0.5)
        moment = np.subtract(*solver.upper_moment(head_dim, [low, high]))
        assert moment == pytest.approx(integral(lambda x: x, head_dim, low, high), rel=1e-9)


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_variance_is_one_over_d_and_not_one_over_d_plus_one(head_dim):
    # Cells so narrow that the second moment is the sum of edge^2 * mass.
    edges = np.linspace(0, 1, 200_001)
    mass = -np.diff(solver.upper_mass(head_dim, edges))
    middle = 0.5 * (edges[:-1] + edges[1:])
    variance = 2 * np.sum(middle**2 * mass)
    assert variance == pytest.approx(1 / head_dim, rel=1e-6)
    assert abs(variance * (head_dim + 1) - 1) > 0.5 / head_dim


def test_unit_vectors_have_the_assumed_density():
    x = np.abs(unit_vectors(20_000, 16, seed=3)).ravel()
    for low in (0.1, 0.25, 0.5):
        expected = 2 * solver.upper_mass(16, low)
        assert np.mean(x > low) == pytest.approx(float(expected), abs=0.004)


# The solution


@few_dims
@every_width
def test_lloyd_max_conditions_hold_by_quadrature(head_dim, bits):
    centroids = solver.lloyd_max(head_dim, bits)
    edges = np.array([0.0, *(0.5 * (centroids[:-1] + centroids[1:])), 1.0])
    # Nothing that a double can hold lies beyond ten standard deviations.
    edges[-1] = min(1.0, 10.0 * head_dim**-0.5)
    for low, high, centroid in zip(edges[:-1], edges[1:], centroids, strict=True):
        mass = integral(np.ones_like, head_dim, low, high)
        mean = integral(lambda x: x, head_dim, low, high) / mass
        assert abs(mean - centroid) < 1e-10 * head_dim**-0.5


@every_book
def test_shipped_centroids_are_converged(book):
    half = book.centroids[book.centroids.size // 2 :]
    residual = np.abs(solver.lloyd_step(book.head_dim, half) - half).max()
    assert residual < 1e-13 * book.head_dim**-0.5


@pytest.mark.parametrize("bits", range(1, 8))
def test_uniform_density_gives_the_uniform_quantizer(bits):
    half = 2 ** (bits - 1)
    expected = (np.arange(half) + 0.5) / half
    np.testing.assert_allclose(solver.lloyd_max(3, bits), expected, rtol=1e-12)
    assert solver.distortion(3, expected) == pytest.approx(0.25**bits, rel=1e-9)


def test_plain_lloyd_iterations_converge_to_the_same_point():
    half = np.array([0.02, 0.08, 0.2, 0.3])
    for _ in range(400):
        half = solver.lloyd_step(128, half)
    np.testing.assert_allclose(half, solver.lloyd_max(128, 3), rtol=1e-10)


@every_width
@pytest.mark.parametrize("head_dim", [16, 128, 1024])
def test_no_small_change_improves_the_centroids(head_dim, bits):
    centroids = solver.lloyd_max(head_dim, bits)
    least = solver.distortion(head_dim, centroids)
    for index in range(centroids.size):
        for change in (-1e-3, 1e-3):
            moved = centroids.copy()
            moved[index] += change * head_dim**-0.5
            assert solver.distortion(head_dim, moved) > least


@pytest.mark.parametrize(("bits", "mse"), [(2, 0.1160), (3, 0.0340), (4, 0.0093)])
def test_published_mse_at_128(bits, mse):
    assert round(codebook(128, bits).unsnapped_mse, 4) == mse


@pytest.mark.parametrize(("bits", "gaussian"), [(2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_mse_approaches_the_gaussian_from_below(bits, gaussian):
    errors = [codebook(dim, bits).unsnapped_mse for dim in HEAD_DIMS]
    assert np.all(np.diff(errors) > 0)
    assert gaussian * 0.98 < errors[-1] < gaussian


@every_width
def test_large_dimensions_are_gaussian(bits):
    half = 2 ** (bits - 1)
    centroids = (np.arange(half) + 0.5) / half * 2
    for _ in range(3000):
        edges = np.array([0.0, *(0.5 * (centroids[:-1] + centroids[1:])), np.inf])
        mass, moment = np.diff(norm.cdf(edges)), -np.diff(norm.pdf(edges))
        centroids = moment / mass
    error = 1 - 2 * np.sum(mass * centroids**2)
    found = solver.lloyd_max(10**6, bits)
    np.testing.assert_allclose(found * 1000, centroids, rtol=1e-5)
    assert solver.distortion(10**6, found) == pytest.approx(error, rel=1e-5)


@every_width
@pytest.mark.parametrize("head_dim", [16, 60, 128])
def test_mse_on_random_unit_vectors(head_dim, bits):
    book = codebook(head_dim, bits)
    x = unit_vectors(200_000 // head_dim, head_dim, seed=head_dim + bits)
    codes = np.searchsorted(book.boundaries, x / book.step)
    error = np.mean(np.sum((x - book.levels[codes] * book.step) ** 2, axis=1))
    assert error == pytest.approx(book.mse, rel=0.02)


# Snapping


@every_book
def test_levels_and_boundaries(book):
    levels = book.levels.astype(int)
    assert book.levels.dtype == np.int8
    assert levels.size == 2**book.bits == book.centroids.size
    assert np.all(np.diff(levels) > 0)
    assert np.array_equal(levels, -levels[::-1])
    assert np.abs(levels).max() <= 127
    assert np.array_equal(book.centroids, -book.centroids[::-1])
    assert np.array_equal(2 * book.boundaries, levels[:-1] + levels[1:])
    assert np.abs(levels * book.step - book.centroids).max() < 0.6 * book.step


@every_book
def test_snapping_costs_less_than_a_thousandth(book):
    assert 1 <= book.mse / book.unsnapped_mse < 1.001


@every_width
@pytest.mark.parametrize("head_dim", [16, 128, 1024])
def test_reported_mse_by_quadrature(head_dim, bits):
    book = codebook(head_dim, bits)
    far = min(1.0, 10.0 * head_dim**-0.5)
    edges = [-far, *(book.boundaries * book.step), far]
    error = sum(
        integral(lambda x, value=value: (x - value) ** 2, head_dim, low, high)
        for low, high, value in zip(edges[:-1], edges[1:], book.levels * book.step, strict=True)
    )
    assert head_dim * error == pytest.approx(book.mse, rel=1e-9)


@every_width
@pytest.mark.parametrize("head_dim", [16, 128, 1024])
def test_step_is_optimal_for_the_levels(head_dim, bits):
    book = codebook(head_dim, bits)
    half = book.levels[book.levels.size // 2 :].astype(float)
    steps = book.step * (1 + np.array([-1e-4, 0.0, 1e-4]))
    lower, best, upper = solver.distortion(head_dim, steps[:, None] * half)
    assert best == pytest.approx(book.mse, rel=1e-12)
    assert best < min(lower, upper)


@pytest.mark.parametrize("head_dim", [16, 128])
def test_no_pair_of_levels_is_better_at_two_bits(head_dim):
    outer = np.arange(2, 128)
    least = min(
        solver.distortion(head_dim, steps[:, None] * [inner, top]).min()
        for top in outer
        for inner in range(int(0.29 * top), int(0.32 * top) + 1)
        if 0 < inner < top
        for steps in [solver.lloyd_max(head_dim, 2)[1] / top * np.linspace(0.99, 1.01, 21)]
    )
    assert codebook(head_dim, 2).mse <= least * (1 + 1e-9)


def test_snap_prefers_the_smallest_of_equally_good_levels():
    levels, step = solver.snap(3, [0.125, 0.375, 0.625, 0.875])
    assert levels.tolist() == [1, 3, 5, 7]
    assert step == pytest.approx(0.125, rel=1e-12)


def test_snap_refuses_a_grid_that_is_too_coarse():
    with pytest.raises(ValueError, match="too close together"):
        solver.snap(16, [0.1, 0.1001, 0.1002, 0.9])


# Public access


def test_codebook_is_cached_and_immutable():
    book = codebook(128, 4)
    assert book is codebook(np.int64(128), np.uint8(4))
    assert (book.head_dim, book.bits) == (128, 4)
    for array in (book.centroids, book.boundaries, book.levels):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        book.step = 1.0


@pytest.mark.parametrize("head_dim", [0, -128, 17, 100, 2048, 128.0, "128", None, [128]])
def test_unsupported_head_dim(head_dim):
    with pytest.raises(ValueError, match=r"^head_dim must be one of 16, 20, .* 1024, but ") as info:
        codebook(head_dim, 4)
    assert repr(head_dim) in str(info.value)


@pytest.mark.parametrize("bits", [0, 1, 5, 8, -2, 4.0, "4", None, True])
def test_unsupported_bits(bits):
    with pytest.raises(ValueError, match=r"^bits must be one of 2, 3, 4, but ") as info:
        codebook(128, bits)
    assert repr(bits) in str(info.value)


# The generator


def run_tool(*arguments):
    package_root = str(DATA.parents[3])
    return subprocess.run(
        [sys.executable, str(TOOL), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": package_root, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("gen_codebooks", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_check_accepts_what_is_shipped():
    result = run_tool("--check", "--only", "codebooks", "--data", DATA)
    assert result.returncode == 0, result.stderr
    assert "up to date" in result.stdout


def test_check_rejects_a_tampered_copy(tmp_path):
    content = json.loads(DATA.read_text(encoding="utf-8"))
    content["codebooks"]["64"]["4"]["levels"][2] += 1
    copy = tmp_path / "codebooks.json"
    copy.write_text(json.dumps(content), encoding="utf-8")
    result = run_tool("--check", "--only", "codebooks", "--data", copy)
    assert result.returncode == 1
    assert "64, 4, levels[2]" in result.stderr


@pytest.mark.parametrize("text", ["", "[]", "{}"])
def test_check_rejects_a_file_of_something_else(tool, tmp_path, text):
    path = tmp_path / "codebooks.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(tool.click.ClickException, match="is not a file of codebooks"):
        tool.read(path)
    with pytest.raises(tool.click.ClickException, match="does not exist"):
        tool.read(tmp_path / "absent.json")


def test_differences_tolerate_last_bits_only(tool):
    record = {"levels": [1, 3], "step": 0.25}
    assert not list(tool.differences(record, {"levels": [1, 3], "step": 0.25 * (1 + 1e-13)}))
    assert list(tool.differences(record, {"levels": [1, 3], "step": 0.25 * (1 + 1e-11)}))
    assert list(tool.differences(record, {"levels": [1, 3.0], "step": 0.25}))
    assert list(tool.differences(record, {"levels": [1, 3, 5], "step": 0.25}))
    assert list(tool.differences(record, {"levels": [1, 3]}))
    assert list(tool.differences(record, {**record, "more": 1}))
    assert list(tool.differences(record, None))


def test_json_round_trips(tool):
    tables = tool.read(DATA)
    text = tool.to_json(tables)
    assert json.loads(text)["codebooks"] == tables
    assert text == DATA.read_text(encoding="utf-8")


# Prints every codebook, and codes of values across and beyond the range of the levels.
C_PROGRAM = r"""
#include <stdio.h>
#include "kvcodec_codebooks.h"
#include "kvcodec_codebooks.h"

int main(void)
{
    int i, j, code, dim, bits;
    for (dim = 0; dim <= 1100; ++dim) {
        for (bits = 0; bits <= 8; ++bits) {
            const kvcodec_codebook *book = kvcodec_find_codebook(dim, bits);
            if (book == NULL) continue;
            printf("%d %d %d %.17g %.17g", book->head_dim, book->bits, book->num_levels,
                   book->step, book->mse);
            for (i = 0; i < book->num_levels; ++i)
                printf(" %d %.17g", book->levels[i], book->centroids[i]);
            for (i = 0; i < book->num_levels - 1; ++i) printf(" %.17g", book->boundaries[i]);
            for (j = -260; j <= 260; ++j) {
                code = 0;
                while (code < book->num_levels - 1 && book->boundaries[code] < 0.5 * j) ++code;
                printf(" %d", code);
            }
            printf("\n");
        }
    }
    return 0;
}
"""


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_c_header_agrees(tmp_path):
    header = tmp_path / "kvcodec_codebooks.h"
    result = run_tool("--c-header", header)
    assert result.returncode == 0, result.stderr
    (tmp_path / "main.c").write_text(C_PROGRAM, encoding="utf-8")
    flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic"]
    subprocess.run([COMPILER, *flags, "main.c", "-o", "main"], cwd=tmp_path, check=True)
    output = subprocess.run([tmp_path / "main"], capture_output=True, text=True, check=True).stdout

    books = [codebook(dim, bits) for dim in HEAD_DIMS for bits in BITS]
    lines = output.splitlines()
    assert len(lines) == len(books)
    for book, line in zip(books, lines, strict=True):
        pairs = np.stack([book.levels, book.centroids], axis=1).ravel()
        codes = np.searchsorted(book.boundaries, 0.5 * np.arange(-260, 261))
        expected = [book.head_dim, book.bits, book.levels.size, book.step, book.mse]
        assert [float(word) for word in line.split()] == [
            *expected,
            *pairs,
            *book.boundaries,
            *codes,
        ]
