"""The memory rule: what a rank holds along its list, and the message when that is too much."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from parcompiler.errors import InputError, PlanError
from parcompiler.lower import Lowered
from parcompiler.prices import simulate_lowered
from parcompiler.schedules import SCHEDULES, stages_per_rank
from parcompiler.timeline import First, StageCost
from parcompiler.verifier import MemoryLimits, faults, verify
from tests.verifier.edits import dropped, moved
from tests.verifier.programs import blocks, program

MIB = 2**20


def costs(lowered: Lowered) -> list[StageCost]:
    """Stages of which each keeps another number of bytes."""
    stages = range(len(lowered.stages))
    return [
        StageCost(
            1.0, 2.0, 1000 * (j + 1), 10 + 3 * j, 1.0,
            update=300 * (j % 2), first=First(70 + j, 30, 5, 8, 6), backward_more=9,
        )
        for j in stages
    ]  # fmt: skip


def even(lowered: Lowered, saved: int) -> list[StageCost]:
    """Stages of which each has 1 MiB resident."""
    return [StageCost(1.0, 2.0, MIB, saved) for _ in lowered.stages]


def too_full(lowered: Lowered, limits: Sequence[int]) -> list[int]:
    """The ranks that hold too much in training."""
    found = [fault for fault in faults(lowered, MemoryLimits(costs(lowered), limits))]
    details = [fault.detail for fault in found if fault.rule == "memory suffices"]
    return [int(text.split()[1]) for text in details if text.startswith("rank")]


@pytest.fixture
def chain() -> Lowered:
    """Four ranks, 1F1B, eight micro-batches; a message has 32 bytes."""
    lowered = program("chain", 4, "1f1b", 8)
    assert {value.nbytes for value in lowered.values.values()} == {32}
    return lowered


def test_a_rank_that_holds_too_much_is_named_with_what_it_holds(chain: Lowered) -> None:
    limits = [6 * MIB, 6 * MIB, 2 * MIB, 6 * MIB]
    with pytest.raises(PlanError) as caught:
        verify(chain, MemoryLimits(even(chain, MIB), limits))
    assert str(caught.value) == (
        "the lowered program breaks 1 rule:\n"
        "  * memory suffices: rank 2 holds 3 MiB at RECV layers_2.grad mb 0 from 3, 1 MiB too "
        "much (limit 2 MiB; resident 1 MiB, activations of 2 micro-batches 2 MiB, messages 128 B)"
    )


def test_what_fits_exactly_is_no_fault(chain: Lowered) -> None:
    limits = [5 * MIB + 32, 4 * MIB + 160, 3 * MIB + 128, 2 * MIB + 64]
    found = [str(fault) for fault in faults(chain, MemoryLimits(even(chain, MIB), limits))]
    assert found == []
    for rank in range(4):
        tight = [limit - (r == rank) for r, limit in enumerate(limits)]
        (fault,) = faults(chain, MemoryLimits(even(chain, MIB), tight))
        assert fault.detail.startswith(f"rank {rank} holds")
        assert "1 B too much" in fault.detail


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["chain", "deep skips", "t5"])
def test_memory_is_that_of_the_simulation_with_instant_messages(name: str, schedule: str) -> None:
    each = stages_per_rank(schedule, 1)
    for ranks, microbatches in ((1, 2), (2, 2), (2, 5), (3, 2), (3, 7)):
        if ranks * each > len(blocks(name, 2)):
            continue
        lowered = program(name, ranks, schedule, microbatches, virtual_stages=each)
        peaks = simulate_lowered(lowered, costs(lowered)).peak_memory
        assert too_full(lowered, peaks) == []
        for rank, peak in enumerate(peaks):
            tight = [*peaks[:rank], peak - 1, *peaks[rank + 1 :]]
            assert too_full(lowered, tight) == [rank]


def test_activations_are_kept_until_the_weights_have_their_gradient() -> None:
    lowered = program("chain", 2, "zb-h1", 3)
    cost = MemoryLimits(even(lowered, MIB), [3 * MIB + 128] * 2)
    assert list(faults(lowered, cost)) == []
    late = moved(lowered, 0, "BACKWARD_WEIGHT stage 0 mb 0", before="SHARE_LOSS from 1")
    (fault,) = faults(late, cost)
    assert "at FORWARD stage 0 mb 2" in fault.detail
    assert "activations of 3 micro-batches 3 MiB" in fault.detail


def test_stages_of_one_rank_are_counted_together() -> None:
    lowered = program("deep chain", 2, "interleaved", 4, virtual_stages=2)
    (first, *_) = faults(lowered, MemoryLimits(even(lowered, MIB), [0, 0]))
    assert "resident 2 MiB, activations of 3 + 2 micro-batches 5 MiB" in first.detail


def test_gradients_are_resident_from_the_first_backward_on(chain: Lowered) -> None:
    cost = StageCost(1.0, 2.0, 2 * MIB, MIB // 4, first=First(MIB))
    (fault, *_) = faults(chain, MemoryLimits([cost] * 4, [2 * MIB, 4 * MIB, 4 * MIB, 4 * MIB]))
    assert "resident 2 MiB, activations of 4 micro-batches 1 MiB" in fault.detail


def test_too_little_for_the_optimizers_step_is_told(chain: Lowered) -> None:
    cost = StageCost(1.0, 2.0, 2 * MIB, 0, update=MIB, first=First(MIB))
    memory = MemoryLimits([cost] * 4, [3 * MIB, 3 * MIB - 1, 3 * MIB, 3 * MIB])
    found = [fault.detail for fault in faults(chain, memory)]
    assert found == [
        "rank 1 holds 3 MiB in the optimizer's step, 1 B too much (limit 3 MiB; resident 2 MiB, "
        "shards of summed gradients 1 MiB more)"
    ]


def test_a_receive_that_is_posted_early_takes_memory(chain: Lowered) -> None:
    limits = [10 * MIB] * 3 + [2 * MIB + 64]
    memory = MemoryLimits(even(chain, MIB), limits)
    assert list(faults(chain, memory)) == []
    early = chain
    for i in range(1, 4):
        early = moved(early, 3, f"RECV layers_2 mb {i} from 2", before="FORWARD stage 3 mb 0")
    (fault,) = faults(early, memory)
    assert "messages 128 B" in fault.detail


def test_an_evaluation_needs_memory_too(chain: Lowered) -> None:
    found = [str(fault) for fault in faults(chain, MemoryLimits(even(chain, 0), [0, 10 * MIB] * 2))]
    assert [text.partition(" holds")[0] for text in found] == [
        "memory suffices: rank 0",
        "memory suffices: rank 2",
        "memory suffices: in evaluation, rank 0",
        "memory suffices: in evaluation, rank 2",
    ]


def test_a_program_with_other_faults_is_measured_all_the_same(chain: Lowered) -> None:
    mutant = dropped(chain, 1, "BACKWARD stage 1 mb 0", "RECV layers_0 mb 3 from 0")
    mutant = replace(mutant, values={})
    rules = {fault.rule for fault in faults(mutant, MemoryLimits(even(chain, MIB), [0] * 4))}
    assert {"memory suffices", "every stage runs every micro-batch"} <= rules
    empty = replace(chain, instructions=((), *chain.instructions[1:]))
    found = list(faults(empty, MemoryLimits(even(chain, MIB), [0] * 4)))
    assert any("rank 0 holds 1 MiB at its begin" in fault.detail for fault in found)


@pytest.mark.parametrize(("num_costs", "num_limits"), [(3, 4), (4, 5)])
def test_every_stage_needs_a_cost_and_every_rank_a_limit(
    chain: Lowered, num_costs: int, num_limits: int
) -> None:
    memory = MemoryLimits(even(chain, 1)[:1] * num_costs, [1] * num_limits)
    given = f"4 and 4 wanted, {num_costs} and {num_limits} given"
    with pytest.raises(InputError, match=given):
        list(faults(chain, memory))
