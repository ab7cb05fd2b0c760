"""The tool that steps through attention: what it counts, and what it says where it cannot."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import kvcodec as kv
from kvcodec import _backend

TOOL = Path(__file__).resolve().parent.parent / "tools" / "trace_tiles.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("trace_tiles", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules["trace_tiles"] = module
    spec.loader.exec_module(module)
    return module


def test_cases_are_codecs(tool):
    assert len({case.name for case in tool.CASES}) == len(tool.CASES)
    assert {case.codec for case in tool.CASES} <= set(kv.PRESETS)


def test_unknown_cases_and_missing_programs_are_one_line(tool, monkeypatch):
    done = subprocess.run(
        [sys.executable, str(TOOL), "--case", "int5"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: --case must be one of int4, int8, ")
    assert done.stderr.count("\n") == 1
    monkeypatch.setattr(tool.shutil, "which", lambda name: None)
    with pytest.raises(tool.Unable, match="needs Linux on x86-64 and objdump"):
        tool.library_of_kernels()


def test_a_tile_is_counted(tool, monkeypatch):
    """As many products as codes times rows, by whatever instructions there are."""
    if not kv.get_config()["available_simd"]:
        pytest.skip("the fast path is not built")
    monkeypatch.setattr(tool, "SHORT", 64)
    monkeypatch.setattr(tool, "LONG", 128)
    case = next(case for case in tool.CASES if case.name == "int4, 8 query heads")
    with kv.config_context(backend="fast"):
        try:
            library = tool.library_of_kernels()
            row = tool.row_of(case, library, tool.kinds_of(library))
        except tool.Unable as error:
            pytest.skip(str(error))
        if _backend.resolve().__name__.endswith("_kernels"):
            pytest.skip("without vector instructions that are counted")
    instructions, vector, one, cycles, nbytes = (int(x.replace(",", "")) for x in row)
    assert 0 < one < vector < instructions < 64 * 128 * case.rows * 2
    assert cycles >= vector // 2
    bits = sum(kv.codec("int4", side=side).bits_per_value(128) for side in ("key", "value"))
    assert nbytes == int(bits * 128 * 64 / 8)
