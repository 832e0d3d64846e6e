"""Errors as one clear message on standard error, and the exit code that belongs to each."""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass

import click

from parcompiler.errors import InputError, ParcompilerError

DONE, FAULT, WRONG_USE, INTERRUPTED = 0, 1, 2, 130


class ReaderGoneError(Exception):
    """Nobody reads standard output any more, as after `| head`. (A BrokenPipeError is caught by
    click, which ends with exit code 1.)"""


@dataclass(slots=True)
class Settings:
    """What `--debug` and `--quiet` say, wherever on the line they stand."""

    debug: bool = False
    quiet: bool = False


def code_of(error: BaseException, settings: Settings) -> int:
    """Say what went wrong, and return the exit code."""
    if isinstance(error, SystemExit):  # completion ends so
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, ReaderGoneError | BrokenPipeError):
        # What is still buffered would raise again when Python ends.
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
    if isinstance(error, click.Abort | KeyboardInterrupt):  # click makes the one from the other
        return ["interrupted", *_notes(error), *_notes(error.__cause__)]
    notes = _notes(error)
    if isinstance(error, ParcompilerError):
        return [f"error: {error}", *notes]
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return [f"error: {what}", *notes, "(this was not expected; --debug shows where it happened)"]


def _notes(error: BaseException | None) -> list[str]:
    """What was added to an error on its way."""
    return list(getattr(error, "__notes__", ()))
