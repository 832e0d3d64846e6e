"""The problem of one tensor rank: what the passes after this one, and all that follow, are about.

problem   the whole model ── plan.sharding ──► local(problem, plan)   local shapes, collectives
"""

from __future__ import annotations

import dataclasses

from parcompiler.graph import Graph
from parcompiler.passes.shard.assign import assignment
from parcompiler.plan import Plan
from parcompiler.problem import Problem
from parcompiler.spmd.shard import shard


def local(problem: Problem, plan: Plan) -> Problem:
    """The problem with the graph of one tensor rank; the problem itself without a tensor axis.

    Raises PlanError for a sharding that the graph cannot have.
    """
    if plan.sharding is None:
        return problem
    if plan.sharding not in problem.local:
        graph = local_graph(problem, plan, problem.graph)
        problem.local[plan.sharding] = dataclasses.replace(
            problem, graph=graph, _priced={}, _recomputing={}, local={}
        )
    found: Problem = problem.local[plan.sharding]
    return found


def local_graph(problem: Problem, plan: Plan, graph: Graph) -> Graph:
    """What one tensor rank computes of `graph`: that of `problem`, perhaps in another precision."""
    if plan.sharding is None:
        return graph
    named = {node.name: found for node, found in assignment(problem.graph, plan).items()}
    nodes = (node for node in graph.fx_graph.nodes if node.name in named)
    return shard(graph, {node: named[node.name] for node in nodes}, plan.mesh.tensor)
