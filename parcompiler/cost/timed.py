"""What a block takes on a real device: its nodes run on tensors with data, as a stage runs them.

Only distinct templates are timed, each for a fraction of a second, and only one is in memory at a
time. What ranks exchange is left out: there are no other ranks. `times` adds it.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from parcompiler.cost.execution import entered, outside
from parcompiler.cost.stand_in import is_differentiable, tensors
from parcompiler.spmd.exchange import is_conversion

Clock = Callable[[], float]  # seconds

SECONDS = 0.5  # of measuring a block, if its forward and backward are short
FEWEST, MOST = 3, 30  # samples
WARM = 2  # runs before: they allocate memory and choose kernels


@dataclass(frozen=True, slots=True)
class BlockTime:
    """Medians in s of one micro-batch: `forward`, and `backward` with the sums into gradients."""

    forward: float
    backward: float


@dataclass(frozen=True)
class Timed:
    """A block that can be run: what its nodes read, with data.

    `high` has, for nodes that are integers of the batch, the number they are below; other integers
    are zeros. `buffers` are also the parameters that are not trained.
    """

    nodes: Sequence[fx.Node]
    outputs: Sequence[fx.Node]
    parameters: Collection[str]
    buffers: Collection[str]
    differentiable: Collection[str]
    high: Mapping[str, int]
    device: torch.device
    received: dict[fx.Node, Any] = field(default_factory=dict)
    held: dict[fx.Node, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make what is read from outside."""
        generator = torch.Generator().manual_seed(0)
        for node in outside(self.nodes):
            high = self.high.get(node.name, 1)
            make = partial(self._made, high=high, generator=generator)
            value: Any = map_aggregate(node.meta.get("val"), make)
            if node.name in self.parameters and is_differentiable(value):
                value.requires_grad_()
            own = node.name in self.parameters or node.name in self.buffers
            (self.held if own or node.op == "get_attr" else self.received)[node] = value

    def forward(self) -> dict[fx.Node, Any]:
        """Run the nodes; those of the outputs that carry gradients."""
        values = self.held | {
            node: self._source(node, value) for node, value in self.received.items()
        }
        with torch.enable_grad():
            _run(self.nodes, values, self.device)
        return {node: values[node] for node in self.outputs if node.name in self.differentiable}

    def backward(self, found: Mapping[fx.Node, Any]) -> None:
        """Run the backward of what `forward` gave; gradients add up in the parameters."""
        roots = [t for value in found.values() for t in tensors(value) if t.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])

    def _source(self, node: fx.Node, value: Any) -> Any:
        """A received value: a leaf of the gradient that may be updated in place."""
        if node.name not in self.differentiable:
            return value
        return map_aggregate(value, _received)

    def _made(self, like: Any, high: int, generator: torch.Generator) -> Any:
        """A tensor with the shape, strides and dtype of `like`; integers are below `high`."""
        if not isinstance(like, torch.Tensor):
            return like
        shape, strides = list(map(int, like.shape)), list(map(int, like.stride()))
        made = torch.empty_strided(shape, strides, dtype=like.dtype, device=self.device)
        if is_differentiable(like):
            with torch.no_grad():
                made.copy_(torch.randn(shape, generator=generator).mul_(0.1))
        elif like.dtype == torch.bool:
            made.fill_(True)
        else:
            made.copy_(torch.randint(high, shape, generator=generator))
        return made


def time_block(block: Timed, seconds: float = SECONDS) -> BlockTime:
    """Run a block's forward and backward in turn for about `seconds` s; the medians.

    Raises whatever an operator raises that cannot run with such data.
    """

    def sample(clock: Clock) -> tuple[float, float]:
        start = clock()
        found = block.forward()
        middle = clock()
        block.backward(found)
        return middle - start, clock() - middle

    forward, backward = medians(sample, block.device, seconds)
    return BlockTime(forward, backward)


def medians(
    sample: Callable[[Clock], Sequence[float]], device: torch.device, seconds: float = SECONDS
) -> tuple[float, ...]:
    """The medians of what `sample` measures by the clock it is given, again for about so long."""
    with _alone(device) as clock:
        for _ in range(WARM):
            sample(clock)
        samples: list[Sequence[float]] = []
        end = time.perf_counter() + seconds
        while len(samples) < FEWEST or (len(samples) < MOST and time.perf_counter() < end):
            samples.append(sample(clock))
    return tuple(map(statistics.median, zip(*samples, strict=True)))


@contextmanager
def _alone(device: torch.device) -> Iterator[Clock]:
    """Without garbage collection, and on a CPU with the one thread that torchrun gives a rank.

    Yields a clock: the CPU time of that thread, which others on the machine do not add to, or the
    time when a GPU is done.
    """
    threads, collecting = torch.get_num_threads(), gc.isenabled()
    gc.disable()
    try:
        if device.type == "cuda":
            yield lambda: _done(device)
        else:
            torch.set_num_threads(1)
            yield time.thread_time
    finally:
        torch.set_num_threads(threads)
        if collecting:
            gc.enable()


def _done(device: torch.device) -> float:
    torch.cuda.synchronize(device)
    return time.perf_counter()


def _run(nodes: Iterable[fx.Node], values: dict[fx.Node, Any], device: torch.device) -> None:
    """Run the nodes in order, each context entered once for those that stand in it."""

    def given(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return values[argument]
        return device if isinstance(argument, torch.device) else argument

    for contexts, run in groupby(nodes, key=lambda node: node.meta.get("contexts", ())):
        with entered(contexts):
            for node in run:
                args, kwargs = map_aggregate((node.args, node.kwargs), given)
                if is_conversion(node):
                    (value,) = tensors(args)
                    values[node] = _Converted.apply(value, node.meta["val"])  # type: ignore[no-untyped-call]
                else:
                    assert callable(node.target), f"{node.format_node()} is no operator"
                    values[node] = node.target(*args, **kwargs)


def _received(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not is_differentiable(value):
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
    """The other placement of a value, without what is exchanged for it."""

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
