"""Simulated annealing of the words of all ranks, by exchanges on the critical path.

The critical path is a chain of actions and messages without a pause that lasts the whole step:

    rank 0  F0 F1 .. .. .. B0 W0            the step can only become shorter if two neighbours of
    rank 1  .. F0 F1 B0 B1                  the path on one rank, as [F1 B0], change places, or one
               [ F1 B0 ]                    of them moves further

A longer step is accepted with a probability that falls, first for large losses, then for small
ones. The seed is fixed: the same start gives the same words.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from parcompiler.passes.search.task import INFINITY, SearchTask, Word, last_end
from parcompiler.solver import ROUNDING

HOT, COLD = 0.05, 0.0005  # first and last temperature, relative to the step time
ENOUGH = 20  # steps per action for the highest temperature; fewer steps begin colder
FAR = 6  # most neighbours that an action passes in one move


@dataclass(frozen=True, slots=True)
class Walked:
    """Words and the seconds of their step."""

    step_time: float
    words: tuple[Word, ...] = field(repr=False)


def anneal(task: SearchTask, start: Sequence[Word], steps: int, target: float) -> Walked | None:
    """The best words found in `steps` steps that fit in memory; None if there are none.

    Stops early when the step takes `target` seconds, up to rounding.
    """
    walk = _Walk(task, start)
    share = steps / max(ENOUGH * sum(map(len, start)), 1)
    hot = max(HOT * min(share, 1.0), 2 * COLD)
    for step in range(steps):
        if not walk.pairs or (
            walk.best is not None and walk.best.step_time <= target * (1 + ROUNDING)
        ):
            break
        walk.step(hot * (COLD / hot) ** (step / steps))
    return walk.best


class _Walk:
    """The state of an annealing."""

    def __init__(self, task: SearchTask, start: Sequence[Word]) -> None:
        self.task = task
        self.chance = random.Random(0)
        self.words = [list(word) for word in start]
        self.buffered = any(message.nbytes for message in task.messages) or task.momentary
        self.rank_of = {kind: rank for rank, kinds in enumerate(task.classes) for kind in kinds}
        self.rooms = list(task.rooms)
        self.best: Walked | None = None
        self.time = self.scale = self._evaluate()
        self._accept()

    def step(self, temperature: float) -> None:
        """Try one exchange."""
        first, second = self.chance.choice(self.pairs)
        rank = self.rank_of[first // self.task.microbatches]
        old = self.words[rank]
        new = self._changed(old, first, second)
        if new == old or self._takes_more(rank, old, new):
            return
        self.words[rank] = new
        before, self.time = self.time, self._evaluate()
        loss = self.time - before
        if loss <= 0 or (
            self.time < INFINITY
            and self.chance.random() < math.exp(-loss / (temperature * self.scale))
        ):
            self._accept()
        else:
            self.words[rank], self.time = old, before

    def _takes_more(self, rank: int, old: Word, new: Word) -> bool:
        """Whether a new word exceeds the memory of its rank, and takes more than the old one."""
        use = self.task.use(new)
        return use > self.rooms[rank] and use > self.task.use(old)

    def _changed(self, old: Word, first: int, second: int) -> Word:
        """A word with two neighbours exchanged, or one of them moved past several others."""
        new, place, chance = list(old), old.index(first), self.chance.random()
        if chance < 0.5:
            new[place], new[place + 1] = second, first
            return new
        steps = self.chance.randint(2, FAR)
        if chance < 0.75:
            while steps and place + 1 < len(new) and self._may_swap(first, new[place + 1]):
                new[place] = new[place + 1]
                place, steps = place + 1, steps - 1
            new[place] = first
            return new
        place += 1
        while steps and place and self._may_swap(new[place - 1], second):
            new[place] = new[place - 1]
            place, steps = place - 1, steps - 1
        new[place] = second
        return new

    def _may_swap(self, first: int, second: int) -> bool:
        """Whether two neighbours on a rank may change places: see `SearchTask`."""
        m = self.task.microbatches
        kind, other = first // m, second // m
        return kind != other and not (kind // 3 == other // 3 and first % m == second % m)

    def _evaluate(self) -> float:
        self.moments = self.task.run(self.words)
        return last_end(self.words, self.moments.ends)

    def _accept(self) -> None:
        """Remember the words if they are the best, and find their critical path."""
        if self.time < INFINITY and (self.best is None or self.time < self.best.step_time):
            excess = self._excess()
            if max(excess) <= 0:
                self.best = Walked(self.time, tuple(map(list, self.words)))
            else:
                self._tighten(excess)
        path = self._critical_path()
        self.pairs = [
            (first, second)
            for second, first in pairwise(path)
            if self._are_neighbours(first, second) and self._may_swap(first, second)
        ]

    def _excess(self) -> list[float]:
        """By rank, the bytes above its limit. Only buffers and peaks within actions need the
        simulation."""
        if self.buffered:
            peaks = self.task.peaks(self.words)
            return [peak - limit for peak, limit in zip(peaks, self.task.limits, strict=True)]
        return [
            self.task.use(word) - room
            for word, room in zip(self.words, self.task.rooms, strict=True)
        ]

    def _tighten(self, excess: Sequence[float]) -> None:
        """Leave more room for buffers on ranks above their limits; go on from the best words."""
        for rank, size in enumerate(excess):
            self.rooms[rank] -= max(size, 0.0) / 2  # others may be fewer
        if self.best is not None:
            self.words = [list(word) for word in self.best.words]
            self.time = self._evaluate()

    def _are_neighbours(self, first: int, second: int) -> bool:
        m = self.task.microbatches
        return self.rank_of[first // m] == self.rank_of[second // m]

    def _critical_path(self) -> list[int]:
        """The actions of the critical path, the last one first."""
        if self.time == INFINITY:
            return []
        begins = self.moments.begins
        before = {code: k for word in self.words for k, code in pairwise(word)}
        code = max((word[-1] for word in self.words if word), key=self.moments.ends.__getitem__)
        path = [code]
        while begins[code] > 0.0:
            code = self._cause(code, before.get(code), begins[code])
            path.append(code)
        return path

    def _cause(self, code: int, before: int | None, begin: float) -> int:
        """The action that another one waited for: the one before it on its rank, or the sender of a
        message."""
        arrived, m = self.moments.ends, self.task.microbatches
        if before is not None and arrived[before] == begin:
            return before
        i = code % m
        row = max(self.task.pipeline.needs[code // m], key=lambda row: arrived[row + i])
        if row not in self.task.makers:
            return row + i
        return max((kind * m + i for kind in self.task.makers[row]), key=arrived.__getitem__)
