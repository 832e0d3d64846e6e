"""The original model in one process, which programs are compared with.

`accumulated` is a synchronous step as a user would write it: micro-batch after micro-batch, the
gradients of the mean of their losses, then a step of the optimizer. What runs is the user's own
module with all that hangs on it (hooks, attributes, code that a copy might miss), which is left as
it was; a model on the meta device has no values, and a copy of it is given some.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from parcompiler.batches import piece
from parcompiler.capture.inputs import with_tensors
from parcompiler.capture.lift import lifted, lifting
from parcompiler.capture.loss import PREFIX, WithLoss
from parcompiler.capture.narrow import mixed, narrowed
from parcompiler.capture.untouched import untouched
from parcompiler.graph import Graph
from parcompiler.pool import Outcome
from parcompiler.runtime.chance import Chance

if TYPE_CHECKING:
    from parcompiler.program import Program

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Original:
    """The model that `program` was compiled from, in `dtype`, and its losses.

    It may be used within a `with` block, after which the model is as it was before. Gradients are
    those of the loss times `scale`, divided by it. Where the program is in 16 bits with masters in
    float32, `masters` have those of the 16-bit parameters.
    """

    def __init__(
        self, program: Program, seed: int, dtype: torch.dtype | None, scale: float = 1.0
    ) -> None:
        assert program.model is not None
        self.graph = program.problem.graph
        self.narrow = self.graph.narrow
        self.scale = scale
        self.whole = WithLoss(program.model, program.loss, in_float32=self.narrow is not None)
        self._seed, self._dtype = seed, dtype
        floating = (p.dtype for p in program.model.parameters() if p.is_floating_point())
        self._own = program.captured.narrow or next(floating, torch.float32)
        self._stack = ExitStack()

    def __enter__(self) -> Original:
        """Give the model values in its precision."""
        if any(t.is_meta for t in (*self.whole.parameters(), *self.whole.buffers())):
            self.whole = _materialised(self.whole, self.graph)
        masters = {}
        if self.narrow is not None:
            dtype = narrowed(self.whole, self.narrow)
            masters = {
                name: nn.Parameter(parameter.detach().to(torch.float32, copy=True))
                for name, parameter in _named(self.whole.named_parameters())
                if parameter.requires_grad and dtype(parameter) == self.narrow
            }
        elif self._dtype is not None:
            dtype = lifted(self._dtype)
        else:
            dtype = lambda tensor: tensor.dtype  # noqa: E731
        self._stack.enter_context(untouched(self.whole, dtype))
        self.parameters = dict(_named(self.whole.named_parameters()))
        self.masters = self.parameters | masters
        self._buffers = [name for name, _ in _named(self.whole.named_buffers())]
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the model as it was."""
        self._stack.close()

    def computing(self) -> AbstractContextManager[None]:
        """Within it, the model computes in its precision, forwards and backwards."""
        if self.narrow is not None:
            return mixed(self.narrow)
        return nullcontext() if self._dtype is None else lifting(self._dtype, self._own)

    def loss(self, batch: Mapping[str, torch.Tensor], i: int) -> torch.Tensor:
        """The loss of micro-batch `i`."""
        args, kwargs = with_tensors(self.graph.sample, piece(self.graph, batch, i))
        with Chance(self._seed, i) if self.graph.random else nullcontext():
            loss: torch.Tensor = self.whole(*args, **kwargs)
        return loss

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of the parameters and of the buffers that the model had before it ran, by name.

        (What a forward registers as it goes, a program computes in every forward.)
        """
        named = dict(_named(self.whole.named_buffers()))
        tensors = self.masters | {name: named[name] for name in self._buffers if name in named}
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Within it hooks of parameters do not run; at its end they do, on the whole gradients.

        Then gradients are divided by the scale, but for those that masters take in float32.
        """
        hooked = [(p, p._backward_hooks) for p in self.parameters.values() if p._backward_hooks]
        kept = [dict(hooks) for _, hooks in hooked]
        for _, hooks in hooked:
            hooks.clear()
        try:
            yield
        finally:
            for (_, hooks), own in zip(hooked, kept, strict=True):
                hooks.update(own)
        for parameter in self.parameters.values():
            if self.narrow is None and parameter.grad is not None:
                parameter.grad /= self.scale
        for parameter, _ in hooked:
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                torch.autograd.backward(parameter, gradient)

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients that backwards have left, by name; masters have them from now on."""
        for name, parameter in self.parameters.items():
            if self.narrow is not None and parameter.grad is not None:
                kind = self.masters[name].dtype
                self.masters[name].grad = parameter.grad.to(kind) / self.scale
        named = self.masters.items()
        return {n: p.grad.clone() for n, p in named if p.grad is not None}

    def stepped(self, optimizer: Optimizer) -> dict[str, torch.Tensor]:
        """The state after a step of an optimizer."""
        trained = [p for p in self.masters.values() if p.requires_grad]
        if trained:
            optimizer(trained).step()
        return self.state()

    def updated(self) -> dict[str, torch.Tensor]:
        """Copies of what forwards update themselves, by name: running statistics, a teacher."""
        names = {item.name for item in self.graph.parameters if item.mutated}
        return {n: t.detach().clone() for n, t in self._tensors().items() if n in names}

    def set_values(self, values: Mapping[str, torch.Tensor]) -> None:
        """Give tensors the values of earlier copies."""
        tensors = self._tensors()
        with torch.no_grad():
            for name, value in values.items():
                tensors[name].copy_(value)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name."""
        return self.parameters | dict(_named(self.whole.named_buffers()))


def accumulated(
    original: Original,
    batch: Mapping[str, torch.Tensor],
    count: int,
    optimizer: Optimizer,
    ranks: int = 1,
) -> Outcome:
    """One step on `count` micro-batches: mean loss, its gradients, and the state after the step.

    They belong to so many data `ranks`, each with as many after the other. Each begins with the
    buffers of the model, and those of the first are the state's. Hooks of parameters see the
    gradients of the mean loss, as if one backward had made them.
    """
    losses = []
    before = original.updated() if ranks > 1 else {}
    first: dict[str, torch.Tensor] = {}
    with original.accumulating():
        for i in range(count):
            if i and i % (count // ranks) == 0:
                first = first or original.updated()
                original.set_values(before)
            with original.computing():
                loss = original.loss(batch, i)
                torch.autograd.backward(loss, torch.full_like(loss, original.scale / count))
            losses.append(loss.detach())
    original.set_values(first)
    mean = torch.stack(losses).mean()
    gradients = original.gradients()
    return Outcome(mean.reshape(1), gradients, original.stepped(optimizer), original.scale)


def _named(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, Any]]:
    """The same under the names of the model."""
    return ((name.removeprefix(PREFIX), tensor) for name, tensor in tensors)


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


def _materialised(whole: WithLoss, graph: Graph) -> WithLoss:
    """A copy of a model on the meta device with the values of `graph`."""
    twin = copy.deepcopy(whole).to_empty(device="cpu")
    _retie(whole, twin)
    with torch.no_grad():
        for name, tensor in _named((*twin.named_parameters(), *twin.named_buffers())):
            if name in graph.tensors:
                tensor.copy_(graph.tensors[name])
    return twin


def _retie(model: nn.Module, twin: nn.Module) -> None:
    """Share in `twin` the parameters that `model` shares (`to_empty` separates them)."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            owner, _, leaf = name.rpartition(".")
            setattr(twin.get_submodule(owner), leaf, twin.get_parameter(known))
