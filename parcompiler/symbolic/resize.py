"""A captured graph at other sizes, without capturing it again: one block of each template.

captured graph        b = 2, s = 8, burnt into its nodes
    │  Resizer           the first block of each template, the prologue, the inputs
    │  settle            run at sizes that are like no others: how each number is to be read
    ▼
Resizer.at({"b": 4, "s": 24})      the same blocks with other numbers, ready to be costed

Numbers are read by the flow of the data: a view keeps the order of elements, what is expanded or
cut is so to a size that is there. Where several readings are left, the one that runs is right;
`questions` has what is to be said of those of which several do.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from parcompiler.capture.blocks import Cut
from parcompiler.cost.execution import Recorder, execute
from parcompiler.cost.operation import label
from parcompiler.cost.stand_in import stand_in
from parcompiler.graph import Block, Graph
from parcompiler.symbolic.operators import Choice, alternatives, with_numbers
from parcompiler.symbolic.reading import Shape, Unfit
from parcompiler.symbolic.sizes import Size, Sizes, now
from parcompiler.symbolic.values import alike, meta_at, number_at, shapes_of, with_shape

TRIES = 60


class Stuck(Unfit):
    """What a run stopped at."""

    def __init__(self, message: str, node: fx.Node) -> None:
        super().__init__(message)
        self.node = node


@dataclass(frozen=True, slots=True)
class Resized:
    """A block at other sizes: its nodes, what it reads and what it gives."""

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


@dataclass(slots=True)
class Run:
    """One run through the graph: the value of each node, and the blocks with these values."""

    sizes: Sizes
    values: dict[fx.Node, Any] = field(default_factory=dict)
    blocks: dict[str, Resized] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _State:
    """What goes along with a run: how numbers are read, or which reading is tried for each node."""

    run: Run
    recorder: Recorder
    chosen: Mapping[fx.Node, Choice] | None
    picked: Mapping[fx.Node, int]


@dataclass
class Resizer:
    """A graph, cut into blocks, that can be had at other sizes.

    `sizes` are those that change, `generic` numbers for them that are like no others. After
    `settle`, `chosen` says how the numbers of each node are read, and `open` has all ways in which
    those of some may be.
    """

    graph: Graph
    cut: Cut
    sizes: tuple[Size, ...]
    generic: Sizes
    chosen: dict[fx.Node, Choice] = field(default_factory=dict)
    open: dict[fx.Node, list[Choice]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Find the first block of each template, and whose values stand for those of the others."""
        self.first: dict[str, Block] = {}
        self.like: dict[fx.Node, fx.Node] = {}
        for block in self.cut.blocks:
            known = self.first.setdefault(block.template, block)
            self.like.update(zip(block.nodes, known.nodes, strict=True))
        spread = self.graph.vocabulary
        self.lookups = [item.node for item in spread.lookups] if spread else []

    @property
    def now(self) -> Sizes:
        """The numbers of the symbols at capture."""
        return now(self.sizes)

    def at(self, sizes: Sizes) -> Run:
        """The graph at these sizes. Raises Unfit where it has none."""
        return self._run(sizes, self.chosen)

    def settle(self) -> Run:
        """Find how the numbers are to be read; the graph at `generic`. Raises Unfit.

        Where a run gets stuck, each node that leads there may be read in its next way; of all ways
        to go on, the one from where a run came furthest is tried first.
        """
        first: Stuck | None = None
        waiting: list[tuple[int, int, dict[fx.Node, int]]] = [(0, 0, {})]
        for number in range(TRIES):
            if not waiting:
                break
            picked = heapq.heappop(waiting)[-1]
            self.chosen, self.open = {}, {}
            try:
                run = self._run(self.generic, None, picked)
            except Stuck as stuck:
                first = first or stuck
                for turn, other in enumerate(self._others(stuck, picked)):
                    heapq.heappush(waiting, (-len(self.chosen), number * 1000 + turn, other))
            else:
                return run
        assert first is not None
        raise first

    def rivals(self) -> Iterator[tuple[fx.Node, Choice, Run]]:
        """Each node that may be read in another way than was settled, with that and its run."""
        for node, choices in list(self.open.items()):
            for choice in choices:
                if choice != self.chosen[node]:
                    try:
                        run = self._run(self.generic, {**self.chosen, node: choice})
                    except Stuck:
                        continue
                    yield node, choice, run

    def _others(self, stuck: Stuck, picked: Mapping[fx.Node, int]) -> Iterator[dict[fx.Node, int]]:
        """The next reading of each node that leads to where a run got stuck, nearest first."""
        leading = self._leading_to(stuck.node)
        for node in reversed(self.open):
            index = picked.get(node, 0) + 1
            if node in leading and index < len(self.open[node]):
                yield {**picked, node: index}

    def _leading_to(self, node: fx.Node) -> set[fx.Node]:
        """The nodes whose values a node depends on, and itself."""
        found: set[fx.Node] = set()
        waiting = [node]
        while waiting:
            own = waiting.pop()
            own = self.like.get(own, own)
            if own not in found:
                found.add(own)
                waiting += own.all_input_nodes
        return found

    def _run(
        self,
        sizes: Sizes,
        chosen: Mapping[fx.Node, Choice] | None,
        picked: Mapping[fx.Node, int] | None = None,
    ) -> Run:
        """Run all nodes at these sizes; without `chosen` they are read, and noted."""
        run, recorder = Run(sizes), Recorder()
        state = _State(run, recorder, chosen, picked or {})
        scratch, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        with recorder, torch.no_grad():
            for node in self.graph.fx_graph.nodes:
                if node.op == "placeholder":
                    run.values[node] = self._given(node, sizes)
            for node in self.lookups:
                run.values[node] = self._looked_up(node, sizes)
            for node in self.cut.prologue:
                self._reach(node, run, scratch, copies, frozenset(self.cut.prologue))
                self._step(node, state, scratch, copies)
            for block in self.first.values():
                self._block(block, state)
        return run

    def _block(self, block: Block, state: _State) -> None:
        """Run a block in a graph of its own, in which each value that it reads is a placeholder."""
        graph, copies, own = fx.Graph(), dict[fx.Node, fx.Node](), frozenset(block.nodes)
        for node in block.nodes:
            self._reach(node, state.run, graph, copies, own)
            self._step(node, state, graph, copies)
        state.run.blocks[block.template] = Resized(
            nodes=tuple(copies[node] for node in block.nodes),
            inputs=tuple(copies[node] for node in block.inputs),
            outputs=tuple(copies[node] for node in block.outputs),
        )

    def _reach(
        self,
        node: fx.Node,
        run: Run,
        graph: fx.Graph,
        copies: dict[fx.Node, fx.Node],
        own: frozenset[fx.Node],
    ) -> None:
        """Placeholders for what a node reads that is made elsewhere than with its `own`."""
        for operand in node.all_input_nodes:
            if operand not in copies and operand not in own:
                copy = graph.placeholder(operand.name)
                copy.name = operand.name
                value = run.values[self.like.get(operand, operand)]
                copy.meta = {**operand.meta, "val": value}
                copies[operand] = copy

    def _step(
        self, node: fx.Node, state: _State, graph: fx.Graph, copies: dict[fx.Node, fx.Node]
    ) -> None:
        """Run one node with its numbers read."""
        operands = [(operand, copies[operand]) for operand in node.all_input_nodes]
        before, after = shapes_of(operands[0]) if operands else (None, None)
        choice = self._choice(node, before, after, state)
        try:
            numbers = {
                name: number_at(item, after, state.run.sizes) for name, item in choice.items()
            }
            meta = meta_at(node, operands)
        except Unfit as unfit:
            message = f"{node.name!r}: {unfit}"
            raise Stuck(message, node) from unfit
        args, kwargs = fx.map_arg(with_numbers(node, numbers), copies.__getitem__)
        copy = graph.create_node(node.op, node.target, args, kwargs)
        copy.name, copy.meta, copies[node] = node.name, meta, copy
        state.run.values[node] = self._execute(node, copy, state.recorder)

    def _choice(
        self, node: fx.Node, before: Shape | None, after: Shape | None, state: _State
    ) -> Choice:
        """How the numbers of a node are read: as settled, or as it is tried now."""
        if state.chosen is not None:
            return state.chosen[node]
        choices = alternatives(node, before, after, self.now, state.run.sizes)
        self.chosen[node] = choices[min(state.picked.get(node, 0), len(choices) - 1)]
        if len(choices) > 1:
            self.open[node] = choices
        return self.chosen[node]

    def _execute(self, node: fx.Node, copy: fx.Node, recorder: Recorder) -> Any:
        """The value of a node; what cannot run at these sizes is stuck."""
        environment = {operand: operand.meta["val"] for operand in copy.all_input_nodes}
        estimated = execute([copy], environment, recorder)
        recorder.take()
        value = environment[copy]
        if estimated or not alike(node.meta.get("val"), value):
            message = f"{node.name!r} ({label(node.target)}) does not run at other sizes"
            raise Stuck(message, node)
        copy.meta["val"] = value
        return value

    def _given(self, node: fx.Node, sizes: Sizes) -> Any:
        """A placeholder: an input with its dimensions, all others as they are."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return stand_in(value)
        shape = list(value.shape)
        for size in self.sizes:
            for name, dim in size.places:
                if name == node.name:
                    shape[dim] = sizes[size.letter]
        same = tuple(value.shape) == tuple(shape)
        return stand_in(value) if same else with_shape(value, tuple(shape))

    def _looked_up(self, node: fx.Node, sizes: Sizes) -> Any:
        """What all ranks look up together: a row for each index, of as many as a table has."""
        value = node.meta["val"]
        shape = []
        for size in value.shape[:-1]:
            letters = [letter for letter, number in self.now.items() if number == size]
            if len(letters) > 1 or (not letters and size > 1):
                message = f"it is not clear which size {size} of {node.name!r} is"
                raise Stuck(message, node)
            shape.append(sizes[letters[0]] if letters else size)
        return with_shape(value, (*shape, value.shape[-1]))
