"""What moving cuts would do to the seconds of a division, before any block is moved.

    before   | a b c | d e f | g h i |      cut 1, then cut 2: the first stage gains d, the second
    after    | a b c d | e f g | h i |      loses it and gains g, the third loses that

Where every value goes to the next block alone, a stage receives what its first block reads, unless
the stage before is of the same rank. So a move changes two stages, and what they take is the same
as in a ledger. Of bytes nothing is known here: what is said to exceed the limits is nothing.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

from parcompiler.passes.divide.ledger import DivisionCosts


class MoveDelta:
    """The seconds of a division while its cuts move; a measure of it is never above the ledger's.

    `busy` are units by rank.
    """

    def __init__(self, book: DivisionCosts) -> None:
        self._task = book.task
        self._seconds = list(book.seconds)
        self.busy = list(book.busy)
        self._squares = book.squares()

    def excess(self) -> int:
        """Bytes above the limits, at least."""
        return 0

    def objective(self) -> int:
        """Units of a step, times the stages per rank."""
        return sum(self.busy) + self._task.further * max(self.busy)

    def squares(self) -> int:
        """How uneven the stages are."""
        return self._squares

    def take(self, j: int, units: int) -> None:
        """Add units of time to a stage."""
        before = self._seconds[j]
        self._seconds[j] = before + units
        self._squares += units * (2 * before + units)
        self.busy[self._task.placement[j]] += units


def move_deltas(book: DivisionCosts, cuts: Sequence[int], side: int) -> Iterator[MoveDelta]:
    """The division after the first of these cuts has moved by a block, after two, and so on, where
    no stage is empty then. It is one object, which changes.

    With side 0 the block behind cut j goes to the stage before it; with side 1 that before it goes
    to the stage behind. Values go to the next block alone (`DivisionTask.is_chain`).
    """
    task, seen = book.task, MoveDelta(book)
    for j in cuts:
        i = bisect.bisect_left(book.at, j) - side
        old, new = (j, j - 1) if side == 0 else (j - 1, j)
        assert book.at[i] == old
        first = j  # the stage that has another first block then
        seen.take(new, task.cost[task.placement[new]][i])
        seen.take(old, -task.cost[task.placement[old]][i])
        if task.placement[first] != task.placement[first - 1]:
            change = task.entry[i + 1] - task.entry[i]
            seen.take(first, change if side == 0 else -change)
        neighbour = i + 1 if side == 0 else i - 1
        if 0 <= neighbour < len(book.at) and book.at[neighbour] == old:
            yield seen
