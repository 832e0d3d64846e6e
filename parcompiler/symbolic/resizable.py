"""A captured graph at other sizes, without capturing it again.

captured graph        b = 2, s = 8, written into its nodes
    │  settle            the prologue and the first block of each template run at sizes that are
    │                    like no others: how each number is to be read
    ├──► templates_at({"b": 4, "s": 24})    these blocks with other numbers, to be costed
    └──► at({"b": 4, "s": 24})              the whole graph, which every pass may read

Numbers are read by the flow of the data: a view keeps the order of elements, what is expanded or
cut is so to a size that is there. Of several readings the first that runs is taken.
Where several run, or a tensor is made from a number that the model may have computed from sizes in
its Python (how many slots an expert has), a second capture answers; without one it is refused.

The graph is what a capture at these sizes is expected to be: a model may ask in its Python how many
rows there are, and only a capture runs that.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from parcompiler.capture.clean import keep_names
from parcompiler.cost.execution import Recorder, execute
from parcompiler.cost.operation import label
from parcompiler.cost.stand_in import stand_in, tensors
from parcompiler.graph import Block, Graph, shape_of
from parcompiler.problem import Problem
from parcompiler.spmd.call import bound
from parcompiler.symbolic.probes import Probe, probes
from parcompiler.symbolic.readings import (
    Choice,
    Shape,
    alternatives,
    each,
    unexplained,
    with_numbers,
)
from parcompiler.symbolic.sizes import (
    CaptureAt,
    InputSize,
    Sizes,
    Unfit,
    sample_at,
    sizes_of,
    subsets,
)
from parcompiler.symbolic.values import shapes_of, with_exchange, with_shape

TRIES = 60  # runs until all numbers are read


class Stuck(Unfit):
    """The node at which a run stopped."""

    def __init__(self, message: str, node: fx.Node) -> None:
        super().__init__(message)
        self.node = node


@dataclass(frozen=True, slots=True)
class ResizedBlock:
    """A block at other sizes: its nodes, what it reads and what it yields."""

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class ResizedTemplates:
    """The first block of each template at some sizes, and the value of each node of these blocks,
    of the prologue and of the inputs."""

    sizes: Sizes
    values: dict[fx.Node, Any] = field(default_factory=dict)
    blocks: dict[str, ResizedBlock] = field(default_factory=dict)


Choose = Callable[[fx.Node, Shape | None, Shape | None], Choice]  # shapes of its first operand


class ResizableGraph:
    """Makes the graph of a problem at other numbers of some sizes, by their letters.

    `again` captures its model at other sizes; `level` is the granularity of its blocks.
    """

    def __init__(
        self,
        problem: Problem,
        sizes: tuple[InputSize, ...],
        again: CaptureAt | None = None,
        level: int = 1,
    ) -> None:
        self.problem, self.sizes, self.again = problem, sizes, again
        self.cut = problem.priced(level).cut
        # The first block of each template; its nodes stand for those of all others.
        self.first, self.like = dict[str, Block](), dict[fx.Node, fx.Node]()
        for block in self.cut.blocks:
            first = self.first.setdefault(block.template, block)
            self.like.update(zip(block.nodes, first.nodes, strict=True))
        self._made: dict[tuple[int, ...], Graph] = {}

    @property
    def now(self) -> dict[str, int]:
        """The numbers of the capture."""
        return {size.letter: size.now for size in self.sizes}

    @cached_property
    def probes(self) -> dict[str, Probe]:
        """Sizes to try."""
        dims = {dim for item in self.problem.graph.parameters for dim in item.shape}
        return probes(self.sizes, self.problem.mesh.tensor, dims)

    @property
    def generic(self) -> dict[str, int]:
        """Sizes that are like no others of the model."""
        return {letter: probe.generic for letter, probe in self.probes.items()}

    def settle(self) -> None:
        """Find how the numbers of the graph are to be read. Raises Unfit."""
        assert self._chosen is not None

    def at(self, sizes: Sizes) -> Graph:
        """The graph at these sizes. Raises Unfit where it cannot be read, or does not run."""
        if sizes == self.now:
            return self.problem.graph
        key = tuple(sizes.values())
        if key not in self._made:
            self._made[key] = self._copy(self.templates_at(sizes))
        return self._made[key]

    def templates_at(self, sizes: Sizes) -> ResizedTemplates:
        """The first block of each template at these sizes. Raises Unfit."""
        chosen = self._chosen
        return self._run(sizes, lambda node, before, after: chosen[node])

    # How numbers are read

    @cached_property
    def _chosen(self) -> dict[fx.Node, Choice]:
        """How the numbers of each node are read.

        Where a run gets stuck, each node that leads there may be read in its next way; of all ways
        to go on, the one from where a run came furthest is tried first.
        """
        generic = self.generic
        first: Stuck | None = None
        waiting: list[tuple[int, int, dict[fx.Node, int]]] = [(0, 0, {})]
        for number in range(TRIES):
            if not waiting:
                break
            picked = heapq.heappop(waiting)[-1]
            chosen: dict[fx.Node, Choice] = {}
            several: dict[fx.Node, list[Choice]] = {}

            def choose(node: fx.Node, before: Shape | None, after: Shape | None) -> Choice:
                choices = alternatives(node, before, after, self.now, generic)
                chosen[node] = choices[min(picked.get(node, 0), len(choices) - 1)]  # noqa: B023
                if len(choices) > 1:
                    several[node] = choices  # noqa: B023
                return chosen[node]  # noqa: B023

            try:
                run = self._run(generic, choose)
            except Stuck as stuck:
                first = first or stuck
                leading = self._leading_to(stuck.node)
                for turn, node in enumerate(reversed(several)):
                    index = picked.get(node, 0) + 1
                    if node in leading and index < len(several[node]):
                        order = -len(chosen), number * 1000 + turn
                        heapq.heappush(waiting, (*order, {**picked, node: index}))
            else:
                return self._answered(chosen, several, run) if self.sizes else chosen
        assert first is not None
        raise first

    def _leading_to(self, node: fx.Node) -> set[fx.Node]:
        """The nodes whose values a node depends on, and itself."""
        leading: set[fx.Node] = set()
        waiting = [node]
        while waiting:
            first = waiting.pop()
            first = self.like.get(first, first)
            if first not in leading:
                leading.add(first)
                waiting += first.all_input_nodes
        return leading

    def _answered(
        self,
        chosen: dict[fx.Node, Choice],
        several: Mapping[fx.Node, list[Choice]],
        run: ResizedTemplates,
    ) -> dict[fx.Node, Choice]:
        """The choices once all doubts are answered. Raises Unfit where nothing answers one."""
        known = {size.now for size in sizes_of(self.problem.graph)}
        strange = {node: number for node, choice in chosen.items()
                   for number in unexplained(node, choice, known)}  # fmt: skip
        doubts: dict[fx.Node, list[Choice]] = {node: [] for node in strange}
        for node, choices in several.items():
            for choice in choices:
                if choice != chosen[node] and self._differs(run, {**chosen, node: choice}):
                    doubts.setdefault(node, []).append(choice)
        if doubts and self.again is not None:
            return chosen | self._asked({node: [chosen[node], *doubts[node]] for node in doubts})
        parameters = self.problem.graph.parameters
        readings = (reading for choice in chosen.values() for reading in each(choice))
        constants = {1, *(dim for item in parameters for dim in item.shape)}
        constants |= {int(item.factor) for item in readings if not item.dims and not item.letters}
        equal = sorted(size.now for size in self.sizes if size.now in constants)
        for node in doubts:
            if node in strange:
                message = (
                    f"{node.name!r} makes a tensor from the number {strange[node]}, which may "
                    "follow from other sizes"
                )
                raise Unfit(message)
            if equal:
                message = (
                    f"{node.name!r} may mean the size {equal[0]}, or a number of the model's own"
                )
                raise Unfit(message)
        return chosen

    def _differs(self, run: ResizedTemplates, chosen: Mapping[fx.Node, Choice]) -> bool:
        """Whether other choices run too, and yield more or fewer elements somewhere."""
        try:
            other = self._run(run.sizes, lambda node, before, after: chosen[node])
        except Stuck:
            return False
        return any(
            [value.numel() for value in tensors(one)] != [value.numel() for value in tensors(two)]
            for one, two in zip(run.values.values(), other.values.values(), strict=True)
        )

    def _asked(self, doubts: Mapping[fx.Node, list[Choice]]) -> dict[fx.Node, Choice]:
        """The choices that agree with a second capture, where no two sizes have changed alike."""
        assert self.again is not None
        at = {
            letter: probe.generic if letter == "b" else min(probe.grid[:3])
            for letter, probe in self.probes.items()
        }
        twins = {node.name: node for node in self.again(at).fx_graph.nodes}
        answers = {}
        for node, choices in doubts.items():
            twin = twins.get(node.name)
            if twin is None or twin.target is not node.target:
                message = f"{node.name!r} is another operator at other sizes"
                raise Unfit(message)
            right = [choice for choice in choices if _agrees(choice, twin, at)]
            if not right:
                message = f"{node.name!r} makes a tensor from a number that is no multiple of sizes"
                raise Unfit(message)
            answers[node] = right[0]
        return answers

    # Running and copying nodes

    def _run(self, sizes: Sizes, choose: Choose) -> ResizedTemplates:
        """Run the prologue and the first blocks at these sizes. Raises Stuck."""
        run, graph, recorder = ResizedTemplates(sizes), self.problem.graph, Recorder()
        with recorder, torch.no_grad():
            for node in graph.fx_graph.nodes:
                if node.op == "placeholder":
                    run.values[node] = self._input(node, sizes)
            for lookup in graph.vocabulary.lookups if graph.vocabulary else ():
                run.values[lookup.node] = self._looked_up(lookup.node, sizes)
            self._run_part(self.cut.prologue, run, choose, recorder)
            for name, block in self.first.items():
                copies = self._run_part(block.nodes, run, choose, recorder)
                parts = (block.nodes, block.inputs, block.outputs)
                run.blocks[name] = ResizedBlock(
                    *(tuple(copies[node] for node in nodes) for nodes in parts)
                )
        return run

    def _run_part(
        self, nodes: Iterable[fx.Node], run: ResizedTemplates, choose: Choose, recorder: Recorder
    ) -> dict[fx.Node, fx.Node]:
        """Run nodes in a graph of their own, in which what they read is a placeholder."""
        graph, copies, inside = fx.Graph(), dict[fx.Node, fx.Node](), frozenset(nodes)
        for node in nodes:
            for operand in node.all_input_nodes:
                if operand not in copies and operand not in inside:
                    copies[operand] = copy = graph.placeholder(operand.name)
                    value = run.values[self.like.get(operand, operand)]
                    copy.name, copy.meta = operand.name, {**operand.meta, "val": value}
            before, after = _first_shapes(node, copies)
            copy = _with_sizes(node, choose(node, before, after), run.sizes, graph, copies)
            copy.name, copies[node] = node.name, copy
            environment = {operand: operand.meta["val"] for operand in copy.all_input_nodes}
            estimated = execute([copy], environment, recorder)
            recorder.take()
            value = environment[copy]
            if estimated or not _alike(node.meta.get("val"), value):
                message = f"{node.name!r} ({label(node.target)}) does not run at other sizes"
                raise Stuck(message, node)
            copy.meta["val"] = run.values[node] = value
        return copies

    def _copy(self, run: ResizedTemplates) -> Graph:
        """All nodes with the numbers and the values of a run."""
        graph, made, copies = self.problem.graph, fx.Graph(), dict[fx.Node, fx.Node]()
        for node in graph.fx_graph.nodes:
            first = self.like.get(node, node)
            if node.op != "call_function":
                copies[node] = made.node_copy(node, copies.__getitem__)
                if node in run.values:
                    copies[node].meta = {**node.meta, "val": run.values[node]}
            elif first in run.values:
                copies[node] = _with_sizes(node, self._chosen[first], run.sizes, made, copies)
                copies[node].meta["val"] = run.values[first]
            else:
                message = f"{node.name!r} belongs to no block"
                raise Unfit(message)
        keep_names(copies)
        named = {node.name: copy for node, copy in copies.items()}
        inputs = tuple(
            dataclasses.replace(item, shape=shape_of(named[item.node])) for item in graph.inputs
        )
        sample = sample_at(graph, self.sizes, run.sizes)
        return dataclasses.replace(
            graph, fx_graph=made, loss=copies[graph.loss], inputs=inputs, sample=sample
        )

    def _input(self, node: fx.Node, sizes: Sizes) -> Any:
        """The value of a placeholder: an input with its dimensions, all others as they are."""
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
        """The embeddings that all ranks look up together: a row of a table for each index."""
        value, shape = node.meta["val"], []
        for size in value.shape[:-1]:
            letters = [letter for letter, number in self.now.items() if number == size]
            if len(letters) > 1 or (not letters and size > 1):
                message = f"it is not clear which size {size} of {node.name!r} is"
                raise Stuck(message, node)
            shape.append(sizes[letters[0]] if letters else size)
        return with_shape(value, (*shape, value.shape[-1]))


def _first_shapes(
    node: fx.Node, copies: Mapping[fx.Node, fx.Node]
) -> tuple[Shape | None, Shape | None]:
    """The shape of a node's first operand at capture and of the copy of that."""
    operands: Sequence[fx.Node] = node.all_input_nodes
    return shapes_of((operands[0], copies[operands[0]])) if operands else (None, None)


def _with_sizes(
    node: fx.Node,
    choice: Choice,
    sizes: Sizes,
    graph: fx.Graph,
    copies: Mapping[fx.Node, fx.Node],
) -> fx.Node:
    """A copy of a node with its numbers read at these sizes."""
    shape = _first_shapes(node, copies)[1] or ()
    try:
        numbers = {
            name: [one.at(shape, sizes) for one in item]
            if isinstance(item, tuple)
            else item.at(shape, sizes)
            for name, item in choice.items()
        }
        meta = with_exchange(node, [(operand, copies[operand]) for operand in node.all_input_nodes])
    except Unfit as unfit:
        message = f"{node.name!r}: {unfit}"
        raise Stuck(message, node) from unfit
    args, kwargs = fx.map_arg(with_numbers(node, numbers), copies.__getitem__)
    copy = graph.create_node(node.op, node.target, args, kwargs)
    copy.meta = meta
    return copy


def _alike(before: Any, after: Any) -> bool:
    """Whether two values are as many tensors of the same dtypes and numbers of dimensions."""
    first, second = ([(t.dtype, t.dim()) for t in tensors(value)] for value in (before, after))
    return first == second


def _agrees(choice: Choice, twin: fx.Node, at: Sizes) -> bool:
    """Whether the numbers of a node at these sizes are those that a choice says."""
    arguments = bound(twin.target, twin.args, twin.kwargs)  # type: ignore[arg-type]  # an operator
    shape = _first_shapes(twin, {node: node for node in twin.all_input_nodes})[0] or ()
    for name, item in choice.items():
        if isinstance(item, tuple):
            expected, numbers = [one.at(shape, at) for one in item], twin.meta["val"].shape
            if len(numbers) != len(expected):
                numbers = arguments[name]
        else:
            expected, numbers = [item.at(shape, at)], [arguments.get(name)]
        if expected != [*numbers]:
            return False
    return True


def resizable(problem: Problem, again: CaptureAt | None) -> tuple[ResizableGraph, dict[str, str]]:
    """The graph in as many sizes as can be read, and why the others, by their words, cannot."""
    reasons = dict[str, str]()
    for sizes in subsets(sizes_of(problem.graph)):
        graph = ResizableGraph(problem, sizes, again)
        try:
            graph.settle()
        except Unfit as unfit:
            reasons |= {size.word: str(unfit) for size in sizes}
        else:
            words = {size.word for size in sizes}
            return graph, {word: why for word, why in reasons.items() if word not in words}
    message = "without sizes nothing changes"
    raise AssertionError(message)
