"""The integer programme inside the windows; a function for each line of its statement."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from parcompiler.passes.divide.task import DivisionTask
from parcompiler.passes.divide.windows import Windows
from parcompiler.solver import SolverModel, Term, Variable

# Variables. With several stages per rank, moving blocks on the timeline then finds shorter steps
# than the search, in less time: of 40 problems none was slower, and planning took half as long.
LARGE = 150
LARGEST = 1500  # with one stage per rank


@dataclass(frozen=True)
class Layout:
    """The programme and its variables, which exist only where they can be 1."""

    task: DivisionTask
    windows: Windows
    model: SolverModel
    free: dict[tuple[int, int], Variable]
    always: Variable
    never: Variable
    x: dict[tuple[int, int], Variable]
    r: dict[tuple[int, int], Variable]
    u: dict[tuple[tuple[str, int], int], Variable]
    moment: dict[int, Variable]

    def y(self, i: int, j: int) -> Variable:
        """Whether block i is on stage j or a later one."""
        return self.always if j <= self.windows.first[i] else self.free.get((i, j), self.never)

    def seconds(self, rank: int) -> list[Term]:
        """The units of time of all stages of a rank."""
        compute, move = list(enumerate(self.task.cost[rank])), list(enumerate(self.task.move))
        return [
            term
            for j in self.task.on[rank]
            for term in (*_sum(self.x, compute, j), *_sum(self.r, move, j))
        ]

    def memory(self, rank: int, counts: Sequence[int]) -> list[Term]:
        """The bytes on a rank with so many micro-batches in flight on its stages."""
        terms: list[Term] = []
        for k, j in zip(counts, self.task.on[rank], strict=True):
            blocks = [load.resident + k * load.saved for load in self.task.loads]
            copies = [(k + 1) * flow.saved for flow in self.task.flows]
            terms += _sum(self.x, enumerate(blocks), j)
            terms += _sum(self.r, enumerate(copies), j)
        held = [(size, here) for ((_, size), at), here in self.u.items() if at == rank]
        moment = [(1, self.moment[rank])] if rank in self.moment else []
        return [*terms, *held, *moment]

    @property
    def is_large(self) -> bool:
        """Whether a few seconds of search would do nothing: with several stages per rank only."""
        return self.task.each > 1 and len(self.model.variables) > LARGE

    def hint(self, stage_of: Sequence[int]) -> None:
        """Say where to look first: near this division."""
        for (i, j), here in self.x.items():
            self.model.hint(here, stage_of[i] == j)
        for (i, j), later in self.free.items():
            self.model.hint(later, stage_of[i] >= j)

    def read(self, values: Sequence[float]) -> tuple[int, ...]:
        """The stage of each block."""
        at = {i: j for (i, j), variable in self.x.items() if values[variable.index]}
        return tuple(at[i] for i in range(len(self.task.loads)))


def _sum(
    variables: dict[tuple[int, int], Variable], coefficients: Iterable[tuple[int, int]], j: int
) -> list[Term]:
    """The terms of stage j, of items with their coefficients, whose variable exists."""
    return [(a, variables[i, j]) for i, a in coefficients if a and (i, j) in variables]


def is_large(task: DivisionTask, windows: Windows) -> bool:
    """Whether the layout would be large by the places of its blocks alone: quickly said."""
    places = sum(b - a + 1 for a, b in zip(windows.first, windows.last, strict=True))
    return task.each > 1 and 2 * places - len(task.loads) > LARGE


def lay_out(task: DivisionTask, windows: Windows) -> Layout:
    """The variables, and what every division satisfies."""
    layout = _place(task, windows)
    _flow_forward(layout)
    _fill_stages(layout)
    _receive_values(layout)
    _receive_something(layout)
    _hold_shared(layout)
    _hold_moments(layout)
    return layout


def _place(task: DivisionTask, windows: Windows) -> Layout:
    """The variables inside the windows."""
    model = SolverModel()
    always, never = model.integer("1", 1, 1), model.integer("0", 0, 0)
    spans = [range(a, b + 1) for a, b in zip(windows.first, windows.last, strict=True)]
    free = {(i, j): model.binary(f"y[{i},{j}]") for i, span in enumerate(spans) for j in span[1:]}
    x = {(i, j): model.binary(f"x[{i},{j}]") for i, span in enumerate(spans) for j in span}
    r = {
        (f, j): model.binary(f"r[{f},{j}]")
        for f, flow in enumerate(task.flows)
        for j in sorted({j for q in flow.consumers for j in spans[q]})
        if j > windows.first[flow.producer]
    }
    users = {
        (item, task.placement[j])
        for i, span in enumerate(spans)
        for item in task.loads[i].shared
        for j in span
    }
    u = {(item, rank): model.binary(f"u[{item[0]},{rank}]") for item, rank in sorted(users)}
    layout = Layout(task, windows, model, free, always, never, x, r, u, {})
    # A block is on stage j iff it is on j or later, but not on j + 1 or later.
    for (i, j), variable in x.items():
        model.constrain([(1, variable), (-1, layout.y(i, j)), (1, layout.y(i, j + 1))], 0, 0)
    return layout


def _flow_forward(layout: Layout) -> None:
    """A block is on stage j or later when one that it consumes from is."""
    edges = {(flow.producer, q) for flow in layout.task.flows for q in flow.consumers}
    for p, q in sorted(edges):
        for j in range(1, layout.task.stages):
            layout.model.constrain([(1, layout.y(q, j)), (-1, layout.y(p, j))], low=0)


def _fill_stages(layout: Layout) -> None:
    """Each stage has a block."""
    for j in range(layout.task.stages):
        here = _sum(layout.x, ((i, 1) for i in range(len(layout.task.loads))), j)
        layout.model.constrain(here, low=1)


def _receive_values(layout: Layout) -> None:
    """A value is received where a consumer is, unless the rank has it already; nowhere else."""
    task, model = layout.task, layout.model
    for (f, j), received in layout.r.items():
        flow, stages = task.flows[f], task.on[task.placement[j]]
        earlier = [term for e in stages if e < j for term in _sum(layout.r, [(f, 1)], e)]
        produced = [term for e in stages for term in _sum(layout.x, [(flow.producer, 1)], e)]
        consumed = [_sum(layout.x, [(q, -1)], j) for q in flow.consumers]
        for term in consumed:
            model.constrain([(1, received), *earlier, *produced, *term], low=0)
        model.constrain([(1, received), *itertools.chain(*consumed)], high=0)


def _receive_something(layout: Layout) -> None:
    """The first block of a stage receives something, or consumes nothing.

    This is implied; the bound of the objective needs it. With several stages per rank, the rank
    may have it all; but not what comes from the block before, when that is on another rank.
    """
    task = layout.task
    sources = [(i, 1) for i, arriving in enumerate(task.arriving) if not arriving]
    flows: Sequence[int] = range(len(task.flows))
    if task.each > 1:
        flows = sorted(set().union(*task.links or []))
    for j in range(task.stages):
        if task.each == 1 or (task.links and j and task.placement[j] != task.placement[j - 1]):
            values = _sum(layout.r, ((f, 1) for f in flows), j)
            layout.model.constrain([*values, *_sum(layout.x, sources, j)], low=1)


def _hold_shared(layout: Layout) -> None:
    """A shared tensor is on every rank with a block that uses it."""
    for (i, j), here in layout.x.items():
        for item in layout.task.loads[i].shared:
            held = layout.u[item, layout.task.placement[j]]
            layout.model.constrain([(1, held), (-1, here)], low=0)


def _hold_moments(layout: Layout) -> None:
    """A rank has room for what each of its blocks takes while it computes."""
    task = layout.task
    for (i, j), here in layout.x.items():
        rank, size = task.placement[j], task.loads[i].moment
        if size:
            if rank not in layout.moment:
                most = max(load.moment for load in task.loads)
                layout.moment[rank] = layout.model.integer(f"a[{rank}]", 0, most)
            layout.model.constrain([(1, layout.moment[rank]), (-size, here)], low=0)


def limit_memory(layout: Layout) -> None:
    """A rank takes no more bytes than it has, whatever is in flight on its stages."""
    for rank, limit in enumerate(layout.task.room):
        for counts in layout.task.held[rank]:
            terms = layout.memory(rank, counts)
            if sum(a * variable.high for a, variable in terms) > limit:
                layout.model.constrain(terms, high=limit)


def minimize_time(layout: Layout, least: int) -> Variable:
    """The step time: all stages once, and the slowest rank for every further micro-batch.

    `least` are units that the slowest rank takes at least. Returns the variable of the slowest one.
    """
    task, model = layout.task, layout.model
    slowest = model.integer("T", least, layout.windows.slowest)
    # No rank takes longer than the slowest.
    for rank in range(task.ranks):
        model.constrain([*layout.seconds(rank), (-1, slowest)], high=0)
    # Nor do the blocks before stage j, or from j on, together (implied; propagation needs it).
    for j in range(1, task.stages):
        behind, before = ({*part} for part in (task.placement[j:], task.placement[:j]))
        later = [(c, layout.y(i, j)) for i, c in enumerate(task.least_on(behind))]
        model.constrain([*later, (-math.ceil(task.pace(behind)), slowest)], high=0)
        cost = task.least_on(before)
        later = [(c, layout.y(i, j)) for i, c in enumerate(cost)]
        model.constrain([*later, (math.ceil(task.pace(before)), slowest)], low=sum(cost))
    received = [(task.move[f], variable) for (f, _), variable in layout.r.items()]
    # What a block takes on its rank beyond the least that it takes anywhere.
    beyond = [
        (more, here)
        for (i, j), here in layout.x.items()
        if (more := task.cost[task.placement[j]][i] - task.compute[i])
    ]
    model.minimize([*received, *beyond, (task.further, slowest)], sum(task.compute))
    return slowest
