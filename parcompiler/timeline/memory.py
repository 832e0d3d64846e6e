"""The bytes on each rank while a step runs: of compute, and of the tensors of exchanges.

A micro-batch takes memory from the start of its forward to the end of its backward (see
`StageCost.bytes`), gradients of parameters from the first backward on, a received tensor from the
posting of its receive to its last use, a sent tensor until it has been sent.

The tasks between which something is held depend only on the order: they are stored once, in arrays
(`MemoryUse`), and every timing of the order sorts and sums these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby, pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from parcompiler.instruction import COMPUTE, HEAD, Kind
from parcompiler.schedules.action import NOWHERE
from parcompiler.schedules.staleness import ScheduledLine
from parcompiler.timeline.costs import Made, StageCost, VocabularyCost
from parcompiler.timeline.run import EXACT, INFINITY, START, Moments

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Place = tuple[int | None, int | None]  # stage and micro-batch

KINDS = (*sorted(COMPUTE), *sorted(HEAD))
NUMBER = {kind: k for k, kind in enumerate(KINDS)}
OTHER = len(KINDS)  # kinds that hold nothing by themselves


class Buffer(NamedTuple):
    """The tensor of an exchange on a rank, from the end of task `first` to the last end of `last`.

    `first` may be START; without a `last` it stays.
    """

    rank: int
    exchange: object
    first: int
    last: Sequence[int]


class TaskArrays(NamedTuple):
    """The tasks of all ranks, rank after rank in their order, one per row."""

    task: Ints
    rank: Ints
    kind: Ints  # place in KINDS
    stage: Ints
    microbatch: Ints

    def where(self, mask: NDArray[np.bool_]) -> TaskArrays:
        """The tasks selected by `mask`."""
        return TaskArrays(*(column[mask] for column in self))


class BufferArrays(NamedTuple):
    """Buffers, one per row, each of one of `exchanges`."""

    exchanges: Sequence[object]
    rank: Ints
    exchange: Ints  # place in `exchanges`
    first: Ints
    last: Ints  # a row of tasks and exchanges for each buffer, padded with START


class HeldSteps(NamedTuple):
    """The bytes held on a rank, from each of `seconds` on."""

    seconds: Floats
    nbytes: Ints

    def most(self, begin: float = 0.0, end: float = INFINITY) -> int:
        """The most bytes between two moments."""
        until = np.append(self.seconds[1:], INFINITY)
        return int(self.nbytes[(self.seconds < end) & (until > begin)].max())

    def levels(self) -> tuple[tuple[float, int], ...]:
        """The second and the bytes of each change."""
        pairs = zip(self.seconds.tolist(), self.nbytes.tolist(), strict=True)
        return tuple(next(same) for _, same in groupby(pairs, key=itemgetter(1)))


@dataclass(frozen=True)
class MemoryUse:
    """Memory use of the tasks of some orders, for any costs; `returns` says for each task whether
    its micro-batch has a backward on its stage."""

    ranks: int
    tasks: TaskArrays
    returns: NDArray[np.bool_]
    buffers: BufferArrays

    @cached_property
    def first_backwards(self) -> list[int]:
        """Backwards, as places in `tasks`, up to the first whole one, or first second part, of each
        stage: they leave gradients that no others leave (see `Made`)."""
        firsts, complete = [], set[int]()
        ends = NUMBER[Kind.BACKWARD], NUMBER[Kind.BACKWARD_WEIGHT]
        back = (self.tasks.kind < len(COMPUTE)) & (self.tasks.kind != NUMBER[Kind.FORWARD])
        places = np.flatnonzero(back)
        columns = self.tasks.stage[places].tolist(), self.tasks.kind[places].tolist()
        for place, stage, kind in zip(places.tolist(), *columns, strict=True):
            if stage not in complete:
                firsts.append(place)
                if kind in ends:
                    complete.add(stage)
        return firsts

    @cached_property
    def last_of_head(self) -> NDArray[np.bool_]:
        """The last task of each micro-batch for the head, on each rank."""
        is_last = np.zeros(len(self.tasks.task), bool)
        places = np.flatnonzero((self.tasks.kind >= len(COMPUTE)) & (self.tasks.kind < OTHER))
        key = self.tasks.rank[places] * (self.tasks.microbatch.max(initial=0) + 1)
        last = len(places) - 1 - np.unique(
            (key + self.tasks.microbatch[places])[::-1], return_index=True
        )[1]  # fmt: skip
        is_last[places[last]] = True
        return is_last

    @cached_property
    def first_of_head(self) -> NDArray[np.bool_]:
        """Each S that finds no matrix of an earlier micro-batch to reuse, as more of them are in
        flight on its rank than ever before."""
        begins = self.tasks.kind == NUMBER[Kind.S]
        ended = np.append(False, self.last_of_head[:-1])
        in_flight = np.cumsum(begins.astype(np.int64) - ended)
        apart = self.tasks.rank * (in_flight.max(initial=0) + 1)  # ranks follow one another
        most = np.maximum.accumulate(in_flight + apart)
        is_first: NDArray[np.bool_] = begins & (np.diff(most, prepend=-1) > 0)
        return is_first

    def held(
        self,
        moments: Moments,
        placement: Sequence[int],
        costs: Sequence[StageCost],
        vocabulary: VocabularyCost,
        size: Callable[[Any], int],
    ) -> list[HeldSteps]:
        """By rank, the bytes held: resident ones from the start of the step, those of the
        optimizer's step at its end. `size` gives the bytes of an exchange."""
        begins, ends = np.array(moments.begins), np.array([*moments.ends, -INFINITY])
        made, home = Made(), np.array(placement, np.int64)
        parts = list(self._computing(begins, ends, costs, vocabulary, made))
        exchanges, rank, exchange, first, last = self.buffers
        nbytes = np.array([size(each) for each in exchanges], np.int64)[exchange]
        freed = ends[last].max(axis=1, initial=-INFINITY)
        is_freed = freed > -INFINITY
        parts.append((rank, np.where(first == START, 0.0, ends[first]), nbytes))
        parts.append((rank[is_freed], freed[is_freed], -nbytes[is_freed]))
        every, end = np.arange(self.ranks), ends[ends < INFINITY].max(initial=0.0)
        parts.append((every, 0.0, vocabulary.resident))
        parts.append((home, 0.0, np.array([cost.early for cost in costs], np.int64)))
        updates = np.zeros(self.ranks, np.int64)
        for j in made.of:  # only stages with a backward have an update
            updates[placement[j]] += costs[j].update
        parts.append((every, end, updates))
        return _summed(parts, self.ranks, EXACT * float(end))

    def _computing(
        self,
        begins: Floats,
        ends: Floats,
        costs: Sequence[StageCost],
        vocabulary: VocabularyCost,
        made: Made,
    ) -> Iterator[Change]:
        """Bytes that compute tasks add at their start, and free at their end."""
        task, rank, kind, stage, _ = self.tasks
        table = np.array([[cost.bytes(kind) for kind in KINDS[: len(COMPUTE)]] for cost in costs])
        computes = kind < len(COMPUTE)
        taken, freed = np.zeros(len(task), np.int64), np.zeros(len(task), np.int64)
        if computes.any():
            taken[computes], freed[computes] = table[stage[computes], kind[computes]].T
        for place in self.first_backwards:
            j = int(stage[place])
            taken[place], freed[place] = made.bytes(j, costs[j], KINDS[kind[place]])
        freed = np.where(self.returns, freed, -taken)
        softmax = kind == NUMBER[vocabulary.softmax]
        passing = vocabulary.saved - vocabulary.reused
        taken[kind == NUMBER[Kind.S]] += passing
        taken[self.first_of_head] += vocabulary.reused
        taken[softmax] += vocabulary.more
        freed[~computes] = 0
        freed[softmax] -= vocabulary.more
        freed[self.last_of_head] -= passing
        yield rank, begins[task], taken
        yield rank, ends[task], freed


Change = tuple[Ints, Floats | float, Ints | int]  # ranks, seconds, bytes added from then on


def _summed(changes: Sequence[Change], ranks: int, rounding: float) -> list[HeldSteps]:
    """The bytes held on each rank after each change. Changes at one moment, up to the `rounding` of
    sums of seconds, are one."""
    rank = np.concatenate([where for where, _, _ in changes])
    at = np.concatenate([np.broadcast_to(when, len(where)) for where, when, _ in changes])
    size = np.concatenate([np.broadcast_to(more, len(where)) for where, _, more in changes])
    order = np.lexsort((at, rank))
    rank, at, size = rank[order], at[order], size[order]
    steps = []
    for low, high in pairwise(np.searchsorted(rank, np.arange(ranks + 1))):
        seconds, total = at[low:high], np.cumsum(size[low:high])
        later = np.flatnonzero(np.diff(seconds) > rounding)
        steps.append(HeldSteps(seconds[[0, *(later + 1)]], total[[*later, high - low - 1]]))
    return steps


def task_arrays(
    orders: Sequence[Sequence[int]], lines: Sequence[Sequence[ScheduledLine]]
) -> TaskArrays:
    """The tasks of each rank and their lines in arrays."""

    def column(values: Iterable[int | None]) -> Ints:
        return np.array([NOWHERE if x is None else x for x in values], np.int64)

    every = [*chain.from_iterable(lines)]
    return TaskArrays(
        column(chain.from_iterable(orders)),
        np.repeat(np.arange(len(orders)), [*map(len, orders)]),
        column(NUMBER.get(line.kind, OTHER) for line in every),
        column(line.stage if line.kind in COMPUTE else None for line in every),
        column(line.microbatch for line in every),
    )


def buffer_arrays(buffers: Sequence[Buffer]) -> BufferArrays:
    """Buffers in arrays."""
    last = np.full((len(buffers), max([1, *(len(buffer.last) for buffer in buffers)])), START)
    for row, buffer in zip(last, buffers, strict=True):
        row[: len(buffer.last)] = buffer.last
    ranks, exchanges = [buffer.rank for buffer in buffers], [buffer.exchange for buffer in buffers]
    first = np.array([buffer.first for buffer in buffers], np.int64)
    return BufferArrays(exchanges, np.array(ranks, np.int64), np.arange(len(ranks)), first, last)


def joined(exchanges: Sequence[object], parts: Sequence[BufferArrays]) -> BufferArrays:
    """The buffers of all parts, each of one of `exchanges`."""
    width = max(part.last.shape[1] for part in parts)
    rows = [((0, 0), (0, width - part.last.shape[1])) for part in parts]
    pairs = zip(parts, rows, strict=True)
    return BufferArrays(
        exchanges,
        np.concatenate([part.rank for part in parts]),
        np.concatenate([part.exchange for part in parts]),
        np.concatenate([part.first for part in parts]),
        np.concatenate([np.pad(part.last, row, constant_values=START) for part, row in pairs]),
    )


def returning(tasks: TaskArrays, trained: AbstractSet[Place]) -> NDArray[np.bool_]:
    """For each task, whether its stage and micro-batch are in `trained`."""
    none = [None if stage == NOWHERE else stage for stage in tasks.stage.tolist()]
    places = zip(none, tasks.microbatch.tolist(), strict=True)
    return np.array([place in trained for place in places], bool)
