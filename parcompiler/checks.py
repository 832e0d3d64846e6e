"""What `compile` refuses before it captures anything, and the search of a mesh it weighs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from parcompiler.cost import OPTIMIZERS
from parcompiler.errors import InputError, shown
from parcompiler.lower import Lowered
from parcompiler.mesh import Cluster, Mesh
from parcompiler.meshes import Check
from parcompiler.options import METHODS, MOST_PASSES, Options, offered
from parcompiler.passes import Pass
from parcompiler.plan import Plan
from parcompiler.program import Program
from parcompiler.schedules import SCHEDULES, Schedule, build, stages_per_rank
from parcompiler.schedules.planned import planned
from parcompiler.schedules.vocabulary import spread


def check_kinds(mesh: object, plan: object, passes: object) -> None:
    """Refuse what is no mesh, no plan, and no sequence of passes."""
    if passes is not None:
        listed = isinstance(passes, Sequence) and all(isinstance(item, Pass) for item in passes)
        if not listed:
            message = f"passes must be a sequence of Pass ({shown(passes)} given)"
            raise InputError(message)
    if not isinstance(mesh, Mesh | Cluster):
        message = f"compile needs a Mesh, such as Mesh(pipeline=2) ({type(mesh).__name__} given)"
        raise InputError(message)
    if isinstance(mesh, Cluster) and plan is not None:
        message = "a plan has its mesh: give that, not a Cluster, with plan="
        raise InputError(message)
    if plan is not None and not isinstance(plan, Plan):
        message = f"plan must be a Plan: read JSON by Plan.from_json ({type(plan).__name__} given)"
        raise InputError(message)


def check_given(mesh: Mesh | Cluster, model: object, options: Options, plan: Plan | None) -> None:
    """Refuse options that do not go together, and what a given mesh cannot have."""
    if isinstance(mesh, Mesh):
        _check_size(mesh, options, plan)
        _check_order(mesh, options)
        _check_replicas(mesh, model, plan)
    offered("optimizer", options.optimizer, tuple(sorted(OPTIMIZERS)))


def checked(model: object) -> Check:
    """What a mesh that is weighed must pass: the checks of one that is given."""

    def check(mesh: Mesh, options: Options) -> None:
        _check_size(mesh, options, None)
        _check_order(mesh, options)
        _check_replicas(mesh, model, None)

    return check


def check_hooks(lowered: Lowered) -> None:
    """Refuse updates behind each backward where hooks change complete gradients."""
    if lowered.asynchronous and lowered.graph.hooks:
        message = (
            f"{min(lowered.graph.hooks)!r} has a hook, which runs once a step, and pipedream "
            "updates behind every backward: take a synchronous schedule"
        )
        raise InputError(message)


def _check_size(mesh: Mesh, options: Options, plan: Plan | None) -> None:
    """Refuse a step of so many forwards that no plan of it could be made in minutes."""
    each = max(options.virtual_stages, 1 if plan is None else plan.virtual_stages)
    passes = mesh.pipeline * each * options.microbatches
    if passes > MOST_PASSES:
        message = (
            f"pipeline={mesh.pipeline:,}, virtual_stages={each:,} and microbatches="
            f"{options.microbatches:,} make a step of {passes:,} forwards of stages (at most "
            f"{MOST_PASSES:,}): take fewer and larger micro-batches, or fewer stages"
        )
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
    if schedule.asynchronous and options.vocabulary in METHODS and ranks > 1:
        spread(schedule, options.vocabulary)  # which refuses
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


def _check_updates(mesh: Mesh, schedule: Schedule) -> None:
    """Refuse an asynchronous schedule on several data ranks."""
    if schedule.asynchronous and mesh.data > 1:
        message = (
            f"{schedule.name!r} updates parameters inside the step, which data ranks cannot do "
            f"together (data={mesh.data}): take data=1 or a synchronous schedule"
        )
        raise InputError(message)
