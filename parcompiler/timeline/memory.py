"""The bytes on each rank while a step runs: what computing takes, and the tensors of exchanges.

A micro-batch takes memory from the begin of its forward to the end of its backward (see
`StageCost.bytes`), gradients of parameters from the first backward on, a received tensor from when
its receive was posted to its last use, a sent one until it is out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

from parcompiler.instruction import COMPUTE, HEAD, Kind
from parcompiler.schedules.staleness import ScheduledLine
from parcompiler.timeline.costs import Made, StageCost, VocabularyCost
from parcompiler.timeline.run import EXACT, INFINITY, START, Moments

Change = tuple[float, int]  # second, bytes more from then on
Place = tuple[int | None, int | None]  # stage and micro-batch


class Buffer(NamedTuple):
    """The tensor of an exchange on a rank, from the end of task `first` to the last end of `last`.

    `first` may be START; without a `last` it stays.
    """

    rank: int
    exchange: object
    first: int
    last: Sequence[int]


class MemoryUse(Protocol):
    """Tasks with what they hold: by task its rank and what it is, the buffers of exchanges, and the
    stages and micro-batches that go back."""

    @property
    def orders(self) -> Sequence[Sequence[int]]: ...

    @property
    def lines(
        self,
    ) -> Mapping[int, tuple[int, ScheduledLine]] | Sequence[tuple[int, ScheduledLine]]: ...

    @property
    def buffers(self) -> Sequence[Buffer]: ...

    @property
    def trained(self) -> AbstractSet[Place]: ...


def memory(
    uses: MemoryUse,
    moments: Moments,
    placement: Sequence[int],
    costs: Sequence[StageCost],
    vocabulary: VocabularyCost,
    size: Callable[[Any], int],
) -> list[list[Change]]:
    """By rank, what changes when: what is resident with the begin of the step, and what the
    optimizer's step takes with its end."""
    ranks = len(uses.orders)
    changes: list[list[Change]] = [[(0.0, vocabulary.resident)] for _ in range(ranks)]
    for rank, cost in zip(placement, costs, strict=True):
        changes[rank].append((0.0, cost.early))
    made = Made()
    for order, own in zip(uses.orders, changes, strict=True):
        own += _computing(uses, order, moments, costs, vocabulary, made)
    for rank, exchange, first, last in uses.buffers:
        nbytes = size(exchange)
        if nbytes:
            changes[rank].append((0.0 if first == START else moments.ends[first], nbytes))
            if last:
                changes[rank].append((max(moments.ends[task] for task in last), -nbytes))
    updates = [vocabulary.update if made.of else 0] * ranks
    for j in made.of:  # the update follows where stages have gone back
        updates[placement[j]] += costs[j].update
    end = moments.last
    for own, update in zip(changes, updates, strict=True):
        own.append((end, update))
    return changes


def _computing(
    uses: MemoryUse,
    order: Sequence[int],
    moments: Moments,
    costs: Sequence[StageCost],
    vocabulary: VocabularyCost,
    made: Made,
) -> Iterator[Change]:
    """What the compute of one rank takes and gives back."""
    lines = [uses.lines[task][1] for task in order]
    last = {line.microbatch: k for k, line in enumerate(lines) if line.kind in HEAD}
    for k, (task, line) in enumerate(zip(order, lines, strict=True)):
        begin, end = moments.begins[task], moments.ends[task]
        if line.kind in COMPUTE:
            assert line.stage is not None
            taken, given = made.bytes(line.stage, costs[line.stage], line.kind)
            yield begin, taken
            yield end, given if (line.stage, line.microbatch) in uses.trained else -taken
        if line.kind is Kind.S:
            yield begin, vocabulary.saved
        if line.kind is vocabulary.softmax:
            yield begin, vocabulary.more
            yield end, -vocabulary.more
        if last.get(line.microbatch) == k:
            yield end, -vocabulary.saved


def most_between(steps: Sequence[tuple[float, int]], begin: float, end: float) -> int:
    """The most bytes from one moment to another, of those that are held from each second on."""
    until = [second for second, _ in steps[1:]]
    pairs = zip(steps, [*until, INFINITY], strict=True)
    return max(
        size for (second, size), next_second in pairs if second < end and next_second > begin
    )


def levels(changes: Sequence[Change]) -> tuple[tuple[float, int], ...]:
    """The bytes held from each change on; what happens at one moment, but for the rounding of sums
    of seconds, happens at once."""
    size, now, by_second = 0, 0.0, {0.0: 0}
    rounding = EXACT * max(second for second, _ in changes)
    for second, change in sorted(changes, key=itemgetter(0)):
        size += change
        if second > now + rounding:
            now = second
        by_second[now] = size
    return tuple(next(same) for _, same in groupby(by_second.items(), key=itemgetter(1)))
