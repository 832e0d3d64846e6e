"""Training in 16 bits: float32 masters of parameters, and a scale of the loss for float16.

    weights ─► master (float32) ─► parameter (16 bits) ─► forward, backward of a micro-batch
                  ▲      │                                          │ 16 bits
                  │      └────────── state_dict                     ▼
               optimizer ◄── unscaled, clipped ◄── sum of all micro-batches (float32)

The optimizer changes masters, and checkpoints hold them. A micro-batch has gradients in 16 bits,
which are added up in float32, over micro-batches and over ranks: a sum in bfloat16 stops growing at
256 times its summands, and would be rounded on every rank that it passes (as in Megatron-LM; Llama
Team 2024, arXiv:2407.21783, section 3.3.2). Parameters that are float32 in a 16-bit program (batch
norms) are their own masters; frozen ones have none.

So that small gradients are not zero in float16, the loss is multiplied by the scale before its
backward, and gradients are divided by it in float32. When a gradient is not finite the step is
skipped and the scale halved; after `INTERVAL` good steps in a row it is doubled (Micikevicius et
al. 2018, "Mixed Precision Training", arXiv:1710.03740, section 3.2; the numbers are those of
`torch.amp.GradScaler`). Training whose scale has fallen below `LEAST` would skip every step.

>>> scale = LossScale(8.0, interval=2)
>>> for good in (False, True, True, True):
...     scale.update(good)
>>> scale.value, scale.skipped
(8.0, 1)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from parcompiler.errors import InputError

GROWTH = 2.0
BACKOFF = 0.5
INTERVAL = 2000  # good steps in a row
INITIAL = 2.0**16
LEAST = 2.0**-14  # below it the loss itself, times the scale, loses digits in float16


@dataclass
class LossScale:
    """The current scale, the good steps since it last changed, and the skipped steps in all."""

    value: float = INITIAL
    interval: int = INTERVAL
    good: int = 0
    skipped: int = 0

    def set(self, value: float) -> None:
        """Set the scale. Raises InputError unless it is finite and positive."""
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and math.isfinite(value) and value > 0):
            message = f"the scale of the loss must be finite and positive ({value!r} given)"
            raise InputError(message)
        self.value, self.good = float(value), 0

    def update(self, finite: bool) -> None:
        """Adapt the scale after a step whose gradients were `finite` or not."""
        if not finite:
            self.value, self.good = self.value * BACKOFF, 0
            self.skipped += 1
            return
        self.good += 1
        if self.good == self.interval:
            self.value, self.good = self.value * GROWTH, 0


def sum_in_float32(parameters: Iterable[nn.Parameter]) -> None:
    """Accumulate gradients of 16-bit parameters in float32 from now on."""
    for parameter in parameters:
        parameter.grad_dtype = None  # its gradient may be of another dtype
        parameter.register_post_accumulate_grad_hook(widen)


def widen(parameter: torch.Tensor) -> None:
    """Convert a gradient to its `wide_dtype`: autograd keeps the first summand in its dtype, and
    adds the others in place, without float32 copies of them."""
    gradient = parameter.grad
    if gradient is not None and gradient.dtype != wide_dtype(parameter):
        parameter.grad = gradient.to(wide_dtype(parameter))


def wide_dtype(parameter: torch.Tensor) -> torch.dtype:
    """The dtype in which gradients of a parameter are added up."""
    return torch.float32 if parameter.grad_dtype is None else parameter.dtype


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    """The gradient of a parameter to add to, zeros if it has none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, dtype=wide_dtype(parameter))
    return parameter.grad


class Masters:
    """The masters of trained `parameters` (by name) of dtype `narrow`.

    `masters` overrides this: a parameter server has masters of all, ranks that it serves have none.
    """

    def __init__(
        self,
        narrow: torch.dtype | None,
        parameters: Mapping[str, nn.Parameter],
        masters: bool | None = None,
    ) -> None:
        self._parameters = parameters
        self.by_name = {
            name: nn.Parameter(
                parameter.detach().float()
                if parameter.dtype == narrow
                else parameter.detach().clone()
            )
            for name, parameter in parameters.items()
            if parameter.requires_grad
            and (parameter.dtype == narrow if masters is None else masters)
        }
        self._written: dict[str, int] = {}
        self._note()

    @torch.no_grad()
    def take_gradients(self, factor: torch.Tensor) -> None:
        """Move the gradients of parameters, times `factor`, to their masters."""
        for name, parameter in self._parameters.items():
            gradient, master = parameter.grad, self.by_name.get(name)
            if gradient is None:
                continue
            if master is None:
                gradient.mul_(factor)
            else:
                master.grad = gradient.float().mul_(factor)
                parameter.grad = None

    @torch.no_grad()
    def adopt(self, *, parameters: bool) -> None:
        """Copy masters that a user has written to into parameters and, with `parameters`,
        parameters into masters. A master that rounds to its parameter keeps its digits."""
        for name, master in self.by_name.items():
            parameter = self._parameters[name]
            if master._version != self._written[name]:
                parameter.copy_(master)
            elif parameters:
                same = parameter == master.to(parameter.dtype)
                master.copy_(torch.where(same, master, parameter))
        self._note()

    @torch.no_grad()
    def write(self) -> None:
        """Copy the masters into their parameters."""
        for name, master in self.by_name.items():
            self._parameters[name].copy_(master)
            master.grad = None
        self._note()

    def _note(self) -> None:
        """Note the versions of the masters: torch counts the writes to each."""
        self._written = {name: master._version for name, master in self.by_name.items()}
