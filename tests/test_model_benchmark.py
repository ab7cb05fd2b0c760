"""The benchmark on a model: that it measures what it says and reports it; no time is asserted."""

import json
from functools import partial

import pytest

from kvcodec.benchmark import make_model_settings

pytestmark = pytest.mark.usefixtures("load")
hf = pytest.mark.hf


@pytest.fixture
def run(run):
    """Run ``kvcodec bench``."""
    return partial(run, "bench")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders with a tiny model each, by architecture."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from hf_text import saved

    root = tmp_path_factory.mktemp("models")
    return {name: saved(root / name, name) for name in ("Llama", "Gemma3")}


def test_settings():
    settings = make_model_settings("m.gguf", contexts=[90, 30, 90], codecs=["lm4/lm2"], threads=[2])
    assert settings.contexts == (30, 90)
    assert [pair.name for pair in settings.codecs] == ["int4", "lm4/lm2"]
    assert settings.tokens == 90 + 27 * 4
    assert settings.command() == (
        "kvcodec bench --model m.gguf --context 30 --context 90 --codec int4 --codec lm4/lm2 "
        "--threads 2 --repeats 25"
    )
    assert make_model_settings("m.gguf").contexts == (4096, 8000)


@hf
def test_rows(run, folders):
    arguments = ("--context", 200, "--context", 100, "--threads", 1, "--repeats", 2)
    code, out, err = run("--model", folders["Llama"], *arguments, "--json")
    assert (code, err) == (0, "")
    results = json.loads(out)
    again = results["command"].split()
    assert again[:2] == ["kvcodec", "bench"]
    assert results["machine"]["cores"] > 0
    rows = {(row["context"], row["dtype"], row["cache"]): row for row in results["measurements"]}
    caches = {"DynamicCache", "KVCodecCache int4", "KVCodecCache int8"}
    for context in (100, 200):
        for dtype in ("float32", "bfloat16"):
            found = {name for *key, name in rows if key == [context, dtype]}
            assert found >= caches
            assert found - caches <= {"QuantizedCache quanto", "QuantizedCache hqq"}
            # 2 layers of 2 KV heads and 32 channels, keys and values
            numbers = context * 2 * 2 * 2 * 32
            exact = rows[context, dtype, "DynamicCache"]
            assert exact["nbytes"] == numbers * (4 if dtype == "float32" else 2)
            assert exact["speedup"][dtype] == 1
    for row in rows.values():
        assert row["threads"] == 1
        assert 0 < row["lower_quartile"] <= row["seconds"] <= row["upper_quartile"]
        assert row["tokens_per_second"] == pytest.approx(1 / row["seconds"])
        assert row["mean_seconds"] > 0
        assert min(row["speedup"].values()) > 0
    assert set(results["missing"]) == {
        f"QuantizedCache {library}"
        for library in ("quanto", "hqq")
        if (100, "float32", f"QuantizedCache {library}") not in rows
    }


@hf
def test_table(run, folders):
    code, out, err = run(
        *("--model", folders["Gemma3"], "--context", 64, "--threads", 1, "--repeats", 1)
    )
    assert (code, err) == (0, "")
    words = ("Gemma3; medians of 1 rounds of 4 tokens", "torch ", "KVCodecCache int4", "bfloat16")
    for word in words:
        assert word in out
    assert "…" not in out
    # It has sliding windows, which a QuantizedCache refuses, if it is installed at all.
    for library in ("quanto", "hqq"):
        assert f"Not measured: QuantizedCache {library}: " in out


@hf
def test_what_is_decoded(folders):
    """Each cache is fed the prompt, and tokens that follow it, once a step."""
    from kvcodec.benchmark.model_caches import cache_bytes, cache_kinds, in_dtypes
    from kvcodec.benchmark.model_suite import STEPS, _decoding, _decoding_anew, _fed
    from kvcodec.evaluation import codec_pair, load_language_model

    models = in_dtypes(load_language_model(folders["Llama"]))
    assert {dtype: str(model.model.dtype) for dtype, model in models.items()} == {
        dtype: f"torch.{dtype}" for dtype in ("float32", "bfloat16")
    }
    kinds, _ = cache_kinds(models, [codec_pair("int4")])
    tokens = list(range(1, 101)) + list(range(1, 21))
    for kind in kinds:
        run = kind.start()
        fed = []
        forward = run.feed
        run.feed = lambda some, keep, fed=fed, forward=forward: (
            fed.extend(some),
            forward(some, keep),
        )[1]
        _fed(run, tokens, 70)
        _fed(run, tokens, 100)
        assert run.cache.get_seq_length() == 100
        assert _decoding_anew(run, tokens)() > 0
        assert run.cache.get_seq_length() == 100
        measure = _decoding(run, tokens)
        assert measure() > 0
        assert measure() > 0
        assert fed == tokens[: 100 + 2 * STEPS]
        assert run.cache.get_seq_length() == 100 + 2 * STEPS
        assert cache_bytes(run.cache) > 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("--quick",),
        ("--q-heads", 4),
        ("--kv-heads", 8),
        ("--head-dim", 64),
        ("--plot", "times.svg"),
        ("--peers",),
        ("--llama", "folder"),
        ("--ik-llama", "folder"),
    ],
)
def test_options_without_effect_are_refused(fails, arguments):
    message = fails("--model", "m.gguf", *arguments)
    assert f"{arguments[0]} is not possible with --model" in message


@hf
def test_a_load_before_is_warned_of(run, folders, load):
    load(3)
    options = ("--context", 16, "--threads", 1, "--repeats", 1, "--json")
    code, _, err = run("--model", folders["Llama"], *options)
    assert code == 0
    assert err.startswith("Warning: the load of the last minute was 3.00, ")
    assert err.count("\n") == 1


def test_errors_are_one_line(fails):
    assert "context must be" in fails("--model", "m.gguf", "--context", 15)
    assert "codec must be one of int8" in fails("--model", "m.gguf", "--codec", "fp16")


@hf
def test_errors_about_the_model_are_one_line(fails, folders):
    model = folders["Llama"]
    assert "model must be a folder" in fails("--model", f"{model}/nothing")
    # The tiny model has 2,048 positions.
    message = fails("--model", model, "--context", 2045, "--repeats", 1)
    assert "context must be at most 2036 for Llama, which has 2048 positions" in message


class CannotBeCopied:
    """What a layer of another library may hold."""

    def __deepcopy__(self, memo):
        raise RuntimeError("cannot be copied")


@hf
@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
@pytest.mark.parametrize("codec", [None, "int4"])
def test_a_copied_run_goes_on_by_itself(folders, name, codec):
    import torch

    from kvcodec import evaluation
    from kvcodec.benchmark.model_caches import copied
    from kvcodec.evaluation.language_model import exact_run, packed_run

    model = evaluation.load_language_model(folders[name])
    if codec is None:
        run = exact_run(model)
        run.cache.layers[0].packed_by_others = CannotBeCopied()
    else:
        run = packed_run(model, evaluation.codec_pair(codec), evaluation.ChunkOptions())
    run.feed(list(range(3, 120)), 1)
    runs = [copied(run), copied(run), run]
    first, second, original = (one.feed([5, 6, 7], 3) for one in runs)
    assert torch.equal(first, second)
    assert torch.equal(first, original)
