"""Places S, NORMALIZE and T in any order of compute, by a walk through it in time.

A free rank does the first of these that is ready:
[1] the vocabulary pass that another rank has begun: all ranks do them in the same order;
[2] the next slot of the vocabulary, as soon as the last stage has done the forward of its S;
[3] the next action of its order;
[4] a part of a slot whose S is not ready yet, but before [3] if the last stage's backward waits for
    it.
When no rank can go on, one does its next forward earlier than in its order.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence

from parcompiler.instruction import ASKS_FIRST, BACKWARDS, HEAD, Kind
from parcompiler.schedules.action import NOWHERE, Action

Slot = tuple[Action, ...]

# The passes of a slot; the number says of how many micro-batches before.
_SLOTS: dict[str, tuple[tuple[Kind, int], ...]] = {
    "naive": ((Kind.T, 2), (Kind.NORMALIZE, 1), (Kind.S, 0)),
    "interlaced": ((Kind.S, 0), (Kind.NORMALIZE, 0), (Kind.T, 0)),
    "vocab-1": ((Kind.T, 1), (Kind.S, 0)),
    "vocab-2": ((Kind.T, 1), (Kind.S, 0)),
}
METHODS = tuple(_SLOTS)
# Times of actions in the walk; only their order matters. All others take 2.
_UNITS = {Kind.BACKWARD: 4, Kind.NORMALIZE: 1}


def slots(method: str, microbatches: int, *, together: bool = False) -> list[Slot]:
    """The passes of the head in groups that ranks do in a row; `together`: all of one micro-batch.

    >>> [" ".join(map(str, slot)) for slot in slots("vocab-2", 2)]
    ['S0', 'T0 S1', 'T1']
    """
    parts = _SLOTS["interlaced" if together and method == "naive" else method]
    rounds = (
        tuple(
            Action(kind, NOWHERE, x - late) for kind, late in parts if 0 <= x - late < microbatches
        )
        for x in range(microbatches + max(late for _, late in parts))
    )
    return [slot for slot in rounds if slot]


def barrier(method: str, kind: Kind) -> Kind:
    """The pass that must have ended on all ranks before `kind`: NORMALIZE, T, or a backward of the
    last stage."""
    if kind is Kind.NORMALIZE:
        return Kind.S
    if kind is Kind.T:
        return Kind.NORMALIZE if method in ASKS_FIRST else Kind.S
    return Kind.S if method == "vocab-2" else Kind.T


class SlotWalk:
    """A walk of all ranks through their orders in time."""

    def __init__(
        self,
        placement: Sequence[int],
        orders: Sequence[Sequence[Action]],
        method: str,
        groups: Iterable[Slot],
    ) -> None:
        self.method = method
        self.last = len(placement) - 1
        self.source = placement[-1]
        self.left = [list(reversed(order)) for order in orders]  # the next action is at the end
        self.written: list[list[Action]] = [[] for _ in orders]
        self.moments: list[list[int]] = [[] for _ in orders]  # the starts of the written actions
        self.slots = [slot[k:] for slot in groups for k in range(len(slot))]  # each pass, and rest
        self.issued = [0] * len(orders)  # by rank, the number of `slots` that it has begun
        self.leader = 0  # the largest of these numbers
        self.stuck = False  # whether all ranks wait for each other
        self.idle = set(range(len(orders)))
        self.ended: set[tuple[bool, int, int]] = set()  # (is a backward, stage, micro-batch)
        self.count: Counter[Action] = Counter()  # ranks that have ended it

    def orders(self) -> list[list[Action]]:
        """The order of every rank."""
        running: list[tuple[int, int, Action]] = []
        now = 0
        while True:
            for rank in sorted(self.idle):
                action = self._choose(rank)
                if action is not None:
                    self.idle.discard(rank)
                    self.stuck = False
                    self.written[rank].append(action)
                    self.moments[rank].append(now)
                    heapq.heappush(running, (now + _UNITS.get(action.kind, 2), rank, action))
            if not running:
                if self.stuck and not self._pull():
                    break
                self.stuck = not self.stuck
            now = running[0][0] if running else now
            while running and running[0][0] == now:
                _, rank, action = heapq.heappop(running)
                self.idle.add(rank)
                self._end(action)
        for rank, left in enumerate(self.left):  # the order never ends: the verifier says so
            rest = (slot[0] for slot in self.slots[self.issued[rank] :])
            self.written[rank] += [*rest, *reversed(left)]
        return self.written

    def _choose(self, rank: int) -> Action | None:
        """The next action of a free rank; None when it must wait."""
        k, left = self.issued[rank], self.left[rank]
        slot = self.slots[k] if k < len(self.slots) else ()
        due = bool(slot) and self._ready(slot[0])
        if due and (k < self.leader or self._at_once(slot) or self._awaited(slot)):  # [1] [2] [4]
            return self._issue(rank)
        if slot and self.method == "interlaced" and slot[0].kind is not Kind.S:
            return None  # ranks wait for each other within a slot
        if left and self._ready(left[-1]):  # [3]
            return left.pop()
        alone = bool(slot) and slot[-1].kind is not Kind.S
        return self._issue(rank) if due and (alone or self.stuck) else None  # [4]

    def _issue(self, rank: int) -> Action:
        """Take the next vocabulary pass of a rank."""
        slot = self.slots[self.issued[rank]]
        self.issued[rank] += 1
        self.leader = max(self.leader, self.issued[rank])
        return slot[0]

    def _at_once(self, slot: Slot) -> bool:
        """Whether a slot can be done without a pause; one without S, whether others wait for it."""
        if slot[-1].kind is Kind.S:
            return all(map(self._ready, slot))
        return self.method != "vocab-2"

    def _awaited(self, slot: Slot) -> bool:
        """Whether the last stage waits for the vocabulary before it can do the forward for an S."""
        left = self.left[self.source]
        waits = self.method != "vocab-2" and self.source in self.idle
        if not waits or not left or self._ready(left[-1]) or self._ready(slot[-1]):
            return False
        kind, j, i = left[-1]
        return j == self.last and kind in BACKWARDS and (False, j, i) in self.ended

    def _ready(self, action: Action) -> bool:
        """Whether all that an action needs has ended."""
        kind, j, i = action
        if kind is Kind.FORWARD:
            return j == 0 or (False, j - 1, i) in self.ended
        if kind is Kind.S:
            return (False, self.last, i) in self.ended
        if kind in BACKWARDS and j < self.last:
            return (False, j, i) in self.ended and (True, j + 1, i) in self.ended
        if kind is Kind.BACKWARD_WEIGHT:
            return True
        before = Action(barrier(self.method, kind), NOWHERE, i)
        return self.count[before] == len(self.written)

    def _end(self, action: Action) -> None:
        """Record that an action has ended."""
        kind, j, i = action
        if kind in HEAD:
            self.count[action] += 1
        elif kind is not Kind.BACKWARD_WEIGHT:
            self.ended.add((kind in BACKWARDS, j, i))

    def _pull(self) -> bool:
        """Let one rank do its next forward now; False when none can."""
        for left in self.left:
            k = next((k for k in reversed(range(len(left))) if left[k].kind is Kind.FORWARD), None)
            if k is not None and self._ready(left[k]):
                left.append(left.pop(k))
                return True
        return False
