"""The original model in one process, which programs are compared with.

`accumulated` is a synchronous step as a user would write it: micro-batch after micro-batch, the
gradients of the mean of their losses, then gradient descent.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import nn

from parcompiler.batches import piece
from parcompiler.capture.inputs import with_tensors
from parcompiler.capture.lift import lifted_copy, lifting
from parcompiler.capture.loss import WithLoss
from parcompiler.capture.narrow import in_float32, mixed, narrowed
from parcompiler.graph import Graph
from parcompiler.pool import Outcome
from parcompiler.runtime.chance import Chance

if TYPE_CHECKING:
    from parcompiler.program import Program


class Original:
    """A copy of the model that `program` was compiled from, in `dtype`, and its losses.

    Where that is 16 bits with `masters` in float32, these have the gradients of the 16-bit
    parameters, which are those of the loss times `scale`, divided by it.
    """

    def __init__(
        self, program: Program, seed: int, dtype: torch.dtype | None, scale: float = 1.0
    ) -> None:
        assert program.model is not None
        self.graph = program.problem.graph
        self.narrow = self.graph.narrow
        self.scale = scale
        self.model = _twin(program.model, self.graph, None if self.narrow else dtype)
        self.masters = dict(self.model.named_parameters())
        loss = program.loss
        if self.narrow is not None:
            self.model = narrowed(self.model, self.narrow)
            loss = in_float32(loss)
        self.parameters = dict(self.model.named_parameters())
        self._whole = WithLoss(self.model, loss)
        self._seed, self._dtype = seed, dtype
        floating = (p.dtype for p in program.model.parameters() if p.is_floating_point())
        self._own = program.captured.narrow or next(floating, torch.float32)

    def computing(self) -> AbstractContextManager[None]:
        """Within it, the model computes in its precision, forwards and backwards."""
        if self.narrow is not None:
            return mixed(self.narrow)
        return nullcontext() if self._dtype is None else lifting(self._dtype, self._own)

    def loss(self, batch: Mapping[str, torch.Tensor], i: int) -> torch.Tensor:
        """The loss of micro-batch `i`."""
        args, kwargs = with_tensors(self.graph.sample, piece(self.graph, batch, i))
        with Chance(self._seed, i) if self.graph.random else nullcontext():
            loss: torch.Tensor = self._whole(*args, **kwargs)
        return loss

    def state(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name."""
        tensors = self.masters | dict(self.model.named_buffers())
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients that backwards have left, by name; masters have them from now on."""
        for name, parameter in self.parameters.items():
            if self.narrow is not None and parameter.grad is not None:
                kind = self.masters[name].dtype
                self.masters[name].grad = parameter.grad.to(kind) / self.scale
        named = self.masters.items()
        return {n: p.grad.clone() for n, p in named if p.grad is not None}

    def descended(self, rate: float) -> dict[str, torch.Tensor]:
        """The state after a step of gradient descent."""
        trainable = [p for p in self.masters.values() if p.requires_grad]
        if trainable:
            torch.optim.SGD(trainable, lr=rate).step()
        return self.state()

    def buffers(self) -> dict[str, torch.Tensor]:
        """Copies of the buffers by name."""
        return {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    def set_buffers(self, values: Mapping[str, torch.Tensor]) -> None:
        """Give the buffers the values of earlier copies."""
        for name, buffer in self.model.named_buffers():
            if name in values:
                buffer.copy_(values[name])


def accumulated(
    original: Original, batch: Mapping[str, torch.Tensor], count: int, rate: float, ranks: int = 1
) -> Outcome:
    """One step on `count` micro-batches: mean loss, its gradients, and the state after descent.

    They belong to so many data `ranks`, each with as many after the other. Each begins with the
    buffers of the model, and those of the first are the state's.
    """
    losses = []
    before = original.buffers() if ranks > 1 else {}
    first: dict[str, torch.Tensor] = {}
    for i in range(count):
        if i and i % (count // ranks) == 0:
            first = first or original.buffers()
            original.set_buffers(before)
        with original.computing():
            loss = original.loss(batch, i)
            torch.autograd.backward(loss, torch.full_like(loss, original.scale / count))
        losses.append(loss.detach())
    original.set_buffers(first)
    mean = torch.stack(losses).mean()
    gradients = original.gradients()
    return Outcome(mean.reshape(1), gradients, original.descended(rate), original.scale)


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
