"""Evaluation on language models: against logits and statistics that are computed here apart."""

import gc
import json
import math
import weakref

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from hf_models import (
    EXACT,
    SIZES,
    SMALL,
    every_architecture,
    hard_keys,
    logits,
    packed,
    prompt,
    tiny,
)
from hf_text import BEGIN, saved, smollm2, tokenizer
from scipy.special import log_softmax
from scipy.stats import entropy

from kvcodec.evaluation import (
    ChunkOptions,
    LanguageModel,
    Predictions,
    codec_pair,
    cut_chunks,
    evaluate_chunk,
    language_model,
    load_language_model,
    make_model_table,
    read_text,
    summarize,
    to_json,
)
from kvcodec.evaluation.language_model import ExactPiece, packed_run
from kvcodec.evaluation.measure import check_tokens, chunk_units, divergence_rows, measure
from kvcodec.integrations.transformers import KVCodecCache

pytestmark = pytest.mark.hf
FED = 90
OPTIONS = ChunkOptions(sinks=4, recent=8, chunk=40)


def language(model, **options):
    return LanguageModel(model, tokenizer(**options), "tiny")


def pairs_of(*names):
    return [codec_pair(name, SMALL["block"]) for name in names]


def chunk(tokens=FED, seed=0):
    return prompt(tokens + 1, seed=seed)[0].tolist()


def evaluated(model, tokens, *names, options=OPTIONS):
    return evaluate_chunk(language(model), tokens, pairs_of(*names), options)


def log_probabilities(model, tokens, cache=None):
    ids = torch.tensor([tokens[:-1]])
    cuts = () if cache is None else (40, 80)
    return log_softmax(logits(model, ids, cuts, cache)[0].double().numpy(), axis=-1)


class Wide(torch.nn.Linear):
    """A linear layer that sums in float64, so that rows do not depend on how many there are."""

    def forward(self, x):
        return torch.nn.functional.linear(x.double(), self.weight.double(), self.bias).float()


def with_wide_sums(model):
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = Wide
    return model


@every_architecture
def test_exact_tokens_predict_what_the_float32_run_predicts(name):
    [found] = evaluated(tiny(name), chunk(), "fp32")
    assert len(found.kl) == FED
    assert max(np.abs(found.kl)) < 1e-8
    assert all(found.same_top)
    np.testing.assert_allclose(found.log_probability, found.exact_log_probability, atol=1e-4)
    assert found.left_out == 0


@pytest.mark.parametrize("name", ["int4", "kivi2"])
def test_figures_are_those_of_the_logits(name):
    tokens = chunk()
    block = {"key": codec_pair(name, 32).key, "value": codec_pair(name, 32).value}
    [found] = evaluate_chunk(language(tiny("Llama")), tokens, [codec_pair(name, 32)], OPTIONS)
    log_p = log_probabilities(tiny("Llama"), tokens)
    model = packed(tiny("Llama"))
    cache = KVCodecCache(model.config, **block, sinks=4, recent=8, block=32)
    log_q = log_probabilities(model, tokens, cache)
    p, q = np.exp(log_p), np.exp(log_q)
    np.testing.assert_allclose(found.kl, entropy(p, q, axis=-1), rtol=1e-3, atol=1e-9)
    assert max(found.kl) > 1e-5
    assert found.same_top == (p.argmax(-1) == q.argmax(-1)).tolist()
    targets = np.arange(FED), tokens[1:]
    np.testing.assert_allclose(found.exact_log_probability, log_p[targets], atol=1e-4)
    np.testing.assert_allclose(found.log_probability, log_q[targets], atol=1e-4)
    assert found.tokens == FED
    assert found.seconds > 0


@pytest.mark.parametrize("name", ["int8", "int4", "int4 plain", "kivi4", "lm4/lm2", "fp32"])
def test_pieces_of_any_size_see_what_generation_sees(name):
    block = 32 if name.startswith("kivi") else 16
    tokens, pair = chunk(), codec_pair(name, block)
    model = language(with_wide_sums(tiny("Llama")))
    found = {}
    for size in (1, 7, 40, FED):
        run = packed_run(model, pair, ChunkOptions(sinks=4, recent=8))
        parts = [
            run.feed(tokens[start : min(start + size, FED)], min(size, FED - start))
            for start in range(0, FED, size)
        ]
        found[size] = torch.cat(parts)
        assert found[size].dtype == torch.float32
    for size in (7, 40, FED):
        torch.testing.assert_close(found[size], found[1], rtol=0, atol=1e-4)


def test_logits_of_one_piece_are_held_at_a_time():
    tokens, options = chunk(), ChunkOptions(sinks=4, recent=8, chunk=1)
    [stepwise] = evaluated(with_wide_sums(tiny("Llama")), tokens, "int4", options=options)
    [at_once] = evaluated(with_wide_sums(tiny("Llama")), tokens, "int4")
    np.testing.assert_allclose(stepwise.kl, at_once.kl, atol=1e-6)


def test_only_the_last_predictions_count():
    every = evaluated(tiny("Llama"), chunk(), "int8", "int4")
    options = ChunkOptions(sinks=4, recent=8, chunk=40, last=25)
    for whole, last in zip(
        every, evaluated(tiny("Llama"), chunk(), "int8", "int4", options=options), strict=True
    ):
        for name in ("kl", "exact_log_probability", "log_probability"):
            np.testing.assert_allclose(
                getattr(last, name), getattr(whole, name)[-25:], rtol=1e-3, atol=1e-6
            )
        assert last.same_top == whole.same_top[-25:]
        assert last.tokens == FED


def test_memory_of_the_caches_is_given_back(monkeypatch):
    held = []

    def watched(*arguments):
        run = packed_run(*arguments)
        held.append(weakref.ref(run.cache))
        return run

    monkeypatch.setattr(language_model, "packed_run", watched)
    enabled = gc.isenabled()
    gc.disable()
    try:
        evaluated(tiny("Llama"), chunk(), "int4", "lm2")
        assert [cache() for cache in held] == [None, None]
    finally:
        if enabled:
            gc.enable()


def test_codecs_do_not_touch_each_other():
    names = ["int4", "fp32", "lm4/lm2", "int8"]
    together = evaluated(tiny("Qwen3"), chunk(), *names)
    apart = [evaluated(tiny("Qwen3"), chunk(), name)[0] for name in names]
    assert [each.kl for each in together] == [each.kl for each in apart]


def test_options_reach_the_cache():
    tokens = chunk()
    base = {"sinks": 4, "recent": 8, "chunk": 40}
    [usual] = evaluated(tiny("Llama"), tokens, "int4")
    for change, block in (({"sinks": 0}, 16), ({"recent": 30}, 16), ({}, 32)):
        options, pair = ChunkOptions(**(base | change)), codec_pair("int4", block)
        [other] = evaluate_chunk(language(tiny("Llama")), tokens, [pair], options)
        assert np.abs(np.subtract(other.kl, usual.kl)).max() > 1e-6


@pytest.mark.parametrize("name", ["fp32", "bf16", "int4", "kivi2"])
def test_the_block_of_a_pair_is_that_of_its_cache(name):
    run = packed_run(language(tiny("Llama")), codec_pair(name, 32), OPTIONS)
    assert run.cache.kv.config["block"] == 32


def test_a_block_without_a_codec_is_checked():
    with pytest.raises(ValueError, match=r"^block must be a divisor or a multiple of 64"):
        codec_pair("fp32", 3)


@pytest.mark.parametrize("name", ["int8", "int4", "kivi4", "lm3/lm2", "bf16", "fp32"])
def test_bits_and_bytes_are_what_the_cache_holds(name):
    model = tiny("Llama", max_position_embeddings=4096)
    pair, options = codec_pair(name), ChunkOptions(sinks=0, recent=0)
    found = Predictions.of(pair, packed_run(language(model), pair, options).cache.kv.config)
    sizes = []
    for tokens in (1024, 3072):
        run = packed_run(language(model), pair, options)
        run.feed(prompt(tokens)[0].tolist(), 1)
        layers = run.cache.memory()["layers"]
        sizes.append(sum(each[side]["body"] for each in layers for side in ("key", "value")))
    # The numbers of the blocks come on top, 16 bytes a block, side and layer, with room for more.
    assert (sizes[1] - sizes[0]) / 2048 == pytest.approx(found.bytes_per_token, abs=1.51)
    values = 2 * 2 * 2 * 32
    assert found.bytes_per_token * 8 == pytest.approx(found.bits_per_value * values)


class TestEntriesThatAreNotFinite:
    def test_they_are_left_out_and_counted(self):
        model = tiny("Llama", tie_word_embeddings=False)
        with torch.no_grad():
            model.lm_head.weight[[7, 100]] = torch.inf
        tokens = [token for token in chunk(200) if token not in (7, 100)][: FED + 1]
        [found] = evaluated(model, tokens, "int4")
        assert found.left_out == 2 * FED
        with torch.no_grad():
            model.lm_head.weight[[7, 100]] = 0.0
        log_p = logits(model, torch.tensor([tokens[:-1]]))[0].double().numpy()
        keep = np.setdiff1d(np.arange(SIZES["vocab_size"]), [7, 100])
        expected = log_softmax(log_p[:, keep], axis=-1)
        place = np.searchsorted(keep, tokens[1:])
        np.testing.assert_allclose(
            found.exact_log_probability, expected[np.arange(FED), place], atol=1e-4
        )
        assert 0 < np.mean(found.kl) < 1

    def test_those_of_either_run_are_left_out_of_both(self, monkeypatch):
        rng = np.random.default_rng(0)
        p, q = rng.standard_normal((2, 5, 20)).astype(np.float32)
        q[1, 3], q[2, 4], q[2, 5], p[3, 6] = np.nan, np.inf, -np.inf, -np.inf
        found = Predictions("x", None, None, 32.0, 1.0)
        exact = ExactPiece(torch.tensor(p), [0, 1, 2, 1, 0])
        monkeypatch.setattr(language_model, "ENTRIES_AT_ONCE", 40)
        exact.compare(found, torch.tensor(q))
        assert found.left_out == 4
        for row, out in enumerate([[], [3], [4, 5], [6], []]):
            keep = np.setdiff1d(np.arange(20), out)
            each = [np.exp(log_softmax(x[row, keep].astype(np.float64))) for x in (p, q)]
            assert found.kl[row] == pytest.approx(entropy(*each), rel=1e-6)
            assert found.same_top[row] == (each[0].argmax() == each[1].argmax())

    def test_where_nothing_is_left_the_divergence_is_infinite(self):
        found = Predictions("x", None, None, 32.0, 1.0)
        broken = torch.tensor([[math.nan] * 4, [0.0] * 4])
        ExactPiece(torch.zeros(2, 4), [0, 1]).compare(found, broken)
        assert found.kl == pytest.approx([math.inf, 0.0])
        assert found.same_top == [False, True]
        found.seconds, found.tokens = 1.0, 2
        row = summarize("m", [found], OPTIONS, 16, 0)
        assert row.mean_kl == math.inf
        assert '"mean_kl": null' in to_json([row])


def invented(kl, exact, quantized, same_top=None):
    return Predictions(
        *("int4", None, None, 4.0, 100.0),
        kl=list(kl),
        same_top=list(same_top or [True] * len(kl)),
        exact_log_probability=list(np.log(exact)),
        log_probability=list(np.log(quantized)),
        tokens=len(kl),
        seconds=2.0,
    )


class TestStatistics:
    def test_of_known_predictions(self):
        kl = np.arange(1000) / 1000
        exact, quantized = np.full(1000, 0.5), np.r_[np.full(500, 0.5), np.full(500, 0.25)]
        chunks = [
            invented(kl[:500], exact[:500], quantized[:500], [True] * 400 + [False] * 100),
            invented(kl[500:], exact[500:], quantized[500:]),
        ]
        row = summarize("m", chunks, OPTIONS, 16, 0)
        assert row.mean_kl == pytest.approx(kl.mean())
        # Two chunks drawn of two: the mean of their means is off by half their distance, half the
        # time.
        assert row.mean_kl_error == pytest.approx(0.25 / math.sqrt(2), rel=0.05)
        assert row.perplexity_ratio == pytest.approx(math.sqrt(2))
        spread = np.std([1, math.sqrt(2), math.sqrt(2), 2], ddof=0)
        assert row.perplexity_ratio_error == pytest.approx(spread, rel=0.05)
        assert (row.perplexity, row.exact_perplexity) == pytest.approx((2 * math.sqrt(2), 2))
        assert row.median_kl == pytest.approx(np.median(kl))
        assert (row.kl_90, row.kl_99, row.kl_999) == pytest.approx(
            tuple(np.quantile(kl, [0.9, 0.99, 0.999]))
        )
        assert row.same_top == 0.9
        assert row.rms_probability_change == pytest.approx(math.sqrt(0.25**2 / 2))
        assert row.tokens_per_second == 250
        assert (row.predictions, row.chunks, row.tokens) == (1000, 2, 500)

    def test_the_seed_decides_the_errors(self):
        rng = np.random.default_rng(0)
        chunks = [invented(rng.random(20), rng.random(20), rng.random(20)) for _ in range(4)]
        first, again, other = (summarize("m", chunks, OPTIONS, 16, seed) for seed in (0, 0, 1))
        assert first == again
        assert first.mean_kl == other.mean_kl
        assert first.mean_kl_error != other.mean_kl_error

    def test_one_chunk_has_no_error(self):
        row = summarize("m", [invented([0.1], [0.5], [0.5])], OPTIONS, 16, 0)
        assert math.isnan(row.mean_kl_error)
        assert math.isnan(row.perplexity_ratio_error)

    def test_damage_that_perplexity_hides_is_seen(self):
        rng = np.random.default_rng(1)
        exact = rng.uniform(0.1, 0.9, 400)
        quantized = exact[::-1]  # as likely a text, by other tokens
        kl = np.abs(np.log(exact / quantized))
        row = summarize("m", [invented(kl, exact, quantized, [False] * 400)], OPTIONS, 16, 0)
        assert row.perplexity_ratio == pytest.approx(1)
        assert row.mean_kl > 0.1
        assert row.same_top == 0
        assert row.rms_probability_change > 0.1
        headings = [column.header for column in make_model_table([row]).columns]
        for heading in ("mean KL\n(nats)", "same\ntop", "RMS\nΔp", "perplexity\nratio"):
            assert heading in headings


def test_centering_is_seen_to_repair_hard_keys():
    model = hard_keys(tiny("Qwen2"))
    names = ("int4 plain", "int4 centered", "int4", "fp32")
    by_name = {each.codec: np.mean(each.kl) for each in evaluated(model, chunk(), *names)}
    assert by_name["fp32"] < 1e-6
    assert by_name["int4 plain"] > 5 * by_name["int4 centered"]
    assert by_name["int4 plain"] > 5 * by_name["int4"]


class TestText:
    def test_chunks_are_evenly_spaced_and_begin_as_the_model_expects(self):
        model = language(tiny("Llama"), begins=True)
        assert model.first_tokens == [ord(BEGIN)]
        tokens = model.encode("abcdefghijklmnopqrst")
        first, second = cut_chunks(tokens, model.first_tokens, 4, 2)
        assert [chr(token) for token in first] == [BEGIN, *"abcd"]
        assert [chr(token) for token in second] == [BEGIN, *"klmn"]
        assert language(tiny("Llama")).first_tokens == []

    def test_a_short_text_is_refused(self):
        assert len(cut_chunks(range(10), [], 4, 2)) == 2
        with pytest.raises(ValueError, match=r"at least 10 tokens .* but has 9\.$"):
            cut_chunks(range(9), [], 4, 2)

    def test_the_default_text_is_pythons(self):
        text = read_text()
        assert len(text) > 200_000
        assert text.index('The "assert" statement') < text.index('The "while" statement')

    def test_files(self, tmp_path):
        file = tmp_path / "text"
        file.write_text("Käse\n", encoding="utf-8")
        assert read_text(file) == "Käse\n"
        file.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ValueError, match="text must be a file in UTF-8"):
            read_text(file)
        for path, reason in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
            with pytest.raises(
                ValueError, match=f"text must be .* {path} cannot be read: {reason}"
            ):
                read_text(path)


class TestLoading:
    @pytest.mark.parametrize("name", ["Llama", "Gemma3"])
    def test_a_folder(self, tmp_path, name):
        loaded = load_language_model(saved(tmp_path / "model", name))
        assert loaded.source == "model"
        assert loaded.model.dtype == torch.float32
        assert not loaded.model.training
        assert loaded.encode("ab\n") == [97, 98, 10]
        ids = prompt(20)
        torch.testing.assert_close(logits(loaded.model, ids), logits(tiny(name), ids))

    def test_bfloat16_is_widened(self, tmp_path):
        saved(tmp_path, model=tiny("Llama", torch.bfloat16))
        assert load_language_model(tmp_path).model.dtype == torch.float32

    def test_what_is_no_model(self, tmp_path):
        with pytest.raises(ValueError, match=r"^model must be a folder or a \.gguf file"):
            load_language_model(tmp_path / "none")
        with pytest.raises(ValueError, match=r"^model .* cannot be loaded: "):
            load_language_model(tmp_path)
        file = tmp_path / "model.gguf"
        file.write_bytes(b"no model")
        with pytest.raises(ValueError, match=r"^model .* cannot be loaded: "):
            load_language_model(file)

    def test_code_that_comes_with_a_model_is_not_run(self, tmp_path, monkeypatch):
        def asked(*_):
            pytest.fail("it was asked whether to run the code")

        monkeypatch.setattr("builtins.input", asked)
        config = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "own.py").write_text("raise SystemExit")
        with pytest.raises(ValueError, match=r"^model .* cannot be loaded: "):
            load_language_model(tmp_path)

    def test_a_model_without_weights_makes_the_same_tokens_and_caches(self, tmp_path):
        saved(tmp_path, "Gemma3", begins=True)
        whole = load_language_model(tmp_path)
        empty = load_language_model(tmp_path, weights=False)
        assert all(each.is_meta for each in empty.model.parameters())
        assert (empty.first_tokens, empty.encode("text")) == (whole.first_tokens, [*b"text"])
        [pair] = pairs_of("int4")
        configs = [packed_run(each, pair, OPTIONS).cache.kv.config for each in (whole, empty)]
        assert configs[0] == configs[1]

    def test_models_that_a_cache_does_not_support(self, tmp_path):
        saved(tmp_path, "Llama")
        config = json.loads((tmp_path / "config.json").read_text())
        config["is_causal"] = False
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match="a model whose attention is not causal"):
            load_language_model(tmp_path)


class TestWhatIsNotPossible:
    def test_chunks_without_a_packed_token(self):
        [pair] = pairs_of("int4")
        check_tokens(pair, OPTIONS, 28)
        with pytest.raises(ValueError, match="it takes 28 tokens, but 27 are given"):
            check_tokens(pair, OPTIONS, 27)
        check_tokens(*pairs_of("fp32"), OPTIONS, 2)
        with pytest.raises(ValueError, match="fp16 is for tensors"):
            check_tokens(codec_pair("fp16"), OPTIONS, FED)

    def test_codecs_that_do_not_fit(self):
        model = language(tiny("Llama", head_dim=100))
        with pytest.raises(ValueError, match="int4 cannot be evaluated on this model: head_dim"):
            packed_run(model, *pairs_of("int4"), OPTIONS)

    @pytest.mark.parametrize("name", ["sinks", "recent", "chunk", "last"])
    def test_options_are_whole_numbers(self, name):
        with pytest.raises(ValueError, match=f"^{name} must be a whole number"):
            ChunkOptions(**{name: -1})


def test_rows_are_over_all_chunks():
    model, pairs = language(tiny("Llama")), pairs_of("int8", "int4")
    units = chunk_units([chunk(seed=0), chunk(seed=1)], OPTIONS)
    parts = []
    results = measure(model, units, pairs, progress=parts.append)
    assert parts == sorted(parts)
    assert parts[-1] == 1
    assert len(parts) == 2 * 2 * 3
    rows = divergence_rows(model, results, units, pairs, 0)
    assert [row.name for row in rows] == ["int8", "int4"]
    assert rows[0].model == "tiny"
    apart = [evaluated(tiny("Llama"), chunk(seed=seed), "int4")[0].kl for seed in (0, 1)]
    assert rows[1].mean_kl == np.mean(apart)
    assert rows[1].predictions == 2 * FED
    assert rows[1].block == EXACT["block"]


def test_smollm2():
    model = smollm2()
    tokens = cut_chunks(model.encode(read_text()), model.first_tokens, 160, 1)
    names = ("fp32", "int8", "int4")
    units = chunk_units(tokens, ChunkOptions())
    pairs = [codec_pair(name) for name in names]
    rows = divergence_rows(model, measure(model, units, pairs), units, pairs, 0)
    exact, int8, int4 = rows
    assert 2 < exact.exact_perplexity < 60
    assert abs(exact.mean_kl) < 1e-9
    assert exact.same_top == 1
    assert 1e-8 < int8.mean_kl < 1e-4
    assert int8.mean_kl < int4.mean_kl < 0.0045
    assert int4.same_top > 0.95
    assert int4.bytes_per_token == 30 * 3 * 2 * 64 * int4.bits_per_value / 8
