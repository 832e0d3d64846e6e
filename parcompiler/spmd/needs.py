"""As what the readers of a value need it: where all agree, it may be converted where it is made."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

from torch import fx

from parcompiler.spmd.call import read
from parcompiler.spmd.placement import Placement
from parcompiler.spmd.strategy import Strategy

Need = tuple[Placement, bool]  # a type, and whether a gradient comes back


def common_need(
    node: fx.Node, assignment: Mapping[fx.Node, Strategy], differentiable: Container[str]
) -> Need | None:
    """What all who read a node need; None where they differ, or one takes what there is."""
    found: set[Need] = set()
    for user in node.users:
        strategy = assignment.get(user)
        if strategy is None:
            return None
        found.update(_needs(node, user, strategy, differentiable))
    return found.pop() if len(found) == 1 else None


def _needs(
    node: fx.Node, user: fx.Node, strategy: Strategy, differentiable: Container[str]
) -> Iterator[Need]:
    """What a node needs of another, for each of its operands that it is."""
    call = read(user, differentiable)
    for operand, placement, carries in zip(
        call.operands, strategy.inputs, call.gradients, strict=True
    ):
        if operand.node is node:
            yield placement, carries
