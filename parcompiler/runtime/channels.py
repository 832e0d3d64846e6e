"""Every process group of a rank, made in one place, and the messages that go through them.

    rank 0 ──────────► rank 1        nccl: one group per directed pair, so that a pending
    rank 0 ◄────────── rank 1        receive never stands in the way of a send

Gloo keeps the two directions apart itself, and one group of all ranks serves all messages: every
group more would cost it a thread, and wake-ups for messages that could be handled together.
A message is identified by its order on its channel, so both ends must agree on shape, dtype and
order; the verifier has proved that before anything starts.
"""

from __future__ import annotations

import json
import os
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from parcompiler.runtime.axis import Axis, in_memory, real
from parcompiler.runtime.collective_queue import (
    Arrival,
    CollectiveQueue,
    Pending,
    Receipt,
    Started,
    queue_on,
)
from parcompiler.runtime.compression import DTYPES, scattered, sum_in_order
from parcompiler.runtime.failure import DifferentCallsError
from parcompiler.runtime.flight import FlightRecorder
from parcompiler.runtime.joining import backend_of
from parcompiler.runtime.parcels import nbytes, packed, parcels, unpacked
from parcompiler.runtime.program import RankProgram, Value

# Gloo matches messages of two ranks by their tag, so that those of different calls never meet; for
# NCCL only their order counts. No rank sends a message with the last tag.
TRAINING, EVALUATION, _NO_INSTRUCTION, _NEVER_SENT = range(4)
FOREVER = timedelta(days=365)  # for messages that may come when a user likes
FEW_NUMBERS = 6  # in the first row of `gather_numbers`
MOST_PENDING = 2  # sends on one channel that may be unfinished before the next one waits


class Channels:
    """The process groups of this rank; `connect` makes that of all ranks, `open` the others.

    `failed` is called with an error that no wait raises; `flight` knows in which call a rank is.
    """

    def __init__(
        self,
        program: RankProgram,
        device: torch.device,
        timeout: timedelta,
        failed: Callable[[Exception], object],
        flight: FlightRecorder | None = None,
    ) -> None:
        self._flight = flight or FlightRecorder()
        self.device = device
        self._failed = failed
        self.tag = TRAINING  # of the messages of instructions
        self._program = program
        self._rank = program.rank
        self._by_gloo = backend_of(device) == "gloo"
        self._timeout = timeout
        self._groups: list[dist.ProcessGroup] = []
        self._to: dict[int, dist.ProcessGroup] = {}  # by peer
        self._from: dict[int, dist.ProcessGroup] = {}
        self._shared: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self.axes: dict[str, Axis] = {}  # groups of layers, for axes of several ranks
        self._plane: dist.ProcessGroup | None = None  # all ranks that hold rows of the vocabulary
        self._queue: CollectiveQueue | None = None  # of its collectives
        self._beside: dist.ProcessGroup | None = None  # all ranks, for messages to servers
        self._side: dist.ProcessGroup | None = None  # this data coordinate, if it steps by itself
        self.beside: CollectiveQueue | None = None  # of compressed sums
        self._cast: torch.dtype | None = None  # of gradients between the data ranks
        self._all: dist.ProcessGroup | None = None
        self._pending: dict[int, deque[tuple[dist.Work, torch.Tensor]]] = defaultdict(deque)

    def connect(self) -> None:
        """Make the group of all ranks. A collective."""
        self._all = self._group(None)

    def open(self) -> None:
        """Make the groups of the program, which is the same on all ranks. A collective."""
        grid = self._program.grid
        for pair in self._program.channels:
            for column in grid.columns():
                self._open_direction(*(grid.rank(position, *column) for position in pair))
        for ranks in self._program.summing():
            self._shared[ranks] = self._group(ranks)
        at, synchronized = self._program.coordinate, self._program.synchronized
        self._open_axis("tensor", grid.tensor, at.tensor, grid.lines())
        for name, count in (
            ("context", grid.context), ("expert", grid.expert),
            ("data", grid.data if synchronized else 1),
        ):  # fmt: skip
            self._open_axis(name, count, at.data % count, grid.runs(count))
        planes = [grid.plane(data) for data in range(grid.data)]
        if self._program.updates.separate:
            self._side = self._own_group(planes)
        if self._program.updates.way == "asynchronous":
            self._beside = self._group(None, "gloo")
        compression = self._program.updates.compression
        if compression is not None:
            self.beside = queue_on(self.device, self._failed)
            self._cast = DTYPES.get(compression)
        if self._program.rows:
            self._plane = self._own_group(planes)
            self._queue = queue_on(self.device, self._failed)

    def _open_axis(self, name: str, count: int, rank: int, sets: Iterable[tuple[int, ...]]) -> None:
        """Make the groups along an axis of `count` ranks, of which this one is number `rank`."""
        if count > 1:
            group = self._own_group(sets)
            self.axes[name] = Axis(rank, count, group, self.device, name=name)

    def _own_group(self, sets: Iterable[tuple[int, ...]]) -> dist.ProcessGroup:
        """Make a group of each of some disjoint sets of ranks; the one that this rank is in."""
        groups = [self._group(ranks) for ranks in sets]
        return next(group for group in groups if group is not None)

    def _open_direction(self, source: int, target: int) -> None:
        """Open the channel from `source` to `target` if this rank is one of them.

        A first message goes through it here, where all ranks open channels in one order: NCCL
        connects two ranks at their first message, which blocks both hosts. Within a step, where
        lists begin differently, ranks could deadlock.
        """
        if not self._by_gloo:
            group = self._group((source, target))
        else:
            group = self._all if self._rank in (source, target) else None
        if group is not None:
            first = torch.zeros(1, device=self.device)
            if source == self._rank:
                self._to[target] = group
                dist.send(first, target, group, _NO_INSTRUCTION)
            else:
                self._from[source] = group
                dist.recv(first, source, group, _NO_INSTRUCTION)

    def send(self, tensor: torch.Tensor, value: Value, peer: int) -> None:
        """Start sending `value` in its memory order; the tensor is kept until it is sent."""
        tensor = in_memory(tensor.permute(value.order) if value.order else tensor)
        pending = self._pending[peer]
        while pending and (len(pending) >= MOST_PENDING or pending[0][0].is_completed()):
            pending.popleft()[0].wait()
        work = dist.isend(real(tensor), peer, self._to[peer], self.tag)
        assert work is not None
        pending.append((work, tensor))

    def receive(self, value: Value, peer: int) -> Receipt:
        """Post a receive into a new buffer."""
        order = value.order
        size = [value.shape[dim] for dim in order] if order else value.shape
        buffer = torch.empty(size, dtype=value.dtype, device=self.device)
        work = dist.irecv(real(buffer), peer, self._from[peer], self.tag)
        if order:
            buffer = buffer.permute([order.index(dim) for dim in range(len(order))])
        return Receipt(buffer, work)

    def flush(self) -> None:
        """Wait until everything is sent."""
        for pending in self._pending.values():
            while pending:
                pending.popleft()[0].wait()
        for queue in (self._queue, self.beside):
            if queue is not None:
                queue.flush()

    def broadcast_value(self, tensor: torch.Tensor | None, value: Value, source: int) -> Pending:
        """Broadcast `tensor` from rank `source` to all ranks of the vocabulary."""
        if tensor is None:
            tensor = torch.empty(value.shape, dtype=value.dtype, device=self.device)
        buffer = in_memory(tensor)
        pending = self._enqueue(
            lambda plane: (buffer, dist.broadcast(real(buffer), source, plane, async_op=True))
        )
        return Receipt(buffer) if source == self._rank else pending

    def reduce_value(self, summand: Callable[[], torch.Tensor], target: int) -> Pending:
        """Add up the summands of the ranks of the vocabulary, in place, for the tensor-parallel
        group of the rank `target`. `summand` is called once all earlier collectives are done."""

        def start(plane: dist.ProcessGroup) -> Started:
            part = in_memory(summand())
            if self._program.tensor > 1:
                return part, dist.all_reduce(real(part), group=plane, async_op=True)
            return part, dist.reduce(real(part), target, group=plane, async_op=True)

        return self._enqueue(start)

    def largest(self, tensor: torch.Tensor) -> Pending:
        """Take the maximum over the ranks of the vocabulary, element by element and in place."""
        operation = dist.ReduceOp.MAX
        return self._enqueue(
            lambda plane: (tensor, dist.all_reduce(tensor, operation, plane, async_op=True))
        )

    def summed(self, tensor: torch.Tensor) -> Pending:
        """Add up over the ranks of the vocabulary, in place."""
        return self._enqueue(
            lambda plane: (tensor, dist.all_reduce(tensor, group=plane, async_op=True))
        )

    def gathered(self, tensor: torch.Tensor) -> Pending:
        """Gather a tensor of each rank of the vocabulary, in their order: [ranks, ...]."""
        ranks = len(self._program.grid.plane(self._program.coordinate.data))
        flat = tensor.new_empty(ranks * tensor.numel())

        def start(plane: dist.ProcessGroup) -> Started:
            work = dist.all_gather_single(flat, tensor.reshape(-1), plane, async_op=True)
            return flat.view(ranks, *tensor.shape), work

        return self._enqueue(start)

    def _enqueue(self, start: Callable[[dist.ProcessGroup], Started]) -> Pending:
        """Put a collective of the vocabulary into the queue."""
        plane = self._plane
        assert self._queue is not None and plane is not None
        return self._queue.put(lambda: start(plane))

    def sum(self, tensor: torch.Tensor, ranks: tuple[int, ...], *, in_order: bool = False) -> Any:
        """Start summing a gradient over `ranks`, in place; between data ranks alone it may go in 16
        bits. `in_order` if these ranks run other collectives beside it."""
        group = self._shared[ranks]
        if (dtype := self._cast) is not None and all(map(self._program.is_near, ranks)):
            if in_order:  # a thread could run before them on one rank, and after them on another
                sum_in_order(tensor, group, dtype)
                return Arrival(())

            def start() -> Started:
                sum_in_order(tensor, group, dtype)
                return tensor, None

            assert self.beside is not None
            return self.beside.put(start)
        work: dist.Work | None = dist.all_reduce(tensor, group=group, async_op=True)
        assert work is not None
        return work

    def sum_rows(self, table: torch.Tensor, most: int, ranks: tuple[int, ...]) -> Arrival:
        """Start gathering the rows of a table's gradient from `ranks`, at `most` that many from
        each; the gradient becomes the sparse tensor of all of them."""
        group, gradient = self._shared[ranks], table.grad
        numbers = torch.zeros(most, dtype=torch.int64, device=table.device)
        rows = table.new_zeros(most, *table.shape[1:])
        if gradient is not None:  # as it was added up: the rows of one micro-batch after another
            count = gradient._nnz()
            numbers[:count], rows[:count] = gradient._indices()[0], gradient._values()
        every = [x.new_empty(len(ranks) * most, *x.shape[1:]) for x in (numbers, rows)]
        works = [
            dist.all_gather_single(real(whole), real(mine), group=group, async_op=True)
            for whole, mine in zip(every, (numbers, rows), strict=True)
        ]

        def then() -> None:
            indices, values = every[0].unsqueeze(0), every[1]
            table.grad = torch.sparse_coo_tensor(
                indices, values, table.shape, check_invariants=False
            )

        return Arrival(works, then)

    def scatter(self, segments: torch.Tensor, segment: torch.Tensor, ranks: tuple[int, ...]) -> Any:
        """Start a reduce-scatter of segments [ranks, n] over `ranks`, each into `segment` [n]."""
        group = self._shared[ranks]
        # Gloo's reduce-scatter is an all-reduce of a copy: twice the bytes.
        if self._by_gloo or self._cast is not None:
            return scattered(real(segments), real(segment), group, self._cast)
        return dist.reduce_scatter_single(
            real(segment).view(-1), real(segments).view(-1), group=group, async_op=True
        )

    def gather(self, segments: torch.Tensor, ranks: tuple[int, ...]) -> list[Any]:
        """Start an all-gather into segments [ranks, n], in place; each of `ranks` has its own
        one."""
        group, rows = self._shared[ranks], dict(zip(ranks, real(segments), strict=True))
        if self._by_gloo:  # whose all-gather copies all that it gets
            return [dist.broadcast(row, rank, group, async_op=True) for rank, row in rows.items()]
        segment = rows[self._rank].reshape(-1)
        return [
            dist.all_gather_single(real(segments).view(-1), segment, group=group, async_op=True)
        ]

    def reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Any:
        """Start summing a tensor over `ranks` in place on the first of them; on the others it is
        undefined afterwards."""
        group = self._shared[ranks]
        return dist.reduce(real(tensor), ranks[0], group=group, async_op=True)

    def give(self, tensor: torch.Tensor, ranks: tuple[int, ...], home: int) -> Any:
        """Start a broadcast from `ranks[home]` to all of `ranks`, in place."""
        return dist.broadcast(real(tensor), ranks[home], group=self._shared[ranks], async_op=True)

    def total(self, tensor: torch.Tensor) -> None:
        """Add up a tensor over all ranks, in place."""
        dist.all_reduce(tensor, group=self._all)

    def total_of_step(self, tensor: torch.Tensor) -> None:
        """Add up a tensor over all ranks that step together, in place."""
        dist.all_reduce(tensor, group=self._all if self._side is None else self._side)

    def sum_in_order(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        """Add up a real tensor over `ranks`, in place and in their order: repeatable to the bit."""
        sum_in_order(tensor, self._shared[ranks], tensor.dtype)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Give every rank the tensor of `source`, in place."""
        if self._program.size > 1:
            dist.broadcast(tensor, source, group=self._all)

    def gather_numbers(self, *numbers: int) -> list[tuple[int, ...]]:
        """The numbers of every rank, by rank. A collective of all ranks.

        Gloo ends the process where ranks send rows of different lengths. So all first send a row of
        one length, with a checksum of their call: DifferentCallsError is raised where calls differ.
        """
        call = zlib.crc32(self._flight.called.encode())
        first, more = numbers[:FEW_NUMBERS], numbers[FEW_NUMBERS:]
        rows = self._gather((call, len(numbers), *first, *(0,) * (FEW_NUMBERS - len(first))))
        if any(row[:2] != rows[0][:2] for row in rows):
            raise DifferentCallsError
        others = self._gather(more) if more else [()] * len(rows)
        return [(*row[2 : 2 + len(first)], *rest) for row, rest in zip(rows, others, strict=True)]

    def _gather(self, numbers: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The numbers of every rank, equally many, by rank."""
        row = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        rows = row.new_empty(self._program.size * len(numbers))
        dist.all_gather_single(rows, row, self._all)
        return [tuple(row) for row in rows.view(-1, len(numbers)).tolist()]

    def gather_values(self, value: Any) -> list[Any]:
        """The value of each rank as JSON has it, by rank. A collective of all ranks."""
        data = list(json.dumps(value).encode())
        lengths = [length for (length,) in self.gather_numbers(len(data))]
        whole = torch.zeros(sum(lengths), dtype=torch.uint8, device=self.device)
        parts = whole.split(lengths)
        parts[self._rank].copy_(torch.tensor(data, dtype=torch.uint8))
        self.total(whole)
        return [json.loads(bytes(part.tolist())) for part in parts]

    def collect(
        self, items: Sequence[tuple[Any, torch.Tensor]]
    ) -> Iterator[tuple[Any, torch.Tensor]]:
        """On rank 0 the items of all ranks, rank by rank: a description (JSON-able) and a tensor,
        on the CPU. Nothing on other ranks. A collective of all ranks."""
        tensors_here = [tensor.detach() for _, tensor in items]
        told = [[fact, [*t.shape], str(t.dtype).removeprefix("torch.")] for fact, t in items]
        described = self.gather_values(told)
        for some in parcels([t.numel() * t.itemsize for t in tensors_here]) if self._rank else ():
            row = packed([tensors_here[k].to(self.device) for k in some])
            if row.numel():
                self.send_now(row, 0)
        for source, rows in enumerate(() if self._rank else described):
            kinds = [(shape, getattr(torch, name)) for _, shape, name in rows]
            tensors = (
                self._parts(kinds, source) if source else (tensor.cpu() for tensor in tensors_here)
            )
            yield from zip((fact for fact, *_ in rows), tensors, strict=True)

    def _parts(
        self, kinds: Sequence[tuple[list[int], torch.dtype]], source: int
    ) -> Iterator[torch.Tensor]:
        """The tensors of these shapes and dtypes that another rank sends, on the CPU."""
        sizes = [nbytes(*kind) for kind in kinds]
        for some in parcels(sizes):
            size = sum(sizes[k] for k in some)
            row = torch.empty(size, dtype=torch.uint8, device=self.device)
            if size:
                self.receive_now(row, source)
            yield from unpacked(row.cpu(), [kinds[k] for k in some])

    def send_now(self, tensor: torch.Tensor, peer: int) -> None:
        """Send a tensor that no instruction names, and wait until it is sent."""
        dist.send(tensor, peer, group=self._all, tag=_NO_INSTRUCTION)

    def receive_now(self, tensor: torch.Tensor, peer: int) -> torch.Tensor:
        """Receive the tensor of `send_now` into `tensor`."""
        dist.recv(tensor, peer, group=self._all, tag=_NO_INSTRUCTION)
        return tensor

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of its data coordinate."""
        at = self._program.coordinate
        return not (at.pipeline or at.tensor)

    def send_beside(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Send a CPU tensor beside the messages of instructions, from any thread."""
        assert self._beside is not None
        self._beside.send([tensor], peer, tag).wait(FOREVER)

    def receive_beside(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Receive a CPU tensor, without time limit; the loss of `peer` ends the wait."""
        assert self._beside is not None
        self._beside.recv([tensor], peer, tag).wait(FOREVER)

    def _group(self, ranks: tuple[int, ...] | None, backend: str = "") -> dist.ProcessGroup | None:
        """The process group of some ranks, or of all; None where this rank is not one of them."""
        backend = backend or backend_of(self.device)
        members = None if ranks is None else list(ranks)
        if backend == "nccl":  # a group of two has messages of one direction, in their order
            os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
        # NCCL makes the communicator at once for a device, not at the first use within a step.
        device = self.device if backend == "nccl" else None
        group = dist.new_group(members, self._timeout, backend, device_id=device)
        if not isinstance(group, dist.ProcessGroup):
            return None
        self._groups.append(group)
        return group

    def abort(self) -> None:
        """Make every wait on these groups fail at once, and close their connections, so that ranks
        that wait for this one notice. Any thread may call it."""
        for group in tuple(self._groups):
            if self._by_gloo or group is self._beside:
                _abort(group)
            else:
                group.abort()

    def closed(self) -> set[int]:
        """The ranks that have closed their connections to this one, as far as the backend tells
        (NCCL does not). Leaves receives pending, so only for a rank that fails."""
        group = self._all
        if group is None or not self._by_gloo:
            return set()
        closed = set()
        for peer in range(self._program.size):
            if peer != self._rank:
                try:
                    group.recv([torch.empty(1)], peer, _NEVER_SENT)
                except RuntimeError as error:
                    closed |= {peer} if "by peer" in str(error) else set()
        return closed

    def close(self) -> None:
        """Destroy the groups, so that ranks that wait for this one notice at once."""
        self._pending.clear()
        for queue in (self._queue, self.beside):
            if queue is not None:
                queue.close()
        groups, self._groups = self._groups, []
        self._to, self._from, self._shared = {}, {}, {}
        self._plane = self._side = self._beside = self._all = None
        for axis in self.axes.values():
            axis.close()
        for group in groups:
            if dist.is_initialized():
                dist.destroy_process_group(group)


def _abort(group: dist.ProcessGroup) -> None:
    """Gloo has no abort of its own, but when a receive is late it fails all others of its group and
    closes the connections."""
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):  # closed already, or late, as it should be
                group.recv([torch.empty(1)], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))
