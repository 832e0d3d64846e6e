"""Frozen dataclasses as JSON; `documents` reads it back, checked field by field.

A value that can parse itself from a line of text is written as that line. Floats keep `DIGITS`
significant digits: the rest is rounding, and differs between releases of Python.

>>> @dataclasses.dataclass(frozen=True)
... class Point:
...     x: float
...     name: str | None = None
>>> text = to_json(Point(1 / 3))
>>> text.split()
['{', '"name":', 'null,', '"x":', '0.333333333', '}']
"""

from __future__ import annotations

import dataclasses
import json
import typing
from typing import Any, TypeVar

DIGITS = 9

T = TypeVar("T")


def to_json(value: object) -> str:
    """Sorted, indented JSON: the same bytes for the same value, ASCII only."""
    data = _plain(value)
    return json.dumps(data, indent=2, sort_keys=True, allow_nan=False) + "\n"


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
