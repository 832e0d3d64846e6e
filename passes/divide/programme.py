"""The integer programme inside the windows; a function for each line of its statement."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from parcompiler.passes.divide.data import Task
from parcompiler.passes.divide.windows import Windows
from parcompiler.solver import Model, Term, Variable


@dataclass(frozen=True)
class Layout:
    """The programme and its variables, which exist only where they can be 1."""

    task: Task
    windows: Windows
    model: Model
    free: dict[tuple[int, int], Variable]
    always: Variable
    never: Variable
    x: dict[tuple[int, int], Variable]
    r: dict[tuple[int, int], Variable]
    u: dict[tuple[tuple[str, int], int], Variable]

    def y(self, i: int, j: int) -> Variable:
        """Whether block i is on stage j or a later one."""
        return self.always if j <= self.windows.first[i] else self.free.get((i, j), self.never)

    def seconds(self, j: int) -> list[Term]:
        """The units of time of stage j."""
        compute, move = enumerate(self.task.compute), enumerate(self.task.move)
        return [*_sum(self.x, compute, j), *_sum(self.r, move, j)]

    def memory(self, j: int) -> list[Term]:
        """The bytes on stage j."""
        k = self.task.in_flight[j]
        blocks = [load.resident + k * load.saved for load in self.task.loads]
        copies = [k * flow.saved for flow in self.task.flows]
        held = [(size, variable) for ((_, size), at), variable in self.u.items() if at == j]
        return [*_sum(self.x, enumerate(blocks), j), *_sum(self.r, enumerate(copies), j), *held]

    def read(self, values: Sequence[float]) -> tuple[int, ...]:
        """The stage of each block."""
        at = {i: j for (i, j), variable in self.x.items() if values[variable.index]}
        return tuple(at[i] for i in range(len(self.task.loads)))


def _sum(
    variables: dict[tuple[int, int], Variable], coefficients: Iterable[tuple[int, int]], j: int
) -> list[Term]:
    """The terms of stage j, of items with their coefficients, whose variable exists."""
    return [(a, variables[i, j]) for i, a in coefficients if a and (i, j) in variables]


def lay_out(task: Task, windows: Windows) -> Layout:
    """The variables, and what every division satisfies."""
    layout = _place(task, windows)
    _flow_forward(layout)
    _fill_stages(layout)
    _receive_values(layout)
    _hold_shared(layout)
    return layout


def _place(task: Task, windows: Windows) -> Layout:
    """The variables inside the windows."""
    model = Model()
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
        (item, j) for i, span in enumerate(spans) for item in task.loads[i].shared for j in span
    }
    u = {(item, j): model.binary(f"u[{item[0]},{j}]") for item, j in sorted(users)}
    layout = Layout(task, windows, model, free, always, never, x, r, u)
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
    """A value is received where a consumer is and the producer is not, and nowhere else."""
    task, model = layout.task, layout.model
    for (f, j), received in layout.r.items():
        produced = _sum(layout.x, [(task.flows[f].producer, 1)], j)
        consumed = [_sum(layout.x, [(q, -1)], j) for q in task.flows[f].consumers]
        for term in consumed:
            model.constrain([(1, received), *produced, *term], low=0)
        model.constrain([(1, received), *itertools.chain(*consumed)], high=0)
    # The first block of a stage receives something, or consumes nothing (implied; the bound of
    # the objective needs it).
    sources = [(i, 1) for i, arriving in enumerate(task.arriving) if not arriving]
    for j in range(task.stages):
        values = _sum(layout.r, ((f, 1) for f in range(len(task.flows))), j)
        model.constrain([*values, *_sum(layout.x, sources, j)], low=1)


def _hold_shared(layout: Layout) -> None:
    """A shared tensor is on every stage with a block that uses it."""
    for (i, j), here in layout.x.items():
        for item in layout.task.loads[i].shared:
            layout.model.constrain([(1, layout.u[item, j]), (-1, here)], low=0)


def limit_memory(layout: Layout) -> None:
    """A stage takes no more bytes than it has."""
    for j, limit in enumerate(layout.task.room):
        terms = layout.memory(j)
        if sum(a for a, _ in terms) > limit:
            layout.model.constrain(terms, high=limit)


def minimize_time(layout: Layout) -> None:
    """The step time: all stages once, and the slowest for every further micro-batch."""
    task, model = layout.task, layout.model
    slowest = model.integer("T", 0, layout.windows.slowest)
    # No stage takes longer than the slowest.
    for j in range(task.stages):
        model.constrain([*layout.seconds(j), (-1, slowest)], high=0)
    # Nor do the blocks before stage j, or from j on, together (implied; propagation needs it).
    for j in range(1, task.stages):
        later = [(c, layout.y(i, j)) for i, c in enumerate(task.compute)]
        model.constrain([*later, (j - task.stages, slowest)], high=0)
        model.constrain([*later, (j, slowest)], low=sum(task.compute))
    received = [(task.move[f], variable) for (f, _), variable in layout.r.items()]
    model.minimize([*received, (task.microbatches - 1, slowest)], sum(task.compute))
