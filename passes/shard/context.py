"""Rows for context ranks: the graph of one of them, which the rest of the compiler goes on from.

    tokens [b, s] ─► take [b, s/c] ─► embedding ─► layers ─► loss of the own rows ─► all-reduce

    attention, the one place where rows meet, is weighed in four forms by the programme:
    heads    all-to-all of q, k, v: rows -> heads, and of the result back (DeepSpeed-Ulysses,
             arXiv 2309.14509)
    rows     own rows of q; k and v are gathered, and their gradients reduce-scattered (Llama 3,
             arXiv 2407.21783, section 3.3.2)
    ring     k and v go round, their gradients behind them, beside the attention to those before
             (Ring Attention, arXiv 2310.01889)
    whole    what nothing splits is computed by all

    Rows that a mixture of experts sorts each rank sorts for itself (`spmd/sorting`).

The programme is that of the tensor axis (`ilp`), with fewer choices: parameters are whole (`R`:
every rank has a summand of their gradients, which are summed with those of the data ranks), and
neither they nor samples of a batch are split. Work that ranks do not share counts a hundredfold:
the axis is there to hold rows in pieces, and what is whole is whole in memory too.
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

LONG = 4096  # positions of a row from which memory alone may be worth the axis


def on_context_ranks(problem: Problem, plan: Plan | None = None) -> Problem:
    """The problem of one context rank; as the `plan` says, if there is one.

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

    # The same for all meshes with such ranks.
    key = "context", n, mesh.tensor, device, plan and plan.context
    made, chosen = graph.once(key, pieces)
    return problem.anew(graph=made, context=chosen)


def of_one_rank(graph: Graph, problem: Problem, chosen: Sharding) -> Graph:
    """The graph of one context rank of the whole `graph`: that of the problem, in its precision or
    in another, which has fewer casts."""
    n, apart = problem.mesh.context, problem.mesh.tensor
    whole = problem.graph.undivided or problem.graph
    by_name = {node.name: s for node, s in assigned_by(chosen, whole, n, "context").items()}
    nodes = (node for node in graph.fx_graph.nodes if node.name in by_name)
    made = shard(graph, {node: by_name[node.name] for node in nodes}, n, "context", apart)
    return dataclasses.replace(made, undivided=graph)


def _decided(problem: Problem) -> Sharding:
    """The fastest sharding; memory is left to the passes behind."""
    graph, mesh = problem.graph, problem.mesh
    pins = pinning.read("auto", graph)
    costs = ShardCosts(graph, problem.slowest_device, mesh.context, "context", mesh.tensor)
    candidates = Candidates(fold(graph), costs)
    built = build(candidates, pins, {}, None)
    found = sharding(candidates, built, decide(built.programme), stages=1)
    templates = tuple(dataclasses.replace(item, tensors=()) for item in found.templates)
    return dataclasses.replace(found, templates=templates, solution=None, memory=None)


def positions(graph: Graph) -> int:
    """What degrees of context ranks divide: the positions of every input; 1 where no attention
    mixes them."""
    rows = [spec.shape[1] for spec in graph.inputs if len(spec.shape) > 1 and spec.shape[1] > 1]
    attends = any(name_of(x) == "scaled_dot_product_attention" for x in graph.fx_graph.nodes)
    return math.gcd(*rows) if attends and rows else 1


def _check_rows(graph: Graph, n: int) -> None:
    """Refuse inputs whose rows are not the same number on every rank."""
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
