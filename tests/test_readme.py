"""The README, its tables and its figure say what the package and the benchmark give."""

import code
import json
import re
import runpy
from copy import deepcopy
from pathlib import Path

import pytest

from kvcodec.evaluation import codec_pair

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
SPEED = runpy.run_path(str(ROOT / "tools" / "speed_tables.py"))
DRAWING = runpy.run_path(str(ROOT / "tools" / "draw_rate_distortion.py"))
EXAMPLE = re.search(
    r"In twelve lines\n\n```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL
)[1]
LINK = re.compile(r"\]\(([^)#]+)(?:#([^)]+))?\)")


def test_tables_of_speed_are_those_of_the_benchmark():
    for path, text in SPEED["updated"]().items():
        assert path.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(("table", "name"), [("readme_table", "README"), ("page_table", "PAGE")])
def test_other_times_give_other_tables(table, name):
    results = json.loads(SPEED["MEASURED"].read_text(encoding="utf-8"))
    changed = deepcopy(results)
    for row in changed["measurements"]:
        row["relative"] = (row["relative"] or 0) + 0.01
    text = SPEED[name].read_text(encoding="utf-8")
    assert SPEED["with_table"](text, SPEED[table](results)) == text
    assert SPEED["with_table"](text, SPEED[table](changed)) != text


def test_the_figure_shows_what_the_codecs_give():
    drawn = DRAWING["drawn_points"](DRAWING["FIGURE"])
    assert list(drawn) == [codec_pair(name).name for name in DRAWING["NAMES"] + DRAWING["PLAIN"]]
    some = DRAWING["measure"](["int4", "lm4/lm2", "kivi2"])
    bits, error, divergence = some["int4"]
    assert DRAWING["same"](some, {name: drawn[name] for name in some})
    assert not DRAWING["same"](some | {"int4": (bits, error, 1.01 * divergence)}, drawn)
    assert not DRAWING["same"](some, drawn)


def test_the_figure_can_be_drawn(tmp_path):
    points = DRAWING["drawn_points"](DRAWING["FIGURE"])
    DRAWING["draw"](points, tmp_path / "figure.svg")
    assert DRAWING["drawn_points"](tmp_path / "figure.svg") == points


def test_the_first_example_has_twelve_lines():
    assert sum(bool(line) for line in EXAMPLE.split("\n")) == 12


def test_the_first_example_prints_what_it_says(capsys):
    exec(compile(EXAMPLE, "README.md", "exec"), {})
    printed = capsys.readouterr().out.split("\n")[:-1]
    said = re.findall(r"^print\(.*\)  # (.*)$", EXAMPLE, re.MULTILINE)
    assert len(printed) == len(said) == 2
    assert all(text.startswith(line) for line, text in zip(printed, said, strict=True))


def test_the_first_example_can_be_pasted():
    """An interactive interpreter needs an empty line after a block."""
    interpreter = code.InteractiveConsole({})
    unfinished = [interpreter.push(line) for line in EXAMPLE.strip("\n").split("\n")]
    assert not unfinished[-1]
    assert "cache" in interpreter.locals


@pytest.mark.hf
def test_the_example_of_transformers_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from hf_text import saved

    [example] = re.findall(
        r"```\n(from transformers import .*?)```", README.read_text(encoding="utf-8"), re.DOTALL
    )
    saved(tmp_path / "folder")
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["output"].shape[1] > names["inputs"]["input_ids"].shape[1]
    assert capsys.readouterr().out


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_to_files(name):
    for target, place in LINK.findall((ROOT / name).read_text(encoding="utf-8")):
        if not target.startswith("https://"):
            assert not place
            assert (ROOT / target).is_file(), target
