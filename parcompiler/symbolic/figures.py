"""The figures of a program's stages at some sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from parcompiler import prices
from parcompiler.lower import Lowered, lower
from parcompiler.passes.estimate import messages
from parcompiler.plan import Plan
from parcompiler.problem import Problem
from parcompiler.schedules.action import NOWHERE
from parcompiler.timeline import StageCost, simulate_lowered


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
class MessageFigures:
    """A value of `nbytes` that stage `source` gives to the stages `targets` for each micro-batch;
    its gradient `returns` from there (but where its use does not lead to the loss)."""

    name: str
    source: int
    targets: tuple[int, ...]
    nbytes: int
    returns: bool


@dataclass(frozen=True, slots=True)
class StepFigures:
    """A step at some sizes: by word, micro-batches and degrees among them.

    `step_time` in s, `peak_memory` in bytes and `bubble`, the idle fraction, of each pipeline rank
    are those of `Program.simulate`; `messages` go between stages, `averaged` are the bytes of
    gradients that each rank sums with its data replicas. `scaled` says that seconds follow from
    some that were measured at other sizes.
    """

    sizes: tuple[tuple[str, int], ...]
    stages: tuple[StageFigures, ...]
    step_time: float
    peak_memory: tuple[int, ...]
    bubble: tuple[float, ...]
    messages: tuple[MessageFigures, ...]
    averaged: tuple[int, ...]
    scaled: bool


def figures_of(
    problem: Problem, plan: Plan, sizes: Mapping[str, int], *, scaled: bool
) -> StepFigures:
    """The figures of a plan, lowered and simulated; `problem` is that of one tensor rank."""
    assert plan.granularity is not None
    lowered = lower(problem.graph, plan, problem.priced(plan.granularity).cut)
    costs = prices.stage_costs(problem, plan, lowered)
    timeline = simulate_lowered(
        lowered,
        costs,
        prices.message_seconds(problem, lowered),
        collective_seconds=prices.collective_seconds(problem, lowered),
        vocabulary=prices.vocabulary_cost(problem, plan),
    )
    return StepFigures(
        sizes=tuple(sizes.items()),
        stages=tuple(_stages(problem, plan, costs)),
        step_time=timeline.step_time,
        peak_memory=timeline.peak_memory,
        bubble=timeline.bubble,
        messages=tuple(_messages(lowered)),
        averaged=tuple(_averaged(lowered)),
        scaled=scaled,
    )


def _messages(lowered: Lowered) -> Iterator[MessageFigures]:
    """What goes between stages, by the stage it leaves; not what the vocabulary gives or takes."""
    for value in sorted(lowered.values.values(), key=lambda value: value.producer):
        targets = tuple(j for j in value.consumers if j != NOWHERE)
        if value.producer != NOWHERE and targets:
            returns = value.differentiable
            yield MessageFigures(value.name, value.producer, targets, value.nbytes, returns)


def _averaged(lowered: Lowered) -> Iterator[int]:
    """Bytes of gradients that each rank sums with its data replicas."""
    for rank in range(lowered.size):
        names = (name for item in lowered.sums if rank in item.ranks for name in item.names)
        yield sum(lowered.graph.by_name[name].nbytes for name in names) * (lowered.data > 1)


def _stages(problem: Problem, plan: Plan, costs: Sequence[StageCost]) -> Iterator[StageFigures]:
    """The figures of each stage."""
    assert plan.stages is not None
    priced = problem.under(plan)
    traced = {block.name: cost for block, cost in zip(priced.cut.blocks, priced.costs, strict=True)}
    sent, back = [0] * len(plan.stages), [0] * len(plan.stages)
    for item in messages(problem, plan):
        sent[item.source] += item.nbytes * len(item.targets)
        back[item.source] += item.nbytes * len(item.targets) if item.gradient is not None else 0
    for j, cost in enumerate(costs):
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
