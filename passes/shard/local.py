"""The local problem: that of one rank's stages, which all later passes and rooms work on.

problem   the whole model
  │ plan.vocabulary   layers that all ranks compute leave the stages
  │ plan.sharding     local shapes, collectives
  │ plan.selective    costs of blocks whose cheap operators run again
  ▼
local(problem, plan)
"""

from __future__ import annotations

import dataclasses

from parcompiler.graph import Graph
from parcompiler.passes.shard.plan_entries import assignment
from parcompiler.plan import Plan
from parcompiler.problem import Problem
from parcompiler.spmd.shard import shard
from parcompiler.vocabulary import spread


def local(problem: Problem, plan: Plan) -> Problem:
    """The problem with the graph of one rank's stages; the problem itself where nothing is split.

    Raises PlanError for a vocabulary or a sharding that the graph cannot have.
    """
    level = problem.options.zero if plan.zero is None else plan.zero
    original = problem
    # Graphs and costs are the same at every level.
    problem = whole = problem.selectively(False).at_zero("auto")
    choice, n = plan.vocabulary, plan.mesh.tensor
    if choice is not None and choice.spread:
        # The graph is the same for all methods.
        ranks = plan.mesh.pipeline * n
        graph = spread(whole.graph, choice, ranks)
        problem = whole.once((choice.lookups, choice.head), lambda: whole.anew(graph=graph))
    if plan.sharding is not None:
        unsplit, graph = problem, problem.graph  # the key leaves out the solver's statement
        key = "shard", plan.sharding.level, plan.sharding.templates, n

        def sharded() -> Problem:
            # The graph is the same for every mesh with this number of tensor ranks.
            made = graph.once(key, lambda: shard(graph, assignment(graph, plan), n))
            return unsplit.anew(graph=made)

        problem = unsplit.once(key, sharded)
    # The cached problem may be that of a caller with other options.
    problem = dataclasses.replace(problem, options=original.options, explain=original.explain)
    return problem.selectively(plan.selective, offload=plan.offload).at_zero(level)


def local_graph(problem: Problem, plan: Plan, graph: Graph) -> Graph:
    """The graph of one rank's stages; `graph` is that of `problem` in another precision."""
    if plan.vocabulary is not None and plan.vocabulary.spread:
        graph = spread(graph, plan.vocabulary, plan.mesh.pipeline * plan.mesh.tensor)
        problem = local(problem, dataclasses.replace(plan, sharding=None))
    if plan.sharding is None:
        return graph
    assigned = {node.name: strategy for node, strategy in assignment(problem.graph, plan).items()}
    nodes = (node for node in graph.fx_graph.nodes if node.name in assigned)
    return shard(graph, {node: assigned[node.name] for node in nodes}, plan.mesh.tensor)
