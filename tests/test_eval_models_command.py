"""The command `kvcodec eval --model`: what it prints, what it refuses, how it goes on."""

import json
import shutil
import subprocess
import sys
from functools import partial

import pytest

from kvcodec.cli import main
from kvcodec.evaluation.measure import Unit
from kvcodec.evaluation.store import Store, _sealed, file_digest

hf = pytest.mark.hf
FAST = ("--tokens", 120, "--chunks", 2, "--recent", 8, "--sinks", 2)


@pytest.fixture
def run(run):
    """Run ``kvcodec eval``."""
    return partial(run, "eval")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tiny model."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from hf_text import saved

    return saved(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def rows(run, model):
    """Rows of the command as JSON."""

    def command(*arguments):
        code, out, err = run("--model", model, *arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return command


@hf
def test_table(run, model):
    code, out, err = run("--model", model, *FAST, "--codec", "int4", "--codec", "lm4/lm2")
    assert (code, err) == (0, "")
    title = "tiny: 2 chunks of 120 tokens, 240 predictions; sinks 2, recent 8"
    assert title in " ".join(out.split())
    assert "lm4/lm2" in out
    assert "…" not in out


@hf
def test_json_and_options(rows, tmp_path):
    usual, exact = rows(*FAST, "--codec", "int4", "--codec", "fp32")
    assert exact["mean_kl"] < 1e-8 < usual["mean_kl"]
    assert (usual["tokens"], usual["chunks"], usual["predictions"]) == (120, 2, 240)
    assert (usual["sinks"], usual["recent"], usual["block"]) == (2, 8, 64)
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a cache. " * 40)
    changed = {
        ("--text", text): "mean_kl",
        ("--chunks", 3): "mean_kl",
        ("--tokens", 200): "mean_kl",
        ("--last", 30): "mean_kl",
        ("--sinks", 0): "mean_kl",
        ("--recent", 20): "mean_kl",
        ("--block", 32): "mean_kl",
        ("--seed", 1): "mean_kl_error",
    }
    for options, figure in changed.items():
        [other] = rows(*FAST, *options, "--codec", "int4")
        assert other[figure] != usual[figure], options
    [stepwise] = rows(*FAST, "--chunk", 30, "--codec", "int4")
    assert stepwise["mean_kl"] == pytest.approx(usual["mean_kl"], rel=0.05)


@hf
def test_a_config_that_says_no_cache_changes_nothing(rows, model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"use_cache": False}))
    options = (*FAST, "--codec", "int4")
    [expected], [found] = rows(*options), rows("--model", folder, *options)
    assert found["mean_kl"] == expected["mean_kl"]


@hf
def test_default_codecs_and_what_is_left_out(run, model):
    code, out, err = run("--model", model, "--tokens", 110, "--chunks", 1, "--json")
    assert code == 0
    names = [row["name"] for row in json.loads(out)]
    assert names[:4] == ["fp32", "bf16", "int8", "int8 hadamard"]
    assert "lm2/lm2" in names
    assert "kivi2 g128" not in names
    assert err.startswith("Note: left out are kivi4 g128, kivi2 g128: no query sees a packed token")


@hf
def test_token_by_token_packing(run, model):
    code, out, err = run(
        *("--model", model, *FAST[:4], "--sinks", 0, "--recent", 0, "--block", 1, "--json")
    )
    assert code == 0
    by_name = {row["name"]: row for row in json.loads(out)}
    assert {row["block"] for row in by_name.values()} == {1}
    assert by_name["int4"]["key"]["center"] is False
    assert "int4 plain" not in by_name
    assert "Note: left out is int4 plain: codec 'int4 plain' is the same as 'int4'" in err


@hf
def test_plot(run, model, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "quality.svg"
    assert run("--model", model, *FAST, "--codec", "int4", "--plot", file)[0] == 0
    assert "<svg" in file.read_text()


@hf
def test_needle(run, rows, model):
    options = ("--task", "needle", "--lengths", "300, 400", "--probes", 3)
    found = rows(*options, "--codec", "fp32", "--codec", "int4")
    assert [(row["name"], row["length"], row["probes"]) for row in found] == [
        ("fp32", 300, 3),
        ("fp32", 400, 3),
        ("int4", 300, 3),
        ("int4", 400, 3),
    ]
    assert found[0]["same_as_exact"] == 1
    code, out, err = run("--model", model, *options)
    assert (code, err) == (0, "")
    for word in ("fp32", "int8", "int4", "lm4/lm2", "retrieval of a code", "seed 0"):
        assert word in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tokens", 9), "--tokens is possible only with --task divergence or with --task greedy"),
        (("--seed", 1), "--seed is possible only with --task divergence or with --task needle"),
        (("--task", "needle"), "--task is possible only with --model.\n"),
        (("--model", "x", "--tensors", "y"), "--tensors is possible only without --model.\n"),
        (
            ("--model", "x", "--task", "needle", "--tensors", "y"),
            "--tensors is possible only without --model.\n",
        ),
        (
            ("--model", "x", "--probes", 9),
            "only with --task needle, not with --task divergence, the default.",
        ),
        (
            ("--model", "x", "--task", "divergence", "--probes", 9),
            "only with --task needle, not with --task divergence.",
        ),
        (("--probes", 9), "only with --task needle, not without --model."),
        (("--model", "x", "--task", "needle", "--last", 9), "only with --task divergence"),
        (("--model", "x", "--task", "needle", "--plot", "p.svg"), "--plot is possible only"),
        (("--model", "x", "--task", "needle", "--lengths", "9,x"), "numbers from 1 to"),
        (("--model", "x", "--task", "needle", "--lengths", "0"), "numbers from 1 to"),
        (("--model", "x", "--codec", "int5"), "codec must be fp32, bf16, one of"),
        (("--model", "x", "--block", 3, "--codec", "kivi2"), "block must be a multiple"),
        (("--model", "/nowhere/m.gguf"), "model must be a folder or a .gguf file"),
        (("--model", ""), "model must be a folder or a .gguf file, but '' is neither"),
        (("--model", "x", "--codec", "fp16"), "codec must be fp32, bf16, one of int8"),
        (("--model", "x", "--tokens", 50, "--codec", "int4"), "no query sees a packed token"),
        (("--model", "x", "--text", "/nowhere/text"), "text must be a file in UTF-8, but /nowhere"),
        (("--model", "x", "--text", ""), "'--text': it must be followed by a path"),
        (("--model", "x", "--resume", ""), "'--resume': it must be followed by a path"),
        (("--model", "x", "--scheduler", "local:0"), "scheduler must be local, local:N"),
        (("--codec", "fp32"), "codec must be fp16, one of int8"),
    ],
)
def test_errors_are_one_line(fails, arguments, message):
    assert message in fails(*arguments)


@hf
def test_errors_about_the_model_are_one_line(fails, model, tmp_path):
    short = tmp_path / "text"
    short.write_text("short")
    assert "text must have at least" in fails("--model", model, "--text", short)
    assert "lengths must leave room" in fails("--model", model, "--task", "needle", "--lengths", 20)
    assert "cannot be loaded" in fails("--model", tmp_path)
    many = ("--sinks", 10**12, "--codec", "fp32")
    assert "exact tokens that fit into memory" in fails("--model", model, *many)


@hf
@pytest.mark.parametrize("scheduler", [(), ("--scheduler", "local:1")])
def test_the_model_is_loaded_last_and_only_where_it_runs(
    rows, fails, model, tmp_path, monkeypatch, scheduler
):
    from kvcodec import evaluation

    if scheduler:
        pytest.importorskip("distributed")
    rows(*FAST, "--codec", "int8", "--resume", tmp_path / "results")
    loaded = []

    def load(path, *, weights=True):
        loaded.append(weights)
        raise ValueError("the model is asked for")

    monkeypatch.setattr(evaluation, "load_language_model", load)
    arguments = ("--model", model, *FAST, *scheduler)
    for wrong in (
        ("--codec", "fp16"),
        ("--tokens", 50, "--codec", "int4"),
        ("--text", tmp_path / "nothing"),
        ("--scheduler", "local:none"),
        ("--chunk", 7, "--resume", tmp_path / "results"),
    ):
        assert "asked for" not in fails(*arguments, *wrong)
    assert loaded == []
    assert "asked for" in fails(*arguments, "--resume", tmp_path / "new")
    assert loaded == [not scheduler]
    assert not (tmp_path / "new").exists()


@hf
@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_weights_that_are_no_numbers_are_named(fails, model, tmp_path, kind):
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(model, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    wrong = "model.layers.1.self_attn.k_proj.weight"
    weights[wrong][0, 0] = float(kind)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    message = fails("--model", folder, *FAST)
    assert f"cannot be run: its weights {wrong} are not all finite numbers" in message


@hf
def test_a_model_that_lacks_weights_is_refused(fails, model, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(model, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    lacking = "model.layers.0.mlp.up_proj.weight"
    del weights[lacking]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert f"lacks 1 of its weights, {lacking} among them" in fails("--model", folder, *FAST)


@pytest.mark.parametrize(
    ("module", "extra", "arguments"),
    [
        ("torch", "hf", ()),
        ("transformers", "hf", ()),
        ("gguf", "hf", ()),
        ("distributed", "cluster", ("--scheduler", "local")),
    ],
)
def test_missing_extras_are_named(tmp_path, module, extra, arguments):
    pytest.importorskip("torch")
    file = tmp_path / "model.gguf"
    file.write_bytes(b"")
    code = (
        f"import sys; sys.modules[{module!r}] = None; from kvcodec.cli import main; "
        f"main(['eval', '--model', {str(file)!r}, *{arguments!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
    assert f'pip install "kvcodec-cpu[{extra}]"' in done.stderr


def test_torch_is_imported_only_for_models():
    code = (
        "import sys; from kvcodec.cli import main\n"
        "try: main(['eval', '--codec', 'fp16'])\n"
        "except SystemExit: pass\n"
        "print([x for x in ('torch', 'transformers', 'distributed') if x in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.endswith("[]\n")


class Interrupted(Exception):
    pass


@hf
class TestResume:
    ARGUMENTS = (*FAST, "--codec", "int8", "--codec", "int4")

    @pytest.fixture
    def done(self, monkeypatch):
        """What was run: names of units and of codecs."""
        done = []
        run = Unit.run

        def counted(unit, model, pairs, advance):
            result = run(unit, model, pairs, advance)
            done.append((unit.name, tuple(pair.name for pair in pairs)))
            return result

        monkeypatch.setattr(Unit, "run", counted)
        return done

    def test_it_goes_on_where_it_stopped(self, rows, model, tmp_path, done, monkeypatch):
        expected = rows(*self.ARGUMENTS)
        done.clear()
        directory = tmp_path / "results"
        counted = Unit.run

        def interrupted(unit, *arguments):
            if unit.name == "chunk 1":
                raise Interrupted
            return counted(unit, *arguments)

        options = ["eval", "--model", model, *self.ARGUMENTS, "--resume", directory]
        with monkeypatch.context() as patch:
            patch.setattr(Unit, "run", interrupted)
            with pytest.raises(Interrupted):
                main(list(map(str, options)))
        assert done == [("chunk 0", ("int8", "int4"))]
        found = rows(*self.ARGUMENTS, "--resume", directory)
        assert done[1:] == [("chunk 1", ("int8", "int4"))]
        for row, other in zip(found, expected, strict=True):
            del row["tokens_per_second"], other["tokens_per_second"]
        assert found == expected
        rows(*self.ARGUMENTS, "--resume", directory, "--codec", "lm2", "--seed", 5)
        assert done[2:] == [("chunk 0", ("lm2",)), ("chunk 1", ("lm2",))]

    def test_needle(self, rows, tmp_path, done):
        options = ("--task", "needle", "--lengths", 300, "--probes", 12, "--codec", "int8")
        first = rows(*options, "--resume", tmp_path / "results")
        assert len(done) == 10
        assert rows(*options, "--resume", tmp_path / "results") == first
        assert len(done) == 10

    def test_another_measurement_is_refused(self, rows, fails, model, tmp_path):
        directory = tmp_path / "results"
        rows(*self.ARGUMENTS, "--resume", directory)
        arguments = ("--model", model, *self.ARGUMENTS, "--resume", directory)
        for option, value in (
            ("recent", 9),
            ("sinks", 1),
            ("tokens", 121),
            ("chunks", 3),
            ("chunk", 64),
            ("last", 50),
            ("block", 16),
        ):
            message = fails(*arguments, f"--{option}", value)
            assert f"resume must be a directory of the same measurement, but in {directory}" in (
                message
            )
            assert f"{option} is " in message
        task = ("--task", "needle", "--lengths", 300, "--resume", directory)
        assert " task is 'divergence' instead of 'needle'" in fails("--model", model, *task)
        text = tmp_path / "text"
        text.write_text("other " * 200)
        assert " text is " in fails(*arguments, "--text", text)
        assert "something else" in fails(*arguments[:-1], tmp_path)

    def test_another_model_is_refused(self, rows, fails, tmp_path, capsys):
        from hf_text import saved

        rows(*self.ARGUMENTS, "--resume", tmp_path / "results")
        other = saved(tmp_path / "other", "Qwen3")
        capsys.readouterr()  # what saving says
        assert " model is " in fails(
            "--model", other, *self.ARGUMENTS, "--resume", tmp_path / "results"
        )

    def test_damaged_files_are_named(self, rows, fails, model, tmp_path):
        directory = tmp_path / "results"
        rows(*self.ARGUMENTS, "--resume", directory)
        for file in list(directory.iterdir()):
            content = file.read_bytes()
            for damaged in (content[:-5], b"[]"):
                file.write_bytes(damaged)
                message = fails("--model", model, *self.ARGUMENTS, "--resume", directory)
                assert f"the damaged file {file}; delete it" in message
            file.write_bytes(content)

    @pytest.mark.parametrize(
        ("options", "changes"),
        [
            (
                ("--tokens", 120, "--chunks", 1, "--last", 50),
                [
                    {"codec": "lm2"},
                    {"tokens": 119},
                    {"kl": []},
                    {"kl": [0.5] * 49},
                    {"log_probability": [None] * 50},
                    {"same_top": [1] * 50},
                    {"seconds": 0.0},
                    {"left_out": "0"},
                    {"key": []},
                    {"more": 1},
                ],
            ),
            (
                ("--task", "needle", "--lengths", 300, "--probes", 1),
                [{"found": []}, {"found": [1]}, {"found": "t"}, {"more": 1}],
            ),
        ],
    )
    def test_results_that_cannot_be_any_are_named(
        self, rows, fails, model, tmp_path, options, changes
    ):
        arguments = (*options, "--codec", "int4", "--resume", tmp_path / "results")
        rows(*arguments)
        [file] = set((tmp_path / "results").glob("*int4*"))
        stored = json.loads(file.read_text())
        results = [stored["result"] | change for change in changes]
        for damaged in (None, [], {}, *results):
            file.write_text(json.dumps(_sealed(stored["name"], damaged)))
            message = fails("--model", model, *arguments)
            assert f"the damaged file {file}; delete it" in message, damaged
        file.write_text(json.dumps(stored))
        rows(*arguments)


def test_a_store_keeps_names_apart(tmp_path):
    store = Store(tmp_path / "new" / "store", {"a": 1})
    assert not (tmp_path / "new").exists()
    store.begin()
    store.put("lm4/lm2", [1])
    store.put("lm4-lm2", {"x": float("inf")})
    again = Store(tmp_path / "new" / "store", {"a": 1})
    assert again.get("lm4/lm2") == [1]
    assert again.get("lm4-lm2") == {"x": float("inf")}
    assert again.get("other") is None
    with pytest.raises(ValueError, match="a is 1 instead of 2"):
        Store(tmp_path / "new" / "store", {"a": 2})


@pytest.mark.parametrize("change", [{"result": 5}, {"result": {"kl": [0.5]}}, {"name": "other"}])
def test_a_store_tells_damage_that_is_json(tmp_path, change):
    store = Store(tmp_path / "store", {})
    store.begin()
    store.put("piece", {"kl": [0.25]})
    [file] = [file for file in (tmp_path / "store").iterdir() if file.name.startswith("piece")]
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=r"^resume holds the damaged file .*; delete it\.$"):
        store.get("piece")


def test_digests_see_names_and_contents(tmp_path):
    seen = {file_digest(tmp_path)}
    (tmp_path / "a").write_text("x")
    seen.add(file_digest(tmp_path))
    (tmp_path / "a").rename(tmp_path / "b")
    seen.add(file_digest(tmp_path))
    (tmp_path / "b").write_text("y")
    seen.add(file_digest(tmp_path))
    assert len(seen) == 4
    assert file_digest(tmp_path / "b") == (
        "a1fce4363854ff888cff4b8e7875d600c2682390412a8cf79b37d0b11148b0fa"
    )
