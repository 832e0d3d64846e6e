"""Two plans side by side: what changed in words, and what that does to time and memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from parcompiler.changes.side import Figures, Side
from parcompiler.changes.words import Change, changes
from parcompiler.report.names import clean
from parcompiler.report.render import ASCII
from parcompiler.report.units import BYTES, SECONDS, Scale, column, percent


@dataclass(frozen=True, slots=True)
class Comparison:
    """The changes from one plan to another, and the figures of both."""

    before: Side
    after: Side
    changes: tuple[Change, ...]

    @classmethod
    def of(cls, before: Side, after: Side) -> Comparison:
        """The comparison of two sides."""
        return cls(before, after, changes(before.plan, after.plan))

    def __str__(self) -> str:
        """Lines for a terminal, plain ASCII."""
        lines = [f"{self.before.name} -> {self.after.name}", "", *_said(self.changes), ""]
        return "\n".join(map(_plain, [*lines, *_told(self.before, self.after)]))

    def data(self) -> dict[str, Any]:
        """The same as the json module writes it."""
        return {
            "changes": [dataclasses.asdict(change) for change in self.changes],
            "equal": not self.changes,
            "before": _side_data(self.before),
            "after": _side_data(self.after),
        }


def _plain(line: str) -> str:
    """A line of ASCII with nothing in it that acts instead of being seen."""
    return clean(line).translate(ASCII).encode("ascii", "backslashreplace").decode()


def _said(found: tuple[Change, ...]) -> Iterator[str]:
    """The changes below each other, each field named once."""
    if not found:
        yield "The plans are the same."
        return
    yield "What changed"
    wide = max(len(change.field) for change in found)
    last = ""
    for change in found:
        yield f"  {change.field if change.field != last else '':{wide}}  {change.text}"
        last = change.field


def _told(before: Side, after: Side) -> Iterator[str]:
    """The figures of both plans, or why there are none."""
    if before.figures is None or after.figures is None:
        for side in (before, after):
            if side.figures is None:
                yield f"No predicted time and memory of {side.name}: {side.why}."
        yield "(parcompiler plan --json and exported folders have them.)"
        return
    yield "What it does"
    rows = [("predicted", "before", "after", "change"), *_rows(before.figures, after.figures)]
    widths = [max(len(row[k]) for row in rows) for k in range(4)]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(row[k].rjust(widths[k]) for k in (1, 2, 3))]
        yield f"  {'  '.join(cells)}".rstrip()


def _rows(one: Figures, other: Figures) -> Iterator[tuple[str, ...]]:
    """A line for each figure: before, after, and how much that is."""
    yield _row("time of a step", one.seconds, other.seconds, SECONDS)
    yield _row("idle, mean of the ranks", one.idle, other.idle)
    yield _row("FLOPs used (MFU)", one.mfu, other.mfu)
    yield _row("memory of the fullest rank", one.peak, other.peak, BYTES)
    if one.limit != other.limit:
        yield _row("memory of a device", one.limit, other.limit, BYTES)


def _row(name: str, one: float, other: float, scale: Scale | None = None) -> tuple[str, ...]:
    """A figure of both plans; a fraction where it has no unit.

    >>> _row("time", 2.0, 1.5, SECONDS), _row("idle", 0.1, 0.15)
    (('time', '2.00 s', '1.50 s', '-25.0 %'), ('idle', '10.0 %', '15.0 %', '+5.0 points'))
    """
    if scale is None:
        cells, change = [percent(one), percent(other)], f"{100 * (other - one):+.1f} points"
    else:
        cells = column([one, other], scale)
        change = f"{100 * (other - one) / one:+.1f} %" if one else "-"
    return name, *cells, "same" if one == other else change


def _side_data(side: Side) -> dict[str, Any]:
    predicted = None if side.figures is None else dataclasses.asdict(side.figures)
    return {"name": side.name, "predicted": predicted}
