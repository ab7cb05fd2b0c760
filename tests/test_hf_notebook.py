"""The code of the notebook on a model runs, and gives the outputs that are stored in it."""

import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from hf_text import smollm2

pytestmark = pytest.mark.hf
NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebooks" / "language-model.ipynb"
NUMBER = re.compile(r"\d+\.\d+")


def cells():
    """Code, tags and stored text of each cell of code."""
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            stored = "".join(
                "".join(output["text"]) for output in cell["outputs"] if "text" in output
            )
            yield "".join(cell["source"]), set(cell["metadata"].get("tags", ())), stored


def run(code, names):
    """What a cell prints."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(code, str(NOTEBOOK), "exec"), names)
    return printed.getvalue()


def assert_close(found, stored):
    """The same words; numbers within a quarter, since other processors round otherwise."""
    assert NUMBER.sub("", found).split() == NUMBER.sub("", stored).split()
    for one, other in zip(NUMBER.findall(found), NUMBER.findall(stored), strict=True):
        assert float(one) == pytest.approx(float(other), rel=0.25, abs=1e-5)


@pytest.mark.filterwarnings("ignore")  # what Transformers warns of depends on its release
def test_the_notebook_gives_the_outputs_that_it_has():
    smollm2()  # skips where the model is not installed
    threads = torch.get_num_threads()
    names = {}
    compared = 0
    try:
        for code, tags, stored in cells():
            if "figure" in tags:
                continue
            found = run(code, names)
            if "deterministic" in tags:
                assert found == stored
            elif "approximate" in tags:
                assert_close(found, stored)
            compared += bool(tags)
    finally:
        torch.set_num_threads(threads)
    assert compared >= 5


def test_the_notebook_is_stored_with_its_figure():
    [figure] = (
        output["data"]
        for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
        for output in cell.get("outputs", ())
        if "image/svg+xml" in output.get("data", ())
    )
    assert figure
