"""Two plans side by side: what changed in words, and what that does to time and memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from parcompiler.changes.figures import Figures
from parcompiler.changes.side import Side
from parcompiler.changes.words import Change, changes
from parcompiler.report.names import clean
from parcompiler.report.render import ASCII
from parcompiler.report.units import BYTES, SECONDS, column, percent


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
        sides = {"before": self.before, "after": self.after}
        return {
            "changes": [dataclasses.asdict(change) for change in self.changes],
            "equal": not self.changes,
            **{key: _side_data(side) for key, side in sides.items()},
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
    rows = [*_rows(before.figures, after.figures)]
    widths = [max(len(row[k]) for row in rows) for k in range(4)]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(row[k].rjust(widths[k]) for k in (1, 2, 3))]
        yield f"  {'  '.join(cells)}".rstrip()


def _rows(one: Figures, other: Figures) -> Iterator[tuple[str, ...]]:
    """A line for each figure: before, after, and how much that is."""
    yield "predicted", "before", "after", "change"
    yield (
        "time of a step",
        *column([one.seconds, other.seconds], SECONDS),
        _relative(one.seconds, other.seconds),
    )
    for name, get in _FRACTIONS:
        points = 100 * (get(other) - get(one))
        change = f"{points:+.1f} points" if points else "same"
        yield name, percent(get(one)), percent(get(other)), change
    yield (
        "memory of the fullest rank",
        *column([one.peak, other.peak], BYTES),
        _relative(one.peak, other.peak),
    )
    if one.limit != other.limit:
        yield (
            "memory of a device",
            *column([one.limit, other.limit], BYTES),
            _relative(one.limit, other.limit),
        )


_FRACTIONS: tuple[tuple[str, Callable[[Figures], float]], ...] = (
    ("idle, mean of the ranks", lambda figures: figures.idle),
    ("FLOPs used (MFU)", lambda figures: figures.mfu),
)


def _relative(one: float, other: float) -> str:
    """
    >>> _relative(2.0, 1.5), _relative(1.0, 1.0)
    ('-25.0 %', 'same')
    """
    if one == other:
        return "same"
    return f"{100 * (other - one) / one:+.1f} %" if one else "-"


def _side_data(side: Side) -> dict[str, Any]:
    predicted = side.figures.data() if side.figures is not None else None
    return {"name": side.name, "predicted": predicted}
