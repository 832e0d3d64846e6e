"""What stages and messages cost, from the costs of their blocks: the simulator's numbers."""

from __future__ import annotations

from collections.abc import Callable

from parcompiler.lower.lowered import Lowered
from parcompiler.plan import Plan
from parcompiler.problem import Problem
from parcompiler.simulator import StageCost


def stage_costs(problem: Problem, plan: Plan, lowered: Lowered) -> tuple[StageCost, ...]:
    """Seconds and bytes of one micro-batch on each stage."""
    assert plan.granularity is not None
    priced = problem.priced(plan.granularity)
    index = {block.name: b for b, block in enumerate(priced.cut.blocks)}
    found = []
    for stage in lowered.stages:
        own = [index[call.block.name] for call in stage.calls]
        found.append(
            StageCost(
                forward=sum(priced.forward[b] for b in own),
                backward=sum(priced.backward[b] for b in own),
                resident=sum(problem.state_bytes(problem.graph.by_name[n]) for n in stage.tensors),
                saved=sum(priced.saved[b] for b in own),
            )
        )
    return tuple(found)


def message_seconds(problem: Problem) -> Callable[[int], float]:
    """Seconds of a message by its bytes, on the link between neighbours."""
    return problem.device.link.seconds
