"""Which blocks another plan has on another stage or rank, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from parcompiler.plan import Plan, StageChoice
from parcompiler.report.names import ranges

Stages = tuple[StageChoice, ...]


def stages(_before: Plan, _after: Plan, first: Any, second: Any) -> Iterator[str]:
    """What is said of stages that differ: their number, blocks that moved, ranks."""
    one: Stages = first or ()
    other: Stages = second or ()
    if not one or not other:
        yield f"{_counted(one)} -> {_counted(other)}"
        return
    if len(one) != len(other):
        yield f"{_counted(one)} -> {_counted(other)}"
    was, now = _where(one), _where(other)
    if was.keys() != now.keys():
        yield f"cut into {len(was)} -> {len(now)} blocks"
        yield from _holds(other)
    elif len(one) != len(other):
        yield from _holds(other)
    else:
        yield from _moves(was, now, one, other)


def _counted(found: Stages) -> str:
    if not found:
        return "undecided"
    sizes = [len(stage.blocks) for stage in found]
    each = f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
    blocks = f"{each} block{'s' * (max(sizes) != 1)}"
    return f"{len(found)} stage{'s' * (len(found) > 1)} of {blocks}"


def _where(found: Stages) -> dict[str, int]:
    """The stage of each block."""
    return {name: j for j, stage in enumerate(found) for name in stage.blocks}


def _holds(found: Stages) -> Iterator[str]:
    """What every stage holds now."""
    for j, stage in enumerate(found):
        yield f"stage {j} (rank {stage.rank}) holds {ranges(stage.blocks) or 'nothing'}"


def _moves(was: dict[str, int], now: dict[str, int], one: Stages, other: Stages) -> Iterator[str]:
    """Blocks that are on another stage, then stages that are on another rank."""
    groups: dict[tuple[int, int], list[str]] = {}
    for name, j in was.items():
        if now[name] != j:
            groups.setdefault((j, now[name]), []).append(name)
    for (source, target), names in sorted(groups.items()):
        verb = "moves" if len(names) == 1 else "move"
        ranks = one[source].rank, other[target].rank
        where = "" if ranks[0] == ranks[1] else f" (rank {ranks[0]} -> {ranks[1]})"
        yield f"{ranges(names)} {verb} from stage {source} to stage {target}{where}"
    for j, (left, right) in enumerate(zip(one, other, strict=True)):
        if left.rank != right.rank:
            yield f"stage {j} runs on rank {right.rank} instead of {left.rank}"
    if not groups and all(a.rank == b.rank for a, b in zip(one, other, strict=True)):
        yield "the same blocks on every stage, in another order"
