"""The one representation below the plan: stages, the values between them, instruction lists.

The verifier, the simulator, the code generator and the runtime read these; nothing is decided
after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from parcompiler.graph import Block, Graph
from parcompiler.instruction import Instruction


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that one stage makes and others use; `shape` is that of one micro-batch.

    `order` are its dimensions as they lie in memory, the outermost first, if not in their order.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool
    producer: int
    consumers: tuple[int, ...]
    order: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of one message."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Call:
    """One block run by a stage: what it reads and what it names its results."""

    block: Block
    arguments: tuple[str, ...]
    results: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stage:
    """The blocks on one pipeline stage, in order, and what goes in and out.

    `inputs` are tensors of the batch, `receives` values of earlier stages, `gives` values that
    later stages need (and the loss, on the stage that has it). `prologue` are the nodes that the
    stage computes for itself instead of receiving them.
    """

    index: int
    rank: int
    calls: tuple[Call, ...]
    prologue: tuple[fx.Node, ...]
    inputs: tuple[str, ...]
    receives: tuple[str, ...]
    gives: tuple[str, ...]
    loss: str | None
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Tied:
    """A trainable tensor that several ranks hold: the sum of their gradients is its gradient."""

    label: str
    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Lowered:
    """What every rank does. `variables` names each node that crosses blocks."""

    graph: Graph
    microbatches: int
    stages: tuple[Stage, ...]
    values: Mapping[str, Value]
    tied: tuple[Tied, ...]
    instructions: tuple[tuple[Instruction, ...], ...]
    evaluation: tuple[tuple[Instruction, ...], ...]
    variables: Mapping[fx.Node, str] = field(repr=False)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.instructions)

    @property
    def loss_rank(self) -> int:
        """The rank whose stage computes the loss."""
        return next(stage.rank for stage in self.stages if stage.loss is not None)

    def on_rank(self, rank: int) -> tuple[Stage, ...]:
        """The stages of one rank, in order."""
        return tuple(stage for stage in self.stages if stage.rank == rank)
