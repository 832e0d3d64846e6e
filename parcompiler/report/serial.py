"""Frozen dataclasses as JSON and back, checked field by field.

A value that can parse itself from a line of text is written as that line. Floats keep `DIGITS`
significant digits: the rest is rounding, and differs between releases of Python.

>>> @dataclasses.dataclass(frozen=True)
... class Point:
...     x: float
...     name: str | None = None
>>> text = to_json(Point(1 / 3))
>>> text.split()
['{', '"name":', 'null,', '"x":', '0.333333333', '}']
>>> from_json(Point, text, "point")
Point(x=0.333333333, name=None)
>>> from_json(Point, '{"x": "one"}', "point")
Traceback (most recent call last):
    ...
parcompiler.errors.InputError: point.x must be a number ("one" found)
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar, Union

from parcompiler.errors import InputError

DIGITS = 9

T = TypeVar("T")


def to_json(value: object) -> str:
    """Sorted, indented JSON: the same bytes for the same value, ASCII only."""
    data = _plain(value)
    return json.dumps(data, indent=2, sort_keys=True, allow_nan=False) + "\n"


def from_json(kind: type[T], text: str, place: str) -> T:
    """The value that a text describes. Raises InputError that names the wrong field.

    `place` is what the value is called in errors.
    """
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        message = f"the {place} is no JSON: {error}"
        raise InputError(message) from error
    value: T = _read(kind, data, place)
    return value


def rounded(value: T) -> T:
    """The value with all floats at `DIGITS` significant digits.

    >>> rounded((0.1 + 0.2, 12))
    (0.3, 12)
    """
    return typing.cast(T, _rounded(value))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, tuple):
        return tuple(map(_rounded, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return dataclasses.replace(value, **{name: _rounded(item) for name, item in fields})
    return value


def _plain(value: Any) -> Any:
    """What the json module writes."""
    if hasattr(value, "parse"):
        return str(_rounded(value))
    if dataclasses.is_dataclass(value):
        fields = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {
            field.name: _plain(item)
            for field, item in fields
            if item != () or field.default != ()  # reading puts that back
        }
    return [*map(_plain, value)] if isinstance(value, tuple) else _rounded(value)


def _read(kind: Any, data: object, place: str) -> Any:
    """`data` as a value of type `kind`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        if data is None:
            return None
        kind = next(argument for argument in arguments if argument is not types.NoneType)
        return _read(kind, data, place)
    if origin is tuple:
        items = _expect(list, data, place)
        return tuple(_read(arguments[0], item, f"{place}[{i}]") for i, item in enumerate(items))
    if hasattr(kind, "parse"):
        return _parsed(kind.parse, _expect(str, data, place), place)
    if dataclasses.is_dataclass(kind):
        return _fields(kind, _expect(dict, data, place), place)
    return _expect(kind, data, place)


def _parsed(parse: Callable[[str], Any], text: str, place: str) -> Any:
    """A value that is written as one line."""
    try:
        return parse(text)
    except InputError as error:
        message = f"{place}: {error}"
        raise InputError(message) from error


def _fields(kind: Any, data: dict[str, object], place: str) -> Any:
    """A dataclass from an object with its fields; those with a default may be missing."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name in sorted(data.keys() - fields.keys()):
        message = f"{place} has an unknown field {name!r} (known: {', '.join(sorted(fields))})"
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
    if type(data) is not kind or (kind is float and not math.isfinite(data)):
        message = f"{place} must be {_NAMES[kind]} ({json.dumps(data)[:60]} found)"
        raise InputError(message)
    return data
