"""Reads JSON: strictly, with bounds on size and depth; each refusal names its place.

>>> parse('{"ranks": [1, 1e400]}', "plan")
Traceback (most recent call last):
    ...
parcompiler.errors.InputError: plan.ranks[1] must be a finite number (1e400 found)

Frozen dataclasses are read field by field:

>>> @dataclasses.dataclass(frozen=True)
... class Point:
...     x: float
...     name: str | None = None
>>> value(Point, parse('{"x": 1}', "point"), "point")
Point(x=1.0, name=None)
>>> value(Point, parse('{"x": "one"}', "point"), "point")
Traceback (most recent call last):
    ...
parcompiler.errors.InputError: point.x must be a number ("one" found)
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import types
import typing
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar, Union

from parcompiler.errors import InputError, check_no_pipe, path_of, shown

LARGEST = 2**28  # most bytes of a file; the report of a thousand ranks has a hundredth of that
DEEPEST = 64  # most levels of objects and lists
DIGITS = 40  # most digits of an integer: FLOPs of a year on all ranks have 30

T = TypeVar("T")


def check_writable(path: Path) -> None:
    """Refuse a file that cannot be written. Raises InputError."""
    fault = ""
    if path.is_dir():
        fault = "it is a folder"
    elif not path.parent.is_dir():
        fault = f"there is no folder {path.parent}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        fault = "no permission"
    if fault:
        message = f"cannot write {path}: {fault}"
        raise InputError(message)


def write(path: str | PathLike[str], text: str) -> None:
    """Write a text file, the same bytes on every system. It replaces an older one when it is
    complete, so that an interruption leaves the old one or the new one. Raises OSError."""
    place = Path(os.path.realpath(path))  # a link stays a link
    writable = place.is_file() and os.access(place, os.W_OK)  # and no device, such as /dev/stdout
    if not ((writable or not place.exists()) and os.access(place.parent, os.W_OK)):
        place.write_text(text, encoding="utf-8", newline="\n")
        return
    beside = place.with_name(f".{place.name[:50]}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8", newline="\n")
        if writable:
            shutil.copymode(place, beside)
        beside.replace(place)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def text_of(path: str | PathLike[str]) -> str:
    """The text of a file. Raises InputError, naming it, when it cannot be read as text."""
    checked = path_of(path)
    check_no_pipe(checked)
    try:
        with checked.open("rb") as file:
            data = file.read(LARGEST + 1)
        text = data.decode("utf-8")
    except OSError as error:
        message = f"cannot read {path} ({error.strerror})"
        raise InputError(message) from error
    except UnicodeDecodeError as error:
        message = f"{path} is no text ({error.reason} at byte {error.start})"
        raise InputError(message) from error
    if len(data) > LARGEST:
        message = f"{path} is too large to be read (more than {LARGEST:,} bytes)"
        raise InputError(message)
    return text


def parse(text: str, place: str, *, finite: bool = True) -> Any:
    """The data of a JSON text. Raises InputError that names the fault and its place in `place`.

    `finite=False` lets NaN and Infinity pass, for files whose format is not ours to decide.
    """
    if not isinstance(text, str):
        message = f"the {place} must be text ({type(text).__name__} given)"
        raise InputError(message)
    if len(text) > LARGEST:
        message = f"the {place} is too long ({len(text):,} characters, at most {LARGEST:,})"
        raise InputError(message)

    def real(literal: str) -> float | _Refusal:
        number = float(literal)
        if finite and not math.isfinite(number):
            return _Refusal(f"must be a finite number ({_short(literal)} found)")
        return number

    try:
        data = json.loads(
            text,
            parse_int=_integer,
            parse_float=real,
            parse_constant=real,
            object_pairs_hook=_object,
        )
    except RecursionError as error:
        raise InputError(_too_deep(place)) from error
    except ValueError as error:
        message = f"the {place} is no JSON: {error}"
        raise InputError(message) from error
    _check(data, place, 0)
    return data


def value(kind: type[T], data: object, place: str) -> T:
    """`data` as a value of a type: a dataclass, a tuple of one type, a union, or a plain value.

    A class with a `parse` reads its own text. Raises InputError that names the wrong field.
    """
    return typing.cast(T, _read(kind, data, place))


class _Refusal:
    """A placeholder in the data for a refused value, with the reason."""

    def __init__(self, why: str) -> None:
        self.why = why


def _integer(literal: str) -> int | _Refusal:
    """An integer, or a refusal if it has too many digits."""
    if len(literal) <= DIGITS:
        return int(literal)
    return _Refusal(f"must be a number of at most {DIGITS} digits ({_short(literal)} found)")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | _Refusal:
    """An object, or a refusal if a key occurs twice."""
    fields = dict(pairs)
    if len(fields) == len(pairs):
        return fields
    names = [name for name, _ in pairs]
    twice = next(name for name in names if names.count(name) > 1)
    return _Refusal(f"has the field {shown(twice)} twice")


def _check(data: object, place: str, depth: int) -> None:
    """Raise InputError for refusals in the data, deep nesting, and text that is not Unicode."""
    if isinstance(data, _Refusal):
        message = f"{place} {data.why}"
        raise InputError(message)
    if isinstance(data, str):
        _check_text(data, place)
    elif isinstance(data, dict | list):
        if depth == DEEPEST:
            raise InputError(_too_deep(place))
        if isinstance(data, list):
            for i, item in enumerate(data):
                _check(item, f"{place}[{i}]", depth + 1)
        else:
            for name, item in data.items():
                _check_text(name, place)
                _check(item, f"{place}.{name}", depth + 1)


def _check_text(text: str, place: str) -> None:
    """Refuse half a character, as "\\ud800" is."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            message = (
                f"{place} has a surrogate (half of a character) by itself ({text[:20]!r} found)"
            )
            raise InputError(message) from error


def _too_deep(place: str) -> str:
    """The message for too deep nesting."""
    return f"the {place[:200]} nests too deeply (at most {DEEPEST} levels)"


def _short(literal: str) -> str:
    """A literal, shortened to fit on a line."""
    return literal if len(literal) <= DIGITS else f"{literal[:20]}… of {len(literal):,} characters"


def _read(kind: Any, data: object, place: str) -> Any:
    """`data` as a value of type `kind`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        if data is None and types.NoneType in arguments:
            return None
        kinds = [argument for argument in arguments if argument is not types.NoneType]
        listed = (a for a in kinds if isinstance(data, list) and typing.get_origin(a) is tuple)
        return _read(next(listed, kinds[0]), data, place)
    if origin is tuple:
        items = _expect(list, data, place)
        return tuple(_read(arguments[0], item, f"{place}[{i}]") for i, item in enumerate(items))
    if hasattr(kind, "parse"):
        text = _expect(str, data, place)
        try:
            return kind.parse(text)
        except InputError as error:
            message = f"{place}: {error}"
            raise InputError(message) from error
    if dataclasses.is_dataclass(kind):
        return _fields(kind, _expect(dict, data, place), place)
    return _expect(kind, data, place)


def _fields(kind: Any, data: dict[str, object], place: str) -> Any:
    """A dataclass from an object with its fields; those with a default may be missing."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name in sorted(data.keys() - fields.keys()):
        message = f"{place} has an unknown field {shown(name)} (known: {', '.join(sorted(fields))})"
        raise InputError(message)
    for name, field in fields.items():
        if name not in data and field.default is dataclasses.MISSING:
            message = f"{place} lacks the field {name!r}"
            raise InputError(message)
    hints = typing.get_type_hints(kind)
    return kind(
        **{name: _read(hints[name], item, f"{place}.{name}") for name, item in data.items()}
    )


_NAMES = {
    bool: "true or false",
    dict: "an object",
    float: "a number",
    int: "an integer",
    list: "a list",
    str: "a string",
}


def _expect(kind: Any, data: Any, place: str) -> Any:
    """`data` if it is of that type; an integer will do for a number."""
    if kind is float and type(data) is int:
        data = float(data)
    if type(data) is not kind:
        message = f"{place} must be {_NAMES[kind]} ({json.dumps(data)[:60]} found)"
        raise InputError(message)
    return data
