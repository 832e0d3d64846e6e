"""The flow of the compiler: capture, decide, lower and verify."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
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
    check_lowered,
    check_mesh,
    check_options,
    check_plan,
)
from parcompiler.errors import InfeasibleError, InputError, LaunchError
from parcompiler.graph import Graph
from parcompiler.lower import lower
from parcompiler.mesh import Cluster, Mesh
from parcompiler.meshes import MeshSearch, MicrobatchSizes, wanted_rows
from parcompiler.meshes.refusal import enough_ranks, refuse_too_large
from parcompiler.options import METHODS, Options
from parcompiler.passes import DEFAULT, Pass
from parcompiler.passes.decide import check_host, decide
from parcompiler.passes.shard.axes import on_axes
from parcompiler.passes.shard.local import local
from parcompiler.passes.spread import vocabulary_cost
from parcompiler.passes.stage import reconsidered
from parcompiler.passes.user_passes import granularity_of
from parcompiler.plan import Plan
from parcompiler.prices import lowered_step, stage_costs
from parcompiler.problem import LEVELS, Problem, prepared
from parcompiler.program import Program
from parcompiler.progress import Progress
from parcompiler.verifier import MemoryLimits, verify
from parcompiler.vocabulary.token_mean import over_tokens

if TYPE_CHECKING:
    from parcompiler.bench.local import LocalBench


def flow(
    model: nn.Module | Graph | Program,
    inputs: Batch | None,
    loss: Callable[[Any], torch.Tensor] | None,
    mesh: Mesh | Cluster,
    options: Options,
    *,
    microbatch: str | Sequence[int],
    outputs: Sequence[str] | None,
    passes: Sequence[Pass] | None,
    plan: Plan | None,
    progress: bool,
) -> Program:
    """Capture, decide, lower and verify. Raises the errors that `compile` lists."""
    source, criterion = (model.model, model.loss) if isinstance(model, Program) else (model, loss)
    source = source if isinstance(source, nn.Module) else None
    wanted = wanted_rows(microbatch, mesh, options.costs, again=source is not None)
    bench = _bench(mesh, options)
    check_options(mesh, source, options, plan)
    with ONE_THREAD, Progress(progress) as steps:
        with steps("capture"):
            captured = _captured(model, inputs, loss, options.narrow, outputs)
            captured = _weighted(captured, options.loss_weights)
            _warn_of_evaluation_mode(captured)
            _warn_of_unfollowed_modes(captured)
            _warn_of_whole_gradients(captured, options)
        chosen = DEFAULT if passes is None else tuple(passes)

        def decided(options: Options) -> tuple[Graph, Problem, Plan]:
            """The graph, the problem and the plan under these options."""
            with steps("simplify"):
                one_mesh = Mesh(device=mesh.device) if isinstance(mesh, Cluster) else mesh
                graph = prepared(captured, options, one_mesh, options.dtype)
                bare = Problem(graph, one_mesh, options, bench=bench, judge=lowered_step)
                problem = on_axes(bare, plan)
            if not isinstance(mesh, Cluster):
                return captured, problem, _planned(problem, chosen, plan, steps)
            search = MeshSearch(
                MicrobatchSizes(problem, captured, wanted),
                mesh,
                chosen,
                lambda one, options: check_mesh(one, source, options),
                check_lowered,
                steps,
            )
            decision, problem, best = search.answer()
            return decision, problem, _with_costs(local(problem, best), best)

        try:
            captured, problem, plan = decided(options)
        except InfeasibleError:
            decision = _in_parts(captured, options, decided) if plan is None else None
            if decision is None:
                raise
            captured, problem, plan = decision
        _warn_of_whole_vocabulary(plan, options)
        with steps("lower"):
            rank_problem = local(problem, plan)
            lowered = lower(rank_problem.graph, plan, rank_problem.priced(granularity_of(plan)).cut)
            check_lowered(lowered)
        with steps("verify"):
            costs_of_stages = stage_costs(rank_problem, plan, lowered)
            vocabulary_costs = vocabulary_cost(rank_problem, plan)
            limits = MemoryLimits(
                costs_of_stages, list(map(problem.room, problem.devices)), vocabulary_costs
            )
            verify(lowered, limits)
    return Program(captured, problem, plan, lowered, source, criterion)


def _in_parts(
    captured: Graph, options: Options, decided: Callable[[Options], tuple[Graph, Problem, Plan]]
) -> tuple[Graph, Problem, Plan] | None:
    """A second attempt where tables with row gradients, which every data rank has whole, do not
    fit: whole gradients, with the lowest level of ZeRO that fits; None if none does or is open."""
    marked = any("sparse" in node.meta for node in captured.fx_graph.nodes)
    if marked and options.takes_rows and options.zero == "auto":
        for level in LEVELS[1:]:
            with suppress(InfeasibleError, InputError):
                shared = replace(options, zero=level)
                prepared = decided(shared)
                _warn_of_whole_gradients(captured, shared)
                return prepared
    return None


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
        check_host(problem, user_plan)
        plan = reconsidered(local(problem, user_plan), user_plan)
        return plan if plan.solution == user_plan.solution else plan.without_alternatives()


def _captured(
    model: nn.Module | Graph | Program,
    inputs: Batch | None,
    loss: Callable[[Any], torch.Tensor] | None,
    narrow: torch.dtype | None,
    outputs: Sequence[str] | None = None,
) -> Graph:
    """The graph of a model, captured unless it is captured already; `narrow`: in that 16-bit
    dtype."""
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
    """The graph with the loss as a mean over tokens, if `loss_weights` asks for it; unchanged if it
    has that already."""
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


def _warn_of_unfollowed_modes(captured: Graph) -> None:
    """Say on stderr that evaluations take branches of training, and why."""
    if captured.modes.unfollowed:
        message = (
            "parcompiler: evaluations and predictions take the branches on self.training that "
            f"training takes ({captured.modes.unfollowed}); program.verify() compares their loss "
            "with model.eval()'s"
        )
        print(message, file=sys.stderr)


def _warn_of_whole_gradients(captured: Graph, options: Options) -> None:
    """Say on stderr that tables with sparse=True get gradients of all their rows, and why."""
    if options.takes_rows:
        return
    marked = (node for node in captured.fx_graph.nodes if "sparse" in node.meta)
    operands = (captured.by_node.get(x.name) for node in marked for x in node.all_input_nodes)
    names = dict.fromkeys(item.name for item in operands if item and item.trainable)
    if names:
        message = (
            f"parcompiler: gradients of tables with sparse=True ({len(names)}: {next(iter(names))}"
            f"{', ...' if len(names) > 1 else ''}) have all rows in this program. They have only "
            'the rows that a step looks up with optimizer="sgd" or "adagrad", and without 16-bit '
            "parameters, zero=1 to 3, updates=, compression= and pipedream"
        )
        print(message, file=sys.stderr)


def _warn_of_whole_vocabulary(plan: Plan, options: Options) -> None:
    """Say on stderr what of the vocabulary is not on all ranks though a method was asked for."""
    if options.vocabulary in METHODS and plan.vocabulary is not None and plan.vocabulary.kept:
        message = (
            f"parcompiler: vocabulary={options.vocabulary!r} does not spread "
            f"{'; '.join(plan.vocabulary.kept)}"
        )
        print(message, file=sys.stderr)


def _kind(narrow: torch.dtype | None) -> str:
    """The precision of a captured model, in words."""
    return "as it is" if narrow is None else str(narrow).removeprefix("torch.")


def _bench(mesh: Mesh | Cluster, options: Options) -> LocalBench | None:
    """The bench on this machine's device, if times are to be measured."""
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
    """The plan with the measured times of its templates, so that they are not measured again."""
    if problem.bench is None:
        return plan
    measured = sorted(problem.cache.times.items())
    times = [t for (level, _), t in measured if level == plan.granularity]
    method = plan.vocabulary.method if plan.vocabulary else ""
    vocabulary_costs = problem.cache.vocabulary_times.get(method)
    return replace(plan, costs=tuple(times), vocabulary_costs=vocabulary_costs)
