"""How two plans differ: a line for each part of a field that is not the same.

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

from parcompiler.plan import MeshChoice, Method, Plan, Shards, StageChoice, TemplateTime, Weighed
from parcompiler.report.names import ranges

# Words for a field that is None, and for one whose value would be long.
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
    """What another plan decides otherwise, in the order of `Plan`; empty for equal plans."""
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
    """The lines about two values that differ; `brief`: of numbers with a fraction only the name."""
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
    """Named items that came and went, and those that differ; together where in the same way."""
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
