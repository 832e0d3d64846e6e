"""A schedule as the picture people know: time from left to right, a line for each rank.

A forward and each half of a backward take one column, a whole backward two; messages none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parcompiler.instruction import BACKWARDS, Kind
from parcompiler.schedules.action import Action, Orders

COLUMNS = {Kind.BACKWARD: 2}  # everything else takes 1
Spans = list[tuple[int, int, Action]]  # begin, end, what


def picture(placement: Sequence[int], orders: Orders) -> str:
    """One line per rank; the bare orders where ranks would wait for each other for ever."""
    several = len(placement) > len(orders)
    labels = [[a.cell if several else str(a) for a in order] for order in orders]
    spans = _spans(len(placement), orders)
    if spans is None:
        lines = [" ".join(own) for own in labels]
    else:
        width = 1 + max(len(label) for own in labels for label in own)
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
    """When each action runs if it begins as soon as it can; None when some never do."""
    ended: dict[tuple[bool, int, int], int] = {}  # by (is a backward, stage, micro-batch)
    spans: list[Spans] = [[] for _ in orders]
    going = True
    while going:
        going = False
        for own, order in zip(spans, orders, strict=True):
            while len(own) < len(order):
                action = order[len(own)]
                ready = [ended.get(key) for key in _needs(action, stages - 1)]
                if None in ready:
                    break
                begin = max([own[-1][1] if own else 0, *(second or 0 for second in ready)])
                end = begin + COLUMNS.get(action.kind, 1)
                own.append((begin, end, action))
                if action.kind is not Kind.BACKWARD_WEIGHT:
                    ended[action.kind in BACKWARDS, action.stage, action.microbatch] = end
                going = True
    done = all(len(own) == len(order) for own, order in zip(spans, orders, strict=True))
    return spans if done else None


def _needs(action: Action, last: int) -> Iterator[tuple[bool, int, int]]:
    """What must have ended before an action begins."""
    j, i = action.stage, action.microbatch
    if action.kind is Kind.FORWARD and j > 0:
        yield False, j - 1, i
    if action.kind in BACKWARDS:
        yield False, j, i
        if j < last:
            yield True, j + 1, i
