"""The proof on the user's machine: every rank beside the original model, on the same batch.

    original model, one process, micro-batch after micro-batch ─┐
                                                                ├─ compare loss, gradients,
    the exported program, one process per rank ─────────────────┘  parameters after a step

It is done twice: as the program is, and lifted to float64, where a mistake cannot hide behind
rounding. What runs is the exported folder, so the emitted code itself is proved. Random operators
draw from a seed of their own (micro-batch, position in the model), the same on both sides.
"""

from __future__ import annotations

import copy
import dataclasses
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from parcompiler.capture.inputs import flat, with_tensors
from parcompiler.capture.lift import lift, lifted_copy, lifting
from parcompiler.capture.loss import WithLoss
from parcompiler.capture.simplify import simplify
from parcompiler.errors import InputError
from parcompiler.graph import Graph
from parcompiler.pool import PATIENCE, Job, Outcome, pool
from parcompiler.runtime.chance import Chance

if TYPE_CHECKING:
    from parcompiler.program import Program

LIMIT = {torch.float64: 1e-9, torch.float32: 1e-5}
LEARNING_RATE = 0.01
Numbers = dict[str, list[int]]  # of draws of random numbers, by operator

ROUNDINGS = 4  # of the model's largest element: a smaller difference does not count


@dataclass(frozen=True, slots=True)
class Errors:
    """Largest relative errors of one comparison; `bitwise` when there is not a bit of difference.

    `given` says that the batch was made of the given inputs, for the model refused a random one.

    The error of a tensor is its largest absolute difference over its own largest element; where
    that element is so small that four roundings of the largest element among all tensors would
    reach the limit, over the element at which they just do (gradients that are zero but for
    rounding, such as those of the biases of keys).
    """

    dtype: str
    loss: float
    gradient: float
    parameter: float
    worst: str
    bitwise: bool
    limit: float
    given: bool = False

    @property
    def ok(self) -> bool:
        """Whether every error is within the limit."""
        return max(self.loss, self.gradient, self.parameter) <= self.limit

    def __str__(self) -> str:
        """One line."""
        how = "bitwise equal" if self.bitwise else f"limit {self.limit:.0e}, worst {self.worst!r}"
        figures = f"loss {self.loss:.1e}, gradients {self.gradient:.1e}"
        how += ", on the inputs given: the model takes no random ones" if self.given else ""
        return f"{self.dtype}: {figures}, parameters after a step {self.parameter:.1e} ({how})"


@dataclass(frozen=True, slots=True)
class Verification:
    """The outcome of `program.verify()`: `native` as the program is, `lifted` in float64.

    `lifted` is None, and `note` says why, when an operator of the model has no float64 kernel.
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
        """Largest relative error of a gradient, in float64 where that runs."""
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
    native = _compare(program, own, seed, program.problem.options.dtype)
    if _is_double(own):
        return Verification(native, native)
    try:
        double = simplify(lift(program.captured, torch.float64))
        lifted = _compare(program, double, seed, torch.float64)
    except _NoReference as error:
        return Verification(native, None, f"no float64 comparison: {error}")
    return Verification(native, lifted)


class _NoReference(Exception):
    """The original model itself cannot run in a precision."""


def _is_double(graph: Graph) -> bool:
    """Whether the graph computes in float64 already."""
    dtypes = {p.dtype for p in graph.parameters if p.dtype.is_floating_point}
    return dtypes == {torch.float64}


def _compare(program: Program, graph: Graph, seed: int, dtype: torch.dtype | None) -> Errors:
    """Run the ranks on `graph` and the model in `dtype`, and compare them."""
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
        job = Job(str(path), batch, seed, LEARNING_RATE, numbers, patience)
        found = pool().run(job, variant.lowered.size)
    return dataclasses.replace(_errors(reference, found), given=given)


def _on_some_batch(
    variant: Program, seed: int, dtype: torch.dtype | None
) -> tuple[dict[str, torch.Tensor], Outcome, bool]:
    """A batch that the model takes, what the model makes of it, and whether it is the given one.

    A random batch first; where the model refuses that or its loss is not finite (it wants ordered
    boxes, places for images in a text, probabilities), the inputs that it was compiled with.
    """
    graph, count = variant.problem.graph, variant.plan.microbatches
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


@contextmanager
def one_thread() -> Iterator[None]:
    """Within it, torch uses one thread as every rank does: sums are rounded in the same order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def materialised(graph: Graph, seed: int) -> Graph:
    """The graph with values for tensors on the meta device: small random ones."""
    generator = torch.Generator().manual_seed(seed)

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor.detach().cpu()
        if not tensor.dtype.is_floating_point:
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        return torch.randn(tensor.shape, generator=generator).to(tensor.dtype) * 0.02

    return dataclasses.replace(graph, tensors={n: fill(t) for n, t in graph.tensors.items()})


def random_batch(graph: Graph, microbatches: int, seed: int) -> dict[str, torch.Tensor]:
    """A batch by keys: normal floats, integers below their bounds; what has no bound and what is
    0 or 1 everywhere (masks) is repeated from the inputs that the model was compiled with."""
    generator = torch.Generator().manual_seed(seed)
    examples = dict(flat(graph.sample))
    found = {}
    for item in graph.inputs:
        example = examples.get(item.key)
        shape = (item.shape[0] * microbatches, *item.shape[1:]) if item.shape else ()
        if example is not None and not example.is_meta and _is_fixed(example, item.high):
            repeated = torch.cat([example] * microbatches) if item.shape else example
            found[item.key] = repeated.detach().to(item.dtype)
        elif item.dtype.is_floating_point:
            found[item.key] = torch.randn(shape, generator=generator).to(item.dtype)
        else:
            high = 2 if item.high is None else item.high
            found[item.key] = torch.randint(0, high, shape, generator=generator).to(item.dtype)
    return found


def given_batch(graph: Graph, microbatches: int) -> dict[str, torch.Tensor] | None:
    """The inputs that the model was compiled with as every micro-batch; None if they are meta."""
    examples = dict(flat(graph.sample))
    found = {}
    for item in graph.inputs:
        example = examples.get(item.key)
        if example is None or example.is_meta:
            return None
        whole = torch.cat([example] * microbatches) if item.shape else example
        found[item.key] = whole.detach().cpu().to(item.dtype)
    return found


def _is_fixed(example: torch.Tensor, high: int | None) -> bool:
    """Whether random values could be invalid in the place of an example's."""
    binary = bool(((example == 0) | (example == 1)).all())
    return example.dtype == torch.bool or (binary and (high is None or high <= 2))


def draws(program: Program, batch: Mapping[str, torch.Tensor]) -> dict[int, Numbers]:
    """For each stage the numbers, per operator in the model's order, of its draws.

    Found by running the graph once: an operator may draw several times or not at all.
    """
    graph = program.problem.graph
    counted = DrawsOf(graph, _piece(graph, batch, 0))
    counted.run()
    found: dict[int, Numbers] = {}
    for stage in program.lowered.stages:
        own: Numbers = found.setdefault(stage.index, {})
        for node in (node for call in stage.calls for node in call.block.nodes):
            for name, numbers in counted.by_node.get(node.name, {}).items():
                own.setdefault(name, []).extend(numbers)
    return found


class DrawsOf(fx.Interpreter):
    """Runs a graph and notes, by node, the numbers of the draws that each operator makes."""

    def __init__(self, graph: Graph, piece: Mapping[str, torch.Tensor]) -> None:
        super().__init__(fx.GraphModule({}, graph.fx_graph))
        self.by_node: dict[str, Numbers] = {}
        self._chance = Chance(0, 0)
        self._inputs = {item.node: piece[item.key] for item in graph.inputs}
        self._inputs |= {
            p.node: graph.tensors[p.name].to(p.dtype).clone() for p in graph.parameters
        }

    def run_node(self, n: fx.Node) -> Any:
        """Run one node and note its draws."""
        if n.op == "placeholder":
            return self._inputs[n.name]
        before = dict(self._chance.draws)
        with torch.no_grad(), self._chance:
            result = super().run_node(n)
        after = {m: range(before.get(m, 0), count) for m, count in self._chance.draws.items()}
        self.by_node[n.name] = {name: [*numbers] for name, numbers in after.items() if numbers}
        return result


def _reference(
    program: Program, batch: Mapping[str, torch.Tensor], seed: int, dtype: torch.dtype | None
) -> Outcome:
    """The original model in this process: accumulated gradients of the mean over micro-batches."""
    graph, count = program.problem.graph, program.plan.microbatches
    assert program.model is not None
    twin = _twin(program.model, graph, dtype)
    whole = WithLoss(twin, program.loss)
    losses = []
    floating = (p.dtype for p in program.model.parameters() if p.is_floating_point())
    own = next(floating, torch.float32)
    with lifting(dtype, own) if dtype is not None else nullcontext():
        for i in range(count):
            args, kwargs = with_tensors(graph.sample, _piece(graph, batch, i))
            with Chance(seed, i) if graph.random else nullcontext():
                loss = whole(*args, **kwargs)
            torch.autograd.backward(loss, torch.full_like(loss, 1.0 / count))
            losses.append(loss.detach())
    mean = torch.stack(losses).mean()
    named = dict(twin.named_parameters())
    gradients = {n: p.grad.clone() for n, p in named.items() if p.grad is not None}
    trainable = [p for p in named.values() if p.requires_grad]
    if trainable:
        torch.optim.SGD(trainable, lr=LEARNING_RATE).step()
    state = {name: tensor.detach() for name, tensor in (named | dict(twin.named_buffers())).items()}
    return Outcome(mean, gradients, state)


def _twin(model: nn.Module, graph: Graph, dtype: torch.dtype | None) -> nn.Module:
    """A copy of the model with the values of `graph`, in `dtype`."""
    first = next(model.parameters(), None)
    twin = copy.deepcopy(model)
    if first is not None and first.is_meta:
        twin = twin.to_empty(device="cpu")
        _retie(model, twin)
        named = dict(twin.named_parameters()) | dict(twin.named_buffers())
        with torch.no_grad():
            for name, tensor in named.items():
                if name in graph.tensors:
                    tensor.copy_(graph.tensors[name])
    return twin if dtype is None else lifted_copy(twin, dtype)


def _retie(model: nn.Module, twin: nn.Module) -> None:
    """Share in `twin` the parameters that `model` shares (`to_empty` separates them)."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            owner, _, leaf = name.rpartition(".")
            setattr(twin.get_submodule(owner), leaf, twin.get_parameter(known))


def _piece(graph: Graph, batch: Mapping[str, torch.Tensor], i: int) -> dict[str, torch.Tensor]:
    """The tensors of micro-batch `i` by key."""
    return {
        item.key: batch[item.key].narrow(0, i * item.shape[0], item.shape[0])
        if item.shape
        else batch[item.key]
        for item in graph.inputs
    }


def _errors(reference: Outcome, found: Outcome) -> Errors:
    """How far the ranks are from the model."""
    dtype = reference.loss.dtype
    trained = reference.gradients.keys()
    gradients = dict(_differences(reference.gradients, found.gradients, trained))
    named = {name: found.state[name] for name in reference.state if name in found.state}
    state = dict(_differences(reference.state, named, trained))
    loss = _relative(reference.loss, found.loss, 0.0)
    everything = {**state, **gradients}
    worst = max(everything, key=lambda name: everything[name], default="")
    return Errors(
        dtype=str(dtype).removeprefix("torch."),
        loss=loss,
        gradient=max(gradients.values(), default=0.0),
        parameter=max(state.values(), default=0.0),
        worst=worst,
        bitwise=not any((loss, *everything.values())),
        limit=limit_of(dtype),
    )


def limit_of(dtype: torch.dtype) -> float:
    """The largest relative error that rounding may explain."""
    return LIMIT.get(dtype, 2e-2)


def _differences(
    wanted: Mapping[str, torch.Tensor],
    found: Mapping[str, torch.Tensor],
    trained: Collection[str],
) -> Iterator[tuple[str, float]]:
    """The relative error of each tensor; infinite where one side has none.

    Rounding is measured by the `trained` ones: buffers hold masks of -1e9 and the like.
    """
    sizes = [(_size(wanted[name]), wanted[name].dtype) for name in trained if name in wanted]
    largest, dtype = max(sizes, key=lambda item: item[0], default=(0.0, torch.float64))
    floor = ROUNDINGS * torch.finfo(dtype).eps * largest / limit_of(dtype)
    for name in sorted(wanted.keys() | found.keys()):
        if name in wanted and name in found:
            yield name, _relative(wanted[name], found[name], floor)
        elif _size(wanted.get(name, found.get(name))) > 0.0:
            yield name, float("inf")


def _size(tensor: torch.Tensor | None) -> float:
    """The largest element, in magnitude."""
    return float(_wide(tensor).abs().max()) if tensor is not None and tensor.numel() else 0.0


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor (also of truth values) in the widest dtype of its kind."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _relative(wanted: torch.Tensor, found: torch.Tensor, floor: float) -> float:
    """The largest difference over the largest element, or over `floor` where that is larger."""
    if wanted.shape != found.shape:
        return float("inf")
    if not wanted.numel() or torch.equal(wanted, found.to(wanted.dtype)):
        return 0.0
    difference = (_wide(wanted) - _wide(found)).abs().max()
    scale = max(_size(wanted), floor)
    return float(difference) / scale if scale and difference.isfinite() else float("inf")
