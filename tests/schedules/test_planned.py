"""What a plan's schedule holds, and where its stages are, by name alone."""

import pytest

from parcompiler.plan import Plan, Shape, VocabularyChoice
from parcompiler.schedules import SCHEDULES, build
from parcompiler.schedules.planned import held, left, outline, planned
from parcompiler.schedules.staleness import waiting


@pytest.mark.parametrize("method", ["whole", "naive", "interlaced", "vocab-1", "vocab-2"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_plan_says_what_its_schedule_holds_and_where_stages_are(name: str, method: str) -> None:
    if name == "pipedream" and method != "whole":
        return
    choice = VocabularyChoice(method, head="head" if method != "whole" else None)
    for ranks, microbatches in ((2, 40), (3, 100), (4, 133)):
        stages = 2 if name == "interleaved" else 1
        shape = Shape(ranks)
        plan = Plan(
            "Handmade", "", shape, microbatches, schedule=name, virtual_stages=stages,
            vocabulary=choice,
        )  # fmt: skip
        whole = planned(plan)
        assert held(plan) == tuple(map(whole.held, range(ranks)))
        assert left(plan) == max(waiting(whole.orders[r], j) for j, r in enumerate(whole.placement))
        assert outline(plan) == build(name, ranks, 1, stages)
        assert outline(plan).placement == whole.placement
