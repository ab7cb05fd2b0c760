"""Packed layouts against bytes computed by hand and a slow stream of Python integers."""

import numpy as np
import pytest
from conftest import pack_row, unpack_row
from hypothesis import given
from hypothesis import strategies as st

import kvcodec as kv
from kvcodec.testing import assert_same_bits, sizes

pytestmark = pytest.mark.usefixtures("backend")

WIDTHS = {(2, "dense"): 2, (3, "dense"): 3, (3, "padded"): 4, (4, "dense"): 4, (8, "dense"): 8}
every_layout = pytest.mark.parametrize(
    ("bits", "layout", "width"), [(*key, width) for key, width in WIDTHS.items()]
)

GOLDEN = [
    (2, "dense", [1, 2, 3, 0, 1], "39 01"),
    (2, "dense", [3, 3, 3, 3, 0, 2], "ff 08"),
    (3, "dense", [1, 2, 3, 4, 5, 6, 7, 0, 5], "d1 58 1f 05"),
    (3, "dense", [7, 0, 0, 0, 0, 0, 0, 7], "07 00 e0"),
    (3, "padded", [1, 2, 3, 4, 5, 6, 7, 0, 5], "21 43 65 07 05"),
    (4, "dense", [0x1, 0x2, 0x3, 0x4], "21 43"),
    (4, "dense", [0xA, 0xB, 0xC], "ba 0c"),
    (8, "dense", [0x00, 0x7F, 0x80, 0xFF], "00 7f 80 ff"),
]
golden = pytest.mark.parametrize(("bits", "layout", "codes", "row"), GOLDEN)


def random_codes(shape, bits, seed):
    return np.random.default_rng(seed).integers(0, 2**bits, shape, dtype=np.uint8)


shapes = st.tuples(sizes(max_size=7), st.integers(1, 3), sizes())
seeds = st.integers(0, 2**32 - 1)


@golden
def test_pack_gives_the_golden_bytes(bits, layout, codes, row):
    assert kv.pack(codes, bits, layout=layout).tobytes().hex(" ") == row


@golden
def test_unpack_reads_the_golden_bytes(bits, layout, codes, row):
    packed = np.frombuffer(bytes.fromhex(row), np.uint8)
    assert kv.unpack(packed, len(codes), bits, layout=layout).tolist() == codes


@given(n=sizes(), seed=seeds)
@every_layout
def test_pack_is_one_stream_of_bits(n, seed, bits, layout, width):
    codes = random_codes((3, n), bits, seed)
    packed = kv.pack(codes, bits, layout=layout)
    assert packed.dtype == np.uint8
    assert [row.tobytes() for row in packed] == [pack_row(row, width) for row in codes]


@given(n=sizes(), extra=st.integers(0, 3), seed=seeds)
@every_layout
def test_unpack_reads_one_stream_of_bits(n, extra, seed, bits, layout, width):
    rows = random_codes((3, -(-n * width // 8) + extra), 8, seed)
    codes = kv.unpack(rows, n, bits, layout=layout)
    expected = [[code % 2**bits for code in unpack_row(row, n, width)] for row in rows]
    assert (codes.dtype, codes.tolist()) == (np.uint8, expected)


@given(shape=shapes, seed=seeds)
@every_layout
def test_unpack_inverts_pack(shape, seed, bits, layout, width):
    codes = random_codes(shape, bits, seed)
    packed = kv.pack(codes, bits, layout=layout)
    assert packed.shape == (*shape[:-1], -(-shape[-1] * width // 8))
    assert_same_bits(kv.unpack(packed, shape[-1], bits, layout=layout), codes)


@every_layout
def test_bits_behind_the_last_code_are_zero(bits, layout, width):
    for n in range(1, 10):
        last = kv.pack(np.full(n, 2**bits - 1), bits, layout=layout)[-1]
        assert int(last) < 2 ** ((n * width - 1) % 8 + 1)


@every_layout
def test_rows_are_packed_apart(bits, layout, width):
    codes = random_codes((2, 3, 13), bits, seed=0)
    packed = kv.pack(codes, bits, layout=layout)
    for index in np.ndindex(2, 3):
        assert_same_bits(packed[index], kv.pack(codes[index], bits, layout=layout))


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint16, np.int64], ids=str)
def test_codes_of_any_integer_dtype_are_taken(dtype):
    codes = random_codes((2, 9), 4, seed=0)
    assert_same_bits(kv.pack(codes.astype(dtype), 4), kv.pack(codes, 4))


def test_strides_do_not_count():
    codes = random_codes((8, 6, 10), 3, seed=0)
    for view in (codes[::2], codes[..., ::-1], codes.swapaxes(0, 2)):
        assert_same_bits(kv.pack(view, 3), kv.pack(view.copy(), 3))
        packed = kv.pack(view, 3)
        assert_same_bits(kv.unpack(packed[::-1], 5, 3), kv.unpack(packed[::-1].copy(), 5, 3))
