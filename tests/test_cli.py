"""The command line: what it prints and writes, and that errors are one line and exit code 2."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import kvcodec as kv
from kvcodec.cli import main

KEYS = [
    *("name", "key", "value", "bits_per_value", "key_relative_mse", "value_relative_mse"),
    *("mean_kl", "output_relative_error", "output_cosine", "bytes_per_1000_tokens"),
    *("sinks", "recent"),
]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A layer of the shipped sample, cut to 200 tokens."""
    sample = kv.load_sample()
    path = tmp_path_factory.mktemp("tensors") / "tensors.npz"
    few = sample.positions < 200
    np.savez(
        path,
        q=sample.q[3, :, few].swapaxes(0, 1),
        k=sample.k[3, :, :200],
        v=sample.v[3, :, :200],
        positions=sample.positions[few],
    )
    return path


@pytest.fixture(scope="module")
def odd_file(tmp_path_factory):
    """Keys and values of 100 channels, of which there is no Hadamard matrix, and one query."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("tensors") / "odd.npz"
    k, v = rng.standard_normal((2, 1, 180, 100))
    np.savez(path, q=rng.standard_normal((2, 1, 100)), k=k, v=v)
    return path


def in_a_process(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_version(run):
    assert run("--version") == (0, f"kvcodec, version {kv.__version__}\n", "")


@pytest.mark.parametrize("arguments", [(), ("--help",), ("eval", "--help"), ("info", "--help")])
def test_help(run, arguments):
    code, out, err = run(*arguments)
    assert code == 0
    assert out.startswith("Usage: kvcodec")
    assert err == ""


def test_info(run):
    code, out, _ = run("info")
    assert code == 0
    for name in [*kv.get_config(), *kv.PRESETS]:
        assert f"{name}: " in out


@pytest.mark.parametrize("arguments", [("--json",), ("--json", "-")])
def test_info_as_json(run, arguments):
    code, out, _ = run("info", *arguments)
    assert code == 0
    facts = json.loads(out)
    assert facts.pop("presets") == kv.PRESETS
    assert facts == kv.get_config()


def test_info_to_a_file(run, tmp_path):
    code, out, _ = run("info", "--json", tmp_path / "info.json")
    assert code == 0
    assert "version: " in out
    assert json.loads((tmp_path / "info.json").read_text())["version"] == kv.__version__


def test_eval_prints_a_table(run, file):
    code, out, err = run("eval", "--tensors", file, "--codec", "int4", "--codec", "lm4/lm2")
    assert code == 0
    assert err == ""
    assert "1 layers, 3 KV heads, 200 tokens; sinks 4, recent 32" in " ".join(out.split())
    assert "lm4/lm2" in out
    assert "…" not in out


def test_eval_prints_json_instead(run, file):
    code, out, err = run(
        *("eval", "--tensors", file, "--json", "--codec", "int8", "--codec", "int8"),
        *("--codec", "fp16", "--sinks", 2, "--recent", 16),
    )
    assert code == 0
    assert err == ""
    rows = json.loads(out)
    assert [row["name"] for row in rows] == ["int8", "fp16"]
    assert all(list(row) == KEYS for row in rows)
    assert all((row["sinks"], row["recent"]) == (2, 16) for row in rows)


def test_eval_measures_the_same_codecs_once(run, file):
    names = ("lm4", "lm4/lm4", "int4/int4", "int4", "fp16")
    words = [word for name in names for word in ("--codec", name)]
    code, out, _ = run("eval", "--tensors", file, *words, "--json")
    assert code == 0
    assert [row["name"] for row in json.loads(out)] == ["lm4", "int4/int4", "fp16"]


def test_eval_writes_files(run, file, tmp_path):
    code, out, _ = run(
        *("eval", "--tensors", file, "--codec", "int4"),
        *("--json", tmp_path / "rows.json", "--plot", tmp_path / "quality.svg"),
    )
    assert code == 0
    assert "mean KL" in out
    assert json.loads((tmp_path / "rows.json").read_text())[0]["name"] == "int4"
    assert "<svg" in (tmp_path / "quality.svg").read_text()


def test_eval_measures_the_shipped_sample(run):
    code, out, _ = run("eval", "--codec", "fp16", "--json", "-")
    assert code == 0
    [row] = json.loads(out)
    assert row["mean_kl"] == row["output_relative_error"] == 0
    assert row["bytes_per_1000_tokens"] == 1000 * 4 * 3 * 128 * 2


def test_eval_leaves_out_what_is_not_possible(run, odd_file):
    code, out, err = run("eval", "--tensors", odd_file, "--json")
    assert code == 0
    names = [row["name"] for row in json.loads(out)]
    assert names == ["fp16", "int8", "int4 unrotated", "kivi4", "kivi4 g128", "kivi2", "kivi2 g128"]
    notes = err.splitlines()
    assert notes[0].startswith("Note: left out are int4 plain, int4 centered, int4, int3 plain, ")
    assert notes[1].startswith("Note: left out are lm4/lm4 plain, ")
    assert all(note.endswith("but 100 was given.") for note in notes)


def test_eval_says_where_keys_are_not_equalized(run, file, tmp_path):
    with np.load(file) as archive:
        np.savez(tmp_path / "late.npz", q=archive["q"][:, -1:], k=archive["k"], v=archive["v"])
    code, _, err = run(
        *("eval", "--tensors", tmp_path / "late.npz", "--codec", "int4"),
        *("--codec", "lm2 centered", "--codec", "int8"),
    )
    assert code == 0
    assert err.startswith("Note: the keys of int4 are not equalized")
    assert "queries of a file without positions are those of the newest tokens" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("other",), "No such command 'other'"),
        (("--other",), "No such option"),
        (("info", "--other"), "No such option"),
        (("info", "more"), "unexpected extra argument"),
        (("eval", "--codec"), "requires an argument"),
        (("eval", "--sinks", "-1"), "-1 is not in the range"),
        (("eval", "--recent", "many"), "'many' is not a valid integer"),
        (("eval", "--codec", "int5"), "codec must be fp16, one of int8"),
        (("eval", "--codec", "bf16"), "codec must be fp16, one of int8"),
        (("eval", "--codec", "int8", "--recent", "5000"), "no query sees a packed token"),
        (("eval", "--codec", "int8", "--json", "/nowhere/rows.json"), "/nowhere is no folder"),
        (("info", "--json", "/nowhere/info.json"), "/nowhere is no folder"),
        (("eval", "--plot", "/nowhere/quality.png"), "/nowhere is no folder"),
        (("eval", "--plot", "quality.gif"), "plot must be a file ending in .pdf, .png, .svg"),
        (("eval", "--tensors", "/nowhere/tensors.npz"), "tensors file /nowhere/tensors.npz cannot"),
        *(
            ((command, option, ""), f"'{option}': it must be followed by a path, but an empty one")
            for command, option in (
                *(("eval", "--json"), ("eval", "--plot"), ("eval", "--tensors")),
                *(("info", "--json"), ("bench", "--json"), ("bench", "--plot")),
                *(("bench", "--llama"), ("bench", "--ik-llama")),
            )
        ),
        (("eval", "--tensors", __file__), "it is no npz file"),
    ],
)
def test_errors_are_one_line(fails, arguments, message):
    assert message in fails(*arguments)


def test_a_folder_is_no_file(fails, tmp_path):
    assert "it is a folder" in fails("eval", "--codec", "int8", "--json", tmp_path)
    assert "cannot be read" in fails("eval", "--tensors", tmp_path)


def test_a_codec_that_is_asked_for_must_be_possible(fails, odd_file):
    message = fails("eval", "--tensors", odd_file, "--codec", "int8", "--codec", "int4")
    assert "int4 cannot be evaluated: the head_dim of k" in message


def test_no_codec_is_possible(run):
    code, out, err = run("eval", "--recent", 5000)
    assert code == 2
    assert out == ""
    assert err.splitlines()[-1].startswith("Error: no codec can be evaluated on sample of")


def test_missing_matplotlib_is_told_before_anything_is_computed(fails, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    message = fails("eval", "--tensors", "/nowhere/tensors.npz", "--plot", tmp_path / "q.png")
    assert 'pip install "kvcodec-cpu[plot]"' in message


def test_other_exceptions_are_not_hidden(monkeypatch):
    def fail():
        raise TypeError("a mistake of the package")

    monkeypatch.setattr("kvcodec.cli.get_config", fail)
    with pytest.raises(TypeError, match="a mistake of the package"):
        main(["info"])


@pytest.mark.parametrize(
    ("name", "value"),
    [("KVCODEC_BACKEND", "gpu"), ("KVCODEC_SIMD", "sse"), ("KVCODEC_NUM_THREADS", "0")],
)
@pytest.mark.parametrize("command", ["info", "eval"])
def test_a_wrong_environment_is_one_line(command, name, value):
    done = in_a_process("-m", "kvcodec", command, **{name: value})
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"Error: {name} must be ")
    assert done.stderr.count("\n") == 1


def test_a_backend_that_is_not_there_is_one_line(fails, monkeypatch):
    def fail():
        raise RuntimeError("backend 'fast' was asked for, but is not there.")

    monkeypatch.setattr("kvcodec.cli_output.get_config", fail)
    assert "backend 'fast' was asked for" in fails("info")


def test_heavy_modules_are_imported_when_used():
    code = (
        "import sys, kvcodec.cli; "
        "print([name for name in ('matplotlib', 'rich', 'scipy') if name in sys.modules])"
    )
    assert in_a_process("-c", code).stdout == "[]\n"
