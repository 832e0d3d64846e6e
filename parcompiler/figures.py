"""Checks of the figures in a device file: each is there, known, and a number that can be.

>>> number("memory", 4, positive=True)
>>> mapping("link", {"bandwidth": 1.0})
{'bandwidth': 1.0}
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

import torch

from parcompiler.errors import InputError, shown

# Quotients and sums of figures within these stay finite, in solvers too. No hardware is near them.
LEAST, MOST = 1e-15, 1e30
LONGEST = 3600.0  # s: a latency of more is one in another unit
FASTEST = 1e6  # times a link's bandwidth: likewise


def fields(
    cls: type[Any], data: object, prefix: str, optional: Collection[str] = ()
) -> dict[str, Any]:
    """The fields of `cls` in `data`: all that it must have, none that it does not know."""
    figures = mapping(prefix.rstrip(".") or "device", data)
    known = [item.name for item in dataclasses.fields(cls) if item.init]
    for name in figures:
        if name not in known:
            message = f"unknown device figure '{prefix}{name}' (known: {', '.join(known)})"
            raise InputError(message)
    for name in known:
        if name not in figures and name not in optional:
            message = f"device figure '{prefix}{name}' is missing"
            raise InputError(message)
    return dict(figures)


def mapping(name: str, data: object) -> Mapping[str, Any]:
    """A JSON object. Raises InputError for anything else."""
    if not isinstance(data, dict):
        message = f"device figure '{name}' must be a JSON object ({shown(data)} given)"
        raise InputError(message)
    return data


def pairs(name: str, data: object) -> tuple[tuple[str, Any], ...]:
    """Pairs of a name and what it is, sorted. Raises InputError for anything else."""
    items: list[tuple[str, Any]] = []
    for pair in data if isinstance(data, tuple | list) else [None]:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            message = f"device figure '{name}' must be pairs ({shown(data)} given)"
            raise InputError(message)
        items.append((pair[0], pair[1]))
    return tuple(sorted(items, key=lambda pair: pair[0]))


def is_dtype(name: str) -> bool:
    """Whether a dtype of torch has this name.

    >>> is_dtype("bfloat16"), is_dtype("real")
    (True, False)
    """
    return isinstance(getattr(torch, name, None), torch.dtype)


def number(name: str, value: object, *, positive: bool = False, most: float = MOST) -> None:
    """Refuse `value` unless it is a number from `LEAST` to `most`, or 0 where that may be."""
    given = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if LEAST <= given <= most or (given == 0 and not positive):
        return
    wanted = "a number above 0" if positive else "a number of at least 0"
    if 0 < given < LEAST:
        wanted += f", from {LEAST:g} on"
    if given > most or most < MOST:
        wanted += f" and at most {most:g}"
    message = f"device figure '{name}' must be {wanted} ({shown(value)} given)"
    raise InputError(message)
