"""The interlaced order of 1F1B: no rank waits, and what is alive."""

import pytest

from parcompiler.instruction import Kind
from parcompiler.schedules import build
from parcompiler.schedules.vocabulary import spread
from parcompiler.schedules.vocabulary_interlaced import interlaced
from parcompiler.timeline import Message, StageCost, VocabularyCost, timing

F, B, S, NORMALIZE, T = 1.0, 2.0, 0.25, 0.125, 0.5
SLOT = S + NORMALIZE + T


def step_time(ranks: int, microbatches: int) -> float:
    """Of stages that cost the same, with free messages."""
    schedule = spread(build("1f1b", ranks, microbatches), "interlaced")
    costs = [StageCost(F, B, resident=0, saved=1)] * ranks
    messages = [Message(j, (j + 1,), 0.0, 0.0, 0) for j in range(ranks - 1)]
    shared = VocabularyCost(
        s=S, normalize=NORMALIZE, t=T, source=ranks - 1, method="interlaced", users=()
    )
    return timing(schedule, costs, messages, shared).step_time


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8])
def test_an_interval_is_a_forward_a_backward_and_a_slot(ranks: int) -> None:
    more = step_time(ranks, 60) - step_time(ranks, 40)
    assert more == pytest.approx(20 * (F + B + SLOT))


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 30])
def test_every_action_stands_once_and_slots_in_the_same_order(
    ranks: int, microbatches: int
) -> None:
    for rank, order in enumerate(interlaced(ranks, microbatches)):
        assert len(set(order)) == len(order) == 5 * microbatches
        for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.S, Kind.NORMALIZE, Kind.T):
            own = [action for action in order if action.kind is kind]
            assert [action.microbatch for action in own] == list(range(microbatches))
        stages = {a.stage for a in order if a.kind in (Kind.FORWARD, Kind.BACKWARD)}
        assert stages == {rank}


def test_half_as_many_micro_batches_again_are_alive_on_rank_0_and_one_on_the_last() -> None:
    schedule = spread(build("1f1b", 8, 32), "interlaced")
    assert [schedule.in_flight(j) for j in range(8)] == [12, 10, 9, 7, 6, 4, 3, 1]
