"""Writes strategies as the lines of a plan's sharding, reads them back, and checks them.

>>> _types("R S(0) -> S(2), size[2] = 4 split")
'R S(0) -> S(2)'
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from torch import fx

from parcompiler.capture.effects import outside
from parcompiler.errors import PlanError, shown
from parcompiler.graph import Block, Graph
from parcompiler.passes.shard.candidates import Candidates, NodeChoices, result_index
from parcompiler.passes.shard.ilp import Answer
from parcompiler.passes.shard.ilp_builder import BuiltProgramme
from parcompiler.passes.shard.pins import agrees, read
from parcompiler.passes.shard.templates import BlockTemplate, end_of, fold, shared_nodes
from parcompiler.plan import Plan, Sharding, Shards
from parcompiler.problem import Problem
from parcompiler.spmd import I, Placement, Strategy, strategies
from parcompiler.spmd.call import NodeCall, call_of
from parcompiler.spmd.conversions import conversion
from parcompiler.spmd.rules import is_unknown, written_rule
from parcompiler.spmd.segments import segmentations
from parcompiler.spmd.shard import Assignment, stored
from parcompiler.spmd.sorting import rows_of

# Writing


def sharding(
    candidates: Candidates, built: BuiltProgramme, answer: Answer, stages: int
) -> Sharding:
    """The plan's field: a line for each node of each template."""
    folded = candidates.folded
    chosen = {
        member.node: strategy
        for group, choice in zip(built.groups, answer.choices, strict=False)
        for member, strategy in zip(group.members, group.choices[choice], strict=True)
    }
    number = len(built.groups)
    placements = {
        item.name: types[answer.choices[number + k]]
        for k, (tensor, types) in enumerate(built.tensors.items())
        for item in tensor.items
    }
    several = Counter(template.name for template in folded.templates)
    return Sharding(
        level=folded.level,
        templates=tuple(
            _entry(candidates, template, chosen, placements, named=several[template.name] > 1)
            for template in folded.templates
        ),
        solution=answer.solution,
        memory=round(answer.nbytes * built.in_flight / stages) or None,
    )


def _entry(
    candidates: Candidates,
    template: BlockTemplate,
    chosen: Mapping[fx.Node, Strategy],
    placements: Mapping[str, Placement],
    *,
    named: bool,
) -> Shards:
    """The entry of one template."""
    members = [candidates.nodes[node] for node in template.first.nodes]
    return Shards(
        template=template.name,
        nodes=tuple(_line(member, chosen[member.node]) for member in members),
        tensors=tuple(f"{b.attribute}: {placements[b.name]}" for b in template.first.tensors),
        blocks=tuple(block.name for block in template.blocks) if named else (),
        whole=tuple(
            f"{member.node.name}: {_reason(member, candidates.costs.n)}"
            for member in members
            if member.call.operands and not member.work.is_free and _is_never_split(member)
        ),
    )


def _types(text: str) -> str:
    """The types in the text of a strategy."""
    return text.partition(",")[0]


def _line(member: NodeChoices, strategy: Strategy) -> str:
    """A node and its strategy: the types, or the full text where types are ambiguous."""
    types = _types(str(strategy))
    alone = sum(_types(str(other)) == types for other in member.strategies) == 1
    return f"{member.node.name}: {types if alone and not strategy.special else strategy}"


def _is_never_split(member: NodeChoices) -> bool:
    """Whether no strategy splits an operand or a result; they may be summands."""
    return not any(
        placement.dim >= 0
        for strategy in member.strategies
        for placement in (*strategy.inputs, *strategy.outputs)
    )


def _reason(member: NodeChoices, n: int) -> str:
    """Why no strategy splits a node."""
    operator, call = str(member.node.target), member.call
    if not call.is_plain:
        return f"{operator} has sizes that are not known before the step"
    if is_unknown(call):
        return f"no rule is known for {operator}"
    if written_rule(call) is None:
        return f"no rule is known for these arguments of {operator}"
    shapes = " and ".join("x".join(map(str, shape)) or "scalar" for shape in call.shapes)
    return f"{n} divides no dimension of {shapes} that {operator} can split"


# Reading


def assignment(graph: Graph, plan: Plan) -> dict[fx.Node, Strategy]:
    """The strategy of every node of a graph on the tensor ranks of a plan with a sharding.

    Raises PlanError, naming the node, for a line that is none of its strategies, and for a value
    that would need an impossible conversion; and for an entry that no block follows.
    """
    assert plan.sharding is not None, "the plan decides no sharding"
    return assigned_by(plan.sharding, graph, plan.mesh.tensor)


def assigned_by(
    sharding: Sharding, graph: Graph, n: int, axis: str = "tensor"
) -> dict[fx.Node, Strategy]:
    """The strategy of every node of a graph on the `n` ranks of an axis; raises as `assignment`."""
    differentiable, rows = graph.differentiable, rows_of(graph, axis)
    if sharding.level < 1:
        message = f"the plan's sharding has level {sharding.level}: levels count from 1"
        raise PlanError(message)
    assigned: dict[fx.Node, Strategy] = {}
    used: set[Shards] = set()
    folded = fold(graph, level=sharding.level)
    for node in folded.prologue:
        assigned[node] = strategies(node, n, differentiable=differentiable, rows=rows)[0]
    for template in folded.templates:
        # The lines of an entry have the names of the first block that it is about.
        by_entry: dict[Shards, tuple[Strategy, ...]] = {}
        for block in template.blocks:
            entry = _entry_of(sharding, template.name, block.name)
            if entry not in by_entry:
                segments = segmentations(block.nodes, axis)
                known = [
                    strategies(node, n, differentiable=differentiable, segments=segments, rows=rows)
                    for node in block.nodes
                ]
                by_entry[entry] = tuple(_strategies(entry, block.nodes, known))
            assigned.update(zip(block.nodes, by_entry[entry], strict=True))
        used |= by_entry.keys()
    for entry in sharding.templates:
        if entry not in used:
            message = (
                f"the plan's sharding has an entry of template {shown(entry.template, 200)} that "
                "no block follows: the model has no such blocks, or another entry is for them"
            )
            raise PlanError(message)
    check(graph, assigned, axis, [block for one in folded.templates for block in one.blocks])
    return assigned


def _entry_of(sharding: Sharding, template: str, block: str) -> Shards:
    """The entry of a plan for a block: one that names the block, or else one that names none."""
    entries = [entry for entry in sharding.templates if entry.template == template]
    for entry in sorted(entries, key=lambda entry: block not in entry.blocks):
        if block in entry.blocks or not entry.blocks:
            return entry
    message = f"the plan's sharding says nothing of block {block!r} (template {template!r})"
    raise PlanError(message)


def _strategies(
    entry: Shards, nodes: Sequence[fx.Node], known: Sequence[Sequence[Strategy]]
) -> Iterator[Strategy]:
    """The strategies that the lines of an entry name, in the order of the nodes."""
    if len(entry.nodes) != len(nodes):
        message = (
            f"the plan's sharding has {len(entry.nodes)} lines for template "
            f"{shown(entry.template, 200)}, whose blocks have {len(nodes)} nodes"
        )
        raise PlanError(message)
    for node, text, possible in zip(nodes, entry.nodes, known, strict=True):
        name, _, wanted = text.partition(": ")
        if name != node.name:
            message = f"the plan's sharding has {shown(text, 200)} where node {node.name!r} stands"
            raise PlanError(message)
        yield _named(node, wanted, possible)


def _named(node: fx.Node, wanted: str, known: Sequence[Strategy]) -> Strategy:
    """The strategy of a node that a text names, in full or by its types."""
    for strategy in known:
        if str(strategy) == wanted:
            return strategy
    alike = [strategy for strategy in known if _types(str(strategy)) == wanted]
    if len(alike) == 1:
        return alike[0]
    offer = "; ".join(map(str, known))
    why = "may mean several strategies" if alike else "is no strategy"
    message = (
        f"the plan's sharding: {shown(wanted, 200)} {why} of node {node.name!r} (there are: "
        f"{offer})"
    )
    raise PlanError(message)


# Checking


def check(
    graph: Graph, assigned: Assignment, axis: str = "tensor", blocks: Sequence[Block] = ()
) -> None:
    """Raise PlanError, naming the node, where a value cannot become what a node needs.

    Of `blocks` with one template, equal strategies and equal types of the values they read, only
    the first is checked.
    """
    placements = stored(graph, assigned, axis) | dict.fromkeys(shared_nodes(graph), I)

    def likeness(block: Block) -> tuple[object, ...]:
        read = (placements.get(x) or assigned[x].outputs for x in outside(block.nodes))
        return block.template, tuple(id(assigned[node]) for node in block.nodes), tuple(read)

    first = {likeness(block): block for block in reversed(blocks)}.values()
    others = assigned.keys() - {node for block in blocks for node in block.nodes}
    seen = others.union(*(block.nodes for block in first))
    for node, strategy in assigned.items():
        if node not in seen:
            continue
        call = call_of(node, graph)
        for place, (operand, wanted) in enumerate(zip(call.operands, strategy.inputs, strict=True)):
            source = operand.node
            actual = placements.get(source) or _output(assigned[source], call, place)
            carries = call.gradients[place] and source.name in graph.differentiable
            if conversion(actual, wanted, differentiable=carries) is None:
                message = (
                    f"the plan's sharding: node {node.name!r} needs {source.name!r} as "
                    f"{wanted}, which is {actual}: there is no such conversion"
                )
                raise PlanError(message)
    end = end_of(graph)
    last = assigned[end].outputs[0]
    carries, ending = end.name in graph.differentiable, axis == "context"
    if conversion(last, I, differentiable=carries, ending=ending) is None:
        name = "the loss" if end is graph.loss else "the head's input"
        message = f"the plan's sharding: {name} {end.name!r} is {last}, which is not whole"
        raise PlanError(message)


def _output(maker: Strategy, call: NodeCall, place: int) -> Placement:
    """The type of an operand that `maker` yields; one of several for an item."""
    if call.is_item and len(maker.outputs) > 1:
        return maker.outputs[result_index(call)]
    return maker.outputs[min(place, len(maker.outputs) - 1)]


def check_tensors(problem: Problem, plan: Plan) -> None:
    """Refuse a user's plan that says of tensors otherwise than its nodes do, which decide.

    `problem` is that of the plan before it is sharded. Raises PlanError, naming the template.
    """
    if plan.sharding is None:
        return
    graph = problem.graph
    placements = stored(graph, assignment(graph, plan))
    held = {node.name: placement for node, placement in placements.items()}
    for template in fold(graph, level=plan.sharding.level).templates:
        entry = _entry_of(plan.sharding, template.name, template.first.name)
        tensors = template.first.tensors
        lines = [f"{b.attribute}: {held[graph.by_name[b.name].node]}" for b in tensors]
        if entry.tensors and set(entry.tensors) != set(lines):
            message = (
                f"the plan's sharding has the tensors {shown(entry.tensors, 200)} for template "
                f"{shown(entry.template, 200)}, and its nodes hold them as {shown(lines, 200)}: "
                "change the nodes, or remove the tensors"
            )
            raise PlanError(message)


def check_pins(problem: Problem, plan: Plan) -> None:
    """Refuse a user's plan under which ranks hold a parameter otherwise than a pin demands;
    `problem` is that of the plan before it is sharded.

    Raises PlanError, naming the pin and the parameter; InputError for a pin that names nothing.
    """
    pins, graph = read(problem.options.sharding, problem.graph), problem.graph
    if not pins.placements or plan.sharding is None:
        return
    advice = "change the pin, or compile without plan="
    choice = plan.vocabulary
    for name in (*choice.lookups, choice.head) if choice and choice.spread else ():
        for pattern in pins.of(name or ""):
            message = (
                f"the plan has rows of {name} on all ranks (plan.vocabulary), but sharding pins "
                f"{pattern!r}: '{pins.placements[pattern]}': {advice}"
            )
            raise PlanError(message)
    for node, placement in stored(graph, assignment(graph, plan)).items():
        item = graph.by_node.get(node.name)
        if item is None:
            continue
        for pattern in pins.of(item.name):
            wanted = pins.placements[pattern]
            if not agrees(placement, wanted):
                shape = " x ".join(map(str, item.shape))
                message = (
                    f"the plan holds {item.name} ({shape}) as {placement}, but sharding pins "
                    f"{pattern!r}: '{wanted}': {advice}"
                )
                raise PlanError(message)
