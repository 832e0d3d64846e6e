"""Where results go: files, known to be writable before anything starts, and standard output.

Standard output has the result alone, so that it can go into a pipe; the rest is on standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import click

from parcompiler.cli.faults import ReaderGoneError
from parcompiler.errors import InputError


def check_file(path: Path | None) -> None:
    """Refuse a file that cannot be written. Raises InputError."""
    if path is None:
        return
    if path.is_dir():
        message = f"cannot write {path}: it is a folder"
        raise InputError(message)
    folder = path.parent
    if not folder.is_dir():
        message = f"cannot write {path}: there is no folder {folder}"
        raise InputError(message)
    if not os.access(path if path.exists() else folder, os.W_OK):
        message = f"cannot write {path}: no permission"
        raise InputError(message)


def check_folder(path: Path) -> None:
    """Refuse a folder that cannot be made or filled. Raises InputError."""
    if path.exists() and not path.is_dir():
        message = f"cannot export to {path}: it is a file"
        raise InputError(message)
    if path.is_dir() and any(path.iterdir()) and not (path / "SHA256SUMS").is_file():
        message = f"cannot export to {path}: it holds other things than an export"
        raise InputError(message)
    # An export is written beside an older one, and takes its place.
    nearest = next(item for item in Path(os.path.realpath(path)).parents if item.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        message = f"cannot export to {path}: no permission to write in {nearest}"
        raise InputError(message)


def write(path: Path, text: str) -> None:
    """Write a text file, the same bytes on every system. Raises InputError when it cannot be."""
    with writing(path):
        path.write_text(text, encoding="utf-8", newline="\n")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say of a file that could not be written that it could not: disks fill up."""
    try:
        yield
    except OSError as error:
        message = f"cannot write {path} ({error.strerror})"
        raise InputError(message) from error


@contextmanager
def result_only() -> Iterator[None]:
    """What a model prints while it is made or captured goes to standard error."""
    with redirect_stdout(sys.stderr):
        yield


def show(text: str) -> None:
    """The result, for a person."""
    try:
        click.echo(text)
    except BrokenPipeError as error:
        raise ReaderGoneError from error


def show_json(document: dict[str, Any]) -> None:
    """The result, for a script."""
    show(json.dumps(document, indent=2, sort_keys=True))


def note(text: str, quiet: bool) -> None:
    """A remark beside the result."""
    if not quiet:
        click.echo(text, err=True)
