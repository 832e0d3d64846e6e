"""Staleness of the weights of an asynchronous order, and the number of versions that it keeps.

A backward uses the weights of its forward, and the weights are updated after every backward:

    stage 0 of 2   F0 F1 B0 F2 B1 F3 B2 B3
    version        0  0     1     2           [1] B1 updates between F2 and the update of B2

>>> from parcompiler.schedules import build
>>> order = build("pipedream", ranks=4, microbatches=8).orders[0]
>>> staleness(order, 0), versions(order, 0)
(3, 4)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Protocol

from parcompiler.instruction import Kind

ACTIVATIONS = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_WEIGHT: -1}  # change of those kept
_WAITING = {Kind.BACKWARD_INPUT: 1, Kind.BACKWARD_WEIGHT: -1}


class ScheduledLine(Protocol):
    """A compute instruction, or an action of a schedule."""

    @property
    def kind(self) -> Kind: ...

    @property
    def stage(self) -> int | None: ...

    @property
    def microbatch(self) -> int | None: ...


def staleness(lines: Iterable[ScheduledLine], stage: int) -> int:
    """The most updates of a stage between the forward of a micro-batch and its own update."""
    return max((age for age, _ in _updates(lines, stage)), default=0)


def versions(lines: Iterable[ScheduledLine], stage: int) -> int:
    """The most versions of the weights of a stage that must be kept at once: the current one, and
    those of all micro-batches in flight."""
    return max((count for _, count in _updates(lines, stage)), default=1)


def _updates(lines: Iterable[ScheduledLine], stage: int) -> Iterator[tuple[int, int]]:
    """For each update, its staleness (updates since its forward) and the versions kept after it."""
    current, used = 0, dict[int | None, int]()
    for line in lines:
        if line.stage != stage:
            continue
        if line.kind is Kind.FORWARD:
            used[line.microbatch] = current
        elif line.kind is Kind.BACKWARD:
            age = current - used.pop(line.microbatch)
            current += 1
            yield age, len({*used.values(), current})


def waiting(lines: Iterable[ScheduledLine], stage: int) -> int:
    """The most micro-batches of a stage between their BACKWARD_INPUT and BACKWARD_WEIGHT.

        stage 1 of 2   F0 I0 F1 I1 W0 W1
        waiting            1     2  1  0

    >>> from parcompiler.schedules import build
    >>> [waiting(build(name, 4, 8).orders[3], 3) for name in ("1f1b", "zb-h1")]
    [0, 4]
    """
    return _most(_WAITING, (line for line in lines if line.stage == stage))


def most_alive(lines: Iterable[ScheduledLine]) -> int:
    """The most micro-batches, over all stages, between their forward and the end of their
    backward."""
    return _most(ACTIVATIONS, lines)


def _most(changes: Mapping[Kind, int], lines: Iterable[ScheduledLine]) -> int:
    """The largest sum of the changes so far."""
    return max(accumulate((changes.get(line.kind, 0) for line in lines), initial=0))
