"""What a lowered program computes, in symbols: a slow reader of lists that knows no rule.

A rank executes its list as the runtime does, with one queue per directed pair of ranks and nothing
but the order in it to tell messages apart. What comes out is compared with what `whole` makes of
the model's graph. A program that keeps something for a use that never comes is wrong too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import fx

from parcompiler.graph import dtype_of, shape_of
from parcompiler.instruction import EMBEDDING, HEAD, TRANSFERS, Instruction, Kind
from parcompiler.lower import Lowered, StageProgram
from tests.verifier.together import Sum, Together
from tests.verifier.whole import (
    Found,
    Gradient,
    Memory,
    Stale,
    Terms,
    Whole,
    Wrong,
    add_parameters,
    buffers_of,
    updated,
)

Key = tuple[str, int]  # a value and its micro-batch
Contents = TypeVar("Contents", int, Gradient)


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
    machine = Machine(lowered, terms, training)
    machine.run()
    if training and lowered.asynchronous:
        return machine.found(held) == Stale(lowered, terms).found(held)
    whole = Whole(lowered.graph, terms)
    whole.run(lowered.microbatches, training)
    return machine.found(held) == whole.found(held)


def held_by(lowered: Lowered) -> list[set[str]]:
    """The names of the tensors on each rank."""
    held: list[set[str]] = [set() for _ in lowered.instructions]
    for stage in lowered.stages:
        held[stage.rank] |= set(stage.tensors)
    for names in held:
        names |= set(lowered.vocabulary.tensors if lowered.vocabulary else ())
    return held


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
        self.together = Together(self, machine.lowered.vocabulary)
        self.receipts: dict[Key, Receipt | Sum] = {}
        self.gradient_receipts: defaultdict[Key, list[Receipt | Sum]] = defaultdict(list)
        self.arrived: dict[Key, int] = {}
        self.results: dict[Key, int] = {}
        self.saved: dict[tuple[int, int], list[tuple[Any, dict[fx.Node, int]]]] = {}
        self.deferred: dict[tuple[int, int], defaultdict[str, Gradient]] = {}
        self.pending: defaultdict[int, list[int]] = defaultdict(list)  # backwards without UPDATE
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
            Kind.BACKWARD_INPUT: self._backward,
            Kind.BACKWARD_WEIGHT: self._finish,
            Kind.UPDATE: self._update,
            Kind.SEND: self._send,
            Kind.RECV: self._receive,
            Kind.REDUCE_GRADIENTS: self._reduce,
            Kind.SHARE_LOSS: self._share,
            **dict.fromkeys((*EMBEDDING, *HEAD, *TRANSFERS, Kind.EXCHANGE), self.together.step),
        }
        return verbs[line.kind](line)

    def _stage(self, line: Instruction) -> tuple[StageProgram, int]:
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
        weights: defaultdict[str, Gradient] = defaultdict(Counter)
        for call, values in reversed(self.saved.pop((stage.index, i))):
            gradients: defaultdict[fx.Node, Gradient] = defaultdict(Counter)
            for name, node in zip(call.results, call.block.outputs, strict=True):
                gradients[node] += given[name]
            if call.recompute:
                again = {node: values[node] for node in call.block.inputs}
                self.memory.execute(call.block.nodes, again)
                self.memory.forget()
            self.memory.back(call.block.nodes, values, gradients)
            add_parameters(self.machine.lowered.graph, gradients, weights)
            for name, node in zip(call.arguments, call.block.inputs, strict=True):
                given[name] += gradients[node]
        for name in stage.receives:
            self.leaves[name, i] += given[name]
            self.back_through[name, i] += 1
        self.deferred[stage.index, i] = weights
        return line.kind is Kind.BACKWARD_INPUT or self._finish(line)

    def _finish(self, line: Instruction) -> bool:
        stage, i = self._stage(line)
        self.pending[stage.index].append(i)
        for name, gradient in self.deferred.pop((stage.index, i)).items():
            self.gradients[name] += gradient
        return True

    def _update(self, line: Instruction) -> bool:
        stage, i = self._stage(line)
        if not self.machine.training or self.pending.pop(stage.index, []) != [i]:
            raise Wrong
        for name in stage.tensors:
            if self.machine.lowered.graph.by_name[name].trainable:
                gradient = self.gradients.pop(name, Counter())
                version = self.memory.version(name)
                self.memory.versions[name] = updated(self.machine.terms, version, gradient)
        return True

    @property
    def holds(self) -> bool:
        """Whether something is kept that was to be used."""
        left = [self.deferred, self.receipts, self.gradient_receipts]
        kept = any(left) or self.together.holds
        return kept or (self.machine.training and bool(self.saved))

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
        if self.together.exchanges:
            if not self.together.settled():
                return False
            self.entered = False
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

    def on(self, rank: int) -> list[StageProgram]:
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
        if any(rank.holds for rank in self.ranks):
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
                {
                    n: (rank.memory.version(n), rank.gradients[n])
                    for n in held[rank.rank]
                    if graph.by_name[n].trainable
                },
                buffers_of(graph, rank.memory, held[rank.rank]),
            )
            for rank in self.ranks
        ]
