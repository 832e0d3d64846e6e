"""Mistakes in instruction lists, each written by hand and found with its message."""

import pytest

from parcompiler.errors import PlanError
from parcompiler.lower import Lowered
from parcompiler.verifier import Fault, faults, verify
from tests.verifier.edits import dropped, edited, moved, rewritten, swapped, texts
from tests.verifier.programs import program, several, skipping


@pytest.fixture
def chain() -> Lowered:
    """Three ranks, 1F1B, five micro-batches: layers_0 from 0 to 1, layers_1 from 1 to 2."""
    return program("chain", 3, "1f1b", 5, (1, 1, 2))


@pytest.fixture
def ties() -> Lowered:
    """Ranks 0 and 3 share two tensors, ranks 1 and 3 one, and ranks 1, 2 and 3 another."""
    return program("ties", 4, "1f1b", 2)


def test_a_fault_names_its_rule_and_all_faults_are_one_error(chain: Lowered) -> None:
    mutant = dropped(dropped(chain, 0, "SEND layers_0 mb 2 to 1"), 1, "FORWARD stage 1 mb 4")
    first, second = sorted(faults(mutant), key=str)
    assert first == Fault(
        "every message is sent and received",
        "rank 0 never sends layers_0 mb 2 to rank 1, which receives it",
    )
    assert second.rule == "every stage runs every micro-batch"
    with pytest.raises(PlanError) as caught:
        verify(mutant)
    assert str(caught.value) == (
        "the lowered program breaks 2 rules:\n"
        "  * every stage runs every micro-batch: rank 1 has no FORWARD stage 1 mb 4\n"
        "  * every message is sent and received: rank 0 never sends layers_0 mb 2 to rank 1, "
        "which receives it"
    )


def test_one_fault_is_one_rule(chain: Lowered) -> None:
    with pytest.raises(PlanError, match=r"the lowered program breaks 1 rule:\n  \* every stage"):
        verify(dropped(chain, 0, "BACKWARD stage 0 mb 0"))


def test_many_faults_are_counted(chain: Lowered) -> None:
    mutant = edited(chain, 1, lambda lines: lines.extend(f"SEND x{k} mb 0 to 0" for k in range(30)))
    with pytest.raises(PlanError, match=r"breaks 30 rules:\n(.*\n){20}  … and 10 more"):
        verify(mutant)


def test_a_receive_that_is_missing_is_found(chain: Lowered) -> None:
    assert texts(dropped(chain, 2, "RECV layers_1 mb 3 from 1")) == [
        "every message is sent and received: "
        "rank 2 never receives layers_1 mb 3 from rank 1, which sends it"
    ]


def test_a_gradient_that_is_not_sent_is_found(chain: Lowered) -> None:
    assert texts(dropped(chain, 2, "SEND layers_1.grad mb 0 to 1")) == [
        "every message is sent and received: "
        "rank 2 never sends layers_1.grad mb 0 to rank 1, which receives it"
    ]


def test_a_message_that_lacks_both_ends_is_found(chain: Lowered) -> None:
    half = dropped(chain, 2, *(f"RECV layers_1 mb {i} from 1" for i in range(5)))
    mutant = dropped(half, 1, *(f"SEND layers_1 mb {i} to 2" for i in range(5)))
    assert texts(mutant) == [
        "every message is sent and received: layers_1 mb 0, 1, 2, 3 … (5 of them) never goes from "
        "rank 1 to rank 2, which needs it"
    ]


def test_receives_that_are_swapped_are_found() -> None:
    lowered = program("chain", 2, "gpipe", 3)
    first, second = "RECV layers_1.grad mb 0 from 1", "RECV layers_1.grad mb 1 from 1"
    assert "messages keep their order: rank 1 -> rank 0: message 1 is layers_1.grad mb 0 when " in (
        "\n".join(texts(swapped(lowered, 0, first, second)))
    )


def test_the_order_of_two_values_in_one_forward_matters() -> None:
    lowered = program("skips", 3, "1f1b", 3, (1, 1, 2))
    first, order = skipping(lowered)
    assert texts(swapped(lowered, 1, f"RECV {first} mb 2 from 0", f"RECV {order} mb 2 from 0")) == [
        f"messages keep their order: rank 0 -> rank 1: message 7 is {first} mb 2 when sent and "
        f"{order} mb 2 when received"
    ]


def test_the_order_stays_comparable_when_a_message_is_missing() -> None:
    lowered = program("skips", 3, "1f1b", 3, (1, 1, 2))
    first, order = skipping(lowered)
    mutant = swapped(lowered, 1, f"RECV {first} mb 2 from 0", f"RECV {order} mb 2 from 0")
    mutant = dropped(mutant, 0, f"SEND {first} mb 1 to 1")
    rules = [text.partition(":")[0] for text in texts(mutant)]
    assert rules == ["every message is sent and received", "messages keep their order"]


def test_a_wrong_peer_is_found(chain: Lowered) -> None:
    assert texts(rewritten(chain, 0, "SEND layers_0 mb 0 to 1", "SEND layers_0 mb 0 to 2")) == [
        "every message is sent and received: "
        "rank 0 never sends layers_0 mb 0 to rank 1, which receives it",
        "no message is in vain: "
        "rank 0 sends layers_0 mb 0 to rank 2: no stage of rank 2 receives layers_0",
    ]


@pytest.mark.parametrize("peer", [0, 3])
def test_a_peer_must_be_another_rank_that_exists(chain: Lowered, peer: int) -> None:
    line = f"SEND layers_0 mb 0 to {peer}"
    assert texts(rewritten(chain, 0, "SEND layers_0 mb 0 to 1", line))[0] == (
        f"every instruction fits its rank: rank 0: {line}: its peer must be another rank "
        "(ranks: 0 to 2)"
    )


def test_a_wrong_microbatch_is_found(chain: Lowered) -> None:
    found = texts(rewritten(chain, 1, "SEND layers_1 mb 3 to 2", "SEND layers_1 mb 2 to 2"))
    assert found == [
        "every instruction stands once: rank 1: SEND layers_1 mb 2 to 2 stands 2 times",
        "every message is sent and received: "
        "rank 1 never sends layers_1 mb 3 to rank 2, which receives it",
    ]


def test_a_microbatch_that_does_not_exist_is_found(chain: Lowered) -> None:
    found = texts(rewritten(chain, 1, "FORWARD stage 1 mb 3", "FORWARD stage 1 mb 7"))
    assert found == [
        "every instruction fits its rank: rank 1: FORWARD stage 1 mb 7: there is no such "
        "micro-batch (micro-batches: 0 to 4)",
        "every stage runs every micro-batch: rank 1 has no FORWARD stage 1 mb 3",
    ]


def test_a_value_in_the_place_of_another_is_found(chain: Lowered) -> None:
    found = texts(rewritten(chain, 1, "SEND layers_1 mb 3 to 2", "SEND layers_0 mb 3 to 2"))
    assert found[1:] == [
        "no message is in vain: "
        "rank 1 sends layers_0 mb 3 to rank 2: rank 0 makes layers_0, not rank 1"
    ]
    found = texts(rewritten(chain, 1, "SEND layers_1 mb 3 to 2", "SEND layers_9 mb 3 to 2"))
    assert found[1:] == [
        "no message is in vain: rank 1 sends layers_9 mb 3 to rank 2: no stage makes layers_9"
    ]


def test_a_gradient_that_nobody_has_is_found() -> None:
    lowered = program("skips", 3, "gpipe", 1, (1, 1, 2))
    _, order = skipping(lowered)
    mutant = edited(lowered, 1, lambda lines: lines.append(f"SEND {order}.grad mb 0 to 0"))
    assert texts(mutant) == [
        f"no message is in vain: rank 1 sends {order}.grad mb 0 to rank 0: "
        f"{order} carries no gradient"
    ]


def test_a_forward_that_stands_twice_is_found(chain: Lowered) -> None:
    mutant = edited(chain, 2, lambda lines: lines.insert(2, "FORWARD stage 2 mb 0"))
    assert texts(mutant) == [
        "every instruction stands once: rank 2: FORWARD stage 2 mb 0 stands 2 times"
    ]


def test_a_forward_on_another_rank_is_found(chain: Lowered) -> None:
    mutant = dropped(chain, 2, "FORWARD stage 2 mb 1")
    mutant = edited(mutant, 0, lambda lines: lines.insert(0, "FORWARD stage 2 mb 1"))
    assert texts(mutant) == [
        "every instruction fits its rank: rank 0: FORWARD stage 2 mb 1: stage 2 is on rank 2",
        "every stage runs every micro-batch: rank 2 has no FORWARD stage 2 mb 1",
    ]


def test_a_stage_that_does_not_exist_is_found(chain: Lowered) -> None:
    assert texts(rewritten(chain, 2, "BACKWARD stage 2 mb 1", "BACKWARD stage 3 mb 1")) == [
        "every instruction fits its rank: rank 2: BACKWARD stage 3 mb 1: there is no such stage "
        "(stages: 0 to 2)",
        "every stage runs every micro-batch: rank 2 has no BACKWARD stage 2 mb 1",
    ]


def test_a_backward_must_follow_its_forward(chain: Lowered) -> None:
    mutant = swapped(chain, 2, "FORWARD stage 2 mb 4", "BACKWARD stage 2 mb 4")
    assert texts(mutant) == [
        "nothing is used before it is there: "
        "rank 2: BACKWARD stage 2 mb 4 stands before FORWARD stage 2 mb 4"
    ]


def test_what_is_used_must_be_received_before(chain: Lowered) -> None:
    mutant = moved(chain, 2, "RECV layers_1 mb 4 from 1", before="BACKWARD stage 2 mb 4")
    assert (
        "nothing is used before it is there: "
        "rank 2: FORWARD stage 2 mb 4 stands before RECV layers_1 mb 4 from 1"
    ) in texts(mutant)
    line = "RECV layers_1.grad mb 4 from 2"
    mutant = moved(chain, 1, line, before="SEND layers_0.grad mb 4 to 0")
    assert texts(mutant) == [
        "nothing is used before it is there: "
        "rank 1: BACKWARD stage 1 mb 4 stands before RECV layers_1.grad mb 4 from 2"
    ]


def test_what_is_sent_must_be_made_before(chain: Lowered) -> None:
    assert texts(moved(chain, 0, "SEND layers_0 mb 0 to 1", before="FORWARD stage 0 mb 0")) == [
        "nothing is used before it is there: "
        "rank 0: SEND layers_0 mb 0 to 1 stands before FORWARD stage 0 mb 0"
    ]
    line = "SEND layers_0.grad mb 4 to 0"
    assert texts(moved(chain, 1, line, before="BACKWARD stage 1 mb 4")) == [
        "nothing is used before it is there: "
        "rank 1: SEND layers_0.grad mb 4 to 0 stands before BACKWARD stage 1 mb 4"
    ]


def test_one_mistake_in_all_microbatches_is_one_fault(chain: Lowered) -> None:
    def reverse(lines: list[str]) -> None:
        forwards = [k for k, line in enumerate(lines) if line.startswith("FORWARD")]
        for k in forwards:
            lines[k], lines[k + 1] = lines[k + 1], lines[k]

    assert texts(edited(chain, 0, reverse, evaluation=True)) == [
        "nothing is used before it is there: in evaluation, rank 0: SEND layers_0 mb 0 to 1 stands "
        "before FORWARD stage 0 mb 0 (and so for mb 1, 2, 3, 4)"
    ]


def test_stages_of_one_rank_run_in_the_order_of_their_data() -> None:
    lowered = several("chain", (0, 1, 1, 0), 1)
    assert texts(swapped(lowered, 1, "FORWARD stage 1 mb 0", "FORWARD stage 2 mb 0"))[0] == (
        "nothing is used before it is there: "
        "rank 1: FORWARD stage 2 mb 0 stands before FORWARD stage 1 mb 0"
    )
    assert texts(swapped(lowered, 1, "BACKWARD stage 1 mb 0", "BACKWARD stage 2 mb 0"))[0] == (
        "nothing is used before it is there: "
        "rank 1: BACKWARD stage 1 mb 0 stands before BACKWARD stage 2 mb 0"
    )


def test_running_statistics_see_the_microbatches_in_order() -> None:
    lowered = program("norms", 2, "gpipe", 3)
    mutant = swapped(lowered, 0, "FORWARD stage 0 mb 0", "FORWARD stage 0 mb 1")
    mutant = swapped(mutant, 0, "SEND layers_1 mb 0 to 1", "SEND layers_1 mb 1 to 1")
    mutant = swapped(mutant, 1, "RECV layers_1 mb 0 from 0", "RECV layers_1 mb 1 from 0")
    assert (
        "buffers see the micro-batches in order: "
        "rank 0: FORWARD stage 0 mb 1 stands before FORWARD stage 0 mb 0"
    ) in texts(mutant)


def test_an_evaluation_has_forwards_only(chain: Lowered) -> None:
    def spoil(lines: list[str]) -> None:
        lines += ["BACKWARD stage 1 mb 0", "SEND layers_0.grad mb 0 to 0"]

    start = "every instruction fits its rank: in evaluation, rank 1: "
    assert texts(edited(chain, 1, spoil, evaluation=True)) == [
        start + "BACKWARD stage 1 mb 0: there is nothing to go back through",
        "no message is in vain: in evaluation, rank 1 sends layers_0.grad mb 0 to rank 0: "
        "there are no gradients",
    ]


def test_a_reduction_that_one_rank_lacks_is_found(ties: Lowered) -> None:
    assert texts(dropped(ties, 3, "REDUCE_GRADIENTS tied_1 ranks 0,3")) == [
        "every copy of a parameter is reduced: rank 3 never sums tied_1 (layers.0.bias)"
    ]


def test_reductions_that_are_swapped_on_one_rank_are_found(ties: Lowered) -> None:
    first, second = "REDUCE_GRADIENTS tied_0 ranks 0,3", "REDUCE_GRADIENTS tied_1 ranks 0,3"
    assert texts(swapped(ties, 3, first, second)) == [
        "collectives keep their order: rank 0 sums tied_0, tied_1, and rank 3 sums tied_1, tied_0"
    ]


def test_reductions_of_groups_that_share_one_rank_may_stand_in_any_order(ties: Lowered) -> None:
    first, second = "REDUCE_GRADIENTS tied_0 ranks 0,3", "REDUCE_GRADIENTS tied_2 ranks 1,3"
    assert texts(moved(ties, 3, second, before=first)) == []


def test_a_reduction_that_does_not_exist_or_is_of_others_is_found(ties: Lowered) -> None:
    line = "REDUCE_GRADIENTS tied_2 ranks 1,3"
    assert texts(rewritten(ties, 1, line, "REDUCE_GRADIENTS tied_9 ranks 1,3")) == [
        "every copy of a parameter is reduced: rank 1 never sums tied_2 (layers.1.weight)",
        "every copy of a parameter is reduced: rank 1: REDUCE_GRADIENTS tied_9 ranks 1,3: "
        "no tensor has this label",
    ]
    assert texts(rewritten(ties, 1, line, "REDUCE_GRADIENTS tied_2 ranks 0,1")) == [
        "every copy of a parameter is reduced: rank 1: REDUCE_GRADIENTS tied_2 ranks 0,1: "
        "layers.1.weight is on ranks 1, 3"
    ]
    assert texts(rewritten(ties, 1, line, "REDUCE_GRADIENTS tied_2 ranks 2,3"))[0] == (
        "every instruction fits its rank: rank 1: REDUCE_GRADIENTS tied_2 ranks 2,3: "
        "it leaves out its own rank"
    )


def test_a_reduction_comes_after_all_gradients(ties: Lowered) -> None:
    line = "REDUCE_GRADIENTS tied_2 ranks 1,3"
    assert texts(moved(ties, 1, line, before="BACKWARD stage 1 mb 1"))[0] == (
        f"nothing is used before it is there: rank 1: {line} stands before BACKWARD stage 1 mb 1"
    )


def test_a_reduction_happens_once(ties: Lowered) -> None:
    line = "REDUCE_GRADIENTS tied_2 ranks 1,3"
    assert texts(edited(ties, 1, lambda lines: lines.insert(-1, line))) == [
        f"every instruction stands once: rank 1: {line} stands 2 times"
    ]


def test_the_loss_comes_from_the_rank_that_has_it(chain: Lowered) -> None:
    assert texts(rewritten(chain, 0, "SHARE_LOSS from 2", "SHARE_LOSS from 1")) == [
        "every rank gets the loss: rank 0: SHARE_LOSS from 1: the loss is on rank 2"
    ]


def test_every_rank_gets_the_loss_once(chain: Lowered) -> None:
    assert texts(dropped(chain, 1, "SHARE_LOSS from 2")) == [
        "every rank gets the loss: rank 1 has no SHARE_LOSS"
    ]
    assert texts(edited(chain, 1, lambda lines: lines.append("SHARE_LOSS from 2"))) == [
        "every instruction stands once: rank 1: SHARE_LOSS from 2 stands 2 times"
    ]


def test_the_loss_is_shared_when_it_is_complete(chain: Lowered) -> None:
    mutant = moved(chain, 2, "SHARE_LOSS from 2", before="FORWARD stage 2 mb 4")
    assert texts(mutant)[0] == (
        "nothing is used before it is there: "
        "rank 2: SHARE_LOSS from 2 stands before FORWARD stage 2 mb 4"
    )
