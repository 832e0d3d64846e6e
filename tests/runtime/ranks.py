"""Lowered programs run in this process: plans by hand, ranks as threads over a delayed network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import nn

from parcompiler.capture.blocks import cut
from parcompiler.codegen.modules import stage_classes
from parcompiler.codegen.rank import rank_program
from parcompiler.graph import Graph
from parcompiler.lower import Lowered, lower
from parcompiler.plan import Plan, Shape, StageChoice
from parcompiler.runtime import Stage
from parcompiler.runtime.batch import microbatches
from parcompiler.runtime.interpreter import Interpreter
from parcompiler.runtime.program import RankProgram, of_first
from parcompiler.schedules import stages_per_rank
from parcompiler.schedules.planned import planned
from parcompiler.verifier import verify
from tests.runtime.delays import DelayedChannels, Network
from tests.runtime.drawn import drawn_batch


@dataclass(frozen=True)
class Step:
    """What a step leaves: the loss of every rank, and the gradients that it has by name."""

    losses: tuple[torch.Tensor, ...]
    gradients: tuple[Mapping[str, torch.Tensor], ...]

    def __eq__(self, other: object) -> bool:
        """Bit for bit."""
        return isinstance(other, Step) and (
            all(map(torch.equal, self.losses, other.losses))
            and all(map(same, self.gradients, other.gradients))
        )

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """The gradients of all ranks."""
        return {name: gradient for found in self.gradients for name, gradient in found.items()}


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Whether two sets of tensors have the same bits; NaN equals nothing."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def divided(
    graph: Graph, schedule: str, ranks: int, count: int, sizes: Sequence[int] = (), data: int = 1
) -> Lowered:
    """The verified program of `count` micro-batches: `sizes` blocks a stage, or all alike."""
    parts = cut(graph, 1)
    plan = Plan(
        model=graph.name,
        fingerprint=graph.fingerprint,
        mesh=Shape(pipeline=ranks, data=data),
        microbatches=count,
        schedule=schedule,
        virtual_stages=stages_per_rank(schedule, 1),
        granularity=1,
    )
    placement = planned(plan).placement
    names = [block.name for block in parts.blocks]
    ends = [0, *accumulate(sizes or even(len(placement), len(names)))]
    choices = tuple(
        StageChoice(tuple(names[a:b]), rank)
        for (a, b), rank in zip(pairwise(ends), placement, strict=True)
    )
    lowered = lower(graph, replace(plan, stages=choices), parts)
    verify(lowered)
    return lowered


def even(stages: int, count: int) -> list[int]:
    """Numbers of blocks per stage that differ by at most one."""
    assert count >= stages
    return [count * (j + 1) // stages - count * j // stages for j in range(stages)]


class Ranks:
    """All ranks of a lowered program, with the weights of its graph, and a batch for them.

    With several data ranks, `batches` has one for each, and `batch` is the first.
    """

    def __init__(self, lowered: Lowered) -> None:
        self.programs = [rank_program(lowered, rank, "cpu") for rank in range(lowered.grid.size)]
        places = [program.coordinate.pipeline for program in self.programs]
        classes = [stage_classes(lowered, place, "cpu") for place in places]
        stages = [{j: make() for j, make in made.items()} for made in classes]
        self.interpreters = list(map(interpreter, self.programs, stages))
        for item in self.interpreters:
            for name, tensor in item.tensors.items():
                tensor.detach().copy_(lowered.graph.tensors[name])
        generator = torch.Generator().manual_seed(0)
        self.batches = [drawn_batch(self.programs[0], generator) for _ in range(lowered.data)]
        self.batch = self.batches[0]

    def step(self, seed: int = 0, habit: str | None = None, *, keep: bool = False) -> Step:
        """One training step in the order that `seed` draws; `keep` adds to earlier gradients."""
        network = Network(len(self.programs), seed, habit)
        for item in self.interpreters:
            item.channels = DelayedChannels(item.program, network)
            for tensor in item.tensors.values():
                tensor.grad = tensor.grad if keep else None
        losses = network.run([partial(self._run, item) for item in self.interpreters])
        gradients = [
            {n: t.grad.clone() for n, t in item.tensors.items() if t.grad is not None}
            for item in self.interpreters
        ]
        return Step(tuple(losses), tuple(gradients))

    def evaluation(self, count: int, seed: int = 0) -> list[torch.Tensor]:
        """The loss of every rank in an evaluation of the first `count` micro-batches."""
        network = Network(len(self.programs), seed)
        for item in self.interpreters:
            item.channels = DelayedChannels(item.program, network)
        return network.run([partial(self._evaluate, item, count) for item in self.interpreters])

    def _evaluate(self, item: Interpreter, count: int) -> torch.Tensor:
        """The evaluation of one rank."""
        pieces = microbatches(item.program, self.batches[item.program.coordinate.data])[:count]
        return item.run(of_first(item.program.evaluation, count), pieces, training=False)

    def _run(self, item: Interpreter) -> torch.Tensor:
        """The step of one rank."""
        pieces = microbatches(item.program, self.batches[item.program.coordinate.data])
        return item.run(item.program.instructions, pieces, training=True)


def interpreter(program: RankProgram, stages: Mapping[int, Stage]) -> Interpreter:
    """The interpreter of a rank; every step gives it channels of its own."""
    return Interpreter(program, stages, DelayedChannels(program, Network(program.size, 0)))


def reference(model: nn.Module, ranks: Ranks) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Mean loss and gradients of the original model, one micro-batch of the batch after another."""
    program = ranks.programs[0]
    pieces = [piece for batch in ranks.batches for piece in microbatches(program, batch)]
    losses = []
    model.zero_grad()
    for piece in pieces:
        found = model(**{program.inputs[name].key: tensor for name, tensor in piece.items()})
        loss = found if isinstance(found, torch.Tensor) else found["loss"]
        loss.backward(torch.full_like(loss, 1 / len(pieces)))
        losses.append(loss.detach())
    named = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return torch.stack(losses).mean(), named
