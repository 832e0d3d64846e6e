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
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from parcompiler.errors import LaunchError
from parcompiler.runtime.axis import Axis, in_memory
from parcompiler.runtime.device import backend_of
from parcompiler.runtime.files import Fingerprint
from parcompiler.runtime.program import RankProgram, Value
from parcompiler.runtime.turns import Here, Started, Turn, Turns, turns_on

# What gloo tells messages of two ranks apart by, so that those of different calls never meet; for
# NCCL only their order counts. Receives of the last kind wait for what nobody sends.
TRAINING, EVALUATION, _OUTSIDE, _NOBODYS = range(4)
MOST_PENDING = 2  # sends on one channel that may be unfinished before the next one waits


@dataclass(frozen=True, slots=True)
class Receipt:
    """A posted receive: the tensor is valid after `wait`."""

    tensor: torch.Tensor
    work: dist.Work

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

    def send(self, tensor: torch.Tensor, tag: int) -> dist.Work:
        """Start sending."""
        return self.group.send([_real(tensor)], self.peer, tag)

    def receive(self, tensor: torch.Tensor, tag: int) -> dist.Work:
        """Post a receive."""
        return self.group.recv([_real(tensor)], self.peer, tag)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without complex numbers, which backends do not send."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class Channels:
    """The process groups of this rank; `open` makes them.

    `failed` is told of an error that no wait raises.
    """

    def __init__(
        self,
        program: RankProgram,
        device: torch.device,
        timeout: timedelta,
        failed: Callable[[Exception], object],
    ) -> None:
        self.device = device
        self._failed = failed
        self.tag = TRAINING  # of the messages of instructions
        self._program = program
        self._rank = program.rank
        self._timeout = timeout
        self._groups: list[dist.ProcessGroup] = []
        self._to: dict[int, Line] = {}
        self._from: dict[int, Line] = {}
        self._shared: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self.axis: Axis | None = None  # the tensor ranks of this rank's line, if there are others
        self.row: Axis | None = None  # the data ranks, if layers exchange something with them
        self._plane: dist.ProcessGroup | None = None  # all ranks that hold rows of the vocabulary
        self._turns: Turns | None = None  # of its collectives
        self._all: dist.ProcessGroup | None = None
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
            self._turns = turns_on(self.device, self._failed)

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
        pending.append((self._to[peer].send(tensor, self.tag), tensor))

    def receive(self, value: Value, peer: int) -> Receipt:
        """Post a receive into a new buffer."""
        order = value.order
        size = [value.shape[dim] for dim in order] if order else value.shape
        buffer = torch.empty(size, dtype=value.dtype, device=self.device)
        work = self._from[peer].receive(buffer, self.tag)
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

    def sum(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> dist.Work:
        """Start adding up a tensor over `ranks`, in place."""
        group = self._shared[ranks]
        work: dist.Work | None = dist.all_reduce(tensor, group=group, async_op=True)
        assert work is not None
        return work

    def total(self, tensor: torch.Tensor) -> None:
        """Add up a tensor over all ranks, in place."""
        dist.all_reduce(tensor, group=self._all)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Give every rank the tensor of `source`, in place."""
        dist.broadcast(tensor, source, group=self._all)

    def told(self, *numbers: int) -> list[tuple[int, ...]]:
        """The numbers that every rank tells the others, by rank. A collective of all ranks."""
        own = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        every = own.new_empty(self._program.size * len(numbers))
        dist.all_gather_single(every, own, self._all)
        return [tuple(row) for row in every.view(-1, len(numbers)).tolist()]

    def send_now(self, tensor: torch.Tensor, peer: int) -> None:
        """Send a tensor that no instruction names, and wait until it is out."""
        dist.send(tensor, peer, group=self._all, tag=_OUTSIDE)

    def receive_now(self, tensor: torch.Tensor, peer: int) -> torch.Tensor:
        """Receive into `tensor` what `send_now` sends."""
        dist.recv(tensor, peer, group=self._all, tag=_OUTSIDE)
        return tensor

    def _direction(self, source: int, target: int) -> dist.ProcessGroup | None:
        """The group for messages from one rank to another; None where this rank is neither."""
        if backend_of(self.device) == "gloo":
            return self._all if self._rank in (source, target) else None
        return self._group((source, target))

    def _group(self, ranks: tuple[int, ...] | None) -> dist.ProcessGroup | None:
        """The process group of some ranks, or of all; None where this rank is not one of them."""
        backend = backend_of(self.device)
        members = None if ranks is None else list(ranks)
        group = dist.new_group(members, timeout=self._timeout, backend=backend)
        if not isinstance(group, dist.ProcessGroup):
            return None
        self._groups.append(group)
        return group

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

    def abort(self) -> None:
        """Let everything that waits for messages of these groups fail at once, from any thread, and
        close their connections, so that ranks that wait for this one are told."""
        for group in tuple(self._groups):
            if backend_of(self.device) == "gloo":
                _abort(group)
            else:
                group.abort()

    def closed(self) -> set[int]:
        """The ranks that have closed their connections to this one, as far as that shows: NCCL does
        not tell. Only for a rank that fails: receives are left behind."""
        group = self._all
        if group is None or backend_of(self.device) != "gloo":
            return set()
        peers = [peer for peer in range(self._program.size) if peer != self._rank]
        return {peer for peer in peers if "by peer" in _posted(group, peer)}

    def close(self) -> None:
        """Destroy the groups, so that ranks that wait on this one are told at once."""
        self._pending.clear()
        if self._turns is not None:
            self._turns.close()
        groups, self._groups = self._groups, []
        self._to, self._from, self._shared = {}, {}, {}
        self._plane = self._all = None
        for line in (self.axis, self.row):
            if line is not None:
                line.close()
        for group in groups:
            if dist.is_initialized():
                dist.destroy_process_group(group)


def _posted(group: dist.ProcessGroup, peer: int) -> str:
    """Post a receive that no send of this runtime matches; why that failed, or nothing."""
    try:
        group.recv([torch.empty(1)], peer, _NOBODYS)
    except RuntimeError as error:
        return str(error)
    return ""


def _abort(group: dist.ProcessGroup) -> None:
    """Gloo has no abort of its own, but when a receive is late it fails all others of its group and
    closes the connections."""
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):  # closed already, or late, as it should be
                group.recv([torch.empty(1)], peer, _NOBODYS).wait(timedelta(milliseconds=1))
