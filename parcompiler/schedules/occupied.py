"""The bytes on each rank while an order of compute runs, buffers of messages among them.

A micro-batch takes memory from the begin of its forward to the end of its backward (see
`StageCost.bytes`), gradients of parameters from the first backward on, a message at its target
from when the receive was posted to its last use, at its source until it was sent.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from parcompiler.instruction import Kind
from parcompiler.schedules.gradients import Made

if TYPE_CHECKING:
    from parcompiler.schedules.timing import Network

INFINITY = float("inf")
_PARTS = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


class Memory:
    """The bytes on each rank while a network runs: those of actions, arriving and leaving ones."""

    def __init__(
        self,
        network: Network,
        orders: Sequence[Sequence[int]],
        arrived: Sequence[float],
    ) -> None:
        self.network = network
        self.orders = orders
        self.arrived = arrived
        self.changes: list[list[tuple[float, int]]] = [[] for _ in range(network.ranks)]

    def peaks(self) -> Iterator[int]:
        """The most bytes on each rank."""
        self._actions()
        if any(self.network.bytes.values()):
            self._messages()
        early, updates = [0] * self.network.ranks, [0] * self.network.ranks
        for rank, cost in zip(self.network.placement, self.network.costs, strict=True):
            early[rank] += cost.early
            updates[rank] += cost.resident + cost.update
        for size, update, changes in zip(early, updates, self.changes, strict=True):
            changes.append((0.0, size))
            changes.sort(key=itemgetter(0))
            levels = list(accumulate(change for _, change in changes))
            last = list(accumulate(len(list(same)) for _, same in groupby(changes, itemgetter(0))))
            most = max(levels[k - 1] for k in last)  # what happens at one moment happens at once
            yield max(most, update)

    def _actions(self) -> None:
        """From the begin of its forward to the end of its backward a micro-batch takes memory."""
        m, begins, arrived = self.network.microbatches, self.network.begins, self.arrived
        for order, changes in zip(self.orders, self.changes, strict=True):
            parted = {code // m // 3 * m + code % m for code in order if code // m % 3 == 2}
            made = Made()
            for code in order:
                j, kind = divmod(code // m, 3)
                whole = kind == 1 and j * m + code % m not in parted
                part = Kind.BACKWARD if whole else _PARTS[kind]
                taken, given = made.bytes(j, self.network.costs[j], part)
                changes += [(begins[code], taken), (arrived[code], given)]

    def _messages(self) -> None:
        """A buffer from when its receive was posted to its last use; a tensor until it was sent."""
        network, m, ranks = self.network, self.network.microbatches, self.network.ranks
        leaving: dict[tuple[tuple[int, bool], int, int], float] = {}
        for code, row, link, post in self._posted():
            i, nbytes = code % m, network.bytes[row]
            source, target = divmod(link, ranks)
            own = self.changes[target]
            own.append((self.arrived[self.orders[target][post - 1]] if post else 0.0, nbytes))
            uses = (self.arrived[kind * m + i] for kind in network.users[row])
            own.append((max(end for end in uses if end < INFINITY), -nbytes))
            tensor = (network.tensor[row], i, source)
            begin, end = max(self.arrived[code], leaving.get(tensor, 0.0)), self.arrived[row + i]
            if begin < end:
                leaving[tensor] = end
                self.changes[source] += [(begin, nbytes), (end, -nbytes)]

    def _posted(self) -> Iterator[tuple[int, int, int, int]]:
        """Sender, row and link of each message; how many actions its receive stands behind.

        Lowering walks all ranks in one order of time, a whole backward taking 2 and the rest 1,
        and writes a receive wherever the other rank is then (`lower.communicate`).
        """
        network, m, orders = self.network, self.network.microbatches, self.orders
        position = [0] * network.ranks
        ended = bytearray(network.size)
        left: dict[int, int] = {}
        waiting: dict[int, list[int]] = {}
        running: list[tuple[int, int]] = []  # end, rank: a heap
        waits = self._waits()
        whole = self._whole()

        def start(rank: int, now: int) -> None:
            if position[rank] < len(orders[rank]):
                code = orders[rank][position[rank]]
                for row in waits[code // m]:
                    if not ended[row + code % m]:
                        waiting.setdefault(row + code % m, []).append(rank)
                        return
                heapq.heappush(running, (now + (2 if code in whole else 1), rank))

        for rank in range(network.ranks):
            start(rank, 0)
        while running:
            now, rank = heapq.heappop(running)
            code = orders[rank][position[rank]]
            position[rank] += 1
            ended[code] = True
            for row, link, _ in network.sends[code // m]:
                slot = row + code % m
                if row in network.joint:
                    left[slot] = left.get(slot, network.joint[row]) - 1
                    if left[slot]:
                        continue
                yield code, row, link, position[link % network.ranks]
            for other in (rank, *waiting.pop(code, ())):
                start(other, now)

    def _waits(self) -> list[list[int]]:
        """By class, the rows of actions that must have ended, messages left out of account."""
        maker = {
            row: kind * self.network.microbatches
            for kind, sends in enumerate(self.network.sends)
            for row, _, _ in sends
            if row not in self.network.joint
        }
        users: dict[int, list[int]] = {row: [] for row in self.network.joint}
        for kind, sends in enumerate(self.network.sends):
            for row, _, _ in sends:
                if row in users:
                    users[row].append(kind * self.network.microbatches)
        return [
            [origin for row in rows for origin in users.get(row, [maker.get(row, row)])]
            for rows in self.network.needs
        ]

    def _whole(self) -> set[int]:
        """The codes of whole backwards."""
        m = self.network.microbatches
        parted = {code - m for order in self.orders for code in order if code // m % 3 == 2}
        return {
            code
            for order in self.orders
            for code in order
            if code // m % 3 == 1 and code not in parted
        }
