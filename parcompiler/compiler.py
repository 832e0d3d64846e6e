"""compile(): the flow of the compiler, on one screen."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from parcompiler.capture import capture
from parcompiler.capture.inputs import Batch
from parcompiler.capture.modes import in_modes
from parcompiler.capture.narrow import capture_in
from parcompiler.capture.patches import ONE_THREAD
from parcompiler.checks import (
    check_data_updates,
    check_hooks,
    check_of_meshes,
    check_options,
    check_outputs,
    check_plan,
    check_token_mean,
    check_types,
    granularity_of,
)
from parcompiler.cost import WHOLE
from parcompiler.data_updates import ALL_REDUCE, DataUpdates
from parcompiler.errors import InfeasibleError, InputError, LaunchError
from parcompiler.graph import Graph
from parcompiler.lower import lower
from parcompiler.mesh import Cluster, Mesh
from parcompiler.meshes import (
    GIVEN,
    MicrobatchSizes,
    global_microbatches,
    search,
    wanted_rows,
)
from parcompiler.meshes.refusal import enough_ranks, refuse_too_large
from parcompiler.options import Options
from parcompiler.passes import DEFAULT, Pass
from parcompiler.passes.decide import decide
from parcompiler.passes.shard.context import on_context_ranks
from parcompiler.passes.shard.local import local
from parcompiler.passes.stage import reconsidered
from parcompiler.plan import Plan
from parcompiler.prices import stage_costs, vocabulary_cost
from parcompiler.problem import Problem, prepared
from parcompiler.program import Program
from parcompiler.progress import Progress
from parcompiler.schedules import Schedule
from parcompiler.spmd.experts import on_expert_ranks
from parcompiler.verifier import MemoryLimits, verify
from parcompiler.vocabulary.token_mean import over_tokens

if TYPE_CHECKING:
    from parcompiler.bench.local import LocalBench

GARBAGE_THRESHOLD = 50_000  # new objects between two collections


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
    zero: str | int = "auto",
    updates: str = "all-reduce",
    compression: str | None = None,
    every: int | None = None,
    outer: str | tuple[float, float] | None = None,
    staleness: int | None = None,
    compression_rank: int | None = None,
    exact: bool = False,
    outputs: Sequence[str] | None = None,
    loss_weights: str | None = None,
    memory_margin: float = 0.0,
) -> Program:
    """Divide the training of `model` over the ranks of `mesh`, or of the best mesh of a `Cluster`.

    `inputs` is ONE micro-batch of ONE data rank, a dict of keyword arguments or a tuple of
    positional ones; the model's parameters may be real or meta, and the model is not modified.
    It is compiled in the mode that its modules are in: one in evaluation mode trains without
    dropout, which a line on stderr says (call `model.train()` first).
    `loss` maps the model's outputs to a scalar; without it the model returns the loss (a scalar,
    `.loss` or `["loss"]`). `outputs` are names of the outputs that `worker.predict` returns: keys
    (`logits`) or places in a tuple (`0`). `microbatches` per step and data rank default to
    4 · pipeline, or the plan's; with a `Cluster` they are those of a step on all devices together,
    shared equally by the data ranks of each mesh, and default to 4 for each device: so all meshes
    train the same batch.
    `schedule` is a name, "auto" (the fastest that fits), "search" (an order found for this model)
    or a `pc.Schedule`; `virtual_stages` is the number of stages on each rank for the schedules
    that use several (1 stands for their least number, 2). `recompute` says which blocks run again
    in their backward instead of keeping activations: "none", "full" (all that may), "selective"
    (only their norms, gates and gathers), "auto" (what memory forces), or {pattern of block names:
    bool}, of which the last that matches decides.
    `zero` is what data ranks share out: 0 nothing, 1 optimizer states and masters, 2 gradients too,
    3 parameters too, "auto" decides by time under memory. `updates` is how data ranks bring
    together what they learn: "all-reduce" (gradients are averaged), "parameter-server" (one rank of
    each data row updates for all), "asynchronous" (as that, but none waits for the others unless it
    is `staleness` steps ahead of the slowest) or "local" (each updates by itself, and `every` so
    many steps their weights are averaged, as a step of an `outer` optimizer: "nesterov", "average",
    or a learning rate and a momentum). `compression` of the gradients between data ranks is "bf16",
    "fp16" or "powersgd" (of rank `compression_rank`).
    The loss of a step is the mean of its micro-batches' losses; `loss_weights` "tokens" makes it
    the mean over all targets that their cross-entropies count, as transformers' Trainer does.
    `precision` "bf16" or "fp16" computes in 16 bits, with masters of the parameters in float32.
    `memory_margin` is the part of each device's memory that plans keep free (0.05 is 5 %), for what
    no plan counts: the context of CUDA, buffers of NCCL, fragments of the allocator.
    `exact` keeps the model's own operators: without it, attention whose mask is the same for every
    batch runs in the causal kernel, or without a mask, and reads repeated heads in groups, which
    rounds otherwise in the last bits.
    `costs` is "model", or "measured": every distinct block is run on the device of this machine,
    for about a second, and so are the passes of a spread vocabulary; their times are kept in the
    plan. "compiled" compiles the blocks before, as `worker(compiled=True)` does. Collectives of
    tensor ranks on a CPU are measured among as many processes, if there is an idle core for each of
    them. A `Program` in the place of the model compiles
    its model again without capturing it; `plan` reuses a plan, perhaps an edited one. With a
    `Cluster`, `microbatch` "auto" weighs micro-batches of 1, 2, 4, 8, ... rows beside that of
    `inputs`, or those of a list of rows, in so many micro-batches that the rows of a step stay the
    same (the loss must be a mean over rows; where it may not be, the micro-batch stays as it is
    given); the model is captured on each, and the program takes the best.

    Raises InputError for arguments of the wrong form, CaptureError for a model that cannot be
    captured, InfeasibleError when nothing fits, PlanError for a plan that breaks rules.
    """
    check_types(mesh, plan, passes)
    if isinstance(mesh, Cluster):
        microbatches = global_microbatches(mesh, microbatches)
    elif microbatches is None:  # as many as keep the ranks busy
        microbatches = 4 * mesh.pipeline if plan is None else plan.microbatches
    source, criterion = (model.model, model.loss) if isinstance(model, Program) else (model, loss)
    source = source if isinstance(source, nn.Module) else None
    wanted = wanted_rows(microbatch, mesh, costs, again=source is not None)
    data_updates = DataUpdates.of(updates, compression, every, outer, staleness, compression_rank)
    if plan is not None and data_updates == ALL_REDUCE:
        data_updates = plan.updates or data_updates
    alone = data_updates != ALL_REDUCE or (isinstance(mesh, Mesh) and mesh.expert > 1)
    if zero == "auto" and (plan is not None or alone):
        zero = 0 if plan is None else plan.zero or 0
    if isinstance(optimizer, str) and optimizer in WHOLE and vocabulary == "auto":
        vocabulary = "whole"  # its rows would be matrices of their own
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
        zero=zero,
        **data_updates.options,
        exact=exact,
        loss_weights=loss_weights,
        memory_margin=memory_margin,
    )
    bench = _bench(mesh, options)
    check_options(mesh, source, options, plan)
    with ONE_THREAD, _rare_garbage_collection(), Progress(progress) as steps:
        with steps("capture"):
            captured = _captured(model, inputs, loss, options.narrow, outputs)
            captured = _weighted(captured, loss_weights)
            _warn_of_evaluation_mode(captured)
        with steps("simplify"):
            one_mesh = Mesh(device=mesh.device) if isinstance(mesh, Cluster) else mesh
            graph = prepared(captured, options, one_mesh, options.dtype)
            problem = on_context_ranks(Problem(graph, one_mesh, options, bench=bench), plan)
            if one_mesh.expert > 1:
                problem = problem.anew(graph=on_expert_ranks(problem.graph, one_mesh.expert))
        chosen = DEFAULT if passes is None else tuple(passes)
        if isinstance(mesh, Cluster):
            sizes = MicrobatchSizes(problem, captured, wanted)
            captured, problem, plan = search(sizes, mesh, chosen, check_of_meshes(source), steps)
            plan = _with_costs(local(problem, plan), plan)
        else:
            plan = _planned(problem, chosen, plan, steps)
        with steps("lower"):
            rank_problem = local(problem, plan)
            lowered = lower(rank_problem.graph, plan, rank_problem.priced(granularity_of(plan)).cut)
            check_hooks(lowered)
            check_outputs(lowered)
            check_token_mean(lowered)
            check_data_updates(lowered)
        with steps("verify"):
            costs_of_stages = stage_costs(rank_problem, plan, lowered)
            vocabulary_costs = vocabulary_cost(rank_problem, plan)
            limits = MemoryLimits(
                costs_of_stages, list(map(problem.room, problem.devices)), vocabulary_costs
            )
            verify(lowered, limits)
    return Program(captured, problem, plan, lowered, source, criterion)


def _planned(
    problem: Problem, passes: Sequence[Pass], user_plan: Plan | None, steps: Progress
) -> Plan:
    """The plan of the passes, or the user's plan if it breaks no rules."""
    if user_plan is None:
        try:
            refuse_too_large(problem, passes, steps)
            plan = decide(problem, passes, steps)
        except InfeasibleError as error:
            for line in enough_ranks(problem, passes):
                error.add_note(line)
            if margin := problem.options.memory_margin:
                error.add_note(f"{margin:.3g} of each device's memory is kept free (memory_margin)")
            raise
        return _with_costs(local(problem, plan), plan)
    with steps("check plan"):
        check_plan(problem, user_plan)
        return reconsidered(local(problem, user_plan), user_plan)


def _captured(
    model: nn.Module | Graph | Program,
    inputs: Batch | None,
    loss: Callable[[Any], torch.Tensor] | None,
    narrow: torch.dtype | None,
    outputs: Sequence[str] | None = None,
) -> Graph:
    """The graph of a model, captured unless it is there already; `narrow`: in 16 bits."""
    if isinstance(outputs, str) or not all(isinstance(name, str) for name in outputs or ()):
        message = f"outputs must be a list of names, as ['logits'] ({outputs!r} given)"
        raise InputError(message)
    names = tuple(dict.fromkeys(outputs or ()))
    if isinstance(model, Graph | Program):
        if inputs is not None or loss is not None:
            message = f"a {type(model).__name__} is captured already: give neither inputs nor loss"
            raise InputError(message)
        graph = model if isinstance(model, Graph) else model.captured
        if outputs is not None and names != graph.outputs:
            message = (
                f"a {type(model).__name__} keeps the outputs that it was captured with "
                f"({', '.join(graph.outputs) or 'none'}): compile the model itself"
            )
            raise InputError(message)
        if graph.narrow == narrow:
            return graph
        program = None if isinstance(model, Graph) else model
        if program is None or program.model is None:
            message = (
                f"a Graph computes in the precision that it was captured in ({_kind(graph.narrow)}"
                f", asked for: {_kind(narrow)}): compile the model itself"
            )
            raise InputError(message)
        with in_modes(program.model, graph.modes):
            return _captured(program.model, graph.sample, program.loss, narrow, graph.outputs)
    if not isinstance(model, nn.Module):
        message = f"compile needs a torch.nn.Module ({type(model).__name__} given)"
        raise InputError(message)
    if inputs is None:
        message = "compile needs inputs: one micro-batch, a dict or a tuple"
        raise InputError(message)
    if narrow is None:
        return capture(model, inputs, loss, outputs=names)
    return capture_in(narrow, model, inputs, loss, names)


def _weighted(captured: Graph, loss_weights: str | None) -> Graph:
    """The graph with the loss over tokens, if that is asked for; a graph that has it keeps it."""
    recapture = captured.recapture
    if loss_weights is None or captured.counts is not None:
        return captured
    again = None if recapture is None else lambda other: over_tokens(recapture(other))
    return replace(over_tokens(captured), recapture=again)


def _warn_of_evaluation_mode(captured: Graph) -> None:
    """Say on stderr that a model trains in evaluation mode, which few users intend."""
    modes = captured.modes
    if "" in modes.evaluating:
        message = (
            "parcompiler: the model is in evaluation mode, as from_pretrained returns it: dropout "
            f"does not act (modules with p > 0: {modes.dropouts}) and batch norms keep their "
            f"statistics (modules: {modes.norms}); call model.train() before compile to train it"
        )
        print(message, file=sys.stderr)


@contextmanager
def _rare_garbage_collection() -> Iterator[None]:
    """Collect garbage rarely, unless the caller has switched that off or made it rarer still.

    A compiler makes objects by the million that live until it ends. The interpreter looks through
    the young ones after every 700 of them, and finds next to nothing: that was a fifth of the time
    of a plan for GPT-3. The threshold is not infinite: cycles of torch.export are still freed.
    """
    before = gc.get_threshold()
    if 0 < before[0] < GARBAGE_THRESHOLD:
        gc.set_threshold(GARBAGE_THRESHOLD, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _kind(narrow: torch.dtype | None) -> str:
    """How a model was captured, in words."""
    return "as it is" if narrow is None else str(narrow).removeprefix("torch.")


def _bench(mesh: Mesh | Cluster, options: Options) -> LocalBench | None:
    """The device of this machine to measure on, if that is asked for."""
    if options.costs == "model":
        return None
    if isinstance(mesh, Mesh) and not mesh.is_uniform:
        names = ", ".join(device.name for device in mesh.devices)
        message = (
            f"costs={options.costs!r} measures the device of this machine, and the mesh has "
            f"several ({names}): give each by the file that `parcompiler calibrate` wrote there"
        )
        raise InputError(message)
    from parcompiler.bench.local import LocalBench
    from parcompiler.runtime.joining import rank_device

    try:
        return LocalBench(rank_device(mesh.hardware.name), options.costs == "compiled")
    except LaunchError as error:
        message = f"costs={options.costs!r} needs the device that the mesh names: {error}"
        raise InputError(message) from error


def _with_costs(problem: Problem, plan: Plan) -> Plan:
    """The plan with the measured times of its templates, so that none is measured again."""
    if problem.bench is None:
        return plan
    times = [t for (level, _), t in sorted(problem.times.items()) if level == plan.granularity]
    method = plan.vocabulary.method if plan.vocabulary else ""
    vocabulary_costs = problem.vocabulary_times.get(method)
    return replace(plan, costs=tuple(times), vocabulary_costs=vocabulary_costs)
