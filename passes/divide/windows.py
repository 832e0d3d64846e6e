"""Windows: the stages on which each block can be in a division better than the one known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from parcompiler.passes.divide.data import Task


@dataclass(frozen=True)
class Windows:
    """Block i is on one of the stages first[i] … last[i]; no stage takes more than `slowest`."""

    first: Sequence[int]
    last: Sequence[int]
    slowest: int


@dataclass(frozen=True)
class _Resource:
    """What a stage has a capacity of; block i takes fixed[i] + factor[j] * scaled[i] on stage j."""

    fixed: Sequence[int]
    scaled: Sequence[int]
    factor: Sequence[int]
    capacity: Sequence[int]

    def mirrored(self) -> _Resource:
        """Blocks and stages from last to first."""
        return _Resource(
            self.fixed[::-1], self.scaled[::-1], self.factor[::-1], self.capacity[::-1]
        )


def find_windows(task: Task, best: float) -> Windows | None:
    """The windows of the divisions better than `best`; None when there is no such division."""
    blocks, final = len(task.loads), task.stages - 1
    above = _ancestors(task)
    below = [{q for q in range(blocks) if i in above[q]} for i in range(blocks)]
    mirrored_below = [{blocks - 1 - q for q in group} for group in reversed(below)]
    # No stage is empty: those beside a block's take blocks that are not above, or not below it.
    first = [max(0, final - blocks + len(group)) for group in above]
    last = [min(final, blocks - len(group)) for group in below]
    while True:
        received = _least_received(task, first, last)
        slowest = _slowest(task, best, sum(received))
        if slowest < 0 or any(low > high for low, high in zip(first, last, strict=True)):
            return None
        resources = _resources(task, [slowest - units for units in received])
        earlier = _earliest(above, first, resources)
        mirror = [resource.mirrored() for resource in resources]
        later = _earliest(mirrored_below, [final - high for high in reversed(last)], mirror)
        narrowed = earlier, [final - low for low in reversed(later)]
        if narrowed == (first, last):
            return Windows(first, last, slowest)
        first, last = narrowed


def _ancestors(task: Task) -> list[set[int]]:
    """The blocks that each block depends on, itself included."""
    above: list[set[int]] = []
    for i, flows in enumerate(task.arriving):
        above.append({i}.union(*(above[task.flows[f].producer] for f in flows)))
    return above


def _least_received(task: Task, first: Sequence[int], last: Sequence[int]) -> list[int]:
    """Units that each stage receives at least: all that the first of its blocks consumes."""
    arriving = [sum(task.move[f] for f in flows) for flows in task.arriving]
    windows = list(zip(arriving, first, last, strict=True))
    return [
        min((units for units, low, high in windows if low <= j <= high), default=0)
        for j in range(task.stages)
    ]


def _slowest(task: Task, best: float, received: int) -> int:
    """The most units of a stage in a division better than `best`; negative when there is none."""
    total = sum(task.compute)
    if best == math.inf:
        return total + sum(task.move)
    slack = math.ceil(best) - 1 - total - received
    if task.microbatches > 1:
        return slack // (task.microbatches - 1)
    return math.ceil(best) - 1 if slack >= 0 else -1


def _resources(task: Task, seconds: Sequence[int]) -> list[_Resource]:
    """Time and, where it can run short, memory. Copies and shared tensors are left out."""
    none, zero = [0] * len(task.loads), [0] * task.stages
    time = _Resource(task.compute, none, zero, seconds)
    resident = [load.resident for load in task.loads]
    saved = [load.saved for load in task.loads]
    memory = _Resource(resident, saved, task.in_flight, task.room)
    return [time] if task.most <= min(task.room) else [time, memory]


def _earliest(
    above: Sequence[set[int]], floor: Sequence[int], resources: Sequence[_Resource]
) -> list[int]:
    """The first stage of each block that leaves room for all that it depends on."""
    first = list(floor)
    stages = len(resources[0].capacity)
    for i, group in enumerate(above):
        first[i] = max(first[q] for q in group)
        while first[i] < stages and not all(
            _fits(one, group, first, first[i]) for one in resources
        ):
            first[i] += 1
    return first


def _fits(resource: _Resource, group: set[int], first: Sequence[int], e: int) -> bool:
    """Whether, for every j, those of a group that cannot come before j fit into stages j … e."""
    fixed, scaled = [0] * (e + 1), [0] * (e + 1)
    for q in group:
        fixed[first[q]] += resource.fixed[q]
        scaled[first[q]] += resource.scaled[q]
    needed_fixed = needed_scaled = capacity = 0
    factor = resource.factor[e]
    for j in reversed(range(e + 1)):
        needed_fixed += fixed[j]
        needed_scaled += scaled[j]
        capacity += resource.capacity[j]
        factor = min(factor, resource.factor[j])
        if needed_fixed + factor * needed_scaled > capacity:
            return False
    return True
