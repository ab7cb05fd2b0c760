"""What the commands share: files that are checked before they are written, and a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from kvcodec import get_config

__all__ = [
    "PATH",
    "STANDARD_OUTPUT",
    "UserError",
    "check_distinct",
    "check_environment",
    "check_files",
    "json_option",
    "progress_bar",
    "write_json",
]

STANDARD_OUTPUT = "-"


class UserError(click.ClickException):
    """Something that the user can put right: one line on standard error, exit code 2."""

    exit_code = 2

    def format_message(self) -> str:
        return " ".join(self.message.split())


class _Path(click.ParamType):
    """A path that is not empty: an empty one would stand for the current folder."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not value:
            self.fail("it must be followed by a path, but an empty one was given.", param, ctx)
        return str(value)


PATH = _Path()


def json_option(command: Callable[..., None]) -> Callable[..., None]:
    return click.option(
        "--json",
        "json_file",
        type=PATH,
        metavar="[FILE]",
        is_flag=False,
        flag_value=STANDARD_OUTPUT,
        help="Write JSON to FILE, or print it instead of the text if FILE is - or left out.",
    )(command)


def check_environment() -> None:
    """Report a backend that was asked for in the environment and is not there."""
    try:
        get_config()
    except RuntimeError as error:
        raise UserError(str(error)) from None


def check_files(*files: str | None) -> None:
    """Report a file that could not be written, before there is anything to write."""
    from kvcodec.evaluation import check_writable

    for file in files:
        if file not in (None, STANDARD_OUTPUT):
            check_writable(file)


def check_distinct(**files: str | None) -> None:
    """Report an output that would replace the input or the other output."""
    seen: dict[Path, str] = {}
    for name, file in files.items():
        if file in (None, STANDARD_OUTPUT):
            continue
        option = f"--{name.removesuffix('_file')}"
        path = Path(file).resolve()
        if path in seen and (path.is_file() or not path.exists()):
            raise ValueError(
                f"{option} must be another file than {seen[path]}, but both are {file}."
            )
        seen[path] = option


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[..., None]]:
    """A bar on a terminal, and what tells it the part that is done and, if it may, what is next."""
    from rich.console import Console
    from rich.progress import Progress

    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    bar = Progress(console=Console(stderr=True), transient=True, disable=not is_terminal)
    with bar:
        task = bar.add_task(what, total=1.0)
        yield lambda done, doing=what: bar.update(task, completed=done, description=doing)


def write_json(text: str, file: str) -> None:
    from kvcodec.evaluation import write_file

    if file == STANDARD_OUTPUT:
        click.echo(text)
    else:
        write_file(file, f"{text}\n".encode())
