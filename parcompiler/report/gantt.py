"""The simulated step as a text chart: one line per rank, time from left to right.

rank 0  F0-F1-....B0----B1----      F forward and B backward of a micro-batch
rank 1  ...F0-B0----F1-B1----.      . idle
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from parcompiler.instruction import Kind
from parcompiler.report.data import ReportData
from parcompiler.report.events import StepEvent
from parcompiler.report.table import Cell, Drawing
from parcompiler.report.units import SECONDS, quantity
from parcompiler.timeline.timeline import DRAWN

WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward of inputs",
    Kind.BACKWARD_WEIGHT: "backward of weights",
    Kind.S: "logits of the rank's words",
    Kind.NORMALIZE: "exponentials",
    Kind.T: "gradients of the rank's words",
    Kind.UPDATE: "update",
}
FORWARDS = frozenset({Kind.FORWARD, Kind.S, Kind.NORMALIZE})
RANKS = 16  # more would be unreadable
WIDEST = 160
LEAST = 2
IDLE = Cell(".", "dim")


def gantt(report: ReportData, width: int) -> Drawing:
    """The step in `width` columns; empty when it does not fit.

    It fits when a forward or backward has `LEAST` columns on average.
    """
    ranks = len(report.ranks)
    label = len(f"rank {ranks - 1}  ")
    columns = min(width - label, WIDEST)
    events = [event for event in report.trail.events if event.kind in DRAWN]
    times = [event.end - event.begin for event in events if event.end > event.begin]
    seconds = max(report.step.seconds, *(event.end for event in report.trail.events), 0.0)
    title = f"Schedule: {quantity(seconds, SECONDS)} of {_legend(events)}, . idle"
    if ranks > RANKS or not times or columns * sum(times) < LEAST * seconds * len(times):
        return Drawing(title, ())
    several, lines = len(report.stages) > ranks, []
    for rank in range(ranks):
        on_rank = [event for event in events if event.rank == rank]
        cells = _row(on_rank, columns, columns / seconds, several)
        lines.append((Cell(f"rank {rank}".ljust(label), "dim"), *cells))
    return Drawing(title, tuple(lines))


def _legend(events: Iterable[StepEvent]) -> str:
    """The meaning of the letters that appear."""
    kinds = {event.kind for event in events}
    return ", ".join(f"{DRAWN[kind]} {word}" for kind, word in WORDS.items() if kind in kinds)


def _row(events: Sequence[StepEvent], columns: int, scale: float, several: bool) -> Iterator[Cell]:
    """The line of one rank, in runs of one style; `scale` is columns per second.

    Where ranks have `several` stages, labels start with the stage if there is room.
    """
    drawn = [IDLE] * columns
    for event in events:
        begin, end = int(event.begin * scale + 0.5), int(event.end * scale + 0.5)
        line = event.instruction
        style = "forward" if line.kind in FORWARDS else "backward"
        letter = DRAWN[line.kind]
        label = letter if line.microbatch is None else f"{letter}{line.microbatch}"
        labels = [f"{line.stage}{label}"] * (several and line.stage is not None) + [label, letter]
        label = next((text for text in labels if len(text) <= end - begin), letter)
        drawn[begin:end] = [Cell(letter, style) for letter in label.ljust(end - begin, "-")]
    for style, run in groupby(drawn[:columns], key=lambda cell: cell.style):
        yield Cell("".join(cell.text for cell in run), style)
