"""V-Half and V-Min (2405.15362): half or a third of the activations of 1F1B, for some bubble.

Each step of micro-batch 0 has a slot on its rank; micro-batch j has the same slots 6j later, for
in six slots a rank does two forwards, two input backwards and two weight backwards. The first
three periods of v-half on three ranks (3I0: input backward of stage 3 for micro-batch 0):

    rank 0  0F0 .   .   .   .   .   0F1 5F0 5I0 5W0 .   .   0F2 5F1 5I1 5W1 0I0 0W0
    rank 1  .   .   1F0 .   .   .   4F0 .   1F1 .   4I0 4W0 4F1 .   1F2 1I0 4I1 1W0
    rank 2  .   .   .   .   2F0 3F0 .   .   .   .   2F1 3F1 3I0 3W0 2I0 2W0 2F2 3F2

The fewer slots from a forward to its backward, the fewer activations. With

             forward, first  forward, second  backward, second       backward, first
    v-half   2r              3p - r - 2       3p + g + 2r - 1        6p + g - r - 2
    v-min    r               2p - r - 1       2p + g + r             4p + g - r - 1

no two steps of a rank meet modulo 6; g is 3 for even p with v-half, 2 where 3 divides p with
v-min, and 0 otherwise. Weights take the first free slot after their input backward. The slots only
give the order of a rank up to its last forward; each action runs as soon as it can.

v-half: at most (p + 2)//2 activations. For m >= p and f = b = w about half the bubble of 1F1B (0.41
to 0.57 of it for p up to 40). Each micro-batch adds |f - b| - w/2, if that is positive.
v-min: at most (p + 4)//3 activations. For f = b = w the bubble is (p - 1)(f + b) - w/2, about two
thirds of that of 1F1B. Each micro-batch adds 2 max(f, b) - min(f, b) - w, if that is positive
(less for p = 2).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from parcompiler.schedules.action import Action, Orders, backward_weight
from parcompiler.schedules.v_shape import FORWARD, INPUT, finish, v_stages

PERIOD = 6  # slots

Slots = tuple[int, int, int, int]  # forward first, forward second, backward second, backward first


def v_half(ranks: int, microbatches: int) -> Orders:
    """Half the activations of 1F1B."""
    return _by_slot(_half_slots, ranks, microbatches)


def v_min(ranks: int, microbatches: int) -> Orders:
    """A third of the activations of 1F1B."""
    return _by_slot(_min_slots, ranks, microbatches)


def _half_slots(r: int, p: int) -> Slots:
    """The slots of micro-batch 0 on a rank."""
    gap = 3 if p % 2 == 0 else 0
    return 2 * r, 3 * p - r - 2, 3 * p + gap + 2 * r - 1, 6 * p + gap - r - 2


def _min_slots(r: int, p: int) -> Slots:
    """The slots of micro-batch 0 on a rank."""
    gap = 2 if p % 3 == 0 else 0
    return r, 2 * p - r - 1, 2 * p + gap + r, 4 * p + gap - r - 1


def _by_slot(slots: Callable[[int, int], Slots], ranks: int, microbatches: int) -> Orders:
    """Orders by slots up to each rank's last forward, then by what is ready."""
    heads = [list(_head(slots(r, ranks), v_stages(r, ranks), microbatches)) for r in range(ranks)]
    return finish(heads, microbatches)


def _head(slots: Slots, stages: tuple[int, int], microbatches: int) -> Iterator[Action]:
    """The order of a rank up to its last forward: by slots, with weight backwards in free ones."""
    first, second = stages
    kinds = (FORWARD, first), (FORWARD, second), (INPUT, second), (INPUT, first)
    steps = zip(slots, kinds, strict=True)
    taken = {slot % PERIOD: (slot, kind, stage) for slot, (kind, stage) in steps}
    assert len(taken) == len(slots), f"steps meet modulo {PERIOD}: {slots}"
    never = PERIOD * microbatches + max(slots), FORWARD, first  # stands in free slots
    weights: deque[Action] = deque()
    for slot in range(slots[0], slots[1] + PERIOD * (microbatches - 1) + 1):
        begin, kind, stage = taken.get(slot % PERIOD, never)
        i = (slot - begin) // PERIOD
        if 0 <= i < microbatches:
            yield Action(kind, stage, i)
            if kind is INPUT:
                weights.append(backward_weight(stage, i))
        elif weights:
            yield weights.popleft()
