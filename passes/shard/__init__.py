"""Choose the strategy of each node on the ranks of the tensor axis: an integer programme.

    Layer    linear(x, w)   ──► gelu ──► linear(y, v) ──► + x           what to split, where
             R  S(0)->S(2)      S(2)     S(2) S(1)->P     P → I: all-reduce     to exchange

Given       strategies  of each node (`spmd.strategies`), with seconds of arithmetic and memory
                        traffic, and bytes that are saved for the backward
            conversions between the types of a value and of its readers, with seconds of their
                        collectives, forward and backward
            parameters  with the bytes of their states, and the seconds of their updates
Decide      a strategy of each node, a placement of each parameter; blocks of one template share
            them, with seconds and bytes times the number of blocks (`templates`)
Minimize    seconds of a micro-batch, with its part of the update
Subject to  values are converted where maker and reader differ
            a parameter is in pieces only where all its readers take the same pieces
            states, what the micro-batches in flight save, and the largest block where blocks run
            again, fit into 90 % of the memory of all stages together that batch, buckets and a
            vocabulary on all ranks leave, because the stages of blocks are decided later

`ilp_builder` makes the programme from the graph, `ilp` states and solves it. Where nothing fits,
all the memory may be filled, or blocks recomputed, whichever is faster; where nothing fits then
either, the sharding with least memory is taken, and the stage pass says what is missing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import ClassVar

from parcompiler.errors import InfeasibleError
from parcompiler.passes.base import Pass
from parcompiler.passes.shard import pins as pinning
from parcompiler.passes.shard.candidates import Candidates
from parcompiler.passes.shard.ilp import Answer, ProgrammeSolver, decide
from parcompiler.passes.shard.ilp_builder import (
    BuiltProgramme,
    MemoryBudget,
    SavedValues,
    StateCost,
    build,
)
from parcompiler.passes.shard.node_costs import ShardCosts
from parcompiler.passes.shard.pins import Pins
from parcompiler.passes.shard.plan_entries import assignment, check, sharding
from parcompiler.passes.shard.templates import fold
from parcompiler.passes.spread import spread_bytes
from parcompiler.plan import Plan, Sharding
from parcompiler.problem import Problem
from parcompiler.spmd.shard import Assignment

AGAIN = 4 / 3  # a block takes at most so many times as long if its forward runs twice

__all__ = ["Assignment", "ShardPass", "assignment", "check", "decided"]


@dataclass(frozen=True)
class ShardPass(Pass):
    """Decides `plan.sharding`, if there is a tensor axis.

    `part` is the share of the memory that may be filled.
    """

    name: ClassVar[str] = "shard"
    part: float = 0.9

    def run(self, problem: Problem, plan: Plan) -> Plan:
        """Choose the sharding that is fastest and fits in memory."""
        if problem.mesh.tensor == 1:
            pinning.read(problem.options.sharding, problem.graph)  # pins must name something
            return plan
        if plan.sharding is not None:
            return plan
        return dataclasses.replace(plan, sharding=self._decided(problem)[0])

    def is_short(self, problem: Problem) -> bool:
        """Whether the fastest sharding does not fit, or not when nothing is recomputed."""
        return problem.mesh.tensor > 1 and self._decided(problem)[1]

    def _decided(self, problem: Problem) -> tuple[Sharding, bool]:
        """The sharding, and whether memory is short."""
        # It does not depend on the vocabulary's method, nor on whether blocks are offloaded.
        kept = problem.selectively(problem.selective)
        return kept.once(("sharding", self.part), lambda: _solved(kept, self.part))


def decided(problem: Problem, part: float = 0.9) -> Sharding:
    """The best sharding that fits.

    Raises InputError for a pin that names nothing, InfeasibleError for pins that exclude each
    other.
    """
    return _solved(problem, part)[0]


def _solved(problem: Problem, part: float) -> tuple[Sharding, bool]:
    """`decided`, and whether memory is short."""
    pins = pinning.read(problem.options.sharding, problem.graph)
    candidates = _candidates(problem, pins)
    built, answer, is_short = _fitting(problem, candidates, pins, part)
    return sharding(candidates, built, answer, problem.mesh.pipeline), is_short


def _candidates(problem: Problem, pins: Pins) -> Candidates:
    """The choices of the nodes, cached for all meshes with as many tensor ranks of this device."""
    graph, device, ranks = problem.graph, problem.slowest_device, problem.mesh.tensor

    def find() -> Candidates:
        return Candidates(fold(graph, pins.text), ShardCosts(graph, device, ranks))

    return graph.once(("candidates", repr(problem.options.sharding), device, ranks), find)


def _fitting(
    problem: Problem, candidates: Candidates, pins: Pins, part: float
) -> tuple[BuiltProgramme, Answer, bool]:
    """The fastest sharding that fits into a `part` of the memory; if none does, into all of it, or
    with blocks recomputed, whichever is faster; if none fits then either, the one with least
    memory. Also whether memory is short."""
    states = _states(problem)
    wanted = problem.options.recompute
    tries = {"none": (False,), "full": (True,), "offload": (True,)}.get(str(wanted), (False, True))

    @cache
    def built(again: bool) -> tuple[BuiltProgramme, ProgrammeSolver]:
        made = build(candidates, pins, states, _budget(problem, recomputed=again))
        return made, ProgrammeSolver(made.programme)

    first, *more = tries
    rest = [(first, 1.0), *((again, part) for again in more)]
    for number, ways in enumerate(([(first, part)], rest, [(again, 1.0) for again in more])):
        answers: list[tuple[float, BuiltProgramme, Answer]] = []
        for again, filled in ways:
            programme, solver = built(again)
            with suppress(InfeasibleError):
                answer = solver.within(filled)
                seconds = answer.solution.objective * (AGAIN if again else 1)
                answers.append((seconds, programme, answer))
        if answers:
            _, programme, answer = min(answers, key=itemgetter(0))
            return programme, answer, number > 0 or answer.is_short
    programme, solver = built(tries[-1])
    try:
        return programme, solver.least, True
    except InfeasibleError as error:
        raise InfeasibleError(_conflict(candidates, pins, states)) from error


def _states(problem: Problem) -> dict[str, StateCost]:
    """Costs of one element of each parameter and buffer. A step reads all its states once, and
    writes all but the gradient."""
    device, options = problem.slowest_device, problem.options
    bandwidth = device.memory_bandwidth * device.efficiency.bandwidth * options.microbatches
    costs = {}
    for item in problem.graph.parameters:
        trains = item.trainable and options.optimizer != "none"
        value, gradient, states = (size / max(1, item.numel) for size in problem.kept_bytes(item))
        each = value + gradient + states
        costs[item.name] = StateCost(each, (2 * each - gradient) / bandwidth if trains else 0.0)
    return costs


def _budget(problem: Problem, *, recomputed: bool) -> MemoryBudget:
    """The memory of the ranks of a pipeline.

    The micro-batches in flight are those of the first rank of 1F1B, or all under schedules that run
    every forward first.
    """
    mesh, options = problem.mesh, problem.options
    in_flight = min(mesh.pipeline, options.microbatches)
    if options.schedule in ("gpipe", "naive"):
        in_flight = options.microbatches
    # Tensors are in pieces if that is needed: so is the largest one of a bucket.
    besides = problem.bucket_bytes / mesh.tensor + problem.held_batch_bytes + spread_bytes(problem)
    each = sum(problem.memories) / mesh.pipeline  # all ranks together hold the model
    saved = SavedValues(recomputed, problem.selective)
    return MemoryBudget(max(1.0, each - besides), mesh.pipeline, in_flight, saved)


def _conflict(candidates: Candidates, pins: Pins, states: Mapping[str, StateCost]) -> str:
    """The message about a minimal set of pins that exclude each other, and their parameters."""
    for pattern in pins.placements:
        fewer = pins.without(pattern)
        if not _possible(candidates, fewer, states):
            pins = fewer
    return f"sharding pins {pins} exclude each other for {pins.named()}: loosen one of them"


def _possible(candidates: Candidates, pins: Pins, states: Mapping[str, StateCost]) -> bool:
    """Whether some assignment agrees with these pins."""
    try:
        decide(build(candidates, pins, states, None).programme)
    except InfeasibleError:
        return False
    return True
