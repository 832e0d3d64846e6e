"""What lowering makes of legal plans has no fault, and does what the model does."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from parcompiler.lower import Lowered
from parcompiler.runtime.program import of_first
from parcompiler.schedules import SCHEDULES, stages_per_rank
from parcompiler.verifier import verify
from tests.verifier.edits import texts
from tests.verifier.oracle import same_meaning
from tests.verifier.programs import DEEP, GRAPHS, OWN, TIED, blocks, program, several

HUGGING_FACE = [name for name in GRAPHS if name not in (*OWN, *DEEP)]
PLACEMENTS = [(0, 0), (0, 1, 0), (0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2, 0), (0, 1, 2, 1)]


def legal(name: str, schedule: str) -> Iterator[Lowered]:
    """A model under a schedule: 1 to 4 ranks, fewer micro-batches than ranks and more."""
    for ranks in (1, 2, 3, 4):
        for wanted in (2, 3) if schedule == "interleaved" else (1,):
            each = stages_per_rank(schedule, wanted)
            fits = ranks * each <= len(blocks(name, 2))
            tied = ranks > 1 and schedule == "pipedream" and name in TIED
            if fits and not tied:
                for microbatches in (1, 2, 5):
                    yield program(name, ranks, schedule, microbatches, virtual_stages=each)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", GRAPHS)
def test_a_legal_program_has_no_fault(name: str, schedule: str) -> None:
    for lowered in legal(name, schedule):
        verify(lowered)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", (*OWN, *DEEP))
def test_a_legal_program_does_what_the_model_does(name: str, schedule: str) -> None:
    for lowered in legal(name, schedule):
        assert same_meaning(lowered)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h2", "v-min"])
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_a_legal_program_of_hugging_face_does_what_the_model_does(name: str, schedule: str) -> None:
    assert same_meaning(program(name, 4, schedule, 2, virtual_stages=stages_per_rank(schedule, 1)))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", OWN)
def test_an_evaluation_of_fewer_micro_batches_has_no_fault(name: str, schedule: str) -> None:
    if schedule == "pipedream" and name in TIED:
        return
    each = stages_per_rank(schedule, 1)
    whole = program(name, 2, schedule, 4, virtual_stages=each)
    for count in (1, 2, 3):
        lowered = program(name, 2, schedule, count, virtual_stages=each)
        fewer = tuple(of_first(lines, count) for lines in whole.evaluation)
        assert texts(replace(lowered, evaluation=fewer)) == []


@pytest.mark.parametrize("ranks", PLACEMENTS)
@pytest.mark.parametrize("name", OWN)
def test_several_stages_on_a_rank_have_no_fault(name: str, ranks: tuple[int, ...]) -> None:
    for microbatches in (1, 2, 3):
        lowered = several(name, ranks, microbatches)
        assert texts(lowered) == []
        assert same_meaning(lowered)


def test_uneven_stages_have_no_fault() -> None:
    for counts in ((1, 1, 3), (3, 1, 1), (1, 3, 1)):
        verify(program("gpt2", 3, "1f1b", 4, counts))


def test_the_model_is_as_rich_as_the_tests_need() -> None:
    skips, ties = program("skips", 4, "1f1b", 2), program("ties", 4, "1f1b", 2)
    assert any(len(value.consumers) > 1 for value in skips.values.values())
    assert {value.differentiable for value in skips.values.values()} == {True, False}
    assert [stage.prologue != () for stage in skips.stages] == [True, True, True, False]
    assert [item.ranks for item in ties.tied] == [(0, 3), (0, 3), (1, 3), (1, 2, 3)]
    assert any(item.mutated for item in program("norms", 2, "1f1b", 2).graph.parameters)
    assert [item.ranks for item in program("t5", 4, "1f1b", 2).tied] == [(0, 2, 3)]


def test_several_stages_of_a_rank_share_values_and_tensors() -> None:
    knots = program("knots", 2, "interleaved", 2)
    assert [stage.rank for stage in knots.stages] == [0, 1, 0, 1]
    readers = [value.consumers for value in knots.values.values() if value.producer == 0]
    assert (1, 2, 3) in readers  # two on the other rank, one on its own
    assert [(item.name, item.ranks) for item in knots.tied] == [
        ("layers.0.weight", (0, 1)),
        ("layers.0.bias", (0, 1)),
        ("layers.1.bias", (0, 1)),
    ]
    holders = [j for j, stage in enumerate(knots.stages) if "layers.2.weight" in stage.tensors]
    assert len(holders) == 2
