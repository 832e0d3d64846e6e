"""How long an order of compute takes and what memory, straight from the order: no instructions.

The rules are those of the simulator, so the numbers are equal, at a fraction of its time:

    rank 0  F0 F1 .. .. .. B0 .. B1     [1] an action begins when its rank is free
    0 -> 1  .. x0 x1                    [2] and what it needs of other ranks has arrived;
    rank 1  .. .. F0 B0 F1 B1           [3] a link carries one message after the other, in the
    1 -> 0  .. .. .. .. g0 .. g1            order in which they were sent, beside the compute

A value goes once to each other rank that uses it, and its gradient comes back from there after the
last backward of its users. Stages of one rank need no messages for each other.

>>> from parcompiler.schedules import build
>>> costs = [StageCost(forward=1.0, backward=2.0, resident=100, saved=10)] * 2
>>> found = timing(build("1f1b", 2, 2), costs, [Message(0, (1,), 1.0, gradient=1.0, nbytes=4)])
>>> found.step_time, found.peak_memory
(11.0, (128, 118))
>>> found.spans[1]
((2.0, 3.0), (3.0, 5.0), (5.0, 6.0), (6.0, 8.0))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from parcompiler.errors import InputError, PlanError
from parcompiler.instruction import Kind
from parcompiler.schedules.action import Action
from parcompiler.schedules.gradients import First
from parcompiler.schedules.occupied import Memory
from parcompiler.schedules.schedule import Schedule
from parcompiler.schedules.vocabulary import is_spread
from parcompiler.schedules.vocabulary_cost import VocabularyCost
from parcompiler.schedules.vocabulary_timing import Run

INFINITY = float("inf")
_KINDS = {  # both backwards give what other stages wait for, so they share a place
    Kind.FORWARD: 0,
    Kind.BACKWARD: 1,
    Kind.BACKWARD_INPUT: 1,
    Kind.BACKWARD_WEIGHT: 2,
}


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one micro-batch costs on one stage.

    `forward` and `backward` are seconds of compute, `weight` the part of `backward` that can be
    left for later (products for weight gradients). `saved` are bytes kept from the begin of FORWARD
    to the end of BACKWARD of one micro-batch, without the tensors that were received; where the
    backward has two parts, to the end of the first, and then `left` to the end of the second (None:
    the same bytes). What is alive for the time of one instruction only comes on top: `forward_more`
    while FORWARD runs, `backward_more`, `input_more` and `weight_more` while BACKWARD and its two
    parts do.

    `resident` are bytes of parameters, gradients and optimizer states; the gradients among them are
    there from the `first` backward of a step on. `update` are added in the optimizer's step.
    """

    forward: float
    backward: float
    resident: int
    saved: int
    weight: float = 0.0
    left: int | None = None
    forward_more: int = 0
    backward_more: int = 0
    input_more: int = 0
    weight_more: int = 0
    update: int = 0
    first: First = field(default_factory=First)

    @property
    def early(self) -> int:
        """Bytes held before the first backward of a step, besides those of micro-batches."""
        return self.resident - self.first.gradients

    def bytes(self, kind: Kind) -> tuple[int, int]:
        """What one compute instruction changes, in bytes: with its begin, and with its end; but for
        gradients that stay (see `Made`).

        >>> cost = StageCost(1.0, 2.0, resident=0, saved=10, left=4, input_more=3)
        >>> [cost.bytes(kind) for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)]
        [(10, 0), (3, -9), (0, -4)]
        """
        left = self.saved if self.left is None else self.left
        match kind:
            case Kind.FORWARD:
                return self.saved + self.forward_more, -self.forward_more
            case Kind.BACKWARD_INPUT:
                return self.input_more, left - self.saved - self.input_more
            case Kind.BACKWARD_WEIGHT:
                return self.weight_more, -left - self.weight_more
        return self.backward_more, -self.saved - self.backward_more

    def seconds(self, kind: Kind) -> float:
        """Seconds of one compute instruction."""
        match kind:
            case Kind.FORWARD:
                return self.forward
            case Kind.BACKWARD_INPUT:
                return self.backward - self.weight
            case Kind.BACKWARD_WEIGHT:
                return self.weight
        return self.backward


@dataclass(frozen=True, slots=True)
class Message:
    """A value of `nbytes` that stage `source` gives to the stages `targets`.

    It occupies a link for `seconds`, its gradient for `gradient`; None when nothing comes back.
    """

    source: int
    targets: tuple[int, ...]
    seconds: float
    gradient: float | None
    nbytes: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of a step, the most bytes on each rank, and when each action begins and ends."""

    step_time: float
    peak_memory: tuple[int, ...]
    spans: tuple[tuple[tuple[float, float], ...], ...] = field(repr=False)


def timing(
    schedule: Schedule,
    costs: Sequence[StageCost],
    messages: Sequence[Message],
    vocabulary: VocabularyCost | None = None,
) -> Timing:
    """What `simulate` says of a schedule whose stage j costs `costs[j]`.

    Messages are in the order in which a stage sends those of one micro-batch. `vocabulary` is the
    cost of the layers that all ranks share, S and T of the schedule among them. Raises PlanError
    when ranks wait for each other, InputError when the costs do not fit the stages.
    """
    if vocabulary is not None:
        return _shared(schedule, costs, messages, vocabulary)
    if is_spread(schedule):
        message = "a schedule in which all ranks share the head needs its cost (no vocabulary=...)"
        raise InputError(message)
    network = Network(schedule.placement, costs, messages, _microbatches(schedule))
    orders, arrived = _arrived(schedule, network)
    ends = [[arrived[code] for code in order] for order in orders]
    begins = [[network.begins[code] for code in order] for order in orders]
    return Timing(
        step_time=_last(arrived),
        peak_memory=network.peaks(orders, arrived),
        spans=tuple(
            tuple(zip(begin, end, strict=True)) for begin, end in zip(begins, ends, strict=True)
        ),
    )


def step_time(schedule: Schedule, costs: Sequence[StageCost], messages: Sequence[Message]) -> float:
    """The seconds of `timing` alone, sooner; no layers that all ranks share."""
    network = Network(schedule.placement, costs, messages, _microbatches(schedule))
    return _last(_arrived(schedule, network)[1])


def _arrived(schedule: Schedule, network: Network) -> tuple[list[list[int]], list[float]]:
    """The orders in numbers, and when each action ends. Raises PlanError when ranks wait."""
    orders, seconds = network.encode(schedule.orders)
    arrived = network.run(orders, seconds)
    stuck = network.stuck(orders, arrived)
    if stuck:
        where = [(r, schedule.orders[r][k].cell) for r, k in stuck]
        raise PlanError(_deadlock(schedule.ranks, where))
    return orders, arrived


def _last(arrived: Sequence[float]) -> float:
    """The last end."""
    return max((end for end in arrived if end < INFINITY), default=0.0)


def _shared(
    schedule: Schedule,
    costs: Sequence[StageCost],
    messages: Sequence[Message],
    vocabulary: VocabularyCost,
) -> Timing:
    """The timing of a schedule in which all ranks share layers of the vocabulary."""
    _check(schedule.placement, costs, messages)
    run = Run(schedule, costs, messages, vocabulary)
    stuck = run.stuck()
    if stuck:
        raise PlanError(_deadlock(schedule.ranks, [(r, action.cell) for r, action in stuck]))
    return Timing(
        step_time=run.step_time,
        peak_memory=tuple(run.peaks()),
        spans=tuple(
            tuple(run.spans[rank, action] for action in order)
            for rank, order in enumerate(schedule.orders)
        ),
    )


def _microbatches(schedule: Schedule) -> int:
    """How many micro-batches there are."""
    return 1 + max((a.microbatch for order in schedule.orders for a in order), default=-1)


def _deadlock(ranks: int, stuck: Sequence[tuple[int, str]]) -> str:
    """What is wrong with an order in which some ranks cannot go on."""
    first = f"the schedule never ends: {len(stuck)} of its {ranks} ranks wait"
    where = (f"  * rank {r} at {cell}" for r, cell in stuck)
    return "\n".join([f"{first} (check the order of these actions)", *where])


class Network:
    """Who waits for whom, for any order of compute of some stages on some ranks.

    What an action gives has a number, its code: (3 j + kind) m + i, with kind 0, 1, 2 for F, B or
    I, W. Messages have the numbers behind. `row` is such a number less i: it holds for all
    micro-batches.
    """

    def __init__(
        self,
        placement: Sequence[int],
        costs: Sequence[StageCost],
        messages: Sequence[Message],
        microbatches: int,
    ) -> None:
        _check(placement, costs, messages)
        self.placement = placement
        self.costs = costs
        self.ranks = max(placement) + 1
        self.microbatches = m = microbatches
        self.size = 3 * len(placement) * m  # of the codes alone
        self.needs: list[list[int]] = [[] for _ in range(3 * len(placement))]  # rows, by class
        # By class: row, link, seconds of what an action sends once it has ended.
        self.sends: list[list[tuple[int, int, float]]] = [[] for _ in range(3 * len(placement))]
        self.bytes: dict[int, int] = {}  # by row of a message
        self.tensor: dict[int, tuple[int, bool]] = {}  # by row: messages of one tensor are equal
        self.users: dict[int, list[int]] = {}  # by row of a message: classes that use it last
        self.joint: dict[int, int] = {}  # by row: how many backwards a gradient waits for
        for j in range(len(placement)):
            self.needs[3 * j + 1].append(3 * j * m)
            self.needs[3 * j + 2].append((3 * j + 1) * m)
        self.num_slots = self.size
        for number, message in enumerate(messages):
            self._connect(number, message)
        self.begins: list[float] = []

    def _connect(self, number: int, message: Message) -> None:
        """The needs and sends of one value and its gradient."""
        m, maker = self.microbatches, 3 * message.source
        home = self.placement[message.source]
        readers = sorted({self.placement[j] for j in message.targets})
        for rank in readers:
            users = [3 * j for j in sorted(set(message.targets)) if self.placement[j] == rank]
            if rank == home:
                for user in users:
                    self.needs[user].append(maker * m)
                    if message.gradient is not None:
                        self.needs[maker + 1].append((user + 1) * m)
                continue
            row = self._row(number, message.nbytes, gradient=False)
            self.sends[maker].append((row, home * self.ranks + rank, message.seconds))
            self.users[row] = [user + 1 for user in users]
            for user in users:
                self.needs[user].append(row)
            if message.gradient is None:
                continue
            row = self._row(number, message.nbytes, gradient=True)
            self.users[row] = [maker + 1]
            self.needs[maker + 1].append(row)
            if len(users) > 1:
                self.joint[row] = len(users)
            for user in users:
                self.sends[user + 1].append((row, rank * self.ranks + home, message.gradient))

    def _row(self, number: int, nbytes: int, *, gradient: bool) -> int:
        """A new row for the messages of a value or of its gradient."""
        row = self.num_slots
        self.num_slots += self.microbatches
        self.bytes[row], self.tensor[row] = nbytes, (number, gradient)
        return row

    def encode(self, orders: Iterable[Iterable[Action]]) -> tuple[list[list[int]], list[float]]:
        """Orders as codes, and the seconds of each code."""
        m = self.microbatches
        seconds = [0.0] * self.size
        coded = []
        prices = [{kind: cost.seconds(kind) for kind in _KINDS} for cost in self.costs]
        for order in orders:
            codes = []
            for kind, j, i in order:
                code = (3 * j + _KINDS[kind]) * m + i
                seconds[code] = prices[j][kind]
                codes.append(code)
            coded.append(codes)
        return coded, seconds

    def run(self, orders: Sequence[Sequence[int]], seconds: Sequence[float]) -> list[float]:
        """When each action ends and each message arrives; infinite for what never does.

        `begins` are then the begins of the actions.
        """
        m, needs, sends, joint = self.microbatches, self.needs, self.sends, self.joint
        arrived = [INFINITY] * self.num_slots
        begins = self.begins = [INFINITY] * self.size
        free = [0.0] * self.ranks
        position = [0] * self.ranks
        link_free = [0.0] * (self.ranks * self.ranks)
        waiting: dict[int, int] = {}
        left: dict[int, int] = {}
        ready = list(range(len(orders)))
        while ready:
            rank = ready.pop()
            order, now = orders[rank], free[rank]
            for k in range(position[rank], len(order)):
                code = order[k]
                kind = code // m
                i = code - kind * m
                begin = now
                for row in needs[kind]:
                    if arrived[row + i] > begin:
                        begin = arrived[row + i]
                        if begin == INFINITY:
                            waiting[row + i] = rank
                            break
                if begin == INFINITY:
                    position[rank] = k
                    break
                begins[code] = begin
                arrived[code] = now = begin + seconds[code]
                for row, link, duration in sends[kind]:
                    slot = row + i
                    if joint and row in joint:
                        left[slot] = left.get(slot, joint[row]) - 1
                        if left[slot]:
                            continue
                    end = link_free[link]
                    end = (now if now > end else end) + duration
                    arrived[slot] = link_free[link] = end
                    if slot in waiting:
                        ready.append(waiting.pop(slot))
            else:
                position[rank] = len(order)
            free[rank] = now
        return arrived

    def peaks(self, orders: Sequence[Sequence[int]], arrived: Sequence[float]) -> tuple[int, ...]:
        """The most bytes on each rank in the last run, which gave `arrived`."""
        return tuple(Memory(self, orders, arrived).peaks())

    def stuck(
        self, orders: Sequence[Sequence[int]], arrived: Sequence[float]
    ) -> list[tuple[int, int]]:
        """The ranks that never end, each with the position at which it waits."""
        found = []
        for rank, order in enumerate(orders):
            if order and arrived[order[-1]] == INFINITY:
                never = (k for k, code in enumerate(order) if arrived[code] == INFINITY)
                found.append((rank, next(never)))
        return found


def _check(
    placement: Sequence[int], costs: Sequence[StageCost], messages: Sequence[Message]
) -> None:
    """Raise InputError for costs and messages of other stages than there are."""
    stages = len(placement)
    if len(costs) != stages:
        message = f"every stage needs a cost ({stages} stages, {len(costs)} costs)"
        raise InputError(message)
    for each in messages:
        wrong = [j for j in (each.source, *each.targets) if not 0 <= j < stages]
        if wrong or each.source in each.targets:
            message = (
                f"a message goes from one stage to others (from {each.source} to {each.targets}, "
                f"{stages} stages)"
            )
            raise InputError(message)
