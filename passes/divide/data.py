"""The data of a division, what a division costs, and the task in whole numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from parcompiler.errors import InfeasibleError, InputError

RESOLUTION = 2**56  # sums of whole seconds stay below it, and well inside 64 bits


@dataclass(frozen=True, slots=True)
class Load:
    """What one block asks of its stage.

    `seconds` of forward and backward of one micro-batch; `resident` bytes whatever the schedule
    (parameters, gradients, optimizer states); `saved` bytes kept for the backward, per micro-batch
    in flight; `shared` tensors (name, bytes) are counted once per stage however many of its blocks
    use them.
    """

    seconds: float
    resident: int
    saved: int
    shared: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Flow:
    """A value that crosses blocks.

    Each stage with a consumer, other than the producer's, receives it once: `seconds` to move it
    and its gradient back, `saved` bytes for the received copy, per micro-batch in flight.
    """

    producer: int
    consumers: tuple[int, ...]
    seconds: float
    saved: int = 0


@dataclass(frozen=True, slots=True)
class Division:
    """The stage of each block. No division has an objective (seconds) below `bound`.

    `status` is "optimal", or "feasible" when the work limit came before the proof; `gap` is
    (objective - bound) / objective.
    """

    stage_of: tuple[int, ...]
    status: str
    objective: float
    bound: float
    gap: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a division costs: seconds of a micro-batch, and bytes, on each stage.

    `objective` is the seconds of a step: sum of the stages + (microbatches - 1) * the slowest.
    """

    seconds: tuple[float, ...]
    memory: tuple[int, ...]
    objective: float


class Part(NamedTuple):
    """A share of a stage's memory, in bytes and in words."""

    size: int
    what: str


def evaluate(
    loads: Sequence[Load],
    flows: Sequence[Flow],
    stage_of: Sequence[int],
    microbatches: int,
    in_flight: Sequence[int],
) -> Evaluation:
    """What a division costs, straight from the definitions; one stage per item of `in_flight`.

    >>> loads = [Load(1.0, 10, 1), Load(2.0, 20, 2)]
    >>> evaluate(loads, [Flow(0, (1,), 0.5, saved=3)], (0, 1), microbatches=4, in_flight=(2, 1))
    Evaluation(seconds=(1.0, 2.5), memory=(12, 25), objective=11.0)
    """
    seconds, memory = [], []
    for j, k in enumerate(in_flight):
        here = [load for load, at in zip(loads, stage_of, strict=True) if at == j]
        received = [flow for flow in flows if _is_received(flow, stage_of, j)]
        shared = {item for load in here for item in load.shared}
        seconds.append(
            math.fsum([load.seconds for load in here] + [flow.seconds for flow in received])
        )
        memory.append(
            sum(load.resident + k * load.saved for load in here)
            + sum(size for _, size in shared)
            + sum(k * flow.saved for flow in received)
        )
    objective = math.fsum(seconds) + (microbatches - 1) * max(seconds)
    return Evaluation(tuple(seconds), tuple(memory), objective)


def memory_parts(
    loads: Sequence[Load],
    flows: Sequence[Flow],
    stage_of: Sequence[int],
    in_flight: Sequence[int],
    stage: int,
    names: Sequence[str] = (),
) -> tuple[Part, ...]:
    """What the memory of one stage consists of; the sizes add up to that of `evaluate`."""
    names = names or [f"block {i}" for i in range(len(loads))]
    k = in_flight[stage]
    here = [i for i, at in enumerate(stage_of) if at == stage]
    received = [flow for flow in flows if _is_received(flow, stage_of, stage)]
    states = [Part(loads[i].resident, names[i]) for i in here]
    shared = [Part(size, name) for name, size in sorted({s for i in here for s in loads[i].shared})]
    saved = [Part(k * loads[i].saved, names[i]) for i in here]
    copies = [Part(k * flow.saved, names[flow.producer]) for flow in received]
    return (
        _total("parameters and optimizer states, most of them of", states),
        _total("shared parameters and their optimizer states, most of them of", shared),
        _total(f"activations of {k} micro-batches in flight, most of them saved by", saved),
        _total(f"values received for {k} micro-batches in flight, most of them from", copies),
    )


def _total(what: str, parts: Sequence[Part]) -> Part:
    largest = max(parts, key=lambda part: part.size, default=Part(0, "nothing"))
    return Part(sum(part.size for part in parts), f"{what} {largest.what}")


def _is_received(flow: Flow, stage_of: Sequence[int], stage: int) -> bool:
    return stage_of[flow.producer] != stage and stage in [stage_of[q] for q in flow.consumers]


@dataclass(frozen=True)
class Task:
    """A division problem, also in whole numbers: seconds in multiples of `unit`, and bytes."""

    loads: Sequence[Load]
    flows: Sequence[Flow]
    stages: int
    microbatches: int
    in_flight: Sequence[int]
    limits: Sequence[float]

    @cached_property
    def unit(self) -> float:
        """Seconds; all sums of the programme stay below RESOLUTION of them."""
        total = math.fsum(load.seconds for load in self.loads)
        total += math.fsum(flow.seconds * len(flow.consumers) for flow in self.flows)
        return total * (self.stages + self.microbatches) / RESOLUTION or 1.0

    @cached_property
    def compute(self) -> list[int]:
        """Units of each block."""
        return [round(load.seconds / self.unit) for load in self.loads]

    @cached_property
    def move(self) -> list[int]:
        """Units of each flow."""
        return [round(flow.seconds / self.unit) for flow in self.flows]

    @cached_property
    def most(self) -> int:
        """Bytes that no stage can exceed."""
        fixed = sum(load.resident + sum(size for _, size in load.shared) for load in self.loads)
        saved = sum(load.saved for load in self.loads) + sum(flow.saved for flow in self.flows)
        return max(1, fixed + max(self.in_flight) * saved)

    @cached_property
    def room(self) -> list[int]:
        """Bytes of each stage; more than `most` make no difference."""
        return [math.floor(min(limit, self.most)) for limit in self.limits]

    @cached_property
    def arriving(self) -> list[set[int]]:
        """The flows that each block consumes."""
        arriving: list[set[int]] = [set() for _ in self.loads]
        for f, flow in enumerate(self.flows):
            for q in flow.consumers:
                arriving[q].add(f)
        return arriving


def check_task(task: Task) -> None:
    """Refuse data that are no division problem, and more stages than blocks."""
    stages, blocks = task.stages, len(task.loads)
    counts = (len(task.in_flight), len(task.limits))
    seconds = [load.seconds for load in task.loads] + [flow.seconds for flow in task.flows]
    backward = [f for f in task.flows if any(not 0 <= f.producer < q < blocks for q in f.consumers)]
    if stages < 1 or task.microbatches < 1:
        message = f"stages and microbatches must be positive ({stages}, {task.microbatches} given)"
        raise InputError(message)
    if counts != (stages, stages):
        message = f"in_flight and limits need one item per stage ({counts} for {stages} stages)"
        raise InputError(message)
    if not all(limit >= 1 for limit in task.limits):
        message = f"a memory limit must be at least 1 byte ({min(task.limits):g} given)"
        raise InputError(message)
    if not all(0 <= value < math.inf for value in seconds):
        message = (
            f"seconds must be finite and not negative ({min(seconds)} to {max(seconds)} given)"
        )
        raise InputError(message)
    if backward:
        path = f"block {backward[0].producer} to {backward[0].consumers} of {blocks}"
        message = f"a flow does not go forward ({path}): list the blocks in topological order"
        raise InputError(message)
    if stages > blocks:
        message = f"more stages than blocks ({stages} > {blocks}): use fewer stages or finer blocks"
        raise InfeasibleError(message)
