"""The representation below the plan: stages, the values between them, instruction lists.

The verifier, the simulator, the code generator and the runtime read it and decide nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, TypeVar

import torch
from torch import fx

from parcompiler.data_updates import ALL_REDUCE, DataUpdates
from parcompiler.graph import Block, EmbeddingLookup, Graph, VocabularyHead
from parcompiler.grid import Grid
from parcompiler.instruction import Instruction, Kind
from parcompiler.plan import Plan, StageChoice

Layer = TypeVar("Layer", bound=EmbeddingLookup | VocabularyHead)


@dataclass(frozen=True, slots=True)
class StageValue:
    """A tensor that one stage makes and others use; `shape` is that of one micro-batch.

    `order` are its dimensions in memory order, the outermost first; empty for the usual order. The
    producer or consumer NOWHERE stands for the vocabulary layers on all ranks. `detached` are the
    consumers on ranks that send no gradient back: no use of a differentiable value there leads to
    the loss.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool
    producer: int
    consumers: tuple[int, ...]
    order: tuple[int, ...] = ()
    detached: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of one message."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Call:
    """A stage's call of one block, with the names of arguments and results.

    With `recompute` its activations are not kept: the backward runs it again. With `offload` they
    wait in the host's memory. Otherwise the backward runs only the nodes in `again` again.
    """

    block: Block
    arguments: tuple[str, ...]
    results: tuple[str, ...]
    recompute: bool = False
    offload: bool = False
    again: frozenset[fx.Node] = frozenset()


@dataclass(frozen=True, slots=True)
class StageProgram:
    """The blocks on one pipeline stage, in order, and the values that it receives and gives.

    `inputs` are tensors of the batch, `receives` values of earlier stages, `gives` values that
    later stages need (and the loss, on the stage that has it). `prologue` are the nodes that the
    stage computes for itself instead of receiving them. A stage that is not `trained` has no
    backward: nothing in it depends on a trained parameter and leads to the loss. `keeps` are the
    values that are outputs of the model.
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
    trained: bool = True
    keeps: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TiedTensor:
    """A trainable tensor that several ranks hold: the sum of their gradients is its gradient."""

    label: str
    name: str
    ranks: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors whose gradients are summed."""
        return (self.name,)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Trainable tensors of one rank whose gradients are summed together over the data ranks.

    They are final after the last backward of `stage` (NOWHERE: of the vocabulary layers on all
    ranks); `ranks` is the one rank.
    """

    label: str
    names: tuple[str, ...]
    ranks: tuple[int, ...]
    stage: int


@dataclass(frozen=True, slots=True)
class SpreadLayer(Generic[Layer]):
    """A layer of the vocabulary on all ranks, which reads `inputs` of the batch.

    `value` is the result of a lookup, which `stage` reads, or the input of the head, which `stage`
    makes. No other stage reads the result of a lookup: several blocks use a copy that `stage`
    makes.
    """

    value: str
    layer: Layer
    stage: int
    inputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """The layers of the vocabulary on all ranks; every rank holds rows of their tables.

    `tensors` are the parameters and buffers that are divided like this, each with the size of the
    vocabulary, which is one of its dimensions.
    """

    method: str
    lookups: tuple[SpreadLayer[EmbeddingLookup], ...]
    head: SpreadLayer[VocabularyHead] | None
    tensors: Mapping[str, int]

    @property
    def all(self) -> tuple[SpreadLayer[EmbeddingLookup] | SpreadLayer[VocabularyHead], ...]:
        """The lookups, then the head."""
        return (*self.lookups, *([self.head] if self.head else []))


@dataclass(frozen=True)
class Lowered:
    """The lowered plan: the work of every rank. `variables` names each node that crosses blocks.

    An `asynchronous` step updates the parameters of a stage after each of its backwards.

    A rank here is a pipeline coordinate of the mesh. All ranks at it do the same: `data` of them
    on different batches (of which every `context` neighbours share one, see `grid`), and `tensor`
    of them on their pieces of the tensors that the graph divides. So nothing here grows with their
    number; `grid` lists the ranks, and `codegen.rank` says what each does. `plan` is the plan that
    was lowered, for the verifier to compare.
    """

    graph: Graph
    microbatches: int
    stages: tuple[StageProgram, ...]
    values: Mapping[str, StageValue]
    tied: tuple[TiedTensor, ...]
    instructions: tuple[tuple[Instruction, ...], ...]
    evaluation: tuple[tuple[Instruction, ...], ...]
    variables: Mapping[fx.Node, str] = field(repr=False)
    asynchronous: bool = False
    zero: int = 0
    updates: DataUpdates = ALL_REDUCE
    data: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1
    buckets: tuple[Bucket, ...] = ()
    vocabulary: Spread | None = None
    plan: Plan | None = field(default=None, repr=False)

    @property
    def size(self) -> int:
        """The number of instruction lists."""
        return len(self.instructions)

    @property
    def grid(self) -> Grid:
        """All ranks of the mesh."""
        return Grid(self.size, self.data, self.tensor, self.context, self.expert)

    @property
    def sums(self) -> tuple[TiedTensor | Bucket, ...]:
        """All tensors and buckets whose gradients are summed over ranks."""
        return self.tied if self.updates.separate else self.shared

    @property
    def shared(self) -> tuple[TiedTensor | Bucket, ...]:
        """All tensors and buckets that ranks combine: gradients, or parameters after the step."""
        return (*self.tied, *self.buckets)

    @property
    def choices(self) -> tuple[StageChoice, ...]:
        """The stages in the form of a plan: the units of the plan's stages where the parameters of
        each unit are gathered by themselves (`lower.units`)."""
        return tuple(
            StageChoice(tuple(call.block.name for call in stage.calls), stage.rank)
            for stage in self.stages
        )

    @cached_property
    def split(self) -> frozenset[int]:
        """The stages whose backward comes in two parts, for inputs and for weights."""
        return frozenset(
            line.stage
            for lines in self.instructions
            for line in lines
            if line.kind is Kind.BACKWARD_WEIGHT and line.stage is not None
        )

    def on_rank(self, rank: int) -> tuple[StageProgram, ...]:
        """The stages of one rank, in order."""
        return tuple(stage for stage in self.stages if stage.rank == rank)
