"""The problem of one rank's stages: what the passes, and all that follow, are about.

problem   the whole model
  │ plan.vocabulary   layers that all ranks compute leave the stages
  │ plan.sharding     local shapes, collectives
  ▼
local(problem, plan)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable

from parcompiler.graph import Graph
from parcompiler.passes.shard.assign import assignment
from parcompiler.plan import Plan, VocabularyChoice
from parcompiler.problem import Problem
from parcompiler.spmd.shard import shard
from parcompiler.vocabulary import spread


def local(problem: Problem, plan: Plan) -> Problem:
    """The problem with the graph of one rank's stages; the problem itself where nothing is split.

    Raises PlanError for a vocabulary or a sharding that the graph cannot have.
    """
    ranks = plan.mesh.pipeline * plan.mesh.tensor
    if plan.vocabulary is not None and plan.vocabulary.spread:
        whole, choice = problem, plan.vocabulary
        key = choice.lookups, choice.head  # it is the same for all methods
        problem = _known(whole, key, lambda: _spread(whole.graph, choice, ranks))
    if plan.sharding is not None:
        unsplit = problem
        problem = _known(unsplit, plan.sharding, lambda: _sharded(unsplit, plan, unsplit.graph))
    return problem


def _spread(graph: Graph, choice: VocabularyChoice, ranks: int) -> Graph:
    """The graph with its vocabulary on all ranks: the same for every mesh with so many."""
    key = "spread", choice.lookups, choice.head, ranks
    return graph.once(key, lambda: spread(graph, choice, ranks))


def _known(problem: Problem, key: Hashable, graph: Callable[[], Graph]) -> Problem:
    """The problem with another graph, made once for each key."""
    return problem.once(key, lambda: problem.anew(graph=graph()))


def local_graph(problem: Problem, plan: Plan, graph: Graph) -> Graph:
    """What one rank's stages compute of `graph`: that of `problem`, perhaps in other precision."""
    if plan.vocabulary is not None and plan.vocabulary.spread:
        ranks = plan.mesh.pipeline * plan.mesh.tensor
        graph = spread(graph, plan.vocabulary, ranks)
        problem = local(problem, dataclasses.replace(plan, sharding=None))
    return graph if plan.sharding is None else _sharded(problem, plan, graph)


def _sharded(problem: Problem, plan: Plan, graph: Graph) -> Graph:
    """What one tensor rank computes of `graph`, which has the nodes of `problem`'s."""
    assert plan.sharding is not None
    key = "shard", plan.sharding.level, plan.sharding.templates, plan.mesh.tensor
    if graph is problem.graph:  # the same for every mesh with so many tensor ranks
        return graph.once(key, lambda: _split(problem, plan, graph))
    return _split(problem, plan, graph)


def _split(problem: Problem, plan: Plan, graph: Graph) -> Graph:
    """The same, made anew."""
    named = {node.name: found for node, found in assignment(problem.graph, plan).items()}
    nodes = (node for node in graph.fx_graph.nodes if node.name in named)
    return shard(graph, {node: named[node.name] for node in nodes}, plan.mesh.tensor)
