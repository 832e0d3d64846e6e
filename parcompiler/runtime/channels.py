"""Every process group of a rank, made in one place, and the messages that go through them.

    rank 0 ──(0, 1)──► rank 1        one group per directed pair: a pending receive
    rank 0 ◄──(1, 0)── rank 1        never stands in the way of a send

A message is known by the order on its channel, so both ends must agree on shape, dtype and order;
the verifier has proved that before anything starts.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from parcompiler.errors import LaunchError
from parcompiler.runtime.device import backend_of
from parcompiler.runtime.program import RankProgram, Value

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


class Channels:
    """The process groups of this rank; `open` makes them."""

    def __init__(self, program: RankProgram, device: torch.device, timeout: timedelta) -> None:
        self.device = device
        self._program = program
        self._rank = program.rank
        self._timeout = timeout
        self._pairs: dict[tuple[int, int], dist.ProcessGroup | None] = {}
        self._shared: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self._all: dist.ProcessGroup | None = None
        self._pending: dict[int, deque[tuple[dist.Work, torch.Tensor]]] = defaultdict(deque)

    def open(self) -> None:
        """Make the groups: a collective. Raises LaunchError when the ranks' programs differ."""
        self._all = self._group(None)
        self._check_equal(self._program.digest, "programs")
        for pair in self._program.channels:
            self._pairs[pair] = self._group(pair)
        for ranks in sorted({item.ranks for item in self._program.tied.values()}):
            self._shared[ranks] = self._group(ranks)

    def send(self, tensor: torch.Tensor, value: Value, peer: int) -> None:
        """Start sending `value` in its order in memory; the tensor is held until it is out."""
        tensor = (tensor.permute(value.order) if value.order else tensor).contiguous()
        pending = self._pending[peer]
        while pending and (len(pending) >= MOST_PENDING or pending[0][0].is_completed()):
            pending.popleft()[0].wait()
        work = dist.isend(tensor, peer, group=self._pairs[self._rank, peer])
        assert work is not None
        pending.append((work, tensor))

    def receive(self, value: Value, peer: int) -> Receipt:
        """Post a receive into a new buffer."""
        order = value.order or tuple(range(len(value.shape)))
        size = [value.shape[dim] for dim in order]
        buffer = torch.empty(size, dtype=value.dtype, device=self.device)
        work = dist.irecv(buffer, peer, group=self._pairs[peer, self._rank])
        assert work is not None
        return Receipt(buffer.permute([order.index(dim) for dim in range(len(order))]), work)

    def flush(self) -> None:
        """Wait until everything is out."""
        for pending in self._pending.values():
            while pending:
                pending.popleft()[0].wait()

    def sum(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> None:
        """Add up a tensor over `ranks`, in place."""
        dist.all_reduce(tensor, group=self._shared[ranks])

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Give every rank the tensor of `source`, in place."""
        dist.broadcast(tensor, source, group=self._all)

    def send_now(self, tensor: torch.Tensor, peer: int) -> None:
        """Send a tensor that no instruction names, and wait until it is out."""
        dist.send(tensor, peer, group=self._all)

    def receive_now(self, tensor: torch.Tensor, peer: int) -> torch.Tensor:
        """Receive into `tensor` what `send_now` sends."""
        dist.recv(tensor, peer, group=self._all)
        return tensor

    def _group(self, ranks: tuple[int, ...] | None) -> dist.ProcessGroup | None:
        """The process group of some ranks, or of all; None where this rank is not one of them."""
        backend = backend_of(self.device)
        members = None if ranks is None else list(ranks)
        group = dist.new_group(members, timeout=self._timeout, backend=backend)
        return group if isinstance(group, dist.ProcessGroup) else None

    def _check_equal(self, digest: str, what: str) -> None:
        """Raise LaunchError on every rank unless all ranks have the same digest."""
        number = int(digest, 16)
        bounds = torch.tensor([number, -number], dtype=torch.int64, device=self.device)
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=self._all)
        if bounds.tolist() != [number, -number]:
            message = f"the ranks run different {what}: export once, start all ranks from that"
            raise LaunchError(message)

    def close(self) -> None:
        """Destroy the groups, so that ranks that wait on this one are told at once."""
        self._pending.clear()
        groups = [*self._pairs.values(), *self._shared.values(), self._all]
        self._pairs, self._shared, self._all = {}, {}, None
        for group in groups:
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)
