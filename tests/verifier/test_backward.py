"""Mistakes in backwards of two parts: what a part needs of the other, and what it leaves."""

import pytest

from parcompiler.lower import Lowered
from tests.verifier.edits import dropped, edited, moved, rewritten, swapped, texts
from tests.verifier.oracle import same_meaning
from tests.verifier.programs import program

START = "nothing is used before it is there: "


@pytest.fixture
def chain() -> Lowered:
    """Two ranks, four micro-batches: I for gradients of inputs, W for those of weights."""
    return program("chain", 2, "zb-h1", 4)


@pytest.fixture
def knots() -> Lowered:
    """Stages 0 and 2 on rank 0, stages 1 and 3 on rank 1; tied tensors and skips."""
    return program("knots", 2, "interleaved", 2, virtual_stages=2)


def test_a_backward_for_weights_that_is_missing_is_found(chain: Lowered) -> None:
    mutant = dropped(chain, 0, "BACKWARD_WEIGHT stage 0 mb 1", "BACKWARD_WEIGHT stage 0 mb 3")
    assert texts(mutant) == [
        "every stage runs every micro-batch: rank 0 has no BACKWARD_WEIGHT stage 0 mb 1, 3 after "
        "its BACKWARD_INPUT: what that keeps is never used nor released"
    ]


def test_a_backward_for_inputs_that_is_missing_is_found(chain: Lowered) -> None:
    assert texts(dropped(chain, 0, "BACKWARD_INPUT stage 0 mb 1")) == [
        "every stage runs every micro-batch: rank 0 has no BACKWARD_INPUT stage 0 mb 1 for its "
        "BACKWARD_WEIGHT"
    ]


def test_a_backward_of_which_both_parts_are_missing_is_found(chain: Lowered) -> None:
    lines = "BACKWARD_INPUT stage 0 mb 1", "BACKWARD_WEIGHT stage 0 mb 1"
    assert texts(dropped(chain, 0, *lines)) == [
        "every stage runs every micro-batch: rank 0 has no BACKWARD stage 0 mb 1"
    ]


def test_a_backward_is_whole_or_in_parts_but_not_both(chain: Lowered) -> None:
    mutant = edited(chain, 0, lambda lines: lines.insert(-1, "BACKWARD stage 0 mb 1"))
    rule = "a backward is whole or in two parts: rank 0 has BACKWARD and "
    assert [text for text in texts(mutant) if text.startswith("a backward")] == [
        rule + "BACKWARD_INPUT of stage 0 mb 1",
        rule + "BACKWARD_WEIGHT of stage 0 mb 1",
    ]
    line = "BACKWARD_WEIGHT stage 0 mb 1"
    assert rule + "BACKWARD_INPUT of stage 0 mb 1" in texts(
        rewritten(chain, 0, line, "BACKWARD stage 0 mb 1")
    )


def test_each_microbatch_may_have_a_form_of_its_own(chain: Lowered) -> None:
    mutant = dropped(chain, 0, "BACKWARD_WEIGHT stage 0 mb 1")
    mutant = rewritten(mutant, 0, "BACKWARD_INPUT stage 0 mb 1", "BACKWARD stage 0 mb 1")
    assert texts(mutant) == []
    assert same_meaning(mutant)


def test_the_part_for_weights_comes_second(chain: Lowered) -> None:
    first, second = "BACKWARD_INPUT stage 0 mb 2", "BACKWARD_WEIGHT stage 0 mb 2"
    assert f"{START}rank 0: {second} stands before {first}" in texts(
        swapped(chain, 0, first, second)
    )


def test_the_part_for_inputs_waits_for_the_gradient_and_gives_one(chain: Lowered) -> None:
    first, line = "BACKWARD_INPUT stage 0 mb 3", "RECV layers_1.grad mb 3 from 1"
    found = texts(moved(chain, 0, first, before=line))
    assert found == [f"{START}rank 0: {first} stands before {line}"]
    first, line = "BACKWARD_INPUT stage 1 mb 3", "SEND layers_1.grad mb 3 to 0"
    found = texts(moved(chain, 1, line, before=first))
    assert found == [f"{START}rank 1: {line} stands before {first}"]


def test_a_gradient_may_leave_before_the_part_for_weights(chain: Lowered) -> None:
    lines = [str(line) for line in chain.instructions[1]]
    sent, weights = "SEND layers_1.grad mb 0 to 0", "BACKWARD_WEIGHT stage 1 mb 0"
    assert lines.index(sent) < lines.index(weights)
    late = moved(chain, 1, weights, before="SHARE_LOSS from 1")
    assert texts(late) == []
    assert same_meaning(late)


def test_sums_of_gradients_wait_for_the_parts_for_weights() -> None:
    lowered = program("ties", 2, "zb-h1", 2)
    line = f"REDUCE_GRADIENTS tied_0 ranks {','.join(map(str, lowered.tied[0].ranks))}"
    late = "BACKWARD_WEIGHT stage 1 mb 1"
    mutant = moved(lowered, 1, line, before=late)
    assert texts(mutant)[0] == f"{START}rank 1: {line} stands before {late}"
    assert not same_meaning(mutant)


def test_a_gradient_waits_for_all_readers_on_its_rank(knots: Lowered) -> None:
    values = knots.values.values()
    name = next(v.name for v in values if v.differentiable and v.consumers == (1, 2, 3))
    line = f"SEND {name}.grad mb 0 to 0"
    mutant = moved(knots, 1, line, before="BACKWARD stage 1 mb 0")
    assert texts(mutant)[0] == f"{START}rank 1: {line} stands before BACKWARD stage 1 mb 0"
    assert not same_meaning(mutant)


def test_an_evaluation_has_no_part_of_a_backward(chain: Lowered) -> None:
    def spoil(lines: list[str]) -> None:
        lines += ["BACKWARD_INPUT stage 1 mb 0", "BACKWARD_WEIGHT stage 1 mb 0"]

    start = "every instruction fits its rank: in evaluation, rank 1: "
    assert texts(edited(chain, 1, spoil, evaluation=True)) == [
        f"{start}BACKWARD_INPUT stage 1 mb 0: there is nothing to go back through",
        f"{start}BACKWARD_WEIGHT stage 1 mb 0: there is nothing to go back through",
    ]
