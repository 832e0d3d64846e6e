"""Seconds and bytes on every rank of a vocabulary that all ranks share."""

from __future__ import annotations

from typing import Any

from torch import fx

from parcompiler.cost.collective import among
from parcompiler.cost.times import measured_vocabulary
from parcompiler.cost.vocabulary import vocabulary_parts
from parcompiler.plan import VOCABULARY_PASSES, Plan
from parcompiler.problem import Problem
from parcompiler.schedules.planned import outline
from parcompiler.timeline import VocabularyCost


def vocabulary_cost(problem: Problem, plan: Plan) -> VocabularyCost | None:
    """The cost for one micro-batch on each rank; None where the vocabulary is on stages.

    Until stages are decided, embeddings count with the first one, and the head reads the last.
    """
    spread = problem.graph.vocabulary
    if plan.vocabulary is None or not plan.vocabulary.spread or spread is None:
        return None
    method, ranks = plan.vocabulary.method, plan.mesh.pipeline * plan.mesh.tensor
    parts = modelled_parts(problem, ranks, method) | _measured(problem, ranks, method)
    stages = _stages(problem, plan)
    last = len(outline(plan).placement) - 1
    users = (min((stages[u] for u in item.node.users if u in stages), default=0)
             for item in spread.lookups)  # fmt: skip
    return VocabularyCost(
        method=method,
        source=stages.get(spread.head.x, last) if spread.head else -1,
        users=tuple(users),
        **parts,
    )


def spread_bytes(problem: Problem) -> int:
    """Bytes on every rank of a vocabulary that all ranks share, before a method is decided; 0 where
    it is on stages."""
    if problem.graph.vocabulary is None:
        return 0
    parts = modelled_parts(problem, problem.mesh.pipeline * problem.mesh.tensor, "vocab-2")
    return int(parts["resident"] + parts["saved"] + parts["more"])


def modelled_parts(problem: Problem, ranks: int, method: str) -> dict[str, Any]:
    """Modelled seconds and bytes of a method on each of `ranks` ranks. Cached."""
    key = "vocabulary", ranks, method
    return problem.once(key, lambda: _slowest(problem, ranks, method))


def _measured(problem: Problem, ranks: int, method: str) -> dict[str, Any]:
    """Measured seconds of the vocabulary's passes; empty where they are modelled.

    Raises InputError where they cannot run here.
    """
    known = problem.cache.vocabulary_times.get(method)
    if known is None:
        if problem.bench is None:
            return {}
        known = measured_vocabulary(problem.graph, ranks, method, problem.bench)
        problem.cache.vocabulary_times[method] = known
    return {name: getattr(known, name) for name in VOCABULARY_PASSES}


def _slowest(problem: Problem, ranks: int, method: str) -> dict[str, Any]:
    """Each part's time on the slowest device: ranks wait for each other."""
    together = among(problem.mesh, problem.mesh.grid.plane(0))  # all of one data coordinate
    costs = [
        vocabulary_parts(
            problem.graph, ranks, method, device, problem.state_bytes,
            update_seconds=problem.update_seconds, everywhere=problem.mesh.tensor > 1,
            group=together,
        )
        for device in dict.fromkeys(problem.devices)
    ]  # fmt: skip
    return {name: max(parts[name] for parts in costs) for name in costs[0]}


def _stages(problem: Problem, plan: Plan) -> dict[fx.Node, int]:
    """The stage of every node, once stages are decided."""
    if plan.stages is None or plan.granularity is None:
        return {}
    home = {name: j for j, choice in enumerate(plan.stages) for name in choice.blocks}
    blocks = problem.priced(plan.granularity).cut.blocks
    return {node: home[block.name] for block in blocks for node in block.nodes}
