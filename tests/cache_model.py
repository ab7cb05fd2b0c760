"""A model of KVCache made of plain arrays of all tokens and of codes made once, block by block.

It shares no code with the cache: a row of the batch keeps every token that ever came, in order,
and a record of every block that was packed, and works out what each query sees from the rules.
"""

import json
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import safetensors.numpy

from kvcodec import reference
from kvcodec._arena import CACHE_LINE, HUGE_PAGE, LARGE, chunk_bytes
from kvcodec.encoded import ARRAYS, Encoded
from kvcodec.testing import exact_attention

STORED = tuple(name for name in ARRAYS if name != "weights")


@dataclass(frozen=True)
class Rules:
    """What all rows of a layer have in common; codecs are settled for their side, or None."""

    heads: int
    key_dim: int
    value_dim: int
    key: object
    value: object
    sinks: int = 4
    recent: int = 64
    block: int = 64
    rollback: int = 0
    window: int | None = None
    exact_dtype: str = "float32"


@dataclass(frozen=True)
class Block:
    """Tokens that were packed together, of which the first `count` remain."""

    first: int
    count: int
    packed: tuple
    decoded: tuple
    unpackable: bool = True

    @property
    def end(self):
        """Number of the token after the last."""
        return self.first + self.count


class Row:
    """One sequence of one layer. Tokens are numbered as they come."""

    def __init__(self, rules):
        self.rules = rules
        self.k = np.zeros((1, rules.heads, 0, rules.key_dim), np.float32)
        self.v = np.zeros((1, rules.heads, 0, rules.value_dim), np.float32)
        self.queries = {}
        self.blocks = []
        self.weights = None
        self.evicted = 0
        self.gone = rules.sinks

    @property
    def end(self):
        """Number of the next token."""
        return self.k.shape[2]

    @property
    def length(self):
        """Tokens that were not evicted."""
        return self.end - self.evicted

    @property
    def packed_end(self):
        """Number of the first token after the sinks that is not packed."""
        return self.blocks[-1].end if self.blocks else self.rules.sinks

    @property
    def exact_from(self):
        """Number of the first token after the sinks whose floats are still there."""
        return next((block.first for block in self.blocks if block.unpackable), self.packed_end)

    def copy(self):
        """Another row with the same tokens."""
        twin = Row(self.rules)
        twin.__dict__.update(self.__dict__)
        twin.queries, twin.blocks = dict(self.queries), list(self.blocks)
        return twin

    def append(self, k, v, q=None):
        """Add tokens, pack the blocks that have left the window, forget what no crop asks for."""
        rules = self.rules
        if q is not None and not self.blocks:
            early = range(self.end, min(self.end + q.shape[2], rules.sinks + rules.block))
            self.queries |= {token: q[:, :, token - self.end] for token in early}
        if rules.exact_dtype == "bfloat16":
            k, v = (x.astype(ml_dtypes.bfloat16).astype(np.float32) for x in (k, v))
        self.k = np.concatenate([self.k, k], axis=2)
        self.v = np.concatenate([self.v, v], axis=2)
        while self.packed_end + rules.block + rules.recent <= self.end:
            self.blocks.append(self._pack(self.packed_end))
        self._forget()

    def _pack(self, first):
        rules = self.rules
        members = slice(first, first + rules.block)
        key, weights = rules.key, {}
        if key is not None and key.equalize:
            if self.blocks:
                weights = {} if self.weights is None else {"weights": self.weights}
            elif self.queries:
                weights = {"queries": np.stack([*self.queries.values()], axis=2)}
            key = replace(key, equalize=bool(weights))
        keys, values = (
            x if codec is None else codec.encode(x, **options)
            for x, codec, options in (
                (self.k[:, :, members], key, weights),
                (self.v[:, :, members], rules.value, {}),
            )
        )
        if weights:
            self.weights = keys.weights
        decoded = tuple(x.codec.decode(x) if isinstance(x, Encoded) else x for x in (keys, values))
        return Block(first, rules.block, (keys, values), decoded)

    def _forget(self):
        rules = self.rules
        for index, block in enumerate(self.blocks):
            if block.unpackable and block.end + rules.recent <= self.end - rules.rollback:
                self.blocks[index] = replace(block, unpackable=False)
        if self.blocks and not self.blocks[0].unpackable:
            self.queries.clear()
        self.gone = max(self.gone, rules.sinks + self.evicted)
        if rules.window is not None:
            self.gone = max(self.gone, self.end - rules.window - rules.rollback)

    def number_of(self, length):
        """Number after the last token if `length` tokens are kept."""
        return length if length <= self.rules.sinks else length + self.evicted

    def newest(self, count):
        """Numbers of the newest tokens that were not evicted."""
        kept = [*range(self.rules.sinks), *range(self.rules.sinks + self.evicted, self.end)]
        return np.array(kept[: self.length][self.length - count :], dtype=np.int64)

    def holds_what_was_seen(self, count):
        """Whether a ring still holds what the newest tokens saw after the sinks."""
        rules = self.rules
        body = [int(number) for number in self.newest(count) if number >= rules.sinks]
        if rules.window is None or not body:
            return True
        return max(body[0] + 1 - rules.window, rules.sinks + self.evicted) >= self.gone

    def can_crop(self, length):
        """Whether a ring still holds what the next query would see after a crop."""
        rules, number = self.rules, self.number_of(length)
        if length >= self.length or rules.window is None or number <= rules.sinks:
            return True
        return max(number + 1 - rules.window, rules.sinks + self.evicted) >= self.gone

    def crop(self, length):
        """Unpack the newest blocks where that is possible, then cut."""
        if length >= self.length:
            return
        number, recent = self.number_of(length), self.rules.recent
        while self.blocks and self.blocks[-1].unpackable and self.packed_end + recent > number:
            self.blocks.pop()
        self.blocks = [
            replace(block, count=min(block.count, number - block.first))
            for block in self.blocks
            if block.first < number
        ]
        self.k, self.v = self.k[:, :, :number], self.v[:, :, :number]
        self.queries = {token: q for token, q in self.queries.items() if token < number}
        if number <= self.rules.sinks:
            self.evicted, self.gone = 0, self.rules.sinks
        if not self.blocks:
            self.weights = None

    def evict(self, tokens):
        """Hide the oldest tokens after the sinks."""
        self.evicted += tokens
        self._forget()

    def seen(self, packed_end):
        """All keys and values, with codes for the tokens from the sinks to this number."""
        body = slice(self.rules.sinks, packed_end)
        whole = []
        for side, x in enumerate((self.k, self.v)):
            codes = [block.decoded[side][:, :, : block.count] for block in self.blocks]
            if codes:
                x = x.copy()
                x[:, :, body] = np.concatenate(codes, axis=2)[:, :, : body.stop - body.start]
            whole.append(x)
        return whole

    def visible(self, positions, causal, window):
        """Which tokens each query sees, bool (queries, tokens)."""
        rules, token = self.rules, np.arange(self.end)
        own = positions[:, None]
        body = token >= rules.sinks + self.evicted
        if rules.window is not None:
            body = body & (token > own - rules.window)
        seen = np.broadcast_to((token < rules.sinks) | body, (len(positions), self.end))
        if causal:
            seen = seen & (token <= own)
        return seen if window is None else seen & (token > own - window)

    def attend(self, q, packed, *, causal=True, window=None, **options):
        """Attention of the newest tokens' queries in float64.

        ``packed(block, position)`` tells whether the query at a position sees the block's codes.
        """
        positions, first = self.newest(q.shape[2]), self.rules.sinks
        visible = self.visible(positions, causal, window)
        output = np.zeros((*q.shape[:3], self.rules.value_dim))
        log_sum_exp = np.zeros(q.shape[:3])
        ends = [
            max((block.end for block in self.blocks if packed(block, position)), default=first)
            for position in positions
        ]
        for end in set(ends):
            asked = np.equal(ends, end)
            output[:, :, asked], log_sum_exp[:, :, asked] = exact_attention(
                q[:, :, asked],
                *self.seen(end),
                visible=visible[asked][None],
                **options,
            )
        return output, log_sum_exp

    def decoded(self):
        """Keys and values that the next query would see."""
        rules = self.rules
        first = rules.sinks + self.evicted
        if rules.window is not None:
            first = max(first, self.end + 1 - rules.window)
        token = np.arange(self.end)
        kept = (token < rules.sinks) | (token >= first)
        return tuple(x[0][:, kept] for x in self.seen(self.packed_end))

    def contents(self, first):
        """What the cache must hold, of the packed body the tokens from number `first` on."""
        sinks, exact = slice(0, min(self.rules.sinks, self.end)), slice(self.exact_from, self.end)
        held = {
            "numbers": (self.end, self.length, self.packed_end, self.exact_from),
            "sinks": (self.k[:, :, sinks], self.v[:, :, sinks]),
            "tail": (self.k[:, :, exact], self.v[:, :, exact]),
            "weights": self.weights,
        }
        blocks = [block for block in self.blocks if block.first >= first]
        for side, name in enumerate(("keys", "values")):
            held[name] = {}
            for part in STORED if blocks else ():
                pieces = [_remaining(block, side, part) for block in blocks]
                if pieces[0] is not None:
                    held[name][part] = np.concatenate(pieces, axis=2)
        return held


def _remaining(block, side, part):
    """One array of what remains of a packed block."""
    packed = block.packed[side]
    if isinstance(packed, np.ndarray):
        return packed[:, :, : block.count] if part == "packed" else None
    array = getattr(packed, part)
    if array is None:
        return None
    entries = -(-block.count * array.shape[2] // packed.tokens)
    return array[:, :, :entries]


class Model:
    """All rows of all layers, and the verbs of KVCache."""

    def __init__(self, layers, batch):
        self.layers = layers
        self.rows = [[Row(rules) for _ in range(batch)] for rules in layers]

    @property
    def batch(self):
        """Rows of the batch."""
        return len(self.rows[0])

    @property
    def lengths(self):
        """Tokens of each row in each layer."""
        return np.array([[row.length for row in rows] for rows in self.rows])

    def append(self, layer, k, v, lengths):
        """As KVCache.append."""
        for index, row in enumerate(self.rows[layer]):
            row.append(*newest(lengths[index], index, k, v))

    def can_attend(self, layer, lengths):
        """Whether the layer holds what so many queries of each row need."""
        return all(
            count <= row.length and row.holds_what_was_seen(count)
            for row, count in zip(self.rows[layer], lengths, strict=True)
        )

    def attend(self, layer, q, lengths, **options):
        """As KVCache.attend, in float64; output and log-sum-exp."""
        results = [
            row.attend(*newest(lengths[index], index, q), lambda block, own: True, **options)
            for index, row in enumerate(self.rows[layer])
        ]
        return padded(results, q.shape[2])

    def append_attend(self, layer, q, k, v, lengths, exact_prefill=False, **options):
        """As KVCache.append_attend, in float64; output and log-sum-exp."""
        results = []
        for index, row in enumerate(self.rows[layer]):
            query, *new = newest(lengths[index], index, q, k, v)
            end, packed_end, recent = row.end, row.packed_end, row.rules.recent
            row.append(*new, query)

            def packed(block, own, end=end, packed_end=packed_end, recent=recent):
                if block.end <= packed_end:
                    return True
                return block.end + recent <= own + 1 and not (exact_prefill and block.end > end)

            results.append(row.attend(query, packed, **options))
        return padded(results, q.shape[2])

    def kept(self, lengths):
        """Each row of all layers with how much of it a crop to these lengths keeps."""
        for rows in self.rows:
            for row, length in zip(rows, lengths, strict=True):
                yield row, row.length + length if length < 0 else length

    def can_crop(self, lengths):
        """Whether every row can be cropped to its length."""
        return all(length >= 0 and row.can_crop(length) for row, length in self.kept(lengths))

    def crop(self, lengths):
        """As KVCache.crop."""
        for row, length in self.kept(lengths):
            row.crop(length)

    def most_to_evict(self):
        """Tokens after the sinks of each row of the batch, in all layers."""
        after_sinks = [[max(row.length - row.rules.sinks, 0) for row in rows] for rows in self.rows]
        return np.min(after_sinks, axis=0).tolist()

    def evict(self, tokens):
        """As KVCache.evict, a number for each row of the batch."""
        for rows in self.rows:
            for row, count in zip(rows, tokens, strict=True):
                row.evict(count)

    def take(self, indices):
        """As KVCache.reorder and select."""
        self.rows = [[rows[index].copy() for index in indices] for rows in self.rows]

    def reset(self):
        """As KVCache.reset."""
        self.rows = [[Row(row.rules) for row in rows] for rows in self.rows]

    def copy(self):
        """As KVCache.copy."""
        twin = Model(self.layers, self.batch)
        twin.rows = [[row.copy() for row in rows] for rows in self.rows]
        return twin


def newest(count, index, *arrays):
    """The last `count` tokens of one row of each array."""
    return [x[index : index + 1, :, x.shape[2] - count :] for x in arrays]


def padded(results, q_len):
    """Rows of different lengths as one batch, padded on the left with nothing seen."""
    outputs, log_sum_exps = [], []
    for output, log_sum_exp in results:
        left = (q_len - output.shape[2], 0)
        outputs.append(np.pad(output, ((0, 0), (0, 0), left, (0, 0))))
        log_sum_exps.append(np.pad(log_sum_exp, ((0, 0), (0, 0), left), constant_values=-np.inf))
    return np.concatenate(outputs), np.concatenate(log_sum_exps)


def contents(row):
    """What a row of a KVCache holds, in the terms of `Row.contents`."""
    held = {
        "numbers": (row.end, row.length, row.packed_end, row.tail.first),
        "sinks": tuple(map(as_floats, row.sinks.take(0, row.sinks.end))),
        "tail": tuple(map(as_floats, row.tail.take(row.tail.first, row.tail.end))),
        "weights": row.keys.weights,
    }
    for name, blocks in (("keys", row.keys), ("values", row.values)):
        units = [unit for _, unit in blocks.unpacked(reference)]
        held[name] = {}
        for part in STORED if units else ():
            pieces = [
                as_floats(unit) if part == "packed" else None
                for unit in units
                if isinstance(unit, np.ndarray)
            ] or [getattr(unit, part) for unit in units]
            if pieces[0] is not None:
                held[name][part] = np.concatenate(pieces, axis=2)
    return held


def as_floats(x):
    """Exact tokens as they are kept, as float32."""
    return x if x.dtype == np.float32 else x.view(ml_dtypes.bfloat16).astype(np.float32)


def first_held(row):
    """Number of the first token of the packed body that a row of a KVCache still holds."""
    return next((number for number, _ in row.keys.unpacked(reference)), row.packed_end)


def buffers(thing):
    """Every array that an object of this package keeps, itself or in its parts."""
    if isinstance(thing, np.ndarray):
        owner = thing if thing.base is None else thing.base
        assert owner.nbytes <= thing.nbytes + CACHE_LINE, "a view keeps more alive than it counts"
        yield thing
    elif isinstance(thing, dict) and {"packed", "exact"} & thing.keys():
        # A page: its arrays lie side by side in one piece of memory, or in a chunk of many pages.
        size = sum(array.nbytes for array in thing.values())
        owners = [array if array.base is None else array.base for array in thing.values()]
        kept = sum({id(owner): owner.nbytes for owner in owners}.values())
        assert kept <= max(size + CACHE_LINE * (len(thing) + 1), chunk_bytes(LARGE) + HUGE_PAGE)
        yield from thing.values()
    elif isinstance(thing, dict):
        for part in thing.values():
            yield from buffers(part)
    elif isinstance(thing, (list, tuple)):
        for part in thing:
            yield from buffers(part)
    elif type(thing).__module__.startswith("kvcodec") and hasattr(thing, "__dict__"):
        yield from buffers(vars(thing))


def read_file(path):
    """The metadata and the arrays of a safetensors file, sorted by name."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    parts = json.loads(data[8 : 8 + size])["__metadata__"], safetensors.numpy.load(data)
    return tuple(dict(sorted(part.items())) for part in parts)
