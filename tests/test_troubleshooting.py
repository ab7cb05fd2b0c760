"""Every error message of the package is on the page that says what it comes from."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Their messages are parts of another one, or say what a test has found.
NOT_SHOWN = {"AssertionError", "Refused", "UserError", "_refused"}
HOLE = "\0"


def literal(node):
    """The text of an expression, with a hole for what is put in; None if it is no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)
        return "".join(parts)
    return None


def messages_of(source):
    """The text of each exception that is raised in a module, where it is written out."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            raised = getattr(node.exc.func, "id", getattr(node.exc.func, "attr", ""))
            text = literal(node.exc.args[0])
            if raised not in NOT_SHOWN and text and text.strip(HOLE + ".: "):
                yield text


def sources():
    """The modules whose messages a user may see, each with its text."""
    for path in sorted((ROOT / "kvcodec").rglob("*.py")):
        if not {"reference", "peers"} & set(path.parts):
            yield path.stem, path.read_text(encoding="utf-8")


def messages():
    """All messages, each with the module it is in."""
    for module, source in sources():
        for text in messages_of(source):
            yield pytest.param(text, id=f"{module}: {text.replace(HOLE, '...')[:60]}")


def texts():
    """All strings of the package: a message may be put together from several."""
    nodes = (node for _, source in sources() for node in ast.walk(ast.parse(source)))
    return [text for node in nodes if (text := literal(node))]


def in_tables(page):
    """Code in the first column of the tables."""
    for cell in re.findall(r"^\| (.*?) \|", page, re.MULTILINE):
        yield from re.findall(r"`([^`]+)`", cell)


def in_bold(page):
    """What paragraphs begin with."""
    for bold in re.findall(r"^\*\*(.+?)\*\*", page, re.MULTILINE):
        yield from bold.split("; ")


def matches(entry, message):
    """Whether a message has the words of an entry in their order."""
    parts = [re.escape(part.strip(" .")) for part in entry.split("...")]
    return re.search(".*".join(parts), message, re.DOTALL)


PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
ENTRIES = [entry for entry in [*in_tables(PAGE), *in_bold(PAGE)] if len(entry) > 10]
TEXTS = texts()


@pytest.mark.parametrize("message", list(messages()))
def test_every_message_has_its_cause(message):
    assert any(matches(entry, message) for entry in ENTRIES)


@pytest.mark.parametrize("entry", list(in_tables(PAGE)))
def test_every_entry_is_of_a_message(entry):
    assert any(matches(entry, text) for text in TEXTS)


def test_messages_are_read_from_the_source():
    source = 'raise ValueError(f"x must be {kind}, " f"but is {x}.")\nraise ValueError(str(error))'
    assert list(messages_of(source)) == [f"x must be {HOLE}, but is {HOLE}."]


def test_a_message_that_no_entry_has_is_seen():
    assert not any(matches(entry, f"{HOLE} must be green, but is red.") for entry in ENTRIES)
