"""Random mistakes: whatever changes what a program computes is found, whatever it is.

Whether it does is decided by executing the program in symbols, in `oracle.py`, which knows none of
the verifier's rules.
"""

import random
from collections import Counter
from functools import cache

import pytest

from parcompiler.lower import Lowered
from parcompiler.schedules import SCHEDULES, stages_per_rank
from parcompiler.verifier import faults
from tests.verifier.edits import texts
from tests.verifier.mistake import Chance, Mistake
from tests.verifier.mutants import MISTAKES
from tests.verifier.oracle import same_meaning
from tests.verifier.programs import DEEP, OWN, TIED, blocks, program, several
from tests.verifier.reorderings import REORDERINGS

EACH = 40  # mutants of each kind
LONG = 500  # of each kind, in the long sweep

# What these change is read by the runtime, not by the oracle; or it is a second copy of the truth.
TABLES = {"name", "differentiable", "producer", "consumers"}
HARMLESS = {"add_one_of_inputs", *(f"wrong_{field}_of_a_value" for field in TABLES)}

PLACEMENTS = ((0, 1, 0), (0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2, 1))  # besides those of schedules

program_of = cache(program)
several_of = cache(several)


@cache
def named() -> list[tuple[str, str, int, int]]:
    """Every model, schedule, number of ranks and of stages on each that go together."""
    return [
        (name, schedule, ranks, stages_per_rank(schedule, wanted))
        for name in (*OWN, *DEEP)
        for schedule in SCHEDULES
        for ranks in (1, 2, 3, 4)
        for wanted in ((2, 3, 4) if schedule == "interleaved" else (1,))
        if ranks * stages_per_rank(schedule, wanted) <= len(blocks(name))
        if ranks == 1 or schedule != "pipedream" or name not in TIED
    ]


def drawn(chance: Chance) -> Lowered:
    """A legal program: model, schedule, ranks, stages on a rank and micro-batches by chance."""
    microbatches = chance.choice((1, 2, 3, 4))
    if chance.random() < 0.1:
        return several_of(chance.choice((*OWN, *DEEP)), chance.choice(PLACEMENTS), microbatches)
    name, schedule, ranks, each = chance.choice(named())
    return program_of(name, ranks, schedule, microbatches, virtual_stages=each)


def mutants(chance: Chance, mistake: Mistake, count: int) -> list[Lowered]:
    """Some random programs with one mistake of a kind."""
    found: list[Lowered] = []
    while len(found) < count:
        mutant = mistake(chance, drawn(chance))
        if mutant is not None:
            found.append(mutant)
    return found


def check(mistake: Mistake, count: int) -> None:
    """Whatever changes what is computed is found, and the kind is no idle one."""
    chance = random.Random(f"{mistake.__name__} {count}")
    seen: Counter[bool] = Counter()
    for mutant in mutants(chance, mistake, count):
        same = same_meaning(mutant)
        seen[same] += 1
        assert same or texts(mutant), mutant.instructions
    assert seen[False] or mistake.__name__ in HARMLESS


def check_exactly(mistake: Mistake, count: int) -> None:
    """What changes what is computed is found, and nothing else is."""
    chance = random.Random(f"again {mistake.__name__} {count}")
    for mutant in mutants(chance, mistake, count):
        assert bool(texts(mutant)) != same_meaning(mutant), mutant.instructions


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_that_changes_what_is_computed_is_found(mistake: Mistake) -> None:
    check(mistake, EACH)


@pytest.mark.parametrize("mistake", REORDERINGS, ids=lambda mistake: mistake.__name__)
def test_an_order_that_changes_nothing_is_no_fault(mistake: Mistake) -> None:
    check_exactly(mistake, EACH)


def test_the_mistakes_are_many_and_of_many_kinds() -> None:
    names = {mistake.__name__ for mistake in MISTAKES}
    assert len(names) == len(MISTAKES)
    assert names >= HARMLESS
    assert len(names - HARMLESS) >= 12
    assert EACH * len(names - HARMLESS) >= 2000


def test_any_number_of_mistakes_gives_faults_and_no_exception() -> None:
    chance = random.Random(0)
    for _ in range(300):
        mutant = drawn(chance)
        for mistake in chance.choices(MISTAKES, k=6):
            try:
                mutant = mistake(chance, mutant) or mutant
            except (LookupError, ValueError):  # too little is left to make this mistake
                continue
            assert list(faults(mutant)) or same_meaning(mutant)


@pytest.mark.sweep
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_found_in_a_long_sweep(mistake: Mistake) -> None:
    check(mistake, LONG)


@pytest.mark.sweep
@pytest.mark.parametrize("mistake", REORDERINGS, ids=lambda mistake: mistake.__name__)
def test_an_order_that_changes_nothing_is_no_fault_in_a_long_sweep(mistake: Mistake) -> None:
    check_exactly(mistake, LONG)
