"""A group of ranks along one axis of the mesh, and its collectives.

    pipeline 0   rank 0 ═══ rank 1     the ranks of a tensor-parallel group hold pieces of the same
    pipeline 1   rank 2 ═══ rank 3     tensors and run the same text

Emitted layers reach their group by `current(name)` ("tensor", "context" or "expert"); the worker
makes it current while it builds and runs them. Collectives leave operands unchanged and return new
tensors. Products that linear layers have deferred run beside the collectives of a backward (see
`deferred`).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from parcompiler import pieces
from parcompiler.errors import LaunchError
from parcompiler.pieces import Shard
from parcompiler.temporary import having

_active: ContextVar[dict[str, Axis]] = ContextVar("axes", default={})  # noqa: B039  (never written)


def current(name: str = "tensor") -> Axis:
    """This rank's group along an axis. Raises LaunchError outside of a worker."""
    axis = active(name)
    if axis is None:
        message = f"{name}-parallel layer called outside a Worker: its other ranks have the rest"
        raise LaunchError(message)
    return axis


def active(name: str = "tensor") -> Axis | None:
    """The current group along an axis, if there is one."""
    return _active.get().get(name)


def all_active() -> tuple[Axis, ...]:
    """The current groups along all axes."""
    return tuple(_active.get().values())


def within(*axes: Axis) -> AbstractContextManager[None]:
    """In this context, these groups are the current ones along their axes."""
    return having(_active, _active.get() | {axis.name: axis for axis in axes})


def piece(size: int) -> int:
    """How many of `size` elements this rank holds; ranks may hold one more than others."""
    axis = current()
    return pieces.piece(size, axis.size, axis.rank).size


@dataclass(slots=True)
class Axis:
    """A group of `size` ranks, in which this one has number `rank` and computes on `device`.

    While `more` backwards of the step follow, gradients of parameters are accumulated locally, in
    `summands`, by the id of the parameter. `beside` is called while a collective runs.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None
    device: torch.device
    more: bool = False
    beside: Callable[[], object] | None = None
    summands: dict[int, torch.Tensor] = field(default_factory=dict, repr=False)
    name: str = "tensor"

    def close(self) -> None:
        """Let go of the process group: autograd graphs may outlive its connections."""
        self.group = None

    @contextmanager
    def expecting(self, more: bool, beside: Callable[[], object] | None = None) -> Iterator[None]:
        """In this context a backward runs; `more` says whether others of the step follow, and
        `beside` is called while its collectives run."""
        self.more, self.beside = more, beside
        try:
            yield
        finally:
            self.more, self.beside = False, None

    def own(self, whole: torch.Tensor, shard: Shard) -> torch.Tensor:
        """This rank's piece of a value that all ranks hold; a view if it is one run."""
        return shard.take(whole, self.size, self.rank)

    def all_reduce(self, summand: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks."""
        return self._reduced(summand, dist.ReduceOp.SUM)

    def all_reduce_at_last(self, key: int, summand: torch.Tensor) -> torch.Tensor | None:
        """The sum over the ranks of all summands of a step; None before the last backward. 16-bit
        summands are added in float32."""
        total = summand.to(torch.float32) if summand.dtype.itemsize == 2 else summand
        if (before := self.summands.pop(key, None)) is not None:
            total = before + total
        if self.more:
            self.summands[key] = total
            return None
        return self.all_reduce(total)

    def all_reduce_max(self, tensor: torch.Tensor) -> torch.Tensor:
        """The largest over the ranks, element by element."""
        return self._reduced(tensor, dist.ReduceOp.MAX)

    def all_gather(self, part: torch.Tensor, shard: Shard) -> torch.Tensor:
        """The whole tensor, from the pieces of all ranks."""
        longest = shard.length(self.size, 0)
        if missing := longest - part.shape[shard.dim]:
            shape = [missing if dim == shard.dim else size for dim, size in enumerate(part.shape)]
            part = torch.cat([part, part.new_zeros(shape)], shard.dim)
        part = in_memory(part)
        flat = part.new_empty(self.size * part.numel())
        sent = wire(part.view(-1))
        self._finish(dist.all_gather_single(wire(flat), sent, self.group, async_op=True))
        if shard.in_order(self.size, part.shape):
            return flat.view(shard.shape(part.shape))
        parts = list(flat.view(self.size, *part.shape).unbind())
        if not shard.even(self.size):
            lengths = [shard.length(self.size, rank) for rank in range(self.size)]
            parts = [
                part.narrow(shard.dim, 0, length)
                for part, length in zip(parts, lengths, strict=True)
            ]
        return shard.join(parts)

    def reduce_scatter(self, summand: torch.Tensor, shard: Shard) -> torch.Tensor:
        """This rank's piece of the sum over the ranks."""
        if not shard.even(self.size):
            return self.own(self.all_reduce(summand), shard).contiguous()
        shape = list(summand.shape)
        shape[shard.dim] //= self.size
        if shard.in_order(self.size, shape):
            sent = in_memory(summand)
        else:
            sent = summand.new_empty(self.size, *shape)
            for rank, part in enumerate(sent):
                part.copy_(shard.take(summand, self.size, rank))
        piece = sent.new_empty(shape)
        flat = wire(piece.view(-1)), wire(sent.view(-1))
        self._finish(dist.reduce_scatter_single(*flat, group=self.group, async_op=True))
        return piece

    def all_to_all(self, part: torch.Tensor, source: Shard, target: Shard) -> torch.Tensor:
        """The piece by `target` of the whole, from the pieces of all ranks by `source`."""
        n = self.size
        if source.dim == target.dim:
            return self.own(self.all_gather(part, source), target).contiguous()
        parts = [target.take(part, n, rank) for rank in range(n)]
        shapes = [list(parts[self.rank].shape) for _ in range(n)]
        for rank, shape in enumerate(shapes):
            shape[source.dim] = source.length(n, rank)
        sizes = [math.prod(shape) for shape in shapes]
        sent = torch.cat([part.reshape(-1) for part in parts])
        received = self.exchange(sent, [part.numel() for part in parts], sizes).split(sizes)
        return source.join([x.view(shape) for x, shape in zip(received, shapes, strict=True)])

    def exchange(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """All-to-all of rows: `sent[r]` of this rank's go to rank r, `received[r]` come from it."""
        rows = in_memory(rows)
        arriving = rows.new_empty(sum(received), *rows.shape[1:])
        work = dist.all_to_all_single(
            wire(arriving), wire(rows), received, sent, self.group, async_op=True
        )
        self._finish(work)
        return arriving

    def rotate(self, row: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start sending a row of numbers to the next rank, from the last to the first; the returned
        function waits for the previous rank's row."""
        arriving, n = torch.empty_like(row), self.size
        received, sent = (
            [row.numel() * (rank == (self.rank + step) % n) for rank in range(n)]
            for step in (-1, 1)
        )
        work = dist.all_to_all_single(
            wire(arriving), wire(row), received, sent, self.group, async_op=True
        )

        def wait() -> torch.Tensor:
            self._finish(work)
            return arriving

        return wait

    def rotated(self, row: torch.Tensor) -> torch.Tensor:
        """The previous rank's row of numbers."""
        return self.rotate(row)()

    def agreed(self, number: int) -> int:
        """The number of rank 0, on every rank."""
        summand = number if self.rank == 0 else 0
        return int(self.all_reduce(torch.tensor(summand, dtype=torch.int64, device=self.device)))

    def _reduced(self, tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> torch.Tensor:
        result = tensor.clone(memory_format=torch.contiguous_format)
        self._finish(dist.all_reduce(wire(result), operation, self.group, async_op=True))
        return result

    def _finish(self, work: dist.Work | None) -> None:
        """Run the deferred products beside a collective, and wait for it."""
        assert work is not None
        if self.beside is not None:
            self.beside()
        work.wait()


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor contiguous in memory, with a lazy conjugation carried out."""
    return tensor.resolve_conj().contiguous()


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, which lives as long as they are read."""
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]  # ctypes keeps nothing alive by itself
    return memoryview(memory)


def real(tensor: torch.Tensor) -> torch.Tensor:
    """A real view of a tensor, as backends cannot send complex numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def flattened(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The elements of some tensors as one row of real numbers."""
    return torch.cat([real(tensor).reshape(-1) for tensor in tensors])


def unflattened(flat: torch.Tensor, like: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Inverse of `flattened`: views of `flat` with the shapes of those in `like`."""
    begin = 0
    for tensor in like:
        end = begin + real(tensor).numel()
        piece = flat[begin:end]
        if tensor.is_complex():
            piece = torch.view_as_complex(piece.view(-1, 2))
        yield piece.view(tensor.shape)
        begin = end


def wire(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a tensor in a dtype that backends support."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else real(tensor)
