"""What the arguments of a layer's forward are called."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import fx

from parcompiler.capture.templates import EMITTED
from parcompiler.graph import Graph
from parcompiler.naming.source import spoken_name


def argument_names(
    graph: Graph, instances: Sequence[Sequence[fx.Node]], variables: Mapping[fx.Node, str]
) -> dict[fx.Node, str]:
    """Names of the arguments: what the source mostly calls the values that are given.

    `instances` are the inputs of each layer that runs the forward; those of the first are named.
    `variables` has the names of values outside.
    """
    names: dict[fx.Node, str] = {}
    taken: set[str] = set(EMITTED)
    for node, *others in zip(*instances, strict=True):
        counts = Counter(_argument_name(graph, item, variables) for item in (node, *others))
        wish = counts.most_common(1)[0][0]
        candidate, count = wish, 1
        while candidate in taken:
            count += 1
            candidate = f"{wish}_{count}"
        taken.add(candidate)
        names[node] = candidate
    return names


def _argument_name(graph: Graph, node: fx.Node, variables: Mapping[fx.Node, str]) -> str:
    """The name of one value. That of a layer's result names the layer: no name for an argument."""
    outside = variables.get(node, node.name)
    if node.op == "placeholder":
        return outside
    return spoken_name(node) or ("x" if node.name in graph.differentiable else outside)
