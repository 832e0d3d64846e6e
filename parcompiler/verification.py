"""The proof on the user's machine: every rank beside the original model, on the same batch.

    original model, one process, micro-batch after micro-batch ─┐
                                                                ├─ compare loss, gradients,
    the exported program, one process per rank ─────────────────┘  parameters after a step

An asynchronous program is compared with its re-enactment (`reenactment.py`), and has no gradients
left to compare: its updates have used them.

With several data ranks the batch is that of all of them, and buffers are compared with those of
the first; a model with SyncBatchNorms runs on the batches of all at once (`joint.py`).

It is done twice: as the program is, and lifted to float64, where a mistake cannot hide behind
rounding. In 16 bits the model in one process has the same recipe (`capture/narrow.py`, masters in
float32, one scale of the loss) and differences are judged by that rounding; that the division is
right is what float64 shows. What runs is the exported folder, so the emitted code itself is proved.
Random operators draw from a seed of their own (micro-batch, position in the model), the same on
both sides.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from parcompiler.batches import given_batch, random_batch
from parcompiler.capture.clean import simplify
from parcompiler.capture.lift import lift
from parcompiler.capture.synchronized import alone, computing_as, is_synchronized
from parcompiler.draws import draws
from parcompiler.errors import InputError
from parcompiler.graph import Graph
from parcompiler.joint import joined
from parcompiler.pool import PATIENCE, Job, Outcome, pool
from parcompiler.reenactment import reenacted
from parcompiler.reference import Original, accumulated, materialised, one_thread
from parcompiler.runtime.scaling import BACKOFF, INITIAL

if TYPE_CHECKING:
    from parcompiler.program import Program

LIMIT = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
# Linear in the gradients, so that rounding is not amplified; momentum counts from the first step
# on, and decay tells a gradient that is zero from none.
OPTIMIZER = "SGD"
OPTIONS = {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
ROUNDINGS = 4  # of the model's largest element: a smaller difference does not count
OWN_ROUNDINGS = 4  # times its own rounding that a program may be from an ill-conditioned model
OTHER_SCALE = 0.75  # of the loss: the same gradients, rounded otherwise
MOST_ROUNDING = 1e-2  # relative; a model that is further from float64 than that draws otherwise
MOST_NARROW_ROUNDING = 0.25  # the same in 16 bits: a gradient that is missing is 1 from the model's


@dataclass(frozen=True, slots=True)
class Errors:
    """Largest relative errors of one comparison; `bitwise` when there is not a bit of difference.

    `given` says that the batch was made of the given inputs, for the model refused a random one.
    `cause` says what cannot be compared at all: it is on one side alone, or not finite; its error
    is infinite.
    An `asynchronous` program has no error of gradients: its updates have used them.
    `rounding` is the error of the model in one process against itself in float64; it is found, and
    counts, where the limit is passed although float64 shows no difference.

    The error of a tensor is its largest absolute difference over its own largest element; where
    that element is so small that four roundings of the largest element among all tensors would
    reach the limit, over the element at which they just do (gradients that are zero but for
    rounding, such as those of the biases of keys). In 16 bits, where one element more or less that
    passes a ReLU is a matter of rounding, root mean squares stand in the place of largest elements,
    and the least that they are divided by is four roundings of the largest one. Where the limit is
    passed all the same, the model goes back once more from a loss of another scale, and a few times
    the difference which that makes to a tensor do not count either.
    """

    dtype: str
    loss: float
    gradient: float
    parameter: float
    worst: str
    bitwise: bool
    limit: float
    given: bool = False
    asynchronous: bool = False
    rounding: float = 0.0
    cause: str = ""

    @property
    def ok(self) -> bool:
        """Whether every error is within the limit, or within a few of the model's own roundings."""
        allowed = max(self.limit, OWN_ROUNDINGS * self.rounding)
        return max(self.loss, self.gradient, self.parameter) <= allowed

    def __str__(self) -> str:
        """One line."""
        how = "bitwise equal" if self.bitwise else f"limit {self.limit:.0e}, worst {self.worst!r}"
        if self.rounding:
            how += f"; the model in one process is {self.rounding:.1e} from itself in float64"
        how += ", on the inputs given: the model takes no random ones" if self.given else ""
        if self.cause:
            return f"{self.dtype}: {self.cause}"
        if self.asynchronous:
            figures = f"loss {self.loss:.1e}, gradients used by the updates"
            how += "; re-enacted in one process"
        else:
            figures = f"loss {self.loss:.1e}, gradients {self.gradient:.1e}"
        return f"{self.dtype}: {figures}, parameters after a step {self.parameter:.1e} ({how})"


@dataclass(frozen=True, slots=True)
class Verification:
    """The outcome of `program.verify()`: `native` as the program is, `lifted` in float64.

    `lifted` is None, and `note` says why, when an operator of the model has no float64 kernel.
    `note` also says what is not compared.
    """

    native: Errors
    lifted: Errors | None
    note: str = ""

    @property
    def decisive(self) -> Errors:
        """The sharper of the two comparisons."""
        return self.native if self.lifted is None else self.lifted

    @property
    def loss_error(self) -> float:
        """Relative error of the loss, in float64 where that runs."""
        return self.decisive.loss

    @property
    def gradient_error(self) -> float:
        """Largest relative error of a gradient, in float64 where that runs.

        It is 0 for an asynchronous program, which has no gradients left to compare.
        """
        return self.decisive.gradient

    @property
    def parameter_error(self) -> float:
        """Largest relative error of a parameter or buffer after one optimizer step."""
        return self.decisive.parameter

    @property
    def worst(self) -> str:
        """The parameter with the largest error."""
        return self.decisive.worst

    @property
    def ok(self) -> bool:
        """Whether the program computes what the model computes."""
        return self.native.ok and (self.lifted is None or self.lifted.ok)

    def __str__(self) -> str:
        """The verdict and a line per comparison."""
        lines = ["verified: " + ("ok" if self.ok else "NOT EQUAL to the original model")]
        lines += [f"  {item}" for item in (self.native, self.lifted) if item is not None]
        return "\n".join([*lines, *([f"  {self.note}"] if self.note else [])])


def check(program: Program, seed: int) -> Verification:
    """Compare a program with its original model."""
    if program.model is None:
        message = "this program was compiled from a graph: verify() needs the original model"
        raise InputError(message)
    own = program.problem.graph
    note = _of_several_ranks(program)
    native, wanted = _compare(program, own, seed, program.problem.options.dtype)
    if _is_double(own):
        return Verification(native, native, note)
    try:
        double = simplify(lift(program.captured, torch.float64))
        _check_kernels(double)
        lifted, exact = _compare(program, double, seed, torch.float64)
    except _NoReference as error:
        missing = f"no float64 comparison: {error}"
        return Verification(native, None, "; ".join(filter(None, (missing, note))))
    if not native.ok and lifted.ok and native.given == lifted.given:
        native = _among_roundings(native, wanted, exact, _narrowest(own))
    return Verification(native, lifted, note)


def _of_several_ranks(program: Program) -> str:
    """What each data rank updates by its own micro-batches alone."""
    graph = program.problem.graph
    names = [repr(item.name) for item in graph.parameters if item.mutated]
    if program.lowered.data == 1 or not names or is_synchronized(graph.fx_graph):
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"forwards update {', '.join(names[:3])}{more}: each of the {program.lowered.data} data "
        "ranks does by its own micro-batches, and those of the first are compared"
    )


def _among_roundings(
    native: Errors, wanted: Outcome, exact: Outcome, narrow: torch.dtype | None
) -> Errors:
    """The errors beside what rounding does to the model in one process: `wanted`, where `exact`
    is the same in float64.

    A batch norm of two values, say, turns the last bits of its operands into the fifth digit of
    their gradients, and a program that adds in another order is as far from the model as the
    model is from the truth. What float64 has shown to be equal is then not called different.
    """
    own = _errors(exact, wanted, exact.gradients.keys(), narrow)
    rounding = max(own.loss, own.gradient, own.parameter)
    most = MOST_ROUNDING if narrow is None else MOST_NARROW_ROUNDING
    return dataclasses.replace(native, rounding=rounding) if rounding < most else native


class _NoReference(Exception):
    """The original model itself cannot run in a precision."""


def _check_kernels(double: Graph) -> None:
    """Refuse float64 where an operator of a 16-bit model has no kernel for it."""
    for node in double.fx_graph.nodes:
        name = str(getattr(node.target, "_opname", ""))
        if name in ("_grouped_mm", "grouped_mm"):
            message = f"{name} has no kernel for it"
            raise _NoReference(message)


def _is_double(graph: Graph) -> bool:
    """Whether the graph computes in float64 already."""
    dtypes = {p.dtype for p in graph.parameters if p.dtype.is_floating_point}
    return dtypes == {torch.float64}


def _compare(
    program: Program, graph: Graph, seed: int, dtype: torch.dtype | None
) -> tuple[Errors, Outcome]:
    """Run the ranks on `graph` and the model in `dtype`, and compare them; with it the model's."""
    variant = program.on(materialised(graph, seed))
    begin = time.perf_counter()
    with one_thread():
        try:
            batch, reference, given = _on_some_batch(variant, seed, dtype)
        except (RuntimeError, NotImplementedError) as error:
            if dtype is None:
                raise
            raise _NoReference(str(error).splitlines()[0]) from error
        numbers = draws(variant, batch) if graph.random else None
    with tempfile.TemporaryDirectory(prefix="parcompiler-") as folder:
        path = variant.write(Path(folder) / "program", program.report())
        patience = PATIENCE + 30 * (time.perf_counter() - begin)
        scale = reference.scale if graph.narrow == torch.float16 else None
        job = Job(
            str(path), (batch,), seed, optimizer=OPTIMIZER, options=OPTIONS,
            draws=numbers, patience=patience, scale=scale,
        )  # fmt: skip
        found = pool().run(job, variant.lowered.grid.size)
    own = [p.name for p in graph.parameters if p.trainable and not p.buffer]
    trained = own if variant.lowered.asynchronous else reference.gradients.keys()
    errors = _errors(reference, found, trained, _narrowest(graph))
    asynchronous = variant.lowered.asynchronous
    if not (errors.ok or errors.cause or asynchronous):
        with one_thread():
            again = _at_scale(variant, batch, seed, dtype, OTHER_SCALE * reference.scale)
        errors = _errors(reference, found, trained, _narrowest(graph), again)
    return dataclasses.replace(errors, given=given, asynchronous=asynchronous), reference


def _on_some_batch(
    variant: Program, seed: int, dtype: torch.dtype | None
) -> tuple[dict[str, torch.Tensor], Outcome, bool]:
    """A batch that the model takes, what the model makes of it, and whether it is the given one.

    A random batch first; where the model refuses that or its loss is not finite (it wants ordered
    boxes, places for images in a text, probabilities), the inputs that it was compiled with.
    """
    graph, count = variant.problem.graph, variant.plan.microbatches * variant.lowered.data
    batch = random_batch(graph, count, seed)
    own = given_batch(graph, count)
    try:
        reference = _reference(variant, batch, seed, dtype)
        if own is None or reference.loss.isfinite():
            return batch, reference, False
    except Exception:  # whatever a user's model raises
        if own is None:
            raise
    return own, _reference(variant, own, seed, dtype), True


def _reference(
    variant: Program, batch: Mapping[str, torch.Tensor], seed: int, dtype: torch.dtype | None
) -> Outcome:
    """What the original model makes of a batch in one process.

    In float16 the scale of the loss is the largest at which its gradients are finite, as it would
    be after some steps.
    """
    if variant.problem.graph.narrow != torch.float16:
        return _at_scale(variant, batch, seed, dtype, 1.0)
    scale = INITIAL
    while True:
        found = _at_scale(variant, batch, seed, dtype, scale)
        if scale <= 1.0 or all(g.isfinite().all() for g in found.gradients.values()):
            return found
        scale *= BACKOFF


def _at_scale(
    variant: Program,
    batch: Mapping[str, torch.Tensor],
    seed: int,
    dtype: torch.dtype | None,
    scale: float,
) -> Outcome:
    """What the original model makes of a batch when its loss is scaled for the backward."""
    optimizer = partial(getattr(torch.optim, OPTIMIZER), **OPTIONS)
    ranks = variant.lowered.data
    count = variant.plan.microbatches * ranks
    with Original(variant, seed, dtype, scale) as original:
        if variant.lowered.asynchronous:
            return reenacted(original, variant.lowered, [batch], optimizer)
        if ranks > 1 and is_synchronized(original.graph.fx_graph):
            return joined(original, batch, count, optimizer, ranks)
        with computing_as(alone):  # whatever torch.distributed does in this process
            return accumulated(original, batch, count, optimizer, ranks)


def _errors(
    reference: Outcome,
    found: Outcome,
    trained: Collection[str],
    narrow: torch.dtype | None = None,
    again: Outcome | None = None,
) -> Errors:
    """How far the ranks are from the model; `trained` are the names of trained parameters.

    What is computed in `narrow` is judged by that, although loss and masters are wider. `again` is
    the model rounded otherwise.
    """
    dtype = narrow or reference.loss.dtype
    named = {name: found.state[name] for name in reference.state if name in found.state}
    other = reference if again is None else again
    wanted = reference.gradients, other.gradients
    gradients = dict(_differences(*wanted, found.gradients, trained, narrow))
    state = dict(_differences(reference.state, other.state, named, trained, narrow))
    loss = _relative(reference.loss, found.loss, 0.0)
    everything = {**state, **gradients}
    worst = max(everything, key=lambda name: everything[name], default="")
    causes = [
        _cause({"": loss}, {"": reference.loss}, {"": found.loss}, "the loss"),
        _cause(gradients, reference.gradients, found.gradients, "a gradient of {!r}"),
        _cause(state, reference.state, named, "{!r} after a step"),
    ]
    return Errors(
        dtype=str(dtype).removeprefix("torch."),
        loss=loss,
        gradient=max(gradients.values(), default=0.0),
        parameter=max(state.values(), default=0.0),
        worst=worst,
        bitwise=not any((loss, *everything.values())),
        limit=limit_of(dtype),
        cause="; ".join(filter(None, causes)),
    )


def _cause(
    errors: Mapping[str, float],
    wanted: Mapping[str, torch.Tensor],
    found: Mapping[str, torch.Tensor],
    what: str,
) -> str:
    """Why errors are infinite, in words; nothing where none is. `what` is to have a name put in."""
    names = sorted(name for name, error in errors.items() if math.isinf(error))
    if not names:
        return ""
    first = what.format(names[0])
    sides = {"model": wanted.get(names[0]), "program": found.get(names[0])}
    present = [side for side, tensor in sides.items() if tensor is not None]
    broken = [f"in the {s}" for s, t in sides.items() if t is not None and not t.isfinite().all()]
    if len(present) == 1:
        text = f"only the {present[0]} has {first}"
    elif broken:
        text = f"{first} is not finite {' and '.join(broken)}"
    else:
        shapes = " and ".join(f"{tuple(t.shape)}" for t in sides.values() if t is not None)
        text = f"{first} is of another shape or size (model and program: {shapes})"
    return text + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")


def _narrowest(graph: Graph) -> torch.dtype | None:
    """The 16-bit dtype of some value that carries gradients; None if all are wider."""
    values = [graph.narrow]
    for node in graph.fx_graph.nodes:
        value = node.meta.get("val")
        if node.name in graph.differentiable and isinstance(value, torch.Tensor):
            values.append(value.dtype)
    return next((dtype for dtype in (torch.bfloat16, torch.float16) if dtype in values), None)


def limit_of(dtype: torch.dtype) -> float:
    """The largest relative error that rounding may explain."""
    return LIMIT.get(dtype.to_real(), 2e-2)


def _differences(
    wanted: Mapping[str, torch.Tensor],
    again: Mapping[str, torch.Tensor],
    found: Mapping[str, torch.Tensor],
    trained: Collection[str],
    narrow: torch.dtype | None,
) -> Iterator[tuple[str, float]]:
    """The relative error of each tensor; infinite where one side has none, not even zeros.

    Rounding is measured by the `trained` ones (buffers hold masks of -1e9 and the like), and for
    each tensor by what it is `again`, when it is rounded otherwise: where few are trained, their
    gradients may be smaller than the rounding of those that they are made of.
    """
    size = _size if narrow is None else _mean_size
    sizes = [(size(wanted[name]), wanted[name].dtype) for name in trained if name in wanted]
    largest, dtype = max(sizes, key=lambda item: item[0], default=(0.0, torch.float64))
    if narrow is None:
        floor = ROUNDINGS * torch.finfo(dtype).eps * largest / limit_of(dtype)
    else:
        floor = ROUNDINGS * torch.finfo(narrow).eps * largest
    for name in sorted(wanted.keys() | found.keys()):
        if name in wanted and name in found:
            rounding = size(_wide(wanted[name]) - _wide(again[name]))
            least = max(floor, OWN_ROUNDINGS * rounding / limit_of(narrow or dtype))
            yield name, _relative(wanted[name], found[name], least, size)
        else:
            yield name, float("inf")


def _size(tensor: torch.Tensor) -> float:
    """The largest element, in magnitude."""
    return float(_wide(tensor).abs().max()) if tensor.numel() else 0.0


def _mean_size(tensor: torch.Tensor) -> float:
    """The root mean square of the elements."""
    return float(_wide(tensor).abs().square().mean().sqrt()) if tensor.numel() else 0.0


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor (also of truth values) in the widest dtype of its kind."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _relative(
    wanted: torch.Tensor,
    found: torch.Tensor,
    floor: float,
    size: Callable[[torch.Tensor], float] = _size,
) -> float:
    """The size of the difference over that of what is wanted, or over `floor` if that is larger."""
    if wanted.shape != found.shape:
        return float("inf")
    if not wanted.numel() or torch.equal(wanted, found.to(wanted.dtype)):
        return 0.0
    difference = size(_wide(wanted) - _wide(found))
    scale = max(size(wanted), floor)
    return difference / scale if scale and math.isfinite(difference) else float("inf")
