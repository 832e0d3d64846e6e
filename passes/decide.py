"""A plan from a problem: nothing is decided at the start, then every pass decides its part."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from parcompiler.data_updates import ALL_REDUCE
from parcompiler.passes import zero
from parcompiler.passes.base import Pass
from parcompiler.passes.schedule import SchedulePass
from parcompiler.passes.shard.local import local
from parcompiler.passes.vocabulary import VocabularyPass
from parcompiler.plan import Plan, Shape
from parcompiler.problem import Problem

Observer = Callable[[str], AbstractContextManager[None]]


def start(problem: Problem) -> Plan:
    """The plan before any decision: what is given."""
    mesh, options = problem.mesh, problem.options
    return Plan(
        model=problem.graph.name,
        fingerprint=problem.graph.fingerprint,
        mesh=Shape(mesh.pipeline, mesh.tensor, mesh.data, mesh.name),
        microbatches=options.microbatches,
        precision=options.precision,
        optimizer=options.optimizer,
        zero=options.zero if mesh.data > 1 and isinstance(options.zero, int) else None,
        updates=None if options.data_updates == ALL_REDUCE else options.data_updates,
    )


def decide(
    problem: Problem, passes: Sequence[Pass], observer: Observer = lambda name: nullcontext()
) -> Plan:
    """What the passes decide, one after the other; nothing is lowered or verified.

    What data ranks share out is weighed with all of them. Raises InfeasibleError when nothing fits,
    InputError for options that the model cannot have.
    """

    def complete(plan: Plan, below: float) -> Plan:
        for item in passes:
            if isinstance(item, VocabularyPass | SchedulePass):
                item = dataclasses.replace(item, below=min(item.below, below))
            with observer(f"pass {item.name}"):
                plan = item.run(local(problem, plan), plan)
        return plan

    return zero.weighed(problem, start(problem), complete)
