"""The examples of the documentation run and do what they say."""

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import kvcodec as kv
from kvcodec.testing import assert_same_bits

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "docs" / "decode_loop.py"
COMPILER = next(filter(shutil.which, ("cc", "gcc", "clang")), None)


def test_the_example_saves_a_prompt_and_branches_two_continuations(capsys):
    names = runpy.run_path(str(EXAMPLE))
    prompt, continued, branch = len(names["prompt"]), names["cache"], names["branch"]
    assert len(names["greedy"]) == len(names["other"]) == 10
    assert names["greedy"] == names["again"] != names["other"]
    assert len(continued) == len(branch) == len(names["loaded"]) == prompt + 9
    assert_same_bits(names["loaded"].keys(0), continued.keys(0))
    assert_same_bits(branch.keys(0)[:, :, :prompt], continued.keys(0)[:, :, :prompt])
    assert (branch.keys(0)[:, :, prompt:] != continued.keys(0)[:, :, prompt:]).any()
    assert repr(continued) in capsys.readouterr().out


@pytest.fixture(scope="module")
def lloyd_max_in_c(tmp_path_factory):
    """The program of docs/lloyd_max.c."""
    folder = tmp_path_factory.mktemp("c")
    tool = [sys.executable, ROOT / "tools" / "gen_codebooks.py"]
    subprocess.run([*tool, "--c-header", folder / "kvcodec_codebooks.h"], check=True)
    flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-I", folder]
    program = folder / "lloyd_max"
    source = ROOT / "docs" / "lloyd_max.c"
    subprocess.run([COMPILER, *flags, source, "-o", program, "-lm"], check=True)
    return program


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
@pytest.mark.parametrize("seed", range(8))
def test_the_example_in_c_finds_the_codes_of_the_package(lloyd_max_in_c, seed):
    x = np.random.default_rng(seed).standard_normal(128, dtype=np.float32) * 10.0 ** (seed - 4)
    x = kv.srht(x) if seed else np.zeros(128, dtype=np.float32)
    given = "\n".join(f"{number:.9g}" for number in x)
    result = subprocess.run(
        [lloyd_max_in_c], input=given, capture_output=True, text=True, check=True
    )
    first, *lines = result.stdout.splitlines()
    codes, scale = kv.quantize_lloyd_max(x, bits=4)
    assert np.float32(first) == scale
    assert [int(line.split()[0]) for line in lines] == codes.tolist()
    values = np.array([line.split()[1] for line in lines], dtype=np.float32)
    assert_same_bits(values + 0, kv.dequantize_lloyd_max(codes, scale, bits=4) + 0)
