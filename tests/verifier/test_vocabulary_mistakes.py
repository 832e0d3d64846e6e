"""Random mistakes in programs with the vocabulary on all ranks: what changes them is found."""

import random
from collections import Counter

import pytest

from parcompiler.lower import Lowered
from tests.verifier import test_sweep as sweep
from tests.verifier.edits import texts
from tests.verifier.mistake import Chance, Mistake
from tests.verifier.mutants import MISTAKES
from tests.verifier.oracle import same_meaning
from tests.verifier.reorderings import REORDERINGS
from tests.verifier.words import METHODS, words
from tests.verifier.wrong_parts import ORDERS, WRONG_PARTS

EACH = 12  # mutants of each kind
LONG = 300
# The symbols read the lines, not the table; no memory is updated in place; nothing is reduced.
HARMLESS = {"wrong_stage_of_a_layer", "recompute_a_call", "backward_weight_too_late"}
HARMLESS |= {"repeat_a_forward", *sweep.HARMLESS}
# There are no ties, no asynchronous steps and no prologues in these programs.
ABSENT = {"swap_two_reductions", "drop_a_reduction", "reduce_over_other_ranks"}
ABSENT |= {"drop_a_tie", "tie_other_ranks", "forget_a_tie", "drop_one_of_prologue"}
ABSENT |= {"add_one_of_prologue", "add_one_of_inputs", "drop_one_of_inputs"}
COMMON = tuple(m for m in MISTAKES if m.__name__ not in ABSENT and "update" not in m.__name__)
GENERAL = tuple(m for m in REORDERINGS if m in COMMON)
PLACES = (  # ranks, schedule, stages on a rank
    (2, "1f1b", 1),
    (4, "1f1b", 1),
    (2, "gpipe", 1),
    (2, "zb-h1", 1),
    (2, "v-half", 2),
    (2, "interleaved", 2),
)


def drawn(chance: Chance) -> Lowered:
    """A legal program: method, tie, ranks, schedule and micro-batches by chance."""
    ranks, schedule, each = chance.choice(PLACES)
    tied = chance.random() < 0.5
    microbatches = chance.choice((1, 2, 3, 5))
    return words(chance.choice(METHODS), ranks, schedule, microbatches, each, tied=tied)


def check(mistake: Mistake, count: int, *, exactly: bool) -> None:
    """What changes what is computed is found; if `exactly`, nothing else is."""
    chance = random.Random(f"{mistake.__name__} {count} vocabulary")
    seen: Counter[bool] = Counter()
    for _ in range(20 * count):
        mutant = mistake(chance, drawn(chance))
        if mutant is None:
            continue
        same, found = same_meaning(mutant), texts(mutant)
        seen[same] += 1
        assert same or found, mutant.instructions
        assert not (exactly and same) or not found, (found, mutant.instructions)
        if seen.total() == count:
            break
    assert seen.total() == count
    assert seen[False] or mistake.__name__ in HARMLESS


@pytest.mark.parametrize("mistake", ORDERS, ids=lambda mistake: mistake.__name__)
def test_an_order_is_a_fault_if_and_only_if_it_changes_what_is_computed(mistake: Mistake) -> None:
    check(mistake, 2 * EACH, exactly=True)


@pytest.mark.parametrize("mistake", WRONG_PARTS, ids=lambda mistake: mistake.__name__)
def test_a_mistake_that_changes_what_is_computed_is_found(mistake: Mistake) -> None:
    check(mistake, EACH, exactly=False)


@pytest.mark.sweep
@pytest.mark.parametrize("mistake", (*ORDERS, *GENERAL), ids=lambda mistake: mistake.__name__)
def test_an_order_is_found_in_a_long_sweep(mistake: Mistake) -> None:
    check(mistake, LONG, exactly=True)


@pytest.mark.sweep
@pytest.mark.parametrize("mistake", (*WRONG_PARTS, *COMMON), ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_found_in_a_long_sweep(mistake: Mistake) -> None:
    check(mistake, LONG, exactly=False)
