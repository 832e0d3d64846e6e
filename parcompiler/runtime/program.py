"""The program of one rank: a plain value that an emitted script can write down.

Shapes are those of one micro-batch. Nothing here computes or communicates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from parcompiler.data_updates import ALL_REDUCE, DataUpdates
from parcompiler.grid import Coordinate, Grid
from parcompiler.instruction import (
    BEHIND,
    TRANSFERS,
    Instruction,
    Kind,
    is_of_experts,
    listing,
    parse,
)
from parcompiler.pieces import Shard, Span, piece

# Types that a batch may have besides tensors.
PLAIN = (type(None), bool, int, float, complex, str, torch.dtype)


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor of the batch, under `key`; integers are below `high` when known."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    high: int | None = None


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that crosses stages; a gradient comes back for it when it is differentiable.

    `order` lists its dimensions from the outermost in memory, if that is not their own order.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool = True
    order: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class KeptOutput:
    """An output of the model that predictions return: the value `value` of stages at pipeline
    coordinate `home`, with `shape` in a micro-batch.

    Tensor ranks have pieces along `dim`, whose segments are `sizes`, or summands if `partial`.
    `head` says what the rows of the head compute from it: "" (nothing), "product", or "logits" from
    that. It depends on `inputs` of the batch.
    """

    value: str
    home: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    inputs: tuple[str, ...] = ()
    dim: int | None = None
    sizes: tuple[int, ...] = ()
    partial: bool = False
    head: str = ""


@dataclass(frozen=True, slots=True)
class Tied:
    """A tensor that several ranks hold, by its name in the model; their gradients are summed."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class RankProgram:
    """The program of one rank; `size` is the number of all ranks.

    `digest` identifies the whole program and is equal on all ranks; `channels` are all directed
    pairs of ranks that exchange messages, in the order in which every rank makes their groups.

    With several ranks along `data`, the ranks of channels and tied tensors are pipeline
    coordinates, which stand for the ranks of every data coordinate there. Instructions name actual
    ranks. `buckets` are the tensors whose gradients are summed together. `shards` are the tensors
    of which each of the `tensor` ranks of a group holds a piece; `rows` are those of which every
    rank of a pipeline holds rows, with the total number of rows. Among the `data` ranks, which hold
    the same parameters, groups of `context` neighbours share a batch, and groups of `expert`
    neighbours share out the experts: each has an equal piece of the first dimension of the tensors
    in `experts`, which has its total length. Gradients of the tables in `row_gradients` are the
    rows that are looked up, at most that many on a rank. `narrow` is the 16-bit dtype of parameters
    that have masters in float32. `unsaved` are the tensors that the model's state dict does not
    have. `updated` are the parameters that forwards update themselves. `outputs` are those that
    predictions return. `constants` are the compiled non-tensor values of a batch, by key.
    """

    rank: int
    size: int
    device: str
    microbatches: int
    digest: str
    loss: torch.dtype
    stages: tuple[int, ...]
    instructions: tuple[Instruction, ...] = field(repr=False)
    evaluation: tuple[Instruction, ...] = field(repr=False)
    inputs: Mapping[str, Input] = field(default_factory=dict)
    values: Mapping[str, Value] = field(default_factory=dict)
    tied: Mapping[str, Tied] = field(default_factory=dict)
    buckets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    channels: tuple[tuple[int, int], ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    positional: bool = False
    data: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1
    shards: Mapping[str, Shard] = field(default_factory=dict)
    experts: Mapping[str, int] = field(default_factory=dict)
    asynchronous: bool = False  # whether a step updates parameters itself, after every backward
    zero: int = 0  # the level of ZeRO: what data ranks share out
    updates: DataUpdates = ALL_REDUCE  # how data ranks combine their gradients or weights
    synchronized: bool = False  # whether batch norms use the batches of all data ranks
    rows: Mapping[str, int] = field(default_factory=dict)
    narrow: torch.dtype | None = None
    unsaved: tuple[str, ...] = ()
    updated: tuple[str, ...] = ()
    outputs: Mapping[str, KeptOutput] = field(default_factory=dict)
    row_gradients: Mapping[str, int] = field(default_factory=dict)
    constants: Mapping[str, object] = field(default_factory=dict)

    @cached_property
    def grid(self) -> Grid:
        """All ranks."""
        pipeline = self.size // (self.data * self.tensor)
        return Grid(pipeline, self.data, self.tensor, self.context, self.expert)

    @cached_property
    def coordinate(self) -> Coordinate:
        """Where this rank sits."""
        return self.grid.coordinate(self.rank)

    @cached_property
    def step(self) -> tuple[Instruction, ...]:
        """The instructions before the optimizer's step."""
        return tuple(x for x in self.instructions if x.kind not in BEHIND)

    @property
    def batches(self) -> int:
        """The number of batches whose gradients a step sums: of all data ranks, or 1 where each
        steps by itself."""
        return 1 if self.updates.separate else self.grid.batches

    @cached_property
    def pieces(self) -> frozenset[str]:
        """The tensors of which this rank has only a part."""
        return frozenset({*self.shards, *self.rows, *self.experts})

    @cached_property
    def summed(self) -> dict[str, tuple[str, ...]]:
        """Tensor names by the labels of sums of gradients, gathers and averages."""
        return {**self.buckets, **{label: (tied.name,) for label, tied in self.tied.items()}}

    @cached_property
    def ties(self) -> dict[str, tuple[int, ...]]:
        """The pipeline coordinates that hold each tied tensor."""
        return {tied.name: tied.ranks for tied in self.tied.values()}

    def own_experts(self, name: str) -> Span:
        """The piece of the experts that this rank has of a tensor."""
        return piece(self.experts[name], self.expert, self.coordinate.data % self.expert)

    @property
    def sharing(self) -> int:
        """The level of ZeRO; 1 with a parameter server, which has all rows."""
        return 1 if self.updates.way == "parameter-server" else self.zero

    @cached_property
    def samples(self) -> int:
        """The samples of a micro-batch."""
        return samples_of(self.inputs.values())

    def rows_of_sample(self, spec: Input) -> int:
        """The rows of an input that belong to one sample; 0 for one without rows, and for one that
        all samples share."""
        return spec.shape[0] // self.samples if spec.shape else 0

    @property
    def samples_of_step(self) -> int:
        """The samples that all data ranks together take in a step."""
        return self.samples * self.microbatches * self.grid.batches

    def summing(self) -> list[tuple[int, ...]]:
        """All groups of ranks that sum gradients, in the order in which every rank makes them."""
        grid = self.grid
        ties = {*self.ties.values()}
        places: set[tuple[int, ...]] = set()
        if self.data > 1:
            places |= {(position,) for position in range(grid.pipeline)}
        if self.zero < 2 and not self.updates.separate:
            places, ties = places | ties, set()
        groups = [grid.replicas(p, k) for p in sorted(places) for k in range(grid.tensor)]
        if grid.data > grid.expert > 1:
            groups += [
                grid.replicas((position,), tensor, expert)
                for position in range(grid.pipeline)
                for tensor in range(grid.tensor)
                for expert in range(grid.expert)
            ]
        for ranks in sorted(ties):  # gradients are in pieces by then, or of this data rank only
            groups += [tuple(grid.rank(p, *column) for p in ranks) for column in grid.columns()]
        return groups

    def is_near(self, rank: int) -> bool:
        """Whether a rank has the pipeline coordinate of this one."""
        return self.grid.coordinate(rank).pipeline == self.coordinate.pipeline

    def microbatch(self, i: int) -> int:
        """The number of this rank's micro-batch `i` among those of all data coordinates."""
        return self.batch * self.microbatches + i

    @property
    def batch(self) -> int:
        """The number of this rank's batch: context ranks share one."""
        return self.grid.batch_of(self.coordinate.data)

    def in_form(self, batch: Mapping[str, torch.Tensor]) -> object:
        """A batch by keys in the form of the compiled inputs: itself, or a tuple of positional
        arguments with the constants among them; nested ones are dicts."""
        if not self.positional:
            return batch
        form: dict[int, Any] = {}
        for key, value in {**self.constants, **batch}.items():
            position, _, rest = key.partition(".")
            if rest:
                form.setdefault(int(position), {})[rest] = value
            else:
                form[int(position)] = value
        return tuple(form.get(position, ()) for position in range(max(form) + 1))

    @classmethod
    def parsed(cls, *, instructions: str, evaluation: str, **fields: object) -> RankProgram:
        """A program from the texts of its pipeline coordinate's lists, in the format of scripts."""
        lists = {"instructions": parse(instructions), "evaluation": parse(evaluation)}
        program = cls(**lists, **fields)  # type: ignore[arg-type]
        at, grid = program.coordinate, program.grid
        return replace(
            program,
            instructions=on_rank(program.instructions, at, grid, program.updates),
            evaluation=on_rank(program.evaluation, at, grid, program.updates),
        )


def samples_of(inputs: Iterable[Input]) -> int:
    """The samples of a micro-batch: its rows, if its tensors have equally many; else 1.

    A tensor [1, ...] of two dimensions or more is shared by the rows of others, as positions are.
    """
    shapes = [spec.shape for spec in inputs if spec.shape]
    rows = {shape[0] for shape in shapes if shape[0] != 1 or len(shape) == 1}
    return rows.pop() if len(rows) == 1 else 1


def on_rank(
    lines: Iterable[Instruction], at: Coordinate, grid: Grid, updates: DataUpdates = ALL_REDUCE
) -> tuple[Instruction, ...]:
    """The list of a pipeline coordinate as that of the rank at `at`.

    A peer is the rank with the peer's pipeline coordinate and this rank's other coordinates, or the
    first of its tensor-parallel group where all ranks of a pipeline take part. A group that sums
    gradients has the ranks of all data coordinates, or of this rank's only where data ranks step by
    themselves.
    """
    if grid.copies == 1:
        return tuple(lines)

    def group(line: Instruction) -> tuple[int, ...]:
        if updates.separate and line.kind is Kind.REDUCE_GRADIENTS:
            return tuple(grid.rank(p, at.data, at.tensor) for p in line.ranks)
        experts = at.data % grid.expert if is_of_experts(line) else None
        return grid.replicas(line.ranks, at.tensor, experts)

    return tuple(
        replace(
            line,
            peer=None
            if line.peer is None
            else grid.rank(line.peer, at.data, 0 if line.kind in TRANSFERS else at.tensor),
            ranks=group(line),
        )
        for line in lines
    )


def of_first(lines: Iterable[Instruction], microbatches: int) -> tuple[Instruction, ...]:
    """An evaluation's list for its first `microbatches` only.

    As all ranks leave out the same ones, order and peers of the others stay as verified.
    """
    return tuple(x for x in lines if x.microbatch is None or x.microbatch < microbatches)


def channels_of(lists: tuple[tuple[Instruction, ...], ...]) -> tuple[tuple[int, int], ...]:
    """The directed pairs (from, to) of ranks that exchange messages, sorted."""
    pairs = {
        (rank, line.peer)
        for rank, instructions in enumerate(lists)
        for line in instructions
        if line.kind is Kind.SEND and line.peer is not None
    }
    return tuple(sorted(pairs))


def digest_of(lists: tuple[tuple[Instruction, ...], ...], *more: str) -> str:
    """A short name of a whole program: 15 hexadecimal digits, so that it fits a signed integer."""
    text = "\n\n".join([*map(listing, lists), *more])
    return hashlib.sha256(text.encode()).hexdigest()[:15]
