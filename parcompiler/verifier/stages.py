"""Rules on the stages: every block once, all its inputs available, and data flows forward.

    variables     a name for each node that leaves its block
    stage 0       embed: tokens -> x        gives x
    stage 1       receives x                head: x, labels -> loss

A name that a call reads must stand for the node that its block reads, and that node must be
available: from the batch, received, in the prologue, or the result of an earlier call. The layers
of a shared vocabulary are on no stage; stages receive lookups, and the head receives its input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import fx

from parcompiler.capture.clean import where
from parcompiler.capture.effects import is_random, mutated_operands
from parcompiler.graph import Block, order_of
from parcompiler.lower.lowered import Call, StageProgram, StageValue
from parcompiler.schedules.action import NOWHERE
from parcompiler.verifier.fault import Fault, repeated
from parcompiler.verifier.wiring import Wiring

PLACED = "every stage is on a rank"
FULL = "no stage is empty"
ONCE = "every node runs once"
NAMED = "every name stands for one node"
FLOWS = "data flows forward"
THERE = "a block finds what it reads"
FREE = "the prologue needs no gradient and no chance"
GIVEN = "what one stage gives another receives"
TYPED = "both ends agree on a value"
LOSS = "one stage has the loss"
KEPT = "one stage keeps each output"
TWICE = "what is recomputed updates nothing"


def faults(wiring: Wiring) -> Iterator[Fault]:
    """All faults of the stages."""
    yield from _placement(wiring)
    yield from _names(wiring)
    yield from _missing_nodes(wiring)
    yield from _repeated_nodes(wiring)
    yield from _incomplete_blocks(wiring)
    for j, stage in enumerate(wiring.stages):
        yield from _StageRules(wiring, j, stage).faults()
    yield from _values(wiring)
    yield from _loss(wiring)
    yield from _kept(wiring)


def _placement(wiring: Wiring) -> Iterator[Fault]:
    """Stages are numbered in order, on ranks that exist, and have something to do."""
    size = wiring.lowered.size
    for j, stage in enumerate(wiring.stages):
        if stage.index != j:
            yield Fault(PLACED, f"stage {j} calls itself stage {stage.index}")
        if not 0 <= stage.rank < size:
            yield Fault(PLACED, f"stage {j} is on rank {stage.rank} (ranks: 0 to {size - 1})")
        if not stage.calls:
            yield Fault(FULL, f"stage {j} has no block")
    lists = len(wiring.lowered.evaluation)
    if lists != size:
        yield Fault(PLACED, f"{size} ranks have a list for training and {lists} for evaluation")


def _names(wiring: Wiring) -> Iterator[Fault]:
    """No two nodes have one name."""
    by_name: dict[str, list[str]] = {}
    for node, name in wiring.lowered.variables.items():
        by_name.setdefault(name, []).append(node.name)
    for name, nodes in by_name.items():
        if len(nodes) > 1:
            yield Fault(NAMED, f"{name} stands for {' and '.join(nodes)}")


def needed(wiring: Wiring) -> set[fx.Node]:
    """The operators that must run: those that the loss depends on, and every update of a buffer."""
    writers = wiring.effects.writers.items()
    updates = [node for root, nodes in writers if root.op == "placeholder" for node in nodes]
    nodes = wiring.effects.behind([wiring.graph.loss, *wiring.graph.kept.values(), *updates])
    return {node for node in nodes if node.op == "call_function"}


def _missing_nodes(wiring: Wiring) -> Iterator[Fault]:
    """Every node that is needed runs somewhere; neighbours that do not are one fault."""
    wanted = needed(wiring)
    missing: list[fx.Node] = []
    for node in wiring.graph.fx_graph.nodes:
        if node not in wanted:
            continue
        if not any(node in x for x in (wiring.homes, wiring.recomputed, wiring.everywhere)):
            missing.append(node)
        elif missing:
            yield Fault(ONCE, f"no stage runs {_described(missing)}")
            missing = []
    if missing:
        yield Fault(ONCE, f"no stage runs {_described(missing)}")


def _repeated_nodes(wiring: Wiring) -> Iterator[Fault]:
    """No node is in two calls; all nodes that the same calls share are one fault."""
    shared: dict[str, list[fx.Node]] = {}
    for node, calls in wiring.homes.items():
        if len(calls) > 1 or node in wiring.everywhere:
            also = ["all ranks"] if node in wiring.everywhere else []
            both = " and ".join([*(_at(block, j) for j, block in calls), *also])
            shared.setdefault(both, []).append(node)
    for both, nodes in shared.items():
        yield Fault(ONCE, f"{both} run {_described(nodes)} (each block goes on one stage)")


def _described(nodes: list[fx.Node]) -> str:
    """Some nodes in words: the first with its place in the user's model, and how many more."""
    more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
    return f"{nodes[0].name}{more} ({where(nodes[0])})"


def _at(block: Block, j: int) -> str:
    """A block and its stage."""
    return f"{block.name} (stage {j})"


def _incomplete_blocks(wiring: Wiring) -> Iterator[Fault]:
    """Operands of a block's nodes are made before them there, or come into the block."""
    blocks = {id(call.block): call.block for stage in wiring.stages for call in stage.calls}
    for block in blocks.values():
        known = set(block.inputs)
        tensors = {binding.name for binding in block.tensors}
        for node in block.nodes:
            for operand in node.all_input_nodes:
                tensor = wiring.tensor(operand)
                if operand not in known and (tensor is None or tensor.name not in tensors):
                    detail = f"{block.name}: {node.name} reads {operand.name}, which is no input"
                    yield Fault(THERE, detail)
            known.add(node)
        for node in block.outputs:
            if node not in block.nodes:
                yield Fault(THERE, f"{block.name} returns {node.name}, which it does not compute")


class _StageRules:
    """The rules on one stage. `there` are the nodes that are available while its calls run."""

    def __init__(self, wiring: Wiring, j: int, stage: StageProgram) -> None:
        self.wiring = wiring
        self.j = j
        self.stage = stage
        came = (wiring.nodes.get(name) for name in (*stage.inputs, *stage.receives))
        self.there = {node for node in came if node is not None}

    def faults(self) -> Iterator[Fault]:
        """All faults of the stage."""
        yield from self._arguments()
        yield from self._prologue()
        for call in self.stage.calls:
            yield from self._call(call)
            self.there.update(call.block.outputs)
        yield from self._received()
        yield from self._given()

    def _arguments(self) -> Iterator[Fault]:
        """Inputs of the stage are in the batch, and none comes twice."""
        for name in self.stage.inputs:
            node = self.wiring.nodes.get(name)
            if node is None or node.name not in self.wiring.graph.input_nodes:
                detail = f"stage {self.j} takes {name} from the batch, which has no such tensor"
                yield Fault(THERE, detail)
        for name, count in repeated((*self.stage.inputs, *self.stage.receives)):
            yield Fault(THERE, f"stage {self.j} takes {name} {count} times")

    def _prologue(self) -> Iterator[Fault]:
        """The prologue is a function of the batch and of buffers that stay as they are."""
        for node in self.stage.prologue:
            for problem in self._unfit(node):
                yield Fault(FREE, f"stage {self.j}: {node.name} {problem}")
            self.there.add(node)

    def _unfit(self, node: fx.Node) -> Iterator[str]:
        """Why the stage cannot compute a node for itself."""
        if node.name in self.wiring.graph.differentiable:
            yield "carries a gradient, which would stay here (give it to one stage)"
        if is_random(node):
            yield "draws random numbers, on each stage others (give it to one stage)"
        for operand in node.all_input_nodes:
            tensor = self.wiring.tensor(operand)
            if tensor is None and operand not in self.there:
                yield f"reads {operand.name}, which is not there"
            elif tensor is not None and (tensor.trainable or tensor.mutated):
                yield f"reads {tensor.name}, which changes while training"

    def _call(self, call: Call) -> Iterator[Fault]:
        """A call reads and returns the nodes of its block, and those it reads are available."""
        for verb, names, nodes in (
            ("reads", call.arguments, call.block.inputs),
            ("returns", call.results, call.block.outputs),
        ):
            if len(names) != len(nodes):
                counts = f"{verb} {len(names)} values, its block {len(nodes)}"
                yield Fault(THERE, f"{_at(call.block, self.j)} {counts}")
            for name, node in zip(names, nodes, strict=False):
                if self.wiring.nodes.get(name) is not node:
                    block, wanted = _at(call.block, self.j), self._name(node)
                    yield Fault(THERE, f"{block} {verb} {name} in the place of {wanted}")
        for node in call.block.inputs:
            yield from self._absent(call.block, node)
        if call.recompute:
            yield from self._updates(call.block)

    def _updates(self, block: Block) -> Iterator[Fault]:
        """A block that runs twice does not update buffers."""
        for node in block.nodes:
            for operand in mutated_operands(node):
                tensor = self.wiring.tensor(self.wiring.effects.root(operand))
                if tensor is not None:
                    yield Fault(TWICE, f"{_at(block, self.j)} updates {tensor.name} in {node.name}")

    def _absent(self, block: Block, node: fx.Node) -> Iterator[Fault]:
        """The fault of an input that is not available: made on a later stage, or not received."""
        maker, home = next(iter(self.wiring.homes.get(node, ())), (None, None))
        if maker is not None and home is not None and maker > self.j:
            yield Fault(FLOWS, f"{_at(home, maker)} feeds {_at(block, self.j)}")
        elif node not in self.there:
            name, reason = self._name(node), self._reason(node, maker)
            yield Fault(THERE, f"{_at(block, self.j)} reads {name}, which {reason}")

    def _name(self, node: fx.Node) -> str:
        """The name of a node between blocks, or the one it has in the graph."""
        return self.wiring.lowered.variables.get(node, node.name)

    def _reason(self, node: fx.Node, maker: int | None) -> str:
        """Why a node is not available."""
        if node.name in self.wiring.graph.input_nodes:
            return "the stage does not take from the batch"
        if node in self.wiring.everywhere:
            return f"all ranks make and stage {self.j} does not receive"
        if maker is None:
            return "no block makes and the stage does not compute"
        if maker == self.j:
            return "a later block of the stage makes (order them as the model does)"
        return f"stage {maker} makes and stage {self.j} does not receive"

    def _received(self) -> Iterator[Fault]:
        """Received values are made by another stage and used here."""
        used = {name for call in self.stage.calls for name in call.arguments}
        for name in self.stage.receives:
            maker = self.wiring.makers.get(name)
            start = f"stage {self.j} receives {name}, which"
            if maker is None:
                yield Fault(GIVEN, f"{start} no stage makes")
            elif maker == self.j:
                yield Fault(GIVEN, f"{start} it makes itself")
            elif name not in used:
                yield Fault(GIVEN, f"{start} none of its blocks reads")

    def _given(self) -> Iterator[Fault]:
        """The stage gives exactly those of its results that others receive."""
        for name in self.stage.gives:
            if self.wiring.makers.get(name) != self.j:
                yield Fault(GIVEN, f"stage {self.j} gives {name}, which it does not make")
            elif name not in self.wiring.readers:
                yield Fault(GIVEN, f"stage {self.j} gives {name}, which no other stage receives")
        for name, readers in self.wiring.readers.items():
            if self.wiring.makers[name] == self.j and name not in self.stage.gives:
                took = "all ranks take" if NOWHERE in readers else f"stage {readers[0]} receives"
                yield Fault(GIVEN, f"{took} {name}, which stage {self.j} does not give")


def _values(wiring: Wiring) -> Iterator[Fault]:
    """The table of values, from which buffers are made, agrees with stages and graph."""
    values = wiring.lowered.values
    for name in dict.fromkeys((*values, *wiring.readers)):
        value, readers = values.get(name), wiring.readers.get(name)
        if readers is None:
            yield Fault(TYPED, f"{name} is listed, but no stage receives it from another")
        elif value is None:
            detail = f"{name} goes to {_stages(readers[:1])}, but has no shape and dtype"
            yield Fault(TYPED, detail)
        else:
            yield from _value(wiring, name, value, wiring.makers[name], tuple(readers))


def _value(
    wiring: Wiring, name: str, value: StageValue, maker: int, readers: tuple[int, ...]
) -> Iterator[Fault]:
    """The entry of one value is right."""
    if value.name != name:
        yield Fault(TYPED, f"{name} is listed under the name {value.name}")
    if (value.producer, value.consumers) != (maker, readers):
        listed = f"listed from {_stages((value.producer,))} to {_stages(value.consumers)}"
        way = f"goes from {_stages((maker,))} to {_stages(readers)}"
        yield Fault(TYPED, f"{name} {way} ({listed})")
    node = wiring.nodes.get(name)
    made = None if node is None else node.meta.get("val")
    if not isinstance(made, torch.Tensor):
        yield Fault(TYPED, f"{name} is no tensor, and only tensors go between stages")
    elif (tuple(value.shape), value.dtype) != (tuple(made.shape), made.dtype):
        sent = f"{made.dtype} {tuple(made.shape)} on {_stages((maker,))}"
        yield Fault(TYPED, f"{name} is {sent}, and buffers are {value.dtype} {tuple(value.shape)}")
    elif node is not None and value.order != order_of(node):
        detail = f"{name} lies in memory as {order_of(node)}, and buffers as {value.order}"
        yield Fault(TYPED, detail)
    if value.differentiable != wiring.differentiable(name):
        carries, listed = ("a", "none") if wiring.differentiable(name) else ("no", "one")
        yield Fault(TYPED, f"{name} carries {carries} gradient ({listed} is listed)")
    crossings = [c for c in wiring.crossings if c.name == name and not c.differentiable]
    apart = sorted(j for c in crossings for j in c.readers) if value.differentiable else []
    if list(value.detached) != apart:
        where, listed = (_stages(s) if s else "no stage" for s in (apart, value.detached))
        yield Fault(TYPED, f"{name} is detached on {where} ({listed} is listed)")


def _stages(stages: Sequence[int]) -> str:
    """The numbers of stages in words; NOWHERE means all ranks.

    >>> _stages((1,)), _stages((1, 3)), _stages((NOWHERE, 2))
    ('stage 1', 'stages 1, 3', 'all ranks and stage 2')
    """
    numbers = [j for j in stages if j != NOWHERE]
    listed = ", ".join(map(str, numbers))
    named = f"stages {listed}" if len(numbers) > 1 else f"stage {listed}"
    if len(numbers) == len(list(stages)):
        return named
    return f"all ranks and {named}" if numbers else "all ranks"


def _loss(wiring: Wiring) -> Iterator[Fault]:
    """Exactly one stage declares the loss, and makes it; none if all ranks have it."""
    having = [j for j, stage in enumerate(wiring.stages) if stage.loss is not None]
    if wiring.head is not None:
        if having:
            yield Fault(LOSS, f"it is on {_stages(having)} and on all ranks")
        if wiring.head.layer.node is not wiring.graph.loss:
            yield Fault(LOSS, f"all ranks compute {wiring.head.layer.node.name} in its place")
        return
    if len(having) != 1:
        yield Fault(LOSS, f"it is on {_stages(having) if having else 'no stage'}")
    wanted = wiring.lowered.variables.get(wiring.graph.loss)
    for j in having:
        name = wiring.stages[j].loss
        results = {result for call in wiring.stages[j].calls for result in call.results}
        if name != wanted:
            yield Fault(LOSS, f"stage {j} calls {name} the loss, the graph {wanted}")
        elif name not in results:
            yield Fault(LOSS, f"stage {j} has it, but none of its blocks makes {name}")


def _kept(wiring: Wiring) -> Iterator[Fault]:
    """Each output that predictions return is kept by the one stage that makes it."""
    wanted = {wiring.lowered.variables.get(node) for node in wiring.graph.kept.values()}
    for j, stage in enumerate(wiring.stages):
        results = {result for call in stage.calls for result in call.results}
        for name in {*stage.keeps} - (wanted & results):
            yield Fault(KEPT, f"stage {j} keeps {name}, which is no output that it makes")
    for label, node in wiring.graph.kept.items():
        kept = wiring.lowered.variables.get(node)
        having = [j for j, stage in enumerate(wiring.stages) if kept in stage.keeps]
        if len(having) != 1:
            stages = _stages(having) if having else "no stage"
            yield Fault(KEPT, f"the output {label!r} ({kept}) is on {stages}")
