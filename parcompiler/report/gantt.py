"""The simulated step as a drawing: one line per rank, time from left to right.

rank 0  F0-F1-....B0----B1----      F forward and B backward of a micro-batch
rank 1  ...F0-B0----F1-B1----.      . idle
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from parcompiler.instruction import COMPUTE, Kind
from parcompiler.report.data import Event
from parcompiler.report.table import Cell, Drawing
from parcompiler.report.units import SECONDS, quantity

if TYPE_CHECKING:
    from parcompiler.report.report import Report

RANKS = 16  # more are no longer a picture
WIDEST = 160
IDLE = Cell(".", "dim")


def gantt(report: Report, width: int) -> Drawing:
    """The step in `width` columns; empty when it does not fit.

    It fits when the shortest forward or backward has a column of its own.
    """
    ranks = len(report.ranks)
    label = len(f"rank {ranks - 1}  ")
    columns = min(width - label, WIDEST)
    events = [event for event in report.trail.events if event.kind in COMPUTE]
    times = [event.end - event.begin for event in events if event.end > event.begin]
    seconds = max(report.step.seconds, *(event.end for event in report.trail.events), 0.0)
    title = f"Schedule: {quantity(seconds, SECONDS)} of F forward, B backward, . idle"
    if ranks > RANKS or not times or columns * min(times) < seconds:
        return Drawing(title, ())
    lines = []
    for rank in range(ranks):
        own = [event for event in events if event.rank == rank]
        cells = _row(own, columns, columns / seconds)
        lines.append((Cell(f"rank {rank}".ljust(label), "dim"), *cells))
    return Drawing(title, tuple(lines))


def _row(events: Sequence[Event], columns: int, scale: float) -> Iterator[Cell]:
    """The line of one rank, in runs of one style; `scale` is columns per second."""
    drawn = [IDLE] * columns
    for event in events:
        begin, end = int(event.begin * scale + 0.5), int(event.end * scale + 0.5)
        line = event.instruction
        style = "forward" if line.kind is Kind.FORWARD else "backward"
        label = f"{line.kind[0]}{line.microbatch}"
        label = label if len(label) <= end - begin else line.kind[0]
        drawn[begin:end] = [Cell(letter, style) for letter in label.ljust(end - begin, "-")]
    for style, run in groupby(drawn[:columns], key=lambda cell: cell.style):
        yield Cell("".join(cell.text for cell in run), style)
