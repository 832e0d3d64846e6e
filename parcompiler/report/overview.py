"""The first sections: what is trained on what, and how long a step takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from parcompiler.report.table import Column, Table, facts, named, table, words
from parcompiler.report.units import BYTES, COUNT, SECONDS, column, percent, quantity, rate, ratio

if TYPE_CHECKING:
    from parcompiler.report.report import Report


def overview(report: Report) -> Table:
    """What is given and what is decided."""
    return facts(title(report), _facts(report))


def title(report: Report) -> str:
    """The report in one line."""
    ranks = report.mesh.pipeline * report.mesh.data * report.mesh.tensor
    return f"{report.model.name} on {ranks} × {report.mesh.device}"


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    model, mesh, choices = report.model, report.mesh, report.choices
    frozen = f", {quantity(model.frozen, COUNT)} of them frozen" if model.frozen else ""
    size = f"{quantity(model.parameters, COUNT)} ({quantity(model.parameter_bytes, BYTES)})"
    axes = f"pipeline {mesh.pipeline} × data {mesh.data} × tensor {mesh.tensor}"
    yield "parameters", size + frozen
    yield "mesh", f"{axes}, {quantity(mesh.memory, BYTES)} each"
    yield "micro-batches", f"{choices.microbatches} a step"
    yield "precision", choices.precision or f"{model.dtype}, as the model is"
    yield "optimizer", choices.optimizer
    yield "schedule", choices.schedule
    different = f"{choices.templates} different, granularity {choices.granularity}"
    yield "blocks", f"{choices.blocks} ({different})"
    yield "random operators", "yes" if model.random else "no"
    if report.solver is not None:
        yield "solver", ", ".join(_proof(report))


def _proof(report: Report) -> Iterator[str]:
    """What the solver says of its division."""
    assert report.solver is not None
    yield report.solver.status
    if report.solver.objective is not None:
        yield f"objective {quantity(report.solver.objective, SECONDS)}"
    if report.solver.bound is not None:
        yield f"bound {quantity(report.solver.bound, SECONDS)}"
    if report.solver.gap is not None:
        yield f"gap {percent(report.solver.gap)}"


def step(report: Report) -> Table:
    """The predicted step, and the measured one beside it."""
    rows = (named(*row) for row in _step(report))
    headings = ["predicted"] if report.measurement is None else ["predicted", "measured", "ratio"]
    return table("Step", [words(""), *map(Column, headings)], rows)


def _step(report: Report) -> Iterator[tuple[str, ...]]:
    """A row for each figure; measured ones where there are any."""
    predicted = report.step
    times = [predicted.seconds]
    if report.measurement is not None:
        times.append(report.measurement.seconds)
    ratios = [ratio(times[1] / times[0])] if len(times) > 1 and times[0] else []
    yield "time", *column(times, SECONDS), *ratios
    yield "ideal: even stages, never idle, free messages", quantity(predicted.ideal, SECONDS)
    yield "idle, mean of the ranks", percent(predicted.idle)
    yield "imbalance: longest stage over mean", ratio(predicted.imbalance)
    for name, count in (("samples", predicted.rows), ("tokens", predicted.tokens)):
        if count is not None:
            yield f"{name} a second", *(rate(count / seconds) for seconds in times if seconds)
    used = (predicted.mfu * times[0] / seconds for seconds in times if seconds)
    yield "FLOPs used (MFU)", *map(percent, used)
