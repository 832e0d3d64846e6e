"""The options of the data axis: what they become, and what is refused before anything starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import parcompiler as pc
from parcompiler.data_updates import ALL_REDUCE, DataUpdates


def small(**options: Any) -> pc.Program:
    mesh = pc.Mesh(**options.pop("mesh", {"data": 2}))
    model = options.pop("model", None) or nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    inputs = (torch.randn(2, 4),)
    return pc.compile(
        model, mesh, inputs, loss=torch.mean, microbatches=2, progress=False, **options
    )


def test_defaults_are_those_of_the_papers() -> None:
    assert DataUpdates.of() == ALL_REDUCE
    assert DataUpdates.of("local").outer == (0.7, 0.9)
    assert DataUpdates.of("local", outer="average", every=4).averages
    assert DataUpdates.of("asynchronous", staleness=0).staleness == 0
    assert DataUpdates.of(compression="powersgd").rank == 4


@pytest.mark.parametrize(
    "options",
    [
        {"updates": "local", "every": 5, "outer": (1, 0.5)},
        {"updates": "asynchronous", "staleness": 0},
        {"compression": "powersgd", "compression_rank": 2},
        {"updates": "parameter-server"},
    ],
)
def test_options_come_back_from_the_value(options: dict[str, Any]) -> None:
    found = DataUpdates.of(**options)
    assert DataUpdates.of(**found.options) == found


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"updates": "ring"}, "updates must be one of 'all-reduce', 'parameter-server'"),
        ({"updates": None}, "updates must be one of"),
        ({"compression": "int8"}, "compression must be one of None, 'bf16'"),
        ({"updates": "local", "every": 0}, "every must be an integer, 1 or more (0 given)"),
        ({"updates": "local", "every": True}, "every must be an integer"),
        ({"every": 4}, "every is for updates='local' (every=4 given)"),
        ({"staleness": 4}, "staleness is for updates='asynchronous'"),
        ({"staleness": 0}, "staleness is for updates='asynchronous' (staleness=0 given)"),
        ({"updates": "local", "compression_rank": 0}, "compression_rank is for compression="),
        ({"updates": "asynchronous", "staleness": -1}, "staleness must be an integer, 0 or more"),
        ({"compression_rank": 2}, "compression_rank is for compression='powersgd'"),
        ({"updates": "local", "outer": "adam"}, "outer must be 'average', 'nesterov', or"),
        ({"updates": "local", "outer": (0.7, float("nan"))}, "outer must be 'average'"),
        ({"updates": "local", "outer": (-0.7, 0.9)}, "outer must be 'average'"),
        ({"updates": "local", "outer": (0.7, 1.0)}, "outer must be 'average'"),
        ({"outer": "average"}, "outer is for updates='local' (outer='average' given)"),
        ({"updates": "local", "compression": "bf16"}, "for the gradients that an all-reduce sums"),
        ({"updates": "local", "mesh": {"pipeline": 2}}, "is for data ranks, and there is only one"),
        ({"compression": "bf16", "mesh": {}}, "compression='bf16' is for data ranks"),
        ({"updates": "local", "zero": 1}, "does not go with zero=1"),
        (
            {"compression": "powersgd", "compression_rank": 64},
            "compresses no gradient of the model",
        ),
        ({"compression": "powersgd", "zero": 1}, "does not go with zero=1"),
        ({"compression": "powersgd", "zero": 3}, "does not go with zero=3"),
        ({"updates": "asynchronous", "schedule": "pipedream"}, "pipedream"),
        ({"compression": "bf16", "precision": "fp16"}, "where all ranks scale the loss"),
        ({"updates": "local", "precision": "fp16"}, "where all ranks scale the loss"),
    ],
)
def test_what_means_nothing_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(pc.InputError) as raised:
        small(**options)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (nn.BatchNorm1d, {"updates": "asynchronous"}, "keeps no statistics"),
        (nn.SyncBatchNorm, {"updates": "local"}, "lets each data rank step by itself"),
        (nn.SyncBatchNorm, {"compression": "fp16"}, "lets each data rank step by itself"),
    ],
)
def test_statistics_of_batches_are_refused_where_batches_are_apart(
    make: Callable[[int], nn.Module], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(pc.InputError, match=words):
        small(model=nn.Sequential(nn.Linear(4, 4), make(4), nn.Linear(4, 1)), **options)


def test_a_plan_keeps_its_way_and_refuses_another() -> None:
    program = small(compression="bf16")
    plan = pc.Plan.from_json(program.plan.to_json())
    assert plan.updates == DataUpdates(compression="bf16")
    assert small(plan=plan).lowered.updates == plan.updates
    assert "updates" not in small().plan.to_json()
    with pytest.raises(pc.PlanError, match="other updates of data ranks"):
        small(plan=plan, compression="fp16")
    other = dataclasses.replace(plan, updates=None)
    with pytest.raises(pc.PlanError, match="other updates of data ranks"):
        small(plan=other, compression="fp16")


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_fewer_bytes_are_sent_and_predicted(precision: str | None) -> None:
    options = {"precision": precision, "zero": 0}
    whole, packed = small(**options).report(), small(**options, compression="bf16").report()
    assert {rank.nbytes for rank in whole.averaged} == {4 * (4 * 4 + 4 + 4 + 1)}
    assert [rank.nbytes for rank in packed.averaged] == [r.nbytes // 2 for r in whole.averaged]
    assert "rounded to 8 bits" in str(packed)
