"""What data ranks share out: optimizer states and masters (ZeRO's first level), or nothing.

    zero=0   every data rank updates all parameters of its rank
    zero=1   each updates its rows, and all gather the others' behind the optimizer's step

Rajbhandari et al. 2020, arXiv 1910.02054, section 5.1. Sums of gradients take half as long then, as
each rank needs those of its rows alone, and the gathers take the other half, which nothing hides.
So states are shared where that saves more time than the gathers take: where memory would force
blocks to be recomputed, a slower schedule, or no plan at all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from parcompiler.cost import collective
from parcompiler.errors import InfeasibleError, PlanError
from parcompiler.passes.estimate import estimate
from parcompiler.passes.shard.local import local
from parcompiler.plan import Plan
from parcompiler.problem import Problem


@dataclass(frozen=True, slots=True)
class DataShare:
    """Bytes of optimizer states and masters on the rank that has most, if every data rank has them
    whole and if they are shared out, and the seconds of the gathers in a step then."""

    whole: int
    shared: int
    gathers: float


def weighed(problem: Problem, plan: Plan, complete: Callable[[Plan, float], Plan]) -> Plan:
    """The faster of the plans that `complete` makes with shared and with whole states.

    `complete` may refuse a plan with InfeasibleError whose step is not below so many seconds. A
    plan for shared states that has room for whole ones is taken with these. Raises InfeasibleError
    when nothing fits.
    """
    if plan.zero is not None or problem.mesh.data == 1:
        return complete(plan, math.inf)
    if not problem.zero:
        return complete(dataclasses.replace(plan, zero=0), math.inf)
    shared = complete(dataclasses.replace(plan, zero=1), math.inf)
    whole = dataclasses.replace(shared, zero=0)
    if shared.stages is None or _fits(problem, whole):
        return whole
    seconds = _seconds(problem, shared) + share_of(local(problem, shared), shared).gathers
    try:
        whole = complete(dataclasses.replace(plan, zero=0), seconds)
    except InfeasibleError:
        return shared
    return shared if seconds < _seconds(problem, whole) else whole


def share_of(problem: Problem, plan: Plan) -> DataShare:
    """What sharing out the states of the stages' parameters means; `problem` is that of a rank."""
    assert plan.stages is not None
    shared = problem.at_zero(1)
    blocks = {block.name: block for block in problem.under(plan).cut.blocks}
    found = [(0, 0, 0.0)]
    for rank in range(plan.mesh.pipeline):
        names = {
            binding.name
            for stage in plan.stages
            if stage.rank == rank
            for name in stage.blocks
            for binding in blocks[name].tensors
        }
        trained = [item for name in names if (item := problem.graph.by_name[name]).trainable]
        each = [shared.bytes_of(item)[1] for item in trained]
        parts = [shared.updated(item) for item in trained]
        nbytes = sum(item.nbytes for item in trained)
        seconds = collective.joined(
            problem.mesh, "all-gather", nbytes, problem.mesh.grid.replicas([rank])
        )
        whole = sum(n * item.numel for n, item in zip(each, trained, strict=True))
        found.append((whole, sum(n * part for n, part in zip(each, parts, strict=True)), seconds))
    return DataShare(*(max(column) for column in zip(*found, strict=True)))


def _fits(problem: Problem, plan: Plan) -> bool:
    """Whether the stages of a plan fit into memory."""
    try:
        peaks = estimate(local(problem, plan), plan).peak_memory
    except PlanError:  # an order that never ends: the verifier says why
        return True
    return all(peak <= memory for peak, memory in zip(peaks, problem.memories, strict=True))


def _seconds(problem: Problem, plan: Plan) -> float:
    """The predicted step, without what data ranks exchange."""
    return estimate(local(problem, plan), plan).step_time
