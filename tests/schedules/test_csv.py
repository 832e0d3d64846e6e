"""Schedules as CSV: the round trip, what is refused, and schedules that torch made itself."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules as theirs

import parcompiler as pc
from parcompiler.schedules import SCHEDULES, Schedule, build
from parcompiler.schedules.action import backward, backward_input, backward_weight, forward
from tests.schedules.of_torch import fake, make

SIZES = [(1, 1), (1, 3), (2, 1), (2, 4), (3, 5), (4, 8), (8, 3)]


def stages_of(name: str) -> int:
    return 2 if name == "interleaved" else 1


def load(tmp_path: Path, text: str) -> Schedule:
    """Import a text."""
    path = tmp_path / "own.csv"
    path.write_text(text, encoding="utf-8")
    return Schedule.from_csv(path)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_a_schedule_comes_back_as_it_went(tmp_path: Path, name: str, p: int, m: int) -> None:
    schedule = build(name, p, m, stages_of(name))
    path = tmp_path / f"{name}.csv"
    schedule.to_csv(path)
    found = Schedule.from_csv(path)
    assert dataclasses.replace(found, asynchronous=schedule.asynchronous) == schedule
    assert found.name == name
    assert Schedule.parse(name, schedule.cells()) == found
    again = tmp_path / "again.csv"
    found.to_csv(str(again))
    assert again.read_bytes() == path.read_bytes()


def test_the_file_is_a_row_per_rank_and_a_cell_per_action(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    build("1f1b", 2, 2).to_csv(path)
    assert path.read_text() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    build("v-min", 1, 1).to_csv(path)
    assert path.read_text() == "0F0,1F0,1I0,0I0,1W0,0W0\n"


def test_idle_slots_spaces_short_rows_and_empty_last_rows_do_not_matter(tmp_path: Path) -> None:
    text = "\ufeff0F0, 0F1 ,,,0B0,,0B1\r\n,1F0,1B0,1F1,1I1,1W1\n\n,,\n"
    found = load(tmp_path, text)
    assert found.placement == (0, 1)
    assert found.orders == (
        (forward(0, 0), forward(0, 1), backward(0, 0), backward(0, 1)),
        (forward(1, 0), backward(1, 0), forward(1, 1), backward_input(1, 1), backward_weight(1, 1)),
    )


def test_stages_may_be_anywhere(tmp_path: Path) -> None:
    found = load(tmp_path, "2F0,2B0,1F0,1B0\n0F0,0B0\n")
    assert found.placement == (1, 0, 0)
    assert found.peak(0) == 1 / 2


REFUSED = {
    "": r"a row for each rank \(0 found\)",
    "0F0,0X0": r"row 1, column 2 is '0X0', which is no action \(for example 2F0, 2B0, 2I0 or 2W0\)",
    "0F0,0B": r"row 1, column 2 is '0B', which is no action",
    "0F0,0b0": r"'0b0', which is no action",
    "0F0,0B0 0F1": r"'0B0 0F1', which is no action",
    "0F0;0B0": r"row 1, column 1 is '0F0;0B0', which is no action",
    "0F0,-1B0": r"'-1B0', which is no action",
    "0F0,0B00000000000": r"which is no action",
    "0F\u0662,0B\u0662": r"which is no action",
    "0F0,0SEND_F0,0B0": r"column 2 is '0SEND_F0', and a schedule orders compute alone .* export",
    "0F0,,0RECV_B0,0B0": r"row 1, column 3 is '0RECV_B0', and a schedule orders compute alone",
    "0UNSHARD,0F0,0B0": r"column 1 is '0UNSHARD', and a schedule orders compute alone",
    "0F0,0B0,0REDUCE_GRAD": r"column 3 is '0REDUCE_GRAD', and a schedule orders compute alone",
    "0F0,(0F1;0B0)OVERLAP_F_B": r"column 2 is '\(0F1;0B0\)OVERLAP_F_B', and a schedule orders",
    "0F0,0B0,,0F0": r"0F0 stands twice \(row 1, column 1 and row 1, column 4\)",
    "0F0,0B0\n1F0,1B0,0B0": r"0B0 stands twice \(row 1, column 2 and row 2, column 3\)",
    "0F0\n,0B0": r"stage 0 is on two ranks \(0F0 in row 1, column 1, 0B0 in row 2, column 2\)",
    "0F0,0B0,2F0,2B0": r"stage 1 is missing \(2F0 in row 1, column 3\)",
    "1F0,1B0": r"stage 0 is missing",
    "999999999F0,0B0": r"stage 1 is missing",
    "0F0,0B0\n\n1F0,1B0": r"row 2 is empty: rank 1 has no stage",
    "0F0,0B0\n,,\n1F0,1B0": r"row 2 is empty: rank 1 has no stage",
    "0F0,0B0,0F2,0B2": r"0F1 is missing: .* from 0 to 2 \(0F2 in row 1, column 3\)",
    "0F999999999,0B999999999": r"0F0 is missing",
    "0F0,0F1,0B0,0B1\n1F0,1B0": r"1F1 is missing: every stage computes .*, from 0 to 1",
    "0F0": r"0B0 is missing",
    "0B0": r"0F0 is missing",
    "0F0,0I0": r"0W0 is missing",
    "0F0,0W0": r"0I0 is missing",
    "0F0,0I0,0W0,0B0": r"two backwards .* 0 \(0B0 in row 1, column 4, 0I0 in row 1, column 2\)",
    "0F0,0B0,0W0": r"two backwards of micro-batch 0 \(0B0 .*, 0W0 in row 1, column 3\)",
    "0B0,0F0": r"0B0 in row 1, column 1 stands before 0F0 in column 2, which it needs",
    "0I0,0F0,0W0": r"0I0 in row 1, column 1 stands before 0F0 in column 2",
    "0F0,,0W0,0I0": r"0W0 in row 1, column 3 stands before 0I0 in column 4",
}


@pytest.mark.parametrize(("text", "wanted"), REFUSED.items())
def test_what_is_no_schedule_is_refused(tmp_path: Path, text: str, wanted: str) -> None:
    with pytest.raises(pc.InputError, match=wanted) as caught:
        load(tmp_path, text)
    assert caught.value.__notes__ == [f"in {tmp_path / 'own.csv'}"]


@pytest.mark.parametrize("data", [b"\xff\xfe0F0", b"0F0\x80", b'"0F0' + b"x" * 200_000])
def test_a_file_that_is_no_table_of_text_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "own.csv"
    path.write_bytes(data)
    with pytest.raises(
        pc.InputError,
        match=r"a schedule is a text file of comma-separated values|own.csv is no text",
    ):
        Schedule.from_csv(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(pc.InputError, match=r"cannot read .*none.csv \(No such file"):
        Schedule.from_csv(tmp_path / "none.csv")


MULTI = [
    (kind, p, m, v)
    for kind in (
        theirs.ScheduleInterleaved1F1B,
        theirs.ScheduleLoopedBFS,
        theirs.ScheduleInterleavedZeroBubble,
        theirs.ScheduleZBVZeroBubble,
    )
    for p, m in ((2, 2), (2, 4), (3, 6), (4, 8), (4, 16))
    for v in ((2,) if kind is theirs.ScheduleZBVZeroBubble else (2, 3))
]


@pytest.mark.parametrize(("kind", "p", "m", "v"), MULTI)
def test_what_torch_writes_can_be_read(
    tmp_path: Path, kind: type[Any], p: int, m: int, v: int
) -> None:
    schedule = make(kind, p, m, v)
    path = tmp_path / "torch.csv"
    schedule._dump_csv(path, format="compute_only")
    found = Schedule.from_csv(path)
    assert cells(found) == [
        [str(action) for action in schedule.pipeline_order[r] if action is not None]
        for r in range(p)
    ]
    assert dict(enumerate(found.placement)) == schedule.stage_index_to_group_rank


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (3, 9)])
def test_torch_with_communication_is_refused(tmp_path: Path, p: int, m: int) -> None:
    path = tmp_path / "torch.csv"
    make(theirs.ScheduleInterleaved1F1B, p, m, 2)._dump_csv(path, format="compute_comms")
    with pytest.raises(pc.InputError, match="row 1, column 1 is '0UNSHARD', and a schedule orders"):
        Schedule.from_csv(path)


# The order that torch 2.13 gives for its 1F1B is not one: its last rank begins with micro-batch 1.
@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (4, 4), (4, 9)])
def test_gpipe_of_torch_can_be_read(tmp_path: Path, p: int, m: int) -> None:
    schedule = theirs.ScheduleGPipe(fake(p, [0], p)[0], m, loss_fn=lambda *_: torch.zeros(()))
    order = schedule._get_pipeline_order()
    assert order is not None
    path = tmp_path / "torch.csv"
    with path.open("w", newline="") as file:
        computes = [[a for a in order[r] if a is None or a.is_compute_op] for r in range(p)]
        csv.writer(file).writerows(computes)
    assert Schedule.from_csv(path) == build("gpipe", p, m)


@pytest.mark.parametrize("name", ["interleaved", "zb-v", "v-half", "v-min"])
@pytest.mark.parametrize(("p", "m"), [(2, 1), (2, 4), (4, 8), (3, 7)])
def test_torch_can_read_what_we_write(tmp_path: Path, name: str, p: int, m: int) -> None:
    schedule = build(name, p, m, 2)
    path = tmp_path / "own.csv"
    schedule.to_csv(path)
    reader = theirs._PipelineScheduleRuntime(fake(p, [0, 1], 2 * p), m, loss_fn=lambda *_: None)
    reader._load_csv(str(path))
    assert cells(schedule) == [[str(a) for a in reader.pipeline_order[r]] for r in range(p)]
    assert dict(enumerate(schedule.placement)) == reader.stage_index_to_group_rank


# The same definitions, so the same orders, where torch follows them without changes of its own.
@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 8, 3), (3, 9, 4)])
def test_interleaved_is_that_of_torch(p: int, m: int, v: int) -> None:
    order = make(theirs.ScheduleInterleaved1F1B, p, m, v).pipeline_order
    ours = build("interleaved", p, m, v)
    assert cells(ours) == [[str(a) for a in order[r] if a is not None] for r in range(p)]


def cells(schedule: Schedule) -> list[list[str]]:
    """What stands in the rows."""
    return [[action.cell for action in order] for order in schedule.orders]
