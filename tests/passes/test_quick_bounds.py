"""What a division may be told at once: that nothing fits; what a ledger remembers, and what is
seen before anything moves."""

import bisect
import dataclasses
import itertools
import random
from collections.abc import Iterator

from parcompiler.passes.divide.bounds import crowded
from parcompiler.passes.divide.data import Flow, Load
from parcompiler.passes.divide.ledger import DivisionCosts
from parcompiler.passes.divide.move_delta import move_deltas
from parcompiler.passes.divide.runs import all_runs
from parcompiler.passes.divide.task import DivisionTask


def chain(draw: random.Random, blocks: int, ranks: int, each: int) -> DivisionTask:
    """Blocks of two sizes one after the other, and memory that may not do."""
    kinds = [Load(1.0, draw.randint(0, 9), draw.randint(0, 5)) for _ in range(2)]
    loads = [draw.choice(kinds) for _ in range(blocks)]
    flows = [Flow(i, (i + 1,), 0.1, draw.randint(0, 2)) for i in range(blocks - 1)]
    moments = [
        tuple(draw.randint(0, 4) for _ in range(each)) for _ in range(ranks * draw.randint(1, 2))
    ]
    held = [moments[rank::ranks] for rank in range(ranks)]
    limits = [draw.randint(1, 80)] * ranks
    return DivisionTask(loads, flows, tuple(range(ranks)) * each, 4, held, limits)


def fits(task: DivisionTask) -> bool:
    """Whether any division into runs fits, by trying them all."""
    blocks, stages = len(task.loads), task.stages
    for cuts in itertools.combinations(range(1, blocks), stages - 1):
        at = [sum(i >= cut for cut in cuts) for i in range(blocks)]
        memory = task.evaluate(at).memory
        if all(size <= limit for size, limit in zip(memory, task.limits, strict=True)):
            return True
    return False


def test_what_is_refused_at_once_fits_in_no_way() -> None:
    draw, refused = random.Random(0), 0
    for _ in range(150):
        task = chain(draw, draw.randint(4, 7), 2, draw.randint(1, 2))
        if crowded(task):
            refused += 1
            assert not fits(task)
    assert refused > 20  # it does see something


def test_a_ledger_remembers_what_a_new_one_finds() -> None:
    draw = random.Random(1)
    for _ in range(30):
        task = chain(draw, 9, 2, 2)
        book = DivisionCosts(task, sorted(draw.randrange(task.stages) for _ in range(9)))
        for _ in range(12):
            book.excess()
            book.move(draw.randrange(9), draw.randrange(task.stages))
            new = DivisionCosts(task, book.at)
            assert book.excess() == new.excess()
            assert book.squares() == new.squares() == sum(s * s for s in book.seconds)
            assert [book.memory(r) for r in range(2)] == [new.memory(r) for r in range(2)]


def moved(book: DivisionCosts, cuts: range, side: int) -> Iterator[tuple[object, ...]]:
    """What a ledger says while cuts move one after the other, where no stage is empty."""
    for j in cuts:
        book.move(bisect.bisect_left(book.at, j) - side, j - 1 + side)
        if set(book.at) == set(range(book.task.stages)):
            yield list(book.busy), book.objective(), book.squares()


def test_move_deltas_say_of_moved_cuts_what_the_costs_say_after_the_moves() -> None:
    draw, seen = random.Random(2), 0
    for _ in range(40):
        task = chain(draw, 11, 2, draw.randint(1, 3))
        if task.each == 2:  # the ranks turn back: stages beside each other are of one rank
            task = dataclasses.replace(task, placement=(0, 1, 1, 0))
        ends = [*sorted(draw.sample(range(1, 11), task.stages - 1)), 11]
        at = [bisect.bisect_right(ends, i) for i in range(11)]
        for j in range(1, task.stages):
            for side, cuts in enumerate((range(j, task.stages), range(j, 0, -1))):
                told = move_deltas(DivisionCosts(task, at), cuts, side)
                found = [(list(x.busy), x.objective(), x.squares()) for x in told]
                assert found == list(moved(DivisionCosts(task, at), cuts, side))
                seen += len(found)
    assert seen > 300


def test_runs_are_the_same_in_whatever_order_one_asks() -> None:
    task = chain(random.Random(3), 9, 2, 2)
    whole = [list(longer) for longer in all_runs(task)]
    again = all_runs(task)
    assert [again[a][8 - a] for a in range(9)] == [longer[-1] for longer in whole]
    assert again[2][1:3] == whole[2][1:3]
    assert [list(longer) for longer in again] == whole
    assert list(map(len, again)) == list(map(len, whole))
