"""What a report that was read must be, beyond the types of its fields."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from parcompiler.errors import InputError
from parcompiler.instruction import COMPUTE, Instruction, Kind

if TYPE_CHECKING:
    from parcompiler.report.report import Report


def check(report: Report) -> None:
    """Raise InputError that names the first field that refers to what is not there."""
    for fault in _faults(report):
        raise InputError(fault)


def _faults(report: Report) -> Iterator[str]:
    """What no report has: numbers of stages and ranks that are not there."""
    stages, ranks = len(report.stages), len(report.ranks)
    if not stages or not ranks:
        yield "report.stages and report.ranks must not be empty"
    if report.mesh.pipeline != ranks:
        found = report.mesh.pipeline
        yield f"report.mesh.pipeline must be {ranks}, as report.ranks are ({found} found)"
    if report.mesh.memory < 1:
        yield f"report.mesh.memory must be positive ({report.mesh.memory} found)"
    if len(report.mesh.devices) not in (0, ranks):
        yield f"report.mesh.devices must have {ranks} entries ({len(report.mesh.devices)} found)"
    for k, device in enumerate(report.mesh.devices):
        if device.memory < 1:
            yield f"report.mesh.devices[{k}].memory must be positive ({device.memory} found)"
    for j, stage in enumerate(report.stages):
        yield from _outside(f"report.stages[{j}].rank", [stage.rank], ranks)
    for k, value in enumerate(report.values):
        yield from _outside(f"report.values[{k}].source", [value.source], stages)
        yield from _outside(f"report.values[{k}].targets", value.targets or [-1], stages)
    for k, event in enumerate(report.trail.events):
        yield from _outside(f"report.trail.events[{k}]: rank", [event.rank], ranks)
        if event.kind in {*COMPUTE, Kind.SEND}:
            yield from _incomplete(f"report.trail.events[{k}]", event.instruction, ranks)
    if len(report.trail.memory) != ranks:
        yield f"report.trail.memory must have {ranks} entries ({len(report.trail.memory)} found)"
    if len(report.staleness) not in (0, stages):
        yield f"report.staleness must have {stages} entries ({len(report.staleness)} found)"
    if len(report.averaged) not in (0, ranks):
        yield f"report.averaged must have {ranks} entries ({len(report.averaged)} found)"
    if report.measurement is not None:
        for k, ran in enumerate(report.measurement.events):
            place = f"report.measurement.events[{k}]"
            yield from _outside(f"{place}: rank", [ran.rank], ranks)
            if ran.kind in {*COMPUTE, Kind.SEND}:
                yield from _incomplete(place, ran.instruction, ranks)
        for name in ("forward", "backward"):
            count = len(getattr(report.measurement, name))
            if count not in (0, stages):
                yield f"report.measurement.{name} must have {stages} entries ({count} found)"


def _incomplete(place: str, line: Instruction, ranks: int) -> Iterator[str]:
    """What a message or compute instruction lacks."""
    if line.kind is Kind.SEND:
        yield from _outside(f"{place}: peer", [-1 if line.peer is None else line.peer], ranks)
    elif line.stage is None or line.microbatch is None:
        yield f"{place} lacks a stage or a micro-batch ({str(line)!r} found)"


def _outside(place: str, numbers: Iterable[int], count: int) -> Iterator[str]:
    for number in numbers:
        if not 0 <= number < count:
            yield f"{place} must be from 0 to {count - 1} ({number} found)"
