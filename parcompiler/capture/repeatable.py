"""Which runs of nodes may run a second time: those that leave everything outside as it was.

A block whose activations are recomputed runs twice for each micro-batch. Running statistics, say,
would then be updated twice.

>>> graph = fx.Graph()
>>> count, x = graph.placeholder("count"), graph.placeholder("x")
>>> added = graph.call_function(torch.ops.aten.add_.Tensor, (count, 1))
>>> doubled = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2))
>>> halved = graph.call_function(torch.ops.aten.div_.Tensor, (doubled, 2))
>>> is_repeatable([doubled, halved]), is_repeatable([added])
(True, False)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch  # noqa: F401 (the doctest's)
from torch import fx

from parcompiler.capture.effects import base_of, mutated_operands


def is_repeatable(nodes: Sequence[fx.Node]) -> bool:
    """Whether all that the nodes update in place was made by one of them."""
    inside = set(nodes)
    return all(
        _origin(operand, inside) in inside for node in nodes for operand in mutated_operands(node)
    )


def _origin(node: fx.Node, inside: Collection[fx.Node]) -> fx.Node:
    """The node that made the memory of a value, or the first outside on the way there."""
    while node in inside:
        base = base_of(node)
        if base is None:
            break
        node = base
    return node
