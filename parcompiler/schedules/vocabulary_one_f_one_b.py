"""1F1B with the head on all ranks, in the published order (2411.05288, appendix).

Slot O_x is T of x - 1 and S of x. Four ranks, vocab-2:

    rank 0  F0 F1 F2 F3 S0 F4 T0 S1 T1 S2 T2 S3 B0 F5 T3 S4 B1 ...     BFS: slot after the forward
    rank 1  F0 F1 F2 S0 F3 T0 S1 T1 S2 B0 T2 S3 F4 B1 ...              BSF: before it
    rank 2  F0 F1 S0 F2 T0 S1 B0 T1 S2 F3 B1 ...                       BSF
    rank 3  F0 S0 F1 B0 T0 S1 F2 B1 T1 S2 F3 B2 ...                    BSF

All ranks are in slot O_x at about the same time: when the last rank has done F of x. From the last
rank to the first, the period begins earlier by f on each rank; before the sum exceeds b, the slot
moves after the forward. Bubble (p - 1)(f + b), p + k micro-batches on rank 0.
"""

from __future__ import annotations

from collections.abc import Iterator

from parcompiler.instruction import Kind
from parcompiler.schedules.action import NOWHERE, Action, Orders, backward, forward

F, B = 1, 2  # times for which the order is made; the bubble formula holds for others too


def one_f_one_b(ranks: int, microbatches: int, barriers: int) -> Orders:
    """The order for at least p + k micro-batches and k = 1 or 2 barriers."""
    late = _late(ranks)
    return tuple(
        tuple(_DelayedRank(r, ranks - r, microbatches, barriers).order(late[r], _pause(late, r)))
        for r in range(ranks)
    )


def _late(ranks: int) -> list[bool]:
    """Whether the slot of each rank comes after its forward (BFS)."""
    late, offset = [False], 0
    for _ in range(ranks - 1):
        if late[-1]:
            offset += B - F
            late.append(False)
        elif offset - F >= -B:
            offset -= F
            late.append(False)
        else:
            late.append(True)
    return late[::-1]


def _pause(late: list[bool], rank: int) -> int:
    """The number of slots of a rank before its first backward, without those of the warm-up."""
    return sum(not (late[r + 1] and not late[r]) for r in range(rank, len(late) - 1))


class _DelayedRank:
    """Generates the order of one rank."""

    def __init__(self, rank: int, warm: int, microbatches: int, barriers: int) -> None:
        self.m, self.warm, self.barriers = microbatches, warm, barriers
        self.forwards = iter([forward(rank, i) for i in range(microbatches)])
        self.backwards = iter([backward(rank, i) for i in range(microbatches)])
        self.slots = iter([tuple(_slot(x, microbatches)) for x in range(microbatches + 1)])

    def order(self, late: bool, pause: int) -> Iterator[Action]:
        """Forwards and first slots, the slots of the pause, one of each in turn, then the rest."""
        for _ in range(self.warm):
            yield next(self.forwards)
        for _ in range(self.barriers):
            yield from next(self.slots)
            yield next(self.forwards)
        slots = self.barriers + pause
        for _ in range(pause):
            yield from next(self.slots)
        for _ in range(self.m - self.warm - self.barriers):
            yield next(self.backwards)
            slots += 1
            if late:
                yield next(self.forwards)
                yield from next(self.slots, ())
            else:
                yield from next(self.slots, ())
                yield next(self.forwards)
        for action in self.backwards:
            yield action
            if slots < self.m or self.barriers == 2:  # vocab-2 can leave the last T to the end
                yield from next(self.slots, ())
                slots += 1
        for slot in self.slots:
            yield from slot


def _slot(x: int, microbatches: int) -> Iterator[Action]:
    """T of the micro-batch before, S of this one."""
    if x > 0:
        yield Action(Kind.T, NOWHERE, x - 1)
    if x < microbatches:
        yield Action(Kind.S, NOWHERE, x)
