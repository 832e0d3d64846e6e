"""Draws a schedule as in the papers: time from left to right, a line for each rank.

A forward and each part of a backward take one column, a whole backward two, messages none. Each
pass of the head on all ranks takes one, and waits for all ranks where it must.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from parcompiler.instruction import BACKWARDS, HEAD, Kind
from parcompiler.schedules.action import NOWHERE, Action, Orders

COLUMNS = {Kind.BACKWARD: 2}  # everything else takes 1
Spans = list[tuple[int, int, Action]]  # start, end, action
Done = tuple[Kind, int, int]  # an action that has ended; backwards that stages wait for as BACKWARD


def picture(placement: Sequence[int], orders: Orders) -> str:
    """One line per rank; the bare orders if ranks would deadlock."""
    several = len(placement) > len(orders)
    labels = [[a.cell if several else str(a) for a in order] for order in orders]
    spans = _spans(len(placement), orders)
    if spans is None:
        lines = [" ".join(row) for row in labels]
    else:
        width = 1 + max(len(label) for row in labels for label in row)
        lines = ["".join(_line(*pair, width)) for pair in zip(spans, labels, strict=True)]
    names = [f"rank {rank}" for rank in range(len(orders))]
    widest = max(map(len, names))
    return "\n".join(
        f"{name.ljust(widest)}  {line.rstrip()}" for name, line in zip(names, lines, strict=True)
    )


def _line(spans: Spans, labels: Sequence[str], width: int) -> Iterator[str]:
    """The cells of one rank; `.` is idle."""
    now = 0
    for (begin, end, _), label in zip(spans, labels, strict=True):
        yield ".".ljust(width) * (begin - now)
        yield label.ljust((end - begin) * width - 1, "-" if end - begin > 1 else " ") + " "
        now = end


def _spans(stages: int, orders: Orders) -> list[Spans] | None:
    """The span of each action if it begins as soon as it can; None when some never begin."""
    ended: dict[Done, list[int]] = defaultdict(list)  # the ends on all ranks that have it
    head = _head(orders)
    spans: list[Spans] = [[] for _ in orders]
    going = True
    while going:
        going = False
        for row, order in zip(spans, orders, strict=True):
            while len(row) < len(order):
                action = order[len(row)]
                needs = [*_needs(action, stages - 1), *_barriers(action, stages - 1, head)]
                if any(len(ended[key]) < _ranks(key, len(orders)) for key in needs):
                    break
                begin = max([row[-1][1] if row else 0, *(max(ended[key]) for key in needs)])
                end = begin + COLUMNS.get(action.kind, 1)
                row.append((begin, end, action))
                kind = Kind.BACKWARD if action.kind in BACKWARDS else action.kind
                ended[kind, action.stage, action.microbatch].append(end)
                going = True
    done = all(len(row) == len(order) for row, order in zip(spans, orders, strict=True))
    return spans if done else None


def _needs(action: Action, last: int) -> Iterator[Done]:
    """The actions of stages that must have ended before an action begins."""
    j, i = action.stage, action.microbatch
    if action.kind is Kind.FORWARD and j > 0:
        yield Kind.FORWARD, j - 1, i
    if action.kind in BACKWARDS:
        yield Kind.FORWARD, j, i
        if j < last:
            yield Kind.BACKWARD, j + 1, i


def _barriers(action: Action, last: int, head: Sequence[Kind]) -> Iterator[Done]:
    """The actions that must have ended before an action begins, because of a head on all ranks."""
    kind, j, i = action
    if kind is Kind.S:
        yield Kind.FORWARD, last, i
    elif kind in HEAD:
        yield (Kind.NORMALIZE if kind is Kind.T and Kind.NORMALIZE in head else Kind.S), NOWHERE, i
    elif kind in BACKWARDS and j == last and head:
        yield head[-1], NOWHERE, i


def _head(orders: Orders) -> Sequence[Kind]:
    """The passes of the head before the last stage's backward; T if it always precedes that."""
    kinds = [k for k in (Kind.S, Kind.NORMALIZE) if any(a.kind is k for o in orders for a in o)]
    if not kinds:
        return ()
    stages = max(action.stage for order in orders for action in order)
    order = next(order for order in orders if any(a.stage == stages for a in order))
    gradients: set[int] = set()
    for kind, j, i in order:
        if kind is Kind.T:
            gradients.add(i)
        elif kind in BACKWARDS and j == stages and i not in gradients:
            return kinds  # as under "vocab-2"
    return [*kinds, Kind.T]


def _ranks(key: Done, ranks: int) -> int:
    """The number of ranks that have an action."""
    return ranks if key[0] in HEAD else 1
