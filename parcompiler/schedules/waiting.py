"""How many micro-batches wait for their weight gradients at once, where a backward has two parts.

    stage 1 of 2   F0 I0 F1 I1 W0 W1
    waiting            1     2  1  0

>>> from parcompiler.schedules import build
>>> [waiting(build(name, 4, 8).orders[3], 3) for name in ("1f1b", "zb-h1")]
[0, 4]
"""

from __future__ import annotations

from collections.abc import Iterable

from parcompiler.instruction import Kind
from parcompiler.schedules.staleness import ScheduledLine

_CHANGE = {Kind.BACKWARD_INPUT: 1, Kind.BACKWARD_WEIGHT: -1}


def waiting(lines: Iterable[ScheduledLine], stage: int) -> int:
    """The most micro-batches of a stage between their BACKWARD_INPUT and BACKWARD_WEIGHT."""
    now = most = 0
    for line in lines:
        if line.stage == stage:
            now += _CHANGE.get(line.kind, 0)
            most = max(most, now)
    return most
