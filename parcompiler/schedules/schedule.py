"""A schedule: the order of forwards and backwards on each rank, without communication.

Communication is added by lowering, once, for all schedules. Stage `j` runs on rank
`placement[j]`; with one stage per rank that is the identity, and the stage is not printed:

>>> from parcompiler.schedules import build
>>> print(build("1f1b", ranks=2, microbatches=3))
rank 0  F0 F1 .  .  B0--- F2 B1--- .  B2---
rank 1  .  F0 B0--- F1 B1--- F2 B2---
>>> print(build("zb-h1", ranks=2, microbatches=3))
rank 0  F0 F1 .  I0 W0 F2 I1 W1 I2 W2
rank 1  .  F0 I0 F1 I1 W0 F2 I2 W1 W2

With several it comes first, as in the CSV of torch.distributed.pipelining:

>>> schedule = build("interleaved", ranks=2, microbatches=2, virtual_stages=2)
>>> schedule.placement
(0, 1, 0, 1)
>>> print(schedule)
rank 0  0F0 0F1 2F0 2F1 .   .   2B0---- .   2B1---- 0B0---- 0B1----
rank 1  .   1F0 1F1 3F0 3B0---- 3F1 3B1---- 1B0---- 1B1----
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from operator import le
from pathlib import Path

from parcompiler.instruction import Kind
from parcompiler.schedules.action import Action, Orders, backward, forward
from parcompiler.schedules.exchange import read_csv, read_orders, write_csv
from parcompiler.schedules.picture import picture
from parcompiler.schedules.staleness import ACTIVATIONS, most_alive

__all__ = ["Action", "Schedule", "backward", "forward"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order of compute on every rank. Schedules with equal orders are equal under any names.

    An `asynchronous` one has no flush: parameters are updated after every backward.
    """

    name: str = field(compare=False)
    placement: tuple[int, ...]
    orders: Orders
    asynchronous: bool = False

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.orders)

    @property
    def microbatches(self) -> int:
        """Number of micro-batches."""
        return 1 + max(action.microbatch for order in self.orders for action in order)

    @property
    def virtual_stages(self) -> int:
        """Number of stages on the rank with the most."""
        return max(map(self.placement.count, range(self.ranks)))

    def __str__(self) -> str:
        """The picture of the schedule: one line per rank, `.` is idle."""
        return picture(self.placement, self.orders)

    def in_flight(self, stage: int) -> int:
        """The most micro-batches whose forward is done and whose backward is not.

        A backward in two parts is done when its part for the weights is.
        """
        order = self.orders[self.placement[stage]]
        return most_alive(action for action in order if action.stage == stage)

    def peak(self, rank: int) -> Fraction:
        """The most activations on a rank; 1 means one micro-batch on all of its stages."""
        return Fraction(most_alive(self.orders[rank]), self.placement.count(rank))

    def held(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """The most micro-batches in flight on the stages of a rank, in their order, together.

        One vector for each moment that may be the fullest, for any bytes per micro-batch and stage:
        no other vector, nor a mixture of two others, is as large in every place.

        >>> from parcompiler.schedules import build
        >>> build("interleaved", ranks=2, microbatches=4, virtual_stages=2).held(0)
        ((3, 2), (4, 1))
        """
        stages = [j for j, at in enumerate(self.placement) if at == rank]
        counts, vectors = dict.fromkeys(stages, 0), set[tuple[int, ...]]()
        for action in self.orders[rank]:
            if action.kind in ACTIVATIONS:
                counts[action.stage] += ACTIVATIONS[action.kind]
            if action.kind is Kind.FORWARD:
                vectors.add(tuple(counts.values()))
        return tuple(sorted(_largest(vectors), key=lambda counts: (-counts[-1], counts)))

    def cells(self) -> tuple[str, ...]:
        """One line per rank, as `parse` reads it.

        >>> from parcompiler.schedules import build
        >>> build("gpipe", ranks=2, microbatches=2).cells()
        ('0F0 0F1 0B0 0B1', '1F0 1F1 1B0 1B1')
        """
        return tuple(" ".join(action.cell for action in order) for order in self.orders)

    @classmethod
    def parse(cls, name: str, cells: Sequence[str]) -> Schedule:
        """The schedule `name` of a line of `cells` a rank. Raises InputError as `from_csv` does."""
        return cls(name, *read_orders([line.split() for line in cells]))

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the CSV of torch.distributed.pipelining: a row per rank, a cell per action.

        The vocabulary passes of all ranks are left out: torch has no cells for them.
        """
        write_csv(path, self.orders)

    @classmethod
    def from_csv(cls, path: str | os.PathLike[str]) -> Schedule:
        """Read a CSV of torch.distributed.pipelining with compute only.

        The schedule has the name of the file. Rows are ranks; empty or missing cells are idle
        slots. Raises InputError, naming the cell with its row and column (counted from 1), unless
        every stage is on one rank and computes every micro-batch once, its forward before its
        backward.
        """
        placement, orders = read_csv(path)
        return cls(Path(path).stem, placement, orders)


def _largest(vectors: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The vectors that no other dominates (is at least as large in every place)."""
    largest: list[tuple[int, ...]] = []
    for one in sorted(vectors, reverse=True):  # larger ones come first
        if not any(all(map(le, one, other)) for other in largest):
            while len(one) == 2 and len(largest) > 1 and _is_mixture(largest[-2], largest[-1], one):
                largest.pop()
            largest.append(one)
    return largest


def _is_mixture(one: tuple[int, ...], middle: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether a mixture of two pairs is as large in both places as the pair between them. Bytes are
    linear in the pair, so that one of the two then takes at least as many (a convex hull, by
    Andrew's monotone chain)."""
    (a, b), (c, d), (e, f) = one, middle, other
    return (a - c) * (f - d) >= (c - e) * (d - b)
