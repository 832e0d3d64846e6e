"""The sections about stages: what they hold, how long they take, what they keep in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from parcompiler.report.names import ranges
from parcompiler.report.table import Cell, Column, Table, table, words
from parcompiler.report.units import (
    BYTES,
    COUNT,
    FLOPS,
    NOTHING,
    SECONDS,
    column,
    percent,
    quantity,
    ratio,
)

if TYPE_CHECKING:
    from parcompiler.report.report import Report

FULL, NEARLY = 1.0, 0.9  # fractions of a device's memory


def stages(report: Report) -> Table:
    """What each stage holds."""
    held = report.stages
    names = [device.name for device in report.mesh.devices]
    rows = zip(
        map(str, range(len(held))),
        (str(stage.rank) for stage in held),
        *([(names[stage.rank] for stage in held)] if names else []),
        (ranges(stage.blocks) for stage in held),
        column([stage.parameters for stage in held], COUNT),
        column([stage.parameter_bytes for stage in held], BYTES),
        strict=True,
    )
    headings = [Column("stage"), Column("rank"), *[words("device")] * bool(names), words("blocks")]
    return table("Stages", [*headings, Column("parameters"), Column("size")], rows)


def work(report: Report) -> Table:
    """What each stage computes and sends for one micro-batch."""
    own = report.stages
    seconds = [stage.forward + stage.backward for stage in own]
    mean = sum(seconds) / len(seconds)
    rows = zip(
        map(str, range(len(own))),
        column([stage.forward_flops for stage in own], FLOPS),
        column([stage.forward_flops + stage.backward_flops for stage in own], FLOPS),
        column([stage.forward for stage in own], SECONDS),
        column([stage.backward for stage in own], SECONDS),
        (ratio(time / mean) if mean else NOTHING for time in seconds),
        column([stage.sent for stage in own], BYTES),
        column([stage.sent_back for stage in own], BYTES),
        _by_rank(report, [percent(rank.idle) for rank in report.ranks]),
        strict=True,
    )
    headings = (
        "stage", "forward\nFLOPs", "FLOPs with\nbackward", "forward\ntime", "backward\ntime",
        "of\nmean", "sent", "sent\nback", "rank\nidle",
    )  # fmt: skip
    return table("Work of a micro-batch", map(Column, headings), rows)


def memory(report: Report) -> Table:
    """What each stage keeps, and the most that its rank holds at once."""
    own, mesh = report.stages, report.mesh
    fractions = [rank.peak_memory / mesh.limit(r) for r, rank in enumerate(report.ranks)]
    limit = "its device" if mesh.devices else quantity(mesh.memory, BYTES)
    rows = zip(
        map(str, range(len(own))),
        column([stage.state for stage in own], BYTES),
        column([stage.activations for stage in own], BYTES),
        (f"× {stage.in_flight}" for stage in own),
        column([stage.activations * stage.in_flight for stage in own], BYTES),
        _by_rank(report, column([rank.peak_memory for rank in report.ranks], BYTES)),
        _by_rank(report, [Cell(percent(f), _alarm(f)) for f in fractions]),
        strict=True,
    )
    headings = (
        "stage", "weights,\noptimizer", "saved per\nmicro-batch", "in\nflight", "saved\nat once",
        "peak of\nrank", f"of\n{limit}",
    )  # fmt: skip
    return table("Memory", map(Column, headings), rows)


def versions(report: Report) -> Table:
    """How old the weights of stages get; empty where every step ends with its update."""
    rows = zip(
        map(str, range(len(report.staleness))),
        (str(stage.updates) for stage in report.staleness),
        (str(stage.versions) for stage in report.staleness),
        column([stage.nbytes for stage in report.staleness], BYTES),
        strict=True,
    )
    headings = ("stage", "updates\nold", "versions\nheld", "besides\nthe current")
    return table("Staleness of weights", map(Column, headings), rows)


def averaged(report: Report) -> Table:
    """What the data replicas of each rank do together; ranks are those of the pipeline."""
    own = report.averaged
    rows = zip(
        map(str, range(len(own))),
        (str(item.sums) for item in own),
        column([item.nbytes for item in own], BYTES),
        column([item.seconds for item in own], SECONDS),
        column([item.exposed for item in own], SECONDS),
        strict=True,
    )
    headings = ("rank", "sums", "size", "time", "after the\ncompute")
    return table(f"Gradients averaged, x data {report.mesh.data}", map(Column, headings), rows)


def measured(report: Report) -> Table:
    """Measured stages beside the predicted ones; empty where nothing was measured."""
    rows: tuple[tuple[str, ...], ...] = ()
    if report.measurement is not None and report.measurement.forward:
        forward = _beside([s.forward for s in report.stages], report.measurement.forward)
        backward = _beside([s.backward for s in report.stages], report.measurement.backward)
        triples = enumerate(zip(forward, backward, strict=True))
        rows = tuple((str(j), *first, *second) for j, (first, second) in triples)
    headings = (
        "stage", "forward\npredicted", "\nmeasured", "\nratio", "backward\npredicted", "\nmeasured",
        "\nratio",
    )  # fmt: skip
    return table("Predicted and measured", map(Column, headings), rows)


def _beside(
    predicted: Sequence[float], found: Sequence[float | None]
) -> Iterator[tuple[str, str, str]]:
    """Predicted, measured and their ratio."""
    texts = column([*predicted, *(value or 0.0 for value in found)], SECONDS)
    for k, (first, second) in enumerate(zip(predicted, found, strict=True)):
        compared = ratio(second / first) if first and second else NOTHING
        yield texts[k], texts[len(predicted) + k], compared


def _by_rank(report: Report, figures: Sequence[str | Cell]) -> Iterator[str | Cell]:
    """A figure of each rank, beside the first of its stages."""
    seen: set[int] = set()
    for stage in report.stages:
        yield "" if stage.rank in seen else figures[stage.rank]
        seen.add(stage.rank)


def _alarm(fraction: float) -> str:
    """The style of a fraction of the memory."""
    return "error" if fraction > FULL else "warning" if fraction > NEARLY else ""
