"""Collectives inside of compiled layers: an operator of torch that calls the rank's own.

    traced      axis.all_gather(x, shard) ─► exchange(x, "tensor all_gather [[1, [48], …]]", shape)
    compiled    … kernel ─► exchange ─► kernel ─► exchange …     in the order of the trace

The compiler neither looks inside nor reorders: each exchange waits for the one before, so that all
ranks are in the same one. The collectives themselves are those of `runtime.axis`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist
from torch import fx

from parcompiler.pieces import Shard
from parcompiler.runtime.axis import Axis

_library = torch.library.Library("parcompiler", "FRAGMENT")
_library.define("exchange(Tensor x, str call, int[] shape, Tensor? after=None) -> Tensor")
_groups: dict[str, Axis] = {}  # of this process, by axis


def _exchange(
    x: torch.Tensor, call: str, shape: list[int], after: torch.Tensor | None = None
) -> torch.Tensor:
    """Run a collective of one of this rank's groups."""
    group, method, shards = _parsed(call)
    result: torch.Tensor = getattr(_groups[group], method)(x, *shards)
    return result


def _abstract(
    x: torch.Tensor, call: str, shape: list[int], after: torch.Tensor | None = None
) -> torch.Tensor:
    """The result without data, for tracers."""
    return x.new_empty(shape)


_library.impl("exchange", _exchange, "CompositeExplicitAutograd")
_library.impl("exchange", _abstract, "Meta")


@functools.cache
def _parsed(call: str) -> tuple[str, str, tuple[Shard, ...]]:
    """The name of a group, that of a method of `Axis`, and its shards."""
    group, method, shards = call.split(" ", 2)
    parsed = (Shard(dim, tuple(sizes), zigzag) for dim, sizes, zigzag in json.loads(shards))
    return group, method, tuple(parsed)


@dataclass(slots=True)
class TracedAxis(Axis):
    """An axis in a trace: its collectives become operators, which find the group by its name."""

    @classmethod
    def of(cls, axis: Axis) -> TracedAxis:
        """A group of this process, which compiled layers will call."""
        _groups[axis.name] = axis
        return cls(axis.rank, axis.size, None, axis.device, name=axis.name)

    def all_gather(self, part: torch.Tensor, shard: Shard) -> torch.Tensor:
        """The whole tensor, from the pieces of all ranks."""
        return self._exchanged("all_gather", part, list(shard.shape(part.shape)), shard)

    def reduce_scatter(self, summand: torch.Tensor, shard: Shard) -> torch.Tensor:
        """This rank's piece of the sum over the ranks."""
        shape = self._piece(list(summand.shape), shard)
        return self._exchanged("reduce_scatter", summand, shape, shard)

    def all_to_all(self, part: torch.Tensor, source: Shard, target: Shard) -> torch.Tensor:
        """The piece by `target` of the whole, from the pieces of all ranks by `source`."""
        shape = self._piece(list(source.shape(part.shape)), target)
        return self._exchanged("all_to_all", part, shape, source, target)

    def rotate(self, row: torch.Tensor) -> Callable[[], torch.Tensor]:
        """The previous rank's row of numbers, which compiled layers wait for at once."""
        arriving = self._exchanged("rotated", row, list(row.shape))
        return lambda: arriving

    def _reduced(self, tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> torch.Tensor:
        name = "all_reduce" if operation == dist.ReduceOp.SUM else "all_reduce_max"
        return self._exchanged(name, tensor, list(tensor.shape))

    def _piece(self, shape: list[int], shard: Shard) -> list[int]:
        """The shape of this rank's piece of a tensor."""
        shape[shard.dim] = shard.length(self.size, self.rank)
        return shape

    def _exchanged(
        self, method: str, x: torch.Tensor, shape: list[int], *shards: Shard
    ) -> torch.Tensor:
        """The operator for a collective."""
        call = f"{self.name} {method} {json.dumps(list(map(astuple, shards)))}"
        result: torch.Tensor = torch.ops.parcompiler.exchange(x, call, list(map(int, shape)))
        return result


def in_order(graph: fx.Graph) -> list[str]:
    """Make each exchange of a graph depend on the one before. Returns their calls."""
    before: fx.Node | None = None
    calls = []
    for node in graph.nodes:
        if node.target is torch.ops.parcompiler.exchange.default:
            node.args = (*node.args[:3], before)
            node.meta.pop("eager_input_vals", None)  # Inductor compares them with the arguments
            before = node
            calls.append(str(node.args[1]))
    return calls
