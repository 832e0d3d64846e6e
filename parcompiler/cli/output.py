"""Output of results and errors: files, standard output, messages, exit codes.

Standard output has only the result, so that it can go into a pipe; the rest is on standard error.
Files are checked to be writable before anything starts.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from parcompiler.documents import check_writable
from parcompiler.errors import InputError, ParcompilerError

DONE, FAULT, WRONG_USE, INTERRUPTED = 0, 1, 2, 130


class ReaderGoneError(Exception):
    """The reader of standard output is gone, as after `| head`. (A BrokenPipeError is caught by
    click, which ends with exit code 1.)"""


@dataclass(slots=True)
class Settings:
    """The values of `--debug` and `--quiet`, wherever they are on the command line."""

    debug: bool = False
    quiet: bool = False


def code_of(error: BaseException, settings: Settings) -> int:
    """Print the error, and return the exit code."""
    if isinstance(error, SystemExit):  # from shell completion
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, ReaderGoneError | BrokenPipeError):
        # Buffered output would raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    if settings.debug and not isinstance(error, click.ClickException):
        traceback.print_exception(error)
    for line in _lines(error):
        click.echo(line, err=True)
    if isinstance(error, click.Abort | KeyboardInterrupt):
        return INTERRUPTED
    return WRONG_USE if isinstance(error, InputError | click.ClickException) else FAULT


def _lines(error: BaseException) -> list[str]:
    """The message, without a traceback."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return [error.format_message()]
    if isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx is not None else "parcompiler"
        return [f"error: {error.format_message()}", f"Try: {command} --help"]
    if isinstance(error, click.ClickException):
        return [f"error: {error.format_message()}"]
    if isinstance(error, click.Abort | KeyboardInterrupt):  # click turns the latter into the former
        return ["interrupted", *_notes(error), *_notes(error.__cause__)]
    notes = _notes(error)
    if isinstance(error, ParcompilerError):
        return [f"error: {error}", *notes]
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return [f"error: {text}", *notes, "(this was not expected; --debug shows where it happened)"]


def _notes(error: BaseException | None) -> list[str]:
    """The notes added to an error."""
    return list(getattr(error, "__notes__", ()))


def check_files(*paths: Path | None) -> None:
    """Refuse files that cannot be written. Raises InputError."""
    for path in paths:
        if path is not None:
            check_writable(path)


def check_page(path: Path | None) -> None:
    """Refuse a page if plotly is missing, before any work. Raises InputError."""
    if path is not None and importlib.util.find_spec("plotly") is None:
        message = "a page needs plotly: pip install 'parcompiler[report]'"
        raise InputError(message)


def check_folder(path: Path) -> None:
    """Refuse a folder that cannot be created or written to. Raises InputError."""
    # An export is written beside an older one, and then replaces it.
    nearest = next(item for item in Path(os.path.realpath(path)).parents if item.exists())
    fault = ""
    if path.exists() and not path.is_dir():
        fault = "it is a file"
    elif path.is_dir() and any(path.iterdir()) and not (path / "SHA256SUMS").is_file():
        fault = "it holds other things than an export"
    elif not nearest.is_dir():
        fault = f"{nearest} is a file"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        fault = f"no permission to write in {nearest}"
    if fault:
        message = f"cannot export to {path}: {fault}"
        raise InputError(message)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of writing, on a full disk say, into an InputError that names the path."""
    try:
        yield
    except OSError as error:
        message = f"cannot write {path} ({error.strerror})"
        raise InputError(message) from error


def result_only() -> AbstractContextManager[object]:
    """Redirect prints of a model, while it is made or captured, to standard error."""
    return redirect_stdout(sys.stderr)


def show(text: str) -> None:
    """Print on standard output."""
    try:
        click.echo(text)
    except BrokenPipeError as error:
        raise ReaderGoneError from error


def result(form: str, text: Callable[[], str], document: Callable[[], dict[str, Any]]) -> None:
    """Print the result: as text, or as JSON for scripts."""
    show(json.dumps(document(), indent=2, sort_keys=True) if form == "json" else text())


def note(text: str, quiet: bool) -> None:
    """Print a remark on standard error."""
    if not quiet:
        click.echo(text, err=True)
