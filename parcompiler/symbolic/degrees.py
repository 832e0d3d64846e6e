"""A program's problem and plan at other degrees of its mesh, without another capture.

Other tensor ranks keep stages, schedule and strategies. Other pipeline ranks need other stages: the
passes divide again, under the plan's schedule, strategies and vocabulary method.
"""

from __future__ import annotations

import dataclasses

from parcompiler.errors import InputError
from parcompiler.mesh import positive
from parcompiler.passes import DEFAULT
from parcompiler.passes.decide import start
from parcompiler.passes.shard.local import local
from parcompiler.plan import Plan
from parcompiler.problem import Problem
from parcompiler.schedules import SCHEDULES
from parcompiler.schedules.planned import planned


def with_copies(plan: Plan, microbatches: int | None, data: int | None) -> Plan:
    """The plan with other micro-batches and data ranks, if given; whether states are shared out
    does not change. Raises InputError."""
    count = plan.microbatches if microbatches is None else positive("microbatches", microbatches)
    if count != plan.microbatches:
        if plan.orders is not None:
            message = (
                f"the plan's order is for {plan.microbatches} micro-batches ({count} "
                "given): compile for another number"
            )
            raise InputError(message)
        plan = dataclasses.replace(plan, microbatches=count)
    ranks = plan.mesh.data if data is None else positive("data", data)
    if ranks != plan.mesh.data:
        shape, level = dataclasses.replace(plan.mesh, data=ranks), plan.zero or 0
        plan = dataclasses.replace(plan, mesh=shape, zero=level if ranks > 1 else None)
    if plan.mesh.data > 1 and planned(plan).asynchronous:
        message = (
            f"{plan.schedule!r} updates parameters inside the step, which data ranks cannot do "
            f"together (data={data})"
        )
        raise InputError(message)
    return plan


def with_tensor(whole: Problem, plan: Plan, tensor: int) -> tuple[Problem, Plan]:
    """The problem and the plan for `tensor` tensor ranks. Raises InputError."""
    if plan.sharding is None:
        message = f"the plan splits no tensors: compile for {tensor} tensor ranks"
        raise InputError(message)
    _check_measured(whole, plan, "tensor", tensor)
    mesh = dataclasses.replace(whole.mesh, tensor=tensor)
    shape = dataclasses.replace(plan.mesh, tensor=tensor)
    sharding = None if tensor == 1 else plan.sharding
    return whole.anew(mesh=mesh), dataclasses.replace(plan, mesh=shape, sharding=sharding)


def with_pipeline(whole: Problem, plan: Plan, pipeline: int) -> tuple[Problem, Plan]:
    """The problem and a plan for `pipeline` pipeline ranks. Raises InputError, and InfeasibleError
    if no division fits."""
    if plan.orders is not None or plan.schedule not in SCHEDULES:
        message = (
            f"the plan's order is for {plan.mesh.pipeline} pipeline ranks ({pipeline} given): "
            "compile for another number"
        )
        raise InputError(message)
    if not isinstance(whole.options.stages, str):
        message = (
            f"the number of blocks of each stage was given for {plan.mesh.pipeline} pipeline "
            f"ranks ({pipeline} given): compile for another number"
        )
        raise InputError(message)
    _check_measured(whole, plan, "pipeline", pipeline)
    assert plan.schedule is not None
    options = dataclasses.replace(
        whole.options,
        schedule=plan.schedule,
        virtual_stages=plan.virtual_stages,
        vocabulary=plan.vocabulary.method if plan.vocabulary else whole.options.vocabulary,
        microbatches=plan.microbatches,
        zero=whole.options.zero if plan.zero is None else plan.zero,
    )
    mesh = dataclasses.replace(whole.mesh, pipeline=pipeline, data=plan.mesh.data)
    problem = whole.anew(mesh=mesh, options=options)
    vocabulary, *others = DEFAULT
    new = vocabulary.run(problem, start(problem))
    if plan.sharding is not None and _spread(new) != _spread(plan):
        message = (
            f"the plan's sharding says nothing of the layers of the vocabulary, which are on all "
            f"ranks with pipeline={plan.mesh.pipeline} and not with {pipeline}: compile for that"
        )
        raise InputError(message)
    new = dataclasses.replace(new, sharding=plan.sharding)
    for decision in others:
        new = decision.run(local(problem, new), new)
    return problem, new


def _spread(plan: Plan) -> object:
    """The layers of the vocabulary that are on all ranks."""
    choice = plan.vocabulary
    return (choice.lookups, choice.head) if choice and choice.spread else None


def _check_measured(whole: Problem, plan: Plan, name: str, number: int) -> None:
    """Refuse templates without measurements if measuring is impossible."""
    if plan.costs is not None and whole.bench is None:
        message = (
            f"the plan's times were measured with {name}={getattr(plan.mesh, name)} ({number} "
            "given): compile with costs='measured', or without the plan's times"
        )
        raise InputError(message)
