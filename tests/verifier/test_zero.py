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


# Pieces of gradients.

PIECES = "every copy of a parameter is reduced: "


@pytest.fixture
def pieces() -> Lowered:
    """Two pipeline coordinates of two data ranks that keep pieces of gradients."""
    return program("chain", 2, "1f1b", 3, data=2, zero=2)


@pytest.mark.parametrize(("schedule", "each"), [("zb-h1", 1), ("interleaved", 2), ("zb-v", 2)])
@pytest.mark.parametrize("name", ["deep chain", "knots"])
def test_pieces_of_gradients_are_legal(name: str, schedule: str, each: int) -> None:
    lowered = program(name, 2, schedule, 4, virtual_stages=each, data=2, zero=2)
    assert texts(lowered) == []
    sums = [line for line in lowered.instructions[0] if line.value == lowered.buckets[0].label]
    assert [line.microbatch for line in sums] == [0, 1, 2, 3, None]


def test_a_micro_batch_whose_gradients_reach_no_piece_is_found(pieces: Lowered) -> None:
    (fault,) = texts(dropped(pieces, 0, "REDUCE_GRADIENTS bucket_0 mb 1 ranks 0"))
    assert fault == PIECES + "rank 0 never sums bucket_0 (layers.1.bias and 3 more) for mb 1"


def test_a_sum_before_its_backward_is_found(pieces: Lowered) -> None:
    line, backward = "REDUCE_GRADIENTS bucket_0 mb 1 ranks 0", "BACKWARD stage 0 mb 1"
    (fault,) = texts(moved(pieces, 0, line, before=backward))
    assert f"rank 0: {line} stands before {backward}" in fault


def test_a_sum_of_all_micro_batches_at_once_is_found(pieces: Lowered) -> None:
    line, whole = "REDUCE_GRADIENTS bucket_0 mb 2 ranks 0", "REDUCE_GRADIENTS bucket_0 ranks 0"
    found = texts(rewritten(pieces, 0, line, whole))
    assert f"{PIECES}rank 0: {whole}: its gradients are kept as pieces" in found


def test_pieces_where_all_gradients_are_whole_are_found(pieces: Lowered) -> None:
    assert any("keeps a piece" in text for text in texts(replace(pieces, zero=1)))


def test_copies_that_are_in_the_bucket_of_one_rank_alone_are_found() -> None:
    lowered = program("knots", 2, "1f1b", 3, data=2, zero=2)
    name = lowered.tied[0].name
    without = [
        replace(item, names=tuple(n for n in item.names if n != name or item.ranks != (0,)))
        for item in lowered.buckets
    ]
    found = texts(replace(lowered, buckets=tuple(without)))
    assert any(f"the gradients of {name} on rank 0 are summed in no bucket" in t for t in found)


# Pieces of parameters.

WHOLE, FREED = "a stage computes with whole parameters: ", "whole parameters are freed: "


@pytest.fixture
def units() -> Lowered:
    """Two pipeline coordinates of two data ranks that keep pieces of parameters, in four units."""
    return program("deep chain", 2, "1f1b", 3, data=2, zero=3)


@pytest.mark.parametrize(("schedule", "each"), [("zb-h1", 1), ("interleaved", 2), ("zb-v", 2)])
@pytest.mark.parametrize("name", ["deep chain", "knots"])
def test_pieces_of_parameters_are_legal(name: str, schedule: str, each: int) -> None:
    lowered = program(name, 2, schedule, 4, virtual_stages=each, data=2, zero=3)
    assert texts(lowered) == []
    assert len(lowered.stages) == 8  # a unit for each block
    assert any(str(line).startswith("UNSHARD") for line in lowered.evaluation[1])


def test_a_forward_with_pieces_alone_is_found(units: Lowered) -> None:
    found = texts(dropped(units, 0, "UNSHARD stage 2 mb 0 ranks 0"))
    wrong = "FORWARD stage 2 mb 0 has rows of its parameters alone"
    assert WHOLE + f"rank 0: {wrong}" in found
    assert FREED + "rank 0: RESHARD stage 2 mb 0: it is not whole" in found


def test_parameters_that_are_freed_before_the_backward_are_found(units: Lowered) -> None:
    line, backward = "RESHARD stage 7 mb 0", "BACKWARD stage 7 mb 0"
    (fault,) = texts(moved(units, 1, line, before=backward))
    assert fault.startswith(f"{WHOLE}rank 1: {backward} has rows of its parameters alone (freed")


def test_parameters_that_stay_whole_are_found(units: Lowered) -> None:
    found = texts(dropped(units, 1, "RESHARD stage 4 mb 2"))
    assert any(text.startswith(FREED + "rank 1") for text in found)


def test_all_units_whole_at_once_are_found(units: Lowered) -> None:
    first = "FORWARD stage 0 mb 0"
    early = moved(units, 0, "UNSHARD stage 2 mb 0 ranks 0", before=first)
    assert texts(early) == []
    early = moved(early, 0, "UNSHARD stage 3 mb 0 ranks 0", before=first)
    assert texts(early) == [
        FREED + "rank 0: UNSHARD stage 3 mb 0 ranks 0: stages 0, 1, 2, 3 are whole at once"
    ]


def test_parameters_of_other_data_replicas_are_found(units: Lowered) -> None:
    line = "UNSHARD stage 2 mb 0 ranks 0"
    found = texts(rewritten(units, 0, line, "UNSHARD stage 2 mb 0 ranks 1"))
    assert any("from the data replicas of its own rank" in text for text in found)


def test_unsharding_where_parameters_are_whole_is_found(units: Lowered) -> None:
    found = texts(replace(units, zero=2))
    assert any("every data rank has whole parameters" in text for text in found)


def test_an_evaluation_with_pieces_alone_is_found(units: Lowered) -> None:
    found = texts(dropped(units, 0, "UNSHARD stage 0 mb 0 ranks 0", evaluation=True))
    assert any("in evaluation, rank 0: FORWARD stage 0 mb 0 has rows" in text for text in found)


def test_gathers_behind_the_step_of_what_stays_in_pieces_are_found(units: Lowered) -> None:
    label = units.buckets[0].label
    mutant = edited(units, 0, partial(add, [f"GATHER_PARAMETERS {label} ranks 0"]))
    assert any("its data replicas have no such part" in text for text in texts(mutant))
