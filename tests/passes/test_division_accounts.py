"""What is remembered while blocks move, and of runs of blocks: what a new account finds."""

import random

from parcompiler.passes.divide.data import Flow, Load
from parcompiler.passes.divide.ledger import DivisionCosts
from parcompiler.passes.divide.runs import BlockRuns
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
            assert book.above == sum(max(0, x - task.even) ** 2 for x in book.busy)
            assert book.objective() == new.objective()
            assert book.squares == new.squares == sum(s * s for s in book.seconds)
            assert book.memory() == new.memory()


def test_a_run_is_what_its_blocks_are_as_a_stage() -> None:
    draw = random.Random(3)
    for _ in range(20):
        task = chain(draw, 9, 3, 1)
        first, second = sorted(draw.sample(range(1, 9), 2))
        at = [(i >= first) + (i >= second) for i in range(9)]
        book, runs = DivisionCosts(task, at), BlockRuns(task)
        runs(first, 9)  # longer runs may be asked for first
        for j, (a, b) in enumerate([(0, first), (first, second), (second, 9)]):
            assert runs.seconds(j, a, b) == book.seconds[j]
            assert runs(a, b).memory(task.in_flight[j]) == book.memory()[j]
