"""What a report says of recomputation: a line when there is any, and its cost."""

import dataclasses
import json
from typing import Any

import pytest

import parcompiler as pc
from parcompiler.report import Report
from tests import zoo
from tests.report.programs import Made, make, small_gpt

LAYERS = [f"layers.{i}" for i in range(4)]


def recomputing(*names: str) -> Made:
    return make(small_gpt().problem.graph, (4, 2), recompute=names)


@pytest.mark.parametrize(
    ("names", "line"),
    [
        (LAYERS, "layers.0 ... layers.3 (4 blocks)"),
        (["layers.1"], "layers.1 (1 block)"),
        ([*LAYERS[1:], "norm+embedding"], "layers.1 ... layers.3 (3), norm+embedding (4 blocks)"),
    ],
)
def test_the_overview_names_what_is_recomputed(names: list[str], line: str) -> None:
    report = recomputing(*names).report
    (found,) = (text for text in report.to_text(100).splitlines() if "recomputed" in text)
    assert found.split(maxsplit=1)[1].strip() == line
    assert Report.from_json(report.to_json()) == report
    assert report.plan.recompute == tuple(names)


def test_the_overview_says_what_the_fullest_rank_would_take_without() -> None:
    made, plain = recomputing(*LAYERS), small_gpt()
    fullest = max(plain.timeline.peak_memory)
    assert (
        max(rank.without or 0 for rank in made.report.ranks)
        == fullest
        > max(made.timeline.peak_memory)
    )
    assert "no recompute" in made.report.to_text(100)
    assert "within the limit" in made.report.to_text(100)
    mesh = dataclasses.replace(made.report.mesh, memory=fullest - 2048)
    tight = dataclasses.replace(made.report, mesh=mesh).to_text(100)
    assert "2 KiB over the limit" in tight
    assert "no recompute" not in plain.report.to_text(100)


def test_the_overview_says_what_waits_in_the_hosts_memory() -> None:
    options: dict[str, Any] = {"microbatches": 4, "schedule": "1f1b", "vocabulary": "whole"}
    plain, away = (
        pc.compile(zoo.captured("gpt"), pc.Mesh(pipeline=2), recompute=word, **options).report(
            meshes=False
        )
        for word in ("selective", "offload")
    )
    (line,) = (text for text in away.to_text(120).splitlines() if "offloaded" in text)
    assert line.endswith("of a rank in its host's memory")
    assert "no offload" in away.to_text(120)
    assert Report.from_json(away.to_json()) == away
    for before, stage, rank in zip(plain.stages, away.stages, away.ranks, strict=True):
        assert rank.host == stage.in_flight * (before.activations - stage.activations) > 0


def test_nothing_is_said_where_nothing_is_recomputed() -> None:
    assert "recompute" not in small_gpt().report.to_text(100)
    data = json.loads(small_gpt().report.to_json())
    assert data["plan"].pop("recompute") == []
    assert "recompute" not in json.dumps(data).replace('"recomputed"', "")


def test_stages_count_what_they_compute_twice_and_the_step_does_not() -> None:
    plain, again = small_gpt().report, recomputing(*LAYERS[:3]).report
    first, then = plain.stages[0], again.stages[0]
    assert first.backward_flops < then.backward_flops <= first.backward_flops + first.forward_flops
    assert then.backward == pytest.approx(first.backward + first.forward, rel=0.2)
    assert then.activations < first.activations / 4
    assert again.stages[1] == plain.stages[1]
    assert again.step.flops == plain.step.flops
    assert again.step.mfu < plain.step.mfu
