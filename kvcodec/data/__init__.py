"""A small sample of real queries, keys and values, to try codecs on."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Sample", "load_sample"]


# Arrays have no single truth value, so a generated __eq__ would only raise.
@dataclass(frozen=True, eq=False)
class Sample:
    """What the attention of a few layers of a language model was given.

    The leading axis of `q`, `k` and `v` is the layer.  It can stand in for the
    batch axis of any function of this package.

    Attributes
    ----------
    q : ndarray of float32, shape (layers, q_heads, positions, head_dim)
        Queries after the rotary embedding, of the tokens in `positions` only.
        Query head `h` attends to KV head ``h // (q_heads // kv_heads)``.
    k : ndarray of float32, shape (layers, kv_heads, tokens, head_dim)
        Keys after the rotary embedding.
    v : ndarray of float32, shape (layers, kv_heads, tokens, head_dim)
        Values.
    positions : ndarray of int32, shape (positions,)
        The token that each query belongs to.  It attends to the tokens up to
        and including that one.
    layers : ndarray of int32, shape (layers,)
        The number of each layer in the model, counted from 0.
    provenance : dict
        Model, license, text and software behind the sample.

    Examples
    --------
    >>> import kvcodec as kv
    >>> sample = kv.load_sample()
    >>> sample.q.shape, sample.k.shape, sample.layers.tolist()
    ((4, 9, 192, 64), (4, 3, 1024, 64), [0, 10, 20, 29])
    """

    q: NDArray[np.float32] = field(repr=False)
    k: NDArray[np.float32] = field(repr=False)
    v: NDArray[np.float32] = field(repr=False)
    positions: NDArray[np.int32] = field(repr=False)
    layers: NDArray[np.int32]
    provenance: dict[str, Any] = field(repr=False)


def load_sample() -> Sample:
    """Load a sample of real queries, keys and values.

    They come from four of the 30 layers of SmolLM2-135M-Instruct reading 1024
    tokens of Python's documentation: nine query heads, three KV heads and a
    head dimension of 64.  The softmax scale is ``1 / sqrt(64)``.

    Returns
    -------
    Sample
        `q` of shape (4, 9, 192, 64), `k` and `v` of shape (4, 3, 1024, 64),
        `positions` of shape (192,) and `layers` of shape (4,).  The arrays are
        new at each call, so they may be changed.

    Notes
    -----
    The values were stored as float16 and widened to float32 on loading.
    Queries are kept for the first 72 tokens, every eighth one after them, and
    the last.

    References
    ----------
    .. [1] L. Ben Allal et al., "SmolLM2: When Smol Goes Big -- Data-Centric
       Training of a Small Language Model", 2025, arXiv:2502.02737.

    Examples
    --------
    How much of the last query's attention goes to the first token, in the
    first query head of each layer:

    >>> import numpy as np
    >>> from kvcodec.data import load_sample
    >>> sample = load_sample()
    >>> scores = np.einsum("ld,ltd->lt", sample.q[:, 0, -1], sample.k[:, 0]) / 8
    >>> weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    >>> weights /= weights.sum(axis=1, keepdims=True)
    >>> for layer, weight in zip(sample.layers, weights[:, 0], strict=True):
    ...     print(f"layer {layer}: {weight:.2f}")
    layer 0: 0.00
    layer 10: 0.00
    layer 20: 0.26
    layer 29: 0.56
    """
    file = resources.files(__name__) / "sample.npz"
    with file.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
        return Sample(
            q=archive["q"].astype(np.float32),
            k=archive["k"].astype(np.float32),
            v=archive["v"].astype(np.float32),
            positions=archive["positions"],
            layers=archive["layers"],
            provenance=json.loads(archive["provenance"].item()),
        )
