"""Divide the rows of sequences over context ranks: the graph of one rank, for all later passes.

    tokens [b, s] ─► take [b, s/c] ─► embedding ─► layers ─► loss of the own rows ─► all-reduce

    attention, the one place where rows meet, is weighed in four forms by the programme:
    heads    all-to-all of q, k, v: rows -> heads, and of the result back (DeepSpeed-Ulysses,
             arXiv 2309.14509)
    rows     own rows of q; k and v are gathered, and their gradients reduce-scattered (Llama 3,
             arXiv 2407.21783, section 3.3.2)
    ring     k and v go round, followed by their gradients, while the rank attends to those it has
             (Ring Attention, arXiv 2310.01889)
    whole    computed by all ranks, if nothing splits it

    Each rank sorts its own rows of a mixture of experts (`spmd/sorting`).

The programme is that of the tensor axis (`ilp`), with fewer choices: neither parameters nor samples
of a batch are split. Parameters are whole (`R`): every rank has a summand of their gradients, which
are summed with those of the data ranks. Work that ranks do not share counts a hundredfold: the axis
is there to hold rows in pieces, and whole values are also whole in memory.
"""

from __future__ import annotations

import dataclasses
import math

from parcompiler.capture.effects import name_of
from parcompiler.errors import InputError
from parcompiler.graph import Graph
from parcompiler.passes.shard import pins as pinning
from parcompiler.passes.shard.candidates import Candidates
from parcompiler.passes.shard.ilp import decide
from parcompiler.passes.shard.ilp_builder import build
from parcompiler.passes.shard.node_costs import ShardCosts
from parcompiler.passes.shard.plan_entries import assigned_by, sharding
from parcompiler.passes.shard.templates import fold
from parcompiler.plan import Plan, Sharding
from parcompiler.problem import Problem
from parcompiler.spmd.shard import shard

LONG = 4096  # positions of a row from which on memory alone may justify the axis


def on_context_ranks(problem: Problem, plan: Plan | None = None) -> Problem:
    """The problem of one context rank; with the sharding of `plan`, if there is one.

    Raises InputError for an input whose rows the ranks cannot share equally, PlanError for a plan
    that the graph cannot have.
    """
    n = problem.mesh.context
    if n == 1 or problem.context is not None:
        return problem
    _check_rows(problem.graph, n)
    graph, mesh, device = problem.graph, problem.mesh, problem.slowest_device

    def pieces() -> tuple[Graph, Sharding]:
        chosen = (None if plan is None else plan.context) or _decided(problem)
        return of_one_rank(graph, problem, chosen), chosen

    # All meshes with such ranks have the same graph.
    key = "context", n, mesh.tensor, device, plan and plan.context
    made, chosen = graph.once(key, pieces)
    return problem.anew(graph=made, context=chosen)


def of_one_rank(graph: Graph, problem: Problem, chosen: Sharding) -> Graph:
    """One context rank's part of `graph`, which is the whole graph of the problem, in its precision
    or in another with fewer casts."""
    n, apart = problem.mesh.context, problem.mesh.tensor
    whole = problem.graph.undivided or problem.graph
    by_name = {node.name: s for node, s in assigned_by(chosen, whole, n, "context").items()}
    nodes = (node for node in graph.fx_graph.nodes if node.name in by_name)
    made = shard(graph, {node: by_name[node.name] for node in nodes}, n, "context", apart)
    return dataclasses.replace(made, undivided=graph)


def _decided(problem: Problem) -> Sharding:
    """The fastest sharding; later passes take care of memory."""
    graph, mesh = problem.graph, problem.mesh
    pins = pinning.read("auto", graph)
    costs = ShardCosts(graph, problem.slowest_device, mesh.context, "context", mesh.tensor)
    candidates = Candidates(fold(graph), costs)
    built = build(candidates, pins, {}, None)
    best = sharding(candidates, built, decide(built.programme), stages=1)
    templates = tuple(dataclasses.replace(item, tensors=()) for item in best.templates)
    return dataclasses.replace(best, templates=templates, solution=None, memory=None)


def positions(graph: Graph) -> int:
    """The number that the degree of context ranks must divide: the greatest common divisor of the
    positions of all inputs; 1 where no attention mixes positions."""
    rows = [spec.shape[1] for spec in graph.inputs if len(spec.shape) > 1 and spec.shape[1] > 1]
    attends = any(name_of(x) == "scaled_dot_product_attention" for x in graph.fx_graph.nodes)
    return math.gcd(*rows) if attends and rows else 1


def _check_rows(graph: Graph, n: int) -> None:
    """Raise InputError for inputs whose positions `n` ranks cannot share equally."""
    rows = {spec.key: spec.shape[1] for spec in graph.inputs if len(spec.shape) > 1}
    if not rows:
        message = f"context={n} splits rows of positions, and no input has any: take context=1"
        raise InputError(message)
    dims = {spec.key: len(spec.shape) for spec in graph.inputs}
    for key, size in rows.items():
        if size % n and size > 1:
            advice = f"pad them to {-(-size // n) * n}, or take a degree that divides {size}"
            if dims[key] > 3:  # channels of images
                advice = (
                    "it looks like images, whose channels stand there: take tensor or data ranks"
                )
            message = (
                f"context={n} does not divide the {size} positions of the input {key!r} (dimension "
                f"1): {advice}"
            )
            raise InputError(message)
