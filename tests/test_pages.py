"""What the pages say of the package is so: commands, files, extras, chapters."""

import configparser
import doctest
import re
import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvcodec.cli import main
from kvcodec.evaluation import codec_pair

ROOT = Path(__file__).parents[1]
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "algorithms").glob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
FOLDERS = "docs|kvcodec|tests|tools"
# What a build or the reader makes.
MADE = re.compile(r"docs/(_build|api/generated)")
CHAPTERS = [path for path in PAGES if path.parent.name == "algorithms" and path.stem != "index"]
SECTIONS = ("Cost", "Failure modes", "The fast path", "Sources")


def commands(text):
    """The commands of kvcodec that a page shows, each as a list of words."""
    for block in re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            for command in line.split("#")[0].split("&&"):
                words = shlex.split(command)
                if words and words[0].rpartition("/")[2] == "kvcodec":
                    yield words[1:]


def problems(words):
    """What is wrong with a command."""
    command = main.commands.get(words[0])
    if command is None:
        yield f"no command {words[0]}"
        return
    options = {name: option for option in command.params for name in option.opts}
    rest = iter(words[1:])
    for word in rest:
        option = options.get(word)
        if option is None:
            yield f"no option {word} of {words[0]}"
        elif not option.is_flag:
            value = next(rest)
            if isinstance(option.type, (click.Choice, click.types.IntParamType)):
                option.type.convert(value, option, None)
            elif word == "--codec":
                codec_pair(value)


@each_page
def test_commands_exist(page):
    text = page.read_text(encoding="utf-8")
    assert [problem for words in commands(text) for problem in problems(words)] == []


def test_commands_that_do_not_exist_are_seen():
    text = "```bash\nkvcodec eval --codec int4   # a comment\n.venv/bin/kvcodec bench --peer\n```"
    found = list(commands(text))
    assert found == [["eval", "--codec", "int4"], ["bench", "--peer"]]
    assert [list(problems(words)) for words in found] == [[], ["no option --peer of bench"]]
    with pytest.raises(ValueError, match="codec must be"):
        list(problems(["eval", "--codec", "int5"]))


@each_page
def test_files_that_are_named_exist(page):
    text = page.read_text(encoding="utf-8")
    for name in re.findall(rf"`((?:{FOLDERS})/[\w/.-]+)`", text):
        assert MADE.match(name) or (ROOT / name).exists(), name


def test_extras_are_those_of_the_package():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    text = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    [table] = re.findall(r"^\| extra \| for \|\n\|---\|---\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    named = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(named) == sorted(config["options.extras_require"])


@pytest.mark.parametrize("page", CHAPTERS, ids=lambda page: page.stem)
def test_chapters_are_complete(page):
    text = page.read_text(encoding="utf-8")
    titles = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert [title for title in SECTIONS if title not in titles] == []
    assert "{literalinclude} ../../kvcodec/reference/" in text
    assert "$" in text


def test_measuring_tensors_of_ones_own(tmp_path, monkeypatch):
    """As the page on the choice of a mode shows it: write them, then give them to the command."""
    page = ROOT / "docs" / "choosing.md"
    monkeypatch.chdir(tmp_path)
    assert doctest.testfile(str(page), module_relative=False).failed == 0
    [words] = (w for w in commands(page.read_text(encoding="utf-8")) if "--tensors" in w)
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0
    assert "lm4/lm2" in result.output
