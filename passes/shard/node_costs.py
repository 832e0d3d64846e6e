"""Seconds of a strategy and of a conversion on one rank, by the roofline model.

A node is traced once, whole, by itself. Under a strategy its arithmetic shrinks to a rank's share
of the split dimension, and its memory traffic to the bytes of the local operands and results: a
product of a whole matrix with a piece of another reads all of the first, and a lookup in a piece of
each row reads at least a cache line. The number of kernels stays. Collectives use the links between
neighbours, which the ranks of the tensor axis are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import fx

from parcompiler.cost import Operation, collective, seconds, trace_block
from parcompiler.cost.collective import RankGroup, neighbours
from parcompiler.cost.tiles import Product
from parcompiler.device import Device
from parcompiler.graph import Graph
from parcompiler.spmd import Placement, Strategy
from parcompiler.spmd.call import NodeCall, Shape, shape_of
from parcompiler.spmd.conversions import BYTES, Action, conversion
from parcompiler.spmd.placement import local_shape
from parcompiler.spmd.special import class_loss_actions, ring_exchange

TABLES = frozenset({"embedding", "embedding_bag", "index_select", "gather", "index"})

LOOKUPS = frozenset({"embedding", "embedding_bag"})
BATCHED = frozenset({"bmm", "matmul"})
MERGING = 5  # kernels that add one step of a ring to the steps before
LINE = 128  # bytes that an accelerator's cache fetches at once

# Of answers with equal time (to a nanosecond) the one with fewer collectives is taken, then the one
# that splits more: seconds of a collective, and of a node that is whole.
COLLECTIVE = 1e-9
WHOLE = 1e-11
# Factor for work that context ranks do not share: the axis is there to hold rows in pieces.
UNSHARED = 100.0


@dataclass(frozen=True, slots=True)
class NodeWork:
    """The kernels of a whole node, and what it saves for its backward.

    `saves` are the operands that it saves, `saves_result` says that it saves its result, and
    `saved_besides` are the bytes of other tensors that it saves.
    """

    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    saves: frozenset[fx.Node]
    saves_result: bool
    saved_besides: int

    @property
    def is_free(self) -> bool:
        """Whether it takes no time: views, mostly."""
        return not self.forward and not self.backward


@dataclass(frozen=True)
class ShardCosts:
    """The costs of the nodes of a graph on `n` ranks of an axis; `apart` is the difference between
    the numbers of neighbours."""

    graph: Graph
    device: Device
    n: int
    axis: str = "tensor"
    apart: int = 1

    @cached_property
    def _ranks(self) -> RankGroup:
        """The group of ranks."""
        return neighbours(self.n, self.device, self.apart)

    def work(self, node: fx.Node) -> NodeWork:
        """The work of a whole node: equal on all accelerators, and on all CPUs. Cached."""
        return self.graph.once(("work", node, self.device.is_cpu), lambda: self._work(node))

    def _work(self, node: fx.Node) -> NodeWork:
        inputs = [item for item in node.all_input_nodes if item.name not in self.graph.by_node]
        roles, accelerator = self.graph.roles, not self.device.is_cpu
        cost = trace_block([node], inputs, [node], roles, accelerator=accelerator)
        return NodeWork(
            cost.forward,
            cost.backward,
            frozenset(inputs[place] for place in cost.kept_inputs),
            bool(cost.kept_outputs),
            cost.saved - cost.saved_outputs,
        )

    def strategy_seconds(self, call: NodeCall, work: NodeWork, strategy: Strategy) -> float:
        """Seconds of a node, forward and backward, with the collectives inside it."""
        arithmetic, traffic = shares(call, strategy, self.n)
        masked = strategy.special == "vocabulary lookup"
        written = traffic
        if call.base in LOOKUPS:  # the gradient of the table
            written = share(call.shapes[0], strategy.inputs[0], self.n)
        products = _products(call, strategy, self.n)
        forward: Sequence[Operation] = work.forward
        if not masked:
            forward = _scaled(forward, arithmetic, traffic, products[:1])
        backward = _scaled(work.backward, arithmetic, written, products[1:])
        if strategy.special in ("causal rows", "ring") and not strategy.outputs[0].zigzag:
            forward, backward = _unmasked(forward), _unmasked(backward)  # the last rank's rows
        inside = _masks(call) if masked else ()
        total = seconds((*forward, *backward, *inside), self.device)
        if strategy.special == "ring":
            total += self._ring_seconds(call, forward, backward)
        if strategy.special.startswith("classes"):
            total += sum(self._action(*action) for action in class_loss_actions(call))
        if self.axis == "context" and strategy.is_replicated and any(call.carries):
            total *= UNSHARED
        return total + WHOLE * traffic * (not work.is_free)

    def _ring_seconds(
        self, call: NodeCall, forward: Iterable[Operation], backward: Iterable[Operation]
    ) -> float:
        """Seconds of a ring besides its arithmetic: kernels that merge its steps, and messages as
        far as they take longer than the steps beside them, which are all but one.

        Results and gradients are added up in float32 (`wide` bytes): a result is read and written
        twice, a gradient of queries once; those of keys and values are copied and added. Tensor
        ranks (`apart` is their number) divide all of it but the kernels' launches.
        """
        n, exchange, (result,) = self.n, ring_exchange(call, self.n), call.results
        itemsize, wide = result.itemsize, max(4, result.itemsize)
        numbers = nbytes_of(result) / itemsize / n
        going_round, total = sum(nbytes for _, nbytes in exchange.forward) / n, 0.0
        directions = (
            (exchange.forward, forward, (4 * wide + itemsize) * numbers),
            (exchange.backward, backward, (2 * wide + itemsize) * numbers + 6 * going_round),
        )
        for actions, work, moved in directions:
            merging = Operation("merge", "other", 0.0, moved, torch.float32)
            each = seconds((merging,), self.device)
            each += MERGING * self.apart * self.device.launch_overhead
            computed = seconds(work, self.device)
            for action, nbytes in actions:
                sent = collective.seconds(action, nbytes, self._ranks, self.device) + COLLECTIVE
                total += max((n - 1) * each, sent - computed * (n - 1) / n)
        return total

    def conversion_seconds(
        self, source: Placement, target: Placement, nbytes: float, *, carries: bool
    ) -> float | None:
        """Seconds of a conversion of a value of `nbytes`, with its backward if it carries a
        gradient; None where there is no such conversion."""
        row = conversion(source, target, differentiable=carries, ending=True)
        if row is None:
            return None
        backward = self._timed(row.backward, nbytes) if carries else 0.0
        return self._timed(row.forward, nbytes) + backward

    @cached_property
    def _timed(self) -> Callable[[Action, float], float]:
        """`_action`, cached: the programmes of many meshes ask for the same seconds."""
        return cache(self._action)

    def _action(self, action: Action, nbytes: float) -> float:
        """Seconds of a collective, as in predicted steps, or of the copy that a rank makes."""
        if action == "nothing":
            return 0.0
        if action in BYTES:
            sent = collective.seconds(action, nbytes, self._ranks, self.device)
            return sent + self.device.launch_overhead + COLLECTIVE
        touched = {"take": 2 / self.n, "pad": 1 + 1 / self.n}.get(action, 2.0)
        bandwidth = self.device.memory_bandwidth * self.device.efficiency.bandwidth
        return touched * nbytes / bandwidth + self.device.launch_overhead


def share(shape: Shape, placement: Placement, n: int) -> float:
    """The part of a value of `shape` that the rank with the largest piece holds.

    >>> from parcompiler.spmd import R, S
    >>> share((6, 8), S(1), 2), share((6, 8), R, 2)
    (0.5, 1.0)
    """
    whole = math.prod(shape)
    return math.prod(local_shape(shape, placement, n)) / whole if whole > 0 else 1.0


def shares(call: NodeCall, strategy: Strategy, n: int) -> tuple[float, float]:
    """A rank's shares of the arithmetic of a call, and of the bytes that it moves."""
    shapes = [*call.shapes, *call.result_shapes]
    types = [*strategy.inputs, *strategy.outputs]
    parts = [share(s, p, n) for s, p in zip(shapes, types, strict=True)]
    split = [part for part, p in zip(parts, types, strict=True) if p.kind == "S"]
    sizes = list(map(nbytes_of, [operand.value for operand in call.operands]))
    sizes += map(nbytes_of, call.results)
    if call.base in TABLES and call.operands:  # reads no more than its result
        sizes[0] = min(sizes[0], sizes[len(call.operands)])
    total = sum(sizes)
    if call.base in LOOKUPS and types[0].kind == "S" and types[0].dim:  # a short piece is a line
        row = shapes[0][1] * call.operands[0].value.itemsize
        parts[0] = max(parts[0], min(1.0, LINE / row))
    local = sum(part * size for part, size in zip(parts, sizes, strict=True))
    return max(split, default=1.0), local / total if total else 1.0


def nbytes_of(value: torch.Tensor) -> int:
    """Bytes of a value; sizes that are not known before the step are left out."""
    return math.prod(size for size in shape_of(value) if size >= 0) * value.itemsize


def _products(call: NodeCall, strategy: Strategy, n: int) -> tuple[Product, ...]:
    """(batch, m, n, k) of a rank's part of a batched matrix product, and of the products for the
    gradients of both factors, as their matrices may be small. Empty for other calls."""
    if call.base not in BATCHED or len(call.shapes[1]) < 3:
        return ()
    *batch, m, k = local_shape(call.shapes[0], strategy.inputs[0], n)
    columns = local_shape(call.result_shapes[0], strategy.outputs[0], n)[-1]
    each = math.prod(batch)
    return (each, m, columns, k), (each, m, k, columns), (each, k, columns, m)


def _scaled(
    work: Iterable[Operation], arithmetic: float, traffic: float, products: Sequence[Product] = ()
) -> Sequence[Operation]:
    """Kernels with shares of their arithmetic and memory traffic; kernels of matrix products get
    `products`, which say how they fill tiles."""
    return [
        dataclasses.replace(
            item,
            flops=item.flops * arithmetic,
            nbytes=item.nbytes * traffic,
            products=tuple(products) if item.products else (),
        )
        for item in work
    ]


def _unmasked(work: Iterable[Operation]) -> Sequence[Operation]:
    """Kernels without the savings of a causal mask."""
    return [dataclasses.replace(item, done=1.0) for item in work]


def _masks(call: NodeCall) -> Sequence[Operation]:
    """Further kernels of a lookup in a piece of a table: it masks rows and their gradients."""
    (result,) = call.results[:1]
    both = 2.0 * nbytes_of(result)
    mask = Operation("masked_fill", "other", float(result.numel()), both, result.dtype)
    indices = dataclasses.replace(mask, flops=0.0, nbytes=0.0)
    return (*[indices] * 3, mask, mask)
