"""The figures of a program's stages at some sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parcompiler.passes.estimate import costs, messages
from parcompiler.plan import Plan
from parcompiler.problem import Problem


@dataclass(frozen=True, slots=True)
class StageFigures:
    """What one micro-batch costs on a stage: FLOPs, seconds, and bytes.

    `saved` is kept from the forward to the backward, `resident` what is there all the time
    (parameters, gradients, optimizer), `sent` the values for other stages, `sent_back` the
    gradients that come back for them. The layers of a vocabulary on all ranks are not in it.
    """

    flops_forward: float
    flops_backward: float
    forward: float
    backward: float
    saved: int
    resident: int
    sent: int
    sent_back: int


@dataclass(frozen=True, slots=True)
class Figures:
    """A step at some sizes: by word, micro-batches and data ranks among them. `step_time` in s is
    without the sums over data ranks."""

    sizes: tuple[tuple[str, int], ...]
    stages: tuple[StageFigures, ...]
    step_time: float


def stages_of(problem: Problem, plan: Plan) -> Iterator[StageFigures]:
    """The figures of each stage."""
    assert plan.stages is not None
    priced = problem.under(plan)
    traced = {block.name: cost for block, cost in zip(priced.cut.blocks, priced.costs, strict=True)}
    sent, back = [0] * len(plan.stages), [0] * len(plan.stages)
    for item in messages(problem, plan):
        sent[item.source] += item.nbytes * len(item.targets)
        back[item.source] += item.nbytes * len(item.targets) if item.gradient is not None else 0
    for j, cost in enumerate(costs(problem, plan)):
        names = plan.stages[j].blocks
        forward = sum(op.flops for name in names for op in traced[name].forward)
        twice = [name for name in names if name in priced.recomputed]
        backward = sum(op.flops for name in names for op in traced[name].backward)
        yield StageFigures(
            flops_forward=forward,
            flops_backward=backward + sum(op.flops for n in twice for op in traced[n].forward),
            forward=float(cost.forward),
            backward=float(cost.backward),
            saved=cost.saved,
            resident=cost.resident,
            sent=sent[j],
            sent_back=back[j],
        )
