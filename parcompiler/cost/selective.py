"""Which operators of a block run again in the backward, so that less is kept: selective recompute.

    x ──► norm ──► all-gather ──► linear ──► gate ──► silu ──► product ──► linear
    kept   again      again                  kept     again     again

An operator may run again where that is cheap (it treats every element by itself, normalises rows,
or gathers the pieces of the tensor ranks) and what it reads is kept in any case, or takes less than
its result. It does where its result, or something within it, would be kept. So no product of
matrices runs twice (the selective recomputation of Korthikanti et al. 2022, arXiv 2205.05198,
section 5, for operators around the products; gathers as in their section 4.2.2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from parcompiler.capture.effects import is_random, mutated_operands
from parcompiler.cost.execution import Boundary, Recorder, boundary, execute
from parcompiler.cost.live_memory import SavedTensors
from parcompiler.graph import Block, Graph, NodeRoles, tensors_of
from parcompiler.spmd.elementwise import NONLINEAR
from parcompiler.spmd.runtime_call import RuntimeCall, is_conversion

CHEAP = NONLINEAR | set("add sub rsub mul div neg layer_norm rms_norm to _to_copy".split())


def running_again(graph: Graph, block: Block) -> frozenset[fx.Node]:
    """The nodes of a block that run again in its backward: the same for all of its template."""
    given = block.nodes, block.inputs, graph.roles
    return graph.once(("again", block.nodes), lambda: again_nodes(*given))


def again_nodes(
    nodes: Sequence[fx.Node], inputs: Collection[fx.Node], roles: NodeRoles
) -> frozenset[fx.Node]:
    """The nodes of a block that run again; `inputs` are those outside that it reads, the rest as in
    `trace_block`. None of a block that changes something in place."""
    if any(True for node in nodes for _ in mutated_operands(node)):
        return frozenset()
    with torch.enable_grad():
        outside = boundary(nodes, inputs, roles)
        saved = _saved(nodes, outside)
    free = set(map(saved.home, (*outside.parameters, *outside.buffers)))
    found: set[fx.Node] = set()

    def remake(node: fx.Node) -> set[fx.Node] | None:
        """The nodes that make a value again: none where it is kept; None where that costs."""
        home = saved.home(node)
        if home in free or (home in saved.values and home not in made):
            return set()
        return made.get(home)

    made: dict[fx.Node, set[fx.Node]] = {}  # with each node that may run again, those before it
    for node in nodes:
        if _is_cheap(node, roles.differentiable) and saved.home(node) is node:
            if node in saved.values and len(node.all_input_nodes) == 1:  # keep the narrower one
                narrow = saved.home(node.all_input_nodes[0])
                single = isinstance(narrow.meta["val"], torch.Tensor)
                if single and narrow not in made and saved.nbytes[narrow] < saved.nbytes[node]:
                    saved.values.add(narrow)
            before = [remake(operand) for operand in node.all_input_nodes]
            if None not in before:
                made[node] = {node}.union(*filter(None, before))
    for node, chain in made.items():
        if node in saved.values or node in saved.inside:
            found |= chain
    return frozenset(found)


@dataclass
class _Saved:
    """What is kept of a block where nothing runs again: values, and nodes that keep more. `nbytes`
    are those of each node, also where the size of a tensor depends on the data."""

    homes: dict[torch.UntypedStorage, fx.Node] = field(default_factory=dict)
    of: dict[fx.Node, fx.Node] = field(default_factory=dict)
    nbytes: Counter[fx.Node] = field(default_factory=Counter)
    values: set[fx.Node] = field(default_factory=set)
    inside: set[fx.Node] = field(default_factory=set)

    def home(self, node: fx.Node) -> fx.Node:
        """The node that makes the memory of a value."""
        return self.of.get(node, node)


def _saved(nodes: Sequence[fx.Node], outside: Boundary) -> _Saved:
    """What the backward of a block reads, found by running its forward as on an accelerator."""
    found, values, hooks = _Saved(), outside.values, SavedTensors()
    for node, value in values.items():
        _note(found, node, value)
    with hooks, Recorder(accelerator=True) as recorder:
        for node in nodes:
            before = hooks.storages()
            execute([node], values, recorder)
            _note(found, node, values[node])
            if any(storage not in found.homes for storage in hooks.storages() - before):
                found.inside.add(node)
    for storage in hooks.storages() & found.homes.keys():
        found.values.add(found.homes[storage])
    return found


def _note(found: _Saved, node: fx.Node, value: object) -> None:
    """Remember who makes the memory of a value."""
    for tensor in tensors_of(value):
        home = found.homes.setdefault(tensor.untyped_storage(), node)
        found.of.setdefault(node, home)
        found.nbytes[node] += tensor.nbytes


def _is_cheap(node: fx.Node, differentiable: Collection[str]) -> bool:
    """Whether a node may run again: it makes one tensor, draws nothing, and takes little time."""
    if node.name not in differentiable or is_random(node) or node.meta.get("contexts"):
        return False
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    if isinstance(node.target, RuntimeCall):
        return is_conversion(node) and node.target.name == "all_gather"
    return getattr(node.target, "_opname", "") in CHEAP
