"""The section about the meshes of a cluster: the best ten, and why the others lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from parcompiler.plan import STAYS, Plan
from parcompiler.report import data
from parcompiler.report.table import Cell, Column, Table, table, words
from parcompiler.report.units import BYTES, NOTHING, SECONDS, column, percent, quantity, ratio

if TYPE_CHECKING:
    from parcompiler.report.report import Report

SHOWN = 10
DEEP = "not weighed: few layers on each of many ranks"
Belongs = Callable[[data.MeshChoice], object]  # to a group of those that are left out


def considered(plan: Plan) -> tuple[data.MeshChoice, ...]:
    """The meshes that the plan's was chosen from."""
    return tuple(data.MeshChoice(**dataclasses.asdict(item)) for item in plan.meshes or ())


def meshes(report: Report) -> Table:
    """The best ten meshes, what their steps consist of, and in a last row what is left out."""
    best = report.meshes[:SHOWN]
    fastest = best[0].seconds if best else None
    times = column([item.seconds or 0.0 for item in best], SECONDS)
    sizes = column([item.memory or 0 for item in best], BYTES)
    rows = [
        _row(item, time, size, _why(item, best[0], report.mesh.memory), fastest)
        for item, time, size in zip(best, times, sizes, strict=True)
    ]
    rows += [(f"{n} more", *[""] * 8, why) for why, n in _others(report.meshes[SHOWN:])]
    headings = [
        Column("pipeline ×\ntensor × data"), Column("micro-\nbatches\n× rows"), words("plan"),
        Column("step"), Column("of\nleast"), Column("com-\npute"), Column("ex-\nchange"),
        Column("idle"), Column("fullest\nrank"), words("why not"),
    ]  # fmt: skip
    return table("Meshes considered", headings, rows)


def _row(
    item: data.MeshChoice, time: str, size: str, why: str, fastest: float | None
) -> tuple[str | Cell, ...]:
    """A mesh. What no plan can be below has a sign that says so."""
    least = ">= " if item.reason else ""
    step = item.seconds
    return (
        f"{item.pipeline} × {item.tensor} × {item.data}",
        str(item.microbatches) if item.rows is None else f"{item.microbatches} × {item.rows}",
        ", ".join(_plan(item)) or NOTHING,
        NOTHING if step is None else least + time,
        ratio(step / fastest) if step and fastest else NOTHING,
        *(NOTHING if part is None or not step else percent(part / step) for part in _parts(item)),
        NOTHING if item.memory is None else least + size,
        why,
    )


def _plan(item: data.MeshChoice) -> Iterator[str]:
    """What was decided for a mesh, in a few words."""
    if item.schedule:
        yield item.schedule
    if item.vocabulary not in (None, "whole"):
        yield str(item.vocabulary)
    if item.recomputed:
        yield f"{item.recomputed} recomputed"


def _parts(item: data.MeshChoice) -> tuple[float | None, float | None, float | None]:
    """What the seconds of a step consist of."""
    return item.compute, item.exchange, item.idle


def _why(item: data.MeshChoice, best: data.MeshChoice, memory: int) -> str:
    """Why a mesh lost: by how much memory, or what of its step is longer than the best one's."""
    if item is best:
        return ""
    if item.reason is not None:
        over = (item.memory or 0) - memory
        return f"{item.reason} (+{quantity(over, BYTES)})" if over > 0 else item.reason
    named = zip(("compute", "exchange", "idle"), _parts(item), _parts(best), strict=True)
    longer = [((own or 0.0) - (other or 0.0), name) for name, own, other in named]
    more, name = max(longer)
    return f"{quantity(more, SECONDS)} more {name}" if more > 0 else "plainer meshes come first"


def _kept(rest: Sequence[data.MeshChoice]) -> list[str]:
    """Why the micro-batch stays as it is given."""
    reasons = dict.fromkeys(item.reason for item in rest if item.reason)
    return [reason for reason in reasons if reason.startswith(STAYS)]


def _says(reason: str) -> Belongs:
    """Whether a mesh is left out for this reason."""
    return lambda item: item.reason == reason


def _others(rest: Sequence[data.MeshChoice]) -> Iterator[tuple[str, int]]:
    """What is left out of the table: by the reason how many."""
    groups: tuple[tuple[str, Belongs], ...] = (
        ("slower", lambda item: item.reason is None),
        ("no plan can be as fast", lambda item: item.reason and item.seconds),
        ("too little memory", lambda item: item.memory or "memory" in str(item.reason)),
        *((why, _says(why)) for why in _kept(rest)),
        (DEEP, lambda item: str(item.reason).startswith("not weighed")),
        ("the batch or the blocks cannot be shared", lambda item: item.reason),
    )
    left = list(rest)
    for why, belongs in groups:
        found = [item for item in left if belongs(item)]
        left = [item for item in left if not belongs(item)]
        if found:
            yield why, len(found)
