"""The original model in one process, which programs are compared with.

`accumulated` is a synchronous step as a user would write it: micro-batch after micro-batch, the
gradients of the mean of their losses, then a step of the optimizer. It runs the user's own module,
with everything that a copy might miss (hooks, attributes, code), and restores it; for a model on
the meta device, a copy with values.

`reenacted` is PipeDream in one process: stages are updated as late as on the ranks. The list of a
stage tells how many updates precede the forward of each micro-batch. For p = 2:

    stage 0   F0 F1 B0 U0 F2 B1 U1 F3 ...      before F2: U0
    stage 1   F0 B0 U0 F1 B1 U1 F2 ...         before F2: U0 U1

So when the whole model runs on micro-batch 2, stage 0 has been updated with the gradients of
micro-batch 0, and stage 1 with those of 0 and 1; for stage 0 those of micro-batch 1 wait. This
gives the same result as weight stashing (1806.03377, section 3.3), without ranks or versions.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

from parcompiler.capture.caches import own_caches
from parcompiler.capture.inputs import with_tensors
from parcompiler.capture.lift import lifted, lifting
from parcompiler.capture.loss import PREFIX, WithLoss
from parcompiler.capture.modes import in_modes
from parcompiler.capture.narrow import mixed, narrowed
from parcompiler.capture.patches import CHECKPOINTING, patched
from parcompiler.capture.untouched import Attributes, untouched
from parcompiler.errors import InputError
from parcompiler.graph import Graph, Modes
from parcompiler.instruction import Instruction, Kind
from parcompiler.lower import Lowered
from parcompiler.problem import Problem
from parcompiler.report import Report
from parcompiler.runtime.rng import SeededDraws
from parcompiler.verification.batches import piece
from parcompiler.verification.pool import Outcome

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Compiled(Protocol):
    """The part of a `Program` that verification uses; the program itself imports verification."""

    @property
    def model(self) -> nn.Module | None: ...
    @property
    def loss(self) -> Callable[[Any], torch.Tensor] | None: ...
    @property
    def captured(self) -> Graph: ...
    @property
    def problem(self) -> Problem: ...
    @property
    def lowered(self) -> Lowered: ...
    def on(self, graph: Graph) -> Compiled: ...
    def with_lowered(self, lowered: Lowered) -> Compiled: ...
    def report(self, *, meshes: bool) -> Report: ...
    def write(self, path: Path, report: Report | None) -> Path: ...


class Original:
    """The model that `program` was compiled from, in `dtype`, and its losses.

    Used in a `with` block, after which the model is restored. Gradients are those of the loss times
    `scale`, divided by it. `masters` are the float32 masters in a 16-bit program, else the
    parameters. With `nudged`, weights and gradients between modules are moved by one rounding.
    """

    def __init__(
        self,
        program: Compiled,
        seed: int,
        dtype: torch.dtype | None,
        scale: float = 1.0,
        *,
        nudged: bool = False,
    ) -> None:
        assert program.model is not None
        self.graph = program.problem.graph
        self.narrow = self.graph.narrow
        self.scale = scale
        self.whole = WithLoss(program.model, program.loss, in_float32=self.narrow is not None)
        self._seed, self._dtype, self._nudged = seed, dtype, nudged
        floating = (p.dtype for p in program.model.parameters() if p.is_floating_point())
        self._compiled_dtype = program.captured.narrow or next(floating, torch.float32)
        self._stack = ExitStack()
        self._sums: dict[str, torch.Tensor] = {}  # of 16-bit gradients, in float32

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
        self._stack.enter_context(own_caches(self.whole))
        self.parameters = dict(_named(self.whole.named_parameters()))
        if self._nudged:
            self._nudge()
        self.masters = self.parameters | masters
        self._buffers = [name for name, _ in _named(self.whole.named_buffers())]
        self._attributes = Attributes(self.whole)
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the model as it was."""
        self._stack.close()

    def _nudge(self) -> None:
        """Move all weights, and gradients between modules, by one rounding, randomly up or down;
        16-bit weights are exact and stay."""
        generator = torch.Generator().manual_seed(self._seed)

        def nudged(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point():
                return tensor
            up = torch.rand(tensor.shape, generator=generator) < 0.5
            limits = torch.where(up, torch.inf, -torch.inf).to(tensor.dtype)
            return torch.nextafter(tensor.detach(), limits)

        def on_gradients(module: nn.Module, args: object, output: object) -> None:
            for value in pytree.tree_leaves(output):
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    value.register_hook(nudged)

        for module in self.whole.modules():
            self._stack.callback(module.register_forward_hook(on_gradients).remove)
        if self.narrow is None:
            self.set_values({name: nudged(p) for name, p in self.parameters.items()})

    def computing(self) -> AbstractContextManager[None]:
        """In this context, the model computes in its precision, forwards and backwards."""
        if self.narrow is not None:
            return mixed(self.narrow)
        return nullcontext() if self._dtype is None else lifting(self._dtype, self._compiled_dtype)

    def loss(self, batch: Mapping[str, torch.Tensor], i: int) -> torch.Tensor:
        """The loss of micro-batch `i`."""
        args, kwargs = with_tensors(self.graph.sample, piece(self.graph, batch, i))
        with self._draws(i) if self.graph.random else nullcontext():
            loss: torch.Tensor = self.whole(*args, **kwargs)
        return loss if self.graph.counts is None else loss * self._weight(batch, i)

    @contextmanager
    def _draws(self, i: int) -> Iterator[None]:
        """In this context, micro-batch `i` draws as on the ranks, and checkpointed parts draw the
        same in the backward."""
        repeated = getattr(checkpoint, CHECKPOINTING)

        def repeating(function: Callable[..., Any], *options: Any, **arguments: Any) -> Any:
            resumed = draws.resumed()

            def again(*args: Any, **kwargs: Any) -> Any:
                with resumed.resumed():
                    return function(*args, **kwargs)

            return repeated(again, *options, **arguments)

        patch = patched(checkpoint, **{CHECKPOINTING: repeating})
        with patch, SeededDraws(self._seed, i) as draws:
            yield

    def _weight(self, batch: Mapping[str, torch.Tensor], i: int) -> float:
        """The factor for the loss of micro-batch `i` with which the mean over micro-batches becomes
        the mean over all their targets."""
        assert self.graph.counts is not None
        module = fx.GraphModule(nn.Module(), self.graph.counts)
        read = [node.name for node in self.graph.counts.nodes if node.op == "placeholder"]
        keys = {item.node: item for item in self.graph.inputs}
        number = len(batch[keys[read[0]].key]) // keys[read[0]].shape[0]
        pieces = [piece(self.graph, batch, k) for k in range(number)]
        counts = [int(module(*(each[keys[name].key] for name in read))) for each in pieces]
        return counts[i] * number / sum(counts)

    def evaluation(
        self, batch: Mapping[str, torch.Tensor], numbers: Sequence[int]
    ) -> torch.Tensor | None:
        """The mean loss of some micro-batches in evaluation mode. None if the model has no such
        loss, or draws random numbers for it. The model is afterwards as before."""
        pieces = [piece(self.graph, batch, i) for i in numbers]
        some = dict(batch)
        for spec in self.graph.inputs:
            if spec.shape:
                some[spec.key] = torch.cat([each[spec.key] for each in pieces])
        names = tuple(name for name, _ in self.whole.named_modules())
        buffers = {n: t.clone() for n, t in _named(self.whole.named_buffers())}
        before, losses = buffers | self.updated(), list[torch.Tensor]()
        draws = SeededDraws(self._seed, 0)
        counted = draws if self.graph.random else nullcontext()
        try:
            for k in range(len(pieces)):
                self.begin(before)
                with in_modes(self.whole, Modes(names)), self.computing(), torch.no_grad(), counted:
                    losses.append(self.loss(some, k))
            return None if draws.counts.total() else torch.stack(losses).mean()
        except Exception:  # a user's model may raise anything
            return None
        finally:
            self._attributes.restore()
            self.set_values(before)

    def backward(
        self, batch: Mapping[str, torch.Tensor], numbers: Iterable[int], count: int
    ) -> list[torch.Tensor]:
        """Add the gradients of some micro-batches, each divided by `count`. Returns their
        losses."""
        losses = []
        for i in numbers:
            with self.computing():
                loss = self.loss(batch, i)
                torch.autograd.backward(loss, torch.full_like(loss, self.scale / count))
            _make_whole(self.parameters.values())
            self._add_up()
            losses.append(loss.detach())
        return losses

    def _add_up(self) -> None:
        """Move 16-bit gradients from parameters to their sums in float32."""
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter and parameter.grad is not None:
                gradient, parameter.grad = parameter.grad.to(torch.float32), None
                self._sums[name] = self._sums[name] + gradient if name in self._sums else gradient

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of the parameters and of the buffers that the model had before it ran, by name.

        (Buffers that a forward registers are computed in every forward of a program.)
        """
        named = dict(_named(self.whole.named_buffers()))
        tensors = self.masters | {name: named[name] for name in self._buffers if name in named}
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """In this context, hooks of parameters do not run; at its end they run on the whole
        gradients.

        Then gradients are divided by the scale, except for those that masters take in float32.
        """
        named = self.parameters.items()
        hooked = [(n, p, p._backward_hooks) for n, p in named if p._backward_hooks]
        saved = [dict(hooks) for *_, hooks in hooked]
        for *_, hooks in hooked:
            hooks.clear()
        try:
            yield
        finally:
            for (*_, hooks), before in zip(hooked, saved, strict=True):
                hooks.update(before)
        for parameter in self.parameters.values():
            if self.narrow is None and parameter.grad is not None:
                parameter.grad /= self.scale
        self._add_up()
        for name, parameter, _ in hooked:
            gradient, parameter.grad = self._sums.pop(name, parameter.grad), None
            if gradient is not None:
                torch.autograd.backward(parameter, gradient.to(parameter.dtype))

    def gradients(self) -> dict[str, torch.Tensor]:
        """The accumulated gradients by name; moves them to the masters."""
        if self.narrow is not None:
            for name, gradient in self.take_gradients().items():
                self.masters[name].grad = gradient / self.scale
        named = self.masters.items()
        return {n: p.grad.clone() for n, p in named if p.grad is not None}

    def set_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Replace the accumulated gradients; those of 16-bit parameters are sums in float32."""
        self._sums = {}
        for name, parameter in self.parameters.items():
            parameter.grad, gradient = None, gradients.get(name)
            if gradient is not None and self.masters[name] is not parameter:
                self._sums[name] = gradient
            elif gradient is not None:
                parameter.grad = gradient

    def take_gradients(self) -> dict[str, torch.Tensor]:
        """Take the accumulated gradients from the parameters, by name; those of 16-bit parameters
        are sums in float32."""
        self._add_up()
        gradients = {
            n: p.grad for n, p in self.parameters.items() if p.grad is not None
        } | self._sums
        self._sums = {}
        for parameter in self.parameters.values():
            parameter.grad = None
        return gradients

    def stepped(self, optimizer: Optimizer) -> dict[str, torch.Tensor]:
        """The state after a step of an optimizer."""
        trained = [p for p in self.masters.values() if p.requires_grad]
        if trained:
            optimizer(trained).step()
        return self.state()

    def updated(self) -> dict[str, torch.Tensor]:
        """Copies of tensors that forwards update, by name: running statistics, a teacher."""
        names = {item.name for item in self.graph.parameters if item.mutated}
        return {n: t.detach().clone() for n, t in self._tensors().items() if n in names}

    @torch.no_grad()
    def set_masters(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set masters, and the parameters that have masters."""
        for name, value in values.items():
            self.masters[name].copy_(value)
            if self.masters[name] is not self.parameters[name]:
                self.parameters[name].copy_(value)

    def set_values(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set tensors to the values of earlier copies."""
        tensors = self._tensors()
        with torch.no_grad():
            for name, value in values.items():
                tensors[name].copy_(value)

    def begin(self, values: Mapping[str, torch.Tensor]) -> None:
        """Start a data rank: tensors that forwards update get these values, and attributes are
        restored (they may say that a table in a buffer has been made)."""
        if values:
            self._attributes.restore()
            self.set_values(values)

    def in_turn(self, ranks: int) -> Iterator[int]:
        """Data ranks, one after another: each begins with the model's buffers, and those of the
        first remain."""
        first = before = self.updated() if ranks > 1 else {}
        for r in range(ranks):
            self.begin(before)
            yield r
            first = self.updated() if before and r == 0 else first
        self.set_values(first)

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

    They belong to `ranks` data ranks in turn, equally many to each. Hooks of parameters see the
    gradients of the mean loss, as from one backward.
    """
    losses, each = list[torch.Tensor](), count // ranks
    with original.accumulating():
        for r in original.in_turn(ranks):
            losses += original.backward(batch, range(r * each, (r + 1) * each), count)
    mean = torch.stack(losses).mean()
    gradients = original.gradients()
    return Outcome(mean.reshape(1), gradients, original.stepped(optimizer), original.scale)


def reenacted(
    original: Original,
    lowered: Lowered,
    batches: Iterable[Mapping[str, torch.Tensor]],
    optimizer: Optimizer,
) -> Outcome:
    """Steps of an asynchronous program, one on each batch: their mean losses, and the state after.

    Each micro-batch is a minibatch, with the gradient of its own loss.
    """
    stages = [
        _AsynchronousStage(original, lowered, j, optimizer) for j in range(len(lowered.stages))
    ]
    means = []
    for batch in batches:
        losses = []
        for stage in stages:
            stage.start()
        for i in range(lowered.microbatches):
            for stage in stages:
                stage.update_before(i)
            with original.computing():
                loss = original.loss(batch, i)
                torch.autograd.backward(loss)
            losses.append(loss.detach())
            for stage in stages:
                stage.keep_gradients(i)
        for stage in stages:
            stage.update_before(lowered.microbatches)
        means.append(torch.stack(losses).mean())
    return Outcome(torch.stack(means), {}, original.state())


class _AsynchronousStage:
    """The part of the model on one stage, and the updates in its list."""

    def __init__(self, original: Original, lowered: Lowered, j: int, optimizer: Optimizer) -> None:
        named = [original.parameters.get(name) for name in lowered.stages[j].tensors]
        self._parameters = [p for p in named if p is not None and p.requires_grad]
        self._optimizer = optimizer(self._parameters) if self._parameters else None
        lines, kinds = lowered.instructions[lowered.stages[j].rank], (Kind.FORWARD, Kind.UPDATE)
        self._lines = [line for line in lines if line.stage == j and line.kind in kinds]
        self._pending: deque[Instruction] = deque()
        self._gradients: dict[int | None, list[torch.Tensor | None]] = {}  # by micro-batch

    def start(self) -> None:
        """Begin a step."""
        self._pending = deque(self._lines)

    def update_before(self, i: int) -> None:
        """Make the updates that precede the forward of micro-batch `i`, or all remaining ones."""
        while self._pending:
            line = self._pending.popleft()
            if line.kind is Kind.UPDATE:
                self._update(line.microbatch)
            elif line.microbatch == i:
                return
            else:
                message = f"'{line}' stands where micro-batch {i} is due: it has no re-enactment"
                raise InputError(message)

    def keep_gradients(self, i: int) -> None:
        """Take the gradients of micro-batch `i` from the parameters, until its update."""
        _make_whole(self._parameters)
        self._gradients[i] = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def _update(self, i: int | None) -> None:
        """One step of the optimizer."""
        for parameter, gradient in zip(self._parameters, self._gradients.pop(i), strict=True):
            parameter.grad = gradient
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)


def _make_whole(parameters: Iterable[nn.Parameter]) -> None:
    """Make sparse gradients, of lookups with sparse=True, dense."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()


def _named(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, Any]]:
    """Tensors under their names in the user's model, without the prefix of `WithLoss`."""
    return ((name.removeprefix(PREFIX), tensor) for name, tensor in tensors)


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
    first: dict[int, str] = {}
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:  # shared in the model; `to_empty` has separated them
            owner, _, leaf = name.rpartition(".")
            setattr(twin.get_submodule(owner), leaf, twin.get_parameter(known))
    with torch.no_grad():
        for name, tensor in _named((*twin.named_parameters(), *twin.named_buffers())):
            if name in graph.tensors:
                tensor.copy_(graph.tensors[name])
    return twin
