"""The graph of one rank of the context and expert axes, from which the other passes start.

whole graph ──► context (rows of sequences in pieces) ──► expert (experts in pieces) ──► passes
"""

from __future__ import annotations

from parcompiler.passes.shard.context import on_context_ranks
from parcompiler.plan import Plan
from parcompiler.problem import Problem
from parcompiler.spmd.experts import on_expert_ranks


def on_axes(problem: Problem, plan: Plan | None = None) -> Problem:
    """The problem of one context and expert rank of its mesh; as the `plan` says, if there is one.

    Raises InputError for rows or experts that the ranks cannot share out, PlanError for a plan that
    the graph cannot have.
    """
    problem = on_context_ranks(problem, plan)
    graph, mesh = problem.graph, problem.mesh
    if mesh.expert == 1:
        return problem
    key = "expert", mesh.expert, mesh.tensor
    return problem.anew(graph=graph.once(key, lambda: on_expert_ranks(graph, mesh)))
