"""Formulas as MathML, which browsers show by themselves.

MathJax and KaTeX come from a server, or as megabytes of scripts and fonts that not every browser
loads from a file system. MathML is part of the page and needs neither.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.util import logging

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.writers.html5 import HTML5Translator

LOGGER = logging.getLogger(__name__)
LEFT_OVER = re.compile(r"\\\w+|&(?!#?\w+;)")


def to_mathml(node: nodes.math | nodes.math_block, display: str) -> str:
    """The formula of a node; a warning, and so an error under -W, if it is not understood."""
    formula = node.astext().strip()
    try:
        markup = convert(formula, display=display)
    except Exception as error:  # the converter has a dozen errors and no base class of them
        LOGGER.warning("formula %r: %r", formula, error, location=node)
        raise nodes.SkipNode from error
    wrong = LEFT_OVER.search(markup)
    if wrong:
        LOGGER.warning("formula %r: %r is not understood", formula, wrong[0], location=node)
    return markup


def visit_inline(writer: HTML5Translator, node: nodes.math) -> None:
    """Write a formula in a line."""
    writer.body.append(to_mathml(node, "inline"))
    raise nodes.SkipNode


def visit_block(writer: HTML5Translator, node: nodes.math_block) -> None:
    """Write a formula on a line of its own, which scrolls where the page is narrow."""
    writer.body.append(f'<div class="formula" tabindex="0">{to_mathml(node, "block")}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, object]:
    """Register the renderer; Sphinx prefers it because no other is loaded."""
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
