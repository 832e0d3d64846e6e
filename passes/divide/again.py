"""A division task in which some blocks may run twice, so that they save less."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from parcompiler.passes.divide.data import Flow, Load, blocks_on, received_on, sizes
from parcompiler.passes.divide.task import DivisionTask
from parcompiler.passes.divide.twice import BlockKind, cheapest


class Alike(NamedTuple):
    """What tells blocks apart when one asks which of them run twice; units of time and bytes.

    `extra` are the units on each rank, or those on all ranks.
    """

    extra: tuple[int, ...]
    load: Load
    again: Load | None


@dataclass(frozen=True)
class Repeatable:
    """A task, and what each of its blocks is when it runs twice; None for one that must not.

    A block that runs twice takes `extra` units longer on a rank.
    """

    task: DivisionTask
    again: tuple[Load | None, ...]

    @cached_property
    def extra(self) -> list[list[int]]:
        """Units of time by rank and block."""
        if self.task.is_uniform:
            return [self._extra(0)] * self.task.ranks
        return list(map(self._extra, range(self.task.ranks)))

    def _extra(self, rank: int) -> list[int]:
        """The same on one rank."""
        return [
            0 if twice is None else max(0, round((twice.on(rank) - load.on(rank)) / self.task.unit))
            for load, twice in zip(self.task.loads, self.again, strict=True)
        ]

    @cached_property
    def kind_of(self) -> list[int]:
        """The number of each block's kind."""
        number: dict[Alike, int] = {}
        return [number.setdefault(self._alike(i), len(number)) for i in range(len(self.again))]

    @cached_property
    def kinds(self) -> list[Alike]:
        """The kinds by number."""
        found = dict(zip(self.kind_of, range(len(self.again)), strict=True))
        return [self._alike(found[number]) for number in range(len(found))]

    def _alike(self, i: int) -> Alike:
        """A block without what does not matter here."""
        bare, twice = (
            None if load is None else dataclasses.replace(load, seconds=0.0, shared=(), by_rank=())
            for load in (self.task.loads[i], self.again[i])
        )
        assert bare is not None
        times = self.extra[:1] if self.task.is_uniform else self.extra
        return Alike(tuple(own[i] for own in times), bare, twice)

    def under(self, twice: Collection[int]) -> DivisionTask:
        """The task in which these blocks run twice."""
        chosen = (self.again[i] if i in twice else None for i in range(len(self.again)))
        pairs = zip(chosen, self.task.loads, strict=True)
        return dataclasses.replace(self.task, loads=[other or load for other, load in pairs])

    @cached_property
    def leanest(self) -> DivisionTask:
        """A task that is easier than whatever one chooses: blocks with the least of both bytes."""
        loads = [
            load
            if twice is None
            else dataclasses.replace(
                load,
                resident=min(load.resident, twice.resident),
                saved=min(load.saved, twice.saved),
                moment=min(load.moment, twice.moment),
            )
            for load, twice in zip(self.task.loads, self.again, strict=True)
        ]
        return dataclasses.replace(self.task, loads=loads)

    def objective(self, stage_of: Sequence[int], twice: Collection[int]) -> int:
        """Units of a step, times the stages per rank."""
        task = self.task
        busy = [0] * task.ranks
        for i, j in enumerate(stage_of):
            rank = task.placement[j]
            busy[rank] += task.cost[rank][i] + (self.extra[rank][i] if i in twice else 0)
        for flow, units in zip(task.flows, task.move, strict=True):
            here = {task.placement[stage_of[q]] for q in flow.consumers}
            for rank in here - {task.placement[stage_of[flow.producer]]}:
                busy[rank] += units
        return sum(busy) + task.further * max(busy)

    def spared(self, stage_of: Sequence[int]) -> frozenset[int] | None:
        """The cheapest blocks to run twice on these stages; None when nothing fits.

        Ranks do not depend on each other then. Of blocks of one kind the first ones are taken.
        """
        task = self.task
        blocks = blocks_on(stage_of, task.stages)
        received = received_on(task.flows, stage_of, task.placement)
        found: set[int] = set()
        for rank, stages in enumerate(task.on):
            here = [blocks[j] for j in stages]
            own = self._spared(rank, here, [received[j] for j in stages])
            if own is None:
                return None
            found |= own
        return frozenset(found)

    def _spared(
        self, rank: int, blocks: Sequence[Sequence[int]], received: Sequence[Sequence[Flow]]
    ) -> set[int] | None:
        """Those of one rank, whose stages have these blocks: kinds are of one stage each."""
        task = self.task
        groups: dict[tuple[int, int], list[int]] = {}
        for i, place in sorted((i, place) for place, own in enumerate(blocks) for i in own):
            groups.setdefault((self.kind_of[i], place), []).append(i)
        vectors = task.held[rank]
        kinds = [
            self.kind(number, len(own), [vector[place] for vector in vectors], rank)
            for (number, place), own in groups.items()
        ]
        moment = max(self.kinds[number].load.moment for number, _ in groups)
        nbytes = sizes(task.loads, blocks, received, vectors)
        choice = cheapest(kinds, [size - moment - task.room[rank] for size in nbytes])
        if choice is None:
            return None
        pairs = zip(choice.counts, groups.values(), strict=True)
        return {i for count, own in pairs for i in own[:count]}

    def kind(self, number: int, count: int, flying: Sequence[int], rank: int) -> BlockKind:
        """Blocks of a kind on a stage, with its micro-batches in flight in each vector."""
        extra, load, twice = self.kinds[number]
        if twice is None:
            return BlockKind(count, None, (0,) * len(flying), load.moment, 0)
        fixed, saved = load.resident - twice.resident, load.saved - twice.saved
        freed = tuple(fixed + k * saved for k in flying)
        again = extra[rank if len(extra) > 1 else 0]
        return BlockKind(count, again, freed, load.moment, twice.moment)
