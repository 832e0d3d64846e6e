"""`program.verify()`: compares the program, as it is and lifted to float64, with the original
model.

An asynchronous program is compared with its re-enactment by the model (`reference.reenacted`), and
has no gradients left to compare: its updates have used them. With several data ranks the batch is
that of all of them, and buffers are compared with those of the first rank; a model with
SyncBatchNorms runs on the batches of all ranks at once (`synchronized.py`).

In float64 a mistake cannot hide behind rounding; a model of many FLOPs runs on shorter rows there
(`shorter.py`), and at full size if anything differs. In 16 bits the model in one process uses the
same recipe (`capture/narrow.py`, masters in float32, one loss scale), and the tolerance is that of
16-bit rounding; float64 shows that the division is right. The ranks run the exported folder, so the
emitted code itself is verified. Random operators draw from their own seeds (micro-batch, position
in the model), the same on both sides.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import fx

from parcompiler.capture.effects import overload_name
from parcompiler.capture.functions import Applied
from parcompiler.capture.gradients import differentiable
from parcompiler.capture.lift import lift
from parcompiler.capture.prologue import is_sendable
from parcompiler.capture.synchronized import alone, computing_as, is_synchronized
from parcompiler.errors import InputError, shown
from parcompiler.graph import Graph, tensors_of
from parcompiler.passes.shard.context import of_one_rank
from parcompiler.problem import prepared
from parcompiler.progress import Progress
from parcompiler.runtime.compression import DTYPES
from parcompiler.runtime.mixed_precision import BACKOFF, INITIAL
from parcompiler.spmd.experts import on_expert_ranks
from parcompiler.temporary import threads
from parcompiler.verification.batches import compiled_batch, draws_of_stages, random_batch
from parcompiler.verification.comparison import Errors, Verification, compare
from parcompiler.verification.data_ranks import DataRanks
from parcompiler.verification.pool import PATIENCE, Job, Outcome, pool
from parcompiler.verification.reference import (
    Compiled,
    Original,
    accumulated,
    materialised,
    reenacted,
)
from parcompiler.verification.shorter import shortened
from parcompiler.verification.synchronized import accumulated_together

# Linear in the gradients, so that rounding is not amplified; momentum has an effect from the first
# step on, and weight decay distinguishes a zero gradient from none.
OPTIMIZER = "SGD"
OPTIONS = {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
ROUND = 2  # steps from one average of weights to the next
STEPS = {
    "asynchronous": 4,
    "local": 2 * ROUND,
    "powersgd": 3,
}  # steps by way of the data axis, so that its state is used
OTHER_SCALE = 0.75  # of the loss: same gradients, other rounding
SLOW = 1e9  # FLOP/s of the slowest machine to wait for
COMPILING = 900  # s that the ranks may take to compile their layers
MOST_ROUNDING = 1e-2  # relative; a model further from float64 draws other numbers
MOST_NARROW_ROUNDING = 0.25  # likewise in 16 bits: a missing gradient has an error of 1


@dataclass(frozen=True, slots=True)
class Ranks:
    """How the ranks run: on "cpu" or "cuda", and with `compiled` layers."""

    device: str
    compiled: bool

    def __post_init__(self) -> None:
        check_device(self.device)


def check_device(device: object) -> None:
    """Refuse devices that ranks cannot be verified on, here. Raises InputError."""
    if device not in ("cpu", "cuda"):
        message = f"device must be 'cpu' or 'cuda' ({shown(device)} given)"
        raise InputError(message)
    if device == "cuda" and not torch.cuda.is_available():
        message = "torch finds no CUDA device on this machine (device 'cuda' given): take 'cpu'"
        raise InputError(message)


class _NoReference(Exception):
    """The original model cannot run in a precision."""


def check(
    program: Compiled, seed: int, progress: bool, *, compiled: bool = False, full: bool = False,
    device: str = "cpu",
) -> Verification:  # fmt: skip
    """Compare a program with its original model.

    With `compiled` ranks compile their layers, with `full` float64 runs at the compiled sizes; the
    ranks are on `device`.
    """
    ranks = Ranks(device, compiled)
    if program.model is None:
        message = "this program was compiled from a graph: verify() needs the original model"
        raise InputError(message)
    with Progress(progress) as steps, threads(1):  # as on ranks: equal rounding
        pool().start(program.lowered.grid.size)  # they import torch while the model runs
        verification = None if full else _on_shorter_rows(program, seed, steps, ranks)
        return verification or _as_compiled(program, seed, steps, ranks)


def _on_shorter_rows(
    program: Compiled, seed: int, steps: Progress, ranks: Ranks
) -> Verification | None:
    """The comparison of a large step, in float64 at smaller sizes; the ranks run beside the model.

    None if it is not large, has no smaller sizes, or anything goes wrong or differs.
    """
    with steps("smaller sizes for float64"):
        double = shortened(program)
    if double is None or program.problem.graph.narrow == torch.float16:  # its scale is searched
        return None
    graph, dtype = program.problem.graph, program.problem.options.dtype
    patience = PATIENCE + double.flops / SLOW
    with TemporaryDirectory(prefix="parcompiler-") as folder, ThreadPoolExecutor(1) as beside:
        try:
            with steps(f"the model in float64, {double.sizes}, beside the ranks"):
                variant = _with_short_rounds(program.on(materialised(graph, seed)))
                path = variant.write(Path(folder) / "native", None)
                job = _job(variant, path, _batches(variant, seed), seed, patience, ranks)
                running = beside.submit(pool().run, job, variant.lowered.grid.size)
                lifted = _trial(program, double.graph, seed, torch.float64, folder, ranks)
                if lifted.compiled_inputs:  # the model refused random inputs: run again
                    pool().close()
                    batches = _batches(variant, seed, of_inputs=True)
                    job = _job(variant, path, batches, seed, patience, ranks)
                    running = beside.submit(pool().run, job, variant.lowered.grid.size)
                running_lifted = beside.submit(lifted.run)  # after the first run
            with steps("the model in one process, beside the ranks"):
                reference = _reference(variant, job.batches, seed, dtype)
                trial = Trial(variant, job, dtype, reference, lifted.compiled_inputs)
                native = trial.judged(running.result())
                exact = lifted.judged(running_lifted.result())
        except Exception:  # a run at full size will show what is wrong, if anything
            pool().close()
            return None
        except BaseException:  # an interruption: the ranks are no longer needed
            pool().close()
            raise
    exact = dataclasses.replace(exact, sizes=double.sizes)
    verification = Verification(native, exact, _notes(program, trial))
    return verification if verification.ok else None


def _as_compiled(program: Compiled, seed: int, steps: Progress, ranks: Ranks) -> Verification:
    """The comparison at the compiled sizes; the ranks run while the model runs in float64."""
    graph, note = program.problem.graph, ""
    with TemporaryDirectory(prefix="parcompiler-") as folder:
        with steps("the model in one process"):
            trial = _trial(program, graph, seed, program.problem.options.dtype, folder, ranks)
        note = _notes(program, trial)
        if {p.dtype for p in graph.parameters if p.dtype.is_floating_point} == {torch.float64}:
            with steps("the ranks"):
                native = trial.judged(trial.run())
            return Verification(native, native, note)
        double = None
        with ThreadPoolExecutor(1) as beside, steps("the ranks, and the model in float64"):
            running = beside.submit(trial.run)
            try:
                double = _lifted(program, seed, folder, ranks)
            except _NoReference as error:
                note = "; ".join(filter(None, (f"no float64 comparison: {error}", note)))
            except BaseException:  # interruptions too: the ranks are no longer needed
                pool().close()
                raise
            native = trial.judged(running.result())
        if double is None:
            return Verification(native, None, note)
        with steps("the ranks in float64"):
            lifted = double.judged(double.run())
    reference, exact = trial.reference, double.reference
    if not native.ok and lifted.ok and native.compiled_inputs == lifted.compiled_inputs:
        # A batch norm of two values, say, amplifies the last bits of its operands to the fifth
        # digit of their gradients: a program that adds in another order is as far from the model as
        # the model is from the exact result. What is equal in float64 is not reported as different.
        narrow = _narrowest(graph)
        rounding = compare(exact, reference, exact.gradients.keys(), narrow).largest
        if rounding < (MOST_ROUNDING if narrow is None else MOST_NARROW_ROUNDING):
            native = dataclasses.replace(native, rounding=rounding)
    return Verification(native, lifted, note)


def _notes(program: Compiled, trial: Trial) -> str:
    """The error of compressed gradients, and the buffers that each data rank updates by its own
    micro-batches only."""
    error, notes = trial.reference.compression_error, []
    if error is not None:
        notes.append(f"compressed gradients are {error:.1e} from whole ones")
    graph, ranks = program.problem.graph, program.lowered.grid.batches
    names = [repr(parameter.name) for parameter in graph.parameters if parameter.mutated]
    if ranks > 1 and names and not is_synchronized(graph.fx_graph):
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        notes.append(
            f"forwards update {', '.join(names[:3])}{more}: each of the {ranks} data "
            "ranks does by its own micro-batches, and those of the first are compared"
        )
    return "; ".join(notes)


def _lifted(program: Compiled, seed: int, folder: str, ranks: Ranks) -> Trial:
    """The trial in float64. Raises _NoReference if the model has an operator without a float64
    kernel."""
    options, mesh = program.problem.options, program.problem.mesh
    double = prepared(program.captured, options, mesh, torch.float64)
    for node in double.fx_graph.nodes:
        name = overload_name(node)
        if name in ("_grouped_mm", "grouped_mm"):
            message = f"{name} has no kernel for it"
            raise _NoReference(message)
        if fault := _fault(node):
            message = f"{node.target!r} fails in it ({fault})"
            raise _NoReference(message)
    if mesh.tensor * mesh.context > 1 and (names := _gain_history(program.captured)):
        message = (
            f"under no_grad {names[0]!r} casts to another dtype, which cuts gradients off, and in "
            "float64 it would let them through, for which the tensors are not divided"
        )
        raise _NoReference(message)
    if program.problem.context is not None:
        double = of_one_rank(double, program.problem, program.problem.context)
    if mesh.expert > 1:
        double = on_expert_ranks(double, mesh)
    return _trial(program, double, seed, torch.float64, folder, ranks)


def _fault(node: fx.Node) -> str:
    """Why a node's custom Function does not run in the precision of a lifted graph; "" if it does,
    and for other nodes."""

    def stand_in(operand: fx.Node) -> Any:
        value = operand.meta["val"]
        made = torch.ones(value.shape, dtype=value.dtype)
        if not made.is_floating_point():
            return made.zero_()  # e.g. an index
        return made.requires_grad_().clone()  # which a Function may update

    if not isinstance(node.target, Applied) or not all(map(is_sendable, node.all_input_nodes)):
        return ""
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            for one in tensors_of(node.target(*fx.map_arg(node.args, stand_in))):
                if one.requires_grad:
                    one.sum().backward(retain_graph=True)
    except Exception as error:  # a user's Function may raise anything
        return str(error).partition("\n")[0] or repr(error)
    return ""


def _gain_history(graph: Graph) -> list[str]:
    """The casts under `no_grad` that return their operand itself in float64, with its gradient."""
    trainable = [item.node for item in graph.parameters if item.trainable]
    graphs = graph, lift(graph, torch.float64)
    before, after = (differentiable(one.fx_graph, trainable, one.loss) for one in graphs)
    return sorted(after - before)


def _trial(
    program: Compiled, graph: Graph, seed: int, dtype: torch.dtype | None, folder: str,
    ranks: Ranks,
) -> Trial:  # fmt: skip
    """Run the model in `dtype`, and write the program on `graph` into a folder."""
    variant = _with_short_rounds(program.on(materialised(graph, seed)))
    begin = time.perf_counter()
    try:
        batches, reference, compiled_inputs = _on_some_batches(variant, seed, dtype)
    except (RuntimeError, NotImplementedError) as error:
        if graph is program.problem.graph:  # it does not run at the compiled precision either
            raise
        raise _NoReference(str(error).splitlines()[0]) from error
    patience = PATIENCE + 30 * (time.perf_counter() - begin)
    path = variant.write(Path(folder) / str(dtype), None)
    job = _job(variant, path, batches, seed, patience, ranks)
    if graph.narrow == torch.float16:
        job = dataclasses.replace(job, scale=reference.scale)
    return Trial(variant, job, dtype, reference, compiled_inputs)


def _job(
    variant: Compiled, path: Path, batches: Sequence[Mapping[str, torch.Tensor]], seed: int,
    patience: float, ranks: Ranks,
) -> Job:  # fmt: skip
    """The job for the ranks of an exported program."""
    graph = variant.problem.graph
    draws = None
    if graph.random:
        whole = dataclasses.replace(graph.undivided or graph, tensors=graph.tensors)
        draws = draws_of_stages(whole, variant.lowered, batches[0])
    served = variant.lowered.updates.way == "asynchronous"  # an evaluation counts as an arrival
    return Job(
        str(path), batches, seed, optimizer=OPTIMIZER, options=_options(graph), draws=draws,
        patience=patience + COMPILING * ranks.compiled, compiled=ranks.compiled,
        device=ranks.device, evaluate=not (served or ranks.compiled),
    )  # fmt: skip


def _options(graph: Graph) -> dict[str, float | bool]:
    """The options of the optimizer; decay would change rows that have no gradient."""
    return {**OPTIONS, "weight_decay": 0.0} if graph.has_row_gradients else OPTIONS


@dataclass
class Trial:
    """A program in one precision, and the outcome of the original model on the same batches."""

    variant: Compiled
    job: Job
    dtype: torch.dtype | None
    reference: Outcome
    compiled_inputs: bool

    def run(self) -> Outcome:
        """The outcome of the ranks."""
        return pool().run(self.job, self.variant.lowered.grid.size)

    def judged(self, outcome: Outcome) -> Errors:
        """How far the ranks are from the model."""
        variant, graph = self.variant, self.variant.problem.graph
        arrivals = () if outcome.arrivals is None else outcome.arrivals.tolist()
        if arrivals:
            self.reference = self._again(1.0, arrivals)
        asynchronous, narrow = variant.lowered.asynchronous, _narrowest(graph)
        trainable = [p.name for p in graph.parameters if p.trainable and not p.buffer]
        trained = trainable if asynchronous else self.reference.gradients.keys()
        errors = compare(self.reference, outcome, trained, narrow)
        if not (errors.ok or errors.cause or asynchronous):
            # Scaled gradients compress to other sums, whose distance is not just rounding.
            packed = variant.lowered.updates.compression in DTYPES and narrow is None
            scale = (1.0 if packed else OTHER_SCALE) * self.reference.scale
            again = self._again(scale, arrivals, nudged=True)
            errors = compare(self.reference, outcome, trained, narrow, again)
        return dataclasses.replace(
            errors, compiled_inputs=self.compiled_inputs, asynchronous=asynchronous
        )

    def _again(self, scale: float, arrivals: Sequence[int], *, nudged: bool = False) -> Outcome:
        """The outcome of the model, run again."""
        arguments = self.variant, self.job.batches, self.job.seed, self.dtype, scale, arrivals
        return _at_scale(*arguments, nudged=nudged)


def _with_short_rounds(variant: Compiled) -> Compiled:
    """The program with rounds of at most `ROUND` steps, if data ranks average weights."""
    updates, plan = variant.lowered.updates, variant.lowered.plan
    if updates.way != "local" or updates.every <= ROUND or plan is None:
        return variant
    updates = dataclasses.replace(updates, every=ROUND)
    plan = dataclasses.replace(plan, updates=updates)
    return variant.with_lowered(dataclasses.replace(variant.lowered, updates=updates, plan=plan))


def _on_some_batches(
    variant: Compiled, seed: int, dtype: torch.dtype | None
) -> tuple[list[dict[str, torch.Tensor]], Outcome, bool]:
    """Batches that the model takes, its outcome, and whether they repeat the compiled inputs.

    A random batch is tried first; if the model refuses it or its loss is not finite (it needs
    ordered boxes, positions of images in a text, probabilities), the inputs that it was compiled
    with are used.
    """
    has_values = compiled_batch(variant.problem.graph, 1) is not None
    batches = _batches(variant, seed)
    try:
        reference = _reference(variant, batches, seed, dtype)
        if not has_values or reference.losses.isfinite().all():
            return batches, reference, False
    except Exception:  # a user's model may raise anything
        if not has_values:
            raise
    batches = _batches(variant, seed, of_inputs=True)
    return batches, _reference(variant, batches, seed, dtype), True


def _batches(
    variant: Compiled, seed: int, of_inputs: bool = False
) -> list[dict[str, torch.Tensor]]:
    """The batch of each step, of all data ranks: random, or repeating the compiled inputs with
    `of_inputs`."""
    graph, lowered = variant.problem.graph, variant.lowered
    count = lowered.microbatches * lowered.grid.batches
    updates = variant.lowered.updates
    steps = STEPS.get(updates.compression or updates.way, 1)
    if not of_inputs:
        return [random_batch(graph, count, seed + k) for k in range(steps)]
    compiled = compiled_batch(graph, count)
    assert compiled is not None, "inputs that have values"
    return [compiled] * steps


def _reference(
    variant: Compiled,
    batches: Sequence[Mapping[str, torch.Tensor]],
    seed: int,
    dtype: torch.dtype | None,
) -> Outcome:
    """The outcome of the original model on some batches in one process.

    In float16 the loss scale is the largest with finite gradients, as it would be after some steps.
    """
    if variant.problem.graph.narrow != torch.float16:
        return _at_scale(variant, batches, seed, dtype, 1.0)
    scale = INITIAL
    while True:
        outcome = _at_scale(variant, batches, seed, dtype, scale)
        if scale <= 1.0 or all(g.isfinite().all() for g in outcome.gradients.values()):
            return outcome
        scale *= BACKOFF


def _at_scale(
    variant: Compiled,
    batches: Sequence[Mapping[str, torch.Tensor]],
    seed: int,
    dtype: torch.dtype | None,
    scale: float,
    arrivals: Sequence[int] = (),
    *,
    nudged: bool = False,
) -> Outcome:
    """The outcome of the original model when its loss is scaled for the backward."""
    ranks, each = variant.lowered.grid.batches, variant.lowered.microbatches
    with Original(variant, seed, dtype, scale, nudged=nudged) as original:
        with computing_as(alone):
            evaluation = original.evaluation(batches[0], range(0, ranks * each, each))
        outcome = _trained(original, variant, batches, arrivals)
        return dataclasses.replace(outcome, evaluation=evaluation)


def _trained(
    original: Original,
    variant: Compiled,
    batches: Sequence[Mapping[str, torch.Tensor]],
    arrivals: Sequence[int],
) -> Outcome:
    """The outcome of the steps of the original model."""
    optimizer = partial(getattr(torch.optim, OPTIMIZER), **_options(variant.problem.graph))
    ranks = variant.lowered.grid.batches
    count = variant.lowered.microbatches * ranks
    if variant.lowered.asynchronous:
        return reenacted(original, variant.lowered, batches, optimizer)
    if variant.lowered.updates.way == "asynchronous":
        order = arrivals or [*range(ranks)] * len(batches)
        return DataRanks(original, variant.lowered, optimizer).in_order(batches, order)
    if variant.lowered.updates.way == "local":
        return DataRanks(original, variant.lowered, optimizer).apart(batches)
    if variant.lowered.updates.compression is not None:
        return DataRanks(original, variant.lowered, optimizer).together(batches)
    if ranks > 1 and is_synchronized(original.graph.fx_graph):
        return accumulated_together(original, batches[0], count, optimizer, ranks)
    with computing_as(alone):  # ignore torch.distributed in this process
        return accumulated(original, batches[0], count, optimizer, ranks)


def _narrowest(graph: Graph) -> torch.dtype | None:
    """The 16-bit dtype of some value that carries gradients; None if all are wider."""
    values = [graph.narrow]
    for node in graph.fx_graph.nodes:
        value = node.meta.get("val")
        if node.name in graph.differentiable and isinstance(value, torch.Tensor):
            values.append(value.dtype)
    return next((dtype for dtype in (torch.bfloat16, torch.float16) if dtype in values), None)
