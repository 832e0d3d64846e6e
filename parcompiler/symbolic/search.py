"""The search for closed forms: blocks at a few sizes, polynomials through their costs, checks.

priced blocks, at the sizes of the capture
    │  Resizer           the same blocks at some other sizes
    │  trace_block       what they cost there
    │  fit, check        polynomials, exact, and right at further points
    ▼
ClosedForms              FLOPs and bytes of each template as expressions, and compiled
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from parcompiler.cost import BlockCost, trace_block
from parcompiler.cost.block import Overwritten
from parcompiler.graph import Graph
from parcompiler.naming.variables import overwritten
from parcompiler.problem import Priced, Problem
from parcompiler.symbolic import questions
from parcompiler.symbolic.fit import Least, Number, Polynomials, Space, constants, fit
from parcompiler.symbolic.forms import Template
from parcompiler.symbolic.probes import probes
from parcompiler.symbolic.quantities import caps, kind, numbers, without
from parcompiler.symbolic.questions import Again
from parcompiler.symbolic.reading import Unfit
from parcompiler.symbolic.resize import Resized, Resizer, Run
from parcompiler.symbolic.sizes import Size, Sizes, now, sizes_of


@dataclass(frozen=True)
class ClosedForms:
    """The forms of all templates, by name, in `sizes`; `refused` says which sizes are no symbols
    (their words), and why.

    `shapes` are those of the values between blocks: of the inputs and the prologue, and the outputs
    of the first block of each template. A batch of one row lies in memory in another way than
    others, so that other operators run: the forms are those of two rows and more.
    """

    sizes: tuple[Size, ...]
    templates: Mapping[str, Template]
    refused: tuple[tuple[str, str], ...]
    shapes: Mapping[fx.Node, Polynomials]
    search: _Search

    @property
    def resizer(self) -> Resizer:
        """The graph at any sizes."""
        return self.search.resizer

    @property
    def now(self) -> dict[str, int]:
        """The sizes of the capture."""
        return now(self.sizes)

    @cached_property
    def named_shapes(self) -> Mapping[str, Polynomials]:
        """`shapes` by the names of the nodes."""
        return {node.name: shape for node, shape in self.shapes.items()}


def closed_forms(problem: Problem, priced: Priced, again: Again | None = None) -> ClosedForms:
    """The closed forms of priced blocks of a problem, in as many sizes as have one.

    `again` captures the model at other sizes, once at most, and is asked where the graph alone
    leaves it open which sizes its numbers follow from.
    """
    known = sizes_of(problem.graph)
    asked = None if again is None else _once(again)
    reasons: dict[str, str] = {}
    for sizes in choices(known):
        try:
            found = _Search(problem, priced, sizes, known, asked).found()
        except Unfit as unfit:
            for size in sizes:
                reasons[size.word] = str(unfit)
        else:
            left = {size.word for size in known} - {size.word for size in sizes}
            refused = tuple((word, why) for word, why in reasons.items() if word in left)
            return dataclasses.replace(found, refused=refused)
    message = "without sizes nothing changes"
    raise AssertionError(message)


def settled(
    problem: Problem, priced: Priced, sizes: tuple[Size, ...], again: Again | None = None
) -> Resizer:
    """The graph of a problem at any of some sizes, without forms. Raises Unfit."""
    search = _Search(problem, priced, sizes, sizes_of(problem.graph), again and _once(again))
    search.settled()
    return search.resizer


def choices(known: tuple[Size, ...]) -> Iterator[tuple[Size, ...]]:
    """All sizes, the batch alone, the lengths alone, none."""
    batch = tuple(size for size in known if size.letter == "b")
    lengths = tuple(size for size in known if size.letter != "b")
    yield from dict.fromkeys((known, batch, lengths, ()))


def _once(again: Again) -> Again:
    """The same capture is made once."""
    kept: dict[tuple[tuple[str, int], ...], Graph] = {}

    def asked(sizes: Sizes) -> Graph:
        key = tuple(sizes.items())
        if key not in kept:
            kept[key] = again(sizes)
        return kept[key]

    return asked


@dataclass
class _Search:
    """The search for the forms in some of the sizes."""

    problem: Problem
    priced: Priced
    sizes: tuple[Size, ...]
    known: tuple[Size, ...]
    again: Again | None

    def settled(self) -> dict[str, BlockCost]:
        """Find how the numbers of the graph are to be read; the costs at generic sizes.

        Raises Unfit.
        """
        graph = self.problem.graph
        dims = {dim for item in graph.parameters for dim in item.shape}
        self.probes = probes(self.sizes, self.problem.mesh.tensor, dims)
        self.resizer = Resizer(graph, self.priced.cut, self.sizes, self.probes.generic)
        run = self.resizer.settle()
        settled = self.costs(run)
        ask, all_known = self.probes.question, {size.now for size in self.known}
        differs = lambda other: self.costs(other) != settled  # noqa: E731
        if self.sizes:
            questions.settle(self.resizer, all_known, self.again, ask, differs)
        return settled

    def found(self) -> ClosedForms:
        """The forms. Raises Unfit."""
        settled, graph = self.settled(), self.problem.graph
        blocks = self.resizer.first
        self.tables = {name: caps(blocks[name], settled[name], graph) for name in blocks}
        self.like = settled
        self.values = dict[tuple[int, ...], dict[Any, list[Number]]]()
        templates, shapes = self._fitted(), self._shapes
        return ClosedForms(self.sizes, templates, (), shapes, self)

    def _fitted(self) -> dict[str, Template]:
        """The templates. Raises Unfit."""
        fault: Unfit | None = None
        for space in self.probes.spaces() if self.sizes else [Space({}, 0)]:
            try:
                return self._fitted_in(space)
            except Unfit as unfit:
                fault = fault or unfit
        assert fault is not None
        raise fault

    def _fitted_in(self, space: Space) -> dict[str, Template]:
        """The polynomials of a space, checked. Raises Unfit."""
        near = self._polynomials(space)
        found = {key: Least(polynomials, polynomials) for key, polynomials in near.items()}
        far = Space(self.probes.far, space.lengths)
        if "b" in far.values and self._wrong(found, far.points[0]):
            others = self._polynomials(far)
            found = {key: Least(least.near, others[key]) for key, least in found.items()}
        here = now(self.sizes)
        for check in (*self.probes.checks, *([here] if 1 not in here.values() else [])):
            if self._wrong(found, check):
                message = "the costs are no polynomial of low degree"
                raise Unfit(message)
        pairs = found.items()
        self._shapes = {key: least.near for key, least in pairs if isinstance(key, fx.Node)}
        return {name: self._template(name, found[name]) for name in self.resizer.first}

    def _polynomials(self, space: Space) -> dict[Any, Polynomials]:
        """Those of all numbers at the points of a space."""
        points = [self._values(point) for point in space.points]
        return {key: fit(space, [point[key] for point in points]) for key in points[0]}

    def _wrong(self, found: Mapping[Any, Least], sizes: Sizes) -> bool:
        """Whether something costs something else at these sizes."""
        values = self._values(sizes)
        return any(
            [*map(float, found[key].at(sizes))] != [*map(float, values[key])] for key in values
        )

    def _values(self, sizes: Sizes) -> dict[Any, list[Number]]:
        """The numbers of each template and the shape of each value at these sizes."""
        key = tuple(sizes[size.letter] for size in self.sizes)
        if key not in self.values:
            run = self.resizer.at(sizes)
            costs = self.costs(run) if sizes != now(self.sizes) else self._priced
            self._compare(costs)
            self.values[key] = {
                name: without(numbers(cost), self.tables[name]) for name, cost in costs.items()
            }
            for node, value in run.values.items():
                if isinstance(value, torch.Tensor) and node in self._between:
                    self.values[key][node] = list(value.shape)
        return self.values[key]

    @cached_property
    def _between(self) -> set[fx.Node]:
        """The values that blocks give and read, and the inputs."""
        cut, spread = self.priced.cut, self.problem.graph.vocabulary
        outputs = {node for block in self.resizer.first.values() for node in block.outputs}
        apart = {spread.head.x} if spread and spread.head else set()
        inputs = {
            node
            for node in self.problem.graph.fx_graph.nodes
            if node.name in self.problem.graph.input_nodes
        }
        return {*outputs, *cut.prologue, *apart, *self.resizer.lookups, *inputs}

    @cached_property
    def _priced(self) -> dict[str, BlockCost]:
        """What is known at the sizes of the capture."""
        pairs = zip(self.priced.cut.blocks, self.priced.costs, strict=True)
        return {block.template: cost for block, cost in pairs}

    def costs(self, run: Run) -> dict[str, BlockCost]:
        """What the blocks of a run cost."""
        graph = self.problem.graph
        trainable = {item.node for item in graph.parameters if item.trainable}
        others = {item.node for item in graph.parameters} - trainable
        return {
            name: trace_block(
                own.nodes,
                own.inputs,
                own.outputs,
                trainable,
                others,
                graph.differentiable,
                overwritten=self._gone(name, own),
            )
            for name, own in run.blocks.items()
        }

    def _gone(self, name: str, own: Resized) -> Overwritten:
        """Which values a block at other sizes lets go: those that its template does."""
        blocks = [block for block in self.priced.cut.blocks if block.template == name]
        nodes, outputs = blocks[0].nodes, blocks[0].outputs
        copies = dict(zip(nodes, own.nodes, strict=True))

        def find() -> Overwritten:
            return overwritten(nodes, self.problem.arguments(blocks), outputs)

        found = self.problem.graph.once(("gone", nodes, outputs), find)
        return {copies[node]: [copies[item] for item in items] for node, items in found.items()}

    def _compare(self, costs: dict[str, BlockCost]) -> None:
        """Refuse templates that run other operators at other sizes."""
        for name, cost in costs.items():
            if kind(cost) != kind(self.like[name]):
                message = f"blocks of {name} run other operators at other sizes"
                raise Unfit(message)

    def _template(self, name: str, found: Least) -> Template:
        blocks = [block for block in self.priced.cut.blocks if block.template == name]
        graph, letters = self.problem.graph, [size.letter for size in self.sizes]
        items = [graph.by_name[binding.name] for binding in blocks[0].tensors]
        own = [item for item in items if item.trainable]
        states = [self.problem.state_bytes(item) - 2 * item.nbytes for item in own]
        return Template(
            name=name,
            blocks=tuple(block.name for block in blocks),
            letters=tuple(letters),
            like=self.like[name],
            found=found,
            tables=self.tables[name],
            limits=constants((cap.nbytes for cap in self.tables[name]), letters),
            state=constants([*(item.nbytes for item in own), *states], letters),
            tensors=tuple(k for k, item in enumerate(items) if item.trainable),
        )
