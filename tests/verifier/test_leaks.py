"""What is kept for a later use is used and released: everything that would be left is a fault."""

from collections.abc import Callable

import pytest

from parcompiler.lower import Lowered
from tests.verifier.edits import dropped, edited, texts, with_stage
from tests.verifier.oracle import same_meaning
from tests.verifier.programs import program


def _unused_message(lowered: Lowered) -> Lowered:
    mutant = edited(lowered, 0, lambda lines: lines.insert(-1, "SEND layers_0 mb 0 to 2"))
    return edited(mutant, 2, lambda lines: lines.insert(-1, "RECV layers_0 mb 0 from 0"))


def _unused_gradient(lowered: Lowered) -> Lowered:
    mutant = edited(lowered, 2, lambda lines: lines.insert(-1, "SEND layers_0.grad mb 0 to 0"))
    return edited(mutant, 0, lambda lines: lines.insert(-1, "RECV layers_0.grad mb 0 from 2"))


def _unsent_result(lowered: Lowered) -> Lowered:
    mutant = dropped(lowered, 0, "SEND layers_0 mb 2 to 1")
    return dropped(mutant, 1, "RECV layers_0 mb 2 from 0")


def _unread_result(lowered: Lowered) -> Lowered:
    return with_stage(lowered, 2, gives=("layers_2",))


def _late_receive(lowered: Lowered) -> Lowered:
    def edit(lines: list[str]) -> None:
        lines.remove("RECV layers_0 mb 2 from 0")
        lines.append("RECV layers_0 mb 2 from 0")

    return edited(lowered, 1, edit)


def _no_backward(lowered: Lowered) -> Lowered:
    return dropped(lowered, 2, "BACKWARD_INPUT stage 2 mb 1", "BACKWARD_WEIGHT stage 2 mb 1")


def _no_weights(lowered: Lowered) -> Lowered:
    return dropped(lowered, 2, "BACKWARD_WEIGHT stage 2 mb 1")


@pytest.mark.parametrize(
    ("leak", "message"),
    [
        (_unused_message, "rank 2 receives layers_0 mb 0 from rank 0: no stage of rank 2 receives"),
        (_unused_gradient, "rank 0 receives layers_0.grad mb 0 from rank 2: no stage of rank 2"),
        (_unsent_result, "layers_0 mb 2 never goes from rank 0 to rank 1, which needs it"),
        (_unread_result, "stage 2 gives layers_2, which no other stage receives"),
        (_late_receive, "FORWARD stage 1 mb 2 stands before RECV layers_0 mb 2 from 0"),
        (_no_backward, "rank 2 has no BACKWARD stage 2 mb 1"),
        (_no_weights, "rank 2 has no BACKWARD_WEIGHT stage 2 mb 1 after its BACKWARD_INPUT"),
    ],
)
def test_what_would_be_left_is_a_fault(leak: Callable[[Lowered], Lowered], message: str) -> None:
    mutant = leak(program("chain", 3, "zb-h1", 3))
    found = texts(mutant)
    assert any(message in text for text in found), found


def test_the_symbols_know_of_leaks() -> None:
    assert not same_meaning(_unused_message(program("chain", 3, "zb-h1", 3)))
