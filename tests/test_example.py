"""The example of the documentation runs and does what it says."""

import runpy
from pathlib import Path

from kvcodec.testing import assert_same_bits

EXAMPLE = Path(__file__).parents[1] / "docs" / "decode_loop.py"


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
