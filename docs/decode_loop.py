"""A decode loop over a KVCache: save a prompt's cache, branch two continuations from it."""

import tempfile

import numpy as np

import kvcodec as kv

HEADS, KV_HEADS, HEAD_DIM, WIDTH, VOCABULARY = 4, 2, 32, 128, 50
rng = np.random.default_rng(0)
embedding, to_logits = rng.standard_normal((2, VOCABULARY, WIDTH))
to_q, to_out = rng.standard_normal((2, WIDTH, HEADS * HEAD_DIM)) / WIDTH**0.5
to_k, to_v = rng.standard_normal((2, WIDTH, KV_HEADS * HEAD_DIM)) / WIDTH**0.5


def by_head(x: np.ndarray) -> np.ndarray:
    """(tokens, heads * head_dim) to (1, heads, tokens, head_dim)."""
    return x.reshape(1, len(x), -1, HEAD_DIM).swapaxes(1, 2)


def next_token(tokens: list[int], cache: kv.KVCache) -> int:
    """Run the tokens through a model of one attention layer; the likeliest token after them."""
    x = embedding[tokens]
    attended = cache.append_attend(0, by_head(x @ to_q), by_head(x @ to_k), by_head(x @ to_v))
    x = x + attended[0].swapaxes(0, 1).reshape(len(x), -1) @ to_out.T
    return int(np.argmax(to_logits @ x[-1]))


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
    cache.save(f"{folder}/prompt.safetensors")
    loaded = kv.KVCache.load(f"{folder}/prompt.safetensors")
branch = cache.copy()  # shares the packed prompt
greedy, again = generate(first, 10, cache), generate(first, 10, loaded)
other = generate((first + 1) % VOCABULARY, 10, branch)
print(cache, f"continues with {greedy}; loaded, with {again}; branched, with {other}", sep="\n")
