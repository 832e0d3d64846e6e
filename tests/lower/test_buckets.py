"""Buckets: which gradients data ranks sum together, and where that stands in the lists."""

from dataclasses import replace

import pytest
import torch

from parcompiler.instruction import MESSAGES, Kind
from parcompiler.lower import Lowered, buckets
from tests.verifier.programs import program

BIASES_TOGETHER = [
    ("layers.3.weight",),
    ("layers.2.weight",),
    ("layers.3.bias", "layers.2.bias", "layers.1.bias"),
    ("layers.1.weight",),
    ("layers.0.bias",),
    ("layers.0.weight",),
]


def lines(lowered: Lowered, rank: int) -> list[str]:
    return [str(line) for line in lowered.instructions[rank]]


def test_a_stage_is_summed_behind_its_last_backward_and_what_that_sends() -> None:
    lowered = program("chain", 2, "1f1b", 3, data=2)
    assert lines(lowered, 0)[-3:] == [
        "BACKWARD stage 0 mb 2",
        "REDUCE_GRADIENTS bucket_0 ranks 0",
        "SHARE_LOSS from 1",
    ]
    (name,) = lowered.values
    assert lines(lowered, 1)[-4:] == [
        "BACKWARD stage 1 mb 2",
        f"SEND {name}.grad mb 2 to 0",
        "REDUCE_GRADIENTS bucket_1 ranks 1",
        "SHARE_LOSS from 1",
    ]


def test_the_order_in_a_bucket_is_that_in_which_gradients_become_final() -> None:
    lowered = program("chain", 2, "1f1b", 3, data=2)
    assert [item.names for item in lowered.buckets] == [
        ("layers.1.bias", "layers.1.weight", "layers.0.bias", "layers.0.weight"),
        ("layers.3.bias", "layers.3.weight", "layers.2.bias", "layers.2.weight"),
    ]


@pytest.mark.parametrize(
    ("schedule", "stages"), [("interleaved", [2, 0, 3, 1]), ("zb-v", [3, 0, 2, 1])]
)
def test_of_several_stages_the_first_to_end_is_summed_while_others_go_back(
    schedule: str, stages: list[int]
) -> None:
    lowered = program("deep chain", 2, schedule, 4, virtual_stages=2, data=2)
    kinds = [line.kind for line in lowered.instructions[0] if line.kind not in MESSAGES]
    first = kinds.index(Kind.REDUCE_GRADIENTS)
    assert {Kind.BACKWARD, Kind.BACKWARD_WEIGHT} & set(kinds[first:])
    assert [item.stage for item in lowered.buckets] == stages


def test_what_several_ranks_hold_is_in_no_bucket() -> None:
    lowered = program("ties", 4, "1f1b", 2, data=3)
    tied = {item.name for item in lowered.tied}
    summed = [name for item in lowered.buckets for name in item.names]
    assert len(tied) == 4
    assert not tied & set(summed)
    trained = {item.name for item in lowered.graph.parameters if item.trainable}
    assert sorted(summed) == sorted(trained - tied)


def test_a_bucket_is_full_at_its_size_and_has_one_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parcompiler.problem.BUCKET", 100)  # a weight is 64 bytes, a bias 16
    lowered = program("chain", 1, "1f1b", 1, data=2)
    assert [item.names for item in lowered.buckets] == [
        ("layers.3.bias", "layers.3.weight", "layers.2.bias"),
        ("layers.2.weight", "layers.1.bias"),
        ("layers.1.weight", "layers.0.bias"),
        ("layers.0.weight",),
    ]
    parameters = [
        replace(p, dtype=torch.float64 if p.name.endswith("bias") else p.dtype)
        for p in lowered.graph.parameters
    ]
    graph = replace(lowered.graph, parameters=tuple(parameters))
    found = buckets.buckets(graph, lowered.stages, set(), lowered.instructions)
    assert [item.names for item in found] == BIASES_TOGETHER


def test_small_gradients_go_together_past_one_that_is_a_bucket_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("parcompiler.problem.BUCKET", 50)  # a weight is 64 bytes, a bias 16
    lowered = program("chain", 1, "1f1b", 1, data=2)
    assert [item.names for item in lowered.buckets] == BIASES_TOGETHER


def test_one_data_rank_has_no_buckets() -> None:
    lowered = program("chain", 2, "1f1b", 3)
    assert lowered.buckets == ()
    assert not any(line.kind is Kind.REDUCE_GRADIENTS for line in lowered.instructions[0])
