"""What a lowered program computes, in symbols: a slow reader of lists that knows no rule.

Every tensor is a number that stands for its term: equal numbers, equal terms. A rank executes its
list as the runtime does, with one queue per directed pair of ranks and nothing but the order in it
to tell messages apart. What comes out is compared with the model's graph, executed as a whole.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

from torch import fx

from parcompiler.capture.effects import Effects, mutated_operands
from parcompiler.graph import Graph, dtype_of, shape_of
from parcompiler.instruction import Instruction, Kind
from parcompiler.lower import Lowered, Stage

Key = tuple[str, int]  # a value and its micro-batch
Gradient = Counter[int]  # terms that are added up
Contents = TypeVar("Contents", int, Gradient)


class Wrong(Exception):
    """The program cannot be executed to its end."""


def same_meaning(lowered: Lowered) -> bool:
    """Whether training and evaluation compute what the model does, on every rank."""
    try:
        return all(_same(lowered, training) for training in (True, False))
    except (Wrong, LookupError, TypeError, ValueError):
        return False


def _same(lowered: Lowered, training: bool) -> bool:
    """Whether one of the two programs computes what the model does."""
    held, terms = held_by(lowered), Terms()
    if set().union(*held) != set(lowered.graph.by_name):
        return False
    whole = Whole(lowered.graph, terms)
    whole.run(lowered.microbatches, training)
    machine = Machine(lowered, terms, training)
    machine.run()
    return machine.found(held) == whole.found(held)


def held_by(lowered: Lowered) -> list[set[str]]:
    """The names of the tensors on each rank."""
    held: list[set[str]] = [set() for _ in lowered.instructions]
    for stage in lowered.stages:
        held[stage.rank] |= set(stage.tensors)
    return held


class Terms:
    """A number for every term."""

    def __init__(self) -> None:
        self._numbers: defaultdict[object, int] = defaultdict(count().__next__)

    def __call__(self, *parts: object) -> int:
        return self._numbers[parts]


class Memory:
    """Executes nodes: what each was given, and the latest update of memory that is shared."""

    def __init__(self, graph: Graph, terms: Terms) -> None:
        self.graph = graph
        self.terms = terms
        self.effects = Effects(graph.fx_graph)
        self.updates: dict[fx.Node, int] = {}

    def read(self, node: fx.Node, values: Mapping[fx.Node, int]) -> int:
        """A tensor as it is now."""
        value = values[node] if node in values else self.tensor(node)
        update = self.updates.get(self.effects.root(node))
        return value if update is None else self.terms("after", value, update)

    def tensor(self, node: fx.Node) -> int:
        """A parameter or buffer."""
        return self.terms("tensor", self.graph.by_node[node.name].name)

    def execute(self, nodes: Iterable[fx.Node], values: dict[fx.Node, int]) -> None:
        """Run operators in order."""
        for node in nodes:
            operands = [self.read(operand, values) for operand in node.all_input_nodes]
            values[node] = self.terms(node.name, *operands)
            for operand in mutated_operands(node):
                self.updates[self.effects.root(operand)] = values[node]

    def forget(self) -> None:
        """Keep only the updates of buffers."""
        self.updates = {n: u for n, u in self.updates.items() if n.op == "placeholder"}

    def back(
        self,
        nodes: Sequence[fx.Node],
        values: Mapping[fx.Node, int],
        gradients: defaultdict[fx.Node, Gradient],
    ) -> None:
        """Add what flows back through operators to the gradients of what they read."""
        carrying = self.graph.differentiable
        for node in reversed(nodes):
            if node.name in carrying and gradients[node]:
                total = self.terms("sum", frozenset(gradients[node].items()))
                for number, operand in enumerate(node.all_input_nodes):
                    if operand.name in carrying:
                        term = self.terms("back", node.name, number, values[node], total)
                        gradients[operand][term] += 1


@dataclass
class Found:
    """The results of a step on one rank."""

    loss: object
    gradients: dict[str, Gradient]
    buffers: dict[str, object]


class Whole:
    """The model in one process, one micro-batch after the other."""

    def __init__(self, graph: Graph, terms: Terms) -> None:
        self.graph = graph
        self.memory = Memory(graph, terms)
        self.terms = terms
        self.losses: dict[int, int] = {}
        self.gradients: defaultdict[str, Gradient] = defaultdict(Counter)

    def run(self, microbatches: int, training: bool) -> None:
        """One step."""
        nodes = [node for node in self.graph.fx_graph.nodes if node.op == "call_function"]
        for i in range(microbatches):
            values = {
                node: self.terms("batch", node.name, i)
                for node in self.graph.fx_graph.nodes
                if node.name in self.graph.input_nodes
            }
            self.memory.execute(nodes, values)
            self.losses[i] = values[self.graph.loss]
            self.memory.forget()
            if training:
                gradients: defaultdict[fx.Node, Gradient] = defaultdict(Counter)
                gradients[self.graph.loss][self.terms("one")] += 1
                self.memory.back(nodes, values, gradients)
                add_parameters(self.graph, gradients, self.gradients)

    def found(self, held: Sequence[set[str]]) -> list[Found]:
        """What every rank should have."""
        return [
            Found(
                tuple(sorted(self.losses.items())),
                {n: self.gradients[n] for n in names if self.graph.by_name[n].trainable},
                buffers_of(self.graph, self.memory, names),
            )
            for names in held
        ]


def add_parameters(
    graph: Graph,
    gradients: Mapping[fx.Node, Gradient],
    totals: defaultdict[str, Gradient],
) -> None:
    """Add the gradients of a micro-batch to those of the step."""
    for node, gradient in gradients.items():
        tensor = graph.by_node.get(node.name)
        if tensor is not None:
            totals[tensor.name] += gradient


def buffers_of(graph: Graph, memory: Memory, names: Iterable[str]) -> dict[str, object]:
    """The last update of each buffer that the forward updates."""
    roots = {node.name: node for node in graph.fx_graph.nodes if node.op == "placeholder"}
    return {
        name: memory.updates.get(roots[graph.by_name[name].node])
        for name in names
        if graph.by_name[name].mutated
    }


@dataclass
class Queue:
    """From one rank to another: what was sent, and how many receives were posted."""

    sent: list[tuple[object, object]] = field(default_factory=list)  # shape and dtype, contents
    posted: int = 0


@dataclass
class Receipt:
    """A posted receive: number `number` of a queue, into a buffer of this shape and dtype."""

    queue: Queue
    number: int
    form: object

    @property
    def ready(self) -> bool:
        return len(self.queue.sent) > self.number

    def take(self, kind: type[Contents]) -> Contents:
        """What has arrived. Wrong if it is no value (int) or no gradient (Counter), as expected."""
        form, contents = self.queue.sent[self.number]
        if form != self.form or not isinstance(contents, kind):
            raise Wrong
        return contents


class Rank:
    """One rank: its place in the list, its tensors, and the verbs."""

    def __init__(self, machine: Machine, rank: int) -> None:
        self.machine = machine
        self.rank = rank
        self.memory = Memory(machine.lowered.graph, machine.terms)
        self.position = 0
        self.entered = False
        self.receipts: dict[Key, Receipt] = {}
        self.gradient_receipts: defaultdict[Key, list[Receipt]] = defaultdict(list)
        self.arrived: dict[Key, int] = {}
        self.results: dict[Key, int] = {}
        self.saved: dict[tuple[int, int], list[tuple[Any, dict[fx.Node, int]]]] = {}
        self.leaves: defaultdict[Key, Gradient] = defaultdict(Counter)
        self.back_through: Counter[Key] = Counter()
        self.losses: dict[int, int] = {}
        self.loss: object = None
        self.gradients: defaultdict[str, Gradient] = defaultdict(Counter)
        self.met: Counter[object] = Counter()

    def step(self, line: Instruction) -> bool:
        """Execute an instruction; False if it must wait."""
        verbs = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.SEND: self._send,
            Kind.RECV: self._receive,
            Kind.REDUCE_GRADIENTS: self._reduce,
            Kind.SHARE_LOSS: self._share,
        }
        return verbs[line.kind](line)

    def _stage(self, line: Instruction) -> tuple[Stage, int]:
        j, i = line.stage, line.microbatch
        if j is None or i is None or i not in range(self.machine.lowered.microbatches):
            raise Wrong
        stage = self.machine.lowered.stages[j]
        if stage.rank != self.rank:
            raise Wrong
        return stage, i

    def _forward(self, line: Instruction) -> bool:
        stage, i = self._stage(line)
        if not all(self._has((name, i)) for name in stage.receives):
            return False
        names = {name: self.machine.batch(name, i) for name in stage.inputs}
        names |= {name: self.arrived[name, i] for name in stage.receives}
        values = {self.machine.nodes[name]: value for name, value in names.items()}
        self.memory.execute(stage.prologue, values)
        variables = self.machine.lowered.variables
        names |= {variables[n]: values[n] for n in stage.prologue if n in variables}
        tape = []
        for call in stage.calls:
            inside = {
                node: names[name]
                for name, node in zip(call.arguments, call.block.inputs, strict=True)
            }
            self.memory.execute(call.block.nodes, inside)
            for name, node in zip(call.results, call.block.outputs, strict=True):
                names[name] = self.memory.read(node, inside)
            tape.append((call, inside))
        self.memory.forget()
        if stage.loss is not None:
            self.losses[i] = names[stage.loss]
        for name in stage.gives:
            self.results[name, i] = self.arrived[name, i] = names[name]
        self.saved[stage.index, i] = tape
        return True

    def _has(self, key: Key) -> bool:
        """Whether a value has come; Wrong if nothing makes it come."""
        if key in self.receipts:
            if not self.receipts[key].ready:
                return False
            self.arrived[key] = self.receipts.pop(key).take(int)
        if key not in self.arrived:
            raise Wrong
        return True

    def _backward(self, line: Instruction) -> bool:
        stage, i = self._stage(line)
        if not self.machine.training:
            raise Wrong
        if not all(r.ready for name in stage.gives for r in self.gradient_receipts[name, i]):
            return False
        given: defaultdict[str, Gradient] = defaultdict(Counter)
        for name in stage.gives:
            given[name] += self.leaves.pop((name, i), Counter())
            for receipt in self.gradient_receipts.pop((name, i)):
                given[name] += receipt.take(Counter)
        if stage.loss is not None:
            given[stage.loss][self.machine.terms("one")] += 1
        for call, values in reversed(self.saved.pop((stage.index, i))):
            gradients: defaultdict[fx.Node, Gradient] = defaultdict(Counter)
            for name, node in zip(call.results, call.block.outputs, strict=True):
                gradients[node] += given[name]
            self.memory.back(call.block.nodes, values, gradients)
            add_parameters(self.machine.lowered.graph, gradients, self.gradients)
            for name, node in zip(call.arguments, call.block.inputs, strict=True):
                given[name] += gradients[node]
        for name in stage.receives:
            self.leaves[name, i] += given[name]
            self.back_through[name, i] += 1
        return True

    def _send(self, line: Instruction) -> bool:
        assert line.value is not None and line.microbatch is not None and line.peer is not None
        queue = self.machine.queues[self.rank, line.peer]
        if not self.entered:
            key = (line.value, line.microbatch)
            contents: object = self.results.get(key)
            if line.gradient:
                readers = [s for s in self.machine.on(self.rank) if line.value in s.receives]
                if not readers or self.back_through[key] < len(readers):
                    raise Wrong
                contents = Counter(self.leaves[key])
            if contents is None:
                raise Wrong
            node = self.machine.nodes[line.value]
            queue.sent.append(((shape_of(node), dtype_of(node)), contents))
            self.number = len(queue.sent)
        return queue.posted >= self.number

    def _receive(self, line: Instruction) -> bool:
        assert line.value is not None and line.microbatch is not None and line.peer is not None
        value = self.machine.lowered.values[line.value]
        queue = self.machine.queues[line.peer, self.rank]
        receipt = Receipt(queue, queue.posted, (tuple(value.shape), value.dtype))
        queue.posted += 1
        key = (line.value, line.microbatch)
        if line.gradient:
            self.gradient_receipts[key].append(receipt)
        else:
            self.receipts[key] = receipt
        return True

    def _reduce(self, line: Instruction) -> bool:
        (tied,) = (item for item in self.machine.lowered.tied if item.label == line.value)
        if self.rank not in tied.ranks or line.ranks != tied.ranks or not self.machine.training:
            raise Wrong
        parts = self._meet(tied.ranks, tied.ranks, Counter(self.gradients[tied.name]))
        if parts is None:
            return False
        self.gradients[tied.name] = sum(parts.values(), Counter())
        return True

    def _share(self, line: Instruction) -> bool:
        everyone = range(len(self.machine.ranks))
        parts = self._meet("everyone", everyone, tuple(sorted(self.losses.items())))
        if parts is None:
            return False
        if self.loss is not None:
            raise Wrong
        self.loss = parts[line.peer]
        return True

    def _meet(self, group: object, ranks: Iterable[int], part: object) -> Any:
        """What all ranks of a group brought to their next meeting; None while some are missing."""
        if not self.entered:
            self.met[group] += 1
        meeting = self.machine.meetings[group, self.met[group]]
        if not self.entered:
            meeting[self.rank] = part
        return meeting if set(meeting) == set(ranks) else None


class Machine:
    """All ranks and the queues between them."""

    def __init__(self, lowered: Lowered, terms: Terms, training: bool) -> None:
        self.lowered = lowered
        self.terms = terms
        self.training = training
        self.lists = lowered.instructions if training else lowered.evaluation
        self.nodes = {name: node for node, name in lowered.variables.items()}
        self.queues: defaultdict[tuple[int, int], Queue] = defaultdict(Queue)
        self.meetings: defaultdict[object, dict[int, Any]] = defaultdict(dict)
        self.ranks = [Rank(self, rank) for rank in range(len(self.lists))]

    def batch(self, name: str, i: int) -> int:
        """A tensor of the batch."""
        node = self.nodes[name]
        if node.name not in self.lowered.graph.input_nodes:
            raise Wrong
        return self.terms("batch", node.name, i)

    def on(self, rank: int) -> list[Stage]:
        """The stages of a rank."""
        return [stage for stage in self.lowered.stages if stage.rank == rank]

    def run(self) -> None:
        """Let every rank try its next instruction until all are done, or none can go on."""
        moved = True
        while moved:
            moved = any([self._advance(rank) for rank in self.ranks])
        if any(rank.position < len(self.lists[rank.rank]) for rank in self.ranks):
            raise Wrong
        if any(queue.posted != len(queue.sent) for queue in self.queues.values()):
            raise Wrong

    def _advance(self, rank: Rank) -> bool:
        """Execute what a rank can; whether it was anything."""
        start = rank.position
        lines = self.lists[rank.rank]
        while rank.position < len(lines) and rank.step(lines[rank.position]):
            rank.position += 1
            rank.entered = False
        if rank.position < len(lines):
            moved = rank.position > start or not rank.entered
            rank.entered = True
            return moved
        return rank.position > start

    def found(self, held: Sequence[set[str]]) -> list[Found]:
        """What every rank has after the step."""
        graph = self.lowered.graph
        return [
            Found(
                rank.loss,
                {n: rank.gradients[n] for n in held[rank.rank] if graph.by_name[n].trainable},
                buffers_of(graph, rank.memory, held[rank.rank]),
            )
            for rank in self.ranks
        ]
