"""Windows: the stages on which each block can be in a division better than the one known."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from parcompiler.passes.divide.bounds import least_received, overfull, reach
from parcompiler.passes.divide.task import DivisionTask, mirrored


@dataclass(frozen=True)
class Windows:
    """Block i is on one of the stages first[i] … last[i]; no rank takes more than `slowest`."""

    first: Sequence[int]
    last: Sequence[int]
    slowest: int
    received: Sequence[int]  # units of each stage, at least


@dataclass(frozen=True)
class _Resource:
    """What a rank has a capacity of; block i takes fixed[i] + factor[j] * scaled[i] on stage j."""

    fixed: Sequence[int]
    scaled: Sequence[int]
    factor: Sequence[int]
    capacity: Sequence[int]
    placement: Sequence[int]

    def mirrored(self) -> _Resource:
        """Blocks and stages from last to first."""
        return _Resource(
            self.fixed[::-1],
            self.scaled[::-1],
            self.factor[::-1],
            self.capacity,
            self.placement[::-1],
        )


def find_windows(task: DivisionTask, best: float) -> Windows | None:
    """The windows of the divisions better than `best`; None when there is no such division."""
    blocks, final = len(task.loads), task.stages - 1
    mirrored_below = [mirrored(group, blocks - 1) for group in reversed(task.below)]
    first, last = reach(task)
    while True:
        received = least_received(task, first, last)
        slowest = _slowest(task, best, sum(received))
        if slowest < 0 or any(low > high for low, high in zip(first, last, strict=True)):
            return None
        capacity = [
            task.capacity(r, slowest - sum(received[j] for j in stages))
            for r, stages in enumerate(task.on)
        ]
        if task.each > 1 and overfull(task, capacity):
            return None
        resources = _resources(task, capacity)
        earlier = _earliest(task.above, first, resources)
        mirror = [resource.mirrored() for resource in resources]
        later = _earliest(mirrored_below, [final - high for high in reversed(last)], mirror)
        narrowed = earlier, [final - low for low in reversed(later)]
        if narrowed == (first, last):
            return Windows(first, last, slowest, received)
        first, last = narrowed


def _slowest(task: DivisionTask, best: float, received: int) -> int:
    """The most units of a rank in a division better than `best`; negative when there is none."""
    total = sum(task.compute)
    if best == math.inf:
        return task.longest + sum(task.move)
    slack = math.ceil(best) - 1 - total - received
    if task.microbatches > 1:
        return slack // task.further
    return math.ceil(best) - 1 if slack >= 0 else -1


def _resources(task: DivisionTask, seconds: Sequence[int]) -> list[_Resource]:
    """Time and, where it can run short, memory. Copies and shared tensors are left out."""
    none, zero = [0] * len(task.loads), [0] * task.stages
    time = _Resource(task.compute, none, zero, seconds, task.placement)
    resident = [load.resident for load in task.loads]
    saved = [load.saved for load in task.loads]
    # Of the vectors of a rank, one is enough for a necessary condition: the largest.
    counts = [max(vectors, key=sum) for vectors in task.held]
    factor = [counts[rank][task.on[rank].index(j)] for j, rank in enumerate(task.placement)]
    memory = _Resource(resident, saved, factor, task.room, task.placement)
    return [time] if task.most <= min(task.room) else [time, memory]


def _earliest(
    above: Sequence[Collection[int]], floor: Sequence[int], resources: Sequence[_Resource]
) -> list[int]:
    """The first stage of each block that leaves room for all that it depends on."""
    first = list(floor)
    stages = len(resources[0].placement)
    for i, group in enumerate(above):
        first[i] = max(first[q] for q in group)
        while first[i] < stages and not all(
            _fits(one, group, first, first[i]) for one in resources
        ):
            first[i] += 1
    return first


def _fits(resource: _Resource, group: Collection[int], first: Sequence[int], e: int) -> bool:
    """Whether, for every j, those of a group that cannot come before j fit into stages j … e.

    Ranks with several of these stages have their capacity once.
    """
    fixed, scaled = [0] * (e + 1), [0] * (e + 1)
    for q in group:
        fixed[first[q]] += resource.fixed[q]
        scaled[first[q]] += resource.scaled[q]
    needed_fixed = needed_scaled = capacity = 0
    factor = resource.factor[e]
    ranks: set[int] = set()
    for j in reversed(range(e + 1)):
        needed_fixed += fixed[j]
        needed_scaled += scaled[j]
        if resource.placement[j] not in ranks:
            ranks.add(resource.placement[j])
            capacity += resource.capacity[resource.placement[j]]
        factor = min(factor, resource.factor[j])
        if needed_fixed + factor * needed_scaled > capacity:
            return False
    return True
