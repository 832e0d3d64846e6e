"""The tensors in memory during a step, and those of the stages of a rank in all steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from parcompiler.instruction import Instruction
from parcompiler.runtime.collective_queue import Pending
from parcompiler.runtime.deferred import DeferredProduct
from parcompiler.runtime.stage import Stage

Key = tuple[str, int]  # the name of a value and its micro-batch


class Awaited(NamedTuple):
    """A tensor that comes from other ranks, and the line that asked for it."""

    line: Instruction
    pending: Pending


class SavedForBackward(NamedTuple):
    """The roots of the backward of a stage and micro-batch: edges of its outputs, and its loss."""

    edges: dict[str, GradientEdge]
    loss: torch.Tensor | None


@dataclass
class StepState:
    """The live tensors of one step."""

    microbatches: Sequence[Mapping[str, torch.Tensor]]
    training: bool
    receipts: dict[Key, Awaited] = field(default_factory=dict)
    gradient_receipts: dict[Key, list[Awaited]] = field(default_factory=dict)
    arrived: dict[Key, torch.Tensor] = field(default_factory=dict)
    results: dict[Key, torch.Tensor] = field(default_factory=dict)
    saved: dict[tuple[int, int], SavedForBackward] = field(default_factory=dict)
    products: dict[tuple[int, int], list[DeferredProduct]] = field(default_factory=dict)
    used: Counter[Key] = field(default_factory=Counter)  # by stages of this rank
    sent: Counter[Key] = field(default_factory=Counter)  # to other ranks
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    kept: dict[str, dict[int, torch.Tensor]] | None = None  # outputs of the model, if wanted
    mean: torch.Tensor | None = None
    scale: float = 1.0  # of the loss in the backward


def share_tensors(stages: Mapping[int, Stage]) -> dict[str, torch.Tensor]:
    """The parameters and buffers of stages by their name in the model, each once: stages share
    them."""
    tensors: dict[str, torch.Tensor] = {}
    for stage in stages.values():
        for attribute, name in stage.tensor_names().items():
            owner, _, leaf = attribute.rpartition(".")
            module = stage.get_submodule(owner)
            setattr(module, leaf, tensors.setdefault(name, getattr(module, leaf)))
    return tensors


def key_of(instruction: Instruction) -> Key:
    """Value and micro-batch of a message or a pass of the vocabulary."""
    assert instruction.value is not None
    return instruction.value, microbatch_of(instruction)


def microbatch_of(instruction: Instruction) -> int:
    """The micro-batch of an instruction."""
    assert instruction.microbatch is not None
    return instruction.microbatch
