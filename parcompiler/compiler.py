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
from parcompiler.mesh import Mesh
from parcompiler.options import METHODS, Options, offered
from parcompiler.passes import DEFAULT, Pass
from parcompiler.passes.recompute import check_patterns, chosen
from parcompiler.passes.shard.kept import check_pins
from parcompiler.passes.shard.local import local
from parcompiler.passes.stage import reconsidered
from parcompiler.plan import Plan, Shape
from parcompiler.prices import stage_costs, vocabulary_cost
from parcompiler.problem import Problem
from parcompiler.program import Program
from parcompiler.progress import Progress
from parcompiler.schedules import SCHEDULES, Schedule, build, stages_per_rank
from parcompiler.schedules.planned import planned, trunk
from parcompiler.verifier import Memory, verify


def compile(
    model: nn.Module | Graph | Program,
    mesh: Mesh,
    inputs: Batch | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    microbatches: int | None = None,
    schedule: str | Schedule = "auto",
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
    `.loss` or `["loss"]`). `microbatches` per step defaults to 4 · pipeline, or the plan's.
    `schedule` is a name, "auto" (the fastest that fits), "search" (an order found for this model)
    or a `pc.Schedule`; `virtual_stages` is the number of stages on each rank for the schedules
    that use several (1 stands for their least number, 2). `recompute` says which blocks run again
    in their backward instead of keeping activations: "none", "full" (all that may), "auto" (what
    memory forces), or {pattern of block names: bool}, of which the last that matches decides. A
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
        virtual_stages=virtual_stages,
        stages=stages,
        sharding=sharding,
        recompute=recompute,
        vocabulary=vocabulary,
        precision=precision,
        optimizer=optimizer,
    )
    _check_order(mesh, options)
    _check_replicas(mesh, model, plan)
    offered("optimizer", optimizer, tuple(sorted(OPTIMIZERS)))
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
                    plan = item.run(local(problem, plan), plan)
        else:
            with steps("check plan"):
                _check_plan(problem, plan)
                plan = reconsidered(local(problem, plan), plan)
        with steps("lower"):
            own = local(problem, plan)
            lowered = lower(own.graph, plan, own.priced(_granularity(plan)).cut)
        with steps("verify"):
            limits = [problem.device.memory] * lowered.size
            costs, spread = stage_costs(own, plan, lowered), vocabulary_cost(own, plan)
            verify(lowered, Memory(costs, limits, spread))
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


def _check_order(mesh: Mesh, options: Options) -> None:
    """Refuse a schedule that cannot have these ranks, micro-batches or stages on a rank."""
    wanted, ranks = options.schedule, mesh.pipeline
    if isinstance(wanted, Schedule):
        found = wanted.ranks, wanted.microbatches
        if found != (ranks, options.microbatches):
            message = (
                f"the schedule {wanted.name!r} has {found[0]} ranks and {found[1]} micro-batches "
                f"(given: pipeline={ranks}, microbatches={options.microbatches})"
            )
            raise InputError(message)
        schedule = wanted
    elif wanted in SCHEDULES:
        virtual_stages = stages_per_rank(wanted, options.virtual_stages)
        schedule = build(wanted, ranks, options.microbatches, virtual_stages)
    else:
        return
    _check_updates(mesh, schedule)


def _check_replicas(mesh: Mesh, model: object, plan: Plan | None) -> None:
    """Refuse what several data ranks cannot have: updates inside the step, statistics of some."""
    if mesh.data == 1:
        return
    found = model.model if isinstance(model, Program) else model
    for path, module in found.named_modules() if isinstance(found, nn.Module) else ():
        if isinstance(module, nn.SyncBatchNorm) and module.process_group is not None:
            message = (
                f"{path!r} is a SyncBatchNorm over a process group of its own, which may not be "
                f"the data ranks of the mesh (data={mesh.data}): make it without process_group"
            )
            raise InputError(message)
    if plan is not None and plan.schedule is not None:
        _check_updates(mesh, planned(plan))


def _check_updates(mesh: Mesh, schedule: Schedule) -> None:
    """Refuse an asynchronous schedule on several data ranks."""
    if schedule.asynchronous and mesh.data > 1:
        message = (
            f"{schedule.name!r} updates parameters inside the step, which data ranks cannot do "
            f"together (data={mesh.data}): take data=1 or a synchronous schedule"
        )
        raise InputError(message)


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
    decisions = ["schedule", "granularity", "stages", "recompute"]
    decisions += ["sharding"] if problem.mesh.tensor > 1 else []
    missing = [n for n in decisions if getattr(plan, n) is None]
    if missing:
        message = f"the plan leaves {missing[0]!r} undecided"
        raise PlanError(message)
    _check_schedule(problem.options, plan)
    _check_vocabulary(problem.options, plan)
    own = local(problem, plan)
    check_pins(problem, plan)
    _check_blocks(own, plan)
    _check_recompute(own, plan)


def _check_schedule(options: Options, plan: Plan) -> None:
    """Refuse a plan with another schedule than was asked for."""
    schedule, wanted = trunk(plan), options.schedule
    if isinstance(wanted, Schedule):
        if schedule != wanted:
            message = f"the plan has another schedule ({plan.schedule!r}) than {wanted.name!r}"
            raise PlanError(message)
    elif wanted not in ("auto", plan.schedule):
        message = f"the plan has schedule {plan.schedule!r} (asked for: {wanted!r})"
        raise PlanError(message)
    elif options.virtual_stages not in (1, plan.virtual_stages):
        message = (
            f"the plan has {plan.virtual_stages} stages on each rank (asked for: "
            f"{options.virtual_stages})"
        )
        raise PlanError(message)


def _check_vocabulary(options: Options, plan: Plan) -> None:
    """Refuse a plan with another way with the vocabulary than was asked for."""
    found = plan.vocabulary
    method = found.method if found else "whole"
    if method not in ("whole", *METHODS):
        message = f"the plan has vocabulary {method!r} (known: whole, {', '.join(METHODS)})"
        raise PlanError(message)
    able = method != "whole" or (found is not None and not found.kept)
    if options.vocabulary not in ("auto", method) and able:
        message = f"the plan has vocabulary {method!r} (asked for: {options.vocabulary!r})"
        raise PlanError(message)


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
        given = f" with vocabulary {plan.vocabulary.method!r}" if plan.vocabulary else ""
        message = f"the plan {verb} block {name!r} (blocks{given}: {', '.join(wanted)})"
        raise PlanError(message)
    ranks = tuple(choice.rank for choice in plan.stages)
    if ranks != planned(plan).placement:
        message = (
            f"the plan has stages on ranks {ranks}; its schedule {plan.schedule!r} has them on "
            f"{planned(plan).placement}"
        )
        raise PlanError(message)


def _check_recompute(problem: Problem, plan: Plan) -> None:
    """Refuse a plan that recomputes what it cannot, or other blocks than was asked for."""
    priced, names = problem.priced(_granularity(plan)), plan.recompute or ()
    known = [block.name for block in priced.cut.blocks]
    for name in names:
        if name not in priced.repeatable:
            why = "updates buffers, which must happen once" if name in known else "is no block"
            message = f"the plan recomputes {name!r}, which {why} (blocks: {', '.join(known)})"
            raise PlanError(message)
    wanted = problem.options.recompute
    if not isinstance(wanted, str):
        check_patterns(problem, wanted)
    if wanted != "auto":
        asked = chosen(problem, _granularity(plan), wanted)
        for name in sorted(set(asked) ^ set(names)):
            verb = "keeps" if name in asked else "recomputes"
            message = f"the plan {verb} the activations of {name!r} (asked for: {wanted!r})"
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
