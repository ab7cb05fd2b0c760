"""A decode loop over a KVCache: save a prompt's cache, branch two continuations from it."""

import tempfile
from pathlib import Path

import numpy as np

import kvcodec as kv

HEADS, KV_HEADS, HEAD_DIM, WIDTH, VOCABULARY = 4, 2, 32, 128, 50
rng = np.random.default_rng(0)
embedding, to_logits = rng.standard_normal((2, VOCABULARY, WIDTH))
to_q = rng.standard_normal((WIDTH, HEADS * HEAD_DIM)) / WIDTH**0.5
to_k, to_v = rng.standard_normal((2, WIDTH, KV_HEADS * HEAD_DIM)) / WIDTH**0.5
to_out = rng.standard_normal((HEADS * HEAD_DIM, WIDTH)) / WIDTH**0.5


def split_heads(x: np.ndarray, heads: int) -> np.ndarray:
    """(tokens, heads * head_dim) to (1, heads, tokens, head_dim)."""
    return x.reshape(1, len(x), heads, HEAD_DIM).swapaxes(1, 2)


def next_token(tokens: list[int], cache: kv.KVCache) -> int:
    """Run the tokens through a model of one attention layer; the likeliest token after them."""
    x = embedding[tokens]
    q, k, v = (
        split_heads(x @ w, n) for w, n in ((to_q, HEADS), (to_k, KV_HEADS), (to_v, KV_HEADS))
    )
    attended = cache.append_attend(0, q, k, v)[0].swapaxes(0, 1).reshape(len(x), -1)
    return int(np.argmax(to_logits @ (x + attended @ to_out)[-1]))


def generate(token: int, count: int, cache: kv.KVCache) -> list[int]:
    """Continue greedily, one token at a time."""
    tokens = [token]
    while len(tokens) < count:
        tokens.append(next_token(tokens[-1:], cache))
    return tokens


prompt = rng.integers(0, VOCABULARY, 300).tolist()
cache = kv.KVCache(1, KV_HEADS, HEAD_DIM, key="int4", value="int4")
first = next_token(prompt, cache)

with tempfile.TemporaryDirectory() as folder:
    cache.save(Path(folder) / "prompt.safetensors")
    loaded = kv.KVCache.load(Path(folder) / "prompt.safetensors")

branch = cache.copy()  # shares the packed prompt
greedy = generate(first, 10, cache)
other = generate((first + 1) % VOCABULARY, 10, branch)
assert generate(first, 10, loaded) == greedy
print(cache)
print("continuation:", greedy)
print("another one: ", other)
