"""Seconds of a template for one micro-batch: by the figures of the device, or measured.

A measured block runs on tensors with data, as a stage runs it. Only distinct templates are timed,
each for a fraction of a second, and only one is in memory at a time. Collectives are left out of
the run, as there are no other ranks, and their time is added by the bench or the model.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx
from torch.fx.node import map_aggregate

from parcompiler.capture.effects import outside
from parcompiler.cost.block import BlockCost
from parcompiler.cost.execution import calls
from parcompiler.cost.operation import EXCHANGE, Operation
from parcompiler.cost.roofline import hidden_seconds, seconds
from parcompiler.device import Device
from parcompiler.errors import InputError
from parcompiler.graph import Block, Graph, NodeRoles, is_floating, tensors_of
from parcompiler.mesh import Mesh
from parcompiler.plan import TemplateTime, VocabularyTime
from parcompiler.spmd.runtime_call import is_conversion
from parcompiler.temporary import threads, uncollected

Clock = Callable[[], float]  # seconds

SECONDS = 0.5  # to measure a block, if its forward and backward are short
FEWEST, MOST = 3, 30  # least and most samples
WARM = 2  # warm-up runs, which allocate memory and choose kernels


class RunningBlock(Protocol):
    """A block that can be run on a device: the forward, and the backward from its outputs."""

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        ...

    def forward(self) -> Any: ...

    def backward(self, outputs: Any) -> None: ...


class Bench(Protocol):
    """Runs blocks on this machine for measured `costs`; `bench.local` implements it."""

    @property
    def device(self) -> torch.device:
        """Where blocks run."""
        ...

    def prepared(self, block: TimedBlock) -> RunningBlock:
        """A block, ready to run as in a stage."""
        ...

    def exchanged(self, exchanges: Sequence[Operation], between: float) -> float | None:
        """Seconds that a tensor rank spends in `exchanges`, computing for `between` s before each.

        None where this machine cannot run that many ranks at once.
        """
        ...

    def vocabulary(self, graph: Graph, ranks: int, method: str) -> VocabularyTime:
        """Seconds of the passes on one of `ranks` ranks that share the graph's vocabulary."""
        ...


def modelled(name: str, cost: BlockCost, device: Device) -> TemplateTime:
    """The times of the template `name` by the roofline of `device`."""
    return TemplateTime(
        template=name,
        forward=seconds(cost.forward, device),
        backward=seconds(cost.backward, device),
        weight=seconds(cost.weight, device),
        hidden=hidden_seconds(cost.backward, device),
    )


def modelled_on(mesh: Mesh, costs: Mapping[str, BlockCost]) -> list[dict[str, TemplateTime]]:
    """The times of templates, by name: one entry if the mesh has one device, else one per rank."""
    known = {
        device: {name: modelled(name, cost, device) for name, cost in costs.items()}
        for device in set(mesh.devices)
    }
    return [known[device] for device in ([mesh.hardware] if mesh.is_uniform else mesh.devices)]


def measured(
    model: TemplateTime,
    cost: BlockCost,
    block: Block,
    graph: Graph,
    device: Device,
    bench: Bench,
) -> TemplateTime:
    """The times of the template of `block`, measured on `bench`.

    `model` has its modelled times, which give the share of the backward that can be deferred.
    Collectives are modelled by `device` where the bench cannot run them. Raises InputError where
    the block cannot run here.
    """
    # Upper bounds of integers of the batch; where ranks hold pieces, bounds for the smallest piece.
    pieces = max((item.whole.numel // max(1, item.numel) for item in graph.parameters), default=1)
    bounds = {item.node: max(1, item.high // pieces) for item in graph.inputs if item.high}
    timed = TimedBlock(
        nodes=block.nodes,
        outputs=block.outputs,
        roles=graph.roles,
        high=bounds,
        device=bench.device,
    )
    with _explained(repr(block.name)):
        forward, backward = time_block(bench.prepared(timed))
        exchanges = [
            _exchange_seconds(*side, device, bench)
            for side in ((cost.forward, forward), (cost.backward, backward))
        ]
    return TemplateTime(
        template=model.template,
        forward=forward + exchanges[0],
        backward=backward + exchanges[1],
        weight=backward * model.weight / model.backward if model.backward else 0.0,
        hidden=model.hidden,
    )


def measured_vocabulary(graph: Graph, ranks: int, method: str, bench: Bench) -> VocabularyTime:
    """The times of the passes of the graph's vocabulary. Raises InputError as `measured` does."""
    with _explained("the vocabulary"):
        return bench.vocabulary(graph, ranks, method)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """A context in which errors of operators, or of processes that cannot start, name the block."""
    try:
        yield
    except Exception as error:
        message = (
            f"the times of {name} cannot be measured here ({type(error).__name__}: {error}): "
            "take costs='model'"
        )
        raise InputError(message) from error


def _exchange_seconds(
    operations: Iterable[Operation], computed: float, device: Device, bench: Bench
) -> float:
    """Seconds of collectives of tensor ranks among `computed` s of work: measured, or modelled."""
    exchanges = [operation for operation in operations if operation.kind == EXCHANGE]
    if not exchanges:
        return 0.0
    exposed = seconds(exchanges, device)
    taken = bench.exchanged(exchanges, computed / len(exchanges))
    if taken is None:
        return exposed
    return taken * exposed / (exposed + hidden_seconds(exchanges, device))


@dataclass(frozen=True)
class TimedBlock:
    """A block that can be run, with data for the values that its nodes read.

    `high` has exclusive upper bounds for integers of the batch, by node; other integers are zeros.
    """

    nodes: Sequence[fx.Node]
    outputs: Sequence[fx.Node]
    roles: NodeRoles
    high: Mapping[str, int]
    device: torch.device
    received: dict[fx.Node, Any] = field(default_factory=dict)
    state: dict[fx.Node, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make the values that are read from outside."""
        generator, roles = torch.Generator().manual_seed(0), self.roles
        for node in outside(self.nodes):
            high = self.high.get(node.name, 1)
            value: Any = map_aggregate(
                node.meta.get("val"),
                lambda like, high=high: self._filled(like, high, generator),  # type: ignore[misc]
            )
            if node.name in roles.parameters and is_floating(value):
                value.requires_grad_()
            is_state = node.name in roles.parameters or node.name in roles.buffers
            (self.state if is_state or node.op == "get_attr" else self.received)[node] = value

    def values_received(self) -> dict[fx.Node, Any]:
        """The values from other blocks, as leaves of the gradient."""
        carrying = self.roles.differentiable
        return {
            node: map_aggregate(value, _received) if node.name in carrying else value
            for node, value in self.received.items()
        }

    def forward(self) -> list[torch.Tensor]:
        """Run the nodes; the tensors among the outputs that carry gradients."""
        values = self.state | self.values_received()
        self.run(values)
        outputs = (node for node in self.outputs if node.name in self.roles.differentiable)
        return [tensor for node in outputs for tensor in tensors_of(values[node])]

    def run(self, values: dict[fx.Node, Any]) -> None:
        """Run the nodes on `values`, to which their results are added."""
        steps = calls(self.nodes, values, self.device)
        with torch.enable_grad(), closing(steps):  # contexts of nodes end, also at an error
            for node, args, kwargs in steps:
                if is_conversion(node):
                    (value,) = tensors_of(args)
                    values[node] = _Converted.apply(value, node.meta["val"])  # type: ignore[no-untyped-call]
                else:
                    assert callable(node.target)
                    values[node] = node.target(*args, **kwargs)

    def backward(self, outputs: Iterable[torch.Tensor]) -> None:
        """Run the backward of the results of `forward`; gradients add up in the parameters."""
        roots = [tensor for tensor in outputs if tensor.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])

    def _filled(self, like: Any, high: int, generator: torch.Generator) -> Any:
        """A tensor with the shape, strides and dtype of `like`; integers are below `high`."""
        if not isinstance(like, torch.Tensor):
            return like
        shape, strides = list(map(int, like.shape)), list(map(int, like.stride()))
        made = torch.empty_strided(shape, strides, dtype=like.dtype, device=self.device)
        if is_floating(like):
            with torch.no_grad():
                made.copy_(torch.randn(shape, generator=generator).mul_(0.1))
        elif like.dtype == torch.bool:
            made.fill_(True)
        else:
            made.copy_(torch.randint(high, shape, generator=generator))
        return made


def time_block(block: RunningBlock) -> tuple[float, float]:
    """Run a block's forward and backward in turn for about `SECONDS` s; returns the medians in s,
    the backward with the additions to gradients.

    Raises the error of an operator that cannot run with such data.
    """

    def sample(clock: Clock) -> tuple[float, float]:
        start = clock()
        outputs = block.forward()
        middle = clock()
        block.backward(outputs)
        return middle - start, clock() - middle

    forward, backward = medians(sample, block.device)
    return forward, backward


def medians(sample: Callable[[Clock], Sequence[float]], device: torch.device) -> tuple[float, ...]:
    """The medians of the times that `sample` measures by its clock, over about `SECONDS` s.

    Meanwhile there is no garbage collection, and on a CPU one thread, as torchrun gives a rank. The
    clock is the CPU time of that thread, to which other processes do not add, or the time when the
    GPU is done.
    """

    def cuda_clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    clock = cuda_clock if device.type == "cuda" else time.thread_time
    with uncollected(), nullcontext() if device.type == "cuda" else threads(1):
        for _ in range(WARM):
            sample(clock)
        samples: list[Sequence[float]] = []
        end = time.perf_counter() + SECONDS
        while len(samples) < FEWEST or (len(samples) < MOST and time.perf_counter() < end):
            samples.append(sample(clock))
    return tuple(map(statistics.median, zip(*samples, strict=True)))


def _received(value: Any) -> Any:
    """A value with a gradient that may be updated in place, unlike a leaf."""
    if not is_floating(value):
        return value
    return _Received.apply(value.detach().requires_grad_())  # type: ignore[no-untyped-call]


class _Received(torch.autograd.Function):
    """A value of another block: autograd lets it be changed in place, unlike a leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        return None


class _Converted(torch.autograd.Function):
    """A conversion of a value to another placement, without its collectives."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        ctx.like = value
        if value.shape == like.shape:
            return value.view_as(value)
        return value.new_ones([int(size) for size in like.shape])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,), like = gradients, ctx.like
        return gradient if gradient.shape == like.shape else torch.ones_like(like), None
