"""Greedy decoding with packed caches beside a float32 run."""

import json
from functools import partial
from itertools import islice

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import hf_models
import torch
from hf_text import saved, smollm2

from kvcodec.evaluation import ChunkOptions, codec_pair, compare_greedy, load_language_model

pytestmark = pytest.mark.hf
OPTIONS = ChunkOptions(sinks=2, recent=8)
PROMPTS = [[*range(40, 120), *range(60, 120)], [*range(120, 10, -1)]]


@pytest.fixture
def run(run):
    """Run ``kvcodec eval``."""
    return partial(run, "eval")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def model(folder):
    return load_language_model(folder)


def pairs(*names):
    return [codec_pair(name) for name in names]


@torch.inference_mode()
def continued(model, tokens):
    """Log probabilities after some tokens, without a cache."""
    logits = model.model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
    return logits.double().log_softmax(-1)


def test_same_without_a_codec_and_with_int8(model):
    rows = compare_greedy(model, PROMPTS, pairs("fp32", "int8"), 24, OPTIONS)
    assert [(row.name, row.prompt, row.prompt_tokens) for row in rows] == [
        ("fp32", 1, 140),
        ("fp32", 2, 110),
        ("int8", 1, 140),
        ("int8", 2, 110),
    ]
    for row in rows:
        assert row.same == row.new_tokens == 24 or row.margin < 0.05
    assert [row.same for row in rows[:2]] == [24, 24]
    assert (rows[0].exact_token, rows[0].token, rows[0].margin, rows[0].own_margin) == (None,) * 4


def test_first_difference_and_its_margin(model):
    rows = compare_greedy(model, PROMPTS, pairs("int2 plain"), 24, OPTIONS)
    parted = [row for row in rows if row.same < 24]
    assert parted, "two bits must be seen to change something"
    for row in parted:
        tokens = list(PROMPTS[row.prompt - 1])
        ids = torch.tensor([tokens])
        tokens += hf_models.generate(model.model, ids, tokens=24)[0, : row.same].tolist()
        p = continued(model, tokens)
        exact, written = (model.encode(each)[0] for each in (row.exact_token, row.token))
        assert int(p.argmax()) == exact != written
        assert row.margin == pytest.approx(float(p[exact] - p[written]), abs=1e-4)
        assert row.margin > 0
        assert row.own_margin > 0


def test_writes_what_generate_writes(model):
    """With the packed cache, too, tokens are those of `generate`."""
    from kvcodec.evaluation.greedy import decoded
    from kvcodec.evaluation.language_model import packed_run

    pair = pairs("int4")[0]
    run = packed_run(model, pair, OPTIONS)
    found = islice(decoded(run, PROMPTS[0], OPTIONS.chunk), 24)
    tokens = [token for token, _ in found]
    cache = packed_run(model, pair, OPTIONS).cache
    packed = hf_models.packed(model.model)
    try:
        ids = torch.tensor([PROMPTS[0]])
        written = hf_models.generate(packed, ids, cache, prefill_chunk_size=OPTIONS.chunk)
    finally:
        model.model.set_attn_implementation("sdpa")
    assert tokens == written[0].tolist()


def test_command(run, fails, folder):
    options = ("--model", folder, "--task", "greedy", "--tokens", 120)
    code, out, err = run(*options, "--json")
    assert (code, err) == (0, "")
    rows = json.loads(out)
    assert [(row["name"], row["prompt"]) for row in rows] == [
        (name, prompt) for name in ("int8", "int4") for prompt in (1, 2, 3)
    ]
    assert {(row["prompt_tokens"], row["new_tokens"]) for row in rows} == {(120, 24)}
    more = ("--prompts", 1, "--new-tokens", 8, "--recent", 8, "--codec", "int2 plain")
    code, out, err = run(*options, *more)
    assert (code, err) == (0, "")
    assert "tiny: greedy decoding; sinks 4, recent 8" in out
    assert "…" not in out
    assert "--probes is possible only with --task needle" in fails(*options, "--probes", 3)
    assert "codec must be fp32, bf16, one of" in fails(*options, "--codec", "fp16")
    short = (*options[:4], "--tokens", 90, "--prompts", 1, "--new-tokens")
    assert "takes 100 tokens, but 99 are given" in fails(*short, 10)
    assert run(*short, 11)[0] == 0
    assert "--prompts is possible only with --task greedy" in fails("--prompts", 3)


def test_smollm2():
    """Three prompts, 24 tokens: the same, or a close call is what changed."""
    model = smollm2()
    tokens = model.encode("The cache keeps keys and values of all tokens. " * 60)
    prompts = [tokens[start : start + 150] for start in (0, 3, 7)]
    options = ChunkOptions(sinks=4, recent=32)
    rows = compare_greedy(model, prompts, pairs("int8", "int4"), 24, options)
    assert len(rows) == 6
    for row in rows:
        assert row.same == 24 or row.margin < 0.1
