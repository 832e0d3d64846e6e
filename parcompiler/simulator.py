"""When every instruction runs and what memory it takes: a simulation of what the runtime executes.

Each rank executes its list in order. A SEND does not hold its rank up: messages travel beside the
compute, one after the other on each directed link between two ranks. So do sums of gradients, one
after the other on each rank. Data replicas do the same at the same time: one of them is simulated.

    rank 0  F0 F1 .. .. .. B0 .. B1
    0 -> 1  .. x0 x1                    [1] the SEND after F0 begins when F0 ends
    rank 1  .. .. F0 B0 F1 B1           [2] F0 begins when x0 has arrived
    1 -> 0  .. .. .. .. g0 .. g1        [3] B0 of rank 0 waits for the gradient of x0

So each moment is the latest of a few earlier ones, and one walk over the lists finds them all: a
rank that needs a message that was not sent yet is put aside until it is. Time and memory of the
simulation grow with the number of instructions.

>>> from parcompiler.instruction import parse
>>> first = "FORWARD stage 0 mb 0; SEND x mb 0 to 1; RECV x.grad mb 0 from 1; BACKWARD stage 0 mb 0"
>>> last = "RECV x mb 0 from 0; FORWARD stage 1 mb 0; BACKWARD stage 1 mb 0; SEND x.grad mb 0 to 0"
>>> lists = [parse(text.replace("; ", "\\n")) for text in (first, last)]
>>> cost = StageCost(forward=1.0, backward=2.0, resident=100, saved=10)
>>> print(simulate(lists, [0, 1], [cost, cost], {"x": 4}, lambda value, source, target: 1.0))
step 8 s, 62.5 % idle, at most 118 B on a rank
rank 0   62.5 %        118 B  F0------........................................B0--------------
rank 1   62.5 %        114 B  ................F0------B0--------------........................
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, NamedTuple, Protocol, assert_never

from parcompiler.errors import InputError, PlanError
from parcompiler.instruction import BACKWARDS, COMPUTE, Instruction, Kind
from parcompiler.schedules.action import LETTERS
from parcompiler.schedules.timing import StageCost

if TYPE_CHECKING:
    from parcompiler.lower import Lowered

__all__ = ["Ends", "Event", "StageCost", "Timeline", "free", "simulate", "simulate_lowered"]

WIDTH = 64  # columns of the drawn step


@dataclass(frozen=True, slots=True)
class Event:
    """Seconds from the begin of the step: compute and collectives on `rank`, a SEND on its link."""

    rank: int
    begin: float
    end: float
    instruction: Instruction


@dataclass(frozen=True)
class Timeline:
    """A simulated step. Seconds and bytes; one entry per rank where it is a tuple of numbers.

    `bubble` is the fraction of the step in which a rank does not compute. `peak_memory` counts
    resident bytes, activations of micro-batches in flight, and message buffers; `memory` are its
    steps, for each rank (second, bytes from then on). `events` are sorted by their begin.
    `critical_path` are events, each beginning when the one before ends, that last the whole step.
    """

    step_time: float
    bubble: tuple[float, ...]
    peak_memory: tuple[int, ...]
    events: tuple[Event, ...] = field(repr=False)
    critical_path: tuple[Event, ...] = field(repr=False)
    memory: tuple[tuple[tuple[float, int], ...], ...] = field(repr=False)

    def __str__(self) -> str:
        """The numbers of each rank and a drawing of its step; `.` is idle."""
        idle = sum(self.bubble) / len(self.bubble) if self.bubble else 0.0
        largest = _in_units(max(self.peak_memory, default=0))
        first = f"step {self.step_time:.6g} s, {100 * idle:.1f} % idle, at most {largest} on a rank"
        return "\n".join([first, *self._rows()])

    def _rows(self) -> Iterator[str]:
        """One line per rank."""
        scale = WIDTH / self.step_time if self.step_time else 0.0
        drawn = [["."] * WIDTH for _ in self.bubble]
        for event in self.events:
            if event.instruction.kind in COMPUTE:
                begin, end = round(event.begin * scale), round(event.end * scale)
                label = f"{LETTERS[event.instruction.kind]}{event.instruction.microbatch}"
                drawn[event.rank][begin:end] = label.ljust(end - begin, "-")[: end - begin]
        for rank, (bubble, peak) in enumerate(zip(self.bubble, self.peak_memory, strict=True)):
            numbers = f"rank {rank:<3} {100 * bubble:4.1f} % {_in_units(peak):>12}"
            yield f"{numbers}  {''.join(drawn[rank])}"


class Ends(Protocol):
    """The names of the values that a stage receives and gives: `lower.Stage` has them."""

    @property
    def receives(self) -> tuple[str, ...]: ...

    @property
    def gives(self) -> tuple[str, ...]: ...


def free(*_: object) -> float:
    """The time of communication that takes none."""
    return 0.0


def simulate(
    instructions: Sequence[Sequence[Instruction]],
    stage_rank: Sequence[int],
    costs: Sequence[StageCost],
    message_bytes: Mapping[str, int],
    message_seconds: Callable[[str, int, int], float] = free,
    *,
    collective_seconds: Callable[[Instruction], float] = free,
    stages: Sequence[Ends] | None = None,
) -> Timeline:
    """Execute one list per rank; stage j is on rank `stage_rank[j]` and costs `costs[j]`.

    `message_seconds(value, source, target)` is the time, latency included, for which a message of
    `message_bytes[value]` occupies the link from rank `source` to rank `target`. A collective
    takes `collective_seconds(instruction)` from when the last of its ranks has reached it; sums of
    gradients hold up nothing but the end of the step.

    With `stages`, an instruction waits for the messages that its stage receives or gives. Without,
    it waits for all of its micro-batch and direction that were posted before it and not used yet,
    which is the same when every rank has one stage.

    Raises PlanError that names a BACKWARD without its FORWARD, or the instructions at which the
    ranks wait for each other.
    """
    if len(costs) != len(stage_rank):
        message = f"every stage needs a cost ({len(stage_rank)} stages, {len(costs)} costs)"
        raise InputError(message)
    programs = [_program(rank, lines, stages) for rank, lines in enumerate(instructions)]
    prices = _Prices(costs, message_bytes, cache(message_seconds), collective_seconds)
    step = _Step(programs, prices)
    step.run()
    return _timeline(step, _resident(len(programs), stage_rank, costs))


def simulate_lowered(
    lowered: Lowered,
    costs: Sequence[StageCost],
    seconds: Callable[[int], float] = free,
    *,
    collective_seconds: Callable[[Instruction], float] = free,
    evaluation: bool = False,
) -> Timeline:
    """The training step of a lowered program, or its evaluation; `costs[j]` is that of stage j.

    `seconds(nbytes)` is the time of one message on any link. Raises as `simulate` does.
    """
    sizes = {name: value.nbytes for name, value in lowered.values.items()}
    return simulate(
        lowered.evaluation if evaluation else lowered.instructions,
        [stage.rank for stage in lowered.stages],
        costs,
        sizes,
        lambda value, source, target: seconds(sizes[value]),
        collective_seconds=collective_seconds,
        stages=lowered.stages,
    )


class _Message(NamedTuple):
    """What a SEND and its RECV have in common."""

    source: int
    target: int
    value: str
    gradient: bool
    microbatch: int | None

    def __str__(self) -> str:
        name = f"{self.value}.grad" if self.gradient else self.value
        return f"{name} mb {self.microbatch} from rank {self.source}"


@dataclass(frozen=True, slots=True)
class _Program:
    """The list of one rank. By position in it: messages that compute uses, and uses last."""

    instructions: Sequence[Instruction]
    uses: Mapping[int, Sequence[_Message]]
    releases: Mapping[int, Sequence[_Message]]
    trained: frozenset[tuple[int | None, int | None]]  # (stage, micro-batch) with a backward


@dataclass(frozen=True, slots=True)
class _Prices:
    """What is asked for seconds and bytes."""

    costs: Sequence[StageCost]
    message_bytes: Mapping[str, int]
    message_seconds: Callable[[str, int, int], float]
    collective_seconds: Callable[[Instruction], float]


def _program(rank: int, lines: Sequence[Instruction], stages: Sequence[Ends] | None) -> _Program:
    """A rank's list with the messages that each compute instruction uses."""
    uses = dict(_uses(rank, lines, stages))
    last = {message: position for position, messages in uses.items() for message in messages}
    releases = defaultdict(list)
    for message, position in last.items():
        releases[position].append(message)
    trained = {(line.stage, line.microbatch) for line in lines if line.kind in BACKWARDS}
    return _Program(lines, uses, releases, frozenset(trained))


def _uses(
    rank: int, lines: Sequence[Instruction], stages: Sequence[Ends] | None
) -> Iterator[tuple[int, list[_Message]]]:
    """The messages that each compute instruction uses; a backward uses its forward's too."""
    posted: dict[tuple[int | None, bool, str | None], list[_Message]] = defaultdict(list)
    forwards: dict[tuple[int | None, int | None], list[_Message]] = {}
    for position, line in enumerate(lines):
        if line.kind is Kind.RECV:
            name = None if stages is None else line.value
            posted[line.microbatch, line.gradient, name].append(_message(rank, line))
        elif line.kind in COMPUTE:
            place, gradient = (line.stage, line.microbatch), line.kind in BACKWARDS
            if line.kind is Kind.BACKWARD_WEIGHT:
                found = []
            elif stages is None:
                found = posted.pop((line.microbatch, gradient, None), [])
            else:
                names = _names(line, stages)
                found = [
                    m for name in names for m in posted.get((line.microbatch, gradient, name), ())
                ]
            if line.kind is Kind.FORWARD:
                forwards[place] = found
            elif place not in forwards:
                message = f"rank {rank} at {line}: its FORWARD does not stand before it"
                raise PlanError(message)
            else:
                found = found + forwards[place]
            yield position, found


def _names(line: Instruction, stages: Sequence[Ends]) -> tuple[str, ...]:
    """The values that a forward waits for, or those whose gradients a backward waits for."""
    assert line.stage is not None
    stage = stages[line.stage]
    return stage.receives if line.kind is Kind.FORWARD else stage.gives


def _message(rank: int, line: Instruction) -> _Message:
    """The message that a rank sends or receives."""
    assert line.value is not None and line.peer is not None
    source, target = (rank, line.peer) if line.kind is Kind.SEND else (line.peer, rank)
    return _Message(source, target, line.value, line.gradient, line.microbatch)


_Tensor = tuple[int, str, bool, int | None]  # what messages to several ranks have in common
START = -1  # the cause of an event that begins with the step


class _Step:
    """The state of a step while it is simulated. An event is known by its number in `events`."""

    def __init__(self, programs: Sequence[_Program], prices: _Prices) -> None:
        ranks = len(programs)
        self.programs = programs
        self.prices = prices
        self.events: list[Event] = []
        self.causes: list[int] = []  # of each event, the one whose end it began with
        self.changes: list[list[tuple[float, int]]] = [[] for _ in range(ranks)]  # second, bytes
        self.position = [0] * ranks
        self.last = [START] * ranks  # the event that each rank computed last
        self.link: dict[tuple[int, int], int] = {}  # the last transfer on each
        self.summed: dict[int, int] = {}  # the last sum of gradients of each rank
        self.arrival: dict[_Message, int] = {}  # the transfer of each message
        self.leaving: dict[_Tensor, float] = {}  # held for sends until
        self.waiting: dict[_Message, int] = {}  # the rank put aside for each message
        self.meetings: dict[Instruction, dict[int, int]] = defaultdict(dict)  # rank: its last event
        self.ready = deque(range(ranks))

    def run(self) -> None:
        """Let every rank go as far as it can, again whenever something it waits for has come."""
        while self.ready:
            self._advance(self.ready.popleft())
        stuck = [r for r, p in enumerate(self.programs) if self.position[r] < len(p.instructions)]
        alone = {r for present in self.meetings.values() for r in present} - {*stuck}
        if stuck or alone:
            raise PlanError(self._deadlock([*stuck, *sorted(alone)]))

    def _advance(self, rank: int) -> None:
        """Execute a rank's instructions up to one that must wait."""
        lines = self.programs[rank].instructions
        while self.position[rank] < len(lines) and self._execute(rank, lines[self.position[rank]]):
            self.position[rank] += 1

    def _execute(self, rank: int, line: Instruction) -> bool:
        """Execute one instruction; False when the rank must wait for others."""
        match line.kind:
            case Kind.FORWARD | Kind.BACKWARD | Kind.BACKWARD_INPUT | Kind.BACKWARD_WEIGHT:
                return self._compute(rank, line)
            case Kind.RECV:
                self._hold(rank, self._end(self.last[rank]), self._size(_message(rank, line)))
                return True
            case Kind.SEND:
                self._send(rank, _message(rank, line))
                return True
            case Kind.REDUCE_GRADIENTS:
                self._reduce(rank, line)
                return True
            case Kind.SHARE_LOSS:
                return self._meet(rank, line)
            case Kind.UPDATE:
                return True  # an optimizer step is no part of what is compared
            case _:
                assert_never(line.kind)

    def _compute(self, rank: int, line: Instruction) -> bool:
        """Compute once the rank is free and the messages have arrived."""
        uses = self.programs[rank].uses[self.position[rank]]
        for message in uses:
            if message not in self.arrival:
                self.waiting[message] = rank
                return False
        assert line.stage is not None
        cost = self.prices.costs[line.stage]
        seconds = cost.seconds(line.kind)
        causes = [self.last[rank], *(self.arrival[message] for message in uses)]
        self.last[rank] = self._record(rank, line, seconds, causes)
        self._account(rank, line, cost.saved)
        return True

    def _account(self, rank: int, line: Instruction, saved: int) -> None:
        """The memory that the last compute instruction takes and gives back."""
        program, event = self.programs[rank], self.events[self.last[rank]]
        if line.kind is Kind.FORWARD:
            self._hold(rank, event.begin, saved)
        ends = line.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
        if ends or (line.stage, line.microbatch) not in program.trained:
            self._hold(rank, event.end, -saved)
        for message in program.releases.get(self.position[rank], ()):
            self._hold(rank, event.end, -self._size(message))

    def _send(self, rank: int, message: _Message) -> None:
        """Transfer a message once its link is free, and wake the rank that waits for it."""
        line = self.programs[rank].instructions[self.position[rank]]
        way = (message.source, message.target)
        seconds = self.prices.message_seconds(message.value, *way)
        transfer = self._record(rank, line, seconds, [self.last[rank], self.link.get(way, START)])
        self.link[way] = self.arrival[message] = transfer
        self._keep_until_sent(rank, message, self._end(transfer))
        if message in self.waiting:
            self.ready.append(self.waiting.pop(message))

    def _keep_until_sent(self, rank: int, message: _Message, end: float) -> None:
        """Hold the tensor of a message until `end`; once when it goes to several ranks."""
        tensor = (message.source, message.value, message.gradient, message.microbatch)
        begin = max(self._end(self.last[rank]), self.leaving.get(tensor, 0.0))
        if begin < end:
            self.leaving[tensor] = end
            self._hold(rank, begin, self._size(message))
            self._hold(rank, end, -self._size(message))

    def _reduce(self, rank: int, line: Instruction) -> None:
        """A sum of gradients: it runs beside the compute of its ranks once the last has come.

        On a rank there is one sum after the other.
        """
        present = self.meetings[line]
        present[rank] = self.last[rank]
        if len(present) < len(line.ranks):
            return
        seconds = self.prices.collective_seconds(line)
        found = self.meetings.pop(line)
        causes = [*found.values(), *(self.summed.get(other, START) for other in found)]
        for other in found:
            self.summed[other] = self._record(other, line, seconds, causes)

    def _meet(self, rank: int, line: Instruction) -> bool:
        """The loss is shared: that begins for all of its ranks when the last of them has come."""
        present = self.meetings[line]
        present[rank] = self.last[rank]
        if len(present) < len(self.programs):
            return False
        seconds = self.prices.collective_seconds(line)
        causes = list(self.meetings.pop(line).values())
        for other in present:
            self.last[other] = self._record(other, line, seconds, causes)
            if other != rank:
                self.position[other] += 1
                self.ready.append(other)
        return True

    def _record(self, rank: int, line: Instruction, seconds: float, causes: Iterable[int]) -> int:
        """An event that begins with the end of the latest of its causes (the first of equals)."""
        cause = max(causes, key=self._end)
        begin = self._end(cause)
        self.events.append(Event(rank, begin, begin + seconds, line))
        self.causes.append(cause)
        return len(self.events) - 1

    def _end(self, event: int) -> float:
        """The second at which an event ends."""
        return 0.0 if event == START else self.events[event].end

    def _hold(self, rank: int, second: float, size: int) -> None:
        """From `second` on, a rank holds `size` more bytes."""
        self.changes[rank].append((second, size))

    def _size(self, message: _Message) -> int:
        """Bytes of a message."""
        return self.prices.message_bytes[message.value]

    def _deadlock(self, stuck: Sequence[int]) -> str:
        """What is wrong with a program of which these ranks cannot go on."""
        first = f"the program never ends: {len(stuck)} of its {len(self.programs)} ranks wait"
        return "\n".join(
            [f"{first} (check the order of these instructions)", *map(self._stop, stuck)]
        )

    def _stop(self, rank: int) -> str:
        """Where a rank stands and what it waits for."""
        program, position = self.programs[rank], self.position[rank]
        if position == len(program.instructions):
            line = next(line for line, present in self.meetings.items() if rank in present)
        else:
            line = program.instructions[position]
        if line.kind in COMPUTE:
            missing = next(m for m in program.uses[position] if m not in self.arrival)
            return f"  * rank {rank} at {line}: waits for {missing}"
        others = set(line.ranks or range(len(self.programs))) - set(self.meetings[line])
        return f"  * rank {rank} at {line}: waits for rank {', '.join(map(str, sorted(others)))}"


def _resident(ranks: int, stage_rank: Sequence[int], costs: Sequence[StageCost]) -> list[int]:
    """Bytes that each rank holds all the time."""
    resident = [0] * ranks
    for rank, cost in zip(stage_rank, costs, strict=True):
        resident[rank] += cost.resident
    return resident


def _timeline(step: _Step, resident: Sequence[int]) -> Timeline:
    """What a finished step amounts to."""
    step_time = max((event.end for event in step.events), default=0.0)
    memory = tuple(_levels(*pair) for pair in zip(resident, step.changes, strict=True))
    return Timeline(
        step_time=step_time,
        bubble=_bubble(step.events, step_time, len(resident)),
        peak_memory=tuple(max(size for _, size in levels) for levels in memory),
        events=tuple(sorted(step.events, key=attrgetter("begin", "rank"))),
        critical_path=_critical_path(step.events, step.causes),
        memory=memory,
    )


def _bubble(events: Iterable[Event], step_time: float, ranks: int) -> tuple[float, ...]:
    """The fraction of the step that each rank does not compute."""
    busy = [0.0] * ranks
    for event in events:
        if event.instruction.kind in COMPUTE:
            busy[event.rank] += event.end - event.begin
    return tuple(1.0 - seconds / step_time if step_time else 0.0 for seconds in busy)


def _levels(resident: int, changes: Iterable[tuple[float, int]]) -> tuple[tuple[float, int], ...]:
    """The bytes held from each change on; what happens at one moment happens at once."""
    size = resident
    levels = {0.0: size}
    for second, change in sorted(changes, key=itemgetter(0)):
        size += change
        levels[second] = size
    return tuple(next(same) for _, same in groupby(levels.items(), key=itemgetter(1)))


def _critical_path(events: Sequence[Event], causes: Sequence[int]) -> tuple[Event, ...]:
    """From the event that ends last back to the begin of the step, in order of time."""
    path = []
    event = max(range(len(events)), key=lambda k: (events[k].end, k), default=START)
    while event != START:
        path.append(events[event])
        event = causes[event]
    return tuple(reversed(path))


def _in_units(nbytes: float) -> str:
    """Bytes in the largest unit of which there is one.

    >>> _in_units(3 * 2**29)
    '1.5 GiB'
    """
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} GiB"
