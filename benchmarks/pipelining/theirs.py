"""One rank of torch.distributed.pipelining over copies of this rank's stage modules."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from parcompiler.runtime import Stage, Worker

NAMED = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}
CHUNKS = {"F": "forward_one_chunk", "B": "backward_one_chunk", "W": "backward_weight_one_chunk"}


class Theirs:
    """`step` of a batch, as `Worker.step`: from no gradients to the gradients of the mean loss.

    `orders` is a CSV of compute: a schedule that they have no name for runs from it.
    """

    def __init__(self, worker: Worker, schedule: str, count: int, orders: str) -> None:
        microbatches = worker.program.microbatches
        self.modules = {j: _module(stage) for j, stage in worker.stages.items()}
        device = torch.device("cpu")
        stages = [PipelineStage(item, j, count, device) for j, item in self.modules.items()]
        self.stages = stages
        self._first = 0 in self.modules
        self._last = count - 1 in self.modules
        self._losses: list[torch.Tensor] = []
        self._nothing = torch.zeros(microbatches)
        options: dict[str, Any] = {"n_microbatches": microbatches, "loss_fn": _as_it_is}
        kind = NAMED.get(schedule, _PipelineScheduleRuntime)
        several = issubclass(kind, _PipelineScheduleRuntime)
        self.schedule = kind(stages if several else stages[0], **options)
        if kind is _PipelineScheduleRuntime:
            self.schedule._load_csv(orders)

    def step(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Forward and backward of one batch."""
        for module in self.modules.values():
            module.zero_grad(set_to_none=True)
        arguments = (batch["tokens"],) if self._first else ()
        labels = {"labels": batch["labels"], "target": self._nothing} if self._last else {}
        self.schedule.step(*arguments, losses=self._losses, return_outputs=False, **labels)

    def loss(self) -> torch.Tensor | None:
        """The mean loss of the last step, on the rank that has the last stage."""
        return torch.stack(self._losses).mean() if self._last else None

    @contextmanager
    def recording(self) -> Iterator[list[str]]:
        """Within it, a step writes down what it computes, in order: `0F3`, `0B3`."""
        found: list[str] = []
        for stage in self.stages:
            for letter, name in CHUNKS.items():
                setattr(stage, name, _noting(stage, letter, name, found))
        try:
            yield found
        finally:
            for stage in self.stages:
                for name in CHUNKS.values():
                    delattr(stage, name)


def _noting(stage: PipelineStage, letter: str, name: str, found: list[str]) -> Callable[..., Any]:
    """A method of a stage that notes its calls."""
    method = getattr(stage, name)

    def noting(i: int, *arguments: Any, **options: Any) -> Any:
        split = letter == "B" and not options.get("full_backward", True)
        found.append(f"{stage.stage_index}{'I' if split else letter}{i}")
        return method(i, *arguments, **options)

    return noting


def _as_it_is(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The loss that the last stage has computed."""
    return output


def _module(stage: Stage) -> Stage:
    """A copy that takes what it receives by position, first, and passes over what it does not use.

    They send by position, and give the keywords of a rank to all stages of it. The call goes
    through one more Python function, and through no more modules.
    """
    made = copy.deepcopy(stage)
    kind: Any = type(stage)
    inputs = kind.inputs

    class Ordered(kind):  # type: ignore[misc]
        """The stage."""

        def forward(self, *values: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            if "labels" in inputs:
                return kind.forward(self, labels, *values)
            return kind.forward(self, *values)

    made.__class__ = Ordered
    return made
