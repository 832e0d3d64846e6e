"""Several stages per rank: good runs, found by moving the cuts between them.

The loads of a rank's stages add up, so the dynamic programme, which sees one stage after another,
only gives a start. Then one or several neighbouring cuts move by one block each:

    before   | a b c | d e f | g h i |      the block d goes to the first stage and g to the
    after    | a b c d | e f g | h i |      second: the third is relieved by the first

as long as this lowers a measure: first of the memory above the limits, then of the objective.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import truediv

from parcompiler.passes.divide.ledger import DivisionCosts
from parcompiler.passes.divide.pairs import paired_runs
from parcompiler.passes.divide.runs import even_runs, lean_runs
from parcompiler.passes.divide.task import DivisionTask

Measure = Callable[[DivisionCosts], tuple[float, ...]]
SWEEPS = 200  # over cuts, at most; a dozen is usual
LARGE = 4000  # blocks times stages from which on pairs are not improved
LARGE_OF_MANY = 1000  # likewise with more stages on a rank, which have more cuts to move
NEAR = 4  # cuts at either side of one that moved, which may move next
REACH = 16  # cuts that move together; with 8 a step on unequal ranks was 4 % longer


def moved_runs(task: DivisionTask) -> list[tuple[int, ...]]:
    """Good divisions into runs that fit, with no block run twice.

    They are even runs and, where memory is short, lean ones, both improved by moves, and the runs
    with the fastest slowest rank (`pairs`). In a large task nothing is moved: that took longer than
    all else and found nothing better than pairs and even stages.
    """
    pairs = paired_runs(task)
    divisions = [pairs] if pairs is not None and task.fits(pairs) else []
    if len(task.loads) * task.stages > (LARGE if task.each == 2 else LARGE_OF_MANY):
        return divisions or [runs for runs in _starts(task) if task.fits(runs)]
    return [*_moved(task, _starts(task)), *divisions] or _moved(task, [slim_runs(task)])


def _moved(task: DivisionTask, starts: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The runs that moves lead to from each start, if they fit."""
    divisions = []
    for start in starts:
        book = DivisionCosts(task, start)
        descend(book, _overload)
        descend(book, _step)
        if not book.excess():
            divisions.append(tuple(book.at))
    return divisions


def _starts(task: DivisionTask) -> Iterator[tuple[int, ...]]:
    """Runs to begin with."""
    yield even_runs(task)
    if task.most > min(task.room):
        yield lean_runs(task)


def slim_runs(task: DivisionTask) -> tuple[int, ...]:
    """Runs whose largest share of a memory limit is small."""

    def shares(book: DivisionCosts) -> tuple[float, ...]:
        return tuple(sorted(map(truediv, book.memory(), task.room), reverse=True))

    book = DivisionCosts(task, lean_runs(task))
    if task.each > 1:
        descend(book, shares)
    return tuple(book.at)


def _overload(book: DivisionCosts) -> tuple[float, ...]:
    """Memory above the limits, then squared seconds above an even share, then unevenness."""
    return book.excess(), book.above, book.squares


def _step(book: DivisionCosts) -> tuple[float, ...]:
    """Memory above the limits, then the step, then unevenness."""
    return book.excess(), book.objective(), book.squares


def descend(book: DivisionCosts, measure: Measure) -> None:
    """Move cuts until no move lowers the measure.

    Most sweeps change one or two of many cuts, so the next sweep tries only cuts near those.
    """
    best, every = measure(book), range(1, book.task.stages)
    cuts: Sequence[int] = every
    for _ in range(SWEEPS):
        changed: set[int] = set()
        for j in cuts:
            before = best
            best = _shift(book, range(j, book.task.stages)[:REACH], 0, best, measure)
            best = _shift(book, range(j, 0, -1)[:REACH], 1, best, measure)
            if best < before:
                changed.update(range(j - NEAR, j + NEAR + 1))
        if not changed and cuts is every:
            return
        cuts = sorted(changed.intersection(every)) or every


def _shift(
    book: DivisionCosts,
    cuts: Sequence[int],
    side: int,
    best: tuple[float, ...],
    measure: Measure,
) -> tuple[float, ...]:
    """Move the best number of these cuts, from the first on, by one block; returns the new measure.

    With side 0 the block after cut j goes to the stage before the cut, j - 1; with side 1 the block
    before it goes to the stage after it, j.
    """
    at, step = book.at, 1 - 2 * side
    blocks = [bisect.bisect_left(at, j) - side for j in cuts]
    # Whether a stage keeps a block. Cuts after the last stage that does are not moved.
    stays = [0 <= i + step < len(at) and at[i + step] == at[i] for i in blocks]
    while stays and not stays[-1]:
        stays.pop()
    moved: list[tuple[int, int]] = []  # blocks and their old stages
    kept = 0
    for j, i, stay in zip(cuts, blocks, stays, strict=False):
        moved.append((i, at[i]))
        book.move(i, j - 1 + side)
        if stay:
            measured = measure(book)
            if measured < best:
                best, kept = measured, len(moved)
    while len(moved) > kept:
        book.move(*moved.pop())
    return best
