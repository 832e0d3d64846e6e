"""The one family of exceptions: catch `ParcompilerError` to catch them all.

>>> issubclass(InputError, ParcompilerError) and issubclass(InputError, ValueError)
True
"""

import os
from collections.abc import Sequence
from os import PathLike
from pathlib import Path


class ParcompilerError(Exception):
    """Anything that parcompiler refuses. The message says what is wrong and what to do."""


class CaptureError(ParcompilerError):
    """The model cannot be turned into a graph. Names the module path and the source line."""


class PlanError(ParcompilerError):
    """A plan, or the program lowered from it, breaks rules. Lists every broken rule."""


class InfeasibleError(PlanError):
    """No plan satisfies the constraints. Says the least that would have to change.

    `needed` are the bytes of a rank that would do, where memory is short.
    """

    needed: int | None = None


class LaunchError(ParcompilerError):
    """The ranks cannot start, or one of them failed. Names the rank and the instruction."""


class InputError(ParcompilerError, ValueError):
    """An argument or a batch does not have the form that was asked for."""


def shown(value: object, most: int = 80) -> str:
    """A value for a message: short, whatever it is.

    >>> shown(0), shown("a" * 99, most=5), shown(10**5000)
    ('0', "'aaaa…", 'of type int, too large to print')
    """
    try:
        text = repr(value)
    except ValueError:  # Python prints no integers of more than 4,300 digits
        return f"of type {type(value).__name__}, too large to print"
    except Exception:  # whatever an object of the user raises
        return f"of type {type(value).__name__}"
    return text if len(text) <= most else f"{text[:most]}…"


def offered(name: str, value: object, values: Sequence[object]) -> None:
    """Raise InputError unless `value` is one of `values`."""
    if not any(type(value) is type(known) and value == known for known in values):
        known = ", ".join(map(repr, values))
        message = f"{name} must be one of {known} ({shown(value)} given)"
        raise InputError(message)


def path_of(path: str | PathLike[str]) -> Path:
    """A path that the system can look up. Raises InputError if it cannot."""
    if isinstance(path, str) and not path:  # pathlib takes it for the current folder
        message = "'' is no path (it is empty): write . for the current folder"
        raise InputError(message)
    try:
        checked = Path(path)
        checked.exists()
        os.path.realpath(checked)  # raises for a null byte and for half a character
    except (TypeError, ValueError, OSError) as error:
        message = f"{shown(path)} is no path ({getattr(error, 'strerror', None) or error})"
        raise InputError(message) from error
    return checked


def check_no_pipe(path: Path) -> None:
    """Refuse a named pipe in place of a file: it would be read when something writes into it, or
    never. Raises InputError."""
    if Path(os.path.realpath(path)).is_fifo():  # and no pipe without a name, such as /dev/stdin
        message = f"{path} is a named pipe: put the file itself in its place"
        raise InputError(message)
