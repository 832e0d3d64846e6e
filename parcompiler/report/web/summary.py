"""What a reader sees first: the figures of the step, each with what it means beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parcompiler.report.division import FULL, NEARLY
from parcompiler.report.names import clean
from parcompiler.report.units import BYTES, COUNT, FLOPS, SECONDS, percent, quantity, rate, ratio

if TYPE_CHECKING:
    from parcompiler.report.report import Report


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure, what it is and what to compare it with; `style` is "", "warning" or "error"."""

    name: str
    figure: str
    note: str
    style: str = ""


def tiles(report: Report) -> Iterator[Tile]:
    """The figures in order of interest."""
    step = report.step
    ideal = f"{quantity(step.ideal, SECONDS)} were no rank ever idle"
    yield Tile("Predicted step", quantity(step.seconds, SECONDS), ideal)
    if report.measurement is not None:
        seconds = report.measurement.seconds
        against = f"{ratio(seconds / step.seconds)} the predicted" if step.seconds else ""
        yield Tile("Measured step", quantity(seconds, SECONDS), against)
    idle = f"longest rank {ratio(step.imbalance)} the mean"
    yield Tile("Bubble", percent(step.idle), idle)
    yield _memory(report)
    power = f"of {devices(report):,} × {quantity(report.mesh.peak, FLOPS)}FLOP/s"
    yield Tile("MFU", percent(step.mfu), power)
    for name, count in (("Tokens a second", step.tokens), ("Samples a second", step.rows)):
        if count is not None and step.seconds:
            yield Tile(name, rate(count / step.seconds), f"{count:,} in a step")
            return


def subtitle(report: Report) -> str:
    """Model, mesh and schedule in a sentence."""
    model, mesh, choices = report.model, report.mesh, report.choices
    axes = (("pipeline", mesh.pipeline), ("data", mesh.data), ("tensor", mesh.tensor))
    named = [f"{name} {size}" for name, size in axes if size > 1] or ["one rank"]
    each = " on each data rank" if mesh.data > 1 else ""
    return clean(
        f"{quantity(model.parameters, COUNT)} parameters on {' × '.join(named)}: schedule "
        f"{choices.schedule}, {choices.microbatches} micro-batches a step{each}"
    )


def devices(report: Report) -> int:
    """The number of devices."""
    return report.mesh.pipeline * report.mesh.data * report.mesh.tensor


def _memory(report: Report) -> Tile:
    """The fullest rank."""
    peaks = [rank.peak_memory for rank in report.ranks]
    limits = [report.mesh.limit(rank) for rank in range(len(peaks))]
    fullest = max(range(len(peaks)), key=lambda rank: peaks[rank] / limits[rank])
    fraction = peaks[fullest] / limits[fullest]
    style = "error" if fraction > FULL else "warning" if fraction > NEARLY else ""
    verdict = "too much: " if style == "error" else ""
    note = f"{verdict}{percent(fraction)} of {quantity(limits[fullest], BYTES)}, rank {fullest}"
    return Tile("Peak memory", quantity(peaks[fullest], BYTES), note, style)
