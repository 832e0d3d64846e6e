"""Searching an order beside a vocabulary on all ranks."""

import pytest

import parcompiler as pc
from parcompiler.passes import SchedulePass
from tests import zoo


@pytest.mark.parametrize(
    "method", ["vocab-2", *(pytest.param(x, marks=pytest.mark.sweep) for x in ("vocab-1", "naive"))]
)
def test_a_searched_order_takes_no_longer_than_any_by_name(method: str) -> None:
    model, inputs = zoo.build("t5")
    captured = pc.compile(model, pc.Mesh(), inputs, microbatches=1)
    mesh = pc.Mesh(pipeline=3)

    def step(schedule: str) -> float:
        program = pc.compile(
            captured, mesh, schedule=schedule, vocabulary=method, microbatches=5, stages="even",
            passes=zoo.SHORT,
        )  # fmt: skip
        found = program.plan.search
        if found is not None:
            assert found.bound <= found.objective
        return program.simulate().step_time

    named = min(map(step, ("gpipe", "1f1b", "zb-h1", "zb-h2")))
    assert step("search") <= named * (1 + SchedulePass.gain)  # as near as the start is chosen
