"""Micro-batches of other rows: which are weighed, which win, and when none may be."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import parcompiler as pc
from parcompiler.capture import capture
from parcompiler.capture.clean import simplify
from parcompiler.graph import Graph
from parcompiler.meshes.batch_invariance import batch_dependence
from parcompiler.models import dlrm, gpt
from parcompiler.options import Options
from parcompiler.problem import Problem
from parcompiler.symbolic.sizes import batch_of, resized
from tests.meshes.test_search import (
    LARGE,
    SMALL,
    captured,
    check_answer,
    check_told,
    every_size,
    fits,
)
from tests.symbolic.models import made

Loss = Callable[[torch.Tensor], torch.Tensor]
TINY = dataclasses.replace(SMALL, layers=2)
CASES = [
    (LARGE, pc.Cluster(1, 2, "h100"), 1, 4, {"schedule": "1f1b", "vocabulary": "whole"}),
    (LARGE, pc.Cluster(1, 2, fits(220 * 2**20)), 4, 2, {"schedule": "1f1b", "vocabulary": "whole"}),
]


def at_four_rows(graph: Graph) -> Graph:
    """A graph at four rows."""
    problem = Problem(graph, pc.Mesh(device="h100"), Options(1))
    return resized(problem, [batch_of(graph)], {"b": 4}).graph


@pytest.mark.parametrize(("config", "cluster", "rows", "microbatches", "options"), CASES)
def test_the_best_is_that_of_compiling_for_every_mesh_at_every_size(
    config: gpt.Config, cluster: pc.Cluster, rows: int, microbatches: int, options: dict[str, Any]
) -> None:
    sizes = [rows, *(n for n in (1, 2, 4, 8) if n != rows and rows * microbatches % n == 0)]
    every = every_size(config, cluster, sizes, microbatches * rows, **options)
    model = captured(config, rows)
    found = pc.compile(model, cluster, microbatches=microbatches, microbatch="auto", **options)
    check_answer(found, every)
    chosen = found.captured.inputs[0].shape[0]
    assert chosen != rows
    assert chosen * found.plan.microbatches * found.plan.mesh.data == rows * microbatches
    check_told(found.plan.meshes, every)
    assert found.plan.meshes is not None
    assert {item.rows for item in found.plan.meshes} == set(sizes)


def test_rows_may_be_listed() -> None:
    found = pc.compile(
        captured(SMALL, 2), pc.Cluster(1, 2, "h100"), microbatches=6, schedule="1f1b",
        vocabulary="whole", microbatch=[3, 5],
    )  # fmt: skip
    told = {item.rows: item.reason for item in found.plan.meshes or ()}
    assert set(told) == {2, 3, 5}
    assert told[5] == "12 rows cannot be divided into micro-batches of 5"
    assert found.captured.inputs[0].shape[0] == 3


def test_without_the_option_the_micro_batch_stays() -> None:
    found = pc.compile(
        captured(SMALL, 2), pc.Cluster(1, 2, "h100"), microbatches=6, schedule="1f1b"
    )
    assert {item.rows for item in found.plan.meshes or ()} == {2}


def test_the_program_of_another_micro_batch_has_the_gradients_of_the_model() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(SMALL.vocabulary, (1, SMALL.sequence))
    found = pc.compile(
        gpt.GPT(TINY), pc.Cluster(1, 2, "cpu"), {"tokens": tokens, "labels": tokens},
        microbatches=8, schedule="1f1b", vocabulary="whole", precision="fp64", microbatch="auto",
    )  # fmt: skip
    rows = found.captured.inputs[0].shape[0]
    assert rows > 1
    assert rows * found.plan.microbatches * found.plan.mesh.data == 8
    verification = found.verify(seed=0)
    assert verification.loss_error <= 1e-9
    assert verification.gradient_error <= 1e-9, verification.worst


class Asks(nn.Module):
    """Makes more of many rows than of few."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            for _ in range(8 if len(x) > 2 else 1):
                x = torch.relu(layer(x))
        return x.mean()


def test_a_model_that_asks_how_many_rows_there_are_is_weighed_as_it_is_captured() -> None:
    with torch.device("meta"):
        model = Asks()
    found = pc.compile(
        model, pc.Cluster(1, 1, "h100"), (torch.zeros(2, 64),), microbatches=8, schedule="1f1b",
        microbatch="auto",
    )  # fmt: skip
    seconds = {
        rows: pc.compile(
            model, pc.Mesh(device="h100"), (torch.zeros(rows, 64),), microbatches=16 // rows
        ).simulate().step_time
        for rows in (2, 4, 8, 16)
    }  # fmt: skip
    chosen = found.captured.inputs[0].shape[0]
    assert found.simulate().step_time == seconds[chosen] == min(seconds.values())


@pytest.mark.sweep
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_one_row_alone_may_have_other_operators_than_several(
    precision: str | None,
) -> None:
    model, inputs = made("hf", 1)
    options: dict[str, Any] = {"schedule": "1f1b", "precision": precision}
    found = pc.compile(
        model, pc.Cluster(1, 1, "h100"), inputs, microbatches=4, microbatch="auto", **options
    )
    rows = found.captured.inputs[0].shape[0]
    assert rows > 1
    again = pc.compile(
        model, found.problem.mesh, made("hf", rows)[1], microbatches=4 // rows, **options
    )
    assert found.plan.meshes is not None
    assert found.plan.meshes[0].seconds == again.simulate().step_time
    assert dataclasses.replace(found.plan, meshes=None) == again.plan


class Refuses(nn.Module):
    """Cannot have eight rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 8:
            message = "eight are too many"
            raise ValueError(message)
        out: torch.Tensor = self.layer(x)
        return out.mean()


def test_rows_that_a_model_refuses_are_told_and_others_taken() -> None:
    found = pc.compile(
        Refuses(), pc.Cluster(1, 1, "h100"), (torch.zeros(2, 64),), microbatches=4,
        microbatch="auto",
    )  # fmt: skip
    assert found.captured.inputs[0].shape[0] == 4
    told = {item.rows: item.reason for item in found.plan.meshes or ()}
    assert str(told[8]).startswith("no micro-batch of 8 rows: Refuses fails on these inputs")


def test_tables_with_row_gradients_look_up_the_rows_of_a_step() -> None:
    """The same rows in micro-batches of another size; as many times more were counted."""
    config = dataclasses.replace(dlrm.PRESETS["tiny"], tables=(5000, 300, 7), sparse=True)

    def inputs(rows: int) -> dict[str, torch.Tensor]:
        categories = torch.zeros(rows, len(config.tables), dtype=torch.long)
        numbers, labels = torch.zeros(rows, config.numbers), torch.zeros(rows)
        return {"numbers": numbers, "categories": categories, "labels": labels}

    model = dlrm.DLRM(config)
    found = pc.compile(
        model, pc.Cluster(1, 1, "h100"), inputs(8), microbatches=8, microbatch=[64], optimizer="sgd"
    )
    again = pc.compile(model, pc.Mesh(device="h100"), inputs(64), microbatches=1, optimizer="sgd")
    assert found.captured.inputs[0].shape[0] == 64
    assert found.problem.graph.parameters == again.problem.graph.parameters
    assert found.simulate().peak_memory == again.simulate().peak_memory


WORDS = "microbatch must be 'given', 'auto' or numbers of rows, each from 1 to 262,144"


@pytest.mark.parametrize("given", ["large", (), [0], [2, -1], [True], [1.5], 3, None])
def test_what_is_no_micro_batch_is_refused(given: Any) -> None:
    with pytest.raises(pc.InputError, match=WORDS):
        pc.compile(captured(SMALL), pc.Cluster(1, 2, "h100"), microbatch=given)


def test_a_micro_batch_is_weighed_where_a_mesh_is() -> None:
    model = captured(SMALL)
    with pytest.raises(pc.InputError, match="microbatch is for a Cluster"):
        pc.compile(model, pc.Mesh(2, device="h100"), microbatch="auto")
    with pytest.raises(pc.InputError, match="compile that, not a Graph"):
        pc.compile(model.captured, pc.Cluster(1, 2, "h100"), microbatch="auto")
    with pytest.raises(pc.InputError, match="microbatch needs costs='model'"):
        pc.compile(model, pc.Cluster(1, 2, "cpu"), microbatch="auto", costs="measured")


def test_inputs_without_rows_in_common_are_refused() -> None:
    class Shifted(nn.Linear):
        def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # a second input
            return (super().forward(x) + shift).mean()

    model = pc.compile(
        Shifted(4, 4), pc.Mesh(device="cpu"), (torch.zeros(2, 3, 4), torch.zeros(3, 4))
    )
    cluster = pc.Cluster(1, 1, "cpu")
    with pytest.raises(pc.InputError, match="needs inputs with equally many rows"):
        pc.compile(model, cluster, microbatch="auto")
    told = pc.compile(model, cluster).plan.meshes or ()
    assert [item.rows for item in told] == [None]


def summed(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.sum()


def test_a_loss_that_grows_with_its_rows_keeps_its_micro_batch_and_the_report_says_so() -> None:
    found = pc.compile(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), pc.Cluster(1, 2, "h100"),
        (torch.zeros(2, 4),), summed, microbatches=4, schedule="1f1b", microbatch="auto",
    )  # fmt: skip
    assert found.captured.inputs[0].shape == (2, 4)
    reasons = [item.reason for item in found.plan.meshes or () if item.rows != 2]
    said = "the micro-batch stays as it is given: the loss may be no mean over rows ('sum_1')"
    assert reasons == [said] * 3
    assert said in found.report().to_text(200)


WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
KEPT: list[tuple[str, Loss, str | None]] = [
    ("mean", lambda x: x.mean(), None),
    ("mean of means", lambda x: x.mean(0).mean(), None),
    ("two terms", lambda x: 2 * x.mean() + x.abs().mean() / 3 - 1, None),
    ("weighted mean", lambda x: nn.functional.cross_entropy(x, x.argmax(-1), WEIGHTS.to(x.dtype)),
     "cross_entropy_loss"),
    ("per element first", lambda x: (x.softmax(-1) ** 2).sum(-1).mean(), None),
    ("criterion", lambda x: nn.functional.mse_loss(x, torch.zeros_like(x)), None),
    ("sum", lambda x: x.sum() / 12, "sum_1"),
    ("criterion that sums",
     lambda x: nn.functional.mse_loss(x, torch.zeros_like(x), reduction="sum"), "mse_loss"),
    ("largest", lambda x: x.max(), "max_1"),
    ("square of a mean", lambda x: x.mean() ** 2, "pow_1"),
    ("product of means", lambda x: x.mean() * x.abs().mean(), "mul"),
    ("over a mean", lambda x: 1 / x.mean(), "reciprocal"),
    ("less the mean", lambda x: (x - x.mean(0)).abs().mean(), "sub"),
    ("softmax over rows", lambda x: (x.softmax(0) ** 2).mean(), "softmax"),
    ("norm over rows",
     lambda x: nn.functional.batch_norm(x, None, None, training=True).abs().mean(), "batch_norm"),
    ("row beside row", lambda x: (x - x.roll(1, 0)).abs().mean(), "roll"),
    ("all pairs", lambda x: nn.functional.cross_entropy(x @ x.T, torch.arange(len(x))), "matmul"),
    ("all but the last", lambda x: x[:-1].abs().mean(), "slice_1"),
    ("one row more", lambda x: torch.cat([x, x.new_ones(1, 6)]).abs().mean(), "cat"),
    ("times their number", lambda x: x.mean() * len(x), "mul"),
    ("by their number", lambda x: (x / len(x)).mean(), "div"),
    ("their number in a tensor", lambda x: x.mean() * torch.tensor(float(len(x))),
     "c_lifted_tensor_0"),
    ("weighed by place", lambda x: (x * torch.arange(len(x))[:, None]).mean(), "mul"),
    ("one of each row", lambda x: x[torch.arange(len(x)), x.argmax(-1)].mean(), None),
    ("smoothed labels",
     lambda x: nn.functional.cross_entropy(x, x.argmax(-1), label_smoothing=0.1), None),
    ("rows innermost",
     lambda x: x.view(-1, 3, 1, 2).permute(1, 0, 2, 3).reshape(-1, 2).relu().view(3, -1, 2).mean(),
     None),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "node"), [k[1:] for k in KEPT], ids=[k[0] for k in KEPT])
def test_a_mean_over_rows_is_told_from_what_is_none(loss: Loss, node: str | None) -> None:
    """With half the rows in two micro-batches, the step has the same loss, or it may not."""
    graph = simplify(capture(nn.Linear(6, 6), (torch.zeros(2, 6),), loss))
    other = at_four_rows(graph)
    found = batch_dependence(graph, other)
    assert found == (None if node is None else f"the loss may be no mean over rows ({node!r})")
    rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    apart = (loss(rows[:2]) + loss(rows[2:])) / 2
    assert torch.allclose(loss(rows), apart, rtol=1e-12) == (node is None)


def test_statistics_of_a_batch_keep_it() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    graph = capture(model, (torch.zeros(2, 6),), lambda x: x.mean())
    other = at_four_rows(graph)
    assert batch_dependence(graph, other) == "'1.running_mean' is updated by each micro-batch"
