"""Codecs against a decoder written from the layout's definition, and the laws of their steps."""

import json
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from conftest import relative_error, splitmix64, unpack_row
from hypothesis import given
from hypothesis import strategies as st

import kvcodec as kv
from kvcodec.reference.packing import packed_bytes, stored_bits
from kvcodec.testing import (
    ORDINARY_KINDS,
    TILE_SIZES,
    arrays,
    assert_same_bits,
    codecs,
    exact_attention,
    kv_arrays,
)

pytestmark = pytest.mark.usefixtures("backend")

PRESET_SIDES = list(product(kv.PRESETS, ("key", "value")))
every_preset = pytest.mark.parametrize("name", kv.PRESETS)
every_preset_side = pytest.mark.parametrize(("name", "side"), PRESET_SIDES)


def random(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def encode(codec, x, q=None):
    """Encode with a codec whose side is settled, with queries where it equalizes."""
    if codec.equalize and q is None:
        q = random((x.shape[0], x.shape[1], 3, x.shape[3]), seed=9)
    return codec.encode(x, queries=q if codec.equalize else None)


def stored(x):
    """Scales as float64; uint16 are the bits of bfloat16."""
    return (x.view(ml_dtypes.bfloat16) if x.dtype == np.uint16 else x).astype(np.float64)


def spread(per_group, size, axis, length):
    """Repeat each group's number over its members."""
    return per_group.repeat(size, axis=axis).take(range(length), axis=axis)


def slow_decode(encoded):
    """All six steps back, in float64, from the definition of the layout."""
    codec, n, tokens = encoded.codec, encoded.head_dim, encoded.tokens
    width = stored_bits(codec.bits, codec.layout)
    rows = encoded.packed.reshape(-1, encoded.packed.shape[-1])
    codes = np.array([unpack_row(row, n, width) for row in rows], dtype=np.int64)
    codes = codes.reshape(encoded.shape)
    scale = stored(encoded.scale)
    if codec.code == "asymmetric":
        axis, length = (2, tokens) if codec.side == "key" else (3, n)
        scale, zero = (
            spread(x, codec.group_size, axis, length) for x in (scale, stored(encoded.zero_point))
        )
        x = zero + codes * scale
    elif codec.code == "symmetric":
        x = (codes - 2 ** (codec.bits - 1)) * np.abs(scale)[..., None]
    elif codec.code == "trellis":
        stream = np.unpackbits(np.pad(rows, [(0, 0), (0, 2)]), axis=1, bitorder="little")
        ring = stream[:, np.arange(-8, n * width) % (n * width)]
        ends = 8 + width * np.arange(1, n + 1)
        windows = np.packbits(
            ring[:, ends[:, None] - np.arange(8, 0, -1)], axis=2, bitorder="little"
        )
        levels = kv.trellis_table(codec.bits).levels[windows[..., 0]]
        x = levels.reshape(encoded.shape) * np.abs(scale)[..., None]
    else:
        x = kv.codebook(n, codec.bits).levels[codes] * np.abs(scale)[..., None]
    if codec.rotation != "none":
        x = x @ kv.hadamard_matrix(n).astype(np.float64)
    if codec.rotation == "srht":
        hashes = [splitmix64((codec.seed + i) % 2**64) for i in range(n)]
        x = x * [-1 if h >> 63 else 1 for h in hashes]
    if encoded.weights is not None:
        x = x / encoded.weights[:, :, None, :]
    return x + centers(encoded)


def centers(encoded):
    """What each token was centered by, in float64; zeros for one with a negative scale."""
    if encoded.center_levels is None:
        return 0
    center = encoded.center_levels * stored(encoded.center_scale)[..., None]
    center = spread(center, encoded.codec.block, 2, encoded.tokens)
    return np.where(np.signbit(stored(encoded.scale))[..., None], 0, center)


def assert_decodes_slowly(encoded):
    decoded, slow = encoded.codec.decode(encoded), slow_decode(encoded)
    assert (decoded.shape, decoded.dtype) == (encoded.shape, np.float32)
    assert (np.abs(decoded - slow) <= 2e-5 * np.abs(slow).max(initial=0)).all()


# The layout


@given(data=st.data(), head_dim=st.sampled_from((7, 16, 40, 64)))
def test_decode_follows_the_definition(data, head_dim):
    codec = data.draw(codecs(head_dim=head_dim))
    x = data.draw(
        kv_arrays(tokens=(0, 1, 17, 65), head_dim=[head_dim], kinds=ORDINARY_KINDS, heads=[1, 2])
    )
    assert_decodes_slowly(encode(codec, x))


@every_preset_side
def test_presets_decode_as_defined(name, side):
    codec = kv.codec(name).for_side(side)
    assert_decodes_slowly(encode(codec, random((1, 2, 65, 64))))


@given(data=st.data(), tokens=st.sampled_from(TILE_SIZES), head_dim=st.sampled_from((7, 16, 64)))
def test_encoded_has_the_stated_arrays(data, tokens, head_dim):
    codec = data.draw(codecs(head_dim=head_dim))
    x = random((2, 3, tokens, head_dim))
    encoded = encode(codec, x)
    blocks = -(-tokens // codec.block)
    stored_type = np.uint16 if codec.scale_dtype == "bfloat16" else np.float32
    shape = (2, 3, tokens)
    if codec.code == "asymmetric":
        groups = -(-(tokens if codec.side == "key" else head_dim) // codec.group_size)
        shape = (2, 3, groups, head_dim) if codec.side == "key" else (2, 3, tokens, groups)
    expected = {
        "packed": ((2, 3, tokens, packed_bytes(head_dim, codec.bits, codec.layout)), np.uint8),
        "scale": (shape, stored_type),
        "zero_point": (shape, stored_type) if codec.code == "asymmetric" else None,
        "center_levels": ((2, 3, blocks, head_dim), np.int8) if codec.center else None,
        "center_scale": ((2, 3, blocks), stored_type) if codec.center else None,
        "weights": ((2, 3, head_dim), np.float32) if codec.equalize else None,
    }
    given = {name: getattr(encoded, name) for name in expected}
    described = {k: None if x is None else (x.shape, x.dtype) for k, x in given.items()}
    assert described == expected
    assert encoded.nbytes == sum(x.nbytes for x in given.values() if x is not None)
    assert (encoded.shape, encoded.tokens) == (x.shape, tokens)


# Rates


@given(codec=codecs(head_dim=64))
def test_bits_per_value_are_the_bytes_of_a_long_cache(codec):
    tokens = 2 * codec.block * (codec.group_size or 1)
    encoded = encode(codec, random((1, 1, tokens, 64)))
    once = 0 if encoded.weights is None else encoded.weights.nbytes
    assert codec.bits_per_value(64) == pytest.approx(8 * (encoded.nbytes - once) / (tokens * 64))


@pytest.mark.parametrize(
    ("codec", "side", "rate"),
    [
        (kv.codec("int8"), "value", 8 + 16 / 128),
        (kv.codec("int4"), "value", 4 + 16 / 128),
        (kv.codec("int4"), "key", 4 + 16 / 128 + (8 + 16 / 128) / 64),
        (kv.codec("int4", center=False), "key", 4 + 16 / 128),
        (kv.codec("int3", layout="padded"), "value", 4 + 16 / 128),
        (kv.codec("lm2", scale_dtype="float32"), "value", 2 + 32 / 128),
        (kv.codec("kivi2"), "key", 3.0),
        (kv.codec("kivi2"), "value", 3.0),
        (kv.codec("kivi2", group_size=128), "key", 2.25),
        (kv.codec("kivi4", group_size=100), "value", 4 + 2 * 2 * 16 / 128),
    ],
    ids=str,
)
def test_rates_count_all_metadata(codec, side, rate):
    assert codec.bits_per_value(128, side) == rate


# Independence


@every_preset_side
def test_blocks_are_encoded_apart(name, side):
    codec = kv.codec(name).for_side(side)
    x = random((1, 2, 3 * codec.block + 5, 64))
    whole = encode(codec, x)
    given = {"weights": whole.weights} if codec.equalize else {}
    for start in range(0, x.shape[2], codec.block):
        part = codec.encode(x[:, :, start : start + codec.block], **given)
        by_token = codec.code == "asymmetric" and side == "key"
        firsts = {
            "packed": start,
            "scale": start // codec.group_size if by_token else start,
            "zero_point": start // codec.group_size if by_token else start,
            "center_levels": start // codec.block,
            "center_scale": start // codec.block,
        }
        for name, first in firsts.items():
            expected = getattr(whole, name)
            if expected is not None:
                expected = expected[:, :, first : first + getattr(part, name).shape[2]]
            assert_same_bits(getattr(part, name), expected, name)


@every_preset_side
def test_batch_rows_and_heads_are_encoded_apart(name, side):
    codec = kv.codec(name).for_side(side)
    x, q = random((2, 3, 70, 64)), random((2, 6, 5, 64), seed=1)
    whole = codec.decode(encode(codec, x, q))
    for row, head in product(range(2), range(3)):
        alone = x[row : row + 1, head : head + 1]
        asked = q[row : row + 1, 2 * head : 2 * head + 2]
        part = codec.decode(encode(codec, alone, asked))
        assert_same_bits(part[0, 0], whole[row, head])


# Errors of the codes


@every_preset_side
def test_error_is_the_widths(name, side):
    codec = kv.codec(name).for_side(side)
    allowed = {8: 0.01, 4: 0.14, 3: 0.32, 2: 0.9}[codec.bits]
    x = random((1, 2, 128, 64))
    assert relative_error(codec.decode(encode(codec, x)), x) < allowed


@pytest.mark.parametrize(
    ("name", "published"), [("lm2", 0.1175), ("lm3", 0.03454), ("lm4", 0.009497)]
)
def test_lloyd_max_codes_reach_the_published_distortion(name, published):
    x = random((1, 4, 128, 512))
    codec = kv.codec(name, side="value", scale_rule="norm")
    assert relative_error(codec.decode(codec.encode(x)), x) ** 2 == pytest.approx(
        published, rel=0.02
    )


@every_preset_side
def test_zeros_are_exact(name, side):
    codec = kv.codec(name).for_side(side)
    x = np.zeros((1, 1, 70, 64), np.float32)
    assert not codec.decode(encode(codec, x)).any()


@pytest.mark.parametrize("value", [1.0, -0.375, 96.0, 1.5e-5])
@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("name", ["kivi2", "kivi4"])
def test_constant_groups_are_exact(name, side, value):
    codec = kv.codec(name, side=side)
    x = np.full((1, 1, 70, 64), np.float16(value), np.float32)
    np.testing.assert_array_equal(codec.decode(codec.encode(x)), x)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-20, 1.0, 1e20, 1e29])
@every_preset_side
def test_error_does_not_depend_on_the_magnitude(name, side, magnitude):
    codec = kv.codec(name).for_side(side)
    x = random((1, 1, 70, 64))
    plain = relative_error(codec.decode(encode(codec, x)), x)
    scaled = codec.decode(encode(codec, x * np.float32(magnitude))) / np.float64(magnitude)
    assert relative_error(scaled, x) < 1.05 * plain


@given(data=st.data(), kind=st.sampled_from(("huge", "tiny", "mixed_magnitudes")))
def test_extreme_magnitudes_stay_finite(data, kind):
    x = data.draw(arrays((1, 2, 70, 64), [kind]))
    decoded = (codec := data.draw(codecs())).decode(encode(codec, x)).astype(np.float64)
    assert np.linalg.norm(decoded) <= 70 * np.linalg.norm(x.astype(np.float64))


@pytest.mark.parametrize("rotation", ["none", "hadamard", "srht"])
def test_largest_weights_times_largest_keys_stay_finite(rotation):
    codec = kv.codec("int4", side="key", center=False, rotation=rotation)
    x = np.full((1, 1, 3, 512), 1.2e30, np.float32)
    weights = np.full((1, 1, 512), 2.0**10, np.float32)
    assert relative_error(codec.decode(codec.encode(x, weights=weights)), x) < 0.2


# Centering


def with_offsets(shape, seed=0):
    """Keys of which two channels have means of 20 and -12 standard deviations."""
    x = random(shape, seed)
    x[..., 3] += 20
    x[..., 17] -= 12
    return x


def test_queries_meet_the_key_and_its_center_apart():
    codec = kv.codec("int4", side="key", equalize=False)
    k, q = with_offsets((1, 2, 130, 64)), random((1, 2, 5, 64), seed=1)
    encoded = codec.encode(k)
    center = centers(encoded)
    left = kv.codec("int4", side="key", center=False, equalize=False)
    around = kv.scores(q, left.encode((k - center).astype(np.float32)), query_bits=None)
    offset = np.einsum("bhqd,bhtd->bhqt", q, center) / 8
    np.testing.assert_allclose(kv.scores(q, encoded, query_bits=None), around + offset, atol=1e-4)


def test_center_is_the_mean_of_the_block():
    codec = kv.codec("int4", side="key", equalize=False)
    k = with_offsets((1, 1, 130, 64))
    encoded = codec.encode(k)
    center = encoded.center_levels * stored(encoded.center_scale)[..., None]
    for block in range(3):
        mean = k[0, 0, 64 * block : 64 * (block + 1)].mean(axis=0, dtype=np.float64)
        step = np.abs(mean).max() / 127 * 1.01
        assert (np.abs(center[0, 0, block] - mean) <= step / 2).all()


@pytest.mark.parametrize("name", ["int4", "int2", "lm4", "lm2"])
def test_a_token_is_centered_unless_that_makes_it_longer(name):
    codec = kv.codec(name, side="key", equalize=False)
    k = with_offsets((1, 2, 130, 64))
    k[:, :, ::7] *= 0.01
    encoded = codec.encode(k)
    center = encoded.center_levels * stored(encoded.center_scale)[..., None]
    shifted = k - spread(center, codec.block, 2, 130)
    longer = np.linalg.norm(shifted, axis=-1) > np.linalg.norm(k.astype(np.float64), axis=-1)
    assert longer.any()
    assert (np.signbit(stored(encoded.scale)) == longer).all()
    short, decoded = k[:, :, ::7], codec.decode(encoded)[:, :, ::7]
    assert relative_error(decoded, short) < {4: 0.3, 2: 1.1}[codec.bits]


@pytest.mark.parametrize("name", ["int4", "int3", "lm4", "lm3", "lm2"])
def test_centering_keeps_what_offsets_would_drown(name):
    k = with_offsets((1, 2, 128, 64))
    errors = {}
    for center in (True, False):
        codec = kv.codec(name, side="key", center=center, equalize=False)
        errors[center] = relative_error(codec.decode(codec.encode(k)), k)
    assert errors[True] < 0.6 * errors[False]


# Equalizing


def uneven(seed=0):
    """Keys and queries whose channels are scaled unevenly, against each other."""
    gain = np.exp(np.random.default_rng(seed).normal(0, 1.2, 64)).astype(np.float32)
    return random((1, 2, 64, 64), 1) * gain, random((1, 4, 64, 64), 2) / gain


def test_weights_are_halfway_to_the_balanced_ones():
    k, q = uneven()
    codec = kv.codec("int4", side="key", center=False)
    weights = codec.encode(k, queries=q).weights.astype(np.float64)
    energy_q = (q.astype(np.float64) ** 2).reshape(1, 2, 128, 64).sum(axis=2)
    energy_k = (k.astype(np.float64) ** 2).sum(axis=2)
    expected = (energy_q / energy_k) ** 0.125
    expected /= np.exp(np.log(expected).mean(axis=-1, keepdims=True))
    np.testing.assert_allclose(weights, expected, rtol=2**-8)
    assert_same_bits(weights, weights.astype(ml_dtypes.bfloat16).astype(np.float64))


def test_weights_are_fixed_by_the_first_block():
    k, q = uneven()
    codec = kv.codec("int4", side="key")
    longer = np.concatenate([k, 100 * random((1, 2, 50, 64), 5)], axis=2)
    first = codec.encode(k, queries=q).weights
    assert_same_bits(codec.encode(longer, queries=q).weights, first)


def test_equalizing_leaves_the_products_as_they_are():
    k, q = uneven()
    codec = kv.codec("int8", side="key", center=False, equalize=True)
    weights = codec.encode(k, queries=q).weights[:, :, None, :]
    exact = np.einsum("bhqd,bhtd->bhqt", q[:, ::2].astype(np.float64), k)
    weighted = np.einsum("bhqd,bhtd->bhqt", q[:, ::2] / np.float64(weights), weights * k)
    np.testing.assert_allclose(weighted, exact, atol=1e-4)
    grouped = np.abs(kv.scores(q, codec.encode(k, queries=q)) - kv.scores(q, k))
    assert grouped.max() < 0.05 * np.abs(kv.scores(q, k)).max()


@pytest.mark.parametrize("name", ["int4", "int3", "int2", "lm4", "lm3", "lm2"])
def test_equalizing_lowers_the_error_of_scores_on_uneven_channels(name):
    k, q = uneven()
    exact = kv.scores(q, k)
    errors = {}
    for equalize in (True, False):
        codec = kv.codec(name, side="key", equalize=equalize)
        errors[equalize] = relative_error(kv.scores(q, encode(codec, k, q)), exact)
    assert errors[True] < 0.8 * errors[False]


def test_silent_sides_give_weights_of_one():
    k, q = uneven()
    codec = kv.codec("int4", side="key")
    for keys, queries in ((k, 0 * q), (0 * k, q)):
        weights = codec.encode(keys, queries=queries).weights
        assert_same_bits(weights, np.ones((1, 2, 64), np.float32))


def test_no_keys_give_no_weights_yet():
    k, q = uneven()
    assert kv.codec("int4", side="key").encode(k[:, :, :0], queries=q).weights is None


def test_given_weights_are_used_as_they_are():
    k, q = uneven()
    codec = kv.codec("int4", side="key")
    first = codec.encode(k, queries=q)
    assert_same_bits(codec.encode(k, weights=first.weights), first)


# Rotation


@pytest.mark.parametrize("rotation", ["hadamard", "srht"])
def test_rotation_spreads_an_outlier_over_all_channels(rotation):
    x = random((1, 1, 128, 64))
    x[..., 5] *= 30
    errors = []
    for kind in (rotation, "none"):
        codec = kv.codec("int4", rotation=kind, side="value")
        errors.append(relative_error(codec.decode(codec.encode(x))[..., 6:], x[..., 6:]))
    assert errors[0] < 0.7 * errors[1]


def test_seed_of_srht_is_part_of_the_code():
    x = random((1, 1, 64, 64))
    packed = [kv.codec("lm4", seed=seed, side="value").encode(x).packed for seed in (0, 0, 1)]
    assert_same_bits(packed[0], packed[1])
    assert (packed[0] != packed[2]).any()


# Presets and configurations


@every_preset
def test_low_bit_keys_center_and_equalize_by_default(name):
    key, value = kv.codec(name).for_side("key"), kv.codec(name).for_side("value")
    low = name not in ("int8", "kivi4", "kivi2")
    assert (key.center, key.equalize) == (low, low)
    assert (value.center, value.equalize) == (False, False)


def test_rotation_is_the_default_below_8_bits_only():
    rotations = {name: kv.codec(name).rotation for name in kv.PRESETS}
    assert rotations["int8"] == rotations["kivi4"] == rotations["kivi2"] == "none"
    assert {rotations[name] for name in ("int4", "int3", "int2")} == {"hadamard"}
    assert {rotations[name] for name in ("lm4", "lm3", "lm2", "tcq4", "tcq3", "tcq2")} == {"srht"}


def test_without_queries_an_open_codec_does_not_equalize():
    encoded = kv.codec("int4").encode(random((1, 1, 64, 64)), side="key")
    assert encoded.codec.center
    assert not encoded.codec.equalize
    assert encoded.weights is None


@given(codec=codecs())
def test_config_survives_json(codec):
    assert kv.Codec.from_config(json.loads(json.dumps(codec.to_config()))) == codec


@every_preset
def test_preset_config_survives_json(name):
    codec = kv.codec(name)
    assert kv.Codec.from_config(json.loads(json.dumps(codec.to_config()))) == codec


@given(codec=codecs())
def test_repr_makes_the_codec_again(codec):
    assert eval(repr(codec), {"codec": kv.codec}) == codec


def test_decode_takes_what_the_open_codec_encoded():
    codec = kv.codec("int4")
    x = random((1, 2, 64, 64))
    for encoded in (
        codec.encode(x, side="key"),
        codec.encode(x, side="key", queries=x),
        codec.encode(x, side="value"),
    ):
        assert relative_error(codec.decode(encoded), x) < 0.14


def test_packed_attention_is_close_to_exact_for_every_preset():
    q, k, v = random((3, 1, 2, 128, 64))
    exact, _ = exact_attention(q, k, v)
    for name in kv.PRESETS:
        key, value = kv.codec(name).for_side("key"), kv.codec(name).for_side("value")
        output = kv.attention(q, encode(key, k, q), encode(value, v))
        allowed = {8: 0.02, 4: 0.3, 3: 0.6, 2: 1.5}[key.bits]
        assert relative_error(output, exact) < allowed
