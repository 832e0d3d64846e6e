"""A second capture of a program's model, at other sizes: it answers what one graph leaves open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from parcompiler.capture import capture
from parcompiler.capture.inputs import Batch, flat, with_tensors
from parcompiler.capture.modes import in_modes
from parcompiler.graph import Graph
from parcompiler.symbolic.questions import Again
from parcompiler.symbolic.sizes import Size, Sizes


def capturing(
    model: nn.Module,
    graph: Graph,
    sizes: Sequence[Size],
    loss: Callable[[Any], torch.Tensor] | None,
) -> Again:
    """Captures `model` on the sample of its graph, repeated or cut to other sizes."""

    def again(numbers: Sizes) -> Graph:
        with in_modes(model, graph.modes):
            return capture(model, sample_at(graph, sizes, numbers), loss)

    return again


def sample_at(graph: Graph, sizes: Sequence[Size], numbers: Sizes) -> Batch:
    """The sample that a graph was captured on, repeated or cut to other numbers of some sizes."""
    keys = {item.node: item.key for item in graph.inputs}
    tensors = {key: leaf for key, leaf in flat(graph.sample) if isinstance(leaf, torch.Tensor)}
    for size in sizes:
        for node, dim in size.places:
            number = numbers.get(size.letter, size.now)
            tensors[keys[node]] = _resized(tensors[keys[node]], dim, number)
    args, kwargs = with_tensors(graph.sample, tensors)
    return kwargs or args


def _resized(value: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """A tensor whose elements along a dimension are repeated, or cut."""
    rows = torch.arange(size, device=value.device) % value.shape[dim]
    return value.index_select(dim, rows)
