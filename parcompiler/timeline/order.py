"""Orders of compute as tasks with dependencies, before anything is lowered.

An action has a code: class · m + i for micro-batch i of m. A stage has three classes (forward;
backward, or its part for inputs; its part for weights). Each rank has a class for every pass of the
vocabulary. Messages and collectives have rows of m numbers, one per micro-batch, after the classes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from parcompiler.instruction import BACKWARDS, EMBEDDING, HEAD, Kind
from parcompiler.schedules.action import Action
from parcompiler.schedules.rounds import loops_of
from parcompiler.timeline.collectives import Collective, SharedLayers, needs, placed, rows_of
from parcompiler.timeline.memory import (
    NUMBER,
    Buffer,
    BufferArrays,
    Ints,
    MemoryUse,
    TaskArrays,
    buffer_arrays,
    joined,
    task_arrays,
)
from parcompiler.timeline.run import INFINITY, START, Moments, Tasks, ordered
from parcompiler.timeline.steady import RepeatingOrder

PLACE = {  # other stages wait for both of the backwards that share a place
    Kind.FORWARD: 0,
    Kind.BACKWARD: 1,
    Kind.BACKWARD_INPUT: 1,
    Kind.BACKWARD_WEIGHT: 2,
}
UNITS = {Kind.BACKWARD: 2, Kind.EMBED: 0, Kind.EMBED_BACKWARD: 0}  # time in a walk; others take 1


Span = tuple[float, float]  # begin and end


class StageLink(NamedTuple):
    """A value between stages, without its costs."""

    source: int
    targets: tuple[int, ...]
    returns: bool  # whether a gradient comes back


def detached(source: int, users: Mapping[int, bool], placement: Sequence[int]) -> tuple[int, ...]:
    """The stages that use a value of stage `source` on ranks that send no gradient of it back.

    `users` says for each stage whether its use leads to the loss.

    >>> detached(0, {1: True, 2: False, 3: False}, placement=[0, 1, 2, 1])
    (2,)
    """
    back = {placement[source], *(placement[j] for j, leads in users.items() if leads)}
    return tuple(j for j in sorted(users) if placement[j] not in back)


class TransferEnd(NamedTuple):
    """One end of the message of link `number`, or of its gradient: to or from rank `peer`."""

    number: int
    gradient: bool
    peer: int
    microbatch: int
    leaves: bool  # whether this rank sends it


Step = Action | Collective | TransferEnd


class Send(NamedTuple):
    """A message that an action of a class sends: its row, its ranks, and the number of its link."""

    row: int
    source: int
    target: int
    number: int
    gradient: bool


class OrderTasks:
    """The dependencies of the actions of some stages on some ranks, joined by `links`."""

    def __init__(
        self,
        placement: Sequence[int],
        links: Sequence[StageLink],
        microbatches: int,
        layers: SharedLayers | None = None,
    ) -> None:
        self.placement, self.links, self.layers = placement, links, layers
        self.ranks = max(placement) + 1
        self.microbatches = m = microbatches
        parts = 3 + 2 * len(layers.users) if layers else 0  # vocabulary passes on each rank
        self.classes = 3 * len(placement) + parts * self.ranks
        self.size = self.classes * m
        self.needs: list[list[int]] = [[] for _ in range(self.classes)]  # rows
        self.sends: list[list[Send]] = [[] for _ in range(self.classes)]
        self.joint: dict[int, int] = {}  # by row: the number of backwards that a gradient waits for
        self.rows: list[Send] = []  # from `size` on, m numbers each
        self.collectives: dict[tuple[str, int], int] = {}  # rows after those of messages
        for j in range(len(placement)):
            self.needs[3 * j + 1].append(3 * j * m)
            self.needs[3 * j + 2].append((3 * j + 1) * m)
        for number, link in enumerate(links):
            self._connect(number, link)
        for row, collective in enumerate(rows_of(layers) if layers else (), len(self.rows)):
            self.collectives[collective] = self.size + row * m

    def _connect(self, number: int, link: StageLink) -> None:
        """Add the needs and sends of one value and its gradient."""
        m, maker = self.microbatches, 3 * link.source
        home = self.placement[link.source]
        for rank in sorted({self.placement[j] for j in link.targets}):
            users = [3 * j for j in sorted(set(link.targets)) if self.placement[j] == rank]
            if rank == home:
                for user in users:
                    self.needs[user].append(maker * m)
                    if link.returns:
                        self.needs[maker + 1].append((user + 1) * m)
                continue
            sent = self._row(home, rank, number, gradient=False)
            self.sends[maker].append(sent)
            for user in users:
                self.needs[user].append(sent.row)
            if link.returns:
                back = self._row(rank, home, number, gradient=True)
                self.needs[maker + 1].append(back.row)
                self.joint[back.row] = len(users)
                for user in users:
                    self.sends[user + 1].append(back)

    def _row(self, source: int, target: int, number: int, *, gradient: bool) -> Send:
        """Add a row for the messages of a value or of its gradient."""
        row = self.size + len(self.rows) * self.microbatches
        self.rows.append(Send(row, source, target, number, gradient))
        return self.rows[-1]

    def code(self, rank: int, action: Action) -> int:
        """The code of an action on a rank."""
        kind, j, i = action
        if kind in PLACE:
            return (3 * j + PLACE[kind]) * self.microbatches + i
        assert self.layers is not None
        if kind in EMBEDDING:
            part = 3 + 2 * j + (kind is Kind.EMBED_BACKWARD)
        else:
            part = (Kind.S, Kind.NORMALIZE, Kind.T).index(kind)
        parts = 3 + 2 * len(self.layers.users)
        return (3 * len(self.placement) + rank * parts + part) * self.microbatches + i

    def codes(self, rank: int, actions: Sequence[Action]) -> list[int]:
        """The codes of the actions of a rank."""
        first: dict[tuple[Kind, int], int] = {}
        codes = []
        for kind, j, i in actions:
            if (kind, j) not in first:
                first[kind, j] = self.code(rank, Action(kind, j, 0))
            codes.append(first[kind, j] + i)
        return codes

    @cached_property
    def tasks(self) -> Tasks:
        """The tasks of any order of the actions of stages."""
        m = self.microbatches
        each = range(m)
        joins = [[send.row for send in sends] for sends in self.sends]
        return Tasks(
            self.size,
            [[row + i for row in sources] for sources in self.needs for i in each],
            [[row + i for row in sources] for sources in joins for i in each],
            [self.joint.get(sent.row, 1) for sent in self.rows for _ in each],
            [(sent.source * self.ranks + sent.target,) for sent in self.rows for _ in each],
            self.ranks * self.ranks,
        )

    def seconds(
        self,
        compute: Sequence[float],
        messages: Sequence[tuple[float, float]],
        collectives: Callable[[str], float] = lambda name: 0.0,
    ) -> list[float]:
        """Seconds by task and exchange, from `compute` (by class), `messages` (of each link and of
        its gradient), and `collectives` (of the shared layers)."""
        by_row = [messages[sent.number][sent.gradient] for sent in self.rows]
        shared = [collectives(name) for name, _ in self.collectives]
        return [value for value in (*compute, *by_row, *shared) for _ in range(self.microbatches)]

    def collective(self, one: Collective) -> int:
        """The number of a collective."""
        return self.collectives[one.what, one.number] + one.microbatch


def walked(
    placement: Sequence[int],
    orders: Sequence[Sequence[Action]],
    links: Sequence[StageLink],
    layers: SharedLayers | None = None,
    basis: OrderWalk | None = None,
) -> OrderWalk:
    """A walk through the orders; `layers` are the layers that all ranks share."""
    microbatches = 1 + max((action.microbatch for order in orders for action in order), default=-1)
    return OrderWalk(OrderTasks(placement, links, microbatches, layers), orders, basis)


class OrderWalk:
    """The compute of all ranks in order of their ends (a forward takes 1, a backward 2).

    When an action ends, the messages that it sends are written on both ranks:

        rank 0   FORWARD stage 0 mb 3 │ SEND x mb 3 to 1      [2] then the send
        rank 1   BACKWARD stage 1 mb 1 │ RECV x mb 3 from 0   [1] first the receive: it only posts,
                 FORWARD stage 1 mb 2 ...                         before what runs there

    A collective of all ranks is written on each rank at its place, and holds none up. Deadlocked
    ranks (`stuck`: rank and position) are still written in their order: the verifier reports the
    fault. `spans` are start and end of each action; `basis` is the walk by which some actions of
    these orders were placed.
    """

    def __init__(
        self,
        pipeline: OrderTasks,
        orders: Sequence[Sequence[Action]],
        basis: OrderWalk | None = None,
    ) -> None:
        self.pipeline, self.basis = pipeline, basis
        layers = pipeline.layers
        self.items: Sequence[Sequence[Action | Collective]] = (
            orders if layers is None else placed(pipeline.placement, orders, layers)
        )
        self._memory: dict[AbstractSet[int], MemoryUse] = {}
        self.actions = [
            [item for item in order if isinstance(item, Action)] for order in self.items
        ]
        self.codes = [pipeline.codes(rank, order) for rank, order in enumerate(self.actions)]
        self.tasks = pipeline.tasks if layers is None else self._with_collectives(layers)
        self.events = ordered(self.tasks, self.codes)

    @property
    def stuck(self) -> list[tuple[int, int]]:
        """The deadlocked ranks, each with the position in its order at which it stops."""
        return self.events.stuck

    @cached_property
    def moments(self) -> Moments:
        """Start and end of everything, in the time units of this walk."""
        seconds = [0.0] * (self.tasks.size + len(self.tasks.parties))
        for (kind, _), codes in self.codes_of.items():
            for code in codes.tolist():
                seconds[code] = UNITS.get(kind, 1)
        events, free = self.events, list(self.tasks.needs)
        while events.stuck:  # let the first stuck rank go on
            rank, k = events.stuck[0]
            free[self.codes[rank][k]] = []
            events = ordered(replace(self.tasks, needs=free), self.codes)
        return events.run(seconds)

    @cached_property
    def steady(self) -> tuple[float, float] | None:
        """(moment, pace): a moment within the loops of all ranks, collectives included, and the
        time by which all from a round before it on comes later in orders with one more round."""
        if self.stuck or (self.basis is not None and self.basis.steady is None):
            return None
        pipeline, begins = self.pipeline, self.moments.begins
        numbers = [
            [
                pipeline.code(rank, x) if isinstance(x, Action) else pipeline.collective(x)
                for x in items
            ]
            for rank, items in enumerate(self.items)
        ]
        loops = loops_of(numbers, pipeline.microbatches, pipeline.ranks)
        if loops is None:
            return None
        first, end = 0.0, INFINITY
        for items, loop in zip(numbers, loops, strict=True):
            before = [self.written[x] for x in items[: loop.begin] if x < pipeline.size]
            within = [begins[x] for x in items[loop.begin : loop.end] if x < pipeline.size]
            first, end = max([first, *before[-1:]]), min([end, *within[-1:]])
        pace = self.repeating.pace(self.moments, end)
        return (end, pace) if pace is not None and first < end - pace else None

    @cached_property
    def codes_of(self) -> dict[tuple[Kind, int], Ints]:
        """The codes of all actions of a kind on a stage (NOWHERE: of all ranks)."""
        lists: dict[tuple[Kind, int], list[int]] = {}
        for actions, codes in zip(self.actions, self.codes, strict=True):
            for (kind, stage, _), code in zip(actions, codes, strict=True):
                lists.setdefault((kind, stage), []).append(code)
        return {key: np.array(codes, np.int64) for key, codes in lists.items()}

    @cached_property
    def repeating(self) -> RepeatingOrder:
        """The tasks, which may repeat in rounds of one micro-batch for each rank."""
        m = self.pipeline.microbatches
        return RepeatingOrder(self.tasks, self.events, self.codes, m, self.pipeline.ranks)

    def memory(self, untrained: AbstractSet[int] = frozenset()) -> MemoryUse:
        """Memory use of these orders where some stages are `untrained`. Cached."""
        known = self._memory.get(untrained)
        return known or self._memory.setdefault(untrained, self._uses(untrained))

    def _uses(self, untrained: AbstractSet[int]) -> MemoryUse:
        """Uncached body of `memory`: `untrained` stages have only forwards."""
        pipeline, m = self.pipeline, self.pipeline.microbatches
        tasks, stages = task_arrays(self.codes, self.actions), len(self.pipeline.placement)
        if untrained:
            forward = tasks.kind == NUMBER[Kind.FORWARD]
            tasks = tasks.where(forward | ~np.isin(tasks.stage, [*untrained]))
        occurs = np.zeros(pipeline.size, bool)
        occurs[tasks.task] = True
        back = np.zeros(((stages + 1), m), bool)  # the last row is for no stage
        gives = np.isin(tasks.kind, [NUMBER[kind] for kind in BACKWARDS])
        back[tasks.stage[gives], tasks.microbatch[gives]] = True
        exchanges: list[object] = [Send(0, 0, 0, k, False) for k in range(len(pipeline.links))]
        layers = pipeline.layers
        shared = buffer_arrays([*self._shared(layers, tasks, untrained)] if layers else [])
        parts = shared._replace(exchange=shared.exchange + len(exchanges))
        exchanges += shared.exchanges
        buffers = joined(exchanges, [parts, *self._messages(occurs, untrained)])
        returns = back[tasks.stage, tasks.microbatch]
        return MemoryUse(pipeline.ranks, tasks, returns, buffers)

    def _messages(
        self, occurs: NDArray[np.bool_], untrained: AbstractSet[int]
    ) -> Iterator[BufferArrays]:
        """Buffers of messages: received ones from the posting of their receive (see `parts`) to the
        last backward of their readers, or the forward of `untrained` ones; sent ones until they are
        sent. `occurs` marks the tasks that these orders have."""
        pipeline, m = self.pipeline, self.pipeline.microbatches
        each, unit = np.arange(m), np.array(self.written)
        codes = [np.array(order, np.int64) for order in self.codes]
        ends = [unit[order] for order in codes]
        classes: dict[Send, list[int]] = {}  # of the tasks that a message waits for
        for number, sends in enumerate(pipeline.sends):
            for sent in sends:
                classes.setdefault(sent, []).append(number)
        leaving: dict[tuple[int, int, bool], list[tuple[int, NDArray[np.bool_]]]] = {}
        for sent, senders in classes.items():
            tasks = np.array(senders)[:, None] * m + each
            last = np.where(occurs[tasks], unit[tasks], -1.0).argmax(axis=0)
            code = tasks[last, each]
            sends = occurs[code]
            for k, number in enumerate(senders):
                key = number, sent.number, sent.gradient
                leaving.setdefault(key, []).append((sent.row, sends & (last == k)))
            begun, moments = ends[sent.target], unit[code[sends]]
            is_up = sent.target < sent.source
            place = begun.searchsorted(moments, "right" if is_up else "left")
            posted = np.where(place > 0, codes[sent.target][place - 1], START)
            link = pipeline.links[sent.number]
            users = (link.source,) if sent.gradient else link.targets
            read = [
                (3 * j + (j not in untrained)) * m + each[sends]
                for j in users
                if self._is_on(j, sent.target)
            ]
            until = np.stack([np.where(occurs[x], x, START) for x in read], axis=1)
            yield _buffers_of(sent.number, sent.target, posted, until)
        for (number, link_number, _), rows in leaving.items():
            until = np.stack([np.where(sends, row + each, START) for row, sends in rows], axis=1)
            is_sent = (until != START).any(axis=1)
            code = number * m + each[is_sent]
            yield _buffers_of(link_number, pipeline.placement[number // 3], code, until[is_sent])

    def _shared(
        self,
        layers: SharedLayers,
        tasks: TaskArrays,
        untrained: AbstractSet[int],
    ) -> Iterator[Buffer]:
        """The tensors of collectives on each rank: a summand until the sum has ended, and a result
        until its last use."""
        m, code = self.pipeline.microbatches, self.pipeline.code
        of_head = tasks.where(np.isin(tasks.kind, [NUMBER[kind] for kind in HEAD]))
        places = zip(of_head.rank.tolist(), of_head.microbatch.tolist(), strict=True)
        head = dict(zip(places, of_head.task.tolist(), strict=True))  # the last of each
        for rank, at, item in self._behind():
            name, k, i = item
            if name == "x":
                last = head[rank, i]
            elif name == "e.grad":
                last = code(rank, Action(Kind.EMBED_BACKWARD, k, i))
            elif name in ("e", "x.grad"):
                j = layers.users[k] if name == "e" else layers.source
                assert j is not None
                last = (3 * j + (j not in untrained)) * m + i
                if not self._is_on(j, rank):
                    last = self.pipeline.collective(item)
            else:
                continue
            yield Buffer(rank, item, at, (last,))

    def _is_on(self, stage: int, rank: int) -> bool:
        """Whether a stage is on a rank."""
        return self.pipeline.placement[stage] == rank

    @cached_property
    def written(self) -> list[float]:
        """When each action is written: at its end. One that takes no time comes after all others
        that end then, as it may wait for a collective after the messages that they send."""
        moments = zip(self.moments.begins, self.moments.ends, strict=True)
        return [end if begin < end else end + 0.5 for begin, end in moments]

    @property
    def spans(self) -> list[list[Span]]:
        """Start and end of each action, by rank."""
        begins, ends = self.moments.begins, self.moments.ends
        return [[(begins[code], ends[code]) for code in order] for order in self.codes]

    def _with_collectives(self, layers: SharedLayers) -> Tasks:
        """The tasks with the collectives of the vocabulary where each rank comes to them."""
        pipeline, tasks = self.pipeline, self.pipeline.tasks
        wants, joins = list(tasks.needs), list(tasks.joins)
        count = len(pipeline.collectives) * pipeline.microbatches
        first = tasks.size + len(tasks.parties)
        early = Counter[int]()
        for _, at, item in self._behind():
            number = pipeline.collective(item)
            if at == START:
                early[number] += 1
            else:
                joins[at] = [*joins[at], number]
        for actions, codes in zip(self.actions, self.codes, strict=True):
            for action, code in zip(actions, codes, strict=True):
                if meetings := [pipeline.collective(x) for x in needs(action, layers)]:
                    wants[code] = [*wants[code], *meetings]
        return Tasks(
            tasks.size,
            wants,
            joins,
            [*tasks.parties, *(pipeline.ranks - early[first + x] for x in range(count))],
            [*tasks.lanes, *[(tasks.num_lanes,)] * count],
            tasks.num_lanes + 1,
            [number for number, ranks in early.items() if ranks == pipeline.ranks],
        )

    def _behind(self) -> Iterator[tuple[int, int, Collective]]:
        """The collectives of every rank in its order: the rank, and the task before each."""
        for rank, (items, codes) in enumerate(zip(self.items, self.codes, strict=True)):
            left, at = iter(codes), START
            for item in items:
                if isinstance(item, Action):
                    at = next(left)
                else:
                    yield rank, at, item

    def parts(self, *moments: float) -> list[list[list[Step]]]:
        """The steps of each rank, divided at some moments."""
        written = self.written
        finished = sorted(
            (written[code], rank, k)
            for rank, codes in enumerate(self.codes)
            for k, code in enumerate(codes)
        )
        steps: list[list[Step]] = [[] for _ in self.codes]
        left = [iter(codes) for codes in self.items]
        behind = [self._collectives(steps[rank], left[rank]) for rank in range(len(steps))]
        missing: dict[tuple[int, int], int] = {}
        parts, following = [steps], [INFINITY, *reversed(moments)]
        for moment, rank, _ in finished:
            while moment >= following[-1]:
                following.pop()
                steps = [[] for _ in self.codes]
                parts.append(steps)
            action = behind[rank]
            assert action is not None
            steps[rank].append(action)
            code = self.pipeline.code(rank, action)
            i = action.microbatch
            for row, source, target, number, gradient in self.pipeline.sends[
                code // self.pipeline.microbatches
            ]:
                if self.pipeline.joint.get(row, 1) > 1:
                    count = missing[row, i] = missing.get((row, i), self.pipeline.joint[row]) - 1
                    if count:
                        continue
                steps[target].append(TransferEnd(number, gradient, source, i, leaves=False))
                steps[source].append(TransferEnd(number, gradient, target, i, leaves=True))
            behind[rank] = self._collectives(steps[rank], left[rank])
        return parts

    def _collectives(self, steps: list[Step], left: Iterator[Action | Collective]) -> Action | None:
        """Append the collectives before a rank's next action; returns that action."""
        for item in left:
            if isinstance(item, Action):
                return item
            steps.append(item)
        return None


def _buffers_of(number: int, rank: int, first: Ints, last: Ints) -> BufferArrays:
    """Buffers of link `number` on a rank."""
    size = len(first)
    return BufferArrays((), np.full(size, rank), np.full(size, number), first, last)
