"""The integer programme of `divide`, with a function for each line of its statement there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from parcompiler.errors import InfeasibleError
from parcompiler.passes.divide.data import Load
from parcompiler.passes.divide.runs import StagesTwice
from parcompiler.passes.divide.task import DivisionTask
from parcompiler.solver import SolverModel, Term, UndecidedError, Variable, solve

LARGEST = 1500  # most variables of a programme that is searched although a division is known
SHORTER = 0.2  # share of the effort for that search


@dataclass(frozen=True)
class Layout:
    """The programme and its variables, which exist only where they can be 1."""

    task: DivisionTask
    windows: Sequence[range]
    model: SolverModel
    slowest: Variable
    free: dict[tuple[int, int], Variable]
    always: Variable
    never: Variable
    x: dict[tuple[int, int], Variable]
    w: dict[tuple[int, int], Variable]
    r: dict[tuple[int, int], Variable]
    u: dict[tuple[tuple[str, int], int], Variable]

    def y(self, i: int, j: int) -> Variable:
        """Whether block i is on stage j or a later one."""
        return self.always if j <= self.windows[i][0] else self.free.get((i, j), self.never)

    def again(self, i: int) -> Load:
        """The load of a block that runs twice."""
        load = self.task.again[i]
        assert load is not None
        return load

    def hint(self, stage_of: Sequence[int]) -> None:
        """Tell the solver to look near this division first."""
        for (i, j), variable in self.x.items():
            self.model.hint(variable, stage_of[i] == j)
        for (i, j), later in self.free.items():
            self.model.hint(later, stage_of[i] >= j)

    def read(self, values: Sequence[float]) -> StagesTwice:
        """The stage of each block, and the blocks that run twice, in a solution."""
        at = {i: j for (i, j), variable in self.x.items() if values[variable.index]}
        twice = frozenset(i for (i, _), variable in self.w.items() if values[variable.index])
        return tuple(at[i] for i in range(len(self.task.loads))), twice


def searched(
    task: DivisionTask, known: tuple[StagesTwice, int] | None, effort: float
) -> tuple[StagesTwice | None, float | None]:
    """The best division of a task with one stage per rank, and a lower bound in units; None instead
    of a bound where the division is proven optimal.

    Raises UndecidedError when no division is known, and the search finds neither one nor a proof
    that there is none.
    """
    best, units = known or (None, math.inf)
    slowest = _slowest(task, units)
    windows = _windows(task, slowest)
    if slowest < 0 or not all(windows):
        return best, None
    layout = lay_out(task, windows, slowest)
    if best is not None:
        if len(layout.model.variables) > LARGEST:
            return best, 0.0
        layout.hint(best[0])
        effort *= SHORTER
    try:
        solution = solve(layout.model, effort=effort)
    except InfeasibleError:
        return best, None
    except UndecidedError as undecided:
        if best is None:
            raise
        return best, undecided.bound
    is_proven = solution.status == "optimal" or solution.bound >= units
    if solution.objective < units:
        best = layout.read(solution.values)
    return best, None if is_proven else solution.bound


def _slowest(task: DivisionTask, units: float) -> int:
    """Upper bound on the slowest rank's units in a division whose step is shorter than `units`;
    negative where there is no such division."""
    if units == math.inf:
        again = (max(seconds[i] for seconds in task.extra) for i in range(len(task.loads)))
        return max(map(sum, task.cost)) + sum(again) + sum(task.move)
    slack = math.ceil(units) - 1 - sum(task.compute)
    if task.microbatches > 1:
        return slack // task.further
    return math.ceil(units) - 1 if slack >= 0 else -1


def _windows(task: DivisionTask, slowest: int) -> list[range]:
    """The stages on which each block can be if no rank takes longer than `slowest`: the blocks that
    it depends on, and those that depend on it, need a number of stages, and no stage is empty."""
    blocks, stages = len(task.loads), task.stages
    above: list[set[int]] = [{i} for i in range(blocks)]
    below: list[set[int]] = [{i} for i in range(blocks)]
    edges = sorted({(flow.producer, q) for flow in task.flows for q in flow.consumers})
    for p, q in sorted(edges, key=lambda edge: edge[1]):
        above[q] |= above[p]
    for p, q in reversed(edges):
        below[p] |= below[q]

    def least(group: set[int]) -> int:
        units = sum(task.compute[q] for q in group)
        return max(1, -(-units // max(1, slowest)), stages - blocks + len(group))

    return [range(least(above[i]) - 1, stages - least(below[i]) + 1) for i in range(blocks)]


def lay_out(task: DivisionTask, windows: Sequence[range], slowest: int) -> Layout:
    """The whole programme."""
    layout = _place(task, windows, slowest)
    _flow_forward(layout)
    _fill_stages(layout)
    _receive_values(layout)
    _hold_shared(layout)
    _limit_memory(layout)
    _minimize_time(layout)
    return layout


def _place(task: DivisionTask, windows: Sequence[range], slowest: int) -> Layout:
    """Add the variables inside the windows."""
    model = SolverModel()
    pace = model.integer("T", task.even, max(slowest, task.even))
    always, never = model.integer("1", 1, 1), model.integer("0", 0, 0)
    places = [(i, j) for i, window in enumerate(windows) for j in window]
    again = task.again or [None] * len(windows)
    users = {(item, j) for i, j in places for item in task.loads[i].shared}
    received = {
        (f, j) for f, flow in enumerate(task.flows) for q in flow.consumers for j in windows[q]
    }  # fmt: skip
    layout = Layout(
        task, windows, model, pace,
        free={(i, j): model.binary(f"y[{i},{j}]") for i, j in places if j > windows[i][0]},
        always=always,
        never=never,
        x={(i, j): model.binary(f"x[{i},{j}]") for i, j in places},
        w={(i, j): model.binary(f"w[{i},{j}]") for i, j in places if again[i] is not None},
        r={
            (f, j): model.binary(f"r[{f},{j}]")
            for f, j in sorted(received)
            if j > windows[task.flows[f].producer][0]
        },
        u={(item, j): model.binary(f"u[{item[0]},{j}]") for item, j in sorted(users)},
    )  # fmt: skip
    # A block is on stage j iff it is on j or later, but not on j + 1 or later.
    for (i, j), variable in layout.x.items():
        model.constrain([(1, variable), (-1, layout.y(i, j)), (1, layout.y(i, j + 1))], 0, 0)
    # A block runs twice only on its own stage.
    for place, twice in layout.w.items():
        model.constrain([(1, layout.x[place]), (-1, twice)], low=0)
    return layout


def _sum(
    variables: dict[tuple[int, int], Variable], coefficients: Iterable[tuple[int, int]], j: int
) -> list[Term]:
    """The terms of stage j for (item, coefficient) pairs, as far as their variables exist."""
    return [(a, variables[i, j]) for i, a in coefficients if a and (i, j) in variables]


def _flow_forward(layout: Layout) -> None:
    """A block is on stage j or later when one that it consumes from is."""
    edges = {(flow.producer, q) for flow in layout.task.flows for q in flow.consumers}
    for p, q in sorted(edges):
        for j in range(1, layout.task.stages):
            layout.model.constrain([(1, layout.y(q, j)), (-1, layout.y(p, j))], low=0)


def _fill_stages(layout: Layout) -> None:
    """Each stage has a block."""
    for j in range(layout.task.stages):
        blocks = _sum(layout.x, ((i, 1) for i in range(len(layout.task.loads))), j)
        layout.model.constrain(blocks, low=1)


def _receive_values(layout: Layout) -> None:
    """A value is received where a consumer is and its producer is not; nowhere else."""
    for (f, j), received in layout.r.items():
        flow = layout.task.flows[f]
        produced = _sum(layout.x, [(flow.producer, 1)], j)
        consumed = [_sum(layout.x, [(q, -1)], j) for q in flow.consumers]
        for term in consumed:
            layout.model.constrain([(1, received), *produced, *term], low=0)
        layout.model.constrain([(1, received), *itertools.chain(*consumed)], high=0)


def _hold_shared(layout: Layout) -> None:
    """A shared tensor is on every rank with a block that uses it."""
    for (i, j), variable in layout.x.items():
        for item in layout.task.loads[i].shared:
            layout.model.constrain([(1, layout.u[item, j]), (-1, variable)], low=0)


def _limit_memory(layout: Layout) -> None:
    """A rank has all the bytes that it takes with the most micro-batches in flight."""
    task = layout.task
    for j, k in enumerate(task.in_flight):
        room = task.room[task.placement[j]]
        blocks = [load.resident + k * load.saved for load in task.loads]
        more = [
            (layout.again(i).resident + k * layout.again(i).saved - blocks[i], twice)
            for (i, at), twice in layout.w.items()
            if at == j
        ]
        copies = [(k + 1) * flow.saved for flow in task.flows]
        shared = [(size, held) for ((_, size), at), held in layout.u.items() if at == j]
        terms = _sum(layout.x, enumerate(blocks), j) + _sum(layout.r, enumerate(copies), j)
        terms += [*more, *shared, (1, _hold_moment(layout, j))]
        if sum(max(a * v.low, a * v.high) for a, v in terms) > room:
            layout.model.constrain(terms, high=room)


def _hold_moment(layout: Layout, j: int) -> Variable:
    """The bytes a[j] that a rank takes while it computes one of its blocks, run once or twice."""
    task, model = layout.task, layout.model
    loads = [*task.loads, *filter(None, task.again)]
    moment = model.integer(f"a[{j}]", 0, max(load.moment for load in loads))
    for (i, at), variable in layout.x.items():
        size = task.loads[i].moment
        if at != j:
            continue
        if (i, j) in layout.w:
            twice = layout.w[i, j]
            model.constrain([(1, moment), (-size, variable), (size, twice)], low=0)
            model.constrain([(1, moment), (-layout.again(i).moment, twice)], low=0)
        elif size:
            model.constrain([(1, moment), (-size, variable)], low=0)
    return moment


def _minimize_time(layout: Layout) -> None:
    """The step time: all stages once, and the slowest rank for every further micro-batch."""
    task, model, slowest = layout.task, layout.model, layout.slowest
    extra: list[Term] = []
    # No rank takes longer than the slowest.
    for j, rank in enumerate(task.placement):
        again = [(task.extra[rank][i], twice) for (i, at), twice in layout.w.items() if at == j]
        received = _sum(layout.r, enumerate(task.move), j)
        work = [*_sum(layout.x, enumerate(task.cost[rank]), j), *received, *again]
        model.constrain([*work, (-1, slowest)], high=0)
        # Units of a block on this rank beyond those on the rank where it is fastest.
        beyond = [c - least for c, least in zip(task.cost[rank], task.compute, strict=True)]
        extra += [*received, *again, *_sum(layout.x, enumerate(beyond), j)]
    # Nor do the blocks before stage j, or from j on, together (implied; propagation needs it).
    for j in range(1, task.stages):
        behind, before = ({*part} for part in (task.placement[j:], task.placement[:j]))
        later = [(c, layout.y(i, j)) for i, c in enumerate(task.least_on(behind))]
        model.constrain([*later, (-math.ceil(task.pace(behind)), slowest)], high=0)
        cost = task.least_on(before)
        later = [(c, layout.y(i, j)) for i, c in enumerate(cost)]
        model.constrain([*later, (math.ceil(task.pace(before)), slowest)], low=sum(cost))
    model.minimize([*extra, (task.further, slowest)], sum(task.compute))
