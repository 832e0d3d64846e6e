"""Which products can leave the gradient of their weight for later.

In a split backward all of them do; in a whole one those followed by a collective of the tensor
ranks, which then runs beside them.

>>> graph = fx.Graph()
>>> x, w = graph.placeholder("x"), graph.placeholder("w")
>>> for node, shape in ((x, (2, 3, 8)), (w, (5, 8))):
...     node.meta["val"] = torch.empty(shape, device="meta")
>>> product = graph.call_function(torch.ops.aten.linear.default, (x, w))
>>> deferrable_weight(product, {"w"}), deferrable_weight(product, {"x"})
(w, None)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import fx

# The positions of weight and bias among the arguments, and the dimension that the weight shares
# with the result. The runtime has a function for each of these operators.
PLACES: Mapping[object, tuple[int, int, int]] = {
    torch.ops.aten.linear.default: (1, 2, 0),
    torch.ops.aten.addmm.default: (2, 0, 1),
}


def deferrable_weight(node: fx.Node, trainable: Collection[str]) -> fx.Node | None:
    """The matrix that a node multiplies by, if it is a parameter itself; `trainable` names those.

    None under autocast, which casts between parameter and product, and with a bias that is
    broadcast over more than the rows.
    """
    places = PLACES.get(node.target)
    if places is None or node.kwargs or node.meta.get("contexts"):
        return None
    weight, bias, dim = _argument(node, places[0]), _argument(node, places[1]), places[2]
    if weight is None or weight.name not in trainable or weight.meta["val"].dim() != 2:
        return None
    spread = bias is not None and bias.meta["val"].shape != weight.meta["val"].shape[dim : dim + 1]
    return None if spread else weight


def _argument(node: fx.Node, place: int) -> fx.Node | None:
    """The node that an argument is, if it is one."""
    argument = node.args[place] if place < len(node.args) else None
    return argument if isinstance(argument, fx.Node) else None


def overlapping(nodes: Sequence[fx.Node], trainable: Collection[str]) -> dict[fx.Node, fx.Node]:
    """The products, with their weights, whose weight gradients are computed beside the next
    collective of a block's backward; only weights with no other reader."""
    exchanges = (
        place
        for place, node in enumerate(nodes)
        if "exchange" in node.meta
        and node.meta["exchange"].backward
        and all(operand.name not in trainable for operand in node.all_input_nodes)
    )
    first = next(exchanges, len(nodes))
    weights = {node: deferrable_weight(node, trainable) for node in nodes[first:]}
    return {node: w for node, w in weights.items() if w is not None and len(w.users) == 1}
