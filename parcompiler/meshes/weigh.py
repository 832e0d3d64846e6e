"""Weighs one mesh: the plan that `compile` would make for it, and the figures of its step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from parcompiler.cost import seconds
from parcompiler.cost.operation import EXCHANGE
from parcompiler.instruction import COMPUTE, Kind
from parcompiler.lower import lower
from parcompiler.lower.lowered import Lowered
from parcompiler.mesh import Mesh
from parcompiler.meshes.space import Candidate
from parcompiler.options import Options
from parcompiler.passes import Pass
from parcompiler.passes.decide import choice_of, fastest
from parcompiler.passes.shard.axes import on_axes
from parcompiler.passes.shard.local import local
from parcompiler.plan import MeshChoice, Plan
from parcompiler.prices import simulated
from parcompiler.problem import Problem

Check = Callable[[Mesh, Options], None]
CheckLowered = Callable[[Lowered], None]


def planned(problem: Problem, passes: Sequence[Pass]) -> tuple[Plan, MeshChoice]:
    """The fastest plan of a problem, and its figures.

    Raises what the passes raise: InfeasibleError when nothing fits, InputError for options that
    this mesh cannot have.
    """
    plan = fastest(problem, passes)
    return plan, figures(problem, plan, None)


def unplanned(candidate: Candidate) -> MeshChoice:
    """The report's line for a candidate, without figures."""
    mesh, count = candidate.mesh, candidate.microbatches
    return MeshChoice(
        mesh.pipeline, mesh.tensor, mesh.data, count, candidate.rows, reason=candidate.reason,
        context=mesh.context, expert=mesh.expert,
    )  # fmt: skip


def on_mesh(problem: Problem, candidate: Candidate) -> Problem:
    """The problem on another mesh, with the candidate's share of the micro-batches.

    Raises InputError for rows or experts that the mesh cannot share out.
    """
    options = dataclasses.replace(problem.options, microbatches=candidate.microbatches)
    return on_axes(problem.anew(mesh=candidate.mesh, options=options, explain=False))


def figures(
    problem: Problem, plan: Plan, rows: int | None, check: CheckLowered = lambda lowered: None
) -> MeshChoice:
    """Figures of the simulated step of a plan: seconds, memory, and what ranks do on average.
    Raises InputError if `check` does: where the options do not go with these stages."""
    assert plan.granularity is not None, "the passes decide it"
    rank_problem = local(problem, plan)
    lowered = lower(rank_problem.graph, plan, rank_problem.priced(plan.granularity).cut)
    check(lowered)
    timeline, mesh = simulated(rank_problem, plan, lowered), problem.mesh
    step = timeline.step_time
    computed = max((e.end for e in timeline.events if e.instruction.kind in COMPUTE), default=0.0)
    updates = (e.end - e.begin for e in timeline.events if e.instruction.kind is Kind.UPDATE)
    late = max(0.0, step - computed - max(updates, default=0.0))
    busy = step * (1 - sum(timeline.bubble) / len(timeline.bubble))
    among_tensor_ranks = sum(
        seconds((o for o in (*cost.forward, *cost.backward) if o.kind == EXCHANGE), mesh.hardware)
        for cost in rank_problem.under(plan).costs
    ) * (plan.microbatches / mesh.pipeline)
    return dataclasses.replace(
        choice_of(plan, step),
        rows=rows,
        memory=max(timeline.peak_memory),
        compute=busy - among_tensor_ranks,
        exchange=among_tensor_ranks + late,
        idle=max(0.0, step - busy - late),
    )
