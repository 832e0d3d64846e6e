"""The data of a division problem, and the costs of a division."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Load:
    """The time and memory of one block.

    `seconds` of forward and backward of one micro-batch; `resident` bytes under any schedule
    (parameters, gradients, optimizer states); `saved` bytes kept for the backward, per micro-batch
    in flight; `shared` tensors (name, bytes) count once per rank, for all its blocks that use them.
    While the block computes, its rank takes `moment` bytes more: a rank computes one block at a
    time, so that the largest `moment` counts. `by_rank` are the seconds on each rank where ranks
    differ; `seconds` is then the least of them.
    """

    seconds: float
    resident: int
    saved: int
    shared: tuple[tuple[str, int], ...] = ()
    moment: int = 0
    by_rank: tuple[float, ...] = ()

    def holding(self, more: int) -> Load:
        """The load with `more` resident bytes."""
        resident = self.resident + more
        return Load(self.seconds, resident, self.saved, self.shared, self.moment, self.by_rank)

    def on(self, rank: int) -> float:
        """Seconds on a rank."""
        return self.by_rank[rank] if self.by_rank else self.seconds


@dataclass(frozen=True, slots=True)
class Flow:
    """A value that crosses blocks.

    Each rank with a consumer, other than the producer's, receives it once, on the first of its
    stages that has a consumer: `seconds` to move it and its gradient back, `saved` bytes for a
    received copy. There is one copy per micro-batch in flight on that stage, which has the value
    longest, and one more, because a receive is posted before its use.
    """

    producer: int
    consumers: tuple[int, ...]
    seconds: float
    saved: int = 0


@dataclass(frozen=True, slots=True)
class StageDivision:
    """The stage of each block. No division has an objective (seconds) below `bound`.

    `status` is "optimal", or "feasible" when there is no proof of that; `gap` is (objective -
    bound) / objective. The blocks in `twice` run twice. `others` are divisions that were tried on
    the way, which may be faster on the timeline.
    """

    stage_of: tuple[int, ...]
    status: str
    objective: float
    bound: float
    gap: float
    others: tuple[tuple[int, ...], ...] = ()
    twice: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Costs of a division: seconds of a micro-batch on each stage, and bytes on each rank.

    `objective` is the seconds of a step: those of all stages, divided by the stages per rank, and
    those of the slowest rank for each further micro-batch.
    """

    seconds: tuple[float, ...]
    memory: tuple[int, ...]
    objective: float


class MemoryPart(NamedTuple):
    """A share of a rank's memory, in bytes and in words."""

    size: int
    what: str


def evaluate(
    loads: Sequence[Load],
    flows: Sequence[Flow],
    stage_of: Sequence[int],
    placement: Sequence[int],
    microbatches: int,
    held: Sequence[Sequence[tuple[int, ...]]],
) -> Evaluation:
    """Costs of a division, straight from the definitions; stage j is on rank `placement[j]`.

    >>> loads = [Load(1.0, 10, 1), Load(2.0, 20, 2)]
    >>> evaluate(loads, [Flow(0, (1,), 0.5, saved=3)], (0, 1), (0, 1), 4, held=[[(2,)], [(1,)]])
    Evaluation(seconds=(1.0, 2.5), memory=(12, 28), objective=11.0)
    """
    received = received_on(flows, stage_of, placement)
    work = [[flow.seconds for flow in arriving] for arriving in received]
    for load, j in zip(loads, stage_of, strict=True):
        work[j].append(load.on(placement[j]))
    seconds = tuple(math.fsum(stage) for stage in work)
    on = stages_on(placement)
    blocks = blocks_on(stage_of, len(placement))
    memory = tuple(
        max(sizes(loads, [blocks[j] for j in stages], [received[j] for j in stages], vectors))
        for stages, vectors in zip(on, held, strict=True)
    )
    slowest = max(math.fsum(seconds[j] for j in stages) for stages in on)
    objective = math.fsum(seconds) / len(on[0]) + (microbatches - 1) * slowest
    return Evaluation(seconds, memory, objective)


def memory_parts(
    loads: Sequence[Load],
    flows: Sequence[Flow],
    stage_of: Sequence[int],
    placement: Sequence[int],
    held: Sequence[Sequence[tuple[int, ...]]],
    rank: int,
    names: Sequence[str] = (),
) -> tuple[MemoryPart, ...]:
    """The parts of one rank's memory when it is fullest; their sizes add up to all of it."""
    names = names or [f"block {i}" for i in range(len(loads))]
    stages = stages_on(placement)[rank]
    received = received_on(flows, stage_of, placement)
    blocks_of = [[i for i, at in enumerate(stage_of) if at == j] for j in stages]

    def growing(counts: Sequence[int]) -> int:
        return sum(
            k * (sum(loads[i].saved for i in blocks) + sum(flow.saved for flow in received[j]))
            for k, j, blocks in zip(counts, stages, blocks_of, strict=True)
        )

    counts = max(held[rank], key=growing)
    blocks = [i for group in blocks_of for i in group]
    states = [MemoryPart(loads[i].resident, names[i]) for i in blocks]
    tensors = sorted({item for i in blocks for item in loads[i].shared})
    shared = [MemoryPart(size, name) for name, size in tensors]
    saved = [
        MemoryPart(k * loads[i].saved, names[i])
        for k, group in zip(counts, blocks_of, strict=True)
        for i in group
    ]
    copies = [
        MemoryPart((k + 1) * flow.saved, names[flow.producer])
        for k, j in zip(counts, stages, strict=True)
        for flow in received[j]
    ]
    flying = " + ".join(map(str, counts))
    moment = max(
        (MemoryPart(loads[i].moment, names[i]) for i in blocks), default=MemoryPart(0, "nothing")
    )
    return (
        _total("parameters and optimizer states, most of them of", states),
        _total("shared parameters and their optimizer states, most of them of", shared),
        _total(f"activations of {flying} micro-batches in flight, most of them saved by", saved),
        _total(
            f"values received for {flying} micro-batches in flight and one more, most of them from",
            copies,
        ),
        MemoryPart(
            moment.size, f"what is alive at once while a block computes, most in {moment.what}"
        ),
    )


def sizes(
    loads: Sequence[Load],
    blocks: Sequence[Sequence[int]],
    received: Sequence[Sequence[Flow]],
    vectors: Sequence[tuple[int, ...]],
) -> list[int]:
    """Bytes on a rank whose stages have these blocks and receive these values, for each vector of
    micro-batches in flight; the largest is the sum of `memory_parts`.

    >>> loads = [Load(1.0, 10, 1), Load(2.0, 20, 2, moment=7)]
    >>> sizes(loads, [[0], [1]], [[], [Flow(0, (1,), 0.5, saved=3)]], [(2, 1), (1, 4)])
    [47, 61]
    """
    members = [loads[i] for group in blocks for i in group]
    copies = [sum(flow.saved for flow in flows) for flows in received]
    saved = [
        sum([loads[i].saved for i in group]) + size
        for group, size in zip(blocks, copies, strict=True)
    ]
    shared = sum(size for _, size in {item for load in members for item in load.shared})
    moment = max([load.moment for load in members], default=0)
    fixed = sum([load.resident for load in members]) + shared + sum(copies) + moment
    return [fixed + sum(map(mul, counts, saved)) for counts in vectors]


def blocks_on(stage_of: Sequence[int], stages: int) -> list[list[int]]:
    """The blocks of each stage."""
    blocks: list[list[int]] = [[] for _ in range(stages)]
    for i, j in enumerate(stage_of):
        blocks[j].append(i)
    return blocks


def stages_on(placement: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The stages of each rank.

    >>> stages_on((0, 1, 1, 0))
    ((0, 3), (1, 2))
    """
    return tuple(
        tuple(j for j, at in enumerate(placement) if at == rank)
        for rank in range(1 + max(placement))
    )


def _total(label: str, parts: Sequence[MemoryPart]) -> MemoryPart:
    largest = max(parts, key=lambda part: part.size, default=MemoryPart(0, "nothing"))
    return MemoryPart(sum(part.size for part in parts), f"{label} {largest.what}")


def received_on(
    flows: Sequence[Flow], stage_of: Sequence[int], placement: Sequence[int]
) -> list[list[Flow]]:
    """The values that each stage receives for its rank."""
    received: list[list[Flow]] = [[] for _ in placement]
    for flow in flows:
        reached = {placement[stage_of[flow.producer]]}
        for j in sorted({stage_of[q] for q in flow.consumers}):
            if placement[j] not in reached:
                reached.add(placement[j])
                received[j].append(flow)
    return received
