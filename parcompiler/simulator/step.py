"""The state of a step while it is simulated: one walk over the lists of all ranks."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

from parcompiler.errors import PlanError
from parcompiler.instruction import EMBEDDING, HEAD, Instruction, Kind
from parcompiler.schedules.gradients import Made
from parcompiler.schedules.timing import StageCost
from parcompiler.schedules.vocabulary_cost import VocabularyCost
from parcompiler.simulator.timeline import START, Event
from parcompiler.simulator.uses import Message, Program, Use, message

_Tensor = tuple[int, str, bool, int | None]  # what messages to several ranks have in common


@dataclass(frozen=True, slots=True)
class Prices:
    """What is asked for seconds and bytes; `lookups` are the embeddings that all ranks share."""

    costs: Sequence[StageCost]
    message_bytes: Mapping[str, int]
    message_seconds: Callable[[str, int, int], float]
    collective_seconds: Callable[[Instruction], float]
    vocabulary: VocabularyCost
    lookups: int = 1

    def shared(self, line: Instruction) -> float:
        """Seconds of an instruction or a collective of the vocabulary."""
        if line.kind in HEAD:
            return self.vocabulary.seconds(line.kind)
        if line.kind in EMBEDDING:
            return self.vocabulary.seconds(line.kind) / self.lookups
        embedded = line.gradient is (line.kind is Kind.BROADCAST) and line.kind is not Kind.EXCHANGE
        seconds = self.vocabulary.collective(line.kind, embedded=embedded)
        return seconds / self.lookups if embedded else seconds

    def size(self, use: Use) -> int:
        """Bytes of a message, or of what a collective leaves on a rank."""
        if use.value is None or (isinstance(use, Instruction) and use.kind is Kind.EXCHANGE):
            return 0
        return self.message_bytes[use.value]


class Step:
    """The state of a step while it is simulated. An event is known by its number in `events`."""

    def __init__(self, programs: Sequence[Program], prices: Prices) -> None:
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
        self.arrival: dict[Use, int] = {}  # the transfer of each message, the event of a collective
        self.leaving: dict[_Tensor, float] = {}  # held for sends until
        self.waiting: dict[Use, list[int]] = defaultdict(list)  # ranks put aside for each
        self.made = Made()
        self.shared = START  # the last collective of the vocabulary
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
                self._hold(rank, self._end(self.last[rank]), self.prices.size(message(rank, line)))
                return True
            case Kind.SEND:
                self._send(rank, message(rank, line))
                return True
            case Kind.REDUCE_GRADIENTS:
                self._reduce(rank, line)
                return True
            case Kind.SHARE_LOSS:
                return self._meet(rank, line)
            case Kind.S | Kind.NORMALIZE | Kind.T | Kind.EMBED | Kind.EMBED_BACKWARD:
                return self._share(rank, line)
            case Kind.BROADCAST | Kind.REDUCE | Kind.EXCHANGE:
                self._gather(rank, line)
                return True
            case Kind.UPDATE:
                return True  # an optimizer step is no part of what is compared
            case _:
                assert_never(line.kind)

    def _compute(self, rank: int, line: Instruction) -> bool:
        """Compute once the rank is free and the messages have arrived."""
        uses = self._arrived(rank)
        if uses is None:
            return False
        assert line.stage is not None
        cost = self.prices.costs[line.stage]
        seconds = cost.seconds(line.kind)
        self.last[rank] = self._record(rank, line, seconds, [self.last[rank], *uses])
        self._account(rank, line, cost)
        return True

    def _account(self, rank: int, line: Instruction, cost: StageCost) -> None:
        """The memory that the last compute instruction takes and gives back."""
        program, event = self.programs[rank], self.events[self.last[rank]]
        assert line.stage is not None
        taken, given = self.made.bytes(line.stage, cost, line.kind)
        if (line.stage, line.microbatch) not in program.trained:
            given = -taken
        self._hold(rank, event.begin, taken)
        self._hold(rank, event.end, given)
        self._release(rank)

    def _release(self, rank: int) -> None:
        """Give back what the last compute instruction used last."""
        for use in self.programs[rank].releases.get(self.position[rank], ()):
            self._hold(rank, self._end(self.last[rank]), -self.prices.size(use))

    def _arrived(self, rank: int) -> list[int] | None:
        """The events that a rank's next instruction waits for; None when one is missing."""
        uses = self.programs[rank].uses.get(self.position[rank], ())
        for use in uses:
            if use not in self.arrival:
                self.waiting[use].append(rank)
                return None
        return [self.arrival[use] for use in uses]

    def _arrive(self, use: Use, event: int) -> None:
        """A message or a collective is over at the end of an event: wake who waits for it."""
        self.arrival[use] = event
        self.ready.extend(self.waiting.pop(use, ()))

    def _share(self, rank: int, line: Instruction) -> bool:
        """Compute a rank's part of a layer of the vocabulary."""
        uses = self._arrived(rank)
        if uses is None:
            return False
        seconds, saved = self.prices.shared(line), self.prices.vocabulary.saved
        self.last[rank] = self._record(rank, line, seconds, [self.last[rank], *uses])
        event, more = self.events[self.last[rank]], self.prices.vocabulary.more
        if line.kind is Kind.S:
            self._hold(rank, event.begin, saved)
        if more and line.kind is self.prices.vocabulary.softmax:
            self._hold(rank, event.begin, more)
            self._hold(rank, event.end, -more)
        if self.position[rank] in self.programs[rank].ends:
            self._hold(rank, self._end(self.last[rank]), -saved)
        self._release(rank)
        return True

    def _gather(self, rank: int, line: Instruction) -> None:
        """A collective of the vocabulary: it begins when the last rank has come.

        It runs beside the compute, behind the one before: so whatever needs the numbers of the
        softmax has them.
        """
        self._hold(rank, self._end(self.last[rank]), self.prices.size(line))
        present = self.meetings[line]
        present[rank] = self.last[rank]
        if len(present) < len(self.programs):
            return
        causes = [*self.meetings.pop(line).values(), self.shared]
        seconds = self.prices.shared(line)
        for other in range(len(self.programs)):
            self.shared = self._record(other, line, seconds, causes)
            if line.kind is Kind.REDUCE and other != line.peer:
                self._hold(other, self._end(self.shared), -self.prices.size(line))
        self._arrive(line, self.shared)

    def _send(self, rank: int, sent: Message) -> None:
        """Transfer a message once its link is free, and wake the rank that waits for it."""
        line = self.programs[rank].instructions[self.position[rank]]
        way = (sent.source, sent.target)
        seconds = self.prices.message_seconds(sent.value, *way)
        transfer = self._record(rank, line, seconds, [self.last[rank], self.link.get(way, START)])
        self.link[way] = transfer
        self._keep_until_sent(rank, sent, self._end(transfer))
        self._arrive(sent, transfer)

    def _keep_until_sent(self, rank: int, sent: Message, end: float) -> None:
        """Hold the tensor of a message until `end`; once when it goes to several ranks."""
        tensor = (sent.source, sent.value, sent.gradient, sent.microbatch)
        begin = max(self._end(self.last[rank]), self.leaving.get(tensor, 0.0))
        if begin < end:
            self.leaving[tensor] = end
            self._hold(rank, begin, self.prices.size(sent))
            self._hold(rank, end, -self.prices.size(sent))

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
        missing = next((m for m in program.uses.get(position, ()) if m not in self.arrival), None)
        if missing is not None:
            return f"  * rank {rank} at {line}: waits for {missing}"
        others = set(line.ranks or range(len(self.programs))) - set(self.meetings[line])
        return f"  * rank {rank} at {line}: waits for rank {', '.join(map(str, sorted(others)))}"
