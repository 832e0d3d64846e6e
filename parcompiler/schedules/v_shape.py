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

from collections import Counter, deque
from collections.abc import Mapping, Sequence

from parcompiler.instruction import Kind
from parcompiler.schedules.action import (
    Action,
    Orders,
    backward_input,
    backward_weight,
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
    ended = {kind: [0] * (2 * size) for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT)}
    while any(rank.unfinished for rank in ranks):
        slot = [action for rank in ranks if (action := rank.take(ended)) is not None]
        assert slot, f"ranks wait for each other after {ended}"
        for kind, stage, _ in slot:
            if kind in ended:
                ended[kind][stage] += 1
    return tuple(tuple(rank.order) for rank in ranks)


Ended = Mapping[Kind, Sequence[int]]  # of each stage the micro-batches that ended, from the first


class _VRank:
    """What one rank has done and has left to do."""

    def __init__(self, head: Sequence[Action], stages: tuple[int, int], microbatches: int) -> None:
        self.order: list[Action] = []
        self.head, self.at = head, 0
        again = [a for a in head if a.kind is Kind.BACKWARD_INPUT]
        done = len(head) - len(again) - sum(a.kind is Kind.FORWARD for a in head)
        begun = Counter(a.stage for a in again)
        self.inputs = [
            deque(backward_input(j, i) for i in range(begun[j], microbatches)) for j in stages
        ]
        # the head does gradients of weights in the order of those of inputs
        self.weights = deque(map(_weight, again[done:]))

    @property
    def unfinished(self) -> bool:
        """Whether there is something left to do."""
        return bool(self.at < len(self.head) or any(self.inputs) or self.weights)

    def take(self, ended: Ended) -> Action | None:
        """Do one thing that can be done once so much has ended, if there is one."""
        action = self._choose(ended)
        if action is not None:
            self.order.append(action)
        return action

    def _choose(self, ended: Ended) -> Action | None:
        """What the head says; behind it inputs before weights."""
        if self.at < len(self.head):
            action = self.head[self.at]
            if not _ready(action, ended):
                return None
            self.at += 1
            return action
        for waiting in self.inputs:
            if waiting and _ready(waiting[0], ended):
                self.weights.append(_weight(waiting[0]))
                return waiting.popleft()
        return self.weights.popleft() if self.weights else None


def _ready(action: Action, ended: Ended) -> bool:
    """Whether what an action needs of other stages has ended."""
    kind, stage, microbatch = action
    if kind is Kind.BACKWARD_WEIGHT:
        return True
    own = ended[kind]
    before = stage - 1 if kind is Kind.FORWARD else stage + 1
    return not 0 <= before < len(own) or own[before] > microbatch


def _weight(action: Action) -> Action:
    """The gradients of weights that an input backward leaves for later."""
    return backward_weight(action.stage, action.microbatch)
