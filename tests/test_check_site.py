"""The checker of the built documentation finds each kind of fault, and none in a whole site."""

import runpy
from pathlib import Path

import pytest
from click.testing import CliRunner

TOOL = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "check_site.py"))
WHOLE = {
    "index.html": """
        <link rel="stylesheet" href="_static/style.css?v=1"><link rel="next" href="guides/a.html">
        <script src="_static/code.js"></script><script>var x = "https://example.org/";</script>
        <a href="guides/a.html#here">a</a> <a href="#">top</a> <a href="https://example.org/x">x</a>
        <img src="data:image/png;base64,AAAA"> <a href="guides/with%20space.html">space</a>
        <svg><use href="#shape"></use><path id="shape"></path></svg>""",
    "guides/a.html": '<p id="here"><a href="../index.html">up</a><img src="../_static/a.png"></p>',
    "guides/with space.html": '<a href="a.html#%68ere">a</a>',
    "_static/style.css": "/* url(https://example.org/a.woff) */ p { background: url('a.png') }",
    "_static/code.js": "// https://example.org\nlet there = 'https://example.org/' + 'x';",
    "_static/a.png": "",
}
FAULTS = {
    "a page that is not there": '<a href="b.html">b</a>',
    "a place that is not there": '<a href="a.html#there">a</a>',
    "a place of the same page": '<a href="#nowhere">a</a>',
    "another case": '<a href="../Guides/a.html">a</a>',
    "a folder": '<a href="../guides/">a</a>',
    "the root": '<a href="/guides/a.html">a</a>',
    "a link without https": '<a href="http://example.org/">x</a>',
    "a script elsewhere": '<script src="https://example.org/x.js"></script>',
    "the scheme of the page": '<script src="//example.org/x.js"></script>',
    "a style sheet elsewhere": '<link rel="stylesheet" href="https://example.org/x.css">',
    "a connection ahead of time": '<link rel="preconnect" href="https://example.org">',
    "a font in a style": "<style>@font-face { src: url(https://example.org/x.woff2) }</style>",
    "an import in a style": "<style>@import 'https://example.org/x.css';</style>",
    "a style of an element": '<p style="background: url(https://example.org/x.png)"></p>',
    "an image elsewhere": '<img src="https://example.org/x.png">',
    "an image of several": '<img srcset="../_static/a.png 1x, https://example.org/x.png 2x">',
    "an image that is not there": '<img src="../_static/b.png">',
    "a frame": '<iframe src="https://example.org/"></iframe>',
    "an import in a script": '<script>import x from "https://example.org/x.js";</script>',
    "a script that fetches": '<script>fetch("https://example.org/x.json")</script>',
    "a form": '<form action="b.html"></form>',
}


@pytest.fixture
def site(tmp_path):
    """A site without a fault."""
    for name, text in WHOLE.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def run(folder):
    """Exit code and lines of the tool."""
    result = CliRunner().invoke(TOOL["main"], [str(folder)])
    return result.exit_code, result.output.splitlines()


def test_a_whole_site_has_no_faults(site):
    code, lines = run(site)
    assert code == 0, lines
    assert lines == ["3 pages, 12 references, 0 faults."]


@pytest.mark.parametrize("text", FAULTS.values(), ids=FAULTS)
def test_each_fault_is_found(site, text):
    (site / "guides" / "with space.html").write_text(text, "utf-8")
    code, lines = run(site)
    assert code == 1
    assert [line.split(":")[0] for line in lines[:-1]] == ["guides/with space.html"]


def test_style_sheets_and_scripts_of_the_site_are_read(site):
    (site / "_static" / "style.css").write_text("p { src: url(https://example.org/x.woff) }")
    (site / "_static" / "code.js").write_text('importScripts("//example.org/x.js")')
    code, lines = run(site)
    assert code == 1
    assert len(lines) == 3


def test_a_folder_without_pages_is_not_called_whole(tmp_path):
    code, lines = run(tmp_path)
    assert code == 2
    assert "must hold pages" in lines[-1]
