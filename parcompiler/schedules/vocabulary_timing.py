"""How long an order takes in which all ranks share the vocabulary: what the simulator says of it.

rank 0   F0 F1 S0 .. F2 ..      [1] a collective begins when the last rank has come to its line
group    .. x0 .. n0 g0         [2] and the one before has ended, beside the compute;
rank 1   .. F0 S0 F1 .. B0      [3] who needs it waits for its end
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from parcompiler.instruction import BACKWARDS, EMBEDDING, HEAD, Kind
from parcompiler.schedules.action import Action, Orders
from parcompiler.schedules.gradients import Made
from parcompiler.schedules.lines import Lines, Link, Step, Transfer
from parcompiler.schedules.schedule import Schedule
from parcompiler.schedules.vocabulary_cost import VocabularyCost
from parcompiler.schedules.vocabulary_embeddings import with_embeddings
from parcompiler.schedules.vocabulary_lines import Layers, Meeting, done, needs

if TYPE_CHECKING:
    from parcompiler.schedules.timing import Message, StageCost

Arrival = tuple[int, bool, int, int, int]  # message, is a gradient, source, target, micro-batch
Key = Arrival | Meeting | Action
_CARRYING = ("x", "x.grad", "e", "e.grad")  # tensors; else numbers of each row


class Run:
    """One run: when each action of the schedule begins and ends, and the bytes on each rank."""

    def __init__(
        self,
        schedule: Schedule,
        costs: Sequence[StageCost],
        messages: Sequence[Message],
        cost: VocabularyCost,
    ) -> None:
        self.placement, self.costs, self.messages, self.cost = (
            schedule.placement, costs, messages, cost,
        )  # fmt: skip
        self.source = cost.source % len(schedule.placement)
        self.last_use = {a.microbatch: a.kind for o in schedule.orders for a in o if a.kind in HEAD}
        self.layers = Layers(cost.method, cost.users, self.source if self.last_use else None)
        links = tuple(Link(x.source, x.targets, x.gradient is not None) for x in messages)
        self.orders, self.steps = _written(schedule.placement, schedule.orders, links, self.layers)
        orders = self.orders
        # By stage the messages that it gives and receives, with their numbers.
        self.gives: list[list[tuple[int, Message]]] = [[] for _ in schedule.placement]
        self.receives: list[list[tuple[int, Message]]] = [[] for _ in schedule.placement]
        for number, message in enumerate(messages):
            self.gives[message.source].append((number, message))
            for user in message.targets:
                self.receives[user].append((number, message))
        self.now = [0.0] * len(orders)
        self.position = [0] * len(orders)
        self.link: dict[tuple[int, int], float] = defaultdict(float)
        self.group = 0.0
        self.met: dict[Meeting, dict[int, float]] = defaultdict(dict)
        self.arrived: dict[Key, float] = {}
        self.spans: dict[tuple[int, Action], tuple[float, float]] = {}
        self.waiting: dict[Key, list[int]] = defaultdict(list)
        self.changes: list[list[tuple[float, int]]] = [[] for _ in orders]
        self.leaving: dict[tuple[int, bool, int, int], float] = {}
        self.received: dict[Arrival, float] = {}  # when each receive was posted
        self.used: dict[Arrival, float] = {}  # the end of its last use
        self.made = Made()
        self._go()

    @property
    def step_time(self) -> float:
        """Seconds until everything has ended."""
        return max([*self.now, self.group, *self.link.values()], default=0.0)

    def stuck(self) -> list[tuple[int, Action]]:
        """The ranks that never end, each with the action at which it waits."""
        found = []
        for rank, order in enumerate(self.orders):
            never = next((a for a in order if (rank, a) not in self.spans), None)
            if never is not None:
                found.append((rank, never))
        return found

    def peaks(self) -> Iterator[int]:
        """The most bytes on each rank."""
        for key, posted in self.received.items():
            number, _, _, rank, _ = key
            nbytes = self.messages[number].nbytes
            self.changes[rank] += [(posted, nbytes), (self.used[key], -nbytes)]
        for rank, changes in enumerate(self.changes):
            own = [x for home, x in zip(self.placement, self.costs, strict=True) if home == rank]
            early = self.cost.resident + sum(cost.early for cost in own)
            update = self.cost.update + sum(cost.update + cost.first.gradients for cost in own)
            found = sorted([(0.0, early), *changes], key=itemgetter(0))
            levels = list(accumulate(change for _, change in found))
            last = accumulate(len(list(same)) for _, same in groupby(found, itemgetter(0)))
            yield max(early + update, *(levels[k - 1] for k in last))

    def _go(self) -> None:
        """Let every rank go as far as it can."""
        ready = list(range(len(self.steps)))
        self.ready = ready
        while ready:
            rank = ready.pop()
            steps = self.steps[rank]
            while self.position[rank] < len(steps) and self._do(rank, steps[self.position[rank]]):
                self.position[rank] += 1

    def _do(self, rank: int, step: Step) -> bool:
        """One step of a rank; False when it must wait."""
        if isinstance(step, Transfer):
            self._transfer(rank, step)
            return True
        if isinstance(step, Meeting):
            self._meet(rank, step)
            return True
        keys = list(self._needs(rank, step))
        for key in keys:
            if key not in self.arrived:
                self.waiting[key].append(rank)
                return False
        self._compute(rank, step, max([self.now[rank], *(self.arrived[key] for key in keys)]))
        return True

    def _arrive(self, key: Key, end: float) -> None:
        """Something is there: wake who waits for it."""
        self.arrived[key] = end
        self.ready.extend(self.waiting.pop(key, ()))

    def _needs(self, rank: int, action: Action) -> Iterator[Key]:
        """What must have come before an action."""
        yield from needs(action, self.layers)
        kind, j, i = action
        if kind is Kind.FORWARD:
            for number, x in self.receives[j]:
                home = self.placement[x.source]
                local = Action(Kind.FORWARD, x.source, i)
                yield local if home == rank else (number, False, home, rank, i)
        elif kind in BACKWARDS:
            yield from self._needs_back(rank, j, i)

    def _needs_back(self, rank: int, j: int, i: int) -> Iterator[Key]:
        """What must have come before a backward."""
        for number, x in self.gives[j]:
            if x.gradient is not None:
                for home in sorted({self.placement[user] for user in x.targets}):
                    if home != rank:
                        yield number, True, home, rank, i
                        continue
                    users = (user for user in x.targets if self.placement[user] == rank)
                    yield from (Action(Kind.BACKWARD, user, i) for user in users)

    def _compute(self, rank: int, action: Action, begin: float) -> None:
        """Compute."""
        kind, j, _ = action
        shared = kind in HEAD or kind in EMBEDDING
        if shared:
            seconds = self.cost.seconds(kind) / (len(self.cost.users) if kind in EMBEDDING else 1)
        else:
            seconds = self.costs[j].seconds(kind)
        end = begin + seconds
        self.now[rank] = end
        self.spans[rank, action] = begin, end
        if shared:
            self._account_shared(rank, action, begin, end)
            return
        self._arrive(done(action), end)
        self._account(rank, action, begin, end)

    def _transfer(self, rank: int, step: Transfer) -> None:
        """Post a receive, or send what an action has made."""
        number, gradient, peer, i, leaves = step
        if not leaves:
            self.received[number, gradient, peer, rank, i] = self.now[rank]
            return
        message = self.messages[number]
        seconds = message.gradient if gradient else message.seconds
        assert seconds is not None
        self._send((number, gradient, rank, peer, i), seconds)

    def _send(self, key: Arrival, seconds: float) -> None:
        """A message goes once its link is free; its tensor stays until then."""
        number, gradient, rank, other, i = key
        end = max(self.now[rank], self.link[rank, other]) + seconds
        self.link[rank, other] = end
        nbytes = self.messages[number].nbytes
        tensor = number, gradient, rank, i
        begin = max(self.now[rank], self.leaving.get(tensor, 0.0))
        if begin < end:
            self.leaving[tensor] = end
            self.changes[rank] += [(begin, nbytes), (end, -nbytes)]
        self._arrive(key, end)

    def _meet(self, rank: int, meeting: Meeting) -> None:
        """A collective begins when the last rank has come."""
        size, target = self._size(meeting), self._target(meeting)
        self.changes[rank].append((self.now[rank], size))
        present = self.met[meeting]
        present[rank] = self.now[rank]
        if len(present) < len(self.steps):
            return
        self.group = max(*present.values(), self.group) + self._seconds(meeting)
        if meeting.what in ("x.grad", "e"):
            for other, changes in enumerate(self.changes):
                if other != target:
                    changes.append((self.group, -size))
        self._arrive(meeting, self.group)

    def _seconds(self, meeting: Meeting) -> float:
        """Seconds of a collective."""
        cost, parts = self.cost, max(1, len(self.cost.users))
        match meeting.what:
            case "x":
                return cost.broadcast
            case "x.grad":
                return cost.reduce
            case "e":
                return cost.embed_reduce / parts
            case "e.grad":
                return cost.embed_broadcast / parts
        return cost.exchange

    def _size(self, meeting: Meeting) -> int:
        """Bytes that a collective leaves on a rank."""
        if meeting.what not in _CARRYING:
            return 0
        if meeting.what in ("x", "x.grad"):
            return self.cost.x_bytes
        return self.cost.embedded_bytes // len(self.cost.users)

    def _target(self, meeting: Meeting) -> int:
        """The rank that a sum goes to."""
        j = self.cost.users[meeting.number] if meeting.what == "e" else self.source
        return self.placement[j]

    def _account_shared(self, rank: int, action: Action, begin: float, end: float) -> None:
        """What an action for the vocabulary takes and gives back."""
        kind, j, i = action
        if kind is Kind.S:
            self.changes[rank].append((begin, self.cost.saved))
        if self.cost.more and kind is self.cost.softmax:
            self.changes[rank] += [(begin, self.cost.more), (end, -self.cost.more)]
        if kind in HEAD and self.last_use[i] is kind:
            self.changes[rank].append((end, -self.cost.saved - self.cost.x_bytes))
        if kind is Kind.EMBED_BACKWARD:
            self.changes[rank].append((end, -self._size(Meeting("e.grad", j, i))))

    def _account(self, rank: int, action: Action, begin: float, end: float) -> None:
        """What an action of a stage takes and gives back, the messages it uses among it."""
        kind, j, i = action
        taken, given = self.made.bytes(j, self.costs[j], kind)
        self.changes[rank] += [(begin, taken), (end, given)]
        if kind in BACKWARDS:
            for k, user in enumerate(self.cost.users):
                if user == j:
                    self.changes[rank].append((end, -self._size(Meeting("e", k, i))))
        if kind is not Kind.BACKWARD_WEIGHT:
            for number, x in self.receives[j]:
                self.used[number, False, self.placement[x.source], rank, i] = end
        if kind in BACKWARDS:
            for number, x in self.gives[j]:
                for other in {self.placement[user] for user in x.targets}:
                    self.used[number, True, other, rank, i] = end
        if kind in BACKWARDS and j == self.source and self.last_use:
            self.changes[rank].append((end, -self.cost.x_bytes))


@lru_cache(maxsize=32)
def _written(
    placement: tuple[int, ...], orders: Orders, links: tuple[Link, ...], layers: Layers
) -> tuple[Sequence[Sequence[Action]], Sequence[Sequence[Step]]]:
    """The orders with the embeddings, and all that each rank does: whatever the seconds are."""
    found = with_embeddings(placement, orders, links, layers)
    return found, Lines(placement, found, links, layers).steps
