"""The task of a division: its data in whole numbers, and what they say of every division."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from parcompiler.errors import InfeasibleError, InputError
from parcompiler.passes.divide.data import Evaluation, Flow, Load, evaluate, stages_on

RESOLUTION = 2**56  # sums of whole seconds stay below it, and well inside 64 bits


@dataclass(frozen=True)
class DivisionTask:
    """A division problem, also in whole numbers: seconds in multiples of `unit`, and bytes."""

    loads: Sequence[Load]
    flows: Sequence[Flow]
    placement: Sequence[int]
    microbatches: int
    held: Sequence[Sequence[tuple[int, ...]]]
    limits: Sequence[float]

    @cached_property
    def is_uniform(self) -> bool:
        """Whether every block takes the same on all ranks."""
        return not any(load.by_rank for load in self.loads)

    @cached_property
    def stages(self) -> int:
        """How many there are."""
        return len(self.placement)

    @cached_property
    def on(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank."""
        return stages_on(self.placement)

    @cached_property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.on)

    @cached_property
    def each(self) -> int:
        """Stages per rank."""
        return self.stages // self.ranks

    @cached_property
    def further(self) -> int:
        """What the slowest rank weighs, in an objective that is `each` times the step."""
        return self.each * (self.microbatches - 1)

    @cached_property
    def unit(self) -> float:
        """Seconds; all sums of the programme stay below RESOLUTION of them."""
        total = math.fsum(max(load.by_rank, default=load.seconds) for load in self.loads)
        total += math.fsum(flow.seconds * len(flow.consumers) for flow in self.flows)
        return total * (self.stages + self.each * self.microbatches) / RESOLUTION or 1.0

    @cached_property
    def compute(self) -> list[int]:
        """Units of each block, where it takes least."""
        return [round(load.seconds / self.unit) for load in self.loads]

    @cached_property
    def cost(self) -> list[list[int]]:
        """Units of each block on each rank."""
        if self.is_uniform:
            return [self.compute] * self.ranks
        return [[round(load.on(r) / self.unit) for load in self.loads] for r in range(self.ranks)]

    @cached_property
    def longest(self) -> int:
        """Units that the blocks take on no rank more than, even all of them."""
        return sum(self.compute) if self.is_uniform else max(map(sum, self.cost))

    @cached_property
    def worth(self) -> Sequence[int | Fraction]:
        """Units of `compute` that a rank does in one of its own, at most: 1 where all are alike.

        A block takes at least `compute[i] / worth[r]` units on rank r: so all bounds that count in
        `compute` hold when a rank's units are multiplied by this.
        """
        return [1] * self.ranks if self.is_uniform else _worth(self.compute, self.cost)

    def least_on(self, ranks: Collection[int]) -> list[int]:
        """Units of each block where it takes least of some ranks; of none, where it does at all."""
        if self.is_uniform or not ranks:
            return self.compute
        return list(map(min, zip(*(self.cost[r] for r in ranks), strict=True)))

    def pace(self, ranks: Collection[int]) -> int | Fraction:
        """Units of `least_on` that some ranks do together in one unit, at most.

        >>> slow = Load(1.0, 0, 0, by_rank=(1.0, 2.0, 4.0))
        >>> task = DivisionTask([slow] * 6, [], range(3), 1, [[(1,)]] * 3, [1] * 3)
        >>> [round(float(pace), 9) for pace in (*task.worth, task.pace([0, 1]), task.pace([1, 2]))]
        [1.0, 0.5, 0.25, 1.5, 1.5]
        """
        if self.is_uniform:
            return len(ranks)
        return sum(_worth(self.least_on(ranks), [self.cost[r] for r in ranks]))

    def capacity(self, rank: int, units: int) -> int:
        """Units of `compute` that a rank does at most in so many of its own."""
        return units if self.is_uniform else math.floor(units * self.worth[rank])

    @cached_property
    def move(self) -> list[int]:
        """Units of each flow."""
        return [round(flow.seconds / self.unit) for flow in self.flows]

    @cached_property
    def in_flight(self) -> list[int]:
        """The most micro-batches in flight on each stage, whatever the others have."""
        return [
            max(counts[self.on[rank].index(j)] for counts in self.held[rank])
            for j, rank in enumerate(self.placement)
        ]

    @cached_property
    def most(self) -> int:
        """Bytes that no rank can exceed."""
        fixed = sum(load.resident + sum(size for _, size in load.shared) for load in self.loads)
        copies = sum(flow.saved for flow in self.flows)
        saved = sum(load.saved for load in self.loads) + copies
        moment = max((load.moment for load in self.loads), default=0)
        return max(1, fixed + copies + max(self.in_flight) * saved + moment)

    @cached_property
    def room(self) -> list[int]:
        """Bytes of each rank; more than `most` make no difference."""
        return [math.floor(min(limit, self.most)) for limit in self.limits]

    @cached_property
    def arriving(self) -> list[set[int]]:
        """The flows that each block consumes."""
        arriving: list[set[int]] = [set() for _ in self.loads]
        for f, flow in enumerate(self.flows):
            for q in flow.consumers:
                arriving[q].add(f)
        return arriving

    @cached_property
    def above(self) -> list[Collection[int]]:
        """The blocks that each block depends on, itself included."""
        producers = [[self.flows[f].producer for f in flows] for flows in self.arriving]
        return _closed(producers)

    @cached_property
    def below(self) -> list[Collection[int]]:
        """The blocks that depend on each block, itself included."""
        last = len(self.loads) - 1
        consumers: list[list[int]] = [[] for _ in self.loads]
        for flow in self.flows:
            consumers[last - flow.producer] += [last - q for q in flow.consumers]
        return [mirrored(group, last) for group in reversed(_closed(consumers))]

    @cached_property
    def links(self) -> list[set[int]] | None:
        """The flows from each block to the next when no two lack one: all divisions are runs."""
        links = [
            {f for f in self.arriving[i] if self.flows[f].producer == i - 1}
            for i in range(len(self.loads))
        ]
        return links if all(links[1:]) else None

    @cached_property
    def is_chain(self) -> bool:
        """Whether every value goes to the next block, and to no other."""
        return all(flow.consumers == (flow.producer + 1,) for flow in self.flows)

    @cached_property
    def entry(self) -> list[int]:
        """Units that each block of a chain receives when it is the first of its stage; and none
        behind the last."""
        return [*(sum(self.move[f] for f in flows) for flows in self.arriving), 0]

    @cached_property
    def flows_of(self) -> list[list[int]]:
        """The flows that each block consumes or produces: consumed ones first."""
        made: list[list[int]] = [[] for _ in self.loads]
        for f, flow in enumerate(self.flows):
            made[flow.producer].append(f)
        return [[*arriving, *own] for arriving, own in zip(self.arriving, made, strict=True)]

    def evaluate(self, stage_of: Sequence[int]) -> Evaluation:
        """What a division costs."""
        return evaluate(
            self.loads, self.flows, stage_of, self.placement, self.microbatches, self.held
        )


def mirrored(group: Collection[int], last: int) -> Collection[int]:
    """The same blocks when they are counted from the last."""
    if isinstance(group, range):
        return range(last - group[-1], last - group[0] + 1)
    return {last - q for q in group}


def _closed(before: Sequence[Sequence[int]]) -> list[Collection[int]]:
    """All that comes before each block, itself included, from what comes directly before it.

    A range where that is every block so far: sets of the blocks of a chain would grow with the
    square of its length.

    >>> _closed([[], [], [0], [1, 2], [3]])
    [range(0, 1), {1}, {0, 2}, range(0, 4), range(0, 5)]
    """
    found: list[Collection[int]] = []
    for i, near in enumerate(before):
        if i and i - 1 in near and isinstance(found[i - 1], range):
            found.append(range(i + 1))
        else:
            group = {i}.union(*(found[q] for q in near))
            found.append(range(i + 1) if len(group) == i + 1 else group)
    return found


def _worth(least: Sequence[int], costs: Sequence[Sequence[int]]) -> list[int | Fraction]:
    """Units of `least` that are done in one of each of these costs, at most."""
    known: dict[tuple[int, ...], int | Fraction] = {}  # many ranks are alike
    for own in map(tuple, costs):
        if own not in known:
            pairs = zip(least, own, strict=True)
            known[own] = max((Fraction(a, b) for a, b in pairs if b), default=1)
    return [known[tuple(own)] for own in costs]


def check_task(task: DivisionTask) -> None:
    """Refuse data that are no division problem, and more stages than blocks."""
    fault = next(_faults(task), None)
    if fault is not None:
        raise InputError(fault)
    stages, blocks = task.stages, len(task.loads)
    if stages > blocks and task.each == 1:
        message = f"more stages than blocks ({stages} > {blocks}): use fewer stages or finer blocks"
        raise InfeasibleError(message)
    if stages > blocks:
        message = (
            f"more stages than blocks ({stages} > {blocks}; {task.ranks} ranks with {task.each} "
            "stages each): use fewer ranks, fewer stages per rank or finer blocks"
        )
        raise InfeasibleError(message)


def _by_rank(task: DivisionTask) -> Iterator[tuple[float, ...]]:
    """The seconds by rank of each block that has them."""
    return (load.by_rank for load in task.loads if load.by_rank)


def _faults(task: DivisionTask) -> Iterator[str]:
    """What is wrong; what follows a fault may rely on its absence."""
    placement, blocks = task.placement, len(task.loads)
    if not placement or task.microbatches < 1:
        yield (
            f"stages and microbatches must be positive ({len(placement)}, {task.microbatches} "
            "given)"
        )
    if min(placement) < 0 or len({len(stages) for stages in task.on}) > 1:
        yield f"each rank needs equally many stages ({tuple(placement)} given)"
    counts = len(task.held), len(task.limits)
    if counts != (task.ranks, task.ranks):
        yield f"held and limits need one item per rank ({counts} for {task.ranks} ranks)"
    for rank, vectors in enumerate(task.held):
        lengths = {len(vector) for vector in vectors}
        if lengths != {task.each} or any(k < 0 for vector in vectors for k in vector):
            yield (
                f"the micro-batches held on a rank need one count per stage ({tuple(vectors)} for "
                f"the {task.each} of rank {rank})"
            )
    if not all(limit >= 1 for limit in task.limits):
        yield f"a memory limit must be at least 1 byte ({min(task.limits):g} given)"
    if any(len(own) != task.ranks for own in _by_rank(task)):
        yield f"seconds by rank need one for each of the {task.ranks} ranks, or none"
    if any(load.by_rank and load.seconds != min(load.by_rank) for load in task.loads):
        yield "the seconds of a block must be the least of its seconds by rank"
    seconds = [load.seconds for load in task.loads] + [flow.seconds for flow in task.flows]
    seconds += [second for own in _by_rank(task) for second in own]
    if not all(0 <= value < math.inf for value in seconds):
        yield f"seconds must be finite and not negative ({min(seconds)} to {max(seconds)} given)"
    for flow in task.flows:
        if any(not 0 <= flow.producer < q < blocks for q in flow.consumers):
            yield (
                f"a flow does not go forward (block {flow.producer} to {flow.consumers} of "
                f"{blocks}): list the blocks in topological order"
            )
