"""Mistakes in updates within a step: where they may stand, and whose gradients they take."""

import itertools
from dataclasses import replace

import pytest

from parcompiler.lower import Lowered
from tests.verifier.edits import dropped, edited, moved, rewritten, swapped, texts
from tests.verifier.oracle import same_meaning
from tests.verifier.programs import program

RULE = "every backward is followed by its update: "


@pytest.fixture
def chain() -> Lowered:
    """Two ranks, four micro-batches; rank 0 has two in flight."""
    return program("chain", 2, "pipedream", 4)


def test_every_backward_is_followed_by_an_update_of_its_stage(chain: Lowered) -> None:
    assert chain.asynchronous
    for lines in chain.instructions:
        work = [line for line in lines if line.stage is not None]
        for line, following in itertools.pairwise(work):
            if line.kind == "BACKWARD":
                assert following == replace(line, kind=following.kind)
                assert following.kind == "UPDATE"


def test_an_update_that_is_missing_is_found(chain: Lowered) -> None:
    mutant = dropped(chain, 1, "UPDATE stage 1 mb 2")
    assert texts(mutant) == [
        "every stage runs every micro-batch: rank 1 has no UPDATE stage 1 mb 2"
    ]
    assert not same_meaning(mutant)


def test_an_update_that_stands_twice_is_found(chain: Lowered) -> None:
    line = "UPDATE stage 1 mb 2"
    assert texts(edited(chain, 1, lambda lines: lines.insert(-1, line))) == [
        f"every instruction stands once: rank 1: {line} stands 2 times"
    ]


def test_an_update_comes_after_its_backward(chain: Lowered) -> None:
    update, backward = "UPDATE stage 1 mb 2", "BACKWARD stage 1 mb 2"
    mutant = moved(chain, 1, update, before=backward)
    assert texts(mutant) == [f"{RULE}rank 1: {update} stands before {backward}"]
    assert not same_meaning(mutant)


def test_gradients_of_two_backwards_do_not_mix(chain: Lowered) -> None:
    last, backward = "UPDATE stage 0 mb 2", "BACKWARD stage 0 mb 3"
    mutant = moved(chain, 0, backward, before=last)
    assert f"{RULE}rank 0: {backward} stands before {last}" in texts(mutant)
    assert not same_meaning(mutant)


def test_a_forward_sees_the_updates_of_all_backwards_before_it(chain: Lowered) -> None:
    update, forward = "UPDATE stage 0 mb 0", "FORWARD stage 0 mb 2"
    mutant = moved(chain, 0, forward, before=update)
    assert texts(mutant) == [f"{RULE}rank 0: {forward} stands before {update}"]
    assert not same_meaning(mutant)


def test_an_update_may_leave_before_or_after_the_gradients(chain: Lowered) -> None:
    mutant = swapped(chain, 1, "SEND layers_1.grad mb 0 to 0", "UPDATE stage 1 mb 0")
    assert texts(mutant) == []
    assert same_meaning(mutant)


def test_a_synchronous_step_has_no_update() -> None:
    lowered = program("chain", 2, "1f1b", 2)
    mutant = edited(lowered, 0, lambda lines: lines.insert(-1, "UPDATE stage 0 mb 1"))
    assert texts(mutant) == [
        "parameters change only where they may: rank 0: UPDATE stage 0 mb 1: they change after the "
        "step, which is synchronous"
    ]


def test_an_evaluation_has_no_update(chain: Lowered) -> None:
    def spoil(lines: list[str]) -> None:
        lines.append("UPDATE stage 0 mb 0")

    assert texts(edited(chain, 0, spoil, evaluation=True)) == [
        "parameters change only where they may: in evaluation, rank 0: UPDATE stage 0 mb 0: an "
        "evaluation changes none"
    ]


def test_an_asynchronous_step_has_an_update_for_each_backward() -> None:
    lowered = replace(program("chain", 2, "1f1b", 2), asynchronous=True)
    assert texts(lowered) == [
        "every stage runs every micro-batch: rank 0 has no UPDATE stage 0 mb 0, 1",
        "every stage runs every micro-batch: rank 1 has no UPDATE stage 1 mb 0, 1",
    ]


def test_an_asynchronous_step_has_no_parts_of_backwards(chain: Lowered) -> None:
    old, new = "BACKWARD stage 0 mb 1", "BACKWARD_INPUT stage 0 mb 1"
    assert texts(rewritten(chain, 0, old, new)) == [
        f"every instruction fits its rank: rank 0: {new}: an asynchronous step has whole "
        "backwards, each with its UPDATE",
        f"every stage runs every micro-batch: rank 0 has no {old}",
    ]


def test_an_update_belongs_to_a_stage_of_its_rank(chain: Lowered) -> None:
    old, new = "UPDATE stage 0 mb 1", "UPDATE stage 1 mb 1"
    assert texts(rewritten(chain, 0, old, new)) == [
        f"every instruction fits its rank: rank 0: {new}: stage 1 is on rank 1",
        f"every stage runs every micro-batch: rank 0 has no {old}",
    ]


def test_copies_of_a_parameter_would_drift_apart() -> None:
    lowered = program("ties", 4, "pipedream", 2)
    rule = "an asynchronous step updates every parameter on one stage: "
    end = "and its copies would drift apart (untie them or take a synchronous schedule)"
    assert texts(lowered) == [
        f"{rule}layers.0.weight is on stages 0, 3, {end}",
        f"{rule}layers.0.bias is on stages 0, 3, {end}",
        f"{rule}layers.1.weight is on stages 1, 3, {end}",
        f"{rule}layers.2.bias is on stages 1, 2, 3, {end}",
    ]


def test_the_weights_of_a_microbatch_are_those_of_its_forward() -> None:
    """The symbols tell an asynchronous step from one that flushes, and from other orders."""
    single = program("chain", 1, "pipedream", 3)
    assert same_meaning(single)
    assert not same_meaning(replace(single, asynchronous=False))
