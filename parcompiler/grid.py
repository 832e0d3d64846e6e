"""Where ranks sit on the axes of a mesh: the arithmetic that planning and runtime share.

`tensor` is the fastest axis, then `data`, then `pipeline`:

    Grid(pipeline=2, data=2)      data 0   data 1
                     pipeline 0   rank 0   rank 1    the same program on different batches
                     pipeline 1   rank 2   rank 3

>>> grid = Grid(pipeline=2, data=2)
>>> grid.coordinate(3), grid.rank(pipeline=1), grid.replicas((0,)), grid.replicas((0, 1))
(Coordinate(pipeline=1, data=1, tensor=0, context=0), 2, (0, 1), (0, 1, 2, 3))

Ranks along `data` have the same parameters. Of these, each `context` neighbours share a batch, of
whose sequences each has a piece, and each `expert` neighbours share out the experts:

    Grid(data=4, context=2, expert=4)    rank 0   rank 1   rank 2   rank 3
                              batch      0        0        1        1
                              experts    a piece  a piece  a piece  a piece

>>> grid = Grid(data=4, tensor=2, context=2)
>>> grid.batches, grid.batch_of(2), list(grid.runs(2))
(2, 1, [(0, 2), (4, 6), (1, 3), (5, 7)])
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Coordinate:
    """Where one rank sits in the mesh.

    On a `Grid`, `data` counts all ranks with the same parameters, those of the context axis too.
    """

    pipeline: int
    data: int
    tensor: int
    context: int = 0


@dataclass(frozen=True, slots=True)
class Grid:
    """The number of ranks along each axis; `context` and `expert` are parts of `data`."""

    pipeline: int = 1
    data: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.pipeline * self.data * self.tensor

    @property
    def copies(self) -> int:
        """The number of ranks at each pipeline coordinate."""
        return self.data * self.tensor

    @property
    def batches(self) -> int:
        """The number of batches: context ranks share one."""
        return self.data // self.context

    @property
    def leaders(self) -> list[int]:
        """The first rank of each batch."""
        return [self.rank(data=data) for data in range(0, self.data, self.context)]

    def batch_of(self, data: int) -> int:
        """The batch that is computed at a data coordinate."""
        return data // self.context

    def coordinate(self, rank: int) -> Coordinate:
        """Where `rank` sits."""
        outer, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(outer, self.data)
        return Coordinate(pipeline, data, tensor, data % self.context)

    def rank(self, pipeline: int = 0, data: int = 0, tensor: int = 0) -> int:
        """The rank at a coordinate."""
        return (pipeline * self.data + data) * self.tensor + tensor

    def columns(self) -> Iterator[tuple[int, int]]:
        """Every data and tensor coordinate: where each copy of the pipeline stands."""
        return ((data, tensor) for data in range(self.data) for tensor in range(self.tensor))

    def lines(self) -> Iterator[tuple[int, ...]]:
        """The ranks of each pipeline and data coordinate, by their tensor coordinate."""
        for first in range(0, self.size, self.tensor):
            yield tuple(range(first, first + self.tensor))

    def rows(self) -> Iterator[tuple[int, ...]]:
        """The ranks of each pipeline and tensor coordinate, by their data coordinate."""
        for position in range(self.pipeline):
            for tensor in range(self.tensor):
                yield self.replicas((position,), tensor)

    def runs(self, count: int) -> Iterator[tuple[int, ...]]:
        """The ranks of each pipeline and tensor coordinate, by `count` neighbours along data."""
        for row in self.rows():
            for first in range(0, len(row), count):
                yield row[first : first + count]

    def plane(self, data: int) -> tuple[int, ...]:
        """The ranks of all pipeline and tensor coordinates at a data coordinate, sorted.

        >>> Grid(pipeline=2, data=2, tensor=2).plane(1)
        (2, 3, 6, 7)
        """
        return tuple(
            self.rank(position, data, tensor)
            for position in range(self.pipeline)
            for tensor in range(self.tensor)
        )

    def replicas(
        self, pipeline: Iterable[int], tensor: int = 0, expert: int | None = None
    ) -> tuple[int, ...]:
        """The ranks of all data coordinates at these pipeline coordinates, sorted; or of those that
        have the piece `expert` of the experts.

        >>> Grid(data=4, expert=2).replicas((0,), expert=1)
        (1, 3)
        """
        first, step = (0, 1) if expert is None else (expert, self.expert)
        return tuple(
            self.rank(position, data, tensor)
            for position in sorted(pipeline)
            for data in range(first, self.data, step)
        )
