"""What a block reads from outside: stand-ins for its inputs, parameters and buffers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from parcompiler.cost.stand_in import is_differentiable, source, stand_in
from parcompiler.errors import InputError


@dataclass
class Boundary:
    """The values that a block receives, the state that it owns, and the leaves of its backward."""

    received: dict[fx.Node, Any] = field(default_factory=dict)
    parameters: dict[fx.Node, Any] = field(default_factory=dict)
    buffers: dict[fx.Node, Any] = field(default_factory=dict)
    leaves: list[torch.Tensor] = field(default_factory=list)

    @property
    def values(self) -> dict[fx.Node, Any]:
        """All of them, by node."""
        return self.received | self.parameters | self.buffers


def boundary(
    nodes: Sequence[fx.Node],
    inputs: Collection[fx.Node],
    parameters: Collection[str],
    buffers: Collection[str],
    differentiable: Collection[str],
) -> Boundary:
    """Stand-ins for all that `nodes` read from outside, in the order of use.

    Raises InputError for a node that is no input, parameter or buffer.
    """
    found = Boundary()
    for node in outside(nodes):
        value = node.meta.get("val")
        if node in inputs and node.name in differentiable:
            found.received[node], leaves = source(value)
            found.leaves += leaves
        elif node in inputs:
            found.received[node] = stand_in(value)
        elif node.name in parameters:
            found.parameters[node] = stand_in(value)
            if is_differentiable(found.parameters[node]):
                found.leaves.append(found.parameters[node].requires_grad_())
        elif node.name in buffers or node.op == "get_attr":
            found.buffers[node] = stand_in(value)
        else:
            message = (
                f"the block reads {node.name!r}, which is none of its inputs, parameters and "
                "buffers: list it as one of them"
            )
            raise InputError(message)
    return found


def outside(nodes: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """What `nodes` read that is none of them, by first use."""
    inside = set(nodes)
    read = (argument for node in nodes for argument in node.all_input_nodes)
    return (node for node in dict.fromkeys(read) if node not in inside)
