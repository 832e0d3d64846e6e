"""Simulates a program as the runtime executes it: the time of every instruction, and the memory.

Data replicas do the same at the same time, so one of them is simulated. Time and memory of the
simulation are linear in the number of instructions.

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter

from parcompiler.errors import InputError
from parcompiler.instruction import BACKWARDS, BUCKETED, EMBEDDING, HEAD, Instruction, Kind
from parcompiler.timeline.costs import StageCost, VocabularyCost, optimizer_seconds
from parcompiler.timeline.program import (
    ENDS,
    Ends,
    Exchange,
    ProgramTasks,
    Ready,
    SendRecv,
    tasks_of,
)
from parcompiler.timeline.run import Moments, run
from parcompiler.timeline.timeline import Timeline, TimelineEvent, idle


def free(*_: object) -> float:
    """Zero seconds, for communication that takes no time."""
    return 0.0


@dataclass(frozen=True, slots=True)
class TaskPrices:
    """The sources of seconds and bytes of a program; `lookups` is the number of embeddings that all
    ranks share."""

    costs: Sequence[StageCost]
    message_bytes: Mapping[str, int]
    message_seconds: Callable[[SendRecv], float]
    collective_seconds: Callable[[Instruction], float]
    vocabulary: VocabularyCost
    lookups: int
    updates: Sequence[float] = ()  # of the optimizer, by rank

    def seconds(self, exchange: Exchange) -> float:
        """Seconds of an instruction, or of an exchange."""
        if isinstance(exchange, SendRecv):
            return self.message_seconds(exchange)
        if isinstance(exchange, Ready):
            return self.costs[exchange.stage].ready
        if exchange.kind in BUCKETED or exchange.kind in (Kind.SHARE_LOSS, Kind.UNSHARD):
            return self.collective_seconds(exchange)
        match exchange.kind:
            case Kind.UPDATE:
                return self.updates[exchange.ranks[0]] if exchange.value is None else 0.0
            case Kind.S | Kind.NORMALIZE | Kind.T:
                return self.vocabulary.seconds(exchange.kind)
            case Kind.EMBED | Kind.EMBED_BACKWARD:
                return self.vocabulary.seconds(exchange.kind) / self.lookups
            case Kind.EXCHANGE:
                return self.vocabulary.exchange
            case Kind.BROADCAST | Kind.REDUCE:
                embedded = exchange.gradient is (exchange.kind is Kind.BROADCAST)
                seconds = self.vocabulary.collective(exchange.kind, embedded=embedded)
                return seconds / self.lookups if embedded else seconds
        assert exchange.stage is not None
        return self.costs[exchange.stage].seconds(exchange.kind)

    def size(self, exchange: Exchange) -> int:
        """Bytes of a message, or of the result of a collective on a rank."""
        if isinstance(exchange, Ready):
            return 0
        if isinstance(exchange, Instruction) and exchange.kind is Kind.UNSHARD:
            assert exchange.stage is not None
            return self.costs[exchange.stage].gathered
        if exchange.value is None or (
            isinstance(exchange, Instruction) and exchange.kind is Kind.EXCHANGE
        ):
            return 0
        return self.message_bytes[exchange.value]


def simulate(
    instructions: Sequence[Sequence[Instruction]],
    stage_rank: Sequence[int],
    costs: Sequence[StageCost],
    message_bytes: Mapping[str, int],
    message_seconds: Callable[[str, int, int], float] = free,
    *,
    collective_seconds: Callable[[Instruction], float] = free,
    left_seconds: Callable[[Instruction], float] = free,
    stages: Sequence[Ends] | None = None,
    vocabulary: VocabularyCost | None = None,
) -> Timeline:
    """Execute one list per rank; stage j is on rank `stage_rank[j]` and costs `costs[j]`.

    `message_seconds(value, source, target)` is the time, latency included, for which a message of
    `message_bytes[value]` occupies the link from rank `source` to rank `target`. A collective
    takes `collective_seconds(instruction)` from when the last of its ranks has reached it. Sums of
    gradients hold up only the end of the step; those after a whole backward begin
    `left_seconds(instruction)` before its end, when their summands are final.

    With `stages`, an instruction waits for the messages that its stage receives or gives. Without,
    it waits for all messages of its micro-batch and direction that were posted before it and are
    not used yet; both are equal if every rank has one stage.

    `vocabulary` has the costs of the layers that all ranks share. Their collectives run one after
    the other, beside the compute, from when the last rank has reached their line.

    Raises PlanError, naming a BACKWARD without its FORWARD, or the instructions at which ranks wait
    for each other.
    """
    if len(costs) != len(stage_rank):
        message = f"every stage needs a cost ({len(stage_rank)} stages, {len(costs)} costs)"
        raise InputError(message)
    _check_vocabulary(instructions, vocabulary)
    updates = _updates(instructions, stage_rank, costs, vocabulary)
    updating = [rank for rank, seconds in enumerate(updates) if seconds]
    program = tasks_of(instructions, stages, updating)
    embedded = {line.value for _, line in program.lines if line.kind is Kind.EMBED}
    shared = vocabulary or VocabularyCost()
    asked = cache(message_seconds)
    prices = TaskPrices(
        costs, message_bytes, lambda x: asked(x.value, x.source, x.target), collective_seconds,
        shared, max(1, len(embedded)), updates,
    )  # fmt: skip
    before = {x: left_seconds(program.sum(x)) for x in program.within}
    moments = run(program.tasks, program.orders, seconds_of(program, prices), before=before)
    program.check(instructions, moments)
    held = program.memory.held(moments, stage_rank, costs, shared, prices.size)
    events = tuple(sorted(_events(program, moments), key=attrgetter("begin", "rank")))
    return Timeline(
        step_time=moments.last,
        bubble=idle(events, moments.last, len(instructions)),
        peak_memory=tuple(memory.most() for memory in held),
        events=events,
        memory=tuple(memory.levels() for memory in held),
    )


def _updates(
    instructions: Sequence[Sequence[Instruction]],
    placement: Sequence[int],
    costs: Sequence[StageCost],
    vocabulary: VocabularyCost | None,
) -> list[float]:
    """Seconds of the optimizer's step by rank; empty where there is no backward."""
    lines = (line for lines_of in instructions for line in lines_of)
    trains = any(line.kind in BACKWARDS or line.kind is Kind.T for line in lines)
    return optimizer_seconds(placement, costs, vocabulary) if trains and placement else []


def seconds_of(program: ProgramTasks, prices: TaskPrices) -> list[float]:
    """Seconds by task and exchange; a task that only waits for an exchange takes none."""
    lines = (line for _, line in program.lines)
    compute = [0.0 if line.kind in ENDS else prices.seconds(line) for line in lines]
    return [*compute, *map(prices.seconds, program.exchanges)]


def _check_vocabulary(
    instructions: Sequence[Sequence[Instruction]], vocabulary: VocabularyCost | None
) -> None:
    """Raise InputError for layers of the vocabulary without a cost."""
    if vocabulary is not None:
        return
    shared = HEAD | EMBEDDING
    first = next((line for lines in instructions for line in lines if line.kind in shared), None)
    if first is not None:
        message = f"what all ranks do for the vocabulary needs a cost ({first}, no vocabulary=...)"
        raise InputError(message)


def _events(program: ProgramTasks, moments: Moments) -> Iterator[TimelineEvent]:
    """An event for each task, for each message on the rank that sends it, and for each collective
    on all of its ranks."""
    ranks = range(len(program.orders))
    for task, (rank, line) in enumerate(program.lines):
        if line.kind not in ENDS:
            yield TimelineEvent(rank, moments.begins[task], moments.ends[task], line)
    for x, exchange in enumerate(program.exchanges, program.tasks.size):
        begin, end = moments.begins[x], moments.ends[x]
        if _is_meeting(exchange):
            continue
        if isinstance(exchange, SendRecv):
            yield TimelineEvent(exchange.source, begin, end, _send(exchange))
        elif isinstance(exchange, Instruction):
            for rank in exchange.ranks or ranks:
                yield TimelineEvent(rank, begin, end, exchange)


def _send(sent: SendRecv) -> Instruction:
    """The instruction that sends a message."""
    return Instruction(
        Kind.SEND, value=sent.value, gradient=sent.gradient, microbatch=sent.microbatch,
        peer=sent.target,
    )  # fmt: skip


def _is_meeting(exchange: Exchange) -> bool:
    """Whether an exchange is only a moment to wait for: all ranks at the optimizer's step, or
    `Ready`."""
    return isinstance(exchange, Ready) or (
        isinstance(exchange, Instruction) and exchange.kind is Kind.UPDATE
    )
