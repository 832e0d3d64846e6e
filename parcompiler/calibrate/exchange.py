"""Times messages between ranks and collectives, if torchrun started several.

rank 0 ── link ── another of its node        all-reduce, all-gather, reduce-scatter, all-to-all
rank 0 ─ network ─ one of another node       among the ranks of the first node
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist

from parcompiler.calibrate.journal import Journal
from parcompiler.calibrate.machine import Machine
from parcompiler.calibrate.work import seconds_of
from parcompiler.device import Link
from parcompiler.spmd.conversions import BYTES, Action

SIZES = tuple(4**n for n in range(5, 14))  # 1 KiB to 64 MiB
TIMEOUT = datetime.timedelta(minutes=10)
MESSAGE = "message"
LEAST_SHARE = 1 / 10  # of the time that must remain without the latency


Step = Callable[[int, str], None]  # shows the number of measurements done, and the next one


@dataclass(frozen=True, slots=True)
class RankExchange:
    """`action` of a value of `nbytes` among `ranks`, over the link or the network."""

    action: str
    place: str
    nbytes: int
    ranks: tuple[int, ...]

    @property
    def key(self) -> str:
        """Its name in the journal."""
        return f"{self.action} {self.place} {len(self.ranks)} ranks {self.nbytes}"

    @property
    def sent(self) -> float:
        """The bytes that each rank sends."""
        return BYTES[cast(Action, self.action)](self.nbytes, len(self.ranks))


@dataclass(frozen=True, slots=True)
class ExchangeTimes:
    """The measured seconds of exchanges."""

    seconds: tuple[tuple[RankExchange, float], ...] = ()

    def link(self, place: str) -> Link | None:
        """The link of ranks in a node ("link") or of nodes ("network"); None if not measured.

        The shortest message gives the latency, the longest the bandwidth.
        """
        points = sorted(
            (exchange.nbytes, seconds)
            for exchange, seconds in self.seconds
            if (exchange.action, exchange.place) == (MESSAGE, place)
        )
        if not points:
            return None
        (_, latency), (nbytes, longest) = points[0], points[-1]
        net = longest - latency
        return Link(nbytes / (net if net > 0 else longest), latency)

    def reached(self, link: Link) -> Mapping[str, list[tuple[float, float]]]:
        """The fraction of the link's bandwidth that each collective reaches, by bytes sent."""
        fractions: dict[str, list[tuple[float, float]]] = {}
        for exchange, seconds in self.seconds:
            net = seconds - link.latency
            if exchange.action != MESSAGE and net > LEAST_SHARE * seconds:
                point = exchange.sent, exchange.sent / (net * link.bandwidth)
                fractions.setdefault(exchange.action, []).append(point)
        return {action: sorted(points) for action, points in fractions.items()}


def exchanges(machine: Machine, most: int | None = None) -> Iterator[RankExchange]:
    """All exchanges to measure among these ranks; at most the `most` smallest sizes of each."""
    sizes = SIZES[:most]
    on_node = machine.ranks_per_node
    if on_node > 1:
        yield from (RankExchange(MESSAGE, "link", nbytes, (0, 1)) for nbytes in sizes)
        node = tuple(range(on_node))
        for action in BYTES:
            yield from (RankExchange(action, "link", nbytes, node) for nbytes in sizes)
    if machine.ranks > on_node:
        yield from (RankExchange(MESSAGE, "network", nbytes, (0, on_node)) for nbytes in sizes)


def measure_exchanges(
    wanted: Sequence[RankExchange],
    machine: Machine,
    journal: Journal | None,
    budget: float,
    step: Step,
) -> ExchangeTimes:
    """Time exchanges that are not in rank 0's journal. Every rank calls this."""
    times: list[tuple[RankExchange, float]] = []
    with _started(machine):
        known = [None if journal is None else journal.get(one.key) for one in wanted]
        dist.broadcast_object_list(known, src=0)
        # Every rank makes a group for each set of ranks, in the same order.
        sets = dict.fromkeys(one.ranks for one in wanted)
        groups = {ranks: cast(dist.ProcessGroup, dist.new_group(list(ranks))) for ranks in sets}
        for number, (exchange, seconds) in enumerate(zip(wanted, known, strict=True)):
            step(number, exchange.key)
            if seconds is None:
                seconds = _seconds(exchange, machine, groups[exchange.ranks], budget)
                if journal is not None:
                    journal.add(exchange.key, seconds)
            times.append((exchange, seconds))
    return ExchangeTimes(tuple(times))


@contextmanager
def _started(machine: Machine) -> Iterator[None]:
    """Start torch.distributed, unless the caller has."""
    if dist.is_initialized():
        yield
        return
    if machine.kind == "cuda":
        torch.cuda.set_device(machine.device)
    dist.init_process_group("nccl" if machine.kind == "cuda" else "gloo", timeout=TIMEOUT)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _seconds(
    exchange: RankExchange, machine: Machine, group: dist.ProcessGroup, budget: float
) -> float:
    """The median time on rank 0, which decides the number of calls of all ranks."""

    def agreed(seconds: float) -> float:
        shared = torch.tensor([seconds], dtype=torch.float64, device=machine.device)
        dist.broadcast(shared, src=0)
        return float(shared)

    takes_part = machine.rank in exchange.ranks
    call = _call(exchange, machine, group) if takes_part else lambda: None
    dist.barrier()
    seconds = seconds_of(call, budget, machine.synchronize, shortest=0.0, agreed=agreed)
    return seconds / (2 if exchange.action == MESSAGE else 1)  # a message goes there and back


def _call(
    exchange: RankExchange, machine: Machine, group: dist.ProcessGroup
) -> Callable[[], object]:
    """This rank's part of the exchange."""
    n = len(exchange.ranks)
    rows = max(1, exchange.nbytes // 4 // n)
    whole = torch.ones(rows * n, device=machine.device)
    part = torch.ones(rows, device=machine.device)
    if exchange.action == "all-gather":
        return lambda: dist.all_gather_single(whole, part, group=group)
    if exchange.action == "reduce-scatter":
        return lambda: dist.reduce_scatter_single(part, whole, group=group)
    if exchange.action == "all-to-all":  # each rank holds a piece of the value
        mine, theirs = (torch.ones(max(1, rows // n) * n, device=machine.device) for _ in "ab")
        return lambda: dist.all_to_all_single(theirs, mine, group=group)
    if exchange.action == "all-reduce":
        # refilled with ones, so that repeated sums stay bounded
        return lambda: dist.all_reduce(whole.fill_(1.0), group=group)
    first, other = exchange.ranks

    def there_and_back() -> None:
        if machine.rank == first:
            dist.send(whole, other, group=group)
            dist.recv(whole, other, group=group)
        else:
            dist.recv(whole, first, group=group)
            dist.send(whole, first, group=group)

    return there_and_back
