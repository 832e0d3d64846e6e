"""Checks of `compile`: of arguments before the capture, and of a plan that the user gives.

A plan must be for this model and mesh, complete, and possible.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence

from torch import fx, nn

from parcompiler.capture.blocks import cut
from parcompiler.capture.clean import where
from parcompiler.capture.effects import effects_of, is_random
from parcompiler.capture.synchronized import is_synchronized
from parcompiler.cost import OPTIMIZERS, WHOLE
from parcompiler.data_updates import ALL_REDUCE, is_factored
from parcompiler.errors import InputError, PlanError, offered, shown
from parcompiler.graph import Graph
from parcompiler.lower import Lowered
from parcompiler.mesh import Cluster, Mesh
from parcompiler.options import METHODS, MOST_PASSES, Options
from parcompiler.passes import Pass
from parcompiler.passes.decide import start
from parcompiler.passes.given import division
from parcompiler.passes.recompute import check_patterns, chosen
from parcompiler.passes.shard.local import local
from parcompiler.passes.shard.plan_entries import check_pins, check_tensors
from parcompiler.passes.user_passes import (
    check_blocks,
    check_method,
    check_recomputed,
    granularity_of,
    repeated,
    undecided,
)
from parcompiler.plan import VOCABULARY_PASSES, Plan
from parcompiler.problem import Problem
from parcompiler.schedules import SCHEDULES, Schedule, build, stages_per_rank
from parcompiler.schedules.planned import planned, trunk
from parcompiler.schedules.vocabulary import spread

MOST_SECONDS = 1e9  # thirty years: the longest time of a template that sums can go on with


def check_types(mesh: object, loss: object, plan: object, passes: object) -> None:
    """Refuse a mesh, loss, plan or passes of a wrong type."""
    if passes is not None:
        if not isinstance(passes, Sequence) or not all(isinstance(x, Pass) for x in passes):
            message = f"passes must be a sequence of Pass ({shown(passes)} given)"
            raise InputError(message)
        for each in passes:
            if not isinstance(getattr(each, "name", None), str):
                message = (
                    f"the pass {type(each).__name__} has no name: give its class one, as "
                    'name: ClassVar[str] = "..."'
                )
                raise InputError(message)
    if not isinstance(mesh, Mesh | Cluster):
        message = f"compile needs a Mesh, such as Mesh(pipeline=2) ({type(mesh).__name__} given)"
        raise InputError(message)
    if loss is not None and (isinstance(loss, type) or not callable(loss)):
        message = (
            "loss must be a function of the model's outputs that returns a scalar, or None where "
            f"the model returns the loss ({shown(loss)} given)"
        )
        raise InputError(message)
    if loss is not None:
        _check_loss(loss)
    if isinstance(mesh, Cluster) and plan is not None:
        message = "a plan is for one mesh: give that Mesh with plan=, and not a Cluster"
        raise InputError(message)
    if passes is not None and plan is not None:
        message = "plan= has every decision, so that passes= would not run: leave one of them out"
        raise InputError(message)
    if plan is not None and not isinstance(plan, Plan):
        message = f"plan must be a Plan: read JSON by Plan.from_json ({type(plan).__name__} given)"
        raise InputError(message)


def _check_loss(loss: Callable[..., object]) -> None:
    """Refuse a loss that needs more arguments than the outputs, as torch's losses do."""
    try:
        signature = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    except ValueError:  # a function in C has no signature
        return
    try:
        signature.bind(None)
    except TypeError as error:
        message = (
            f"loss is called with the model's outputs alone, and {shown(loss)} takes more "
            f"({error}): where it needs targets, let a module around the model take them as inputs "
            "and return the loss"
        )
        raise InputError(message) from error


def check_options(
    mesh: Mesh | Cluster, model: nn.Module | None, options: Options, plan: Plan | None
) -> None:
    """Refuse options that contradict each other or the mesh."""
    offered("optimizer", options.optimizer, tuple(sorted(OPTIMIZERS)))
    if isinstance(mesh, Mesh):
        check_mesh(mesh, model, options, plan)
    if options.zero not in ("auto", 0) and options.asynchronous:
        message = (
            f"zero={options.zero} gathers parameters after the optimizer's step, and "
            f"{options.schedule} updates them after every backward: take a synchronous schedule"
        )
        raise InputError(message)
    _check_data_updates(mesh, options)
    _check_host(mesh, options, plan)


def check_mesh(
    mesh: Mesh, model: nn.Module | None, options: Options, plan: Plan | None = None
) -> None:
    """Refuse a mesh, the user's or one from a search, that does not fit options, model or plan."""
    _check_axes(mesh, options)
    _check_size(mesh, options, plan)
    _check_order(mesh, options)
    _check_replicas(mesh, model, plan)
    _check_zero(mesh, options)
    _check_data_updates(mesh, options)
    _check_whole(mesh, options)


def check_lowered(lowered: Lowered) -> None:
    """Refuse combinations that only the lowered stages reveal."""
    _check_hooks(lowered)
    _check_outputs(lowered)
    _check_token_mean(lowered)
    _check_updates_of_weights(lowered)
    _check_updates_of_model(lowered)
    _check_ties(lowered)


def _check_hooks(lowered: Lowered) -> None:
    """Refuse updates after each backward if hooks change complete gradients."""
    if lowered.asynchronous and lowered.graph.hooks:
        message = (
            f"{min(lowered.graph.hooks)!r} has a gradient hook, which runs once a step, and "
            "pipedream updates after every backward: take a synchronous schedule"
        )
        raise InputError(message)


def _check_ties(lowered: Lowered) -> None:
    """Refuse copies of a parameter if each is updated separately after each backward."""
    if lowered.asynchronous and lowered.tied:
        item = lowered.tied[0]
        message = (
            f"{item.name} is on stages {', '.join(map(str, item.ranks))}, and pipedream would let "
            "its copies drift apart: untie them or take a synchronous schedule"
        )
        raise InputError(message)


def _check_token_mean(lowered: Lowered) -> None:
    """Refuse a mean over the tokens of a step if ranks or micro-batches step separately."""
    alone = "schedule='pipedream'" if lowered.asynchronous else f"updates={lowered.updates.way!r}"
    other = "a synchronous schedule" if lowered.asynchronous else "updates='all-reduce'"
    if lowered.graph.counts is not None and (lowered.asynchronous or lowered.updates.separate):
        message = (
            f"loss_weights='tokens' is a mean over all ranks and micro-batches of a step, and with "
            f"{alone} each steps by itself: leave it out, or take {other}"
        )
        raise InputError(message)


def _check_outputs(lowered: Lowered) -> None:
    """Refuse kept outputs that no layer makes, or that context ranks make in pieces."""
    if lowered.graph.kept and lowered.context > 1:
        message = (
            f"outputs={sorted(lowered.graph.kept)}: worker.predict cannot gather the rows of "
            f"context ranks yet (context={lowered.context}): compile for context=1 to predict"
        )
        raise InputError(message)
    made = {name for stage in lowered.stages for name in stage.keeps}
    for name, node in lowered.graph.kept.items():
        if lowered.variables.get(node) not in made:
            message = (
                f"the output {name!r} is made by no layer of a stage (a mask, a position, words "
                f"that all ranks look up; {where(node)}): leave it out of outputs, or take "
                "vocabulary='whole'"
            )
            raise InputError(message)


def _check_whole(mesh: Mesh, options: Options) -> None:
    """Refuse pieces of matrices if the optimizer needs whole ones."""
    pieces = f"tensor={mesh.tensor}" if mesh.tensor > 1 else f"vocabulary={options.vocabulary!r}"
    if options.optimizer in WHOLE and (mesh.tensor > 1 or options.vocabulary in METHODS):
        message = (
            f"optimizer={options.optimizer!r} needs whole matrices, and with {pieces} ranks hold "
            "pieces of some: take tensor=1 and vocabulary='whole' (data ranks may share whole "
            "matrices out, with zero=)"
        )
        raise InputError(message)


def _check_data_updates(mesh: Mesh | Cluster, options: Options) -> None:
    """Refuse ways of the data axis that make no sense with the mesh, or with other options."""
    wanted = options.data_updates
    if wanted == ALL_REDUCE:
        return
    packed = wanted.compression is not None
    name = f"compression={wanted.compression!r}" if packed else f"updates={wanted.way!r}"
    reason = ""
    if isinstance(mesh, Mesh) and mesh.data == 1:
        reason = "is for data ranks, and there is only one (data=1): leave it out"
    elif options.asynchronous:
        reason = f"needs a synchronous schedule ({options.schedule!r} updates inside the step)"
    elif options.zero not in ("auto", 0) and wanted.compression not in ("bf16", "fp16"):
        reason = (
            f"does not go with zero={options.zero}, because every rank that updates has whole "
            "optimizer states: take zero=0"
        )
    elif (wanted.separate or packed) and options.precision == "fp16":
        reason = (
            "does not go with precision='fp16', where all ranks scale the loss and skip steps "
            "together: take precision='bf16'"
        )
    if reason:
        message = f"{name} {reason}"
        raise InputError(message)


def _check_updates_of_weights(lowered: Lowered) -> None:
    """Refuse copies of parameters that would drift apart because the forward updates them."""
    graph, grid = lowered.graph, lowered.grid
    degrees = {"data": grid.batches, "context": grid.context}
    axes = [axis for axis, degree in degrees.items() if degree > 1]
    for item in graph.parameters:
        if not item.mutated or item.buffer:
            continue
        reason = ""
        if item.trainable and axes and _follows_batch(graph, item.node):
            reason = _drift(axes)
        elif item.trainable and item.dtype == graph.narrow:
            reason = (
                "16-bit training keeps a float32 master of it, which would miss that: take "
                "precision='fp32'"
            )
        elif lowered.zero:
            reason = f"zero={lowered.zero} shares it out: take zero=0"
        if reason:
            message = f"the forward updates the parameter {item.name!r}, and {reason}"
            raise InputError(message)


def _drift(axes: Sequence[str]) -> str:
    """Why ranks along these axes may not update a parameter in their forwards, and what to do."""
    ranks = " and ".join(f"{axis} ranks" for axis in axes)
    one = " and ".join(f"one {axis} rank" for axis in axes)
    needed = ", ".join(f"{axis}=1" for axis in axes)
    return (
        f"{ranks} would each update it by their own part of a batch, so that their copies drift "
        f"apart: take {one} ({needed})"
    )


def _follows_batch(graph: Graph, node: str) -> bool:
    """Whether a forward's update of a parameter depends on the batch, or on random numbers."""
    effects = effects_of(graph)
    pending, seen = [graph.placeholders[node]], set[fx.Node]()
    while pending:
        one = pending.pop()
        if one in seen:
            continue
        seen.add(one)
        if one.name in graph.input_nodes or is_random(one):
            return True
        pending += one.all_input_nodes
        pending += effects.writers.get(effects.root(one), ())
    return False


def _check_updates_of_model(lowered: Lowered) -> None:
    """Refuse ways of the data axis that make no sense for the model."""
    updates, graph = lowered.updates, lowered.graph
    way = updates.way
    updated = [item.name for item in graph.parameters if item.mutated]
    reason, each = "", updates.compression is not None and lowered.zero > 1
    if (updates.separate or updates.compression) and is_synchronized(graph.fx_graph):
        reason = (
            "lets each data rank step by itself, and a SyncBatchNorm of the model needs all of them"
        )
    elif updates.rank and not any(
        item.trainable and is_factored(item.shape, updates.rank) for item in graph.parameters
    ):
        reason = (
            f"compresses no gradient of the model: factors of rank {updates.rank} "
            "(compression_rank) are no smaller than any"
        )
    elif each and lowered.tied:
        reason = (
            f"with zero={lowered.zero} rounds what each rank adds, and {lowered.tied[0].name!r} is "
            "on several ranks (untie it, or keep its users on one stage)"
        )
    elif each and lowered.split:
        reason = (
            f"with zero={lowered.zero} rounds what each micro-batch adds, and a backward in two "
            "parts adds several at once (take a schedule with whole backwards, such as '1f1b')"
        )
    elif way == "asynchronous" and updated:
        reason = (
            f"keeps no statistics that data ranks share, and forwards update {updated[0]!r} "
            f"({len(updated)})"
        )
    elif way == "asynchronous" and graph.hooks:
        reason = (
            f"updates parameters on another rank, where the gradient hook of {min(graph.hooks)!r} "
            "would not run"
        )
    if reason:
        name = f"compression={updates.compression!r}" if updates.compression else f"updates={way!r}"
        message = f"{name} {reason}: take another value of updates= or compression="
        raise InputError(message)


def _check_host(mesh: Mesh | Cluster, options: Options, plan: Plan | None) -> None:
    """Refuse to offload from a device whose host link is not known."""
    if options.recompute == "offload" or (plan is not None and plan.offload):
        for device in mesh.devices if isinstance(mesh, Mesh) else (mesh.hardware,):
            if device.host is None and not device.is_cpu:
                message = (
                    "recompute='offload' sends activations from a device to its host, and the "
                    f'file of {device.name!r} does not say how fast that is: add "host": '
                    f'{{"bandwidth": B/s, "latency": s}} to it, or take recompute=\'full\''
                )
                raise InputError(message)


def _check_axes(mesh: Mesh, options: Options) -> None:
    """Refuse options that make no sense along the context and expert axes, or are not supported
    there."""
    reason, wanted = "", options.data_updates
    if mesh.expert > 1 and (wanted.separate or wanted.rank):
        reason = (
            "exchange tokens in every layer, and sum gradients: take updates='all-reduce' or "
            "'parameter-server', with compression='bf16', 'fp16' or none"
        )
    elif mesh.expert > 1 and options.asynchronous:
        reason = "update together: take a synchronous schedule"
    if reason:
        message = f"expert ranks (expert={mesh.expert}) {reason}"
        raise InputError(message)
    if wanted.separate:
        reason = (
            f"and update together, while with updates={wanted.way!r} each rank updates by itself: "
            "leave updates out"
        )
    elif wanted.compression is not None:
        name = f"compression={wanted.compression!r}"
        reason = f"and {name} is for gradients of whole batches: leave it out"
    if mesh.context > 1 and reason:
        message = f"context ranks (context={mesh.context}) have pieces of one batch, {reason}"
        raise InputError(message)


def _check_size(mesh: Mesh, options: Options, plan: Plan | None) -> None:
    """Refuse a step with so many forwards that planning would take too long."""
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
    """Refuse a schedule that is impossible for these ranks, micro-batches or stages per rank."""
    wanted, ranks = options.schedule, mesh.pipeline
    if isinstance(wanted, Schedule):
        if (wanted.ranks, wanted.microbatches) != (ranks, options.microbatches):
            message = (
                f"the schedule {wanted.name!r} has {wanted.ranks} ranks and {wanted.microbatches} "
                f"micro-batches (given: pipeline={ranks}, microbatches={options.microbatches})"
            )
            raise InputError(message)
        each = wanted.virtual_stages
        if options.virtual_stages not in (1, each):
            message = (
                f"the schedule {wanted.name!r} has {each} stages on a rank (virtual_stages="
                f"{options.virtual_stages} given): leave virtual_stages out"
            )
            raise InputError(message)
        schedule = wanted
    elif wanted in SCHEDULES:
        virtual_stages = stages_per_rank(wanted, options.virtual_stages)
        least = min(1, options.microbatches)  # there may be thousands of them
        schedule = build(wanted, ranks, least, virtual_stages)
    else:
        return
    _check_updates(mesh, schedule)
    if schedule.asynchronous and options.vocabulary in METHODS and ranks > 1:
        spread(schedule, options.vocabulary)  # which refuses impossible ones
    if schedule.asynchronous and options.narrow is not None:
        message = (
            f"{schedule.name!r} updates parameters inside the step, and keeps no masters of them "
            f"in float32 (precision={options.precision!r}): take a synchronous schedule or 'fp32'"
        )
        raise InputError(message)


def _check_replicas(mesh: Mesh, model: nn.Module | None, plan: Plan | None) -> None:
    """Refuse updates inside the step, and batch norms over some ranks, on several data ranks."""
    if mesh.replicas == 1:
        return
    for path, module in model.named_modules() if model is not None else ():
        if isinstance(module, nn.SyncBatchNorm) and mesh.context > 1:
            message = (
                f"{path!r} is a SyncBatchNorm, which counts the batches of data ranks, and context "
                f"ranks share one (context={mesh.context}): take context=1, or another norm"
            )
            raise InputError(message)
        if isinstance(module, nn.SyncBatchNorm) and module.process_group is not None:
            message = (
                f"{path!r} is a SyncBatchNorm over a process group of its own, which may not be "
                f"the data ranks of the mesh (data={mesh.data}): make it without process_group"
            )
            raise InputError(message)
    if plan is not None and plan.schedule is not None:
        _check_updates(mesh, planned(plan))


def _check_zero(mesh: Mesh, options: Options) -> None:
    """Refuse a level of ZeRO where no data ranks share anything out."""
    if options.zero not in ("auto", 0) and mesh.replicas == 1:
        message = (
            f"zero={options.zero} shares states out among data ranks, and there is only one "
            "(data=1): leave zero out"
        )
        raise InputError(message)


def _degrees(of: Mapping[str, int]) -> str:
    """Degrees of axes in the form of a mesh's arguments."""
    return ", ".join(f"{axis}={number}" for axis, number in of.items())


def _check_updates(mesh: Mesh, schedule: Schedule) -> None:
    """Refuse an asynchronous schedule on several data ranks."""
    several = {axis: n for axis in ("data", "context") if (n := getattr(mesh, axis)) > 1}
    if schedule.asynchronous and several:
        message = (
            f"{schedule.name!r} updates parameters inside the step, which {' and '.join(several)} "
            f"ranks cannot do together ({_degrees(several)}): take "
            f"{_degrees(dict.fromkeys(several, 1))}, or a synchronous schedule"
        )
        raise InputError(message)


def check_plan(problem: Problem, plan: Plan) -> None:
    """Refuse a plan that was made for another model, mesh or number of micro-batches."""
    expected = start(problem)
    for name in ("model", "fingerprint", "mesh", "microbatches", "precision", "optimizer"):
        here, there = getattr(expected, name), getattr(plan, name)
        if here != there:
            subject = {
                "fingerprint": "graph, as its fingerprint says",
                "microbatches": "number of micro-batches",
            }.get(name, name)
            message = (
                f"the plan was made for another {subject} (plan: {shown(there, 200)}, here: "
                f"{shown(here, 200)}): compile without plan= to make a new one"
            )
            if name == "fingerprint":
                message += (
                    ", or with the model, inputs, loss=, loss_weights=, outputs= and exact= that "
                    "it was made with"
                )
            raise PlanError(message)
    if missing := undecided(plan):
        message = f"the plan leaves {missing[0]!r} undecided"
        raise PlanError(message)
    _check_schedule(problem.options, plan)
    _check_vocabulary(problem.options, plan)
    if (plan.zero or 0) != problem.options.zero:
        message = f"the plan has zero {plan.zero or 0} (asked for: {problem.options.zero})"
        raise PlanError(message)
    if (plan.updates or ALL_REDUCE) != problem.options.data_updates:
        there, here = (item and item.options for item in (plan.updates, expected.updates))
        message = f"the plan has other updates of data ranks ({there}; asked for: {here})"
        raise PlanError(message)
    rank_problem = local(problem, plan)
    whole = local(problem, dataclasses.replace(plan, sharding=None))
    check_pins(whole, plan)
    check_tensors(whole, plan)
    _check_costs(rank_problem, plan)
    _check_vocabulary_costs(plan)
    if plan.vocabulary_costs is not None:
        rank_problem.cache.vocabulary_times[plan.vocabulary_costs.method] = plan.vocabulary_costs
    level = granularity_of(plan)
    rank_problem.cache.times.update({(level, costs.template): costs for costs in plan.costs or ()})
    check_blocks(rank_problem, plan)
    _check_stages(rank_problem, plan)
    _check_recompute(rank_problem, plan)


def _check_schedule(options: Options, plan: Plan) -> None:
    """Refuse a plan with another schedule than the options ask for."""
    schedule, wanted = trunk(plan), options.schedule
    if plan.virtual_stages != schedule.virtual_stages:
        message = (
            f"the plan has virtual_stages {plan.virtual_stages}, and its orders have "
            f"{schedule.virtual_stages} stages on a rank"
        )
        raise PlanError(message)
    if isinstance(wanted, Schedule):
        if schedule != wanted:
            message = f"the plan has another schedule ({shown(plan.schedule)}) than {wanted.name!r}"
            raise PlanError(message)
    elif wanted not in ("auto", plan.schedule):
        message = f"the plan has schedule {shown(plan.schedule)} (asked for: {wanted!r})"
        raise PlanError(message)
    elif options.virtual_stages not in (1, plan.virtual_stages):
        message = (
            f"the plan has {plan.virtual_stages} stages on each rank (asked for: "
            f"{options.virtual_stages})"
        )
        raise PlanError(message)


def _check_vocabulary(options: Options, plan: Plan) -> None:
    """Refuse a plan with another vocabulary method than the options ask for."""
    check_method(plan)
    choice = plan.vocabulary
    method = choice.method if choice else "whole"
    possible = method != "whole" or (choice is not None and not choice.kept)
    if options.vocabulary not in ("auto", method) and possible:
        message = f"the plan has vocabulary {shown(method)} (asked for: {options.vocabulary!r})"
        raise PlanError(message)


def _check_stages(problem: Problem, plan: Plan) -> None:
    """Refuse a plan with another division into stages than the options ask for."""
    wanted = problem.options.stages
    if wanted == "auto":
        return
    assert plan.stages is not None
    level, stage_of = division(problem, wanted, len(plan.stages))
    blocks = [block.name for block in problem.priced(level).cut.blocks]
    asked = dict(zip(blocks, stage_of, strict=True))
    if asked != {name: j for j, choice in enumerate(plan.stages) for name in choice.blocks}:
        counts = ", ".join(str(len(choice.blocks)) for choice in plan.stages)
        message = (
            f"the plan has other stages, of {counts} blocks, than stages={shown(wanted)} asks for: "
            "leave stages out, or compile without plan="
        )
        raise PlanError(message)


def _check_costs(problem: Problem, plan: Plan) -> None:
    """Refuse measured times that are no valid seconds, or not of this model's templates."""
    if plan.costs is None or granularity_of(plan) not in problem.levels:
        return
    if not problem.mesh.is_uniform:
        message = "the plan has times measured on one device, and its mesh has several: remove them"
        raise PlanError(message)
    templates = {block.template for block in cut(problem.graph, granularity_of(plan)).blocks}
    measured = [costs.template for costs in plan.costs]
    for name in sorted(templates ^ set(measured)) or repeated(measured):
        message = (
            f"the plan's costs and its blocks differ in template {shown(name, 200)}: measure again"
        )
        raise PlanError(message)
    for costs in plan.costs:
        _check_seconds(
            costs,
            ("forward", "backward", "weight", "hidden"),
            f"costs of {shown(costs.template, 200)}",
        )


def _check_vocabulary_costs(plan: Plan) -> None:
    """Refuse measured times of passes that are no valid seconds, or not of the plan's method."""
    costs = plan.vocabulary_costs
    if costs is None:
        return
    method = plan.vocabulary.method if plan.vocabulary else "whole"
    if costs.method != method:
        message = (
            f"the plan's vocabulary costs are of method {shown(costs.method)}, and its vocabulary "
            f"is {method!r}: measure again"
        )
        raise PlanError(message)
    _check_seconds(costs, VOCABULARY_PASSES, "vocabulary costs")


def _check_seconds(costs: object, fields: Sequence[str], subject: str) -> None:
    """Refuse numbers that cannot be seconds."""
    for field in fields:
        seconds = getattr(costs, field)
        if not 0 <= seconds <= MOST_SECONDS:
            message = (
                f"the plan's {subject} must have seconds as {field!r} ({seconds} found; 0 to "
                f"{MOST_SECONDS:g})"
            )
            raise PlanError(message)


def _check_recompute(problem: Problem, plan: Plan) -> None:
    """Refuse a plan that recomputes impossible blocks, or other blocks than the options ask for."""
    check_recomputed(problem, plan)
    names, wanted = plan.recompute or (), problem.options.recompute
    if not isinstance(wanted, str):
        check_patterns(problem, wanted)
    if wanted != "auto" and plan.offload != (wanted == "offload"):
        verb = "offloads" if plan.offload else "does not offload"
        message = f"the plan {verb} activations to the host (asked for: {wanted!r})"
        raise PlanError(message)
    if wanted != "auto" and plan.selective != (wanted in ("selective", "offload")):
        verb = "runs" if plan.selective else "does not run"
        message = f"the plan {verb} cheap operators again (asked for: {wanted!r})"
        raise PlanError(message)
    if wanted != "auto":
        asked = chosen(problem, granularity_of(plan), wanted)
        for name in sorted(set(asked) ^ set(names)):
            verb = "keeps" if name in asked else "recomputes"
            message = f"the plan {verb} the activations of {name!r} (asked for: {wanted!r})"
            raise PlanError(message)
