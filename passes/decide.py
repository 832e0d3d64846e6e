"""A plan from a problem: nothing is decided at the start, then every pass decides its part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from parcompiler.passes.base import Pass
from parcompiler.passes.shard.local import local
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
    )


def decide(
    problem: Problem, passes: Sequence[Pass], observer: Observer = lambda name: nullcontext()
) -> Plan:
    """What the passes decide, one after the other; nothing is lowered or verified.

    Raises InfeasibleError when nothing fits, InputError for options that the model cannot have.
    """
    plan = start(problem)
    for item in passes:
        with observer(f"pass {item.name}"):
            plan = item.run(local(problem, plan), plan)
    return plan
