"""Orders made up action by action: whichever rank can begin something first begins it.

Of what a rank can begin at one moment it takes a backward before a forward before a W, or a
forward first. It begins a forward only if all micro-batches on it can still be finished within the
memory, the oldest first, so that ranks never wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Iterator

from parcompiler.passes.search.task import INFINITY, SearchTask, Word

ORDERS = ((1, 0, 2), (0, 1, 2), (1, 2, 0))  # kinds, the most urgent first


def greedy(task: SearchTask) -> Iterator[list[Word]]:
    """Words that fit into the rooms, one for each order of urgency."""
    for urgency in ORDERS:
        yield _Making(task, [urgency.index(kind) for kind in range(3)]).words()


class _Making:
    """The state of words while they are made."""

    def __init__(self, task: SearchTask, urgency: list[int]) -> None:
        self.task = task
        self.urgency = urgency
        pipeline = task.pipeline
        self.made: list[Word] = [[] for _ in task.classes]
        self.next = [0] * (3 * len(task.placement))  # by class, the micro-batch of the next action
        self.free = [0.0] * pipeline.ranks
        self.used = [0] * pipeline.ranks
        self.link_free = [0.0] * pipeline.ranks**2
        self.arrived = [INFINITY] * len(task.seconds)
        self.left = {row: [count] * task.microbatches for row, count in pipeline.joint.items()}

    def words(self) -> list[Word]:
        """All actions of all ranks."""
        ranks = range(len(self.made))
        choices = [self._choice(rank) for rank in ranks]
        while True:
            rank = min(ranks, key=lambda r: choices[r][0])
            begin, _, kind = choices[rank]
            if begin == INFINITY:
                return self.made
            for changed in self._begin(rank, begin, kind):
                choices[changed] = self._choice(changed)

    def _choice(self, rank: int) -> tuple[float, int, int]:
        """When a rank can begin something, its urgency, and its class."""
        found = (INFINITY, 0, 0)
        for kind in self.task.classes[rank]:
            i = self.next[kind]
            if i < self.task.microbatches and (kind % 3 or self._has_room(rank, kind)):
                needs = [self.arrived[row + i] for row in self.task.pipeline.needs[kind]]
                begin = max(self.free[rank], *needs, 0.0)
                found = min(found, (begin, self.urgency[kind % 3], kind))
        return found

    def _has_room(self, rank: int, kind: int) -> bool:
        """Whether a forward leaves enough room to finish the micro-batches one after the other."""
        task = self.task
        kinds = task.classes[rank]
        last = {k // 3: k for k in kinds}
        begun = {j: self.next[3 * j] + (3 * j == kind) for j in last}
        used = self.used[rank] + task.largest[kind // 3]
        oldest = min(self.next[k] for k in last.values())
        if self.next[kind] == oldest:
            return True  # the oldest one can always be finished
        for i in range(oldest, max(begun.values())):
            if used + sum(task.largest[j] for j in last if begun[j] <= i) > task.rooms[rank]:
                return False
            used -= sum(task.sizes[j] for j in last if self.next[last[j]] <= i < begun[j])
        return True

    def _begin(self, rank: int, begin: float, kind: int) -> set[int]:
        """Let a rank do its next action of a class; returns the ranks that it matters to."""
        task, pipeline, m = self.task, self.task.pipeline, self.task.microbatches
        i = self.next[kind]
        self.next[kind] = i + 1
        self.made[rank].append(kind * m + i)
        self.used[rank] += task.changes[kind]
        end = self.free[rank] = self.arrived[kind * m + i] = begin + task.durations[kind]
        changed = {rank}
        for row, source, target, *_ in pipeline.sends[kind]:
            if row in self.left:
                self.left[row][i] -= 1
                if self.left[row][i]:
                    continue
            link = source * pipeline.ranks + target
            end_of_link = max(self.link_free[link], end) + task.seconds[row + i]
            self.arrived[row + i] = self.link_free[link] = end_of_link
            changed.add(target)
        return changed
