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
    """More than a vector instruction for each 64 products, and less than one for each."""
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
    products = 2 * 64 * 128 * case.rows
    assert 0 < one < cycles < vector < instructions < products
    assert instructions > products / 64 / 16
    page = tool.prepared(case, 64)[0]._sequences[0][0]
    arrays = [*page.keys.pages[0].values(), *page.values.pages[0].values()]
    assert nbytes == sum(array.nbytes // array.shape[1] for array in arrays)


LISTING = """
  30e14:\tvmovq  %xmm30,%rcx
  30e1a:\tvpbroadcastd (%r8),%zmm20
  30e20:\tadd    $0x8,%r8
  30e3c:\tvpermb %zmm31,%zmm27,%zmm21
  30e49:\tvpdpbusd %zmm20,%zmm21,%zmm0
  30e50:\tvpmovdb %zmm0,(%rax)
  30e56:\tvpbroadcastd %eax,%zmm1
"""


def test_ports_are_those_of_the_instructions(tool, monkeypatch):
    monkeypatch.setattr(
        tool.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, LISTING)
    )
    assert tool.kinds_of(Path("library")) == {
        0x30E3C: (1, 0),
        0x30E49: (0, 1),
        0x30E50: (2, 0),
        0x30E56: (1, 0),
    }
