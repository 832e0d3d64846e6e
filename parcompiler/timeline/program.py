"""Instruction lists as tasks: dependencies of each instruction, and the buffers that it holds.

A SEND does not hold up its rank, nor does a collective: they begin after the task before them, on
the lane of their link or group, and the tasks that need them wait for their end. SHARE_LOSS is
waited for at its place. The optimizer's step is in no list: it is a task (an UPDATE of no stage) of
each rank that updates something, after all sums of all ranks. The gather of updated parameters by
data ranks begins with the step, as in a steady state it follows the previous update, and the first
forward of a stage waits for the parameters that it needs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from parcompiler.errors import PlanError
from parcompiler.instruction import BACKWARDS, BEHIND, COMPUTE, GROUP, HEAD, WORK, Instruction, Kind
from parcompiler.timeline.memory import (
    Buffer,
    MemoryUse,
    Place,
    buffer_arrays,
    returning,
    task_arrays,
)
from parcompiler.timeline.run import INFINITY, START, Moments, Tasks

GATHER = Kind.GATHER_PARAMETERS
ENDS = (BEHIND | {Kind.SHARE_LOSS}) - {GATHER}  # collectives that are waited for


class Ends(Protocol):
    """The names of the values that a stage receives and gives: `lower.Stage` has them."""

    @property
    def receives(self) -> tuple[str, ...]: ...

    @property
    def gives(self) -> tuple[str, ...]: ...


class SendRecv(NamedTuple):
    """The message of a SEND and its RECV."""

    source: int
    target: int
    value: str
    gradient: bool
    microbatch: int | None

    def __str__(self) -> str:
        name = f"{self.value}.grad" if self.gradient else self.value
        return f"{name} mb {self.microbatch} from rank {self.source}"


class Ready(NamedTuple):
    """The event from which on the first forward of a stage finds each parameter gathered when it
    reads it, though some are still under way when it begins."""

    stage: int


Exchange = SendRecv | Ready | Instruction  # an instruction is a collective


@dataclass(frozen=True)
class ProgramTasks:
    """The tasks of a program. `lines` has the rank and the instruction of each task, `exchanges`
    the exchange of each number from the number of tasks on; `trained` are the stages and
    micro-batches with a backward."""

    tasks: Tasks
    orders: Sequence[Sequence[int]]
    lines: Sequence[tuple[int, Instruction]]
    exchanges: Sequence[Exchange]
    buffers: Sequence[Buffer]
    trained: frozenset[Place]
    within: Sequence[int] = ()  # sums that begin in a whole backward, as gradients become final

    @property
    def memory(self) -> MemoryUse:
        """The memory use of the tasks."""
        tasks = task_arrays(
            self.orders, [[self.lines[x][1] for x in order] for order in self.orders]
        )
        returns = returning(tasks, self.trained)
        return MemoryUse(len(self.orders), tasks, returns, buffer_arrays(self.buffers))

    def sum(self, number: int) -> Instruction:
        """The sum of gradients with that number."""
        exchange = self.exchanges[number - self.tasks.size]
        assert isinstance(exchange, Instruction), "messages are no sums"
        return exchange

    def check(self, programs: Sequence[Sequence[Instruction]], moments: Moments) -> None:
        """Raise PlanError, naming what each rank waits for, if ranks deadlock."""
        stuck = dict(self._stuck(programs, moments))
        if stuck:
            first = f"the program never ends: {len(stuck)} of its {len(programs)} ranks wait"
            where = [f"  * rank {rank} at {text}" for rank, text in sorted(stuck.items())]
            message = "\n".join([f"{first} (check the order of these instructions)", *where])
            raise PlanError(message)

    def _stuck(
        self, programs: Sequence[Sequence[Instruction]], moments: Moments
    ) -> Iterator[tuple[int, str]]:
        """The ranks that never end, and those that no other joins in a collective."""
        number = {exchange: self.tasks.size + x for x, exchange in enumerate(self.exchanges)}
        present: dict[Exchange, set[int]] = defaultdict(set)
        for rank, (order, lines) in enumerate(zip(self.orders, programs, strict=True)):
            ended = (task for task in order if self.lines[task][1].kind is not Kind.UPDATE)
            left = sum(moments.ends[task] < INFINITY for task in ended)
            for line in lines:
                if line.kind in WORK | ENDS:
                    if not left:
                        present[line].add(rank)
                        break
                    left -= 1
                present[line].add(rank)
        for rank, order in enumerate(self.orders):
            never = next((task for task in order if moments.ends[task] == INFINITY), None)
            if never is not None:
                line = self.lines[never][1]
                missing = [n for n in self.tasks.needs[never] if moments.ends[n] == INFINITY]
                exchange = self.exchanges[missing[0] - self.tasks.size]
                whom = _others(line, present, len(programs)) if exchange == line else exchange
                yield rank, f"{line}: waits for {whom}"
        for exchange, x in number.items():
            if isinstance(exchange, Instruction) and moments.ends[x] == INFINITY:
                for rank in present[exchange]:
                    if all(moments.ends[task] < INFINITY for task in self.orders[rank]):
                        others = _others(exchange, present, len(programs))
                        yield rank, f"{exchange}: waits for {others}"


def _others(line: Instruction, present: dict[Exchange, set[int]], ranks: int) -> str:
    """The ranks that have not reached a collective, in words."""
    others = set(line.ranks or range(ranks)) - present[line]
    return f"rank {', '.join(map(str, sorted(others)))}"


def message(rank: int, line: Instruction) -> SendRecv:
    """The message that a rank sends or receives."""
    assert line.value is not None and line.peer is not None
    source, target = (rank, line.peer) if line.kind is Kind.SEND else (line.peer, rank)
    return SendRecv(source, target, line.value, line.gradient, line.microbatch)


def tasks_of(
    programs: Sequence[Sequence[Instruction]],
    stages: Sequence[Ends] | None = None,
    updating: Collection[int] = (),
) -> ProgramTasks:
    """The tasks of the lists of all ranks, with an optimizer's step on the `updating` ranks.

    With `stages`, a compute instruction waits for the values that its stage receives or gives.
    Without, it waits for all messages of its micro-batch and direction that were posted before it
    and are not used yet. Raises PlanError for a backward without its forward.
    """
    return _Builder(programs, stages, updating).build()


@dataclass
class _RankTasks:
    """The state of one rank while its list is read."""

    rank: int
    posted: dict[tuple[int | None, bool, str | None], list[Exchange]] = field(
        default_factory=lambda: defaultdict(list)
    )
    forwards: dict[Place, list[Exchange]] = field(default_factory=dict)
    shared: dict[int | None, list[Instruction]] = field(default_factory=lambda: defaultdict(list))
    last: int = START  # the previous task
    buffers: dict[Exchange, int] = field(default_factory=dict)  # the task before each was posted
    used: dict[Exchange, int] = field(default_factory=dict)  # the last task that uses it
    unsharded: Counter[Instruction] = field(default_factory=Counter)  # how often each was seen
    gathered: dict[int | None, int] = field(default_factory=dict)  # by stage, what it waits for
    whole: dict[int | None, tuple[Exchange, int]] = field(default_factory=dict)  # since which task
    begun: set[int | None] = field(default_factory=set)  # stages with a forward so far


class _Builder:
    """Builds the tasks in a walk over the lists."""

    def __init__(
        self,
        programs: Sequence[Sequence[Instruction]],
        stages: Sequence[Ends] | None,
        updating: Collection[int],
    ) -> None:
        self.programs, self.stages, self.updating = programs, stages, updating
        self.size = sum(line.kind in WORK | ENDS for lines in programs for line in lines)
        self.size += len(updating)
        self.summed: list[int] = []  # the sums, and the meeting of all ranks
        self.within: list[int] = []  # the sums that begin in a backward
        self.number: dict[tuple[Exchange, int], int] = {}
        self.early: list[int] = []  # by exchange: parties from the start
        self.lines: list[tuple[int, Instruction]] = []
        self.needs: list[list[int]] = []
        self.joins: list[list[int]] = []
        self.buffers: list[Buffer] = []

    def build(self) -> ProgramTasks:
        """Build the tasks of all ranks, one rank after another."""
        orders = [self._rank(_RankTasks(rank), lines) for rank, lines in enumerate(self.programs)]
        exchanges = [exchange for exchange, _ in self.number]
        lanes: dict[object, int] = {}
        occupied = [
            tuple(lanes.setdefault(lane, len(lanes)) for lane in _lanes(exchange))
            for exchange in exchanges
        ]
        pairs = zip(exchanges, self.early, strict=True)
        parties = [self._parties(exchange) - count for exchange, count in pairs]
        early = [self.size + x for x, n in enumerate(parties) if n == 0]
        tasks = Tasks(self.size, self.needs, self.joins, parties, occupied, len(lanes), early)
        trained = frozenset(
            (line.stage, line.microbatch) for _, line in self.lines if line.kind in BACKWARDS
        )
        return ProgramTasks(
            tasks, orders, self.lines, exchanges, self.buffers, trained, self.within
        )

    def _parties(self, exchange: Exchange) -> int:
        """The number of tasks that take part in an exchange."""
        if not isinstance(exchange, Instruction):
            return int(isinstance(exchange, SendRecv))
        return len(exchange.ranks or self.programs)

    def _exchange(self, exchange: Exchange, time: int = 0) -> int:
        """The number of an exchange; `time` counts equal ones."""
        if (exchange, time) not in self.number:
            self.number[exchange, time] = self.size + len(self.number)
            self.early.append(0)
        return self.number[exchange, time]

    def _join(self, at: _RankTasks, exchange: Exchange, time: int = 0) -> None:
        """Let a rank take part in an exchange from the end of its previous task on."""
        number = self._exchange(exchange, time)
        if at.last == START:
            self.early[number - self.size] += 1
        else:
            self.joins[at.last].append(number)

    def _rank(self, at: _RankTasks, lines: Sequence[Instruction]) -> list[int]:
        """Add the tasks of one rank; returns their numbers."""
        first = len(self.lines)
        gathers = any(line.kind is GATHER for line in lines)
        leaving: dict[tuple[object, ...], list[int]] = {}
        behind = next((k for k, line in enumerate(lines) if line.kind in BEHIND), len(lines))
        for k, line in enumerate((*lines, None)):
            if k == behind and at.rank in self.updating:
                meeting = Instruction(Kind.UPDATE, value="all", ranks=tuple(self.updating))
                self._join(at, meeting)
                self.summed.append(self._exchange(meeting))
                self._task(at, Instruction(Kind.UPDATE, ranks=(at.rank,)), self.summed)
            if line is None:
                break
            if line.kind in WORK:
                self._work(at, line)
                if gathers and line.kind is Kind.FORWARD and line.stage not in at.begun:
                    at.begun.add(line.stage)
                    self.needs[at.last].append(self._exchange(Ready(line.stage or 0)))
            elif line.kind is GATHER:
                self.early[self._exchange(line) - self.size] += 1
            elif line.kind is Kind.RECV:
                self._post(at, line, message(at.rank, line))
            elif line.kind is Kind.SEND:
                sent = message(at.rank, line)
                self._join(at, sent)
                tensor = (at.last, line.value, line.gradient, line.microbatch)
                if tensor in leaving:
                    leaving[tensor].append(self._exchange(sent))
                else:
                    leaving[tensor] = [self._exchange(sent)]
                    self.buffers.append(Buffer(at.rank, sent, at.last, leaving[tensor]))
            elif line.kind in GROUP:
                self._collective(at, line)
            elif line.kind is Kind.REDUCE_GRADIENTS:
                self._join(at, line)
                self.summed.append(self._exchange(line))
                if at.last != START and self.lines[at.last][1].kind is Kind.BACKWARD:
                    self.within.append(self.summed[-1])
            elif line.kind is Kind.UNSHARD:
                self._unshard(at, line)
            elif line.kind is Kind.RESHARD and line.stage in at.whole:
                self.buffers.append(Buffer(at.rank, *at.whole.pop(line.stage), (at.last,)))
            elif line.kind in ENDS:
                self._join(at, line)
                self._task(at, line, [self._exchange(line)])
        self.buffers += (Buffer(at.rank, *since, ()) for since in at.whole.values())
        for exchange, begin in at.buffers.items():
            last = (at.used[exchange],) if exchange in at.used else ()
            self.buffers.append(Buffer(at.rank, exchange, begin, last))
        return list(range(first, len(self.lines)))

    def _task(self, at: _RankTasks, line: Instruction, needs: list[int]) -> None:
        """Add a task to a rank."""
        at.last = len(self.lines)
        self.lines.append((at.rank, line))
        self.needs.append(needs)
        self.joins.append([])

    def _unshard(self, at: _RankTasks, line: Instruction) -> None:
        """Begin to gather the parameters of a stage; its next task waits for them."""
        at.unsharded[line] += 1  # a backward may have one like that of its forward
        self._join(at, line, at.unsharded[line])
        at.gathered[line.stage] = self._exchange(line, at.unsharded[line])
        at.whole.setdefault(line.stage, (line, at.last))

    def _work(self, at: _RankTasks, line: Instruction) -> None:
        """Add a compute task, with the exchanges that it uses."""
        uses = self._of_stage(at, line) if line.kind in COMPUTE else [*_of_group(at, line)]
        needs = [self._exchange(exchange) for exchange in uses]
        if line.stage in at.gathered:
            needs.append(at.gathered.pop(line.stage))
        self._task(at, line, needs)
        at.used.update(dict.fromkeys(uses, at.last))

    def _post(self, at: _RankTasks, line: Instruction, exchange: Exchange) -> None:
        """Post an exchange whose result the stages of a rank wait for."""
        name = None if self.stages is None else line.value
        at.posted[line.microbatch, line.gradient, name].append(exchange)
        at.buffers[exchange] = at.last

    def _collective(self, at: _RankTasks, line: Instruction) -> None:
        """Add a collective of the vocabulary. All ranks but the one that gets a sum hold their
        summand until it has ended."""
        self._join(at, line)
        if line.kind is Kind.REDUCE and line.peer != at.rank:
            self.buffers.append(Buffer(at.rank, line, at.last, (self._exchange(line),)))
        elif line.kind is Kind.REDUCE:
            self._post(at, line, line)
        else:
            at.buffers[line] = at.last
        at.shared[line.microbatch].append(line)

    def _of_stage(self, at: _RankTasks, line: Instruction) -> list[Exchange]:
        """The exchanges that a compute instruction of a stage uses; a backward also uses those of
        its forward."""
        place, gradient = (line.stage, line.microbatch), line.kind in BACKWARDS
        if line.kind is not Kind.FORWARD and place not in at.forwards:
            text = f"rank {at.rank} at {line}: its FORWARD does not stand before it"
            raise PlanError(text)
        if line.kind is Kind.BACKWARD_WEIGHT:
            return []  # its operands count in `StageCost.left`
        if self.stages is None:
            uses = at.posted.pop((line.microbatch, gradient, None), [])
        else:
            keys = [(line.microbatch, gradient, name) for name in _names(line, self.stages)]
            uses = [exchange for key in keys for exchange in at.posted.get(key, ())]
        if line.kind is Kind.FORWARD:
            at.forwards[place] = uses
            return uses
        return uses + at.forwards[place]


def _of_group(at: _RankTasks, line: Instruction) -> Iterator[Instruction]:
    """The collectives that an instruction for the vocabulary uses; those of the head keep x."""
    for other in at.shared[line.microbatch]:
        if line.kind is Kind.EMBED_BACKWARD:
            if other.kind is Kind.BROADCAST and other.gradient and other.value == line.value:
                yield other
        elif line.kind in HEAD and not other.gradient and other.kind is not Kind.REDUCE:
            yield other


def _names(line: Instruction, stages: Sequence[Ends]) -> tuple[str, ...]:
    """The values that a forward waits for, or those whose gradients a backward waits for."""
    assert line.stage is not None
    stage = stages[line.stage]
    return stage.receives if line.kind is Kind.FORWARD else stage.gives


def _lanes(exchange: Exchange) -> tuple[object, ...]:
    """The lanes that an exchange occupies: one at a time on a link, in the group of the vocabulary,
    and among the sums of each rank."""
    if isinstance(exchange, SendRecv):
        return ((exchange.source, exchange.target),)
    if isinstance(exchange, Ready):
        return ()
    if exchange.kind in GROUP:
        return ("vocabulary",)
    if exchange.kind is Kind.UPDATE:
        return ()
    return tuple(("sums", rank) for rank in exchange.ranks)
