"""Check that the built documentation is whole and needs nothing but its own files.

    python tools/check_site.py docs/_build/html

Every link inside the site must lead to a file that is there, and to a place in it that is there,
in the same case, and not to a folder, which is no page when it is opened from a file system.
Scripts, style sheets, fonts, images and whatever else a browser loads by itself must be files of
the site. Links that a reader follows may lead elsewhere by https.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import click

# Attributes that make a browser load a file, by element. "*" is any element.
LOADED = {
    "*": {"background", "poster"},
    "audio": {"src"},
    "embed": {"src"},
    "feimage": {"href", "xlink:href"},
    "frame": {"src"},
    "iframe": {"src"},
    "image": {"href", "xlink:href"},
    "img": {"src"},
    "input": {"src"},
    "object": {"data"},
    "script": {"src", "href", "xlink:href"},
    "source": {"src"},
    "track": {"src"},
    "use": {"href", "xlink:href"},
    "video": {"src"},
}
# Relations of a <link> that a browser does not load: it only names them.
NAMED = {"alternate", "author", "canonical", "help", "index", "license", "next", "prev", "search"}
STYLE_LOADS = re.compile(r"url\(\s*['\"]?(.*?)['\"]?\s*\)|@import\s+['\"](.*?)['\"]")
STYLE_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
SCRIPT_LOADS = re.compile(
    r"""(?:\bfrom|\bimport|\b(?:import|fetch|importScripts|require)\s*\(|\.src\s*=)\s*"""
    r"""["'`]((?:https?:)?//[^"'`]+)"""
)


class Reference(NamedTuple):
    """What a file refers to: an address, and whether a browser loads it by itself."""

    address: str
    loaded: bool


class Page(HTMLParser):
    """The places of a page that a link can lead to, and what it refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.places: set[str] = set()
        self.references: list[Reference] = []
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note places and addresses of an element."""
        self._inside = tag if tag in ("script", "style") else ""
        given = {name: value for name, value in attrs if value is not None}
        self.places.update(given[name] for name in ("id", "name") if name in given)
        for name in given.keys() & (LOADED.get(tag, set()) | LOADED["*"]):
            self._refer(given[name], loaded=True)
        for candidate in given.get("srcset", "").split(","):
            if candidate.strip():
                self._refer(candidate.split()[0], loaded=True)
        if tag in ("a", "area") and "href" in given:
            self._refer(given["href"], loaded=False)
        if tag == "form" and "action" in given:
            self._refer(given["action"], loaded=False)
        if tag == "link" and "href" in given:
            relations = set(given.get("rel", "").lower().split())
            self._refer(given["href"], loaded=not relations <= NAMED)
        if tag == "base":
            self._refer(given.get("href", ""), loaded=True)
        self._read_style(given.get("style", ""))

    def handle_endtag(self, tag: str) -> None:
        """Leave a script or a style."""
        self._inside = ""

    def handle_data(self, data: str) -> None:
        """Read scripts and styles that stand in the page."""
        if self._inside == "style":
            self._read_style(data)
        elif self._inside == "script":
            self.references += loads_of_script(data)

    def _read_style(self, text: str) -> None:
        self.references += loads_of_style(text)

    def _refer(self, address: str, loaded: bool) -> None:
        self.references.append(Reference(address.strip(), loaded))


def loads_of_style(text: str) -> list[Reference]:
    """What a style sheet loads."""
    found = STYLE_LOADS.findall(STYLE_COMMENT.sub("", text))
    return [Reference(url or imported, loaded=True) for url, imported in found]


def loads_of_script(text: str) -> list[Reference]:
    """What a script loads from elsewhere by an address that is written out."""
    return [Reference(address, loaded=True) for address in SCRIPT_LOADS.findall(text)]


class Site:
    """A folder of pages."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.files = {path for path in self.root.rglob("*") if path.is_file()}
        self.pages = {
            path: Page(path.read_text(encoding="utf-8"))
            for path in sorted(self.files)
            if path.suffix == ".html"
        }

    def references(self, path: Path) -> list[Reference]:
        """What a file refers to."""
        if path in self.pages:
            return self.pages[path].references
        if path.suffix in (".css", ".svg"):
            return loads_of_style(path.read_text(encoding="utf-8"))
        if path.suffix == ".js":
            return loads_of_script(path.read_text(encoding="utf-8"))
        return []

    def fault(self, source: Path, reference: Reference) -> str | None:
        """What is wrong with a reference, or None."""
        parts = urlsplit(reference.address)
        if parts.scheme == "data":
            return None
        if parts.scheme or parts.netloc:
            if reference.loaded:
                return "is loaded from elsewhere"
            allowed = parts.scheme == "mailto" or (parts.scheme == "https" and parts.netloc)
            return None if allowed else "leads elsewhere, but not by https"
        if parts.path.startswith("/"):
            return "begins at the root of a file system"
        target = source
        if parts.path:
            target = Path(os.path.normpath(source.parent / unquote(parts.path)))
        if target not in self.files:
            return "is a folder" if target.is_dir() else "leads to no file of the site"
        place = unquote(parts.fragment)
        if place and target in self.pages and place not in self.pages[target].places:
            return f"leads to no place {place!r}"
        return None

    def faults(self) -> Iterator[str]:
        """Each fault in a line: file, address, what is wrong."""
        for path in sorted(self.files):
            for reference in dict.fromkeys(self.references(path)):
                wrong = self.fault(path, reference)
                if wrong:
                    yield f"{path.relative_to(self.root)}: {reference.address!r} {wrong}."


@click.command(help=__doc__.split("\n\n")[0])
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(folder: Path) -> None:
    """Print all faults of a site; the exit code is 1 if there is one."""
    site = Site(folder)
    if not site.pages:
        raise click.UsageError(f"folder must hold pages, but {folder} holds none.")
    faults = list(site.faults())
    for fault in faults:
        print(fault)
    count = sum(len(page.references) for page in site.pages.values())
    print(f"{len(site.pages)} pages, {count} references, {len(faults)} faults.")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
