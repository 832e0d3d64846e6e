"""Two laps at once: the cuts that give each rank a stage of both within a bound of its seconds.

    first lap      | 0 | 1 | 2 |              the ranks take their stages one after the other, from
    second lap                 | 0 | 1 | 2 |  the left end of both laps; or, when the second runs
    or                         | 2 | 1 | 0 |  backwards, from its right end

Of all ways to give ranks 0 … r the blocks of the first lap before block a, only that which is
furthest in the second lap is kept.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence

from parcompiler.passes.divide.ledger import DivisionCosts
from parcompiler.passes.divide.runs import BlockRun

PRECISION = 1000  # the bound is sought to one part in so many; the search does the rest
SHIFTS = (0, -1, 1, -2, 2, -3, 3, -4, 4)  # of the cut between the laps

Seconds = Sequence[Sequence[int]]  # of each run on one rank, as `all_runs` has them
Cut = tuple[int, int]  # the ends of what is taken of both laps


def tighten(book: DivisionCosts, runs: Sequence[Sequence[BlockRun]], least: int) -> bool:
    """Lower the slowest rank by placing the cuts of two laps anew; whether that worked."""
    improved = False
    seconds = _by_rank(book, runs)
    for one, two in _laps(book):
        low, high = least, max(book.busy) - 1
        while low <= high:
            bound = low if high - low < least // PRECISION else (low + high) // 2
            if _place(book, seconds, one, two, bound):
                high, improved = max(book.busy) - 1, True
            else:
                low = max(bound + 1, low + least // PRECISION)
    return improved


def _by_rank(book: DivisionCosts, runs: Sequence[Sequence[BlockRun]]) -> list[Seconds]:
    """The seconds of all runs on each rank."""
    ranks = range(book.task.ranks)
    if book.task.is_uniform:
        return [[[run.seconds for run in longer] for longer in runs]] * len(ranks)
    return [[[run.on(r) for run in longer] for longer in runs] for r in ranks]


def _laps(book: DivisionCosts) -> Iterator[tuple[range, range]]:
    """Pairs of laps with the ranks in the same order, or the second in the opposite one."""
    task = book.task
    laps = [range(j, j + task.ranks) for j in range(0, task.stages, task.ranks)]
    for one, two in itertools.combinations(laps, 2):
        ranks, others = ([task.placement[j] for j in lap] for lap in (one, two))
        if len(set(ranks)) == task.ranks:
            if ranks == others:
                yield one, two
            elif ranks == others[::-1]:
                yield one, two[::-1]


def _place(
    book: DivisionCosts, seconds: Sequence[Seconds], one: range, two: range, bound: int
) -> bool:
    """Place the cuts so that no rank takes longer than the bound, and the memory as before."""
    before, peak, excess = list(book.at), max(book.busy), book.excess()
    for ends, meeting in _ends(book, one, two):
        cuts = _search(book, seconds, one, two, bound, ends, meeting)
        if cuts is None:
            continue
        for (a, b), (a2, b2), j, k in zip(cuts[:-1], cuts[1:], one, two, strict=True):
            for i in range(a, a2):
                _put(book, i, j)
            for i in range(min(b, b2), max(b, b2)):
                _put(book, i, k)
        if max(book.busy) < peak and book.excess() <= excess:
            return True
        for i, j in enumerate(before):
            _put(book, i, j)
    return False


def _ends(
    book: DivisionCosts, one: range, two: range
) -> Iterator[tuple[tuple[int, int, int, int], bool]]:
    """The ends that `_search` is given, and whether the laps meet there."""
    begin, middle = (bisect.bisect_left(book.at, j) for j in (one[0], one[-1] + 1))
    start, end = (bisect.bisect_left(book.at, j) for j in (min(two), max(two) + 1))
    touching = middle == start
    if two.step < 0:
        yield (begin, end if touching else middle, end, start), touching
        return
    for shift in SHIFTS if touching else (0,):
        if begin + len(one) <= middle + shift and start + shift <= end - len(two):
            yield (begin, middle + shift, start + shift, end), False


def _put(book: DivisionCosts, i: int, j: int) -> None:
    """Put block i on stage j, unless it is there."""
    if book.at[i] != j:
        book.move(i, j)


def _search(
    book: DivisionCosts,
    seconds: Sequence[Seconds],
    one: range,
    two: range,
    bound: int,
    ends: tuple[int, int, int, int],
    meeting: bool,
) -> list[Cut] | None:
    """The ends after each rank, from the first; None when there are none.

    `ends` are the first block and the end of the first lap; the start and the end of the second, in
    its direction. When the laps are `meeting`, the end of both is free.
    """
    task, (begin, middle, start, end), step = book.task, ends, two.step
    reached: dict[int, int] = {begin: start}
    parents: list[dict[int, Cut]] = []
    for n, (j, k) in enumerate(zip(one, two, strict=True)):
        rank, left = task.placement[j], len(one) - 1 - n
        own = seconds[rank]
        free = bound - book.busy[rank] + book.seconds[j] + book.seconds[k]
        found: dict[int, int] = {}
        parent: dict[int, Cut] = {}
        for a, b in reached.items():
            final = b - 1 - 2 * left if meeting else middle - left
            for a2 in range(a + 1 if left or meeting else middle, final + 1):
                if a2 <= a or own[a][a2 - a - 1] > free:
                    break
                goal = a2 + left if meeting else end - step * left
                if (goal - b) * step <= 0:
                    continue
                b2 = _furthest(own, b, goal, free - own[a][a2 - a - 1])
                if b2 == b or (not left and b2 != goal):
                    continue
                if a2 not in found or (b2 - found[a2]) * step > 0:
                    found[a2], parent[a2] = b2, (a, b)
        reached = found
        parents.append(parent)
    return _trace(parents, reached)


def _furthest(seconds: Seconds, b: int, goal: int, free: int) -> int:
    """The end of the longest run from b towards the goal that takes no longer."""
    if goal > b:
        return b + bisect.bisect_right(seconds[b], free, hi=goal - b)
    b2 = b
    while b2 > goal and seconds[b2 - 1][b - b2] <= free:
        b2 -= 1
    return b2


def _trace(parents: Sequence[dict[int, Cut]], reached: dict[int, int]) -> list[Cut] | None:
    """The ends after each rank, from those of the last back to the first."""
    if not reached:
        return None
    cuts = [next(iter(reached.items()))]
    for parent in reversed(parents):
        cuts.append(parent[cuts[-1][0]])
    return cuts[::-1]
