"""Decisions of encoding that a faster way than the definition's must not get wrong."""

import numpy as np
import pytest

import kvcodec as kv
from kvcodec.testing import assert_same_bits

pytestmark = pytest.mark.usefixtures("backend")

every_preset_side = pytest.mark.parametrize(
    ("name", "side"), [(name, side) for name in kv.PRESETS for side in ("key", "value")]
)


def encode(name, side, x):
    return kv.codec(name, side=side).encode(x)


@pytest.mark.parametrize("exponent", [0, -70, -120, 70])
@pytest.mark.parametrize("head_dim", [16, 24, 64, 128])
def test_lengths_that_only_float64_tells_apart_decide_about_centering(head_dim, exponent):
    # Tokens c/2 and 3c/2 have the mean c, which int8 levels hold. Without it the former are as long
    # as before, or longer or shorter by what one channel is off.
    rng = np.random.default_rng(head_dim)
    center = rng.integers(-100, 101, head_dim).astype(np.float32)
    center[0] = 127
    k = np.repeat([center / 2, 3 * center / 2], 32, axis=0)
    off = rng.integers(-1, 2, 32)
    k[np.arange(32), 1 + np.arange(32) % (head_dim - 1)] *= 1 + off * np.float32(2.0**-22)
    scaled = k * np.float32(2.0**exponent)
    encoded = kv.codec("int4", side="key").encode(scaled[None, None])
    np.testing.assert_array_equal(encoded.center_levels[0, 0, 0], center)

    k = k.astype(np.float64)
    longer = (k[:32] * center - center.astype(np.float64) ** 2 / 2).sum(axis=1) < 0
    assert len(set(longer)) == 2
    uncentered = (encoded.scale.view(np.uint16)[0, 0] >> 15).astype(bool)
    np.testing.assert_array_equal(uncentered, np.concatenate([longer, np.zeros(32, bool)]))


@pytest.mark.parametrize("token", [0, 6, 7, 64, 100, 129])
@pytest.mark.parametrize("value", [np.nan, -np.inf, 2.0**100])
@every_preset_side
def test_a_value_that_is_not_bounded_is_found_anywhere(name, side, value, token):
    x = np.random.default_rng(0).standard_normal((1, 2, 130, 20), dtype=np.float32)
    x[0, token % 2, token, token % 20] = value
    with pytest.raises(ValueError, match=r"^x must hold finite values below 2\^100"):
        encode(name, side, x)


@every_preset_side
def test_values_just_below_the_bound_are_encoded(name, side):
    x = np.random.default_rng(0).uniform(-1, 1, (1, 2, 70, 20)).astype(np.float32)
    encoded, small = (encode(name, side, y) for y in (x * np.float32(2.0**99), x))
    np.testing.assert_array_equal(encoded.packed, small.packed)


@pytest.mark.parametrize("group_size", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_codes_of_groups_use_all_their_bits(group_size, bits):
    x = np.random.default_rng(bits).standard_normal((1, 2, 70, 128), dtype=np.float32)
    codec = kv.codec("kivi4", bits=bits, group_size=group_size, side="value")
    encoded = codec.encode(x)
    assert_same_bits(encoded.packed, codec.encode(x, backend="reference").packed)
    codes = kv.unpack(encoded.packed, 128, bits)
    assert codes.min() == 0
    assert codes.max() == 2**bits - 1
    steps = np.repeat(x.reshape(1, 2, 70, -1, group_size).max(-1), group_size, axis=-1)
    steps -= np.repeat(x.reshape(1, 2, 70, -1, group_size).min(-1), group_size, axis=-1)
    assert (np.abs(codec.decode(encoded) - x) <= steps / (2**bits - 1) * 0.51 + 0.02).all()
