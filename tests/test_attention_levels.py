"""Every SIMD level attends over a cache's tiles with the same bits: sizes at the edges of vectors,
of tiles of the matrix unit, and of what is expanded at a time.
"""

import numpy as np
import pytest
from cache_cases import EVERY, FLOATS

import kvcodec as kv
from kvcodec.testing import assert_same_bits

LEVELS = EVERY[1:]
TREES = ("tcq4", "tcq3", "tcq2")


def codec(name, side, head_dim):
    """A codec for any head_dim: not rotated, with what follows the preset in its name."""
    preset, *others = name.split()
    options = {} if preset.startswith(("kivi", "tcq")) else {"rotation": "none"}
    for other in others:
        options |= {"group_size": int(other)} if other.isdigit() else {"scale_dtype": other}
    return kv.codec(preset, side=side, **options)


def filled(name, head_dim, tokens, factor=1, **options):
    """A cache whose body has left the exact window; keys are multiplied by a factor."""
    rng = np.random.default_rng(head_dim + tokens)
    k, v = rng.standard_normal((2, 1, 1, tokens, head_dim), dtype=np.float32)
    k *= np.float32(factor)
    sides = (codec(name, side, head_dim) for side in ("key", "value"))
    cache = kv.KVCache(1, 1, head_dim, *sides, sinks=1, recent=0, **options)
    cache.append(0, k, v)
    return cache


def attended(name, head_dim, rows, tokens, softcap=None, **options):
    """What queries of `rows` heads get, in each level."""
    q = np.random.default_rng(rows).standard_normal((1, rows, 1, head_dim), dtype=np.float32)
    for level in LEVELS:
        with level.context():
            cache = filled(name, head_dim, tokens, **options)
            yield tuple(cache.attend(0, q, softcap=softcap, return_lse=True))


def assert_levels_agree(*case, **options):
    first, *others = attended(*case, **options)
    assert np.isfinite(first[0]).all()
    for other in others:
        assert_same_bits(other, first)


@pytest.mark.parametrize("rows", [1, 4, 5, 8, 9, 16, 17, 31, 32, 35])
@pytest.mark.parametrize("name", ["int8", "int4", "int3", "int2", "kivi4", "kivi2 16", "kivi2 64"])
def test_any_number_of_rows(name, rows):
    assert_levels_agree(name, 64, rows, 200)


@pytest.mark.parametrize("head_dim", [1, 17, 20, 80, 96, 200, 256, 260, 512, 1024])
@pytest.mark.parametrize("name", ["int8", "int4", "int3", "int2", "kivi4", "kivi4 16", "kivi2 1"])
def test_any_head_dim(name, head_dim):
    for rows in (4, 17):
        assert_levels_agree(name, head_dim, rows, 150)


@pytest.mark.parametrize("scale_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("group_size", [8, 16, 32])
@pytest.mark.parametrize("head_dim", [16, 32, 56, 64, 96, 128, 160, 256])
def test_any_number_of_groups(head_dim, group_size, scale_dtype):
    for tokens in (65, 150):
        assert_levels_agree(f"kivi4 {group_size} {scale_dtype}", head_dim, 4, tokens)


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("factor", [1e-30, 1e-3, 1e18, 1e29])
@pytest.mark.parametrize("name", ["int4", "kivi4", "kivi4 1"])
def test_keys_of_any_magnitude(name, factor, softcap):
    assert_levels_agree(name, 64, 5, 200, factor=factor, softcap=softcap)


@pytest.mark.parametrize("head_dim", [16, 20, 28, 60, 80, 144, 1024])
@pytest.mark.parametrize("name", TREES)
def test_trellis_tiles_of_any_head_dim(name, head_dim):
    for query_bits in (8, None):
        assert_levels_agree(name, head_dim, 5, 150, query_bits=query_bits)


@pytest.mark.parametrize("head_dim", [16, 20, 28, 60, 80, 144])
@pytest.mark.parametrize("name", TREES)
def test_trellis_tiles_hold_the_codes_of_rows(name, head_dim):
    k, v = np.random.default_rng(1).standard_normal((2, 1, 1, 129, head_dim), dtype=np.float32)
    for level in LEVELS:
        with level.context():
            cache = kv.KVCache(1, 1, head_dim, name, name, sinks=1, recent=0)
            cache.append(0, k, v)
            for side, x, held in (("key", k, cache.keys(0)), ("value", v, cache.values(0))):
                coded = kv.codec(name, side=side, equalize=False if side == "key" else None)
                packed = coded.encode(x[:, :, 1:129], side=side)
                assert_same_bits(held[:, :, 1:129], coded.decode(packed))


@pytest.mark.parametrize("tokens", [15, 16, 17, 63, 64, 65, 129])
@pytest.mark.parametrize("bits", [7, 14])
@pytest.mark.parametrize("name", ["int4", "kivi4 16", "kivi4 32", "kivi2 32"])
def test_any_number_of_tokens(name, bits, tokens):
    assert_levels_agree(name, 128, 4, tokens + 1, probability_bits=bits)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 9])
@pytest.mark.parametrize("name", ["int8", "int4", "int3", "int2", "lm4", "kivi4"])
def test_float_products_of_any_number_of_rows(name, rows):
    assert_levels_agree(name, 64, rows, 200, **FLOATS)


@pytest.mark.parametrize("head_dim", [1, 17, 20, 80, 200, 260])
@pytest.mark.parametrize("name", ["int8", "int4", "int3", "int2"])
def test_float_products_of_any_head_dim(name, head_dim):
    for rows in (4, 7):
        assert_levels_agree(name, head_dim, rows, 150, **FLOATS)


@pytest.mark.parametrize("name", ["int8", "int4", "int3", "int2", "lm3", "tcq4"])
def test_float_products_of_a_row_do_not_depend_on_the_others(name):
    q = np.random.default_rng(0).standard_normal((1, 7, 1, 80), dtype=np.float32)
    for level in LEVELS:
        with level.context():
            cache = filled(name, 80, 150, **FLOATS)
            alone = [cache.attend(0, q[:, row : row + 1]) for row in range(7)]
            assert_same_bits(cache.attend(0, q), np.concatenate(alone, axis=1))
