"""What a division may be told at once: that nothing fits; and what a ledger remembers."""

import itertools
import random

from parcompiler.passes.divide.bounds import crowded
from parcompiler.passes.divide.data import Flow, Load
from parcompiler.passes.divide.ledger import Ledger
from parcompiler.passes.divide.task import Task


def chain(draw: random.Random, blocks: int, ranks: int, each: int) -> Task:
    """Blocks of two sizes one after the other, and memory that may not do."""
    kinds = [Load(1.0, draw.randint(0, 9), draw.randint(0, 5)) for _ in range(2)]
    loads = [draw.choice(kinds) for _ in range(blocks)]
    flows = [Flow(i, (i + 1,), 0.1, draw.randint(0, 2)) for i in range(blocks - 1)]
    moments = [
        tuple(draw.randint(0, 4) for _ in range(each)) for _ in range(ranks * draw.randint(1, 2))
    ]
    held = [moments[rank::ranks] for rank in range(ranks)]
    limits = [draw.randint(1, 80)] * ranks
    return Task(loads, flows, tuple(range(ranks)) * each, 4, held, limits)


def fits(task: Task) -> bool:
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
        book = Ledger(task, sorted(draw.randrange(task.stages) for _ in range(9)))
        for _ in range(12):
            book.excess()
            book.move(draw.randrange(9), draw.randrange(task.stages))
            new = Ledger(task, book.at)
            assert book.excess() == new.excess()
            assert book.squares() == new.squares() == sum(s * s for s in book.seconds)
            assert [book.memory(r) for r in range(2)] == [new.memory(r) for r in range(2)]
