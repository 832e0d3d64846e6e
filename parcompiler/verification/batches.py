"""Batches that a model takes, and the random draws that its stages make on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from parcompiler.capture.inputs import flat
from parcompiler.graph import Graph
from parcompiler.lower import Lowered
from parcompiler.runtime.rng import SeededDraws

Numbers = dict[str, list[int]]  # of draws of random numbers, by operator


def random_batch(graph: Graph, microbatches: int, seed: int) -> dict[str, torch.Tensor]:
    """A batch by keys: normal floats, integers below their bounds. Inputs without a bound, and
    those that are 0 or 1 everywhere (masks), repeat the values that the model was compiled with."""
    generator = torch.Generator().manual_seed(seed)
    examples = dict(flat(graph.sample))
    batch = {}
    for spec in graph.inputs:
        example = examples.get(spec.key)
        shape = (spec.shape[0] * microbatches, *spec.shape[1:]) if spec.shape else ()
        if example is not None and not example.is_meta and _is_fixed(example, spec.high):
            drawn = torch.cat([example] * microbatches) if spec.shape else example
        elif spec.dtype.is_floating_point or spec.dtype.is_complex:
            kind = torch.complex64 if spec.dtype.is_complex else torch.float32
            drawn = torch.randn(shape, generator=generator, dtype=kind)
        else:
            high = 2 if spec.high is None else spec.high
            drawn = torch.randint(0, high, shape, generator=generator)
        batch[spec.key] = drawn.detach().to(spec.dtype)
    return batch


def compiled_batch(graph: Graph, microbatches: int) -> dict[str, torch.Tensor] | None:
    """The inputs that the model was compiled with as every micro-batch; None if they are meta."""
    examples = dict(flat(graph.sample))
    batch = {}
    for spec in graph.inputs:
        example = examples.get(spec.key)
        if example is None or example.is_meta:
            return None
        whole = torch.cat([example] * microbatches) if spec.shape else example
        batch[spec.key] = whole.detach().cpu().to(spec.dtype)
    return batch


def piece(graph: Graph, batch: Mapping[str, torch.Tensor], i: int) -> dict[str, torch.Tensor]:
    """Copies of the tensors of micro-batch `i` by key: a model may update them in place."""
    rows = {spec.key: spec.shape[:1] for spec in graph.inputs}
    return {
        key: (batch[key].narrow(0, i * some[0], some[0]) if some else batch[key]).clone()
        for key, some in rows.items()
    }


def _is_fixed(example: torch.Tensor, high: int | None) -> bool:
    """Whether random values could be invalid in place of an example's."""
    binary = bool(((example == 0) | (example == 1)).all())
    return example.dtype == torch.bool or (binary and (high is None or high <= 2))


def draws_of_stages(
    graph: Graph, lowered: Lowered, batch: Mapping[str, torch.Tensor]
) -> dict[int, Numbers]:
    """For each stage the numbers, per operator in the model's order, of its random draws.

    The graph is run once to count them: an operator may draw several times or not at all.
    """
    counter = _DrawCounter(graph, piece(graph, batch, 0))
    counter.run()
    draws: dict[int, Numbers] = {}
    for stage in lowered.stages:
        of_stage = draws.setdefault(stage.index, {})
        for node in (node for call in stage.calls for node in call.block.nodes):
            for name, numbers in counter.by_node.get(node.name, {}).items():
                of_stage.setdefault(name, []).extend(numbers)
    return draws


class _DrawCounter(fx.Interpreter):
    """Runs a graph and notes, by node, the numbers of the draws that each operator makes."""

    def __init__(self, graph: Graph, batch: Mapping[str, torch.Tensor]) -> None:
        super().__init__(fx.GraphModule({}, graph.fx_graph))
        self.by_node: dict[str, Numbers] = {}
        self._draws = SeededDraws(0, 0)
        self._inputs = {spec.node: batch[spec.key] for spec in graph.inputs}
        self._inputs |= {
            p.node: graph.tensors[p.name].to(p.dtype).clone() for p in graph.parameters
        }

    def run_node(self, n: fx.Node) -> Any:
        """Run one node and note its draws."""
        if n.op == "placeholder":
            return self._inputs[n.name]
        before = dict(self._draws.counts)
        with torch.no_grad(), self._draws:
            result = super().run_node(n)
        after = {m: range(before.get(m, 0), count) for m, count in self._draws.counts.items()}
        self.by_node[n.name] = {name: [*numbers] for name, numbers in after.items() if numbers}
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator, on the CPU in place of the meta device."""
        args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
        return super().call_function(target, args, kwargs)
