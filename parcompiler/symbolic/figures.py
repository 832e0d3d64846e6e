"""The figures of a program's step at some sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parcompiler import prices
from parcompiler.lower import lower
from parcompiler.plan import Plan
from parcompiler.problem import Problem
from parcompiler.report import data, gather
from parcompiler.timeline import simulate_lowered


@dataclass(frozen=True, slots=True)
class StepFigures:
    """A step at some sizes: by word, micro-batches and degrees among them.

    `step_time` in s, `peak_memory` in bytes and `bubble`, the idle fraction, of each pipeline rank
    are those of `Program.simulate`; `stages`, the `messages` between them and what ranks sum with
    their data replicas (`averaged`) are those of its report. `scaled` says that seconds follow from
    some that were measured at other sizes.
    """

    sizes: tuple[tuple[str, int], ...]
    stages: tuple[data.StageSummary, ...]
    step_time: float
    peak_memory: tuple[int, ...]
    bubble: tuple[float, ...]
    messages: tuple[data.SentValue, ...]
    averaged: tuple[data.Averaged, ...]
    scaled: bool


def figures_of(
    problem: Problem, plan: Plan, sizes: Mapping[str, int], *, scaled: bool
) -> StepFigures:
    """The figures of a plan, lowered and simulated; `problem` is that of one tensor rank."""
    assert plan.granularity is not None
    priced = problem.priced(plan.granularity)
    lowered = lower(problem.graph, plan, priced.cut)
    costs = prices.stage_costs(problem, plan, lowered)
    timeline = simulate_lowered(
        lowered,
        costs,
        prices.message_seconds(problem, lowered),
        collective_seconds=prices.collective_seconds(problem, lowered),
        left_seconds=prices.left_seconds(problem, plan, lowered),
        vocabulary=prices.vocabulary_cost(problem, plan),
    )
    return StepFigures(
        sizes=tuple(sizes.items()),
        stages=gather.stages(lowered, priced, costs),
        step_time=timeline.step_time,
        peak_memory=timeline.peak_memory,
        bubble=timeline.bubble,
        messages=gather.values(lowered, plan),
        averaged=gather.averaged(lowered, timeline),
        scaled=scaled,
    )
