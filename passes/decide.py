"""A plan from a problem: nothing is decided at the start, then every pass decides its part."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from parcompiler.cost import collective
from parcompiler.errors import InfeasibleError, PlanError
from parcompiler.passes.base import Pass
from parcompiler.passes.estimate import estimate
from parcompiler.passes.shard.local import local
from parcompiler.plan import Plan, Shape
from parcompiler.problem import Problem

Observer = Callable[[str], AbstractContextManager[None]]


def start(problem: Problem) -> Plan:
    """The plan before any decision: what is given."""
    mesh, options = problem.mesh, problem.options
    return Plan(
        model=problem.graph.name,
        fingerprint=problem.graph.fingerprint,
        mesh=Shape(mesh.pipeline, mesh.tensor, mesh.data, mesh.name),
        microbatches=options.microbatches,
        precision=options.precision,
        optimizer=options.optimizer,
        zero=options.zero if mesh.data > 1 and isinstance(options.zero, int) else None,
    )


def decide(
    problem: Problem, passes: Sequence[Pass], observer: Observer = lambda name: nullcontext()
) -> Plan:
    """What the passes decide, one after the other; nothing is lowered or verified.

    What data ranks share out is weighed by all passes: states that are whole where the plan for
    shared ones has room for them, else what takes less time with the gathers of shared ones.
    Raises InfeasibleError when nothing fits, InputError for options that the model cannot have.
    """
    plan = start(problem)
    if plan.zero is not None or problem.mesh.data == 1:
        return _decided(problem, plan, passes, observer)
    if not problem.zero:
        return _decided(problem, dataclasses.replace(plan, zero=0), passes, observer)
    shared = _decided(problem, dataclasses.replace(plan, zero=1), passes, observer)
    whole = dataclasses.replace(shared, zero=0)
    if shared.stages is None or _fits(problem, whole):
        return whole
    try:
        whole = _decided(problem, dataclasses.replace(plan, zero=0), passes, observer)
    except InfeasibleError:
        return shared
    with_gathers = estimate(local(problem, shared), shared).step_time + gathers(problem, shared)
    return min(
        (estimate(local(problem, whole), whole).step_time, 0, whole), (with_gathers, 1, shared)
    )[-1]


def _fits(problem: Problem, plan: Plan) -> bool:
    """Whether the stages of a plan fit into memory."""
    try:
        peaks = estimate(local(problem, plan), plan).peak_memory
    except PlanError:  # an order that never ends: the verifier says why
        return True
    return all(peak <= memory for peak, memory in zip(peaks, problem.memories, strict=True))


def gathers(problem: Problem, plan: Plan) -> float:
    """Seconds at most in which data ranks gather the parameters of a rank that each updates a part
    of, behind the optimizer's step."""
    assert plan.stages is not None
    rank_problem = local(problem, plan)
    blocks = {block.name: block for block in rank_problem.under(plan).cut.blocks}
    longest = 0.0
    for rank in range(plan.mesh.pipeline):
        stages = [choice for choice in plan.stages if choice.rank == rank]
        names = {b.name for s in stages for block in s.blocks for b in blocks[block].tensors}
        items = [rank_problem.graph.by_name[name] for name in names]
        nbytes = sum(item.nbytes for item in items if item.trainable)
        members = problem.mesh.grid.replicas([rank])
        longest = max(longest, collective.joined(problem.mesh, "all-gather", nbytes, members))
    return longest


def _decided(problem: Problem, plan: Plan, passes: Sequence[Pass], observer: Observer) -> Plan:
    """The plan that all passes complete."""
    for item in passes:
        with observer(f"pass {item.name}"):
            plan = item.run(local(problem, plan), plan)
    return plan
