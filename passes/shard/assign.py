"""From a decision as text to strategies for every node of a graph, checked; and back.

>>> short("R S(0) -> S(2), size[2] = 4 split")
'R S(0) -> S(2)'
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from parcompiler.errors import PlanError
from parcompiler.graph import Graph
from parcompiler.passes.shard.candidates import item_of
from parcompiler.passes.shard.fold import Template, end_of, fold, shared_nodes
from parcompiler.plan import Plan, Sharding, Shards
from parcompiler.spmd import I, Placement, Strategy, strategies
from parcompiler.spmd.call import OperatorCall, call_of
from parcompiler.spmd.conversions import conversion
from parcompiler.spmd.segments import segmentations
from parcompiler.spmd.shard import Assignment, stored


def short(text: str) -> str:
    """The types alone of a strategy that is written out."""
    return text.partition(",")[0]


def line(node: fx.Node, strategy: Strategy, known: Sequence[Strategy]) -> str:
    """A node and its strategy: the types, and the rest where these are not enough."""
    types = short(str(strategy))
    alone = sum(short(str(other)) == types for other in known) == 1
    return f"{node.name}: {types if alone and not strategy.special else strategy}"


def assignment(graph: Graph, plan: Plan) -> dict[fx.Node, Strategy]:
    """The strategy of every node of a graph under a plan that decides its sharding.

    Raises PlanError, naming the node, for a line that is none of its strategies, and for a value
    that would have to be converted where that is impossible.
    """
    assert plan.sharding is not None, "the plan decides no sharding"
    n = plan.mesh.tensor
    found: dict[fx.Node, Strategy] = {}
    folded = fold(graph, level=_level(plan.sharding))
    for node in folded.prologue:
        found[node] = strategies(node, n, differentiable=graph.differentiable)[0]
    for template in folded.templates:
        _assign(graph, plan.sharding, template, n, found)
    check(graph, found)
    return found


def _level(sharding: Sharding) -> int:
    if sharding.level < 1:
        message = f"the plan's sharding has level {sharding.level}: levels count from 1"
        raise PlanError(message)
    return sharding.level


def _assign(
    graph: Graph,
    sharding: Sharding,
    template: Template,
    n: int,
    found: dict[fx.Node, Strategy],
) -> None:
    """Add the strategies of all blocks of one template. The lines of an entry have the names of the
    first block that it is about."""
    read_already: dict[Shards, tuple[Strategy, ...]] = {}
    for block in template.blocks:
        entry = _entry(sharding, template.name, block.name)
        if entry not in read_already:
            own, segments = block.nodes, segmentations(block.nodes)
            differentiable = graph.differentiable
            known = [
                strategies(node, n, differentiable=differentiable, segments=segments)
                for node in own
            ]
            read_already[entry] = tuple(_strategies(entry, own, known))
        found.update(zip(block.nodes, read_already[entry], strict=True))


def _entry(sharding: Sharding, template: str, block: str) -> Shards:
    """The entry of a plan that is about a block."""
    entries = [entry for entry in sharding.templates if entry.template == template]
    for entry in entries:
        if block in entry.blocks:
            return entry
    everything = [entry for entry in entries if not entry.blocks]
    if not everything:
        message = f"the plan's sharding says nothing of block {block!r} (template {template!r})"
        raise PlanError(message)
    return everything[0]


def _strategies(
    entry: Shards, nodes: Sequence[fx.Node], known: Sequence[Sequence[Strategy]]
) -> Iterator[Strategy]:
    """The strategies that the lines of an entry name, in the order of the nodes."""
    if len(entry.nodes) != len(nodes):
        message = (
            f"the plan's sharding has {len(entry.nodes)} lines for template {entry.template!r}, "
            f"whose blocks have {len(nodes)} nodes"
        )
        raise PlanError(message)
    for node, text, own in zip(nodes, entry.nodes, known, strict=True):
        name, _, wanted = text.partition(": ")
        if name != node.name:
            message = f"the plan's sharding has {text!r} where node {node.name!r} stands"
            raise PlanError(message)
        yield _named(node, wanted, own)


def _named(node: fx.Node, wanted: str, known: Sequence[Strategy]) -> Strategy:
    """The strategy of a node that a text names, in full or by its types."""
    for strategy in known:
        if str(strategy) == wanted:
            return strategy
    alike = [strategy for strategy in known if short(str(strategy)) == wanted]
    if len(alike) == 1:
        return alike[0]
    offer = "; ".join(map(str, known))
    why = "may mean several strategies" if alike else "is no strategy"
    message = f"the plan's sharding: {wanted!r} {why} of node {node.name!r} (there are: {offer})"
    raise PlanError(message)


def check(graph: Graph, found: Assignment) -> None:
    """Raise PlanError, naming the node, where a value cannot become what a node needs."""
    held = stored(graph, found) | dict.fromkeys(shared_nodes(graph), I)
    for node, strategy in found.items():
        call = call_of(node, graph)
        for place, (operand, wanted) in enumerate(zip(call.operands, strategy.inputs, strict=True)):
            given = held.get(operand.node) or _given(found[operand.node], call, place)
            flows = call.gradients[place] and operand.node.name in graph.differentiable
            if conversion(given, wanted, differentiable=flows) is None:
                message = (
                    f"the plan's sharding: node {node.name!r} needs {operand.node.name!r} as "
                    f"{wanted}, which is {given}: there is no such conversion"
                )
                raise PlanError(message)
    end = end_of(graph)
    last = found[end].outputs[0]
    if conversion(last, I, differentiable=end.name in graph.differentiable) is None:
        what = "the loss" if end is graph.loss else "the head's input"
        message = f"the plan's sharding: {what} {end.name!r} is {last}, which is not whole"
        raise PlanError(message)


def _given(strategy: Strategy, call: OperatorCall, place: int) -> Placement:
    """The type of an operand that `strategy` makes; one of several for an item."""
    if len(strategy.outputs) == 1:
        return strategy.outputs[0]
    if call.is_item:
        return strategy.outputs[item_of(call)]
    return strategy.outputs[min(place, len(strategy.outputs) - 1)]
