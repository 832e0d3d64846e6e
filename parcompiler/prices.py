"""What stages and messages cost, from the costs of their blocks: the simulator's numbers.

An asynchronous program holds versions of the weights of a stage besides the current one. What is
recomputed counts as held all the time, where it is largest.
"""

from __future__ import annotations

from collections.abc import Callable

from parcompiler.instruction import Instruction
from parcompiler.lower.lowered import Lowered
from parcompiler.passes.estimate import costs
from parcompiler.passes.spread import vocabulary_cost
from parcompiler.plan import Plan
from parcompiler.problem import Problem
from parcompiler.schedules import staleness as stale
from parcompiler.simulator import StageCost

__all__ = [
    "collective_seconds",
    "message_seconds",
    "stage_costs",
    "staleness",
    "stashed_bytes",
    "versions",
    "vocabulary_cost",
]  # fmt: skip


def stage_costs(problem: Problem, plan: Plan, lowered: Lowered) -> tuple[StageCost, ...]:
    """Seconds and bytes of one micro-batch on each stage."""
    return costs(problem, plan, [stage.tensors for stage in lowered.stages])


def staleness(lowered: Lowered) -> tuple[int, ...]:
    """For each stage the most updates between the forward of a micro-batch and its own update."""
    if not lowered.asynchronous:
        return (0,) * len(lowered.stages)
    return tuple(stale.staleness(lowered.instructions[s.rank], s.index) for s in lowered.stages)


def versions(lowered: Lowered) -> tuple[int, ...]:
    """For each stage the most versions of its weights that are held at once."""
    if not lowered.asynchronous:
        return (1,) * len(lowered.stages)
    return tuple(stale.versions(lowered.instructions[s.rank], s.index) for s in lowered.stages)


def stashed_bytes(lowered: Lowered, stage: int) -> int:
    """Bytes of the versions of a stage's weights that are held besides the current one."""
    tensors = [lowered.graph.by_name[name] for name in lowered.stages[stage].tensors]
    weights = sum(item.nbytes for item in tensors if item.trainable)
    return (versions(lowered)[stage] - 1) * weights


def collective_seconds(problem: Problem, lowered: Lowered) -> Callable[[Instruction], float]:
    """Seconds of a sum over data ranks by its instruction; everything else counts as free.

    A ring of n ranks: 2(n - 1) messages after one another, each of an n-th of the bytes (Patarasuk
    and Yuan, 2009, section 3).
    """
    sums = {item.label: item for item in lowered.sums}
    by_name, link = lowered.graph.by_name, problem.device.link

    def seconds(line: Instruction) -> float:
        item = sums.get(line.value or "")
        if item is None or lowered.data == 1:
            return 0.0
        count = len(lowered.grid.replicas(item.ranks))
        nbytes = sum(by_name[name].nbytes for name in item.names)
        return 2 * (count - 1) * link.seconds(nbytes / count)

    return seconds


def message_seconds(problem: Problem) -> Callable[[int], float]:
    """Seconds of a message by its bytes, on the link between neighbours."""
    return problem.device.link.seconds
