"""Selective recomputation: the operators of a block that run again in the backward, to keep less.

    x ──► norm ──► all-gather ──► linear ──► gate ──► silu ──► product ──► linear
    kept   again      again                  kept     again     again

An operator may run again if that is cheap (it is elementwise, normalises rows, or gathers the
pieces of the tensor ranks) and its operand is kept in any case, or is smaller than its result. It
does so if its result, or a tensor within it, would be kept. So no matrix product runs twice (the
selective recomputation of Korthikanti et al. 2022, arXiv 2205.05198, section 5, for operators
around the products; gathers as in their section 4.2.2).
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
    """The nodes of a block that run again in its backward: equal for all blocks of a template."""
    inputs = block.nodes, block.inputs, graph.roles
    return graph.once(("again", block.nodes), lambda: again_nodes(*inputs))


def again_nodes(
    nodes: Sequence[fx.Node], inputs: Collection[fx.Node], roles: NodeRoles
) -> frozenset[fx.Node]:
    """The nodes of a block that run again; `inputs` are the nodes outside that it reads, `roles`
    are as in `trace_block`. Empty for a block that changes something in place."""
    if any(True for node in nodes for _ in mutated_operands(node)):
        return frozenset()
    with torch.enable_grad():
        outside = boundary(nodes, inputs, roles)
        saved = _saved(nodes, outside)
    free = set(map(saved.home, (*outside.parameters, *outside.buffers)))
    again: set[fx.Node] = set()

    def remake(node: fx.Node) -> set[fx.Node] | None:
        """The nodes that make a value again: empty if it is kept, None if that is expensive."""
        home = saved.home(node)
        if home in free or (home in saved.values and home not in made):
            return set()
        return made.get(home)

    made: dict[fx.Node, set[fx.Node]] = {}  # nodes that may run again, with those before them
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
            again |= chain
    return frozenset(again)


@dataclass
class _Saved:
    """The values that a block keeps where nothing runs again, and the nodes that keep tensors
    `inside` themselves. `nbytes` are those of each node, even if a size depends on the data."""

    homes: dict[torch.UntypedStorage, fx.Node] = field(default_factory=dict)
    of: dict[fx.Node, fx.Node] = field(default_factory=dict)
    nbytes: Counter[fx.Node] = field(default_factory=Counter)
    values: set[fx.Node] = field(default_factory=set)
    inside: set[fx.Node] = field(default_factory=set)

    def home(self, node: fx.Node) -> fx.Node:
        """The node that makes the memory of a value."""
        return self.of.get(node, node)


def _saved(nodes: Sequence[fx.Node], outside: Boundary) -> _Saved:
    """The values that the backward of a block reads, by a run of its forward as on an
    accelerator."""
    saved, values, hooks = _Saved(), outside.values, SavedTensors()
    for node, value in values.items():
        _note(saved, node, value)
    with hooks, Recorder(accelerator=True) as recorder:
        for node in nodes:
            before = hooks.storages()
            execute([node], values, recorder)
            _note(saved, node, values[node])
            if any(storage not in saved.homes for storage in hooks.storages() - before):
                saved.inside.add(node)
    for storage in hooks.storages() & saved.homes.keys():
        saved.values.add(saved.homes[storage])
    return saved


def _note(saved: _Saved, node: fx.Node, value: object) -> None:
    """Record which node makes the memory of a value."""
    for tensor in tensors_of(value):
        home = saved.homes.setdefault(tensor.untyped_storage(), node)
        saved.of.setdefault(node, home)
        saved.nbytes[node] += tensor.nbytes


def _is_cheap(node: fx.Node, differentiable: Collection[str]) -> bool:
    """Whether a node may run again: it makes one tensor, draws nothing, and takes little time."""
    if node.name not in differentiable or is_random(node) or node.meta.get("contexts"):
        return False
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    if isinstance(node.target, RuntimeCall):
        return is_conversion(node) and node.target.name == "all_gather"
    return getattr(node.target, "_opname", "") in CHEAP
