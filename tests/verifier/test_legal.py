"""What lowering makes of legal plans has no fault, and does what the model does."""

import pytest

from parcompiler.verifier import verify
from tests.verifier.edits import texts
from tests.verifier.oracle import same_meaning
from tests.verifier.programs import GRAPHS, OWN, SCHEDULES, program, several

HUGGING_FACE = [name for name in GRAPHS if name not in OWN]
PLACEMENTS = [(0, 0), (0, 1, 0), (0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2, 0), (0, 1, 2, 1)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", GRAPHS)
def test_a_legal_program_has_no_fault(name: str, schedule: str) -> None:
    for ranks in (1, 2, 3, 4):
        for microbatches in (1, 2, 5):
            verify(program(name, ranks, schedule, microbatches))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", OWN)
def test_a_legal_program_does_what_the_model_does(name: str, schedule: str) -> None:
    for ranks in (1, 2, 3, 4):
        for microbatches in (1, 2, 5):
            assert same_meaning(program(name, ranks, schedule, microbatches))


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_a_legal_program_of_hugging_face_does_what_the_model_does(name: str) -> None:
    assert same_meaning(program(name, 4, "1f1b", 2))


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
