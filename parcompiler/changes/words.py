"""How two plans differ, in words: one line for each decision that is not the same.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parcompiler.changes import moved, pieces
from parcompiler.plan import MeshChoice, Plan, Solution, VocabularyChoice
from parcompiler.report.names import ranges
from parcompiler.report.units import SECONDS, percent, quantity


@dataclass(frozen=True, slots=True)
class Change:
    """A sentence about one field of the plan."""

    field: str
    text: str


def changes(before: Plan, after: Plan) -> tuple[Change, ...]:
    """What another plan decides otherwise, in the order of `Plan`; empty for equal plans."""
    found = []
    for field in dataclasses.fields(Plan):
        first, second = getattr(before, field.name), getattr(after, field.name)
        if first != second:
            say = _WORDS.get(field.name, _arrow)
            found += [Change(field.name, text) for text in say(before, after, first, second)]
    return tuple(found)


def _arrow(_before: Plan, _after: Plan, first: object, second: object) -> Iterator[str]:
    """A value that a word or number says."""
    yield f"{_said(first)} -> {_said(second)}"


def _said(value: object) -> str:
    return "undecided" if value is None else str(value)


def _fingerprint(before: Plan, after: Plan, _first: object, _second: object) -> Iterator[str]:
    """Graphs that differ although the name is the same."""
    if before.model == after.model:
        yield "another graph: the sizes, the inputs or the code of the model are not the same"
    else:
        yield "another graph"


def _mesh(before: Plan, after: Plan, _first: object, _second: object) -> Iterator[str]:
    """The axes that have another degree, and the number of ranks."""
    one, other = before.mesh, after.mesh
    axes = [name for name in ("pipeline", "tensor", "data", "device")]
    pairs = [(name, _plainly(getattr(one, name)), _plainly(getattr(other, name))) for name in axes]
    said = ", ".join(f"{name} {a} -> {b}" for name, a, b in pairs if a != b)
    sizes = [shape.pipeline * shape.tensor * shape.data for shape in (one, other)]
    yield f"{said} ({sizes[0]} -> {sizes[1]} ranks)"


def _plainly(value: int | str | tuple[str, ...]) -> str:
    """A degree, or the device or devices of a mesh."""
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _precision(_before: Plan, _after: Plan, first: object, second: object) -> Iterator[str]:
    own = "the model's own"
    yield f"{first or own} -> {second or own}"


def _orders(_before: Plan, _after: Plan, first: Any, second: Any) -> Iterator[str]:
    """Which ranks compute in another order."""
    if first is None or second is None:
        own = "an order of its own", "the order that the schedule's name says"
        yield f"{own[first is None]} -> {own[second is None]}"
    elif len(first) != len(second):
        yield f"orders of {len(first)} -> {len(second)} ranks"
    else:
        pairs = zip(first, second, strict=True)
        ranks = [str(r) for r, (one, other) in enumerate(pairs) if one != other]
        yield f"rank {ranges(ranks)} computes in another order"


def _listed(_before: Plan, _after: Plan, first: Any, second: Any) -> Iterator[str]:
    """Names that came and went."""
    if first is None or second is None or set(first) == set(second):
        yield f"{_names(first)} -> {_names(second)}"
        return
    gained = [name for name in second if name not in first]
    lost = [name for name in first if name not in second]
    said = [f"now also {ranges(gained)}"] * bool(gained) + [f"no longer {ranges(lost)}"] * bool(
        lost
    )
    yield "; ".join(said)


def _names(names: Sequence[str] | None) -> str:
    return "undecided" if names is None else ranges(names) or "none"


def _solution(_before: Plan, _after: Plan, first: Any, second: Any) -> Iterator[str]:
    """How far an answer is proved."""
    yield f"{_proof(first)} -> {_proof(second)}"


def _proof(solution: Solution | None) -> str:
    if solution is None:
        return "none"
    objective = quantity(solution.objective, SECONDS)
    return f"{solution.status} ({objective}, gap {percent(solution.gap)})"


def _weighed(_before: Plan, _after: Plan, first: Any, second: Any) -> Iterator[str]:
    """The schedules that "auto" chose from."""
    one = {f"{item.schedule} x {item.virtual_stages}": item for item in first or ()}
    other = {f"{item.schedule} x {item.virtual_stages}": item for item in second or ()}
    yield _alternatives("schedules", one, other)


def _meshes(_before: Plan, _after: Plan, first: Any, second: Any) -> Iterator[str]:
    """The meshes of a cluster (pipeline x tensor x data) that the plan's was chosen from, and the
    rows of their micro-batches where there are several."""
    several = len({item.rows for side in (first, second) for item in side or ()}) > 1
    sides = [
        {_degrees(item) + (f" of {item.rows} rows" if several else ""): item for item in side or ()}
        for side in (first, second)
    ]
    yield _alternatives("meshes", sides[0], sides[1])


def _degrees(item: MeshChoice) -> str:
    """The degrees of a mesh."""
    return f"{item.pipeline} x {item.tensor} x {item.data}"


def _costs(_before: Plan, _after: Plan, first: Any, second: Any) -> Iterator[str]:
    """Where the times of blocks are from, and whose were measured anew."""
    if first is None or second is None:
        words = "measured times of blocks", "times by the device's figures"
        yield f"{words[first is None]} -> {words[second is None]}"
        return
    one, other = ({item.template: item for item in side} for side in (first, second))
    yield _alternatives("templates", one, other, "measured")


def _vocabulary_costs(_before: Plan, _after: Plan, first: Any, second: Any) -> Iterator[str]:
    """Where the times of the passes of the vocabulary are from."""
    words = [
        f"measured times of {side.method}" if side else "times by the device's figures"
        for side in (first, second)
    ]
    yield " -> ".join(words) if words[0] != words[1] else f"other {words[0]}"


def _alternatives(
    kind: str, one: Mapping[str, object], other: Mapping[str, object], verb: str = "considered"
) -> str:
    """Which alternatives were considered on one side only, or came out otherwise."""
    parts = []
    for word, names in (
        (f"now also {verb}", [name for name in other if name not in one]),
        (f"no longer {verb}", [name for name in one if name not in other]),
        ("other figures for", [name for name in one if other.get(name, one[name]) != one[name]]),
    ):
        parts += [f"{word}: {', '.join(names)}"] * bool(names)
    return "; ".join(parts) or f"the same {kind}, {verb} in another order"


def _vocabulary(_before: Plan, _after: Plan, first: Any, second: Any) -> Iterator[str]:
    """How the layers of the vocabulary are computed, and which they are."""
    none = VocabularyChoice("whole")
    one, other = first or none, second or none
    if one.method != other.method:
        yield f"{one.method} -> {other.method}{_tables(other)}"
    elif (one.lookups, one.head) != (other.lookups, other.head):
        yield f"{one.method} of other tables{_tables(other)}"
    if one.kept != other.kept:
        yield f"kept whole: {'; '.join(one.kept) or 'none'} -> {'; '.join(other.kept) or 'none'}"
    if one.weighed != other.weighed:
        methods = [{item.method: item for item in side.weighed or ()} for side in (one, other)]
        yield _alternatives("methods", methods[0], methods[1])
    if one == other:
        yield f"{_said(first and 'whole')} -> {_said(second and 'whole')}"


def _tables(choice: VocabularyChoice) -> str:
    """The tables that all ranks hold rows of."""
    names = [*choice.lookups, *([choice.head] if choice.head else [])]
    return f" (all ranks hold rows of {ranges(names)})" if choice.spread and names else ""


_WORDS: dict[str, Callable[[Plan, Plan, Any, Any], Iterator[str]]] = {
    "fingerprint": _fingerprint,
    "mesh": _mesh,
    "precision": _precision,
    "orders": _orders,
    "sent": _listed,
    "stages": moved.stages,
    "recompute": _listed,
    "solution": _solution,
    "search": _solution,
    "weighed": _weighed,
    "costs": _costs,
    "vocabulary_costs": _vocabulary_costs,
    "meshes": _meshes,
    "sharding": pieces.sharding,
    "vocabulary": _vocabulary,
}
