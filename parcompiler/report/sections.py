"""What a report says and in which order; a section that would be empty is left out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from parcompiler.report import division, forms, meshes, overview, placements, traffic, vocabulary
from parcompiler.report.gantt import gantt
from parcompiler.report.table import Section

if TYPE_CHECKING:
    from parcompiler.report.report import Report

TABLES = (
    overview.overview,
    overview.step,
    meshes.meshes,
    overview.weighed,
    vocabulary.weighed,
    vocabulary.tables,
    vocabulary.passes,
    division.measured,
    division.stages,
    division.work,
    division.memory,
    division.versions,
    division.averaged,
    placements.held,
    placements.told,
    placements.unsplit,
    traffic.between,
    traffic.cuts,
    traffic.direct,
    traffic.recomputed,
    traffic.cheaper,
    traffic.shared,
    traffic.unread,
    traffic.estimated,
    forms.symbols,
    forms.forms,
)


def sections(report: Report, width: int) -> Iterator[Section]:
    """The sections for a page of `width` columns."""
    for make in TABLES:
        table = make(report)
        if table.rows:
            yield table
    drawing = gantt(report, width)
    if drawing.lines:
        yield drawing
