"""Reports as JSON; `documents` reads it back field by field, and `check` tests references.

A value with a `parse` method is written as one line of text. `rounded` keeps `DIGITS` significant
digits of floats: the rest is rounding, and differs between releases of Python.

>>> @dataclasses.dataclass(frozen=True)
... class Point:
...     x: float
...     name: str | None = None
>>> text = to_json(rounded(Point(1 / 3)))
>>> text.split()
['{', '"name":', 'null,', '"x":', '0.333333333', '}']
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from parcompiler.errors import InputError
from parcompiler.instruction import COMPUTE, Kind
from parcompiler.plan import Plan
from parcompiler.report.data import ReportData
from parcompiler.report.events import StepEvent

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
    """The value as data for the json module."""
    if hasattr(value, "parse"):
        return str(value)
    if dataclasses.is_dataclass(value):
        fields = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {
            field.name: _plain(item)
            for field, item in fields
            if item != () or field.default != ()  # restored by reading
        }
    return [*map(_plain, value)] if isinstance(value, tuple) else value


def upgraded(data: Any, plan: Plan) -> Any:
    """The data of a version 1 report, which repeats fields of the plan, with the plan instead;
    other versions unchanged."""
    if not isinstance(data, dict) or data.get("version") != 1:
        return data
    kept = {name: item for name, item in data.items() if name not in _OF_PLANS}
    if isinstance(kept.get("vocabulary"), dict):
        kept["vocabulary"] = {k: v for k, v in kept["vocabulary"].items() if k not in _OF_CHOICES}
    match data:
        case {"model": dict(model), "choices": {"templates": templates}}:
            kept["model"] = model | {"templates": templates}
    return kept | {"plan": json.loads(plan.to_json()), "version": 2}


_OF_PLANS = {"choices", "solver", "search", "weighed", "sharded", "meshes", "runner_up"}
_OF_CHOICES = {"method", "kept", "weighed"}


def check(report: ReportData) -> None:
    """Raise InputError that names the first field with an invalid reference."""
    for fault in _faults(report):
        raise InputError(fault)


def _faults(report: ReportData) -> Iterator[str]:
    """References to stages and ranks that do not exist, and lists of the wrong length."""
    stages, ranks, mesh = len(report.stages), len(report.ranks), report.mesh
    if not stages or not ranks:
        yield "report.stages and report.ranks must not be empty"
    if mesh.pipeline != ranks:
        yield f"report.mesh.pipeline must be {ranks}, as report.ranks are ({mesh.pipeline} found)"
    memories = [("report.mesh", mesh.memory)]
    memories += [(f"report.mesh.devices[{k}]", d.memory) for k, d in enumerate(mesh.devices)]
    for place, memory in memories:
        if memory < 1:
            yield f"{place}.memory must be positive ({memory} found)"
    for j, stage in enumerate(report.stages):
        yield from _outside(f"report.stages[{j}].rank", [stage.rank], ranks)
    for k, value in enumerate(report.values):
        yield from _outside(f"report.values[{k}].source", [value.source], stages)
        yield from _outside(f"report.values[{k}].targets", value.targets or [-1], stages)
    for k, event in enumerate(report.trail.events):
        yield from _event_faults(f"report.trail.events[{k}]", event, ranks)
    step = report.measurement
    for k, event in enumerate(step.events if step else ()):
        place = f"report.measurement.events[{k}]"
        yield from _event_faults(place, event, ranks)
        if event.waited is None:
            yield f"{place} lacks the seconds waited: 'rank begin end waited instruction'"
    if len(report.trail.memory) != ranks:
        yield f"report.trail.memory must have {ranks} entries ({len(report.trail.memory)} found)"
    lengths = [
        ("mesh.devices", len(mesh.devices), ranks),
        ("staleness", len(report.staleness), stages),
        ("averaged", len(report.averaged), ranks),
        ("measurement.forward", len(step.forward) if step else 0, stages),
        ("measurement.backward", len(step.backward) if step else 0, stages),
    ]
    for field, count, wanted in lengths:
        if count not in (0, wanted):
            yield f"report.{field} must have {wanted} entries ({count} found)"


def _event_faults(place: str, event: StepEvent, ranks: int) -> Iterator[str]:
    """References of an event that do not exist, and missing fields."""
    yield from _outside(f"{place}: rank", [event.rank], ranks)
    line = event.instruction
    if line.kind is Kind.SEND:
        yield from _outside(f"{place}: peer", [-1 if line.peer is None else line.peer], ranks)
    elif line.kind in COMPUTE and (line.stage is None or line.microbatch is None):
        yield f"{place} lacks a stage or a micro-batch ({str(line)!r} found)"


def _outside(place: str, numbers: Iterable[int], count: int) -> Iterator[str]:
    for number in numbers:
        if not 0 <= number < count:
            yield f"{place} must be from 0 to {count - 1} ({number} found)"
