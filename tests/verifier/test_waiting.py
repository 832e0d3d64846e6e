"""Ranks that wait for each other are found, printed as a circle, and found fast."""

import time

import pytest
import torch

from parcompiler.capture import capture
from parcompiler.capture.blocks import Cut, cut
from parcompiler.graph import Graph
from parcompiler.lower import lower
from parcompiler.timeline import StageCost
from parcompiler.verifier import MemoryLimits, faults
from tests.verifier.edits import dropped, moved, swapped, texts, with_lists
from tests.verifier.oracle import same_meaning
from tests.verifier.programs import WIDTH, Chain, plan, program, skipping

START = "no ranks wait for each other: "
ADVICE = "(a receive must stand further up, or a send further down)"


def test_sends_that_cross_are_a_circle() -> None:
    lowered = program("chain", 2, "1f1b", 3)
    late = moved(lowered, 0, "RECV layers_1.grad mb 0 from 1", before="BACKWARD stage 0 mb 0")
    assert texts(late) == []  # a send waits no longer than for the receive
    late = moved(late, 1, "RECV layers_1 mb 1 from 0", before="FORWARD stage 1 mb 1")
    assert texts(late) == [
        f"{START}2 ranks do, each for the next {ADVICE}:\n"
        "      rank 0: SEND layers_1 mb 1 to 1 (waits for rank 1: RECV layers_1 mb 1 from 0)\n"
        "      rank 1: SEND layers_1.grad mb 0 to 0 "
        "(waits for rank 0: RECV layers_1.grad mb 0 from 1)"
    ]
    assert not same_meaning(late)


def test_a_circle_may_have_three_ranks() -> None:
    lowered = program("skips", 3, "gpipe", 2, (1, 1, 2))
    # Rank 0 gives to rank 2 for micro-batch 1 before it gives to rank 1 for micro-batch 0.
    first, order = skipping(lowered)
    line = "SEND layers_0 mb 0 to 1"
    mutant = moved(lowered, 0, "FORWARD stage 0 mb 1", before=line)
    mutant = moved(mutant, 0, f"SEND {first} mb 1 to 2", before=line)
    assert texts(mutant) == []
    for name in (first, order):
        mutant = moved(mutant, 2, f"RECV {name} mb 1 from 0", before="FORWARD stage 2 mb 1")
    assert texts(mutant) == [
        f"{START}3 ranks do, each for the next {ADVICE}:\n"
        f"      rank 0: SEND {first} mb 1 to 2 (waits for rank 2: RECV {first} mb 1 from 0)\n"
        "      rank 2: FORWARD stage 2 mb 0 (waits for rank 1: SEND layers_1 mb 0 to 2)\n"
        "      rank 1: FORWARD stage 1 mb 0 (waits for rank 0: SEND layers_0 mb 0 to 1)"
    ]
    assert not same_meaning(mutant)


def test_compute_that_waits_for_its_own_result_is_a_circle() -> None:
    lowered = program("chain", 2, "gpipe", 2)
    mutant = moved(lowered, 0, "RECV layers_1.grad mb 0 from 1", before="FORWARD stage 0 mb 0")
    mutant = moved(mutant, 0, "BACKWARD stage 0 mb 0", before="FORWARD stage 0 mb 0")
    assert START + "2 ranks do" in "\n".join(texts(mutant))


def test_collectives_of_two_groups_may_be_a_circle() -> None:
    lowered = program("ties", 4, "naive", 1)
    first, second = "REDUCE_GRADIENTS tied_2 ranks 1,3", "REDUCE_GRADIENTS tied_3 ranks 1,2,3"
    assert texts(swapped(lowered, 3, first, second)) == [
        f"{START}2 ranks do, each for the next {ADVICE}:\n"
        f"      rank 1: {first} (waits for rank 3: {first})\n"
        f"      rank 3: {second} (waits for rank 1: {second})"
    ]


def test_what_is_missing_keeps_nobody_waiting() -> None:
    lowered = program("ties", 4, "1f1b", 2)
    mutant = dropped(lowered, 3, "REDUCE_GRADIENTS tied_3 ranks 1,2,3", "SHARE_LOSS from 3")
    mutant = dropped(mutant, 2, "RECV layers_2 mb 0 from 1")
    assert [text.partition(":")[0] for text in texts(mutant)] == [
        "every message is sent and received",
        "every copy of a parameter is reduced",
        "every rank gets the loss",
    ]


@pytest.fixture(scope="module")
def long() -> tuple[Graph, Cut]:
    """A model of 128 blocks."""
    graph = capture(Chain(128), (torch.zeros(2, WIDTH),))
    return graph, cut(graph, 1)


@pytest.mark.parametrize(
    ("schedule", "each", "microbatches"),
    [
        ("1f1b", 1, 512),
        ("zb-v", 2, 128),
        pytest.param("zb-v", 2, 512, marks=pytest.mark.sweep),
    ],
)
def test_a_large_program_is_proved_in_seconds(
    long: tuple[Graph, Cut], schedule: str, each: int, microbatches: int
) -> None:
    graph, parts = long
    blocks, size = [block.name for block in parts.blocks], 2 // each
    names = [blocks[k : k + size] for k in range(0, len(blocks), size)]
    lowered = lower(graph, plan("chain", names, schedule, microbatches, each), parts)
    assert lowered.size == 64
    count = sum(map(len, (*lowered.instructions, *lowered.evaluation)))
    assert count > 290_000 * each * microbatches / 512
    memory = MemoryLimits([StageCost(1.0, 2.0, 1, 1)] * 64 * each, [2**30] * 64)
    start = time.process_time()
    assert list(faults(lowered, memory)) == []
    # 1.7 s, and with two stages on a rank 3.5 s, of 512 micro-batches where nothing else runs
    assert time.process_time() - start < 10 * each * microbatches / 512
    if each == 1:
        lists = [list(lines) for lines in lowered.instructions]
        lists[40].reverse()
        start = time.process_time()
        rules = {fault.rule for fault in faults(with_lists(lowered, lists))}
        assert "no ranks wait for each other" in rules
        assert time.process_time() - start < 10


def test_gradients_that_are_used_before_their_maker_ends_are_a_circle() -> None:
    lowered = program("chain", 2, "zb-h1", 2)
    mutant = moved(lowered, 0, "RECV layers_1.grad mb 0 from 1", before="FORWARD stage 0 mb 1")
    mutant = moved(mutant, 0, "BACKWARD_INPUT stage 0 mb 0", before="FORWARD stage 0 mb 1")
    assert texts(mutant) == []
    mutant = moved(mutant, 1, "FORWARD stage 1 mb 1", before="BACKWARD_INPUT stage 1 mb 0")
    mutant = moved(mutant, 1, "RECV layers_1 mb 1 from 0", before="FORWARD stage 1 mb 1")
    assert texts(mutant) == [
        f"{START}2 ranks do, each for the next {ADVICE}:\n"
        "      rank 0: BACKWARD_INPUT stage 0 mb 0 "
        "(waits for rank 1: SEND layers_1.grad mb 0 to 0)\n"
        "      rank 1: FORWARD stage 1 mb 1 (waits for rank 0: SEND layers_1 mb 1 to 1)"
    ]
    assert not same_meaning(mutant)
