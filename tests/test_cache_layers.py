"""A cache of layers that differ is what caches of one layer each are."""

from itertools import pairwise

import numpy as np
import pytest
from cache_cases import part, sequence

import kvcodec as kv
from kvcodec.testing import assert_same_bits

pytestmark = pytest.mark.usefixtures("twin")
WINDOWS = [None, 20, 40]
OPTIONS = {"recent": 10, "block": 16}


def feed(cache, layer, arrays):
    """Outputs of a prompt, single tokens and a chunk."""
    edges = [0, 50, 51, 52, 90]
    return np.concatenate(
        [cache.append_attend(layer, *part(arrays, start, stop)) for start, stop in pairwise(edges)],
        axis=2,
    )


@pytest.mark.parametrize("max_tokens", [None, 100])
def test_a_window_for_each_layer(max_tokens, tmp_path):
    together = kv.KVCache(3, 2, 32, window=WINDOWS, max_tokens=max_tokens, **OPTIONS)
    assert together.config["window"] == WINDOWS
    arrays = sequence(90)
    for layer, window in enumerate(WINDOWS):
        alone = kv.KVCache(1, 2, 32, window=window, max_tokens=max_tokens, **OPTIONS)
        assert_same_bits(feed(together, layer, arrays), feed(alone, 0, arrays))
        assert_same_bits(together.keys(layer), alone.keys(0))
        parts = (cache.memory()["layers"] for cache in (together, alone))
        assert next(parts)[layer] == next(parts)[0]
    together.save(tmp_path / "cache")
    loaded = kv.KVCache.load(tmp_path / "cache")
    assert loaded.config == together.config
    new = sequence(5, seed=1)
    for layer in range(3):
        assert_same_bits(loaded.append_attend(layer, *new), together.append_attend(layer, *new))
    branch = together.copy()
    branch.crop(94)
    with pytest.raises(ValueError, match="the window of 20 needs"):
        together.crop(50)


def test_a_window_of_all_layers_and_wrong_ones():
    assert kv.KVCache(2, 1, 8, window=7).config["window"] == [7, 7]
    for window, match in (
        ([7], "window must be one number or 2, one for each layer, but 1 were given"),
        ([7, 0], "window must"),
        ([None, 2.5], "window must"),
        ("7", "window must"),
    ):
        with pytest.raises((ValueError, TypeError), match=match):
            kv.KVCache(2, 1, 8, window=window)
