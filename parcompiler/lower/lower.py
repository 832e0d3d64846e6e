"""Plan -> Lowered, on one screen."""

from __future__ import annotations

from parcompiler.capture.blocks import Cut
from parcompiler.graph import Graph
from parcompiler.lower import communicate
from parcompiler.lower.lowered import Lowered
from parcompiler.lower.stages import Division
from parcompiler.plan import Plan
from parcompiler.schedules import build


def lower(graph: Graph, plan: Plan, cut: Cut) -> Lowered:
    """What every rank does under `plan`; `cut` are the blocks at the plan's granularity."""
    assert plan.schedule is not None
    division = Division(graph, plan, cut)
    stages, values, tied = division.stages(), division.values(), division.tied()
    schedule = build(plan.schedule, plan.mesh.pipeline, plan.microbatches)
    ranks = plan.mesh.pipeline
    return Lowered(
        graph=graph,
        microbatches=plan.microbatches,
        stages=stages,
        values=values,
        tied=tied,
        instructions=communicate.training(schedule.orders, stages, values, tied),
        evaluation=communicate.evaluation(ranks, plan.microbatches, stages, values),
        variables=division.variables,
    )
