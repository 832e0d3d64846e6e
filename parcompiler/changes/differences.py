"""Differences of two plans, a line for each part of a field, and their effect on time and memory.

>>> from parcompiler.plan import Shape
>>> before = Plan("GPT", "0f", Shape(pipeline=2), 8, schedule="1f1b", recompute=("h.0",))
>>> after = dataclasses.replace(before, schedule="zb-h1", recompute=("h.0", "h.1"))
>>> for change in changes(before, after):
...     print(f"{change.field}: {change.text}")
schedule: 1f1b -> zb-h1
recompute: now also h.1
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from parcompiler.changes.side import Side
from parcompiler.plan import MeshChoice, Method, Plan, Shards, StageChoice, TemplateTime, Weighed
from parcompiler.report.names import clean, ranges
from parcompiler.report.render import ASCII
from parcompiler.report.units import BYTES, SECONDS, Scale, column, percent

# Words for a field that is None, and for one whose value is long.
ABSENT = {
    "precision": "the model's own",
    "orders": "the order that the schedule's name says",
    "solution": "none",
    "search": "none",
    "context": "whole rows on every rank",
    "sharding": "tensors whole on every rank",
    "costs": "times by the device's figures",
    "vocabulary_costs": "times by the device's figures",
    "updates": "all-reduce of gradients",
}
PRESENT = {
    "orders": "an order of its own",
    "context": "rows in pieces on the context ranks",
    "sharding": "tensors in pieces on the tensor ranks",
    "costs": "measured times of blocks",
    "vocabulary_costs": "measured times",
}
NAMES: dict[type, Callable[[Any], str]] = {  # of the items of a tuple
    Method: lambda item: item.method,
    TemplateTime: lambda item: item.template,
    Shards: lambda item: " ".join((item.template, *item.blocks)),
    Weighed: lambda item: f"{item.schedule} x {item.virtual_stages}",
    MeshChoice: lambda item: item.degrees + (f" of {item.rows} rows" if item.rows else ""),
}


@dataclass(frozen=True, slots=True)
class Change:
    """A sentence about one field of the plan."""

    field: str
    text: str


def changes(before: Plan, after: Plan) -> tuple[Change, ...]:
    """The differences of two plans, in the order of the fields of `Plan`; empty for equal plans."""
    return tuple(
        Change(field.name, text)
        for field in dataclasses.fields(Plan)
        for text in _texts(field.name, getattr(before, field.name), getattr(after, field.name))
    )


def _texts(field: str, before: Any, after: Any) -> Iterator[str]:
    """The lines about a field of the plan."""
    if before == after:
        return
    if before is None or after is None:
        yield " -> ".join(
            ABSENT.get(field, "undecided") if value is None else PRESENT.get(field, _plain(value))
            for value in (before, after)
        )
    elif field == "fingerprint":
        yield "another graph: the sizes, the inputs or the code of the model are not the same"
    elif field == "orders":
        rows = max(len(before), len(after))
        ranks = [str(r) for r in range(rows) if before[r : r + 1] != after[r : r + 1]]
        yield f"rank {ranges(ranks)} computes in another order"
    else:
        yield from _differences(before, after)


def _plain(value: Any) -> str:
    """A value on a line; numbers with four digits.

    >>> _plain(0.123456), _plain(("h100", "l40s")), _plain(Weighed("1f1b", 1, 2.0))
    ('0.1235', 'h100, l40s', 'schedule 1f1b, virtual_stages 1, seconds 2')
    """
    if isinstance(value, tuple):
        return ranges(list(_items(value))) or "none"
    if dataclasses.is_dataclass(value):
        parts = [(item.name, getattr(value, item.name)) for item in dataclasses.fields(value)]
        return ", ".join(f"{name} {_plain(part)}" for name, part in parts if part not in (None, ()))
    if isinstance(value, float):
        return f"{value:.4g}"
    return "none" if value is None else str(value)


def _differences(before: Any, after: Any, *, brief: bool = False) -> Iterator[str]:
    """The lines about two values that differ; `brief`: of floats only the name of the field."""
    if isinstance(before, tuple) and isinstance(after, tuple):
        yield from _of_tuples(_items(before), _items(after))
    elif dataclasses.is_dataclass(before) and after is not None:
        parts = []
        for field in dataclasses.fields(before):
            one, other = getattr(before, field.name), getattr(after, field.name)
            if brief and one != other and float in (type(one), type(other)):
                parts.append(f"other {field.name}")
            elif one != other:
                parts.append(f"{field.name} {'; '.join(_differences(one, other))}")
        yield ", ".join(parts)
    else:
        yield f"{_plain(before)} -> {_plain(after)}"


def _of_tuples(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """The lines about items that were added, removed or changed; equal changes share a line."""
    moved = [
        f"{words} {ranges(names)}"
        for words, names in (
            ("now also", [name for name in after if name not in before]),
            ("no longer", [name for name in before if name not in after]),
        )
        if names
    ]
    groups: dict[str, list[str]] = {}
    for name in before:
        if name in after and before[name] != after[name]:
            text = "; ".join(_differences(before[name], after[name], brief=True))
            groups.setdefault(text, []).append(name)
    if moved:
        yield "; ".join(moved)
    yield from (f"{ranges(names)}: {text}" for text, names in groups.items())
    if not (moved or groups):
        yield "the same in another order"


def _items(value: tuple[Any, ...]) -> dict[str, Any]:
    """The items of a tuple by their names: blocks with their stages, records, and lines that are a
    name or "name: value".

    >>> _items((StageChoice(("wte", "h.0"), 0), StageChoice(("h.1",), 1)))["h.1"]
    'stage 1 (rank 1)'
    >>> _items(("up: S(0)", "mask"))
    {'up': 'S(0)', 'mask': ''}
    """
    items: dict[str, Any] = {}
    for number, item in enumerate(value):
        if isinstance(item, StageChoice):
            items |= dict.fromkeys(item.blocks, f"stage {number} (rank {item.rank})")
        elif isinstance(item, str):
            name, _, said = item.partition(": ")
            items[name] = said
        else:
            items[NAMES.get(type(item), _plain)(item)] = item
    return items


@dataclass(frozen=True, slots=True)
class Comparison:
    """The changes from one plan to another, and the predictions for both."""

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
        return "\n".join(map(_ascii, [*lines, *_predicted(self.before, self.after)]))

    def data(self) -> dict[str, Any]:
        """The comparison as the json module writes it."""
        return {
            "changes": [dataclasses.asdict(change) for change in self.changes],
            "equal": not self.changes,
            "before": _data(self.before),
            "after": _data(self.after),
        }


def _ascii(line: str) -> str:
    """A line of ASCII without control characters."""
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
