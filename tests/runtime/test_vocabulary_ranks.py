"""A vocabulary spread over real ranks: programs by hand, in float64, against one process."""

import json
from functools import cache

import pytest

from tests.distributed import forked
from tests.runtime import vocabulary_ranks


@cache
def faults(ranks: int) -> dict[str, list[list[str]]]:
    """What is wrong on each rank, by case: one start of the processes for all of them."""
    text = forked.run(ranks, vocabulary_ranks.main)
    found: dict[str, list[list[str]]] = json.loads(
        next(line for line in text.splitlines() if line[:1] == "{")
    )
    return found


@pytest.mark.parametrize(
    ("ranks", "name"), [(n, name) for n in (2, 4) for name in vocabulary_ranks.cases(n)]
)
def test_loss_gradients_and_updates_are_those_of_one_process(ranks: int, name: str) -> None:
    assert faults(ranks)[name] == [[]] * ranks
