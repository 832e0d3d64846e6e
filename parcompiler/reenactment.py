"""PipeDream in one process: the original model, whose stages are updated as late as on the ranks.

The list of a stage says how many updates stand before the forward of each micro-batch. On p = 2:

    stage 0   F0 F1 B0 U0 F2 B1 U1 F3 ...      before F2: U0
    stage 1   F0 B0 U0 F1 B1 U1 F2 ...         before F2: U0 U1

So before micro-batch 2 the whole model is run, stage 0 has been updated by the gradients of
micro-batch 0 and stage 1 by those of 0 and 1; those of micro-batch 1 wait for stage 0. Nothing else
is needed for what weight stashing computes (1806.03377, section 3.3): no ranks, no versions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import torch

from parcompiler.errors import InputError
from parcompiler.instruction import Instruction, Kind
from parcompiler.lower import Lowered
from parcompiler.pool import Outcome
from parcompiler.reference import Optimizer, Original


def reenacted(
    original: Original,
    lowered: Lowered,
    batches: Iterable[Mapping[str, torch.Tensor]],
    optimizer: Optimizer,
) -> Outcome:
    """Steps of an asynchronous program, one on each batch: their mean losses, and the state after.

    Each micro-batch is a minibatch of its own, with the gradient of its own loss.
    """
    stages = [_Stage(original, lowered, j, optimizer) for j in range(len(lowered.stages))]
    losses = [_step(original, stages, lowered.microbatches, batch) for batch in batches]
    return Outcome(torch.stack(losses), {}, original.state())


def _step(
    original: Original, stages: Sequence[_Stage], count: int, batch: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """One step: the mean loss."""
    losses = []
    for stage in stages:
        stage.start()
    for i in range(count):
        for stage in stages:
            stage.update_before(i)
        with original.computing():
            loss = original.loss(batch, i)
            torch.autograd.backward(loss)
        losses.append(loss.detach())
        for stage in stages:
            stage.keep_gradients(i)
    for stage in stages:
        stage.update_before(count)
    return torch.stack(losses).mean()


class _Stage:
    """The part of the model that is on one stage, and the updates that its list makes."""

    def __init__(self, original: Original, lowered: Lowered, j: int, optimizer: Optimizer) -> None:
        named = [original.parameters.get(name) for name in lowered.stages[j].tensors]
        self._parameters = [p for p in named if p is not None and p.requires_grad]
        self._optimizer = optimizer(self._parameters) if self._parameters else None
        self._lines = _lines(lowered, j)
        self._left: deque[Instruction] = deque()
        self._gradients: dict[int | None, list[torch.Tensor | None]] = {}  # by micro-batch

    def start(self) -> None:
        """Begin a step."""
        self._left = deque(self._lines)

    def update_before(self, i: int) -> None:
        """Make the updates that stand before the forward of micro-batch `i`, or all the rest."""
        while self._left:
            line = self._left.popleft()
            if line.kind is Kind.UPDATE:
                self._update(line.microbatch)
            elif line.microbatch == i:
                return
            else:
                message = f"'{line}' stands where micro-batch {i} is due: it has no re-enactment"
                raise InputError(message)

    def keep_gradients(self, i: int) -> None:
        """Take the gradients of micro-batch `i` from the parameters, until its update."""
        self._gradients[i] = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    def _update(self, i: int | None) -> None:
        """One step of the optimizer."""
        for parameter, gradient in zip(self._parameters, self._gradients.pop(i), strict=True):
            parameter.grad = gradient
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)


def _lines(lowered: Lowered, j: int) -> tuple[Instruction, ...]:
    """The forwards and updates of a stage."""
    lines = lowered.instructions[lowered.stages[j].rank]
    kinds = (Kind.FORWARD, Kind.UPDATE)
    return tuple(line for line in lines if line.stage == j and line.kind in kinds)
