"""Ranks as threads of one process, and a network between them that delays whatever it may.

One thread runs at a time. Where a rank sends, receives or waits, a seed draws what happens next: a
rank that can go on goes on, or the first message of a channel arrives. So a seed is one order of
events, found again whenever it is asked for, and nothing takes time.

    rank 0 ─► x mb 0, x mb 1 ─► rank 1      the messages of a directed channel keep their order
    rank 1 ─► x.grad mb 0 ────► rank 0      those of different channels do not

When no rank can go on and nothing can arrive, that is an error, and says who waits for what.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from random import Random
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from parcompiler.runtime.channels import Channels
from parcompiler.runtime.collective_queue import Receipt
from parcompiler.runtime.program import RankProgram, Value

T = TypeVar("T")

EAGER = "messages arrive at any time"
LATE = "messages arrive when no rank can go on"
BLOCKING = "messages arrive when no rank can go on, and a send ends when its receive is posted"
HABITS = (EAGER, LATE, BLOCKING)


class Deadlock(Exception):
    """No rank can go on."""


class Stopped(BaseException):
    """Ends the other ranks after one has failed."""


@dataclass
class Channel:
    """From one rank to another: tensors that were sent, and buffers where they are awaited."""

    sent: list[torch.Tensor] = field(default_factory=list)
    posted: list[torch.Tensor] = field(default_factory=list)
    arrived: int = 0

    @property
    def ready(self) -> bool:
        """Whether a message can arrive."""
        return self.arrived < min(len(self.sent), len(self.posted))

    def deliver(self) -> None:
        """Let a message arrive: with what its tensor holds now, as it was read this late."""
        source, target = self.sent[self.arrived], self.posted[self.arrived]
        assert (source.shape, source.dtype) == (target.shape, target.dtype)
        with torch.no_grad():
            target.copy_(source)
        self.arrived += 1


@dataclass
class Waiting:
    """A rank that has handed over: when it can go on, and what for."""

    ready: Callable[[], bool]
    reason: str
    go: threading.Lock = field(default_factory=threading.Lock)


class Network:
    """The channels between `size` ranks, and who runs. It serves one step."""

    def __init__(self, size: int, seed: int, habit: str | None = None) -> None:
        self.size = size
        self.habit = HABITS[seed % len(HABITS)] if habit is None else habit
        self.random = Random(seed)
        self.channels: defaultdict[tuple[int, int], Channel] = defaultdict(Channel)
        self.meetings: defaultdict[object, dict[int, torch.Tensor]] = defaultdict(dict)
        self.waiting: dict[int, Waiting] = {}
        self.error: BaseException | None = None

    def run(self, bodies: Sequence[Callable[[], T]]) -> list[T]:
        """Run a function for each rank, and return their results.

        Raises what a rank raises, or Deadlock.
        """
        assert len(bodies) == self.size
        results: dict[int, T] = {}

        def body(rank: int, entrance: Waiting) -> None:
            try:
                self._enter(entrance)
                results[rank] = bodies[rank]()
                self._next()
            except Stopped:
                pass
            except BaseException as error:
                self._stop(error)

        for rank in range(self.size):
            self.waiting[rank] = self._closed(lambda: True, "begins")
        threads = [threading.Thread(target=body, args=item) for item in self.waiting.items()]
        for thread in threads:
            thread.start()
        self._next()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error
        return [results[rank] for rank in range(self.size)]

    def wait(self, rank: int, ready: Callable[[], bool], reason: str) -> None:
        """Hand over; come back when `ready` says so and the seed draws this rank."""
        self.waiting[rank] = entrance = self._closed(ready, reason)
        self._next()
        self._enter(entrance)

    def _closed(self, ready: Callable[[], bool], reason: str) -> Waiting:
        """A place to wait at."""
        made = Waiting(ready, reason)
        made.go.acquire()
        return made

    def _enter(self, entrance: Waiting) -> None:
        """Wait until the place is opened."""
        entrance.go.acquire()
        if self.error is not None:
            raise Stopped

    def _next(self) -> None:
        """Draw what happens until a rank goes on."""
        while self.waiting and self.error is None:
            able: list[int | Channel] = [r for r, place in self.waiting.items() if place.ready()]
            arriving = [channel for channel in self.channels.values() if channel.ready]
            events = [*able, *arriving] if self.habit == EAGER else able or [*arriving]
            if not events:
                self._stop(Deadlock(self._description()))
                return
            event = self.random.choice(events)
            if isinstance(event, int):
                self.waiting.pop(event).go.release()
                return
            event.deliver()

    def _stop(self, error: BaseException) -> None:
        """End all ranks."""
        self.error = self.error or error
        while self.waiting:
            self.waiting.popitem()[1].go.release()

    def _description(self) -> str:
        """Who waits for what."""
        lines = [f"rank {rank} {place.reason}" for rank, place in sorted(self.waiting.items())]
        return "\n".join(["no rank can go on:", *lines])


class Arrival:
    """What a receipt waits for: message `number` of a channel."""

    def __init__(self, network: Network, rank: int, peer: int, number: int) -> None:
        self.network, self.rank, self.number = network, rank, number
        self.channel = network.channels[peer, rank]
        self.reason = f"waits for message {number} of rank {peer}"

    def wait(self) -> bool:
        """Come back when it has arrived."""
        self.network.wait(self.rank, lambda: self.channel.arrived > self.number, self.reason)
        return True


class Done:
    """Something that needs no waiting."""

    def wait(self) -> bool:
        """It is there."""
        return True


class DelayedChannels(Channels):
    """The channels of one rank on a network."""

    def __init__(self, program: RankProgram, network: Network) -> None:
        super().__init__(program, torch.device("cpu"), timedelta(), print)
        self.network = network
        self.rank = program.rank
        self.met: Counter[tuple[int, ...]] = Counter()

    def send(self, tensor: torch.Tensor, value: Value, peer: int) -> None:
        """Start sending; the tensor is read when it arrives."""
        tensor = (tensor.permute(value.order) if value.order else tensor).contiguous()
        channel = self.network.channels[self.rank, peer]
        channel.sent.append(tensor)
        number = len(channel.sent)
        blocking = self.network.habit == BLOCKING
        reason = f"sends message {number - 1} to rank {peer}"
        self.network.wait(self.rank, lambda: not blocking or len(channel.posted) >= number, reason)

    def receive(self, value: Value, peer: int) -> Receipt:
        """Post a receive into a buffer that holds no numbers yet."""
        order = value.order or tuple(range(len(value.shape)))
        buffer = torch.empty([value.shape[dim] for dim in order], dtype=value.dtype)
        if buffer.is_floating_point():
            buffer.fill_(torch.nan)
        posted = self.network.channels[peer, self.rank].posted
        posted.append(buffer)
        work = Arrival(self.network, self.rank, peer, len(posted) - 1)
        self.network.wait(self.rank, lambda: True, "has posted a receive")
        tensor = buffer.permute([order.index(dim) for dim in range(len(order))])
        return Receipt(tensor, cast(dist.Work, work))

    def flush(self) -> None:
        """Wait until everything is out."""
        own = [c for (source, _), c in self.network.channels.items() if source == self.rank]
        self.network.wait(
            self.rank, lambda: all(c.arrived == len(c.sent) for c in own), "waits for its sends"
        )

    def sum(
        self, tensor: torch.Tensor, ranks: tuple[int, ...], *, in_order: bool = False
    ) -> dist.Work:
        """Add up a tensor over `ranks`, in their order, at once."""
        parts = self._meet(ranks, tensor)
        first, *rest = (parts[rank] for rank in ranks)
        with torch.no_grad():
            tensor.copy_(first)
            for part in rest:
                tensor.add_(part)
        return cast(dist.Work, Done())

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Give every rank the tensor of `source`."""
        with torch.no_grad():
            tensor.copy_(self._meet(tuple(range(self.network.size)), tensor)[source])

    def total(self, tensor: torch.Tensor) -> None:
        """Add up a tensor over all ranks, in their order."""
        self.sum(tensor, tuple(range(self.network.size)))

    def _meet(self, ranks: tuple[int, ...], tensor: torch.Tensor) -> dict[int, torch.Tensor]:
        """What each rank brought to the next meeting of these ranks."""
        self.met[ranks] += 1
        parts = self.network.meetings[ranks, self.met[ranks]]
        parts[self.rank] = tensor.detach().clone()
        reason = f"meets ranks {', '.join(map(str, ranks))}"
        self.network.wait(self.rank, lambda: len(parts) == len(ranks), reason)
        return parts
