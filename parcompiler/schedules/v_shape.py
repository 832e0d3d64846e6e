"""What schedules on a V have in common: where their stages are, and how they end.

Rank r has stages r and 2p - 1 - r. A micro-batch goes down the ranks and up again, and so does
its backward (here p = 3):

    rank 0  0F0 .   .   .   .   5F0 5I0 .   .   .   .   0I0
    rank 1  .   1F0 .   .   4F0 .   .   4I0 .   .   1I0 .
    rank 2  .   .   2F0 3F0 .   .   .   .   3I0 2I0 .   .

The longer one stage of a rank waits for its backward, the shorter the other does: all ranks can
keep equally many activations. A schedule says what each rank does up to its last forward. Behind
that nothing takes memory any more, and a rank does what is ready: input backwards, for others wait
for them, those of its first stage before those of its second; weight backwards when there are
none. What is ready when is found by running all ranks with f = b = w.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set

from parcompiler.instruction import Kind
from parcompiler.schedules.action import (
    Action,
    Orders,
    backward_input,
    backward_weight,
    forward,
)


def v_placement(ranks: int) -> tuple[int, ...]:
    """The rank of each stage.

    >>> v_placement(3)
    (0, 1, 2, 2, 1, 0)
    """
    return (*range(ranks), *reversed(range(ranks)))


def v_stages(rank: int, ranks: int) -> tuple[int, int]:
    """The two stages of a rank."""
    return rank, 2 * ranks - 1 - rank


def finish(heads: Sequence[Sequence[Action]], microbatches: int) -> Orders:
    """Whole orders from those up to the last forward of each rank."""
    size = len(heads)
    ranks = [_VRank(head, v_stages(r, size), microbatches) for r, head in enumerate(heads)]
    ended: set[Action] = set()
    while any(rank.unfinished for rank in ranks):
        slot = [rank.take(ended, last=2 * size - 1) for rank in ranks]
        assert any(slot), f"ranks wait for each other after {len(ended)} actions"
        ended.update(action for action in slot if action is not None)
    return tuple(tuple(rank.order) for rank in ranks)


class _VRank:
    """What one rank has done and has left to do."""

    def __init__(self, head: Sequence[Action], stages: tuple[int, int], microbatches: int) -> None:
        given = set(head)
        self.order: list[Action] = []
        self.head = deque(head)
        self.inputs = [
            deque(a for i in range(microbatches) if (a := backward_input(j, i)) not in given)
            for j in stages
        ]
        self.weights = deque(
            weight
            for a in head
            if a.kind is Kind.BACKWARD_INPUT and (weight := _weight(a)) not in given
        )

    @property
    def unfinished(self) -> bool:
        """Whether there is something left to do."""
        return bool(self.head or any(self.inputs) or self.weights)

    def take(self, ended: Set[Action], last: int) -> Action | None:
        """Do one thing that can be done once `ended` has ended, if there is one."""
        action = self._choose(ended, last)
        if action is not None:
            self.order.append(action)
        return action

    def _choose(self, ended: Set[Action], last: int) -> Action | None:
        """What the head says; behind it inputs before weights."""
        if self.head:
            return self.head.popleft() if _ready(self.head[0], ended, last) else None
        for waiting in self.inputs:
            if waiting and _ready(waiting[0], ended, last):
                self.weights.append(_weight(waiting[0]))
                return waiting.popleft()
        return self.weights.popleft() if self.weights else None


def _ready(action: Action, ended: Set[Action], last: int) -> bool:
    """Whether what an action needs of other stages has ended."""
    if action.kind is Kind.FORWARD:
        return action.stage == 0 or forward(action.stage - 1, action.microbatch) in ended
    if action.kind is Kind.BACKWARD_INPUT:
        return action.stage == last or backward_input(action.stage + 1, action.microbatch) in ended
    return True


def _weight(action: Action) -> Action:
    """The gradients of weights that an input backward leaves for later."""
    return backward_weight(action.stage, action.microbatch)
