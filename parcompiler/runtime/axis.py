"""The tensor ranks of one line of the mesh, and what they tell each other.

    pipeline 0   rank 0 ═══ rank 1     one group per line: its ranks hold pieces of the same tensors
    pipeline 1   rank 2 ═══ rank 3     and run the same text

Emitted layers reach their line by `current()`; the worker makes it current while it builds and runs
them. A tensor that comes in is left as it is, and what comes out is new.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from parcompiler import pieces
from parcompiler.errors import LaunchError
from parcompiler.pieces import Shard

_active: ContextVar[Axis | None] = ContextVar("axis", default=None)


def current() -> Axis:
    """The line of this rank. Raises LaunchError outside of a worker."""
    axis = _active.get()
    if axis is None:
        message = "this layer is a piece of one: it runs in a worker, with those that have the rest"
        raise LaunchError(message)
    return axis


def active() -> Axis | None:
    """The line that is current, if one is."""
    return _active.get()


def piece(size: int) -> int:
    """How many of `size` elements this rank holds; ranks may hold one more than others."""
    axis = current()
    return pieces.piece(size, axis.size, axis.rank).size


@dataclass(slots=True)
class Axis:
    """A line of `size` ranks, of which this is number `rank` and computes on `device`.

    While there is `more` to come in this step, summands of the gradients of parameters are left to
    be added up with what comes: `left` are those, by the id of the parameter.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None
    device: torch.device
    more: bool = False
    left: dict[int, torch.Tensor] = field(default_factory=dict, repr=False)

    def close(self) -> None:
        """Let go of the group: what was computed may hold the line, but not its connections."""
        self.group = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within it, this line is the current one."""
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)

    @contextmanager
    def expecting(self, more: bool) -> Iterator[None]:
        """Within it, a backward runs, after which there is `more` to come in this step."""
        self.more = more
        try:
            yield
        finally:
            self.more = False

    def total(self, summand: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks."""
        return self._reduced(summand, dist.ReduceOp.SUM)

    def total_at_last(self, key: int, summand: torch.Tensor) -> torch.Tensor | None:
        """The sum over the ranks of all summands of a step, None while there is more to come."""
        before = self.left.pop(key, None)
        summand = summand if before is None else before + summand
        if self.more:
            self.left[key] = summand
            return None
        return self.total(summand)

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """The largest over the ranks, element by element."""
        return self._reduced(tensor, dist.ReduceOp.MAX)

    def whole(self, own: torch.Tensor, shard: Shard) -> torch.Tensor:
        """The whole of which every rank has its own piece."""
        longest = shard.length(self.size, 0)
        own = in_memory(_padded(own, shard.dim, longest))
        found = own.new_empty(self.size * own.numel())
        dist.all_gather_single(_wire(found), _wire(own.view(-1)), group=self.group)
        parts = list(found.view(self.size, *own.shape).unbind())
        if not shard.even(self.size):
            lengths = [shard.length(self.size, rank) for rank in range(self.size)]
            parts = [
                part.narrow(shard.dim, 0, length)
                for part, length in zip(parts, lengths, strict=True)
            ]
        return shard.join(parts)

    def own_total(self, summand: torch.Tensor, shard: Shard) -> torch.Tensor:
        """This rank's piece of the sum over the ranks."""
        if not shard.even(self.size):
            return shard.take(self.total(summand), self.size, self.rank).contiguous()
        parts = [shard.take(summand, self.size, rank) for rank in range(self.size)]
        sent = torch.cat([part.reshape(-1) for part in parts])
        own = sent.new_empty(parts[0].numel())
        dist.reduce_scatter_single(_wire(own), _wire(sent), group=self.group)
        return own.view(parts[0].shape)

    def exchanged(self, own: torch.Tensor, source: Shard, target: Shard) -> torch.Tensor:
        """The piece by `target` of the whole of which every rank has a piece by `source`."""
        n = self.size
        if source.dim == target.dim:
            return target.take(self.whole(own, source), n, self.rank).contiguous()
        parts = [target.take(own, n, rank) for rank in range(n)]
        shapes = [list(parts[self.rank].shape) for _ in range(n)]
        for rank, shape in enumerate(shapes):
            shape[source.dim] = source.length(n, rank)
        given, coming = [part.numel() for part in parts], [math.prod(shape) for shape in shapes]
        sent = torch.cat([part.reshape(-1) for part in parts])
        found = sent.new_empty(sum(coming))
        dist.all_to_all_single(_wire(found), _wire(sent), coming, given, group=self.group)
        return source.join(
            [part.view(shape) for part, shape in zip(found.split(coming), shapes, strict=True)]
        )

    def agreed(self, number: int) -> int:
        """The number of rank 0, on every rank."""
        told = [number if self.rank == 0 else 0]
        return int(self.total(torch.tensor(told, dtype=torch.int64, device=self.device)))

    def _reduced(self, tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> torch.Tensor:
        found = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(_wire(found), operation, group=self.group)
        return found


def _padded(tensor: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """A tensor with `length` elements along a dimension; those that are added do not matter."""
    missing = length - tensor.shape[dim]
    if missing == 0:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as its memory reads: in the order of its dimensions, and conjugated where torch
    has left that to its readers."""
    return tensor.resolve_conj().contiguous()


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that backends know."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
