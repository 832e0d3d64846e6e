"""Workloads that are timed: operators on tensors of some shapes, and their counts in the cost
model.

The time of a call is the median of samples, each with enough calls to be long enough.

>>> import torch
>>> product = Workload("matmul", "matmul", torch.float32, ((4, 8), (8, 2)), torch.mm)
>>> product.key
'matmul float32 4x8 8x2'
>>> product.counted()
Counted(flops=128.0, nbytes=224.0, calls=1, kernels=1)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch

from parcompiler.cost.execution import Recorder, differentiate
from parcompiler.cost.stand_in import stand_in

Shape = tuple[int, ...]

SAMPLE = 0.002  # s; shorter samples are disturbed by clock and scheduler
FEWEST, MOST = 3, 25  # samples


@dataclass(frozen=True, slots=True)
class Counted:
    """Counts of the cost model: the measured operator's `calls`, the mean `flops` and `nbytes` of
    one, and all `kernels` that run."""

    flops: float
    nbytes: float
    calls: int
    kernels: int


@dataclass(frozen=True)
class Workload:
    """`run` on fresh tensors of `shapes`; with `gradients` also the backward to all of them.

    `kind` is a kind of operation or the full name of an operator: the curve that this is a point
    on.
    """

    name: str
    kind: str
    dtype: torch.dtype
    shapes: tuple[Shape, ...]
    run: Callable[..., Any]
    gradients: bool = False

    @property
    def key(self) -> str:
        """Its name in the journal."""
        shapes = " ".join("x".join(map(str, shape)) for shape in self.shapes)
        return f"{self.name} {str(self.dtype).removeprefix('torch.')} {shapes}"

    @property
    def nbytes(self) -> int:
        """The memory of the tensors in bytes."""
        return sum(torch.Size(shape).numel() for shape in self.shapes) * self.dtype.itemsize

    def tensors(self, device: torch.device) -> list[torch.Tensor]:
        """The operands, with random values, as zeros and denormal numbers run at other speeds."""
        generator = torch.Generator(device).manual_seed(0)
        made = [
            torch.rand(shape, dtype=torch.float32, device=device, generator=generator)
            for shape in self.shapes
        ]
        return [tensor.to(self.dtype).requires_grad_(self.gradients) for tensor in made]

    def call(self, operands: list[torch.Tensor]) -> Any:
        """Run it once."""
        result = self.run(*operands)
        if self.gradients:
            differentiate([result], operands)
        return result

    def counted(self) -> Counted:
        """The counts of the cost model, found on meta tensors."""
        shapes = (torch.empty(shape, dtype=self.dtype, device="meta") for shape in self.shapes)
        operands = [stand_in(tensor).requires_grad_(self.gradients) for tensor in shapes]
        with Recorder() as recorder:
            self.call(operands)
        kernels = list(recorder.take())
        calls = [one for one in kernels if self.kind in (one.kind, one.name)] or kernels
        return Counted(
            flops=fmean(one.computed for one in calls),
            nbytes=fmean(one.nbytes for one in calls),
            calls=len(calls),
            kernels=len(kernels),
        )


def seconds_of(
    call: Callable[[], object],
    budget: float,
    synchronize: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
    shortest: float = SAMPLE,
    agreed: Callable[[float], float] = lambda seconds: seconds,
) -> float:
    """The median time of `call` in s, from samples that take about `budget` s together.

    A median ignores samples that another process disturbed. `synchronize` waits for the device, so
    that calls that only start work are timed to its end. A sample takes at least `shortest` s, or
    `budget`. If several ranks call together, `agreed` makes the time of a sample equal on all, so
    that all call equally often.

    >>> ticks = iter([0, 9, 9, 12, 12, 15])  # the first sample was disturbed
    >>> seconds_of(lambda: None, 1.0, clock=lambda: next(ticks))
    3.0
    """

    def sample(calls: int) -> float:
        start = clock()
        for _ in range(calls):
            call()
        synchronize()
        return clock() - start

    call()  # the first allocates memory and chooses kernels
    synchronize()
    calls, seconds = 1, agreed(sample(1))
    while seconds < min(shortest, budget):
        calls *= 2
        seconds = agreed(sample(calls))
    count = min(MOST, max(FEWEST, int(budget / max(seconds, 1e-9))))
    samples = [seconds, *(sample(calls) for _ in range(count - 1))]
    return median(samples) / calls
