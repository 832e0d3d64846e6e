"""Mistakes in what data ranks gather of the parameters that each updates a part of."""

from dataclasses import replace
from functools import partial

import pytest

from parcompiler.lower import Lowered
from tests.verifier.edits import dropped, edited, moved, rewritten, texts
from tests.verifier.programs import program

RULE = "every rank gets what its data ranks update: "
LINE = "GATHER_PARAMETERS bucket_0 ranks 0"


@pytest.fixture
def chain() -> Lowered:
    """Two pipeline coordinates of two data ranks, one bucket for each."""
    return shared(program("chain", 2, "1f1b", 3, data=2))


def shared(lowered: Lowered) -> Lowered:
    """The program, with states shared out."""
    gathers = replace(lowered, zero=1)
    for rank in range(lowered.size):
        labels = [item.label for item in lowered.tied if rank in item.ranks]
        labels += [item.label for item in reversed(lowered.buckets) if rank in item.ranks]
        lines = [f"GATHER_PARAMETERS {label} ranks {rank}" for label in labels]
        gathers = edited(gathers, rank, partial(add, lines))
    return gathers


def add(lines: list[str], to: list[str]) -> None:
    """Write lines behind others."""
    to += lines


@pytest.mark.parametrize("name", ["chain", "ties", "knots"])
def test_shared_states_are_legal(name: str) -> None:
    ranks = 4 if name == "ties" else 2
    assert texts(shared(program(name, ranks, "1f1b", 4, data=2))) == []


def test_a_gather_that_is_missing_is_found(chain: Lowered) -> None:
    (fault,) = texts(dropped(chain, 0, LINE))
    assert fault == RULE + "rank 0 never gathers bucket_0 (layers.1.bias and 3 more)"


def test_a_gather_within_the_step_is_found(chain: Lowered) -> None:
    (fault,) = texts(moved(chain, 0, LINE, before="SHARE_LOSS from 1"))
    assert fault == RULE + f"rank 0: {LINE} stands before the end of the step"


def test_a_gather_of_what_other_ranks_hold_is_found(chain: Lowered) -> None:
    wrong = "GATHER_PARAMETERS bucket_1 ranks 0"
    assert RULE + f"rank 0: {wrong}: its data replicas have no such part" in texts(
        rewritten(chain, 0, LINE, wrong)
    )


def test_a_gather_where_every_data_rank_updates_all_is_found(chain: Lowered) -> None:
    assert "no data rank updates what others need" in texts(replace(chain, zero=0))[0]


def test_shared_states_of_one_data_rank_are_found() -> None:
    mutant = replace(program("chain", 2, "1f1b", 3), zero=1)
    assert any("zero is 1, and the program has one data rank" in text for text in texts(mutant))
