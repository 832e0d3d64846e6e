"""Costs of a division, kept up to date while blocks move from stage to stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import mul

from parcompiler.passes.divide.task import DivisionTask


class DivisionCosts:
    """A division and its costs, in the whole numbers of the task.

    `seconds` (in units) and `saved` (bytes per micro-batch in flight) are by stage; `busy` (units
    of time) and `fixed` (bytes that do not depend on micro-batches in flight) by rank. `above` is
    the sum of squares of the units by which ranks exceed an even share, `squares` that of the units
    of stages, which is least if they are even. A move touches two ranks, so that sums over ranks,
    and the bytes of the other ranks, are kept.
    """

    def __init__(self, task: DivisionTask, stage_of: Sequence[int]) -> None:
        self.task = task
        self.at = list(stage_of)
        self.seconds, self.saved = [0] * task.stages, [0] * task.stages
        self.busy, self.fixed = [0] * task.ranks, [0] * task.ranks
        self._cost, self._even = task.cost, task.even
        self._users: Counter[tuple[tuple[str, int], int]] = Counter()
        self._moments: list[Counter[int]] = [Counter() for _ in range(task.ranks)]
        self.above = self.squares = self._total = 0
        self._is_ample = task.most <= min(task.room)
        self._memory, self._excess = [*task.room], 0
        self._touched = set(range(task.ranks))  # ranks whose memory may have changed
        self._consumers = [[0] * task.stages for _ in task.flows]
        for i, j in enumerate(stage_of):
            self._compute(i, j, 1)
        for f, flow in enumerate(task.flows):
            for q in flow.consumers:
                self._consumers[f][stage_of[q]] += 1
            for rank in range(task.ranks):
                self._receive(f, rank, 1)

    def move(self, i: int, j: int) -> None:
        """Put block i on stage j."""
        task, old = self.task, self.at[i]
        ranks = {task.placement[old], task.placement[j]}
        self._receives(i, ranks, -1)
        self._compute(i, old, -1)
        self._compute(i, j, 1)
        for f in task.arriving[i]:
            self._consumers[f][old] -= 1
            self._consumers[f][j] += 1
        self.at[i] = j
        self._receives(i, ranks, 1)

    def memory(self) -> list[int]:
        """Bytes on each rank when it is fullest."""
        task, memory = self.task, self._memory
        for rank in self._touched:
            saved = [self.saved[j] for j in task.on[rank]]
            most: int = max([sum(map(mul, counts, saved)) for counts in task.held[rank]])
            size = self.fixed[rank] + most
            self._excess += max(0, size - task.room[rank]) - max(0, memory[rank] - task.room[rank])
            memory[rank] = size
        self._touched.clear()
        return memory

    def excess(self) -> int:
        """Bytes above the limits, summed over ranks."""
        if not self._is_ample:
            self.memory()
        return self._excess

    def objective(self) -> int:
        """Units of a step, times the stages per rank."""
        return self._total + self.task.further * max(self.busy)

    def _compute(self, i: int, j: int, sign: int) -> None:
        """Add block i to stage j (`sign` 1), or remove it (-1), without the values it receives."""
        load, rank = self.task.loads[i], self.task.placement[j]
        self._take(j, rank, sign * self._cost[rank][i])
        self.saved[j] += sign * load.saved
        self.fixed[rank] += sign * load.resident
        if load.moment:
            self._hold_moment(rank, load.moment, sign)
        for item in set(load.shared):
            before = self._users[item, rank]
            self._users[item, rank] = before + sign
            if not before or not before + sign:
                self.fixed[rank] += sign * item[1]

    def _receives(self, i: int, ranks: set[int], sign: int) -> None:
        """Add or remove what ranks receive of the values that block i consumes or produces."""
        for f in self.task.flows_of[i]:
            for rank in ranks:
                self._receive(f, rank, sign)

    def _receive(self, f: int, rank: int, sign: int) -> None:
        """Add or remove value f on the first stage of a rank that consumes it, unless the rank
        makes it."""
        task, consumers = self.task, self._consumers[f]
        if task.placement[self.at[task.flows[f].producer]] == rank:
            return
        for j in task.on[rank]:
            if consumers[j]:
                self._take(j, rank, sign * task.move[f])
                self.saved[j] += sign * task.flows[f].saved
                self.fixed[rank] += sign * task.flows[f].saved
                return

    def _hold_moment(self, rank: int, size: int, sign: int) -> None:
        """Add or remove the bytes that a block takes while it computes: the largest count."""
        moments = self._moments[rank]
        before = max(moments, default=0)
        moments[size] += sign
        if not moments[size]:
            del moments[size]
        self.fixed[rank] += max(moments, default=0) - before

    def _take(self, j: int, rank: int, units: int) -> None:
        """Add units of time to a stage; the memory of its rank may change with it."""
        before = self.seconds[j]
        self.seconds[j] = before + units
        self.squares += units * (2 * before + units)
        over = self.busy[rank] - self._even
        self.busy[rank] += units
        self.above += max(0, over + units) ** 2 - max(0, over) ** 2
        self._total += units
        self._touched.add(rank)
