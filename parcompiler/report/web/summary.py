"""What a reader sees first: the figures of the step, each with what it means beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parcompiler.report.data import ReportData
from parcompiler.report.division import alarm
from parcompiler.report.names import clean
from parcompiler.report.units import BYTES, COUNT, FLOPS, SECONDS, percent, quantity, rate, ratio


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure, what it is and what to compare it with; `style` is "", "warning" or "error"."""

    name: str
    figure: str
    note: str
    style: str = ""


def tiles(report: ReportData) -> Iterator[Tile]:
    """The figures in order of interest."""
    step, mesh = report.step, report.mesh
    ideal = f"{quantity(step.ideal, SECONDS)} without idle time"
    yield Tile("Predicted step", quantity(step.seconds, SECONDS), ideal)
    if report.measurement is not None:
        seconds = report.measurement.seconds
        against = f"{ratio(seconds / step.seconds)} the predicted" if step.seconds else ""
        yield Tile("Measured step", quantity(seconds, SECONDS), against)
    idle = f"busiest rank {ratio(step.imbalance)} the mean"
    yield Tile("Bubble", percent(step.idle), idle)
    rank, fraction = report.fullest
    style = alarm(fraction)
    verdict = "too much: " if style == "error" else ""
    note = f"{verdict}{percent(fraction)} of {quantity(mesh.limit(rank), BYTES)}, rank {rank}"
    yield Tile("Peak memory", quantity(report.ranks[rank].peak_memory, BYTES), note, style)
    devices = mesh.pipeline * mesh.data * mesh.tensor
    yield Tile("MFU", percent(step.mfu), f"of {devices:,} × {quantity(mesh.peak, FLOPS)}FLOP/s")
    for name, count in (("Tokens a second", step.tokens), ("Samples a second", step.rows)):
        if count is not None and step.seconds:
            yield Tile(name, rate(count / step.seconds), f"{count:,} in a step")
            return


def subtitle(report: ReportData) -> str:
    """Model, mesh and schedule in a sentence."""
    model, mesh, choices = report.model, report.mesh, report.choices
    axes = (("pipeline", mesh.pipeline), ("data", mesh.data), ("tensor", mesh.tensor))
    named = [f"{name} {size}" for name, size in axes if size > 1] or ["one rank"]
    each = " on each data rank" if mesh.data > 1 else ""
    return clean(
        f"{quantity(model.parameters, COUNT)} parameters on {' × '.join(named)}: schedule "
        f"{choices.schedule}, {choices.microbatches} micro-batches a step{each}"
    )
