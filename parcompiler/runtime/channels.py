"""Every process group of a rank, made in one place, and the messages that go through them.

    rank 0 ──────────► rank 1        nccl: one group per directed pair, so that a pending
    rank 0 ◄────────── rank 1        receive never stands in the way of a send

Gloo keeps the two directions apart itself, and one group of all ranks serves all messages: every
group more would cost it a thread, and wake-ups for what could be handled together.
A message is known by the order on its channel, so both ends must agree on shape, dtype and order;
the verifier has proved that before anything starts.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist

from parcompiler.errors import LaunchError
from parcompiler.runtime.axis import Axis, in_memory
from parcompiler.runtime.device import backend_of
from parcompiler.runtime.files import Fingerprint
from parcompiler.runtime.program import RankProgram, Value
from parcompiler.runtime.turns import Here, Started, Turn, Turns, turns_on

MOST_PENDING = 2  # sends on one channel that may be unfinished before the next one waits


@dataclass(frozen=True, slots=True)
class Posted:
    """Something that was started, by its number among the works of its channels.

    They own it. Gloo keeps a connection open for as long as anything holds work on it, and the
    traceback of an error may hold anything: closing must not wait for that.
    """

    works: dict[int, dist.Work]
    number: int

    def wait(self) -> None:
        """Come back when it is done; once."""
        self.works.pop(self.number).wait()  # no name for it here: a traceback would hold it


@dataclass(frozen=True, slots=True)
class Receipt:
    """A posted receive: the tensor is valid after `wait`."""

    tensor: torch.Tensor
    work: Posted

    def wait(self) -> torch.Tensor:
        """The received tensor."""
        self.work.wait()
        return self.tensor


@dataclass(frozen=True, slots=True)
class Line:
    """One direction between this rank and a peer, which is rank `peer` of the pair's group.

    It does what `dist.isend` and `dist.irecv` do, without what they look up for every message.
    """

    group: dist.ProcessGroup
    peer: int

    def send(self, tensor: torch.Tensor) -> dist.Work:
        """Start sending."""
        return self.group.send([_real(tensor)], self.peer, 0)

    def receive(self, tensor: torch.Tensor) -> dist.Work:
        """Post a receive."""
        return self.group.recv([_real(tensor)], self.peer, 0)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without complex numbers, which backends do not send."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class Channels:
    """The process groups of this rank; `open` makes them."""

    def __init__(self, program: RankProgram, device: torch.device, timeout: timedelta) -> None:
        self.device = device
        self._program = program
        self._rank = program.rank
        self._timeout = timeout
        self._pairs: list[dist.ProcessGroup] = []
        self._to: dict[int, Line] = {}
        self._from: dict[int, Line] = {}
        self._shared: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self.axis: Axis | None = None  # the tensor ranks of this rank's line, if there are others
        self.row: Axis | None = None  # the data ranks, if layers exchange something with them
        self._plane: dist.ProcessGroup | None = None  # all ranks that hold rows of the vocabulary
        self._turns: Turns | None = None  # of its collectives
        self._all: dist.ProcessGroup | None = None
        self._works: dict[int, dist.Work] = {}
        self._numbers = count()
        self._pending: dict[int, deque[tuple[dist.Work, torch.Tensor]]] = defaultdict(deque)

    def open(self, files: Fingerprint) -> None:
        """Make the groups: a collective. Raises LaunchError when the ranks' programs or files
        differ."""
        self._all = self._group(None)
        self._check_equal(files)
        grid = self._program.grid
        for pair in self._program.channels:
            for column in grid.columns():
                self._open_direction(*(grid.rank(position, *column) for position in pair))
        for ranks in self._program.summing():
            self._shared[ranks] = self._group(ranks)
        if grid.tensor > 1:
            groups = [self._group(ranks) for ranks in grid.lines()]
            line = next(group for group in groups if group is not None)
            self.axis = Axis(self._program.coordinate.tensor, grid.tensor, line, self.device)
        if self._program.synchronized:
            groups = [self._group(ranks) for ranks in grid.rows()]
            row = next(group for group in groups if group is not None)
            self.row = Axis(self._program.coordinate.data, grid.data, row, self.device)
        if self._program.rows:
            groups = [self._group(grid.plane(data)) for data in range(grid.data)]
            self._plane = groups[self._program.coordinate.data]
            self._turns = turns_on(self.device)

    def _open_direction(self, source: int, target: int) -> None:
        """Make the line from one rank to another if this rank is at an end of it."""
        outward = source == self._rank
        group = self._direction(source, target)
        if group is not None:
            peer = target if outward else source
            lines = self._to if outward else self._from
            lines[peer] = Line(group, dist.get_group_rank(group, peer))

    def send(self, tensor: torch.Tensor, value: Value, peer: int) -> None:
        """Start sending `value` in its order in memory; the tensor is held until it is out."""
        tensor = in_memory(tensor.permute(value.order) if value.order else tensor)
        pending = self._pending[peer]
        while pending and (len(pending) >= MOST_PENDING or pending[0][0].is_completed()):
            pending.popleft()[0].wait()
        pending.append((self._to[peer].send(tensor), tensor))

    def receive(self, value: Value, peer: int) -> Receipt:
        """Post a receive into a new buffer."""
        order = value.order
        size = [value.shape[dim] for dim in order] if order else value.shape
        buffer = torch.empty(size, dtype=value.dtype, device=self.device)
        work = self._posted(self._from[peer].receive(buffer))
        if order:
            buffer = buffer.permute([order.index(dim) for dim in range(len(order))])
        return Receipt(buffer, work)

    def flush(self) -> None:
        """Wait until everything is out."""
        for pending in self._pending.values():
            while pending:
                pending.popleft()[0].wait()
        if self._turns is not None:
            self._turns.flush()

    def spread(self, own: torch.Tensor | None, value: Value, source: int) -> Turn:
        """Give all ranks of the vocabulary `own` of the rank `source`."""
        if own is None:
            own = torch.empty(value.shape, dtype=value.dtype, device=self.device)
        given = in_memory(own)
        turn = self._turn(
            lambda plane: (given, dist.broadcast(_real(given), source, plane, async_op=True))
        )
        return Here(given) if source == self._rank else turn

    def collect(self, own: Callable[[], torch.Tensor], target: int) -> Turn:
        """Add up what the ranks of the vocabulary have, in place, for the tensor line of the rank
        `target`. `own` is asked for once all before it is done."""

        def start(plane: dist.ProcessGroup) -> Started:
            part = in_memory(own())
            if self._program.tensor > 1:
                return part, dist.all_reduce(_real(part), group=plane, async_op=True)
            return part, dist.reduce(_real(part), target, group=plane, async_op=True)

        return self._turn(start)

    def largest(self, own: torch.Tensor) -> Turn:
        """Find the largest over the ranks of the vocabulary, in place."""
        operation = dist.ReduceOp.MAX
        return self._turn(
            lambda plane: (own, dist.all_reduce(own, operation, plane, async_op=True))
        )

    def summed(self, own: torch.Tensor) -> Turn:
        """Add up over the ranks of the vocabulary, in place."""
        return self._turn(lambda plane: (own, dist.all_reduce(own, group=plane, async_op=True)))

    def gathered(self, own: torch.Tensor) -> Turn:
        """Gather what the ranks of the vocabulary have, in their order: [ranks, ...]."""
        ranks = len(self._program.grid.plane(self._program.coordinate.data))
        flat = own.new_empty(ranks * own.numel())

        def start(plane: dist.ProcessGroup) -> Started:
            work = dist.all_gather_single(flat, own.reshape(-1), plane, async_op=True)
            return flat.view(ranks, *own.shape), work

        return self._turn(start)

    def _turn(self, start: Callable[[dist.ProcessGroup], Started]) -> Turn:
        """Give a collective of the vocabulary its turn."""
        assert self._turns is not None

        def begin() -> Started:
            assert self._plane is not None
            return start(self._plane)

        return self._turns.give(begin)

    def sum(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Posted:
        """Start adding up a tensor over `ranks`, in place."""
        return self._posted(dist.all_reduce(tensor, group=self._shared[ranks], async_op=True))

    def total(self, tensor: torch.Tensor) -> None:
        """Add up a tensor over all ranks, in place."""
        self._posted(dist.all_reduce(tensor, group=self._all, async_op=True)).wait()

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Give every rank the tensor of `source`, in place."""
        self._posted(dist.broadcast(tensor, source, group=self._all, async_op=True)).wait()

    def told(self, *numbers: int) -> list[tuple[int, ...]]:
        """The numbers that every rank tells the others, by rank. A collective of all ranks."""
        own = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        every = own.new_empty(self._program.size * len(numbers))
        self._posted(dist.all_gather_single(every, own, self._all, async_op=True)).wait()
        return [tuple(row) for row in every.view(-1, len(numbers)).tolist()]

    def send_now(self, tensor: torch.Tensor, peer: int) -> None:
        """Send a tensor that no instruction names, and wait until it is out."""
        self._posted(dist.isend(tensor, peer, group=self._all)).wait()

    def receive_now(self, tensor: torch.Tensor, peer: int) -> torch.Tensor:
        """Receive into `tensor` what `send_now` sends."""
        self._posted(dist.irecv(tensor, peer, group=self._all)).wait()
        return tensor

    def _posted(self, work: dist.Work | None) -> Posted:
        """Keep what was started until somebody waits for it."""
        assert work is not None
        number = next(self._numbers)
        self._works[number] = work
        return Posted(self._works, number)

    def _direction(self, source: int, target: int) -> dist.ProcessGroup | None:
        """The group for messages from one rank to another; None where this rank is neither."""
        if backend_of(self.device) == "gloo":
            return self._all if self._rank in (source, target) else None
        group = self._group((source, target))
        if group is not None:
            self._pairs.append(group)
        return group

    def _group(self, ranks: tuple[int, ...] | None) -> dist.ProcessGroup | None:
        """The process group of some ranks, or of all; None where this rank is not one of them."""
        backend = backend_of(self.device)
        members = None if ranks is None else list(ranks)
        group = dist.new_group(members, timeout=self._timeout, backend=backend)
        return group if isinstance(group, dist.ProcessGroup) else None

    def _check_equal(self, files: Fingerprint) -> None:
        """Raise LaunchError on every rank unless all ranks have the same program and files."""
        everyone = self.told(int(self._program.digest, 16), int(files.digest, 16))
        others = [rank for rank, numbers in enumerate(everyone) if numbers != everyone[0]]
        if others:
            same = everyone[others[0]][0] == everyone[0][0]
            edited = f"; edited on this rank: {', '.join(files.edited)}" if files.edited else ""
            message = (
                f"the ranks run different {'scripts or weights' if same else 'programs'} (rank "
                f"{others[0]} has others than rank 0{edited}): export once, start all ranks from "
                "copies of that folder"
            )
            raise LaunchError(message)

    def close(self) -> None:
        """Destroy the groups, so that ranks that wait on this one are told at once."""
        self._pending.clear()
        if self._turns is not None:
            self._turns.close()
        self._works.clear()
        lines = [line for line in (self.axis, self.row) if line is not None]
        own = [line.group for line in lines]
        groups = [*self._pairs, *self._shared.values(), *own, self._plane, self._all]
        self._pairs, self._to, self._from, self._shared = [], {}, {}, {}
        self._plane = self._all = None
        for line in lines:
            line.close()
        for group in groups:
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)
