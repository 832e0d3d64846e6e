"""Schedules that the user gives: those of torch.distributed.pipelining and those that are edited.

They are imported as CSV, verified, exported, and train as the original model does.
"""

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as theirs

import parcompiler as pc
from parcompiler.schedules import build
from tests import zoo
from tests.schedules.of_torch import make

KINDS = [
    theirs.ScheduleInterleaved1F1B,
    theirs.ScheduleLoopedBFS,
    theirs.ScheduleInterleavedZeroBubble,
    theirs.ScheduleZBVZeroBubble,
]


def captured() -> pc.Program:
    return zoo.captured("gpt-tied")


@pytest.mark.parametrize("kind", KINDS)
def test_schedules_of_torch_run_here(tmp_path: Path, kind: type[Any]) -> None:
    path = tmp_path / "their.csv"
    make(kind, 2, 4, 2)._dump_csv(path, format="compute_only")
    schedule = pc.Schedule.from_csv(path)
    program = pc.compile(captured(), pc.Mesh(pipeline=2), schedule=schedule, microbatches=4)
    assert program.plan.schedule == "their"
    assert program.plan.virtual_stages == 2
    found = program.verify()
    assert found.ok, str(found)
    assert max(found.loss_error, found.gradient_error, found.parameter_error) <= 1e-9


def test_a_given_schedule_survives_its_plan_and_its_export(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("0F0,0F1,0F2,0B0,0B2,0B1\n1F0,1F1,1B0,1F2,1I2,1B1,1W2\n")
    schedule = pc.Schedule.from_csv(path)
    program = pc.compile(captured(), pc.Mesh(pipeline=2), schedule=schedule, microbatches=3)
    plan = pc.Plan.from_json(program.plan.to_json())
    assert plan == program.plan
    again = pc.compile(captured(), pc.Mesh(pipeline=2), microbatches=3, plan=plan)
    assert [again.instructions(r) for r in (0, 1)] == [program.instructions(r) for r in (0, 1)]
    assert pc.load(program.export(tmp_path / "out")).plan == plan
    found = again.verify()
    assert found.ok, str(found)


def test_a_file_named_like_a_schedule_is_what_it_says(tmp_path: Path) -> None:
    build("1f1b", 2, 4).to_csv(tmp_path / "1f1b.csv")
    build("gpipe", 2, 4).to_csv(tmp_path / "zb-h1.csv")
    mesh = pc.Mesh(pipeline=2)
    first, second = (
        pc.compile(captured(), mesh, schedule=pc.Schedule.from_csv(tmp_path / name), microbatches=4)
        for name in ("1f1b.csv", "zb-h1.csv")
    )
    assert (first.plan.schedule, first.plan.orders) == ("1f1b", None)
    assert (second.plan.schedule, second.plan.orders) == ("zb-h1", build("gpipe", 2, 4).cells())


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 3), (4, 4)])
def test_a_schedule_of_another_size_is_refused(ranks: int, microbatches: int) -> None:
    schedule = build("1f1b", ranks, microbatches)
    message = rf"has {ranks} ranks and {microbatches} micro-batches \(given: pipeline=2, .*=4\)"
    with pytest.raises(pc.InputError, match=message):
        pc.compile(captured(), pc.Mesh(pipeline=2), schedule=schedule, microbatches=4)


def test_another_number_of_stages_than_a_schedule_has_is_refused() -> None:
    given: dict[str, Any] = {"schedule": build("interleaved", 2, 4, 2), "microbatches": 4}
    with pytest.raises(pc.InputError, match=r"has 2 stages on a rank \(virtual_stages=3 given\)"):
        pc.compile(captured(), pc.Mesh(pipeline=2), virtual_stages=3, **given)
    program = pc.compile(captured(), pc.Mesh(pipeline=2), virtual_stages=2, **given)
    assert program.plan.virtual_stages == 2


def test_a_schedule_in_which_ranks_wait_for_each_other_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "circle.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    schedule = pc.Schedule.from_csv(path)
    with pytest.raises(pc.PlanError, match="stands before"):
        pc.compile(captured(), pc.Mesh(pipeline=2), schedule=schedule, microbatches=2)
