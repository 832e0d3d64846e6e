"""Mistakes in what data ranks sum: gradients that are left out, doubled, early, or elsewhere."""

from dataclasses import replace
from typing import Any

import pytest

from parcompiler.lower import Lowered
from tests.verifier.edits import dropped, edited, moved, rewritten, swapped, texts
from tests.verifier.programs import DEEP, OWN, program

RULE = "every gradient is averaged over the data ranks: "
REDUCED = "every copy of a parameter is reduced: "
LINE = "REDUCE_GRADIENTS bucket_0 ranks 0"


@pytest.fixture
def chain() -> Lowered:
    """Two pipeline coordinates, two layers on each, one bucket for each."""
    return program("chain", 2, "1f1b", 3, data=2)


def with_bucket(lowered: Lowered, k: int, /, **changes: Any) -> Lowered:
    """The program with some fields of one bucket changed."""
    found = list(lowered.buckets)
    found[k] = replace(found[k], **changes)
    return replace(lowered, buckets=tuple(found))


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        *((name, schedule) for name in OWN for schedule in ("gpipe", "1f1b", "zb-h1")),
        *((name, schedule) for name in DEEP for schedule in ("interleaved", "zb-v", "v-min")),
    ],
)
def test_what_lowering_makes_is_legal(name: str, schedule: str) -> None:
    assert texts(program(name, 2, schedule, 4, data=2)) == []


def test_a_bucket_that_is_never_summed_is_found(chain: Lowered) -> None:
    assert texts(dropped(chain, 0, LINE)) == [
        REDUCED + "rank 0 never sums bucket_0 (layers.1.bias and 3 more)"
    ]


def test_a_bucket_that_is_summed_twice_is_found(chain: Lowered) -> None:
    mutant = edited(chain, 0, lambda lines: lines.insert(-1, LINE))
    assert texts(mutant) == [f"every instruction stands once: rank 0: {LINE} stands 2 times"]


def test_a_sum_over_other_ranks_is_found(chain: Lowered) -> None:
    wrong = "REDUCE_GRADIENTS bucket_0 ranks 0,1"
    assert REDUCED + f"rank 0: {wrong}: layers.1.bias and 3 more is on rank 0" in texts(
        rewritten(chain, 0, LINE, wrong)
    )


def test_a_sum_under_another_label_is_found(chain: Lowered) -> None:
    wrong = "REDUCE_GRADIENTS bucket_7 ranks 0"
    assert texts(rewritten(chain, 0, LINE, wrong)) == [
        REDUCED + "rank 0 never sums bucket_0 (layers.1.bias and 3 more)",
        REDUCED + f"rank 0: {wrong}: no tensor has this label",
    ]


def test_the_bucket_of_another_rank_is_found(chain: Lowered) -> None:
    found = texts(rewritten(chain, 0, LINE, "REDUCE_GRADIENTS bucket_1 ranks 0"))
    assert any("layers.3.bias and 3 more is on rank 1" in text for text in found)


def test_a_sum_before_the_last_backward_is_found(chain: Lowered) -> None:
    assert texts(moved(chain, 0, LINE, before="BACKWARD stage 0 mb 2")) == [
        f"nothing is used before it is there: rank 0: {LINE} stands before BACKWARD stage 0 mb 2"
    ]


def test_a_sum_before_the_last_gradients_of_weights_is_found() -> None:
    lowered = program("chain", 2, "zb-h1", 4, data=2)
    mutant = moved(lowered, 0, LINE, before="BACKWARD_WEIGHT stage 0 mb 3")
    assert len(texts(mutant)) == 1
    assert f"{LINE} stands before BACKWARD_WEIGHT stage 0 mb 3" in texts(mutant)[0]


def test_a_sum_before_the_last_of_several_stages_is_found() -> None:
    lowered = program("knots", 2, "interleaved", 2, virtual_stages=2, data=2)
    both = [
        item
        for item in lowered.buckets
        if item.ranks == (0,) and any(_stages(lowered, name) > 1 for name in item.names)
    ]
    for item in both:
        line = f"REDUCE_GRADIENTS {item.label} ranks 0"
        assert texts(moved(lowered, 0, line, before="BACKWARD stage 0 mb 1"))


def _stages(lowered: Lowered, name: str) -> int:
    return sum(name in stage.tensors for stage in lowered.stages)


def test_a_parameter_that_is_in_no_bucket_is_found(chain: Lowered) -> None:
    mutant = with_bucket(chain, 0, names=chain.buckets[0].names[1:])
    assert texts(mutant) == [RULE + "layers.1.bias is in no bucket of rank 0"]


def test_a_parameter_in_two_buckets_is_found(chain: Lowered) -> None:
    mutant = with_bucket(chain, 1, names=(*chain.buckets[1].names, "layers.0.bias"))
    assert RULE + "layers.0.bias is summed 2 times (bucket_0, bucket_1)" in texts(mutant)
    assert RULE + "layers.0.bias is on rank 0, and bucket_1 is of rank 1" in texts(mutant)
    twice = with_bucket(chain, 0, names=(*chain.buckets[0].names, "layers.0.bias"))
    assert RULE + "bucket_0 has layers.0.bias 2 times" in texts(twice)


def test_what_is_tied_and_also_in_a_bucket_is_found() -> None:
    lowered = program("ties", 4, "1f1b", 2, data=2)
    name = lowered.tied[0].name
    mutant = with_bucket(lowered, 0, names=(*lowered.buckets[0].names, name))
    assert RULE + f"{name} is on ranks 0, 3, and also in bucket_0" in texts(mutant)


def test_a_bucket_of_what_has_no_gradient_is_found(chain: Lowered) -> None:
    mutant = with_bucket(chain, 0, names=(*chain.buckets[0].names, "nothing"))
    assert RULE + "bucket_0 sums gradients of nothing, which the model does not have" in texts(
        mutant
    )
    empty = with_bucket(chain, 0, names=())
    assert RULE + "bucket_0 is empty" in texts(empty)


def test_two_sums_of_one_label_are_found(chain: Lowered) -> None:
    assert RULE + "2 sums have the label bucket_1" in texts(with_bucket(chain, 0, label="bucket_1"))


def test_buckets_without_data_ranks_are_found(chain: Lowered) -> None:
    found = texts(replace(chain, data=1))
    assert RULE + "there is one data rank, and bucket_0 sums over several" in found


def test_data_ranks_without_buckets_are_found() -> None:
    found = texts(replace(program("chain", 2, "1f1b", 3), data=2))
    assert found[0] == RULE + "layers.0.weight is in no bucket of rank 0"
    assert len(found) == 8


def test_the_order_of_sums_is_the_same_on_all_data_ranks_by_construction() -> None:
    lowered = program("deep chain", 2, "interleaved", 2, virtual_stages=2, data=2)
    first, second = (f"REDUCE_GRADIENTS {item.label} ranks 0" for item in lowered.buckets[:2])
    assert texts(swapped(lowered, 0, first, second))  # the second one would be too early
