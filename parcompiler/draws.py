"""Which draws of random numbers each stage makes, by their numbers in the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from parcompiler.batches import piece
from parcompiler.graph import Graph
from parcompiler.runtime.chance import Chance

if TYPE_CHECKING:
    from parcompiler.program import Program

Numbers = dict[str, list[int]]  # of draws of random numbers, by operator


def draws(program: Program, batch: Mapping[str, torch.Tensor]) -> dict[int, Numbers]:
    """For each stage the numbers, per operator in the model's order, of its draws.

    Found by running the graph once: an operator may draw several times or not at all.
    """
    graph = program.problem.graph
    counted = DrawsOf(graph, piece(graph, batch, 0))
    counted.run()
    found: dict[int, Numbers] = {}
    for stage in program.lowered.stages:
        own: Numbers = found.setdefault(stage.index, {})
        for node in (node for call in stage.calls for node in call.block.nodes):
            for name, numbers in counted.by_node.get(node.name, {}).items():
                own.setdefault(name, []).extend(numbers)
    return found


class DrawsOf(fx.Interpreter):
    """Runs a graph and notes, by node, the numbers of the draws that each operator makes."""

    def __init__(self, graph: Graph, batch: Mapping[str, torch.Tensor]) -> None:
        super().__init__(fx.GraphModule({}, graph.fx_graph))
        self.by_node: dict[str, Numbers] = {}
        self._chance = Chance(0, 0)
        self._inputs = {item.node: batch[item.key] for item in graph.inputs}
        self._inputs |= {
            p.node: graph.tensors[p.name].to(p.dtype).clone() for p in graph.parameters
        }

    def run_node(self, n: fx.Node) -> Any:
        """Run one node and note its draws."""
        if n.op == "placeholder":
            return self._inputs[n.name]
        before = dict(self._chance.draws)
        with torch.no_grad(), self._chance:
            result = super().run_node(n)
        after = {m: range(before.get(m, 0), count) for m, count in self._chance.draws.items()}
        self.by_node[n.name] = {name: [*numbers] for name, numbers in after.items() if numbers}
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator; what a model on the meta device makes there is made on the CPU."""
        args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
        return super().call_function(target, args, kwargs)
