"""Orders of compute -> instruction lists: sends, receives and reductions, once for all schedules.

The compute instructions of all ranks are walked in one order of time (a forward takes 1, a
backward 2). Whenever one ends, what others need of it is written down at both ends:

    rank 0   FORWARD stage 0 mb 3 │ SEND x mb 3 to 1      [2] then the send
    rank 1   BACKWARD stage 1 mb 1 │ RECV x mb 3 from 0   [1] first the receive, which only posts
             FORWARD stage 1 mb 2 ...                         and so stands before what runs there

Since every receive is written before its send, no ranks can wait for each other in a circle even
if sends blocked, and both ends of a channel agree on the order. A value goes straight from the
stage that makes it to each rank that uses it, however many stages lie between; its gradient comes
straight back.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from parcompiler.instruction import BACKWARDS, COMPUTE, Instruction, Kind
from parcompiler.lower.lowered import Stage, Tied, Value
from parcompiler.schedules import Action

Lists = tuple[tuple[Instruction, ...], ...]
Done = tuple[bool, int, int]  # (is a backward, stage, micro-batch)

_SECONDS = {Kind.BACKWARD: 2}  # everything else takes 1


def training(
    orders: Sequence[Sequence[Action]],
    stages: Sequence[Stage],
    values: Mapping[str, Value],
    tied: Sequence[Tied],
    *,
    asynchronous: bool = False,
) -> Lists:
    """The instruction list of every rank for one training step.

    An asynchronous step updates the parameters of a stage after each of its backwards.
    """
    share = Instruction(Kind.SHARE_LOSS, peer=_loss_rank(stages))
    lists = list(_Walk(orders, stages, values).lists())
    if asynchronous:
        lists = [tuple(_updated(instructions)) for instructions in lists]
    return tuple(
        (*instructions, *_reductions(rank, tied), share) for rank, instructions in enumerate(lists)
    )


def evaluation(
    ranks: int, microbatches: int, stages: Sequence[Stage], values: Mapping[str, Value]
) -> Lists:
    """The instruction list of every rank for one evaluation: forwards only."""
    orders = [
        [
            Action(Kind.FORWARD, stage.index, i)
            for i in range(microbatches)
            for stage in stages
            if stage.rank == rank
        ]
        for rank in range(ranks)
    ]
    share = Instruction(Kind.SHARE_LOSS, peer=_loss_rank(stages))
    return tuple((*lines, share) for lines in _Walk(orders, stages, values).lists())


def _updated(instructions: Iterable[Instruction]) -> Iterator[Instruction]:
    """An UPDATE behind every BACKWARD; the gradients that it sends back leave before."""
    pending: list[Instruction] = []
    for line in instructions:
        if line.kind in COMPUTE:
            yield from pending
            pending.clear()
        yield line
        if line.kind is Kind.BACKWARD:
            pending.append(replace(line, kind=Kind.UPDATE))
    yield from pending


def _loss_rank(stages: Sequence[Stage]) -> int:
    """The rank of the stage that computes the loss."""
    return next(stage.rank for stage in stages if stage.loss is not None)


def _reductions(rank: int, tied: Sequence[Tied]) -> Iterator[Instruction]:
    """The sums of gradients that a rank takes part in, in the same order on all ranks."""
    for item in tied:
        if rank in item.ranks:
            yield Instruction(Kind.REDUCE_GRADIENTS, value=item.label, ranks=item.ranks)


class _Walk:
    """All ranks' compute instructions in one order of time, with the messages at their ends."""

    def __init__(
        self,
        orders: Sequence[Sequence[Action]],
        stages: Sequence[Stage],
        values: Mapping[str, Value],
    ) -> None:
        self.orders = orders
        self.stages = stages
        self.values = values
        self.written: list[list[Instruction]] = [[] for _ in orders]
        self.next = [0] * len(orders)  # of each rank, the position of what it computes next
        self.ended: dict[Done, int] = {}
        self.waiting: dict[Done, list[int]] = {}  # ranks that something holds up
        self.running: list[tuple[int, int, Action]] = []  # (end, rank, action), a heap
        self.used: Counter[tuple[str, int, int]] = Counter()  # backwards by value, mb, rank

    def lists(self) -> tuple[tuple[Instruction, ...], ...]:
        """The instructions of every rank."""
        for rank in range(len(self.orders)):
            self._start(rank, 0)
        if not self.running:
            self._force(0)
        while self.running:
            now, rank, action = heapq.heappop(self.running)
            self._write(rank, action)
            done = _done(action)
            if done is not None:
                self.ended[done] = now
            for other in (rank, *self.waiting.pop(done, ())) if done else (rank,):
                self._start(other, now)
            if not self.running:
                self._force(now)
        return tuple(map(tuple, self.written))

    def _force(self, now: int) -> None:
        """Write ranks that wait for each other as they stand: the verifier says what is wrong."""
        for rank, order in enumerate(self.orders):
            if self.next[rank] < len(order):
                self.waiting = {k: [r for r in v if r != rank] for k, v in self.waiting.items()}
                self._begin(rank, now)
                return

    def _start(self, rank: int, now: int) -> None:
        """Let a rank begin its next compute instruction, or wait for what it needs."""
        if self.next[rank] == len(self.orders[rank]):
            return
        for needed in self._needs(self.orders[rank][self.next[rank]]):
            if needed not in self.ended:
                self.waiting.setdefault(needed, []).append(rank)
                return
        self._begin(rank, now)

    def _begin(self, rank: int, now: int) -> None:
        """Let a rank begin its next compute instruction."""
        action = self.orders[rank][self.next[rank]]
        self.next[rank] += 1
        heapq.heappush(self.running, (now + _SECONDS.get(action.kind, 1), rank, action))

    def _needs(self, action: Action) -> Iterator[Done]:
        """What must have ended before a compute instruction can begin."""
        stage, i = self.stages[action.stage], action.microbatch
        if action.kind is Kind.FORWARD:
            yield from ((False, self.values[name].producer, i) for name in stage.receives)
        elif action.kind is Kind.BACKWARD_WEIGHT:
            yield True, stage.index, i
        else:
            yield False, stage.index, i
            for name in stage.gives:
                if self.values[name].differentiable:
                    yield from ((True, j, i) for j in self.values[name].consumers)

    def _write(self, rank: int, action: Action) -> None:
        """Write down a compute instruction that has ended, and its messages at both ends."""
        stage, i = self.stages[action.stage], action.microbatch
        self.written[rank].append(Instruction(action.kind, stage=stage.index, microbatch=i))
        if action.kind is Kind.FORWARD:
            for name in stage.gives:
                for peer in sorted(self._readers(name) - {rank}):
                    self._message(name, i, rank, peer, gradient=False)
        elif action.kind in BACKWARDS:
            for name in stage.receives:
                self._return_gradient(name, i, rank)

    def _return_gradient(self, name: str, i: int, rank: int) -> None:
        """Send the gradient of a value back after the last backward that used it on this rank."""
        value = self.values[name]
        maker = self.stages[value.producer].rank
        if maker == rank or not value.differentiable:
            return
        self.used[name, i, rank] += 1
        users = sum(self.stages[j].rank == rank for j in value.consumers)
        if self.used[name, i, rank] == users:
            self._message(name, i, rank, maker, gradient=True)

    def _readers(self, name: str) -> set[int]:
        """The ranks that use a value."""
        return {self.stages[j].rank for j in self.values[name].consumers}

    def _message(self, name: str, i: int, source: int, target: int, *, gradient: bool) -> None:
        """Write a receive at one end and then the send at the other."""
        what = {"value": name, "microbatch": i, "gradient": gradient}
        self.written[target].append(Instruction(Kind.RECV, peer=source, **what))  # type: ignore[arg-type]
        self.written[source].append(Instruction(Kind.SEND, peer=target, **what))  # type: ignore[arg-type]


def _done(action: Action) -> Done | None:
    """What others may wait for when an action has ended."""
    if action.kind is Kind.BACKWARD_WEIGHT:
        return None
    return action.kind in BACKWARDS, action.stage, action.microbatch
