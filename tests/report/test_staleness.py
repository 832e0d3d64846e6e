"""What a report says of an asynchronous schedule: the age of weights, and memory of versions."""

import dataclasses
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

import parcompiler as pc
from parcompiler.device import device
from parcompiler.errors import InputError
from parcompiler.lower import Lowered
from parcompiler.models import gpt
from parcompiler.report import Report, gather
from tests.report.programs import Made, captured, make, small_gpt, small_t5, tokens


@cache
def program(schedule: str = "pipedream", microbatches: int = 8) -> Made:
    """Four untied layers, one of them with frozen weights, on four stages."""
    config = gpt.Config(
        layers=4, heads=4, hidden=64, vocabulary=512, sequence=32, tied=False, dropout=0.0
    )
    with torch.device("meta"):
        model = gpt.GPT(config)
    model.get_submodule("layers.1").requires_grad_(False)
    batch = tokens(2, 32)
    return make(captured(model, (batch, batch)), (2, 1, 1, 2), microbatches, schedule=schedule)


def ages(lowered: Lowered) -> list[tuple[int, int]]:
    """Updates by which the weights of each stage get old, and versions of them."""
    return [(stage.updates, stage.versions) for stage in gather.staleness(lowered)]


def test_weights_are_as_old_as_their_stage_is_far_from_the_end() -> None:
    lowered = program().lowered
    assert ages(lowered) == [(3, 4), (2, 3), (1, 2), (0, 1)]


def test_fewer_micro_batches_need_fewer_versions() -> None:
    lowered = program(microbatches=4).lowered
    assert ages(lowered) == [(3, 2), (2, 3), (1, 2), (0, 1)]  # two forwards of stage 0 share one
    assert ages(program(microbatches=1).lowered) == [(0, 1)] * 4


def test_synchronous_schedules_have_no_old_weights() -> None:
    assert ages(program("1f1b").lowered) == []


def test_the_simulated_memory_has_the_versions_of_trainable_weights() -> None:
    made, same = program(), program("1f1b")
    for j, stage in enumerate(made.lowered.stages):
        tensors = [made.lowered.graph.by_name[name] for name in stage.tensors]
        weights = sum(item.nbytes for item in tensors if item.trainable)
        assert any(item.trainable for item in tensors) == (j != 1)
        extra = made.timeline.peak_memory[j] - same.timeline.peak_memory[j]
        assert extra == (3 - j) * weights == made.report.staleness[j].nbytes
    assert made.timeline.step_time > same.timeline.step_time  # an update behind every backward


def test_an_update_behind_every_backward_is_the_optimizers_and_not_the_models() -> None:
    made = program()
    (rank, *_) = sorted(range(4), key=made.timeline.bubble.__getitem__)
    update = gather.updates_within(made.problem, made.lowered)[rank]
    parts = {part.name: part.seconds for part in made.report.step.parts}
    assert parts["optimizer"] == pytest.approx(8 * update, rel=1e-6)
    assert update > 0


def test_the_ideal_step_has_these_updates_on_unequal_devices_too() -> None:
    config = gpt.Config(layers=2, heads=2, hidden=16, vocabulary=32, sequence=8, tied=False)
    batch = tokens(1, 8)
    with torch.device("meta"):
        model = gpt.GPT(config)
    one, ideals = device("h100"), []
    for other in (one, dataclasses.replace(one, name="the same")):
        mesh = pc.Mesh(pipeline=2, device=(one, other))
        made = pc.compile(model, mesh, (batch, batch), microbatches=2, schedule="pipedream")
        ideals.append(made.report().step.ideal)
    assert ideals[0] == pytest.approx(ideals[1], rel=1e-6)


def test_the_report_says_so_for_a_reader() -> None:
    text = program().report.to_text(120)
    line = next(line for line in text.splitlines() if line.strip().startswith("staleness"))
    assert "stage 0 uses weights up to 3 updates old, 4 versions, " in line
    assert line.endswith("for the old ones")
    assert "Staleness of weights" in text


def test_the_page_says_so_too(tmp_path: Path) -> None:
    program().report.to_html(tmp_path / "report.html")
    assert "up to 3 updates old" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_json_keeps_it() -> None:
    report = program().report
    data = json.loads(report.to_json())
    assert [stage["updates"] for stage in data["staleness"]] == [3, 2, 1, 0]
    assert Report.from_json(report.to_json()) == report
    del data["staleness"][3]
    with pytest.raises(InputError, match=r"report\.staleness must have 4 entries \(3 found\)"):
        Report.from_json(json.dumps(data))


@pytest.mark.parametrize("made", [small_gpt, small_t5])
def test_reports_of_other_schedules_do_not_mention_it(made: Callable[[], Made]) -> None:
    report = made().report
    assert report.staleness == ()
    assert "staleness" not in json.loads(report.to_json())
    assert "tale" not in report.to_text()
    assert Report.from_json(report.to_json()) == report
