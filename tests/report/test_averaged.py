"""What a report says of data ranks: how much they sum, how long that takes, what of it shows."""

import json
from collections.abc import Iterator
from functools import cache

import pytest
import torch

import parcompiler as pc
from parcompiler.cost.collective import RankGroup, seconds
from parcompiler.instruction import COMPUTE, Kind
from parcompiler.models import gpt
from parcompiler.prices import left_seconds
from parcompiler.report import Report
from parcompiler.report.trace import trace_text
from tests.timeline.causes import unbroken


@pytest.fixture(autouse=True, scope="module")
def large_buckets() -> Iterator[None]:
    """As those of a large model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("parcompiler.problem.PARTS", 1)
        yield


@cache
def program(data: int, updates: str = "all-reduce") -> pc.Program:
    tied = updates == "all-reduce"  # pipeline ranks sum gradients of tied tables in each way
    config = gpt.Config(layers=4, heads=4, hidden=512, vocabulary=1024, sequence=64, tied=tied)
    with torch.device("meta"):
        model = gpt.GPT(config)
        tokens = torch.zeros(2, 64, dtype=torch.long)
    mesh = pc.Mesh(pipeline=2, data=data, device="a100-80g")
    inputs = {"tokens": tokens, "labels": tokens.clone()}
    return pc.compile(model, mesh, inputs, microbatches=4, schedule="1f1b", updates=updates)


def test_the_report_counts_what_each_rank_sums() -> None:
    report, lowered = program(4).report(), program(4).lowered
    for rank, item in enumerate(report.averaged):
        sums = [s for s in lowered.sums if rank in s.ranks]
        assert item.sums == len(sums) >= 2
        held = {name for stage in lowered.on_rank(rank) for name in stage.tensors}
        assert item.nbytes == sum(
            p.nbytes for p in lowered.graph.parameters if p.trainable and p.name in held
        )
        assert item.exposed > 0 < item.seconds
    text = report.to_text()
    assert "Gradients averaged over 4 data ranks" in text
    assert "pipeline 2 x data 4 x tensor 1" in text
    assert "4 a step on each data rank" in text
    assert Report.from_json(report.to_json()) == report


@pytest.mark.parametrize("updates", [None, "asynchronous"])
def test_one_data_rank_has_no_such_section_nor_do_ranks_that_sum_nothing(
    updates: str | None,
) -> None:
    report = program(1).report() if updates is None else program(2, updates).report()
    assert report.averaged == ()
    assert "Gradients averaged" not in report.to_text()
    assert "averaged" not in json.loads(report.to_json())


def test_a_sum_takes_what_a_collective_of_the_data_ranks_does() -> None:
    made = program(4)
    (bucket, *_) = made.lowered.buckets
    nbytes = sum(made.lowered.graph.by_name[name].nbytes for name in bucket.names)
    events = [e for e in made.simulate().events if e.instruction.value == bucket.label]
    (event,) = events
    wanted = seconds("all-reduce", nbytes, RankGroup(4), made.problem.device)
    assert abs(event.end - event.begin - wanted) <= 1e-9 * wanted


def test_sums_of_buckets_begin_in_the_last_backward_when_their_gradients_are_final(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("parcompiler.problem.PARTS", 8)
    made = program.__wrapped__(4)
    timeline = made.simulate()
    (backward,) = (
        e for e in timeline.events
        if e.rank == 0 and e.instruction.kind is Kind.BACKWARD
        and e.instruction.microbatch == made.plan.microbatches - 1
    )  # fmt: skip
    kind = Kind.REDUCE_GRADIENTS
    sums = [e for e in timeline.events if e.rank == 0 and e.instruction.kind is kind]
    left = left_seconds(made.problem, made.plan, made.lowered)
    assert backward.begin < sums[0].begin < backward.end
    assert sums[0].begin == pytest.approx(backward.end - left(sums[0].instruction))
    assert sums[-1].begin >= backward.end - left(sums[-1].instruction)
    assert unbroken(timeline)


def test_sums_are_not_part_of_the_compute_and_end_before_the_update() -> None:
    timeline = program(4).simulate()
    computed = max(e.end for e in timeline.events if e.instruction.kind in COMPUTE)
    assert timeline.step_time > computed
    sums = [e.end for e in timeline.events if e.instruction.kind is Kind.REDUCE_GRADIENTS]
    *_, update = timeline.events
    assert update.instruction.kind is Kind.UPDATE
    assert update.begin == max(sums) > computed
    trace = json.loads(trace_text(program(4).report()))
    tracks = {e["tid"] for e in trace["traceEvents"] if e.get("cat") == "reduce_gradients"}
    assert len(tracks) == 1
    assert tracks.isdisjoint(e["tid"] for e in trace["traceEvents"] if e.get("cat") == "forward")


def test_memory_counts_a_bucket_behind_the_last_backward_when_activations_are_gone() -> None:
    one, four = program(1).simulate(), program(4).simulate()
    bucket = program(4).problem.bucket_bytes
    assert bucket == 25 * 2**20
    grown = [b - a for a, b in zip(one.peak_memory, four.peak_memory, strict=True)]
    assert all(0 < more < bucket for more in grown)  # tests/memory compares with MemTracker


def test_a_report_of_gathered_parameters_calls_units_units_and_an_estimate_one() -> None:
    model = gpt.GPT(gpt.Config(layers=2, heads=2, hidden=16, vocabulary=32, sequence=8))
    tokens = torch.zeros(1, 8, dtype=torch.long)
    mesh = pc.Mesh(data=2, device="cpu")
    texts = [
        pc.compile(model, mesh, (tokens, tokens), microbatches=1, zero=level).report().to_text()
        for level in (0, 3)
    ]
    assert ["Units of stages" in text for text in texts] == [False, True]
    assert all("estimated" in text for text in texts)
