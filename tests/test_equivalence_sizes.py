"""Every size around a lane and a tile, one by one: the same bits on every build."""

import os

import numpy as np
import pytest

import kvcodec as kv
from kvcodec.codebook import HEAD_DIMS
from kvcodec.testing import assert_equivalent, backends, twin

SIZES = (0, 1, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
CODECS = [
    *(kv.codec(name) for name in kv.PRESETS),
    kv.codec("int4", rotation="none"),
    kv.codec("int3", layout="padded", rotation="none"),
    kv.codec("int8", center=True, equalize=True),
    kv.codec("kivi4", group_size=5, block=5),
    kv.codec("kivi2", group_size=128, scale_dtype="float32"),
    kv.codec("lm3", scale_rule="least_squares"),
    kv.codec("lm2", scale_rule="unbiased", scale_dtype="float32"),
    kv.codec("tcq3", scale_rule="least_squares", scale_dtype="float32"),
]

pytestmark = pytest.mark.skipif(
    len(backends()) == 1 and os.environ.get("KVCODEC_REQUIRE_FAST") != "1",
    reason="the fast path is not installed, so there is nothing to compare",
)


def random(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32)


def keys(tokens, head_dim):
    k = random(1, 2, tokens, head_dim)
    k[..., head_dim // 2] += 9
    k[:, :, ::7] *= 0.1
    return k


def encoded(codec, side, tokens, head_dim):
    x = keys(tokens, head_dim)
    equalizes = codec.for_side(side).equalize
    queries = random(1, 6, 5, head_dim) if equalizes else None
    return codec.encode(x, side=side, queries=queries)


def side_options(codec, side):
    return codec if side == "key" or not codec.center else kv.codec(codec.name)


def test_the_fast_path_is_there():
    assert len(backends()) > 1


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_encode_and_decode_at_every_size(codec, side):
    codec = side_options(codec, side)
    for tokens in SIZES:
        made = assert_equivalent(encoded, codec, side, tokens, 64)
        assert_equivalent(codec.decode, made)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_scores_and_value_sums_at_every_size(codec):
    for tokens in SIZES:
        k = encoded(codec, "key", tokens, 64)
        v = encoded(side_options(codec, "value"), "value", tokens, 64)
        probabilities = random(1, 2, 3, tokens) ** 2
        assert_equivalent(kv.scores, random(1, 6, 3, 64), k)
        for bits in (7, 14):
            assert_equivalent(lambda p, v, b: twin("value_sums")(p, v, b), probabilities, v, bits)


@pytest.mark.parametrize("scale_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("group_size", [5, 8, 16, 32])
def test_value_sums_of_any_number_of_groups(group_size, scale_dtype):
    codec = kv.codec("kivi4", group_size=group_size, block=group_size, scale_dtype=scale_dtype)
    for head_dim in (32, 40, 64, 96, 128, 256):
        for tokens in (64, 65, 90):
            v = encoded(codec, "value", tokens, head_dim)
            probabilities = random(1, 2, 3, tokens) ** 2
            assert_equivalent(lambda p, v: twin("value_sums")(p, v, 7), probabilities, v)


@pytest.mark.parametrize("codec", [c for c in CODECS if c.rotation == "none"], ids=repr)
def test_every_head_dim_around_a_lane(codec):
    for head_dim in SIZES[1:]:
        k, v = (encoded(side_options(codec, side), side, 65, head_dim) for side in ("key", "value"))
        assert_equivalent(encoded, codec, "key", 65, head_dim)
        assert_equivalent(codec.decode, k)
        assert_equivalent(kv.scores, random(1, 4, 2, head_dim), k)
        assert_equivalent(lambda p, v: twin("value_sums")(p, v, 7), random(1, 2, 2, 65) ** 2, v)


@pytest.mark.parametrize("name", ["int4", "lm2", "kivi4"])
def test_every_supported_head_dim(name):
    codec = kv.codec(name, rotation="srht")
    for head_dim in HEAD_DIMS:
        k = assert_equivalent(encoded, codec, "key", 3, head_dim)
        assert_equivalent(codec.decode, k)
        assert_equivalent(kv.scores, random(1, 2, 1, head_dim), k)


@pytest.mark.parametrize("rows", SIZES)
def test_transforms_of_every_number_of_rows(rows):
    for n in (1, 2, 8, 20, 64, 72, 128):
        x = random(rows, n)
        assert_equivalent(kv.fwht, x)
        assert_equivalent(kv.srht, x, 3)
        assert_equivalent(kv.inverse_srht, x, 3)


@pytest.mark.parametrize(
    ("bits", "layout"), [(2, "dense"), (3, "dense"), (3, "padded"), (4, "dense"), (8, "dense")]
)
def test_packing_of_every_length(bits, layout):
    for n in SIZES:
        codes = np.random.default_rng(n).integers(0, 2**bits, (3, n), np.uint8)
        packed = assert_equivalent(lambda c: kv.pack(c, bits, layout=layout), codes)
        again = assert_equivalent(lambda p, n: kv.unpack(p, n, bits, layout=layout), packed, n)
        np.testing.assert_array_equal(again, codes)
