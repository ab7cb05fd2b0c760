"""The layout of packed codes in memory: a permutation, the same on every backend."""

import numpy as np
import pytest

from kvcodec.reference import tiles
from kvcodec.reference.packing import pack
from kvcodec.testing import assert_same_bits

WIDTHS = (2, 3, 4, 8)
SIZES = (1, 7, 16, 33, 64, 80, 96, 128, 256)
every_layout = pytest.mark.parametrize("side", ["key", "value"])


def some_codes(rng, shape, width):
    return rng.integers(0, 2**width, shape).astype(np.uint8)


def element_in(tile, n, width, side, token, channel):
    """One code of a tile, bit by bit as the layout is described."""
    lane, depth = (token, channel) if side == "key" else (channel, token)
    groups = -(-(64 if side == "key" else n) // 16)
    size, per_chunk = (192, 32) if width == 3 else (64, 32 // width)
    chunk, element = divmod(depth, per_chunk)
    vectors = tile[(chunk * groups + lane // 16) * size :][:size]

    def field(vector, bits, element):
        byte = vectors[64 * vector + 4 * (lane % 16) + element % 4]
        return int(byte) >> (bits * (element // 4)) & (2**bits - 1)

    if width == 3:
        return field(element // 16, 2, element % 16) | field(2, 1, element) << 2
    return field(0, width, element)


@every_layout
@pytest.mark.parametrize("width", WIDTHS)
def test_every_code_lies_where_the_layout_says(width, side):
    rng = np.random.default_rng(0)
    for n in (5, 16, 40):
        codes = some_codes(rng, (64, n), width)
        tile = tiles.tile(codes, width, side)
        assert tile.shape == (tiles.tile_bytes(n, width, side),)
        for token in range(64):
            for channel in range(n):
                assert element_in(tile, n, width, side, token, channel) == codes[token, channel]


@every_layout
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("n", SIZES)
def test_tiles_are_a_permutation(n, width, side):
    codes = some_codes(np.random.default_rng(n), (2, 3, 64, n), width)
    packed = tiles.tile(codes, width, side)
    assert_same_bits(tiles.untile(packed, n, width, side), codes)
    bits = np.unpackbits(packed).sum()
    assert bits == np.unpackbits(codes).sum()


@every_layout
@pytest.mark.parametrize("width", WIDTHS)
def test_writing_leaves_the_other_tokens_alone(width, side):
    rng = np.random.default_rng(1)
    codes = some_codes(rng, (2, 2, 64, 24), width)
    rows = some_codes(rng, (2, 70, 24), width)
    written = tiles.tile(codes, width, side)
    tiles.write_tiles(written, 5, pack(rows, width, "dense"), 24, width, side)
    expected = codes.reshape(2, 128, 24).copy()
    expected[:, 5:75] = rows
    read = tiles.read_tiles(written, 128, 24, width, side)
    assert_same_bits(read, pack(expected, width, "dense"))
