"""The sections of a report in order; empty ones are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from parcompiler.report import alternatives, division, overview, traffic
from parcompiler.report.data import ReportData
from parcompiler.report.gantt import gantt
from parcompiler.report.table import Drawing, Table

ALTERNATIVES = "Alternatives"

# Tables by their heading on a page.
TABLES: dict[str, tuple[Callable[[ReportData], Table], ...]] = {
    "Plan": (overview.overview, overview.step, overview.bounds, overview.changes),
    ALTERNATIVES: (
        alternatives.meshes,
        alternatives.levels,
        alternatives.owned,
        alternatives.schedules,
        alternatives.methods,
    ),
    "Vocabulary": (traffic.vocabulary, traffic.vocabulary_passes),
    "Stages": (
        division.measured,
        division.stages,
        division.work,
        division.lines,
        division.memory,
        division.versions,
        division.kept,
        division.averaged,
    ),
    "Placements": (traffic.placements, traffic.collectives, traffic.unsplit),
    "Values": (
        traffic.between,
        traffic.cuts,
        traffic.direct,
        traffic.recomputed,
        traffic.cheaper,
        traffic.shared,
        traffic.unread,
        traffic.estimated,
    ),
    "Closed forms": (division.symbols, division.forms),
}


# The tables of the summary, which fits one screen.
SUMMARY = (
    overview.overview, overview.step, alternatives.meshes, overview.bounds, overview.changes,
    division.summary,
)  # fmt: skip


def tables(report: ReportData) -> Iterator[tuple[str, list[Table]]]:
    """The tables that are not empty, by heading."""
    for heading, makes in TABLES.items():
        made = [table for make in makes if (table := make(report)).rows]
        if made:
            yield heading, made


def sections(report: ReportData, width: int, *, details: bool) -> Iterator[Table | Drawing]:
    """The sections for a page of `width` columns; without `details` those of one screen."""
    if details:
        for _, made in tables(report):
            yield from made
    else:
        yield from (table for make in SUMMARY if (table := make(report)).rows)
    drawing = gantt(report, width)
    if drawing.lines and (details or len(report.ranks) <= division.SHOWN):
        yield drawing
