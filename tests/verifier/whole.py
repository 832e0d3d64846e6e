"""The model's graph in symbols, as a whole: what every rank of a program should come to.

Every tensor is a number that stands for its term: equal numbers, equal terms. One micro-batch goes
after the other, in an asynchronous program each with the weights that its stages had.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from torch import fx

from parcompiler.capture.effects import Effects, mutated_operands
from parcompiler.graph import Graph
from parcompiler.instruction import Kind
from parcompiler.lower import Lowered, StageProgram

Gradient = Counter[int]  # terms that are added up


class Wrong(Exception):
    """The program cannot be executed to its end."""


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
        self.versions: dict[str, int] = {}  # of parameters that have been updated

    def read(self, node: fx.Node, values: Mapping[fx.Node, int]) -> int:
        """A tensor as it is now."""
        value = values[node] if node in values else self.tensor(node)
        update = self.updates.get(self.effects.root(node))
        return value if update is None else self.terms("after", value, update)

    def tensor(self, node: fx.Node) -> int:
        """A parameter or buffer."""
        return self.version(self.graph.by_node[node.name].name)

    def version(self, name: str) -> int:
        """A parameter or buffer as it is after the last UPDATE."""
        return self.versions[name] if name in self.versions else self.terms("tensor", name)

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
    trained: dict[str, tuple[int, Gradient]]  # the version of each parameter and its gradient
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
        for i in range(microbatches):
            self.run_one(i, training)

    def run_one(self, i: int, training: bool) -> None:
        """One micro-batch."""
        nodes = [node for node in self.graph.fx_graph.nodes if node.op == "call_function"]
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
                {
                    n: (self.memory.version(n), self.gradients[n])
                    for n in names
                    if self.graph.by_name[n].trainable
                },
                buffers_of(self.graph, self.memory, names),
            )
            for names in held
        ]


class Stale:
    """An asynchronous step in one process: every micro-batch whole, with weights of long ago.

    `seen[j, i]` are the backwards that stage `j` had done before its forward of micro-batch `i`;
    of its weights, that forward and its backward see the version after the updates by these.
    """

    def __init__(self, lowered: Lowered, terms: Terms) -> None:
        self.lowered = lowered
        self.graph = lowered.graph
        self.terms = terms
        self.seen: dict[tuple[int, int], tuple[int, ...]] = {}
        self.backwards: dict[int, tuple[int, ...]] = {s.index: () for s in lowered.stages}
        self._read()
        self.runs: dict[int, Whole | None] = {}  # None while it is under way

    def _read(self) -> None:
        """The order of the compute instructions says which weights each of them sees."""
        for line in (line for lines in self.lowered.instructions for line in lines):
            j, i = line.stage, line.microbatch
            if j is None or i is None:
                continue
            if line.kind is Kind.FORWARD:
                if (j, i) in self.seen:
                    raise Wrong
                self.seen[j, i] = self.backwards[j]
            elif line.kind is Kind.BACKWARD:
                if i in self.backwards[j]:
                    raise Wrong
                self.backwards[j] += (i,)

    def run(self, i: int) -> Whole:
        """Micro-batch `i`, after those whose gradients its weights have seen."""
        if i in self.runs:
            found = self.runs[i]
            if found is None:
                raise Wrong
            return found
        self.runs[i] = None
        whole = Whole(self.graph, self.terms)
        if i and any(item.mutated for item in self.graph.parameters):
            whole.memory.updates = dict(self.run(i - 1).memory.updates)
        for stage in self.lowered.stages:
            whole.memory.versions |= self.weights(stage, self.seen[stage.index, i])
        whole.run_one(i, training=True)
        self.runs[i] = whole
        return whole

    def weights(self, stage: StageProgram, backwards: tuple[int, ...]) -> dict[str, int]:
        """The parameters of a stage after the updates by some backwards."""
        names = [name for name in stage.tensors if self.graph.by_name[name].trainable]
        found = {name: self.terms("tensor", name) for name in names}
        for i in backwards:
            gradients = self.run(i).gradients
            for name in names:
                found[name] = updated(self.terms, found[name], gradients[name])
        return found

    def found(self, held: Sequence[set[str]]) -> list[Found]:
        """What every rank should have."""
        runs = [self.run(i) for i in range(self.lowered.microbatches)]
        losses = tuple((i, whole.losses[i]) for i, whole in enumerate(runs))
        trained: list[dict[str, tuple[int, Gradient]]] = [{} for _ in held]
        for stage in self.lowered.stages:
            weights = self.weights(stage, self.backwards[stage.index])
            trained[stage.rank] |= {name: (term, Counter()) for name, term in weights.items()}
        return [
            Found(losses, weights, buffers_of(self.graph, runs[-1].memory, names))
            for weights, names in zip(trained, held, strict=True)
        ]


def updated(terms: Terms, version: int, gradient: Gradient) -> int:
    """A parameter after an optimizer step."""
    return terms("updated", version, frozenset(gradient.items()))


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
