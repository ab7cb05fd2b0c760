"""How Sphinx builds the documentation; `sphinx-build -W -b html docs docs/_build/html`.

Building needs the extra `docs`, but no compiler and no network. With KVCODEC_DOCS_INTERSPHINX=1
names of Python, NumPy and SciPy become links, for which their inventories are fetched.
"""

import importlib
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_ext")]
# Notebooks run in processes of their own, which find the package by this.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [*sys.path[:2], *filter(None, [os.environ.get("PYTHONPATH")])]
)

from kvcodec import __version__  # noqa: E402

project = "kvcodec"
author = "the kvcodec developers"
copyright = f"2026, {author}"
version = release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "numpydoc",
    "sphinx_click",
    "sphinx_copybutton",
    "sphinx_design",
    "mathml",
]
exclude_patterns = ["_build", "jupyter_execute"]
templates_path = ["_templates"]
default_role = "autolink"
add_module_names = False

intersphinx_mapping = {}
if os.environ.get("KVCODEC_DOCS_INTERSPHINX") == "1":
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "numpy": ("https://numpy.org/doc/stable", None),
        "scipy": ("https://docs.scipy.org/doc/scipy", None),
    }

smartquotes_action = "qe"  # quotes and ellipses; dashes would change the options of the command

html_theme = "furo"
html_title = "kvcodec"
html_static_path = ["_static"]
html_css_files = ["kvcodec.css"]
html_show_sphinx = False
html_copy_source = True
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "monokai"

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
myst_update_mathjax = False

nb_execution_mode = "force"  # a cache would not see that the package has changed
nb_execution_excludepatterns = [
    "notebooks/language-model.ipynb"
]  # it has outputs, and needs a model
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_merge_streams = True
nb_render_markdown_format = "gfm"
nb_ipywidgets_js = {}  # widgets would need scripts from elsewhere

autosummary_generate = True
# Some file systems do not tell kvcodec.codec.html from kvcodec.Codec.html.
autosummary_filename_map = {
    "kvcodec.Codec": "kvcodec.Codec-class",
    "kvcodec.Codebook": "kvcodec.Codebook-class",
}
autodoc_typehints = "none"  # the docstrings have types, and shapes with them
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True


class _AnyProperty(type):
    """The type of a class in whose place another one stands when the package is really used."""

    def __getattr__(cls, name):
        return property()


def _import_transformers_cache():
    """Import the cache for Transformers, with stand-ins for what it builds on if need be."""
    if find_spec("torch") and find_spec("transformers"):
        return
    Tensor, Cache, CacheLayerMixin = (
        _AnyProperty(name, (), {}) for name in ("Tensor", "Cache", "CacheLayerMixin")
    )
    torch = mock.MagicMock(Tensor=Tensor)
    transformers = mock.MagicMock(__version__="5.20", Cache=Cache)
    transformers.cache_utils.CacheLayerMixin = CacheLayerMixin
    sys.modules |= {"torch": torch, "transformers": transformers}
    importlib.import_module("kvcodec.integrations.transformers")
    del sys.modules["torch"], sys.modules["transformers"]


def _skip_fields(app, what, name, obj, skip, options):
    """Fields of named tuples have docstrings that say nothing; the class describes them."""
    return True if (getattr(obj, "__doc__", None) or "").startswith("Alias for field") else None


def _read_downloads_last(app, env, docnames):
    """Read the page that offers the notebooks once they have run: before, there are none."""
    docnames.sort(key=lambda name: name == "notebooks/index")


def setup(app):
    """Register what only this file knows."""
    _import_transformers_cache()
    app.connect("env-before-read-docs", _read_downloads_last)
    app.connect("autodoc-skip-member", _skip_fields)
