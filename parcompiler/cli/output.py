"""Where results go: files, known to be writable before anything starts, and standard output.

Standard output has the result alone, so that it can go into a pipe; the rest is on standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import click

from parcompiler.cli.faults import ReaderGoneError
from parcompiler.documents import check_writable
from parcompiler.errors import InputError


def check_files(*paths: Path | None) -> None:
    """Refuse files that cannot be written. Raises InputError."""
    for path in paths:
        if path is not None:
            check_writable(path)


def check_folder(path: Path) -> None:
    """Refuse a folder that cannot be made or filled. Raises InputError."""
    # An export is written beside an older one, and takes its place.
    nearest = next(item for item in Path(os.path.realpath(path)).parents if item.exists())
    fault = ""
    if path.exists() and not path.is_dir():
        fault = "it is a file"
    elif path.is_dir() and any(path.iterdir()) and not (path / "SHA256SUMS").is_file():
        fault = "it holds other things than an export"
    elif not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        fault = f"no permission to write in {nearest}"
    if fault:
        message = f"cannot export to {path}: {fault}"
        raise InputError(message)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise InputError, naming the path, where it cannot be written: disks fill up."""
    try:
        yield
    except OSError as error:
        message = f"cannot write {path} ({error.strerror})"
        raise InputError(message) from error


@contextmanager
def result_only() -> Iterator[None]:
    """Send what a model prints while it is made or captured to standard error."""
    with redirect_stdout(sys.stderr):
        yield


def show(text: str) -> None:
    """Print on standard output."""
    try:
        click.echo(text)
    except BrokenPipeError as error:
        raise ReaderGoneError from error


def result(form: str, text: Callable[[], str], document: Callable[[], dict[str, Any]]) -> None:
    """The result: text for a person, or JSON for a script."""
    show(json.dumps(document(), indent=2, sort_keys=True) if form == "json" else text())


def note(text: str, quiet: bool) -> None:
    """A remark beside the result."""
    if not quiet:
        click.echo(text, err=True)
