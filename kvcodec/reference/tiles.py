r"""Tiles: how packed codes lie in memory so that a SIMD unit reads them without moving anything.

Attention needs two kinds of sums over a tile of 64 tokens: scores add up over the channels of each
token, value sums over the tokens of each channel. In both, what is kept apart (tokens, channels)
becomes a *lane* and what is summed becomes *depth*: keys are a matrix of 64 lanes and `head_dim`
depth, values one of `head_dim` lanes and 64 depth. One layout serves both.

Instructions for integer products take a register of 16 lanes of 4 bytes, multiply the 4 bytes of a
lane by 4 others and add them to the lane's sum. So 16 lanes by 4 elements of depth are a vector of
64 bytes, byte 4 * lane + element. Codes of b = 4, 2 or 1 bits put 8 / b such vectors into one: bits
b * s to b * s + b - 1 of the byte hold element 4 * s + element, so a shift and a mask give them
back. Such a vector is a *chunk* of 32 / b elements. Codes of 3 bits are split into their lower two
bits (two vectors) and their third (one vector) for a chunk of 32 elements.

The groups of 16 lanes are read side by side, chunk after chunk. A tile is therefore

    for each chunk: for each group of lanes: its vectors.

Lanes are filled up to a multiple of 16 and depth to whole chunks, with code 0. Apart from that the
layout is a permutation of the canonical one, which files hold.
"""

from __future__ import annotations

import numpy as np

from kvcodec.reference.packing import pack, unpack

TILE = 64
LANES = 16


def chunk_elements(width: int) -> int:
    """Elements of depth in a chunk."""
    return 32 if width == 3 else 32 // width


def tile_bytes(n: int, width: int, side: str) -> int:
    """Bytes of a tile of 64 tokens with n channels."""
    lanes, depth = (TILE, n) if side == "key" else (n, TILE)
    chunks, groups = -(-depth // chunk_elements(width)), -(-lanes // LANES)
    return groups * chunks * (192 if width == 3 else 64)


def _vectors(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes (..., groups, 16, depth) as vectors (..., groups, chunks, 64)."""
    shape = (*codes.shape[:-1], -1, 8 // bits, 4)  # lane, chunk, s, element
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    dwords = (codes.reshape(shape) << shifts).sum(axis=-2, dtype=np.uint8)
    by_chunk = dwords.swapaxes(-3, -2)
    return by_chunk.reshape(*by_chunk.shape[:-2], 64)


def _elements(vectors: np.ndarray, bits: int) -> np.ndarray:
    """Invert `_vectors`."""
    dwords = vectors.reshape(*vectors.shape[:-1], LANES, 4).swapaxes(-3, -2)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    codes = (dwords[..., None, :] >> shifts) & np.uint8(2**bits - 1)
    return codes.reshape(*codes.shape[:-3], -1)


def _lane_matrix(codes: np.ndarray, side: str, width: int) -> np.ndarray:
    """Codes (..., 64, n) as filled-up lanes and depth (..., groups, 16, depth)."""
    matrix = codes if side == "key" else codes.swapaxes(-1, -2)
    lanes, depth = matrix.shape[-2:]
    room = [(0, 0)] * (codes.ndim - 2) + [(0, -lanes % LANES), (0, -depth % chunk_elements(width))]
    matrix = np.pad(matrix, room)
    return matrix.reshape(*codes.shape[:-2], -1, LANES, matrix.shape[-1])


def tile(codes: np.ndarray, width: int, side: str) -> np.ndarray:
    """Lay codes (..., 64, n) of uint8 out as a tile: uint8 (..., tile_bytes)."""
    matrix = _lane_matrix(codes, side, width)
    if width == 3:
        low, high = _vectors(matrix & 3, 2), _vectors(matrix >> 2, 1)
        low = low.reshape(*high.shape[:-1], 128)
        vectors = np.concatenate([low, high], axis=-1)
    else:
        vectors = _vectors(matrix, width)
    return vectors.swapaxes(-3, -2).reshape(*codes.shape[:-2], -1)


def untile(tiles: np.ndarray, n: int, width: int, side: str) -> np.ndarray:
    """Invert `tile`: codes of uint8 (..., 64, n)."""
    lanes, depth = (TILE, n) if side == "key" else (n, TILE)
    chunks, groups = -(-depth // chunk_elements(width)), -(-lanes // LANES)
    vectors = tiles.reshape(*tiles.shape[:-1], chunks, groups, -1).swapaxes(-3, -2)
    if width == 3:
        low = vectors[..., :128].reshape(*vectors.shape[:-2], 2 * chunks, 64)
        codes = _elements(low, 2) | _elements(vectors[..., 128:], 1) << 2
    else:
        codes = _elements(vectors, width)
    matrix = codes.reshape(*tiles.shape[:-1], groups * LANES, codes.shape[-1])
    matrix = matrix[..., :lanes, :depth]
    return matrix if side == "key" else matrix.swapaxes(-1, -2)


def interleave(rows: np.ndarray, side: str) -> np.ndarray:
    """Lay bit streams, uint8 (..., 64, row_bytes), out as a tile: uint8 (..., bytes).

    The windows of a trellis code overlap, so its streams stay whole. Keys are interleaved by
    dwords: the dword of a lane holds 32 bits of its token. Values are interleaved by bytes, four
    tokens in a dword, as each product sums over four tokens.
    """
    *outer, tokens, row_bytes = rows.shape
    if side == "key":
        rows = np.pad(rows, [(0, 0)] * len(outer) + [(0, 0), (0, -row_bytes % 4)])
        tiles = rows.reshape(*outer, tokens, -1, 4).swapaxes(-3, -2)
    else:
        tiles = rows.reshape(*outer, tokens // 4, 4, row_bytes).swapaxes(-2, -1)
    return tiles.reshape(*outer, -1)


def streams(tiles: np.ndarray, row_bytes: int, side: str) -> np.ndarray:
    """Invert `interleave`."""
    *outer, size = tiles.shape
    if side == "key":
        rows = tiles.reshape(*outer, -1, TILE, 4).swapaxes(-3, -2)
    else:
        rows = tiles.reshape(*outer, TILE // 4, row_bytes, 4).swapaxes(-2, -1)
    return rows.reshape(*outer, TILE, size // TILE)[..., :row_bytes]


def write_streams(tiles: np.ndarray, slot: int, packed: np.ndarray, side: str) -> None:
    """As `write_tiles`, for interleaved streams."""
    heads, tokens, row_bytes = packed.shape
    rows = streams(tiles, row_bytes, side).reshape(heads, -1, row_bytes)
    rows[:, slot : slot + tokens] = packed
    tiles[...] = interleave(rows.reshape(heads, -1, TILE, row_bytes), side)


def read_streams(tiles: np.ndarray, tokens: int, row_bytes: int, side: str) -> np.ndarray:
    """As `read_tiles`, for interleaved streams."""
    rows = streams(tiles, row_bytes, side).reshape(len(tiles), -1, row_bytes)
    return np.ascontiguousarray(rows[:, :tokens])


def write_tiles(
    tiles: np.ndarray, slot: int, packed: np.ndarray, n: int, width: int, side: str
) -> None:
    """Put canonical rows (heads, tokens, row_bytes) into tiles (heads, count, tile_bytes).

    The first goes to token `slot`; what else the tiles hold stays.
    """
    codes = untile(tiles, n, width, side).reshape(len(tiles), -1, n)
    codes[:, slot : slot + packed.shape[1]] = unpack(packed, n, width, "dense")
    tiles[...] = tile(codes.reshape(len(tiles), -1, TILE, n), width, side)


def read_tiles(tiles: np.ndarray, tokens: int, n: int, width: int, side: str) -> np.ndarray:
    """Canonical rows (heads, tokens, row_bytes) of the first tokens of tiles."""
    codes = untile(tiles, n, width, side).reshape(len(tiles), -1, n)
    return pack(np.ascontiguousarray(codes[:, :tokens]), width, "dense")
