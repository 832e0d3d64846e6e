"""Messages between ranks and collectives, timed when torchrun started several.

rank 0 ── link ── another of its node        all-reduce, all-gather, reduce-scatter, all-to-all
rank 0 ─ network ─ one of another node       among the ranks of the first node
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist

from parcompiler.calibrate.bar import Step
from parcompiler.calibrate.journal import Journal
from parcompiler.calibrate.machine import Machine
from parcompiler.calibrate.timing import FEWEST, MOST
from parcompiler.device import Link
from parcompiler.spmd.conversions import BYTES, Action

SIZES = tuple(4**n for n in range(5, 14))  # 1 KiB to 64 MiB
TIMEOUT = datetime.timedelta(minutes=10)
MESSAGE = "message"
LEAST_SHARE = 1 / 10  # of the time: what remains of a collective without its latency


@dataclass(frozen=True, slots=True)
class Exchange:
    """`action` of a value of `nbytes` among `ranks`, over the link or the network."""

    action: str
    place: str
    nbytes: int
    ranks: tuple[int, ...]

    @property
    def key(self) -> str:
        """What tells this from every other exchange."""
        return f"{self.action} {self.place} {len(self.ranks)} ranks {self.nbytes}"

    @property
    def sent(self) -> float:
        """The bytes that each rank sends."""
        n = len(self.ranks)
        return BYTES[cast(Action, self.action)](self.nbytes, n)


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What was measured: seconds of exchanges."""

    seconds: tuple[tuple[Exchange, float], ...] = ()

    @property
    def link(self) -> Link | None:
        """What joins ranks of a node; None where it was not measured."""
        return self._fitted("link")

    @property
    def network(self) -> Link | None:
        """What joins nodes; None where it was not measured."""
        return self._fitted("network")

    def reached(self, link: Link) -> Mapping[str, list[tuple[float, float]]]:
        """The fraction of the link's bandwidth that each collective reaches, by bytes sent."""
        found: dict[str, list[tuple[float, float]]] = {}
        for exchange, seconds in self.seconds:
            net = seconds - link.latency
            if exchange.action != MESSAGE and net > LEAST_SHARE * seconds:
                point = exchange.sent, exchange.sent / (net * link.bandwidth)
                found.setdefault(exchange.action, []).append(point)
        return {action: sorted(points) for action, points in found.items()}

    def _fitted(self, place: str) -> Link | None:
        """The latency of the shortest message, the bandwidth of the longest."""
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


def exchanges(machine: Machine, most: int | None = None) -> Iterator[Exchange]:
    """All that is measured among these ranks; at most `most` sizes of each, the smallest."""
    sizes = SIZES[:most]
    here = machine.ranks_per_node
    if here > 1:
        yield from (Exchange(MESSAGE, "link", nbytes, (0, 1)) for nbytes in sizes)
        node = tuple(range(here))
        for action in BYTES:
            yield from (Exchange(action, "link", nbytes, node) for nbytes in sizes)
    if machine.ranks > here:
        yield from (Exchange(MESSAGE, "network", nbytes, (0, here)) for nbytes in sizes)


def measure_exchanges(
    wanted: Sequence[Exchange], machine: Machine, journal: Journal | None, budget: float, step: Step
) -> Exchanged:
    """Time what rank 0's journal does not have yet. Every rank calls this."""
    found: list[tuple[Exchange, float]] = []
    with _started(machine):
        known = _agreed([None if journal is None else journal.get(one.key) for one in wanted])
        groups = _groups(wanted)
        for number, (exchange, seconds) in enumerate(zip(wanted, known, strict=True)):
            step(number, exchange.key)
            if seconds is None:
                seconds = _seconds(exchange, machine, groups[exchange.ranks], budget)
                if journal is not None:
                    journal.add(exchange.key, seconds)
            found.append((exchange, seconds))
    return Exchanged(tuple(found))


def _groups(wanted: Sequence[Exchange]) -> Mapping[tuple[int, ...], dist.ProcessGroup]:
    """A group for each set of ranks; every rank makes all of them, in the same order."""
    sets = dict.fromkeys(one.ranks for one in wanted)
    return {ranks: cast(dist.ProcessGroup, dist.new_group(list(ranks))) for ranks in sets}


@contextmanager
def _started(machine: Machine) -> Iterator[None]:
    """Have torch.distributed started; what the caller started stays."""
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


def _agreed(own: list[float | None]) -> list[float | None]:
    """Rank 0's list, on every rank."""
    dist.broadcast_object_list(own, src=0)
    return own


def _seconds(
    exchange: Exchange, machine: Machine, group: dist.ProcessGroup, budget: float
) -> float:
    """The median time on rank 0. How often is decided there, so that all ranks call the same."""
    takes_part = machine.rank in exchange.ranks
    call = _call(exchange, machine, group) if takes_part else lambda: None
    dist.barrier()
    call()
    pilot = _timed(call, machine)
    number = torch.tensor([_samples(pilot, budget)], device=machine.device)
    dist.broadcast(number, src=0)
    samples = sorted(_timed(call, machine) for _ in range(int(number)))
    ways = 2 if exchange.action == MESSAGE else 1  # there and back
    return samples[len(samples) // 2] / ways


def _samples(pilot: float, budget: float) -> int:
    return min(MOST, max(FEWEST, int(budget / max(pilot, 1e-9))))


def _timed(call: Callable[[], object], machine: Machine) -> float:
    machine.synchronize()
    start = time.perf_counter()
    call()
    machine.synchronize()
    return time.perf_counter() - start


def _call(exchange: Exchange, machine: Machine, group: dist.ProcessGroup) -> Callable[[], object]:
    """The exchange as this rank takes part in it."""
    n = len(exchange.ranks)
    rows = max(1, exchange.nbytes // 4 // n)
    whole = torch.ones(rows * n, device=machine.device)
    part = torch.ones(rows, device=machine.device)
    if exchange.action == "all-gather":
        return lambda: dist.all_gather_single(whole, part, group=group)
    if exchange.action == "reduce-scatter":
        return lambda: dist.reduce_scatter_single(part, whole, group=group)
    if exchange.action == "all-to-all":  # of pieces: each rank holds a part of the value
        mine, theirs = (torch.ones(max(1, rows // n) * n, device=machine.device) for _ in "ab")
        return lambda: dist.all_to_all_single(theirs, mine, group=group)
    if exchange.action == "all-reduce":
        # an average of ones stays what it is, however often
        return lambda: dist.all_reduce(whole.fill_(1.0), group=group)
    return _there_and_back(exchange, machine, whole, group)


def _there_and_back(
    exchange: Exchange, machine: Machine, value: torch.Tensor, group: dist.ProcessGroup
) -> Callable[[], None]:
    first, other = exchange.ranks

    def call() -> None:
        if machine.rank == first:
            dist.send(value, other, group=group)
            dist.recv(value, other, group=group)
        else:
            dist.recv(value, first, group=group)
            dist.send(value, first, group=group)

    return call
