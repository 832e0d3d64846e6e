"""compile(): the flow of the compiler, on one screen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from parcompiler.capture import capture
from parcompiler.capture.inputs import Batch
from parcompiler.capture.lift import lift
from parcompiler.capture.simplify import simplify
from parcompiler.cost import OPTIMIZERS
from parcompiler.errors import InputError, PlanError
from parcompiler.graph import Graph
from parcompiler.lower import lower
from parcompiler.mesh import Mesh, whole
from parcompiler.options import Options, offered
from parcompiler.passes import DEFAULT, Pass
from parcompiler.passes.stage import reconsidered
from parcompiler.plan import Plan, Shape
from parcompiler.problem import Problem
from parcompiler.program import Program
from parcompiler.progress import Progress
from parcompiler.schedules import SCHEDULES
from parcompiler.verifier import verify


def compile(
    model: nn.Module | Graph | Program,
    mesh: Mesh,
    inputs: Batch | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    microbatches: int | None = None,
    schedule: str = "auto",
    virtual_stages: int = 1,
    vocabulary: str = "auto",
    stages: str | Sequence[int] = "auto",
    sharding: str | Mapping[str, str] = "auto",
    recompute: str | Mapping[str, bool] = "auto",
    precision: str | None = None,
    optimizer: str = "adamw",
    passes: Sequence[Pass] | None = None,
    plan: Plan | None = None,
    progress: bool = True,
) -> Program:
    """Divide the training of `model` over the ranks of `mesh`.

    `inputs` is ONE micro-batch of ONE data rank, a dict of keyword arguments or a tuple of
    positional ones; the model's parameters may be real or meta, and the model is not modified.
    `loss` maps the model's outputs to a scalar; without it the model returns the loss (a scalar,
    `.loss` or `["loss"]`). `microbatches` per step defaults to 4 · pipeline, or the plan's. A
    `Program` in the place of the model compiles its model again without capturing it; `plan`
    reuses a plan, perhaps an edited one.

    Raises InputError for arguments of the wrong form, CaptureError for a model that cannot be
    captured, InfeasibleError when nothing fits, PlanError for a plan that breaks rules.
    """
    _check_kinds(mesh, plan)
    if microbatches is None:
        microbatches = 4 * mesh.pipeline if plan is None else plan.microbatches
    options = Options(
        microbatches=microbatches,
        schedule=schedule,
        stages=stages,
        precision=precision,
        optimizer=optimizer,
    )
    _check_offer(mesh, virtual_stages, vocabulary, sharding, recompute, optimizer)
    with Progress(progress) as steps:
        with steps("capture"):
            captured = _captured(model, inputs, loss)
        with steps("simplify"):
            graph = captured if options.dtype is None else lift(captured, options.dtype)
            problem = Problem(simplify(graph), mesh, options)
        if plan is None:
            plan = _start(problem)
            for item in DEFAULT if passes is None else passes:
                with steps(f"pass {item.name}"):
                    plan = item.run(problem, plan)
        else:
            with steps("check plan"):
                _check_plan(problem, plan)
                plan = reconsidered(problem, plan)
        with steps("lower"):
            lowered = lower(problem.graph, plan, problem.priced(_granularity(plan)).cut)
        with steps("verify"):
            verify(lowered)
    if isinstance(model, Program):
        source, loss = model.model, model.loss
    else:
        source = model if isinstance(model, nn.Module) else None
    return Program(captured, problem, plan, lowered, source, loss)


def _captured(
    model: nn.Module | Graph | Program,
    inputs: Batch | None,
    loss: Callable[[Any], torch.Tensor] | None,
) -> Graph:
    """The graph of a model, captured unless it is there already."""
    if isinstance(model, Graph | Program):
        if inputs is not None or loss is not None:
            message = f"a {type(model).__name__} is captured already: give neither inputs nor loss"
            raise InputError(message)
        return model if isinstance(model, Graph) else model.captured
    if not isinstance(model, nn.Module):
        message = f"compile needs a torch.nn.Module ({type(model).__name__} given)"
        raise InputError(message)
    if inputs is None:
        message = "compile needs inputs: one micro-batch, a dict or a tuple"
        raise InputError(message)
    return capture(model, inputs, loss)


def _check_kinds(mesh: object, plan: object) -> None:
    """Refuse what is no mesh and what is no plan."""
    if not isinstance(mesh, Mesh):
        message = f"compile needs a Mesh, such as Mesh(pipeline=2) ({type(mesh).__name__} given)"
        raise InputError(message)
    if plan is not None and not isinstance(plan, Plan):
        message = f"plan must be a Plan: read JSON by Plan.from_json ({type(plan).__name__} given)"
        raise InputError(message)


def _check_offer(
    mesh: Mesh,
    virtual_stages: int,
    vocabulary: str,
    sharding: object,
    recompute: object,
    optimizer: str,
) -> None:
    """Refuse, before anything starts, what this release does not do yet."""
    for axis in ("tensor", "data"):
        if getattr(mesh, axis) != 1:
            message = f"this release divides the pipeline axis only ({axis}={getattr(mesh, axis)})"
            raise InputError(message)
    offered("virtual_stages", whole(virtual_stages) or virtual_stages, (1,))
    offered("vocabulary", vocabulary, ("auto", "whole"))
    offered("sharding", sharding, ("auto",))
    offered("recompute", recompute, ("auto", "none"))
    offered("optimizer", optimizer, tuple(sorted(OPTIMIZERS)))


def _start(problem: Problem) -> Plan:
    """The plan before any decision: what is given."""
    mesh, options = problem.mesh, problem.options
    return Plan(
        model=problem.graph.name,
        fingerprint=problem.graph.fingerprint,
        mesh=Shape(mesh.pipeline, mesh.tensor, mesh.data, mesh.hardware.name),
        microbatches=options.microbatches,
        precision=options.precision,
        optimizer=options.optimizer,
    )


def _check_plan(problem: Problem, plan: Plan) -> None:
    """Refuse a plan that was made for another model, mesh or number of micro-batches."""
    given = _start(problem)
    for name in ("model", "fingerprint", "mesh", "microbatches", "precision", "optimizer"):
        wanted, found = getattr(given, name), getattr(plan, name)
        if wanted != found:
            message = (
                f"the plan is of another {name} (plan: {found}, here: {wanted}); compile without "
                "plan= to make a new one"
            )
            raise PlanError(message)
    missing = [n for n in ("schedule", "granularity", "stages") if getattr(plan, n) is None]
    if missing:
        message = f"the plan leaves {missing[0]!r} undecided"
        raise PlanError(message)
    wishes = (plan.schedule, "auto")
    if plan.schedule not in SCHEDULES or problem.options.schedule not in wishes:
        message = (
            f"the plan has schedule {plan.schedule!r} (asked for: {problem.options.schedule!r}, "
            f"known: {', '.join(SCHEDULES)})"
        )
        raise PlanError(message)
    _check_blocks(problem, plan)


def _check_blocks(problem: Problem, plan: Plan) -> None:
    """Refuse a plan whose stages do not hold each block of the model once."""
    if _granularity(plan) not in problem.levels:
        message = f"the plan has granularity {plan.granularity}; the model has {problem.levels}"
        raise PlanError(message)
    assert plan.stages is not None
    priced = problem.priced(_granularity(plan))
    sent = tuple(node.name for node in priced.sent)
    if (plan.sent or ()) != sent:
        message = f"the plan has sent {plan.sent}; on this device it is {sent}, and not a choice"
        raise PlanError(message)
    wanted = [block.name for block in priced.cut.blocks]
    found = [name for choice in plan.stages for name in choice.blocks]
    for name in sorted(set(wanted) ^ set(found)) or _repeated(found):
        verb = "lacks" if name in wanted and name not in found else "misplaces"
        message = f"the plan {verb} block {name!r} (blocks: {', '.join(wanted)})"
        raise PlanError(message)
    if [choice.rank for choice in plan.stages] != list(range(plan.mesh.pipeline)):
        message = f"the plan needs stages on ranks 0 to {plan.mesh.pipeline - 1}, one each"
        raise PlanError(message)


def _repeated(names: Sequence[str]) -> list[str]:
    """The names that appear more than once."""
    return sorted({name for name in names if names.count(name) > 1})


def _granularity(plan: Plan) -> int:
    """The plan's granularity, decided by the stage pass."""
    if plan.granularity is None or plan.stages is None or plan.schedule is None:
        message = "the passes left the plan undecided: schedule and stage are needed"
        raise PlanError(message)
    return plan.granularity
