"""All ranks' compute in one order of time (a forward takes 1, a backward 2), written as it ends.

Whenever something ends, what others need of it is written down at both ends:

    rank 0   FORWARD stage 0 mb 3 │ SEND x mb 3 to 1      [2] then the send
    rank 1   BACKWARD stage 1 mb 1 │ RECV x mb 3 from 0   [1] first the receive, which only posts
             FORWARD stage 1 mb 2 ...                         and so stands before what runs there

A collective of all ranks is written on each as it comes to it, and holds none. It is over when all
have it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from parcompiler.instruction import BACKWARDS, EMBEDDING, Kind
from parcompiler.schedules.action import NOWHERE, Action
from parcompiler.schedules.vocabulary_lines import Layers, Meeting, done, needs, placed

Span = tuple[int, int]  # begin and end

_SECONDS = {Kind.BACKWARD: 2, Kind.EMBED: 0, Kind.EMBED_BACKWARD: 0}  # everything else takes 1


class Link(NamedTuple):
    """A value between stages, as a message says it."""

    source: int
    targets: tuple[int, ...]
    returns: bool  # whether a gradient comes back


class Transfer(NamedTuple):
    """One end of the message of link `number`, or of its gradient: to or from rank `peer`."""

    number: int
    gradient: bool
    peer: int
    microbatch: int
    leaves: bool  # whether this rank sends it


Step = Action | Meeting | Transfer


class Lines:
    """One walk: `steps` has what it writes, `spans` when each action begins and ends.

    A stage sends those of `links` that it gives in their order. `layers` are what all ranks have
    for the vocabulary.
    """

    def __init__(
        self,
        placement: Sequence[int],
        orders: Sequence[Sequence[Action]],
        links: Sequence[Link],
        layers: Layers | None = None,
    ) -> None:
        self.placement, self.links, self.layers = placement, links, layers
        self.orders: Sequence[Sequence[Action | Meeting]] = orders
        if layers is not None:
            self.orders = placed(placement, orders, layers)
        self.gives: list[list[int]] = [[] for _ in placement]
        self.receives: list[list[int]] = [[] for _ in placement]
        for number, link in enumerate(links):
            self.gives[link.source].append(number)
            for user in link.targets:
                self.receives[user].append(number)
        self.steps: list[list[Step]] = [[] for _ in orders]
        self.spans: list[list[Span]] = [[] for _ in orders]
        self.next = [0] * len(orders)  # of each rank, the position of what it does next
        self.met: Counter[Meeting] = Counter()  # ranks that have come to it
        self.ended: set[Action | Meeting] = set()
        self.waiting: dict[Action | Meeting, list[int]] = {}  # ranks that something holds up
        self.running: list[tuple[int, int, Action]] = []  # (end, rank, action), a heap
        self.used: Counter[tuple[int, int, int]] = Counter()  # backwards by link, mb, rank
        self._run()

    def _run(self) -> None:
        """Let every rank go on whenever it can, to the end."""
        for rank in range(len(self.orders)):
            self._start(rank, 0)
        if not self.running:
            self._force(0)
        while self.running:
            now, rank, action = heapq.heappop(self.running)
            self.steps[rank].append(action)
            self._pass_on(rank, action)
            self._complete(done(action), now)
            self._start(rank, now)
            if not self.running:
                self._force(now)

    def _force(self, now: int) -> None:
        """Write ranks that wait for each other as they stand: the verifier says what is wrong."""
        for rank, order in enumerate(self.orders):
            if self.next[rank] < len(order):
                self.waiting = {k: [r for r in v if r != rank] for k, v in self.waiting.items()}
                action = order[self.next[rank]]
                assert isinstance(action, Action)
                self._begin(rank, action, now)
                return

    def _start(self, rank: int, now: int) -> None:
        """Let a rank begin its next action, or wait for what it needs."""
        order = self.orders[rank]
        while self.next[rank] < len(order):
            step = order[self.next[rank]]
            if isinstance(step, Action):
                for needed in self._needs(step):
                    if needed not in self.ended:
                        self.waiting.setdefault(needed, []).append(rank)
                        return
                self._begin(rank, step, now)
                return
            self.next[rank] += 1
            self.steps[rank].append(step)
            self.met[step] += 1
            if self.met[step] == len(self.orders):
                self._complete(step, now)

    def _begin(self, rank: int, action: Action, now: int) -> None:
        """Let a rank begin its next action."""
        self.next[rank] += 1
        end = now + _SECONDS.get(action.kind, 1)
        self.spans[rank].append((now, end))
        heapq.heappush(self.running, (end, rank, action))

    def _complete(self, what: Action | Meeting, now: int) -> None:
        """Let the ranks go on that waited for something."""
        self.ended.add(what)
        for rank in self.waiting.pop(what, ()):
            self._start(rank, now)

    def _needs(self, action: Action) -> Iterator[Action | Meeting]:
        """What must have ended before an action can begin."""
        if self.layers is not None:
            yield from needs(action, self.layers)
        kind, j, i = action
        if j == NOWHERE or kind in EMBEDDING:
            return
        if kind is Kind.FORWARD:
            for number in self.receives[j]:
                yield Action(Kind.FORWARD, self.links[number].source, i)
        elif kind is Kind.BACKWARD_WEIGHT:
            yield Action(Kind.BACKWARD, j, i)
        else:
            yield Action(Kind.FORWARD, j, i)
            for number in self.gives[j]:
                if self.links[number].returns:
                    users = self.links[number].targets
                    yield from (Action(Kind.BACKWARD, user, i) for user in users)

    def _pass_on(self, rank: int, action: Action) -> None:
        """Write the messages at both ends that an action of a stage brings about."""
        kind, j, i = action
        if kind is Kind.FORWARD:
            for number in self.gives[j]:
                users = {self.placement[user] for user in self.links[number].targets}
                for peer in sorted(users - {rank}):
                    self._message(number, i, rank, peer, gradient=False)
        elif kind in BACKWARDS:
            for number in self.receives[j]:
                if self.links[number].returns:
                    self._return_gradient(number, i, rank)

    def _return_gradient(self, number: int, i: int, rank: int) -> None:
        """Send the gradient of a value back after the last backward that used it on this rank."""
        link = self.links[number]
        maker = self.placement[link.source]
        if maker == rank:
            return
        self.used[number, i, rank] += 1
        users = sum(self.placement[j] == rank for j in link.targets)
        if self.used[number, i, rank] == users:
            self._message(number, i, rank, maker, gradient=True)

    def _message(self, number: int, i: int, source: int, target: int, *, gradient: bool) -> None:
        """Write a receive at one end and then the send at the other."""
        self.steps[target].append(Transfer(number, gradient, source, i, leaves=False))
        self.steps[source].append(Transfer(number, gradient, target, i, leaves=True))
