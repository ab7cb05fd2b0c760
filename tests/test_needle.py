"""Retrieval of a code: how probes are made, that a hit is what generation writes, statistics."""

import re

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from hf_models import SMALL, generate, packed, prompt, tiny
from hf_text import BEGIN, TEMPLATE, smollm2, tokenizer
from scipy.stats import binomtest

from kvcodec.evaluation import (
    ChunkOptions,
    LanguageModel,
    Probes,
    codec_pair,
    make_needle_table,
    make_probes,
    read_text,
    run_probes,
    wilson_interval,
)
from kvcodec.evaluation.language_model import packed_run
from kvcodec.evaluation.measure import measure, needle_rows, needle_units
from kvcodec.integrations.transformers import KVCodecCache

pytestmark = pytest.mark.hf
OPTIONS = ChunkOptions(sinks=4, recent=8, chunk=16)
TEXT = "The quick brown fox jumps over the lazy dog. " * 40
LENGTH = 400


def language(**options):
    return LanguageModel(tiny("Llama"), tokenizer(**options), "tiny")


def text_of(tokens):
    return "".join(map(chr, tokens))


def contexts(probes):
    """Each context and its code."""
    for rest, count in zip(probes.rests, probes.code_tokens, strict=True):
        yield text_of(probes.prefix + rest[:-count]), text_of(rest[-count:])


class TestProbes:
    def test_every_context_has_the_length_and_its_code(self):
        made = make_probes(language(), TEXT, LENGTH, 25, 0)
        assert [len(each.rests) for each in made] == [3] * 5 + [2] * 5
        codes = set()
        for index, each in enumerate(made):
            assert each.length == LENGTH
            assert index / 10 <= each.depth < (index + 1) / 10
            for context, code in contexts(each):
                assert len(context) == LENGTH
                assert f"The secret code is {code}. Remember it." in context
                assert context.endswith("The secret code is ")
                assert context.count(code) == 2
                assert code.isdecimal()
                codes.add(code)
        assert len(codes) == 25

    def test_every_context_has_the_length_though_codes_differ_in_tokens(self):
        class Pairs:
            """A token a character, but one for two digits below 5."""

            chat_template = bos_token_id = None

            def __call__(self, text, **_):
                return {"input_ids": re.findall(r"[0-4]{2}|[\s\S]", text)}

        made = make_probes(LanguageModel(None, Pairs(), "pairs"), TEXT, LENGTH, 25, 0)
        assert len({count for each in made for count in each.code_tokens}) > 1
        for each in made:
            for rest, count in zip(each.rests, each.code_tokens, strict=True):
                assert len(each.prefix) + len(rest) - count == each.length == LENGTH

    def test_the_sentence_lies_at_the_depth(self):
        places = []
        for each in make_probes(language(), TEXT, 1000, 10, 0):
            [(context, code)] = contexts(each)
            places.append(context.index(code) / 1000)
        assert places == sorted(places)
        assert places[0] < 0.2
        assert places[-1] > 0.7

    def test_the_seed_decides_them(self):
        first, again, other = (make_probes(language(), TEXT, LENGTH, 10, s) for s in (0, 0, 1))
        assert first == again
        assert all(a.rests != b.rests for a, b in zip(first, other, strict=True))
        assert [each.depth for each in first] != [each.depth for each in other]

    def test_the_template_of_conversations_is_used(self):
        [each, *_] = make_probes(language(template=TEMPLATE), TEXT, LENGTH, 10, 0)
        [(context, _)] = contexts(each)
        assert context.startswith("<user>Read the text")
        assert context.endswith("with the code only.\n<assistant>The secret code is ")
        assert len(context) == LENGTH

    def test_a_model_that_expects_a_token_first_gets_it(self):
        [each, *_] = make_probes(language(begins=True), TEXT, LENGTH, 10, 0)
        assert text_of(each.prefix).startswith(f"{BEGIN}Read the text")

    def test_what_is_too_short(self):
        with pytest.raises(ValueError, match=r"^lengths must leave room .* but 150 was given\.$"):
            make_probes(language(), TEXT, 150, 10, 0)
        with pytest.raises(ValueError, match=r"^text must have at least \d+ tokens"):
            make_probes(language(), TEXT[:100], LENGTH, 10, 0)


class TestHits:
    @pytest.mark.parametrize("name", ["fp32", "int4"])
    def test_a_hit_is_what_greedy_generation_writes(self, name):
        pair = codec_pair(name, SMALL["block"])
        ids = prompt(60)
        model = packed(tiny("Llama"))
        cache = KVCodecCache(model.config, key=pair.key, value=pair.value, **SMALL)
        written = generate(model, ids, cache, tokens=5)[0].tolist()
        prefix, rest = ids[0, :33].tolist(), ids[0, 33:].tolist()
        rests = [[*rest, *written]]
        for place in range(5):
            wrong = list(written)
            wrong[place] = (wrong[place] + 1) % 128
            rests.append([*rest, *wrong])
        probes = Probes(60, 0.5, prefix, rests, [5] * 6)
        found = run_probes(language(), probes, pair, OPTIONS)
        assert found == [True] + [False] * 5

    @pytest.mark.parametrize("name", ["int8", "int4", "lm4/lm2"])
    def test_a_shared_prefix_changes_nothing(self, name):
        model, pair = language(), codec_pair(name, SMALL["block"])
        tokens = prompt(100)[0].tolist()
        shared = packed_run(model, pair, OPTIONS)
        shared.feed(tokens[:48], 0)
        for end in (70, 100):
            alone = packed_run(model, pair, OPTIONS)
            alone.feed(tokens[:48], 0)
            expected = alone.feed(tokens[48:end], 5)
            run = type(shared)(shared.model, shared.attention, shared.cache.copy())
            assert torch.equal(run.feed(tokens[48:end], 5), expected)
        assert shared.cache.get_seq_length() == 48

    def test_rows_count_hits_by_length(self):
        model = language()
        made = [each for length in (300, LENGTH) for each in make_probes(model, TEXT, length, 4, 0)]
        units = needle_units(made, OPTIONS)
        pairs = [codec_pair(name, SMALL["block"]) for name in ("int4", "fp32")]
        parts = []
        results = measure(model, units, pairs, progress=parts.append)
        assert parts[-1] == 1
        for unit in units[:4]:
            results[unit.name, "fp32"] = {"found": [True]}
        for unit in units[:1]:
            results[unit.name, "int4"] = {"found": [True]}
        for unit in units[1:4]:
            results[unit.name, "int4"] = {"found": [False]}
        rows = needle_rows(model, results, units, pairs, 3)
        assert [(row.name, row.length) for row in rows] == [
            ("int4", 300),
            ("int4", LENGTH),
            ("fp32", 300),
            ("fp32", LENGTH),
        ]
        assert (rows[0].found, rows[0].probes, rows[0].share) == (1, 4, 0.25)
        assert rows[0].same_as_exact == 0.25
        assert (rows[0].share_low, rows[0].share_high) == wilson_interval(1, 4)
        assert rows[2].found == 4
        assert rows[2].same_as_exact == 1
        assert rows[0].seed == 3
        assert make_needle_table(rows).row_count == 4
        del results[units[0].name, "fp32"]
        [row, *_] = needle_rows(model, results, units, pairs[:1], 3)
        assert row.same_as_exact is None


@pytest.mark.parametrize("found", [0, 1, 50, 99, 100])
def test_wilson_interval(found):
    expected = binomtest(found, 100).proportion_ci(method="wilson")
    assert wilson_interval(found, 100) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_smollm2_finds_codes():
    model = smollm2()
    made = make_probes(model, read_text(), 200, 4, 0)
    units = needle_units(made, ChunkOptions(recent=16))
    pairs = [codec_pair(name) for name in ("fp32", "int8")]
    rows = needle_rows(model, measure(model, units, pairs), units, pairs, 0)
    assert [row.found for row in rows] == [4, 4]
