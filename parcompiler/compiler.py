"""compile(): the flow of the compiler, on one screen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from parcompiler.bench.local import LocalBench
from parcompiler.capture import capture
from parcompiler.capture.inputs import Batch
from parcompiler.capture.lift import lift
from parcompiler.capture.narrow import capture_in
from parcompiler.capture.simplify import simplify
from parcompiler.cost import OPTIMIZERS
from parcompiler.errors import InputError, LaunchError
from parcompiler.garbage import rarely_collected
from parcompiler.given_plan import check_plan, granularity_of
from parcompiler.graph import Graph
from parcompiler.lower import lower
from parcompiler.mesh import Cluster, Mesh
from parcompiler.meshes import (
    GIVEN,
    Check,
    Sizes,
    Wanted,
    global_microbatches,
    search,
    wanted_rows,
)
from parcompiler.options import Options, offered
from parcompiler.passes import DEFAULT, Pass
from parcompiler.passes.decide import decide
from parcompiler.passes.shard.local import local
from parcompiler.passes.stage import reconsidered
from parcompiler.plan import Plan
from parcompiler.prices import stage_costs, vocabulary_cost
from parcompiler.problem import Problem
from parcompiler.program import Program
from parcompiler.progress import Progress
from parcompiler.runtime.device import rank_device
from parcompiler.schedules import SCHEDULES, Schedule, build, stages_per_rank
from parcompiler.schedules.planned import planned
from parcompiler.verifier import Memory, verify


def compile(
    model: nn.Module | Graph | Program,
    mesh: Mesh | Cluster,
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
    costs: str = "model",
    passes: Sequence[Pass] | None = None,
    plan: Plan | None = None,
    progress: bool = True,
    microbatch: str | Sequence[int] = GIVEN,
) -> Program:
    """Divide the training of `model` over the ranks of `mesh`, or of the best mesh of a `Cluster`.

    `inputs` is ONE micro-batch of ONE data rank, a dict of keyword arguments or a tuple of
    positional ones; the model's parameters may be real or meta, and the model is not modified.
    `loss` maps the model's outputs to a scalar; without it the model returns the loss (a scalar,
    `.loss` or `["loss"]`). `microbatches` per step and data rank default to 4 · pipeline, or the
    plan's; with a `Cluster` they are those of a step on all devices together, shared equally by the
    data ranks of each mesh, and default to 4 for each device: so all meshes train the same batch.
    `schedule` is a name, "auto" (the fastest that fits), "search" (an order found for this model)
    or a `pc.Schedule`; `virtual_stages` is the number of stages on each rank for the schedules
    that use several (1 stands for their least number, 2). `recompute` says which blocks run again
    in their backward instead of keeping activations: "none", "full" (all that may), "auto" (what
    memory forces), or {pattern of block names: bool}, of which the last that matches decides.
    `precision` "bf16" or "fp16" computes in 16 bits, with masters of the parameters in float32.
    `costs` is "model", or "measured": every distinct block is run on the device of this machine,
    for about a second, and so are the passes of a spread vocabulary; their times are kept in the
    plan. What the tensor ranks of a CPU exchange is measured among as many processes, if there is
    a core for each of them that others leave alone. A `Program` in the place of the model compiles
    its model again without capturing it; `plan` reuses a plan, perhaps an edited one. With a
    `Cluster`, `microbatch` "auto" weighs micro-batches of 1, 2, 4, 8, ... rows beside that of
    `inputs`, or those of a list of rows, in so many micro-batches that the rows of a step stay the
    same (the loss must be a mean over rows; where it may not be, the micro-batch stays as it is
    given); the program takes the best, for which the model is captured once more.

    Raises InputError for arguments of the wrong form, CaptureError for a model that cannot be
    captured, InfeasibleError when nothing fits, PlanError for a plan that breaks rules.
    """
    _check_kinds(mesh, plan)
    if isinstance(mesh, Cluster):
        microbatches = global_microbatches(mesh, microbatches)
    elif microbatches is None:
        microbatches = 4 * mesh.pipeline if plan is None else plan.microbatches
    source, criterion = _source(model, loss)
    wanted = wanted_rows(microbatch, mesh, costs, again=source is not None)
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
        costs=costs,
    )
    bench = _bench(mesh, options)
    if isinstance(mesh, Mesh):
        _check_order(mesh, options)
        _check_replicas(mesh, model, plan)
    offered("optimizer", optimizer, tuple(sorted(OPTIMIZERS)))
    with rarely_collected(), Progress(progress) as steps:
        with steps("capture"):
            captured = _captured(model, inputs, loss, options.narrow)
        with steps("simplify"):
            graph = _prepared(captured, options)
            alone = Mesh(device=mesh.device) if isinstance(mesh, Cluster) else mesh
            problem = Problem(graph, alone, options, bench=bench)
        if plan is None:
            chosen = DEFAULT if passes is None else tuple(passes)
            if isinstance(mesh, Cluster):
                sizes = _sizes(problem, captured, wanted, source, criterion)
                captured, problem, plan = search(sizes, mesh, chosen, _checked(model), steps)
            else:
                plan = decide(problem, chosen, steps)
            plan = _with_costs(local(problem, plan), plan)
        else:
            with steps("check plan"):
                check_plan(problem, plan)
                plan = reconsidered(local(problem, plan), plan)
        with steps("lower"):
            own = local(problem, plan)
            lowered = lower(own.graph, plan, own.priced(granularity_of(plan)).cut)
        with steps("verify"):
            limits = list(problem.memories)
            own_costs = stage_costs(own, plan, lowered)
            verify(lowered, Memory(own_costs, limits, vocabulary_cost(own, plan)))
    return Program(captured, problem, plan, lowered, source, criterion)


def _captured(
    model: nn.Module | Graph | Program,
    inputs: Batch | None,
    loss: Callable[[Any], torch.Tensor] | None,
    narrow: torch.dtype | None,
) -> Graph:
    """The graph of a model, captured unless it is there already; `narrow`: in 16 bits."""
    if isinstance(model, Graph | Program):
        if inputs is not None or loss is not None:
            message = f"a {type(model).__name__} is captured already: give neither inputs nor loss"
            raise InputError(message)
        found = model if isinstance(model, Graph) else model.captured
        if found.narrow == narrow:
            return found
        original = None if isinstance(model, Graph) else model
        if original is None or original.model is None:
            message = (
                f"a Graph computes in the precision that it was captured in ({_kind(found.narrow)}"
                f", asked for: {_kind(narrow)}): compile the model itself"
            )
            raise InputError(message)
        model, inputs, loss = original.model, found.sample, original.loss
    if not isinstance(model, nn.Module):
        message = f"compile needs a torch.nn.Module ({type(model).__name__} given)"
        raise InputError(message)
    if inputs is None:
        message = "compile needs inputs: one micro-batch, a dict or a tuple"
        raise InputError(message)
    return (
        capture(model, inputs, loss) if narrow is None else capture_in(narrow, model, inputs, loss)
    )


def _prepared(captured: Graph, options: Options) -> Graph:
    """A captured graph in the precision that the program computes in."""
    asis = options.dtype in (None, captured.narrow)
    return simplify(captured if asis else lift(captured, options.dtype or torch.float32))


def _source(
    model: object, loss: Callable[[Any], torch.Tensor] | None
) -> tuple[nn.Module | None, Callable[[Any], torch.Tensor] | None]:
    """The model that was captured, if it is known, and its loss."""
    if isinstance(model, Program):
        return model.model, model.loss
    return (model if isinstance(model, nn.Module) else None), loss


def _sizes(
    problem: Problem,
    captured: Graph,
    wanted: Wanted,
    source: nn.Module | None,
    loss: Callable[[Any], torch.Tensor] | None,
) -> Sizes:
    """The problem for micro-batches of other rows too, of which one may be captured later."""
    options = problem.options

    def capture_again(inputs: Batch) -> Graph:
        assert source is not None, "it was asked for before"
        return _captured(source, inputs, loss, options.narrow)

    return Sizes(problem, captured, wanted, capture_again, lambda graph: _prepared(graph, options))


def _kind(narrow: torch.dtype | None) -> str:
    """How a model was captured, in words."""
    return "as it is" if narrow is None else str(narrow).removeprefix("torch.")


def _check_kinds(mesh: object, plan: object) -> None:
    """Refuse what is no mesh and what is no plan."""
    if not isinstance(mesh, Mesh | Cluster):
        message = f"compile needs a Mesh, such as Mesh(pipeline=2) ({type(mesh).__name__} given)"
        raise InputError(message)
    if isinstance(mesh, Cluster) and plan is not None:
        message = "a plan has its mesh: give that, not a Cluster, with plan="
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
    if schedule.asynchronous and options.narrow is not None:
        message = (
            f"{schedule.name!r} updates parameters inside the step, and keeps no masters of them "
            f"in float32 (precision={options.precision!r}): take a synchronous schedule or 'fp32'"
        )
        raise InputError(message)


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


def _checked(model: object) -> Check:
    """What a mesh that is weighed must pass: the checks of one that is given."""

    def check(mesh: Mesh, options: Options) -> None:
        _check_order(mesh, options)
        _check_replicas(mesh, model, None)

    return check


def _check_updates(mesh: Mesh, schedule: Schedule) -> None:
    """Refuse an asynchronous schedule on several data ranks."""
    if schedule.asynchronous and mesh.data > 1:
        message = (
            f"{schedule.name!r} updates parameters inside the step, which data ranks cannot do "
            f"together (data={mesh.data}): take data=1 or a synchronous schedule"
        )
        raise InputError(message)


def _bench(mesh: Mesh | Cluster, options: Options) -> LocalBench | None:
    """The device of this machine to measure on, if that is asked for."""
    if options.costs != "measured":
        return None
    if isinstance(mesh, Mesh) and not mesh.is_uniform:
        names = ", ".join(device.name for device in mesh.devices)
        message = (
            f"costs='measured' measures the device of this machine, and the mesh has several "
            f"({names}): give each by the file that `parcompiler calibrate` wrote there"
        )
        raise InputError(message)
    try:
        return LocalBench(rank_device(mesh.hardware.name))
    except LaunchError as error:
        message = f"costs='measured' needs the device that the mesh names: {error}"
        raise InputError(message) from error


def _with_costs(problem: Problem, plan: Plan) -> Plan:
    """The plan with what was measured of its templates, so that it need not be measured again."""
    if problem.bench is None:
        return plan
    times = [t for (level, _), t in sorted(problem.times.items()) if level == plan.granularity]
    method = plan.vocabulary.method if plan.vocabulary else ""
    spread = problem.vocabulary_times.get(method)
    return replace(plan, costs=tuple(times), vocabulary_costs=spread)
