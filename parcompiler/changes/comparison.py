"""Two plans side by side: what changed in words, and what that does to time and memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from parcompiler.changes.differences import Change, changes
from parcompiler.changes.side import Side
from parcompiler.report.names import clean
from parcompiler.report.render import ASCII
from parcompiler.report.units import BYTES, SECONDS, Scale, column, percent


@dataclass(frozen=True, slots=True)
class Comparison:
    """The changes from one plan to another, and what is predicted of both."""

    before: Side
    after: Side
    changes: tuple[Change, ...]

    @classmethod
    def of(cls, before: Side, after: Side) -> Comparison:
        """The comparison of two sides."""
        return cls(before, after, changes(before.plan, after.plan))

    def __str__(self) -> str:
        """Lines for a terminal, plain ASCII."""
        lines = [f"{self.before.name} -> {self.after.name}", "", *_changed(self.changes), ""]
        return "\n".join(map(_plain, [*lines, *_predicted(self.before, self.after)]))

    def data(self) -> dict[str, Any]:
        """The comparison as the json module writes it."""
        return {
            "changes": [dataclasses.asdict(change) for change in self.changes],
            "equal": not self.changes,
            "before": _data(self.before),
            "after": _data(self.after),
        }


def _plain(line: str) -> str:
    """A line of ASCII with nothing in it that acts instead of being seen."""
    return clean(line).translate(ASCII).encode("ascii", "backslashreplace").decode()


def _changed(changes: tuple[Change, ...]) -> Iterator[str]:
    """The changes below each other, each field named once."""
    if not changes:
        yield "The plans are the same."
        return
    yield "What changed"
    wide = max(len(change.field) for change in changes)
    for before, change in zip((None, *changes), changes, strict=False):
        named = before is not None and before.field == change.field
        yield f"  {'' if named else change.field:{wide}}  {change.text}"


def _predicted(before: Side, after: Side) -> Iterator[str]:
    """The predictions for both plans, or why there are none."""
    one, other = before.prediction, after.prediction
    if one is None or other is None:
        for side in (before, after):
            if side.prediction is None:
                yield f"No predicted time and memory of {side.name}: {side.why}."
        yield "(parcompiler plan --json and exported folders have them.)"
        return
    rows = [
        ("predicted", "before", "after", "change"),
        _row("time of a step", one.seconds, other.seconds, SECONDS),
        _row("idle, mean of the ranks", one.idle, other.idle),
        _row("FLOPs used (MFU)", one.mfu, other.mfu),
        _row("memory of the fullest rank", one.peak, other.peak, BYTES),
    ]
    if one.limit != other.limit:
        rows.append(_row("memory of a device", one.limit, other.limit, BYTES))
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    yield "What it does"
    for name, *cells in rows:
        numbers = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        yield f"  {'  '.join((name.ljust(widths[0]), *numbers))}".rstrip()


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


def _data(side: Side) -> dict[str, Any]:
    predicted = None if side.prediction is None else dataclasses.asdict(side.prediction)
    return {"name": side.name, "predicted": predicted}
