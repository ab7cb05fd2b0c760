"""Random sequences of every verb, on the reference cache, the fast cache and the model at once."""

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from cache_model import Model, Rules, buffers, contents, first_held, read_file
from conftest import relative_error
from hypothesis import Phase, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvcodec as kv
from kvcodec.testing import assert_same_bits, backends

LONG = os.environ.get("KVCODEC_TEST_PROFILE") == "long"
SIZES = (0, 1, 1, 1, 1, 2, 2, 5, 17, 33, 64, 70, 131, 600)
BACKENDS = tuple(dict.fromkeys(backend.backend for backend in backends()))
FLOAT_BOUND = 1e-5
INTEGER_BOUND = 0.05


def settled(draw, name, side, block):
    """A preset for one side, with options that fit the block."""
    if name is None:
        return None
    options = {"block": block}
    if name.startswith("kivi"):
        options["group_size"] = min(block, draw(st.sampled_from((16, 32, 128))))
    elif side == "key":
        options["equalize"] = draw(st.sampled_from((None, None, False, True)))
        options["center"] = draw(st.sampled_from((None, None, False, block > 1)))
    if draw(st.booleans()):
        options["scale_dtype"] = "float32"
    return kv.codec(name, **options).for_side(side)


class CacheMachine(RuleBasedStateMachine):
    """Runs each verb on both caches and the model; `names` are the presets to draw sides from."""

    names = ("int4",)

    @initialize(data=st.data())
    def make(self, data):
        draw = data.draw
        block = draw(st.sampled_from((1, 32, 64, 128)))
        exact = {
            "sinks": draw(st.sampled_from((4, 0))),
            "recent": draw(st.sampled_from((0, 1, 20, 64))),
            "block": block,
            "rollback": draw(st.sampled_from((0, 0, 3, 40, 100))),
            "window": draw(st.sampled_from((None, None, 1, 50, 150))),
            "exact_dtype": draw(st.sampled_from(("float32", "float32", "bfloat16"))),
        }
        layers = []
        for _ in range(draw(st.sampled_from((1, 1, 2)))):
            sides = draw(st.permutations((self.names[0], draw(st.sampled_from(self.names)))))
            codecs = [
                settled(draw, name, side, block)
                for name, side in zip(sides, ("key", "value"), strict=True)
            ]
            dims = draw(st.sampled_from(((16, 16), (32, 16), (16, 32))))
            layers.append(Rules(draw(st.sampled_from((1, 2))), *dims, *codecs, **exact))
        self.model = Model(layers, draw(st.sampled_from((1, 1, 2, 3))))
        self.in_floats = draw(st.booleans())
        products = {"query_bits": None, "probability_bits": None} if self.in_floats else {}
        self.repeats = draw(st.sampled_from((1, 2, 3)))
        self.caches = {
            backend: kv.KVCache(
                len(layers),
                [rules.heads for rules in layers],
                [rules.key_dim for rules in layers],
                {index: rules.key for index, rules in enumerate(layers)},
                {index: rules.value for index, rules in enumerate(layers)},
                value_head_dim=[rules.value_dim for rules in layers],
                batch=self.model.batch,
                backend=backend,
                **exact,
                **products,
            )
            for backend in BACKENDS
        }
        self.branch = None
        self.rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    # Drawing

    def a_layer(self, data):
        return data.draw(st.integers(0, len(self.model.layers) - 1))

    def a_size(self, data):
        """New tokens; not many where each is a block of its own."""
        return data.draw(st.sampled_from(SIZES[:-2] if self.model.layers[0].block == 1 else SIZES))

    def some_lengths(self, data, tokens):
        """Lengths to give, which may be None, and what they mean."""
        batch = self.model.batch
        if data.draw(st.booleans()):
            return None, [tokens] * batch
        lengths = data.draw(st.lists(st.integers(0, tokens), min_size=batch, max_size=batch))
        return lengths, lengths

    def tokens(self, layer, count):
        """Queries, keys and values of new tokens."""
        rules = self.model.layers[layer]
        q_heads = self.repeats * rules.heads
        q, k, v = (
            self.rng.standard_normal((self.model.batch, heads, count, dim), dtype=np.float32)
            for heads, dim in (
                (q_heads, rules.key_dim),
                (rules.heads, rules.key_dim),
                (rules.heads, rules.value_dim),
            )
        )
        k[..., 3] += 6
        q[..., 5] *= 4
        return q, k, v

    def options(self, data):
        return {
            "window": data.draw(st.sampled_from((None, None, 1, 40))),
            "softcap": data.draw(st.sampled_from((None, None, 5.0))),
            "scale": data.draw(st.sampled_from((None, None, 0.1))),
        }

    def each(self, verb, *args, **options):
        """Call a verb of both caches."""
        return [getattr(cache, verb)(*args, **options) for cache in self.caches.values()]

    def refused(self, verb, *args, **options):
        for cache in self.caches.values():
            with pytest.raises(ValueError, match=r"must"):
                getattr(cache, verb)(*args, **options)

    def check(self, results, expected):
        """Outputs and log-sum-exps of both caches are those of the model."""
        for result in results:
            assert result.output.dtype == result.log_sum_exp.dtype == np.float32
            assert (np.isneginf(result.log_sum_exp) == np.isneginf(expected[1])).all()
            if self.in_floats:
                for part, exact in zip(result, expected, strict=True):
                    np.testing.assert_allclose(part, exact, atol=FLOAT_BOUND, rtol=FLOAT_BOUND)
            elif expected[0].any():
                assert relative_error(result.output, expected[0]) < INTEGER_BOUND

    # Verbs

    @rule(data=st.data())
    def append(self, data):
        layer, count = self.a_layer(data), self.a_size(data)
        _, k, v = self.tokens(layer, count)
        given, lengths = self.some_lengths(data, count)
        self.each("append", layer, k, v, lengths=given)
        self.model.append(layer, k, v, lengths)

    @rule(data=st.data(), exact_prefill=st.booleans())
    def append_attend(self, data, exact_prefill):
        layer, count = self.a_layer(data), self.a_size(data)
        new = self.tokens(layer, count)
        given, lengths = self.some_lengths(data, count)
        options = self.options(data) | {"exact_prefill": exact_prefill}
        results = self.each("append_attend", layer, *new, lengths=given, return_lse=True, **options)
        self.check(results, self.model.append_attend(layer, *new, lengths, **options))

    @rule(data=st.data(), count=st.sampled_from((1, 1, 2, 5)), causal=st.booleans())
    def attend(self, data, count, causal):
        layer = self.a_layer(data)
        q, _, _ = self.tokens(layer, count)
        given, lengths = self.some_lengths(data, count)
        options = self.options(data) | {"causal": causal}
        if not causal:
            options["window"] = None
        if not self.model.can_attend(layer, lengths):
            self.refused("attend", layer, q, lengths=given, **options)
            return
        results = self.each("attend", layer, q, lengths=given, return_lse=True, **options)
        self.check(results, self.model.attend(layer, q, lengths, **options))

    @rule(data=st.data(), far=st.booleans(), from_the_end=st.booleans(), same=st.booleans())
    def crop(self, data, far, from_the_end, same):
        lengths = []
        for longest in self.model.lengths.max(axis=0).tolist():
            back = data.draw(st.integers(0, longest if far else min(longest, 100)))
            lengths.append(-back if from_the_end and back else longest - back)
        given = lengths[0] if same else lengths
        lengths = [lengths[0]] * len(lengths) if same else lengths
        if not self.model.can_crop(lengths):
            self.refused("crop", given)
            return
        self.each("crop", given)
        self.model.crop(lengths)

    @rule(data=st.data(), same=st.booleans())
    def evict(self, data, same):
        most = self.model.most_to_evict()
        most = [min(most)] * len(most) if same else most
        self.refused("evict", most[0] + 1 if same else [*most[:-1], most[-1] + 1])
        tokens = [data.draw(st.integers(0, each)) for each in most]
        tokens = [tokens[0]] * len(tokens) if same else tokens
        self.each("evict", tokens[0] if same else tokens)
        self.model.evict(tokens)

    @rule(data=st.data())
    def reorder(self, data):
        row = st.integers(0, self.model.batch - 1)
        indices = [data.draw(row) for _ in range(self.model.batch)]
        self.each("reorder", indices)
        self.model.take(indices)

    @rule(data=st.data())
    def select(self, data):
        row = st.integers(0, self.model.batch - 1)
        indices = data.draw(st.lists(row, min_size=1, max_size=4))
        self.each("select", indices)
        self.model.take(indices)

    @precondition(lambda self: self.model.batch <= 2)
    @rule(times=st.integers(1, 2))
    def repeat(self, times):
        self.each("repeat", times)
        self.model.take([row for row in range(self.model.batch) for _ in range(times)])

    @rule()
    def copy(self):
        copies = dict(zip(self.caches, self.each("copy"), strict=True))
        self.branch = (copies, self.model.copy())

    @rule()
    def continue_with_the_other_branch(self):
        assume(self.branch is not None)
        here = self.caches, self.model
        self.caches, self.model = self.branch
        self.branch = here

    @rule(rarely=st.integers(0, 3))
    def reset(self, rarely):
        assume(rarely == 0)
        self.each("reset")
        self.model.reset()

    @rule()
    def save_and_load(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cache.safetensors"
            written = []
            for backend, cache in self.caches.items():
                cache.save(path)
                written.append(read_file(path))
                self.caches[backend] = kv.KVCache.load(path, backend=backend)
        for file in written[1:]:
            assert_same_bits(file, written[0])

    # What holds after every step

    @invariant()
    def lengths_are_those_of_the_model(self):
        for cache in self.caches.values():
            assert_same_bits(cache.seq_lengths, self.model.lengths)
            assert len(cache) == cache.seq_length == self.model.lengths.max()
            assert cache.batch == self.model.batch

    @invariant()
    def both_hold_what_the_model_holds(self):
        for cache in self.caches.values():
            for rows, models in zip(cache._sequences, self.model.rows, strict=True):
                for row, model in zip(rows, models, strict=True):
                    first = first_held(row)
                    assert first <= model.gone
                    assert_same_bits(contents(row), model.contents(first))

    @invariant()
    def bytes_are_the_sum_of_the_buffers(self):
        for cache in self.caches.values():
            arrays = {id(array): array.nbytes for array in buffers(cache._sequences)}
            total = sum(arrays.values())
            assert cache.nbytes == cache.memory()["total"] == total
            assert f"{total:,} bytes" in repr(cache)

    @rule(data=st.data())
    def what_is_decoded_is_what_the_next_query_sees(self, data):
        layer = self.a_layer(data)
        expected = [row.decoded() for row in self.model.rows[layer]]
        for side, name in enumerate(("keys", "values")):
            for decoded in self.each(name, layer):
                assert decoded.shape[2] == max(row[side].shape[1] for row in expected)
                for row, exact in zip(decoded, expected, strict=True):
                    left = row.shape[1] - exact[side].shape[1]
                    assert_same_bits(row[:, left:], exact[side])
                    assert not row[:, :left].any()


def machine(*names):
    """A test of the sequences of verbs with sides drawn from these presets."""

    class Machine(CacheMachine):
        pass

    Machine.names = names
    Machine.__name__ = Machine.__qualname__ = f"{names[0]}Machine"
    # Shrinking a failure of a run this long would take minutes; the steps are printed as they are.
    Machine.TestCase.settings = settings(
        max_examples=100 if LONG else 40,
        stateful_step_count=50,
        phases=(Phase.explicit, Phase.reuse, Phase.generate),
    )
    return Machine.TestCase


TestInt8 = machine("int8", "kivi2", None)
TestInt4 = machine("int4", "int8", None)
TestInt3 = machine("int3", "lm2", None)
TestInt2 = machine("int2", "kivi4", None)
TestKivi4 = machine("kivi4", "int8", None)
TestKivi2 = machine("kivi2", "lm3", None)
TestLloydMax4 = machine("lm4", "lm2", None)
TestLloydMax3 = machine("lm3", "int2", None)
TestLloydMax2 = machine("lm2", "int4", None)
TestTrellis4 = machine("tcq4", "tcq2", None)
TestTrellis3 = machine("tcq3", "int2", None)
TestTrellis2 = machine("tcq2", "tcq3", None)
TestFloats = machine(None)
