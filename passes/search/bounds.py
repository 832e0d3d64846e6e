"""Lower bounds on the step of every order of compute, from a few inequalities.

    rank 0  F0 F1 F2 .. .. .. B0 ...
    rank 1  .. F0 F1 F2 .. B0 ...                  [1] head: before the first forward of the rank
            [1]|<-- way -->|                       [2] way: from a forward to its backward
    rank 2  .. .. F0 F1 B0 ...           [3]       [3] tail: after the last backward of the rank

All work of a rank stands between its head and its tail. At most as many forwards precede its first
backward as fit in memory, and no more backwards follow its last forward. Each micro-batch takes
memory at least for its way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from parcompiler.passes.search.task import SearchTask


@dataclass(frozen=True)
class _Ways:
    """By stage, the longest chains of actions and messages around its forward and backward."""

    task: SearchTask

    @cached_property
    def head(self) -> list[float]:
        """Before the forward."""
        task, head = self.task, [0.0] * len(self.task.placement)
        for _ in head:  # a chain has no more stages than there are, in any order
            for x in task.messages:
                for j in x.targets:
                    ready = head[x.source] + self.forward(x.source) + self.delay(x.source, j, 0)
                    head[j] = max(head[j], ready)
        return head

    @cached_property
    def way(self) -> list[float]:
        """From the end of the forward to the start of the backward."""
        task, way = self.task, [0.0] * len(self.task.placement)
        for _ in way:
            for k, x in enumerate(task.messages):
                for j in x.targets:
                    out = self.delay(x.source, j, 0, k)
                    inside = self.forward(j) + way[j]
                    if x.gradient is not None:
                        back = self.back(j) + self.delay(x.source, j, 1, k)
                        way[x.source] = max(way[x.source], out + inside + back)
        return way

    @cached_property
    def tail(self) -> list[float]:
        """After the backward, or after its part that other stages wait for."""
        task = self.task
        tail = [task.durations[3 * j + 2] for j in range(len(task.placement))]
        for _ in tail:
            for k, x in enumerate(task.messages):
                if x.gradient is not None:
                    for j in x.targets:
                        after = self.back(x.source) + tail[x.source]
                        tail[j] = max(tail[j], self.delay(x.source, j, 1, k) + after)
        return tail

    def forward(self, j: int) -> float:
        """Seconds of a forward."""
        return self.task.durations[3 * j]

    def back(self, j: int) -> float:
        """Seconds of a backward, or of its part that other stages wait for."""
        return self.task.durations[3 * j + 1]

    def delay(self, source: int, target: int, way: int, number: int | None = None) -> float:
        """Seconds of a message between two stages (`way` 1: of its gradient); 0 on one rank."""
        if self.task.placement[source] == self.task.placement[target]:
            return 0.0
        candidates = self.task.messages if number is None else [self.task.messages[number]]
        return max(
            (x.gradient or 0.0) if way else x.seconds
            for x in candidates
            if x.source == source and target in x.targets
        )


def simple_bound(task: SearchTask) -> float:
    """The largest of the bounds of all ranks, and of the time of one micro-batch by itself."""
    ways = _Ways(task)
    alone = max(
        ways.head[j] + ways.forward(j) + ways.way[j] + ways.back(j) + ways.tail[j]
        for j in range(len(task.placement))
    )
    return max(alone, *(_rank_bound(task, ways, r) for r in range(task.pipeline.ranks)))


def _rank_bound(task: SearchTask, ways: _Ways, rank: int) -> float:
    """The lower bound from the work and the memory of one rank."""
    stages = [j for j, at in enumerate(task.placement) if at == rank]
    if not stages:
        return 0.0
    m = task.microbatches
    weights = {j: task.durations[3 * j + 2] for j in stages}
    whole = {j: ways.back(j) + weights[j] for j in stages}
    load = m * sum(ways.forward(j) + whole[j] for j in stages)
    head = min(ways.head[j] for j in stages)
    tail = min(0.0 if task.is_parted(j) else ways.tail[j] for j in stages)
    turn = min(ways.head[j] + ways.forward(j) + ways.way[j] for j in stages)
    early = _most(task, stages, rank, {j: ways.forward(j) for j in stages})
    late = _most(task, stages, rank, whole)
    last = min(ways.way[j] + ways.back(j) + ways.tail[j] for j in stages)
    bounds = [head + load + tail, turn + load - early + tail, head + load - late + last]
    stay = {j: ways.forward(j) + ways.way[j] + whole[j] for j in stages}
    for j in stages:
        size = task.sizes[j]
        together = int(task.rooms[rank] // size) if size else m
        rounds = -(-m // max(min(together, m), 1))  # micro-batch k + together waits for k
        end = stay[j] - weights[j] + ways.tail[j]
        bounds.append(ways.head[j] + (rounds - 1) * stay[j] + end)
    area = m * sum(task.sizes[j] * stay[j] for j in stages)
    if area:
        bounds.append(head + area / task.rooms[rank])
    return max(bounds)


def _most(task: SearchTask, stages: list[int], rank: int, seconds: dict[int, float]) -> float:
    """The most seconds of actions that fit in memory together: a fractional knapsack."""
    room = task.rooms[rank]
    total = 0.0
    for j in sorted(stages, key=lambda j: task.sizes[j] / seconds[j] if seconds[j] else 0.0):
        size = task.sizes[j]
        count = min(room / size, task.microbatches) if size else float(task.microbatches)
        if len(stages) == 1:
            count = int(count)
        total += count * seconds[j]
        room -= count * size
    return total
