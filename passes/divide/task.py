"""A division problem in whole numbers, and bounds that hold for every division."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from parcompiler.errors import InfeasibleError, InputError
from parcompiler.passes.divide.data import Evaluation, Flow, Load, evaluate, stages_on

RESOLUTION = 2**56  # sums of whole seconds stay below it, and well inside 64 bits


@dataclass(frozen=True)
class DivisionTask:
    """A division problem, also in whole numbers: seconds in multiples of `unit`, and bytes.

    Blocks are in topological order, and stage j is on rank `placement[j]`; each rank has equally
    many stages, and no stage is empty. `held` has for each rank the micro-batches in flight on its
    stages, as one vector for each moment that may be the fullest. `limits` are bytes of each rank,
    maybe infinite. `again` has the load of each block when it runs twice (more seconds, fewer bytes
    saved), or None if it must not; where `again` is empty, no block may.
    """

    loads: Sequence[Load]
    flows: Sequence[Flow]
    placement: Sequence[int]
    microbatches: int
    held: Sequence[Sequence[tuple[int, ...]]]
    limits: Sequence[float]
    again: Sequence[Load | None] = ()

    @cached_property
    def is_uniform(self) -> bool:
        """Whether every block takes the same on all ranks."""
        return not any(load.by_rank for load in self.loads)

    @cached_property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.placement)

    @cached_property
    def on(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank."""
        return stages_on(self.placement)

    @cached_property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.on)

    @cached_property
    def each(self) -> int:
        """Stages per rank."""
        return self.stages // self.ranks

    @cached_property
    def further(self) -> int:
        """Weight of the slowest rank in an objective that is `each` times the step."""
        return self.each * (self.microbatches - 1)

    @cached_property
    def unit(self) -> float:
        """Seconds of one unit; all sums of the programme stay below RESOLUTION units."""
        total = math.fsum(max(load.by_rank, default=load.seconds) for load in self.loads)
        total += math.fsum(flow.seconds * len(flow.consumers) for flow in self.flows)
        return total * (self.stages + self.each * self.microbatches) / RESOLUTION or 1.0

    @cached_property
    def compute(self) -> list[int]:
        """Units of each block on the rank where it is fastest."""
        return [round(load.seconds / self.unit) for load in self.loads]

    @cached_property
    def cost(self) -> list[list[int]]:
        """Units of each block on each rank."""
        if self.is_uniform:
            return [self.compute] * self.ranks
        return [[round(load.on(r) / self.unit) for load in self.loads] for r in range(self.ranks)]

    def least_on(self, ranks: Collection[int]) -> list[int]:
        """Units of each block on its fastest rank of `ranks`, or of all where `ranks` is empty."""
        if self.is_uniform or not ranks:
            return self.compute
        return list(map(min, zip(*(self.cost[r] for r in ranks), strict=True)))

    def pace(self, ranks: Collection[int]) -> int | Fraction:
        """Upper bound on the units of `least_on` that these ranks do together in one unit of time.

        >>> slow = Load(1.0, 0, 0, by_rank=(1.0, 2.0, 4.0))
        >>> task = DivisionTask([slow] * 6, [], range(3), 1, [[(1,)]] * 3, [1] * 3)
        >>> [round(float(pace), 9) for pace in map(task.pace, ([0], [1], [0, 1], [1, 2]))]
        [1.0, 1.0, 1.5, 1.5]
        """
        if self.is_uniform:
            return len(ranks)
        return sum(_worth(self.least_on(ranks), [self.cost[r] for r in ranks]))

    @cached_property
    def even(self) -> int:
        """Lower bound on the units of the slowest rank: that of blocks that may be cut anywhere."""
        return int(-(-sum(self.compute) // self.pace(range(self.ranks))))

    @cached_property
    def extra(self) -> list[list[int]]:
        """By rank, the additional units of each block when it runs twice."""
        again = self.again or [None] * len(self.loads)
        pairs = [*zip(again, self.loads, strict=True)]
        times = [
            [
                0 if twice is None else max(0, round((twice.on(r) - load.on(r)) / self.unit))
                for twice, load in pairs
            ]
            for r in range(1 if self.is_uniform else self.ranks)
        ]
        return times * self.ranks if self.is_uniform else times

    @cached_property
    def kind_of(self) -> list[int]:
        """For each block the first of its kind: blocks of a kind have equal bytes and equal seconds
        to run again."""
        again = self.again or [None] * len(self.loads)
        first: dict[Hashable, int] = {}
        kinds = []
        for i, (load, twice) in enumerate(zip(self.loads, again, strict=True)):
            sizes = [(one.resident, one.saved, one.moment) for one in (load, twice) if one]
            key = tuple(sizes), tuple(extra[i] for extra in self.extra[: len(load.by_rank) or 1])
            kinds.append(first.setdefault(key, i))
        return kinds

    @cached_property
    def move(self) -> list[int]:
        """Units to move each flow."""
        return [round(flow.seconds / self.unit) for flow in self.flows]

    @cached_property
    def in_flight(self) -> list[int]:
        """The most micro-batches in flight on each stage, regardless of the other stages."""
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
        """Bytes of each rank, `most` of them at most."""
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
    def is_linked(self) -> bool:
        """Whether every block consumes a value of the one before: all divisions are runs then."""
        links = {(flow.producer, q) for flow in self.flows for q in flow.consumers}
        return all((i - 1, i) in links for i in range(1, len(self.loads)))

    @cached_property
    def flows_of(self) -> list[list[int]]:
        """The flows that each block consumes or produces: consumed ones first."""
        made: list[list[int]] = [[] for _ in self.loads]
        for f, flow in enumerate(self.flows):
            made[flow.producer].append(f)
        return [
            [*arriving, *leaving] for arriving, leaving in zip(self.arriving, made, strict=True)
        ]

    def under(self, twice: Collection[int]) -> DivisionTask:
        """The task in which these blocks run twice, and no others may."""
        loads = [
            (self.again[i] if i in twice else None) or load for i, load in enumerate(self.loads)
        ]
        return dataclasses.replace(self, loads=loads, again=())

    def objective(self, stage_of: Sequence[int], twice: Collection[int]) -> int:
        """Units of a step, times the stages per rank."""
        busy = [0] * self.ranks
        for i, j in enumerate(stage_of):
            rank = self.placement[j]
            busy[rank] += self.cost[rank][i] + (self.extra[rank][i] if i in twice else 0)
        for flow, units in zip(self.flows, self.move, strict=True):
            receivers = {self.placement[stage_of[q]] for q in flow.consumers}
            for rank in receivers - {self.placement[stage_of[flow.producer]]}:
                busy[rank] += units
        return sum(busy) + self.further * max(busy)

    def evaluate(self, stage_of: Sequence[int], twice: Collection[int] = ()) -> Evaluation:
        """Costs of a division when these blocks run twice."""
        loads = self.under(twice).loads if twice else self.loads
        return evaluate(loads, self.flows, stage_of, self.placement, self.microbatches, self.held)

    def fits(self, stage_of: Sequence[int]) -> bool:
        """Whether a division fits in memory when nothing runs twice."""
        return all(map(float.__le__, map(float, self.evaluate(stage_of).memory), self.limits))


def _worth(least: Sequence[int], costs: Sequence[Sequence[int]]) -> list[int | Fraction]:
    """For each rank's costs, the most units of `least` that it does in one unit of time."""
    known: dict[tuple[int, ...], int | Fraction] = {}  # many ranks are alike
    for times in map(tuple, costs):
        if times not in known:
            pairs = zip(least, times, strict=True)
            known[times] = max((Fraction(a, b) for a, b in pairs if b), default=1)
    return [known[tuple(times)] for times in costs]


def check_task(task: DivisionTask) -> None:
    """Refuse data that are no division problem, and more stages than blocks."""
    fault = next(_faults(task), None)
    if fault is not None:
        raise InputError(fault)
    check_count(task.placement, len(task.loads))


def check_count(placement: Sequence[int], blocks: int) -> None:
    """Refuse more stages than blocks."""
    stages, ranks = len(placement), len(set(placement))
    if stages <= blocks:
        return
    if stages == ranks:
        message = f"more stages than blocks ({stages} > {blocks}): use fewer stages or finer blocks"
        raise InfeasibleError(message)
    message = (
        f"more stages than blocks ({stages} > {blocks}; {ranks} ranks with {stages // ranks} "
        "stages each): use fewer ranks, fewer stages per rank or finer blocks"
    )
    raise InfeasibleError(message)


def _by_rank(task: DivisionTask) -> Iterator[tuple[float, ...]]:
    """The seconds by rank of each block that has them."""
    return (load.by_rank for load in task.loads if load.by_rank)


def _faults(task: DivisionTask) -> Iterator[str]:
    """The faults of a task. Later checks may rely on earlier ones."""
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
    if any(len(times) != task.ranks for times in _by_rank(task)):
        yield f"seconds by rank need one for each of the {task.ranks} ranks, or none"
    if any(load.by_rank and load.seconds != min(load.by_rank) for load in task.loads):
        yield "the seconds of a block must be the least of its seconds by rank"
    seconds = [load.seconds for load in task.loads] + [flow.seconds for flow in task.flows]
    seconds += [second for times in _by_rank(task) for second in times]
    if not all(0 <= value < math.inf for value in seconds):
        yield f"seconds must be finite and not negative ({min(seconds)} to {max(seconds)} given)"
    for flow in task.flows:
        if any(not 0 <= flow.producer < q < blocks for q in flow.consumers):
            yield (
                f"a flow does not go forward (block {flow.producer} to {flow.consumers} of "
                f"{blocks}): list the blocks in topological order"
            )
