"""Random mistakes: whatever changes what a program computes is found, whatever it is.

Whether it does is decided by executing the program in symbols, in `oracle.py`, which knows none of
the verifier's rules.
"""

import random
from collections import Counter
from functools import cache

import pytest

from parcompiler.lower import Lowered
from parcompiler.verifier import faults
from tests.verifier.edits import texts
from tests.verifier.mutants import MISTAKES, REORDERINGS, Chance, Mistake
from tests.verifier.oracle import same_meaning
from tests.verifier.programs import OWN, SCHEDULES, program, several

EACH = 15  # mutants of each kind

# What these change is read by the runtime, not by the oracle; or it is a second copy of the truth.
TABLES = {"name", "differentiable", "producer", "consumers"}
HARMLESS = {"add_one_of_inputs", *(f"wrong_{field}_of_a_value" for field in TABLES)}


@cache
def programs() -> tuple[Lowered, ...]:
    """Legal programs of all schedules, and some with several stages on a rank."""
    counts = [(ranks, microbatches) for ranks in (1, 2, 3, 4) for microbatches in (1, 2, 3)]
    single = [program(n, p, s, m) for n in OWN for s in SCHEDULES for p, m in counts]
    placements = ((0, 1, 0), (0, 1, 0, 1), (0, 1, 1, 0))
    return (*single, *(several(n, ranks, m) for n in OWN for ranks in placements for m in (1, 2)))


def mutants(chance: Chance, mistake: Mistake, count: int) -> list[Lowered]:
    """Some random programs with one mistake of a kind."""
    found: list[Lowered] = []
    while len(found) < count:
        mutant = mistake(chance, chance.choice(programs()))
        if mutant is not None:
            found.append(mutant)
    return found


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_that_changes_what_is_computed_is_found(mistake: Mistake) -> None:
    chance = random.Random(mistake.__name__)
    seen: Counter[bool] = Counter()
    for mutant in mutants(chance, mistake, EACH):
        same = same_meaning(mutant)
        seen[same] += 1
        assert same or texts(mutant), mutant.instructions
    assert seen[False] or mistake.__name__ in HARMLESS


@pytest.mark.parametrize("mistake", REORDERINGS, ids=lambda mistake: mistake.__name__)
def test_an_order_that_changes_nothing_is_no_fault(mistake: Mistake) -> None:
    chance = random.Random(f"again {mistake.__name__}")
    for mutant in mutants(chance, mistake, EACH):
        assert bool(texts(mutant)) != same_meaning(mutant), mutant.instructions


def test_any_number_of_mistakes_gives_faults_and_no_exception() -> None:
    chance = random.Random(0)
    for _ in range(200):
        mutant = chance.choice(programs())
        for mistake in chance.choices(MISTAKES, k=6):
            try:
                mutant = mistake(chance, mutant) or mutant
            except (LookupError, ValueError):  # too little is left to make this mistake
                continue
            assert list(faults(mutant)) or same_meaning(mutant)
