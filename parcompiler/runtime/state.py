"""What a rank keeps during a step, and the tensors that its stages hold in all steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from parcompiler.instruction import Instruction
from parcompiler.runtime.deferred import Product
from parcompiler.runtime.stage import Stage
from parcompiler.runtime.turns import Turn

Key = tuple[str, int]  # the name of a value and its micro-batch


class Awaited(NamedTuple):
    """Something that comes from other ranks, and the line that asked for it."""

    line: Instruction
    turn: Turn


class Saved(NamedTuple):
    """What the backward of one stage and micro-batch needs: edges of the outputs, and leaves."""

    edges: dict[str, GradientEdge]
    loss: torch.Tensor | None


@dataclass
class State:
    """The tensors alive during one step."""

    microbatches: Sequence[Mapping[str, torch.Tensor]]
    training: bool
    receipts: dict[Key, Awaited] = field(default_factory=dict)
    gradient_receipts: dict[Key, list[Awaited]] = field(default_factory=dict)
    arrived: dict[Key, torch.Tensor] = field(default_factory=dict)
    results: dict[Key, torch.Tensor] = field(default_factory=dict)
    saved: dict[tuple[int, int], Saved] = field(default_factory=dict)
    products: dict[tuple[int, int], list[Product]] = field(default_factory=dict)
    used: Counter[Key] = field(default_factory=Counter)  # by stages of this rank
    sent: Counter[Key] = field(default_factory=Counter)  # to other ranks
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    mean: torch.Tensor | None = None
    scale: float = 1.0  # of the loss in the backward


def tensors_of(stages: Mapping[int, Stage]) -> dict[str, torch.Tensor]:
    """Parameters and buffers of stages by their name in the model, each once."""
    found: dict[str, torch.Tensor] = {}
    for module, leaf, name in _places(stages):
        found.setdefault(name, getattr(module, leaf))
    return found


def shared(stages: Mapping[int, Stage]) -> dict[str, torch.Tensor]:
    """`tensors_of`, and from now on every stage holds these."""
    tensors = tensors_of(stages)
    for module, leaf, name in _places(stages):
        setattr(module, leaf, tensors[name])
    return tensors


def _places(stages: Mapping[int, Stage]) -> Iterator[tuple[nn.Module, str, str]]:
    """Where each tensor stands, and its name in the model."""
    for stage in stages.values():
        for attribute, name in stage.tensor_names().items():
            owner, _, leaf = attribute.rpartition(".")
            yield stage.get_submodule(owner), leaf, name
