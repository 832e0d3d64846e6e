"""Programs whose strategies are chosen by hand: the tensor axis without a solver."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import parcompiler as pc
from parcompiler.capture.blocks import cut
from parcompiler.graph import Graph
from parcompiler.lower import Lowered, lower
from parcompiler.plan import Plan, Shape, StageChoice
from parcompiler.problem import Problem
from parcompiler.program import Program
from parcompiler.schedules import stages_per_rank
from parcompiler.schedules.planned import planned
from parcompiler.spmd.shard import Assignment, shard
from parcompiler.verifier import verify
from tests import zoo

Chooser = Callable[[Graph, int], Assignment]


@dataclass(frozen=True)
class Sharded(Program):
    """A program that chooses its strategies itself, in every precision."""

    chooser: Chooser | None = None

    def on(self, graph: Graph) -> Sharded:
        """The same decisions on another graph."""
        assert self.chooser is not None
        problem = Problem(graph, self.problem.mesh, self.problem.options)
        return dataclasses.replace(
            self, problem=problem, lowered=lowered(graph, self.plan, self.chooser)
        )


def lowered(graph: Graph, plan: Plan, chooser: Chooser) -> Lowered:
    """The proved program of a graph that is sharded as `chooser` says."""
    assert plan.granularity is not None
    local = shard(graph, chooser(graph, plan.mesh.tensor), plan.mesh.tensor)
    made = lower(local, plan, cut(local, plan.granularity))
    verify(made)
    return made


def sharded(
    name: str | pc.Program,
    chooser: Chooser,
    mesh: pc.Mesh,
    *,
    microbatches: int = 2,
    schedule: str = "1f1b",
    recompute: Sequence[str] = (),
    selective: bool = False,
) -> Sharded:
    """A model on a mesh: even stages, and the strategies that `chooser` takes."""
    whole = zoo.captured(name) if isinstance(name, str) else name
    graph = whole.problem.graph
    plan = dataclasses.replace(
        whole.plan,
        mesh=Shape(mesh.pipeline, mesh.tensor, mesh.data),
        microbatches=microbatches,
        schedule=schedule,
        virtual_stages=stages_per_rank(schedule, 1),
        recompute=tuple(recompute),
        selective=selective,
        granularity=1,
        sent=(),
    )
    placement = planned(plan).placement
    names = [block.name for block in cut(graph, 1).blocks]
    count = len(placement)
    ends = [0, *accumulate(len(names) * (j + 1) // count - len(names) * j // count
                           for j in range(count))]  # fmt: skip
    stages = tuple(
        StageChoice(tuple(names[a:b]), rank)
        for (a, b), rank in zip(pairwise(ends), placement, strict=True)
    )
    plan = dataclasses.replace(plan, stages=stages)
    options = dataclasses.replace(whole.problem.options, microbatches=microbatches)
    problem = Problem(graph, mesh, options)
    return Sharded(
        whole.captured,
        problem,
        plan,
        lowered(graph, plan, chooser),
        whole.model,
        whole.loss,
        chooser,
    )
