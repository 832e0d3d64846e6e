"""What metrics tell of steps."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

import parcompiler as pc


def test_speed_is_that_of_the_steps_behind_a_loaded_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And TensorBoard hides what a stopped run has told of these steps."""
    made: list[Any] = []

    def writer(folder: str, purge_step: int) -> Any:
        made.append((folder, purge_step))
        return SimpleNamespace(add_scalar=lambda *_: None, close=lambda: None)

    fake = SimpleNamespace(SummaryWriter=writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", cast(ModuleType, fake))
    clock = iter([0.0, 3.0, 3.0])  # the first step begins, the second has ended, a third may begin
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    worker: Any = SimpleNamespace(
        rank=0, step_count=0, folder=None, device=torch.device("cpu"), gradient_norm=None,
        program=SimpleNamespace(inputs={}, samples_of_step=6), trace=list,
        record=lambda on: None, gather_numbers=lambda *own: [own],
    )  # fmt: skip
    metrics = pc.Metrics(cast(pc.Worker, worker), every=20, jsonl=str(tmp_path / "m.jsonl"),
                         tensorboard="events")  # fmt: skip
    worker.step_count = 18  # as worker.load does
    for step in (19, 20):
        metrics.before_step()
        worker.step_count = step
        metrics.after_step(torch.tensor(1.0), rate=0.1)
    metrics.close()
    assert made == [("events", 19)]
    told = json.loads((tmp_path / "m.jsonl").read_text())
    assert (told["step"], told["seconds"], told["samples_per_second"]) == (20, 1.5, 4.0)


def test_what_cannot_be_reported_is_refused_by_name(tmp_path: Path) -> None:
    worker: Any = SimpleNamespace(rank=0)
    with pytest.raises(pc.InputError, match=rf"into {tmp_path} \(Is a directory\): give another"):
        pc.Metrics(worker, jsonl=tmp_path)
    with pytest.raises(pc.InputError, match=r"number of steps, at least 1 \(0 given\)"):
        pc.Metrics(worker, every=0)
