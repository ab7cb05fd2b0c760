"""Finished pieces of a long measurement, kept in a directory so that it can go on later."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from kvcodec.evaluation.report import write_file

__all__ = ["Store", "file_digest"]

ABOUT = "measurement.json"
READ_AT_ONCE = 2**20


class Store:
    """A directory with one file for each finished piece, all of the same measurement.

    Parameters
    ----------
    directory : str or path
        The directory; `begin` makes it if it is not there.
    about : dict
        What the measurement depends on, as JSON can hold it.

    Raises
    ------
    ValueError
        If the directory is of another measurement, or holds something else.
    OSError
        If it cannot be read or written.

    Examples
    --------
    >>> import tempfile
    >>> from kvcodec.evaluation.store import Store
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     store = Store(directory, {"tokens": 512})
    ...     store.begin()
    ...     store.put("chunk 0, int4", {"kl": [0.25]})
    ...     Store(directory, {"tokens": 512}).get("chunk 0, int4")
    {'kl': [0.25]}
    """

    def __init__(self, directory: str | os.PathLike[str], about: dict[str, Any]) -> None:
        self._directory, self._about = Path(directory), about
        path = self._directory / ABOUT
        if path.is_file():
            _check_same(self._directory, _read(path), about)
        elif self._directory.exists() and (
            not self._directory.is_dir() or any(self._directory.iterdir())
        ):
            raise ValueError(
                f"resume must be a new or empty directory or one of an earlier run, but "
                f"{self._directory} holds something else."
            )

    def begin(self) -> None:
        """Make the directory and its note, if they are not there.

        Raises
        ------
        OSError
            If they cannot be made.
        """
        path = self._directory / ABOUT
        if not path.is_file():
            self._directory.mkdir(parents=True, exist_ok=True)
            write_file(path, json.dumps(self._about, indent=2).encode())

    def get(self, name: str) -> Any:
        """The result of a piece, or None if it is not finished.

        Parameters
        ----------
        name : str
            The name of the piece.

        Returns
        -------
        object
            What was put, or None.

        Raises
        ------
        ValueError
            If its file is damaged.
        OSError
            If its file cannot be read.
        """
        path = self._path(name)
        if not path.is_file():
            return None
        stored = _read(path)
        result = stored.get("result") if isinstance(stored, dict) else None
        if result is None or stored != _sealed(name, result):
            raise _damaged(path)
        return result

    def damaged(self, name: str) -> ValueError:
        """What to raise if what is stored for a piece cannot be its result.

        Parameters
        ----------
        name : str
            The name of the piece.

        Returns
        -------
        ValueError
            It names the file.
        """
        return _damaged(self._path(name))

    def put(self, name: str, result: Any) -> None:
        """Keep the result of a piece: as a whole, or not at all.

        Parameters
        ----------
        name : str
            The name of the piece.
        result : object
            What it gave, as JSON can hold it.

        Raises
        ------
        OSError
            If its file cannot be written.
        """
        write_file(self._path(name), json.dumps(_sealed(name, result)).encode())

    def _path(self, name: str) -> Path:
        """A file that tells whose it is; the digest makes names that look alike differ."""
        readable = "".join(letter if letter.isalnum() else "-" for letter in name)
        return self._directory / f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}.json"


def _sealed(name: str, result: Any) -> dict[str, Any]:
    """What the file of a result holds, with a digest that tells damage which still is JSON."""
    text = json.dumps([name, result])
    return {"name": name, "result": result, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise _damaged(path) from None


def _damaged(path: Path) -> ValueError:
    return ValueError(f"resume holds the damaged file {path}; delete it.")


def _check_same(directory: Path, found: Any, about: dict[str, Any]) -> None:
    """Raise unless a directory's note says what this measurement says of itself."""
    if not isinstance(found, dict):
        raise _damaged(directory / ABOUT)
    for name in dict.fromkeys([*about, *found]):
        if about.get(name) != found.get(name):
            raise ValueError(
                f"resume must be a directory of the same measurement, but in {directory} "
                f"{name} is {found.get(name)!r} instead of {about.get(name)!r}."
            )


def file_digest(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a file, or of the files of a folder with their names.

    Parameters
    ----------
    path : str or path
        A file or a folder.

    Returns
    -------
    str
        In hexadecimal.

    Raises
    ------
    OSError
        If something cannot be read.

    Examples
    --------
    >>> import os, tempfile
    >>> from kvcodec.evaluation.store import file_digest
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file_digest(folder)[:8]
    'e3b0c442'
    """
    path = Path(path)
    digest = hashlib.sha256()
    if path.is_dir():
        for file in sorted(file for file in path.rglob("*") if file.is_file()):
            digest.update(f"{file.relative_to(path).as_posix()}\0{file_digest(file)}\0".encode())
    else:
        with path.open("rb") as file:
            while part := file.read(READ_AT_ONCE):
                digest.update(part)
    return digest.hexdigest()
