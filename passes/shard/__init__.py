"""What each rank of the tensor axis holds and computes: an integer programme for each template.

    Layer    linear(x, w)   ──► gelu ──► linear(y, v) ──► + x           what to split, where
             R  S(0)->S(2)      S(2)     S(2) S(1)->P     P → I: all-reduce     to exchange

Every node gets one of its strategies (`spmd.strategies`), so that a micro-batch takes least time:
arithmetic and memory traffic of what a rank has, the collectives between values, forward and
backward, and its part of the update of the parameters that a rank holds. Blocks of one template
decide alike, and count as often as there are of them (`fold`); the programme itself is in
`programme`, and `telling` says what it is told of a graph.

What is kept must fit: 90 % of the memory of all stages together, because which block goes where is
decided later. Where it does not fit, blocks may be recomputed; where that does not help either, the
division with least memory is taken, and the stage pass says what is missing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from parcompiler.errors import InfeasibleError
from parcompiler.passes.base import Pass
from parcompiler.passes.shard import pins as demands
from parcompiler.passes.shard.assign import assignment, check
from parcompiler.passes.shard.candidates import Candidates
from parcompiler.passes.shard.fold import fold
from parcompiler.passes.shard.form import sharding
from parcompiler.passes.shard.keeping import Memory
from parcompiler.passes.shard.pins import Pins
from parcompiler.passes.shard.price import Prices
from parcompiler.passes.shard.programme import Answer, decide
from parcompiler.passes.shard.telling import State, Told, tell
from parcompiler.plan import Plan, Sharding
from parcompiler.problem import Problem
from parcompiler.spmd.shard import Assignment

__all__ = ["Assignment", "ShardPass", "assignment", "check", "decided"]


@dataclass(frozen=True)
class ShardPass(Pass):
    """Decides `plan.sharding`; nothing without a tensor axis.

    `part` is the part of the memory that may be filled.
    """

    name: ClassVar[str] = "shard"
    part: float = 0.9

    def run(self, problem: Problem, plan: Plan) -> Plan:
        """Split what pays."""
        if problem.mesh.tensor == 1:
            demands.read(problem.options.sharding, problem.graph)  # pins must name something
            return plan
        if plan.sharding is not None:
            return plan
        # It is the same whatever the vocabulary's method.
        found = problem.once(("sharding", self.part), lambda: decided(problem, self.part))
        return dataclasses.replace(plan, sharding=found)


def decided(problem: Problem, part: float = 0.9) -> Sharding:
    """The best sharding that fits.

    Raises InputError for a pin that names nothing, InfeasibleError for pins that exclude each
    other.
    """
    pins = demands.read(problem.options.sharding, problem.graph)
    candidates = _candidates(problem, pins)
    told, answer = _fitting(problem, candidates, pins, part)
    return sharding(candidates, told, answer, problem.mesh.pipeline)


def _candidates(problem: Problem, pins: Pins) -> Candidates:
    """What is open to the nodes: the same for every mesh with so many tensor ranks of a device."""
    graph, device, ranks = problem.graph, problem.slowest_device, problem.mesh.tensor

    def find() -> Candidates:
        return Candidates(fold(graph, pins.wish), Prices(graph, device, ranks), pins.wish)

    return graph.once(("candidates", repr(problem.options.sharding), device, ranks), find)


def _fitting(
    problem: Problem, candidates: Candidates, pins: Pins, part: float
) -> tuple[Told, Answer]:
    """The fastest that fits; if none does, with blocks recomputed; if none does, the smallest."""
    states = _states(problem)
    wanted = problem.options.recompute
    told: Told | None = None
    for again in {"none": (False,), "full": (True,)}.get(str(wanted), (False, True)):
        told = tell(candidates, pins, states, _memory(problem, part, again=again))
        with suppress(InfeasibleError):
            return told, decide(told.programme)
    assert told is not None
    unlimited = dataclasses.replace(told.programme, budget=None)
    try:
        return told, decide(unlimited, least_memory=True)
    except InfeasibleError as error:
        raise InfeasibleError(_conflict(candidates, pins, states)) from error


def _states(problem: Problem) -> dict[str, State]:
    """What an element of each parameter and buffer costs: all its states are read and, but for the
    gradient, written once a step."""
    device, options = problem.slowest_device, problem.options
    bandwidth = device.memory_bandwidth * device.efficiency.bandwidth * options.microbatches
    found = {}
    for item in problem.graph.parameters:
        trains = item.trainable and options.optimizer != "none"
        each = problem.element_bytes(item)
        update = (2 * each - item.dtype.itemsize) / bandwidth if trains else 0.0
        found[item.name] = State(each, update)
    return found


def _memory(problem: Problem, part: float, *, again: bool) -> Memory:
    """What fits on the ranks of a pipeline.

    As many micro-batches are in flight as the first rank of 1F1B has; all of them under schedules
    that run every forward first.
    """
    mesh, options = problem.mesh, problem.options
    flying = min(mesh.pipeline, options.microbatches)
    if options.schedule in ("gpipe", "naive"):
        flying = options.microbatches
    each = sum(problem.memories) / mesh.pipeline  # all ranks together hold the model
    free = each * part - problem.bucket_bytes
    return Memory(max(1.0, free), mesh.pipeline, flying, whole_blocks=again)


def _conflict(candidates: Candidates, pins: Pins, states: Mapping[str, State]) -> str:
    """The pins that exclude each other, and what they name: without any one, the rest can be."""
    for pattern in pins.placements:
        fewer = pins.without(pattern)
        if not _possible(candidates, fewer, states):
            pins = fewer
    for holder in candidates.folded.holders:
        fewer = pins.sparing({item.name for item in holder.items})
        if not _possible(candidates, fewer, states):
            pins = fewer
    return f"sharding pins {pins} exclude each other for {pins.named()}: loosen one of them"


def _possible(candidates: Candidates, pins: Pins, states: Mapping[str, State]) -> bool:
    """Whether something keeps to these pins."""
    try:
        decide(tell(candidates, pins, states, None).programme)
    except InfeasibleError:
        return False
    return True
