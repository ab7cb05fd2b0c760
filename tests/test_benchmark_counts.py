"""The tool that counts instructions: how it compares, and what it says where it cannot count."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

import kvcodec as kv

TOOL = Path(__file__).resolve().parent.parent / "tools" / "count_instructions.py"
DUMP = """version: 1
desc: Trigger: Client Request: encode int4 key
events: Ir
summary: 1234
totals: 1234
"""


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("count_instructions", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_missing_valgrind_is_one_line(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    done = subprocess.run(
        [sys.executable, str(TOOL)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "Error: valgrind is not installed, which counts the instructions.\n"


def test_missing_kernels_are_one_line(tool, monkeypatch):
    monkeypatch.setattr(tool.shutil, "which", lambda name: name)
    monkeypatch.setattr(tool.kv, "get_config", lambda: {"available_simd": ["baseline"]})
    with pytest.raises(tool.Unable, match="AVX2 kernels are not built") as error:
        tool.check_tools()
    assert error.value.exit_code == 2


def test_calls_have_figures(tool):
    names = [name for name, _ in tool.calls()]
    assert len(set(names)) == len(names) == 4 + 2 * len(kv.PRESETS) + 1
    known = json.loads(tool.FIGURES.read_text())
    assert list(known) == ["compiler", "instructions"]
    assert list(known["instructions"]) == names
    assert all(isinstance(figure, int) and figure > 0 for figure in known["instructions"].values())


def test_calls_run(tool):
    for _, call in tool.calls():
        call()


def test_dumps_are_read(tool):
    assert tool.parse(DUMP) == ("encode int4 key", 1234)
    assert (
        tool.parse(DUMP.replace("Client Request: encode int4 key", "Program termination")) is None
    )


def test_a_call_without_a_figure_is_told(tool):
    figures = dict.fromkeys((name for name, _ in tool.calls()), 1)
    assert list(tool.in_order(dict(reversed(figures.items())))) == list(figures)
    with pytest.raises(tool.Unable, match=r"no instructions were counted for fwht\."):
        tool.in_order(figures | {"fwht": 0})


@pytest.mark.parametrize(
    ("found", "line", "failed"),
    [
        (1029, "+2.90%", False),
        (1031, "+3.10%  MORE than before", True),
        (960, "-4.00%  fewer", False),
        (1000, "+0.00%", False),
    ],
)
def test_more_instructions_than_before_fail(tool, found, line, failed):
    lines, more = tool.compare({"fwht": found, "other": 5}, {"fwht": 1000})
    assert lines[0].endswith(line)
    assert lines[1].endswith("new")
    assert more is failed
