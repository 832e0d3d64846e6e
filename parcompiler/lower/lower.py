"""Plan -> Lowered: the steps of lowering in order."""

from __future__ import annotations

from parcompiler.capture.blocks import Cut
from parcompiler.data_updates import ALL_REDUCE
from parcompiler.graph import Graph
from parcompiler.instruction import Kind
from parcompiler.lower import communicate
from parcompiler.lower.buckets import buckets, gathered, placed
from parcompiler.lower.lowered import Lowered
from parcompiler.lower.stages import Division
from parcompiler.lower.units import in_units, sharded, unit_orders
from parcompiler.plan import Plan
from parcompiler.schedules.action import NOWHERE
from parcompiler.schedules.planned import planned


def lower(graph: Graph, plan: Plan, cut: Cut) -> Lowered:
    """The lowered plan; `cut` are the blocks of `graph` at the plan's granularity."""
    schedule, level = planned(plan), plan.zero or 0
    orders, choices = schedule.orders, plan
    if level == 3:
        choices, counts = in_units(plan, cut)
        orders = unit_orders(orders, counts)
    division = Division(graph, choices, cut)
    stages, values, tied = division.stages(), division.values(), division.tied()
    method = plan.vocabulary.method if plan.vocabulary else "whole"
    everywhere = division.spread(method)
    lists = communicate.training(
        orders, stages, values, tied, everywhere, asynchronous=schedule.asynchronous
    )
    updates = plan.updates or ALL_REDUCE
    apart = tied if level < 2 else ()  # their gradients are never in pieces
    unsummed = _unshared(graph, plan) | {item.name for item in apart}
    reduced = buckets(graph, stages, unsummed, lists, everywhere)
    if updates.separate:
        kind = Kind.AVERAGE_PARAMETERS if updates.way == "local" else Kind.PUSH_PULL
        lists = gathered(lists, reduced, tied, kind)
    else:
        lists = placed(lists, reduced, each=level >= 2)
    if level or updates.way == "parameter-server":
        updated = [item for item in reduced if level < 3 or item.stage == NOWHERE]
        lists = gathered(lists, updated, apart)
    evaluation = communicate.evaluation(
        plan.mesh.pipeline, plan.microbatches, stages, values, everywhere
    )
    if level == 3:
        lists, evaluation = (sharded(each, stages, graph) for each in (lists, evaluation))
    return Lowered(
        graph=graph,
        microbatches=plan.microbatches,
        stages=stages,
        values=values,
        tied=tied,
        instructions=lists,
        evaluation=evaluation,
        variables=division.variables,
        asynchronous=schedule.asynchronous,
        zero=level,
        updates=updates,
        data=plan.mesh.replicas,
        tensor=plan.mesh.tensor,
        context=plan.mesh.context,
        expert=plan.mesh.expert,
        buckets=reduced,
        vocabulary=everywhere,
        plan=plan,
    )


def _unshared(graph: Graph, plan: Plan) -> set[str]:
    """The tensors that each data rank has alone: their gradients need no sum."""
    data, same = plan.mesh.replicas, plan.mesh.replicas // plan.mesh.expert
    return {item.name for item in graph.parameters if (same if item.experts else data) == 1}
