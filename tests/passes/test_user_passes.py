"""Passes of a user's own: the others go on from what they decide, or it is refused by name."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

import parcompiler as pc
from parcompiler.passes import DEFAULT, Pass, ShardPass
from parcompiler.plan import StageChoice, VocabularyChoice
from parcompiler.problem import Problem
from tests import zoo

PAIR = pc.Mesh(pipeline=2)


@dataclass(frozen=True)
class Own(Pass):
    """Decides some fields of a plan, which may depend on the problem."""

    name: ClassVar[str] = "own"
    decide: Callable[[Problem], dict[str, Any]] = lambda problem: {}

    def run(self, problem: Problem, plan: pc.Plan) -> pc.Plan:
        return dataclasses.replace(plan, **self.decide(problem))


@dataclass(frozen=True)
class Forgetful(Pass):
    """Returns nothing."""

    name: ClassVar[str] = "forgetful"

    def run(self, problem: Problem, plan: pc.Plan) -> pc.Plan:
        return None  # type: ignore[return-value]  # the mistake


class Nameless(Forgetful):
    """Has a name that is none."""

    name = None  # type: ignore[assignment]  # the mistake


@pytest.fixture(scope="module")
def program() -> pc.Program:
    model, inputs = zoo.build("gpt")
    return pc.compile(model, PAIR, inputs, schedule="1f1b", vocabulary="whole")


def decided(program: pc.Program, mesh: pc.Mesh | pc.Cluster = PAIR, **fields: Any) -> pc.Plan:
    """The plan after an own pass that decides these fields, and the passes of DEFAULT."""
    return pc.compile(program, mesh, passes=[Own(lambda problem: fields), *DEFAULT]).plan


def staged(ranks: Sequence[int]) -> Callable[[Problem], dict[str, Any]]:
    """A decision for stages on these ranks, with a block on each but the last."""

    def decide(problem: Problem) -> dict[str, Any]:
        names = [block.name for block in problem.priced(1).cut.blocks]
        blocks = [*([name] for name in names[: len(ranks) - 1]), names[len(ranks) - 1 :]]
        pairs = zip(ranks, blocks, strict=True)
        stages = tuple(StageChoice(rank=rank, blocks=tuple(own)) for rank, own in pairs)
        return {"granularity": 1, "stages": stages}

    return decide


def test_what_an_own_pass_recomputes_stays(program: pc.Program) -> None:
    assert decided(program, recompute=["layers.0"]).recompute == ("layers.0",)
    assert decided(program, recompute=()).recompute == ()


def test_the_level_of_zero_of_an_own_pass_stays(program: pc.Program) -> None:
    assert decided(program, pc.Mesh(data=2), zero=2).zero == 2


def test_the_vocabulary_of_an_own_pass_stays(program: pc.Program) -> None:
    choice = VocabularyChoice("vocab-1", ("embedding.weight",), None)
    assert decided(program, vocabulary=choice).vocabulary == choice


def test_an_own_schedule_has_its_number_of_stages(program: pc.Program) -> None:
    plan = decided(program, schedule="zb-v")
    assert plan.virtual_stages == 2
    assert len(plan.stages or ()) == 4


@pytest.mark.parametrize(
    ("ranks", "schedules"),
    [
        ((0, 1), {"1f1b", "gpipe", "zb-h1", "zb-h2"}),
        ((0, 1, 0, 1), {"interleaved"}),
        ((0, 1, 1, 0), {"v-half", "v-min", "zb-v"}),
    ],
)
def test_own_stages_stay_under_a_schedule_that_has_them(
    program: pc.Program, ranks: Sequence[int], schedules: set[str]
) -> None:
    passes = [Own(staged(ranks)), *DEFAULT]
    found = pc.compile(program, PAIR, passes=passes)
    assert tuple(choice.rank for choice in found.plan.stages or ()) == ranks
    assert found.plan.schedule in schedules
    assert pc.compile(program, PAIR, plan=found.plan).simulate() == found.simulate()
    again = pc.compile(program, PAIR, passes=passes, recompute={"layers.1": True})
    assert again.plan.recompute == ("layers.1",)


def test_passes_may_run_twice(program: pc.Program) -> None:
    once = pc.compile(program, PAIR, passes=list(DEFAULT)).plan
    assert pc.compile(program, PAIR, passes=[*DEFAULT, *DEFAULT]).plan.stages == once.stages


def test_a_search_over_meshes_says_what_own_passes_leave_undecided(program: pc.Program) -> None:
    with pytest.raises(pc.InfeasibleError) as caught:
        pc.compile(program, pc.Cluster(1, 2, "cpu"), passes=[])
    assert "the passes left the plan undecided" in "".join(caught.value.__notes__)


def test_tensor_ranks_need_a_pass_that_decides_their_sharding(program: pc.Program) -> None:
    passes = [item for item in DEFAULT if not isinstance(item, ShardPass)]
    with pytest.raises(pc.PlanError, match=r"left the plan undecided \(it lacks sharding\)"):
        pc.compile(program, pc.Mesh(tensor=2), passes=passes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"microbatches": 3}, "a pass must not change the plan's 'microbatches'"),
        ({"precision": "bf16"}, "a pass must not change the plan's 'precision'"),
        ({"virtual_stages": "2"}, "plan.virtual_stages must be an integer"),
        ({"stages": object()}, "a value of a wrong type"),
        ({"recompute": ("nothing",)}, "recomputes 'nothing', which is no block"),
        ({"vocabulary": VocabularyChoice("vocab-9")}, "the plan has vocabulary 'vocab-9'"),
        ({"schedule": "fast"}, "the plan has schedule 'fast' without its orders"),
        ({"granularity": 9, "stages": ()}, "the plan has granularity 9"),
    ],
)
def test_what_no_pass_could_go_on_with_is_refused(
    program: pc.Program, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(pc.ParcompilerError, match=message) as caught:
        decided(program, **fields)
    assert "the pass 'own'" in caught.value.__notes__[0]


def test_stages_that_no_schedule_has_are_refused(program: pc.Program) -> None:
    with pytest.raises(pc.InfeasibleError, match=r"on ranks \(1, 0\)"):
        pc.compile(program, PAIR, passes=[Own(staged((1, 0))), *DEFAULT])
    with pytest.raises(pc.PlanError, match="its schedule '1f1b' has them on"):
        passes = [Own(staged((0, 1, 0, 1))), *DEFAULT]
        pc.compile(program, PAIR, passes=passes, schedule="1f1b")


def test_passes_without_a_plan_or_a_name_are_refused(program: pc.Program) -> None:
    with pytest.raises(pc.PlanError, match=r"a pass must return a Plan \(None returned\)"):
        pc.compile(program, PAIR, passes=[Forgetful(), *DEFAULT])
    with pytest.raises(pc.InputError, match="the pass Nameless has no name"):
        pc.compile(program, PAIR, passes=[Nameless(), *DEFAULT])
