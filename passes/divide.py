"""Divide the blocks of a graph into pipeline stages: exactly, as an integer programme.

Given       c[i]        seconds of block i, forward and backward of one micro-batch; blocks are
                        listed in topological order
            m[i], s[i]  its resident bytes; its bytes saved for the backward, per micro-batch
            f           values that cross blocks: producer p, consumers q, seconds d[f] to receive
                        one and to return its gradient, bytes s[f] of the received copy
            g           tensors that several blocks use, of b[g] bytes
            M, k[j], L[j]   micro-batches; those in flight on stage j; its memory limit in bytes
Decide      y[i,j]      1 iff block i is on stage j or a later one
            x[i,j]      1 iff block i is on stage j: y[i,j] - y[i,j+1]             `_place`
            r[f,j]      1 iff value f is received on stage j
            u[g,j]      1 iff tensor g is held on stage j
            T           seconds of the slowest stage
Minimize    sum over j of t[j] + (M - 1) T                                         `_minimize_time`
            with t[j] = sum(c[i] x[i,j]) + sum(d[f] r[f,j])
Subject to  data flows forward         y[p,j] <= y[q,j]                            `_flow_forward`
            no stage is empty          sum(x[i,j]) >= 1                            `_fill_stages`
            values are received        x[q,j] - x[p,j] <= r[f,j] <= sum(x[q,j])    `_receive_values`
            shared tensors are held    u[g,j] >= x[i,j] for each user i            `_hold_shared`
            no stage is slower than T  t[j] <= T                                   `_minimize_time`
            memory suffices            sum(m[i] x[i,j]) + sum(b[g] u[g,j])         `_limit_memory`
                                       + k[j] (sum(s[i] x[i,j]) + sum(s[f] r[f,j])) <= L[j]

Little of the proof needs search. A dynamic programme finds a good division into runs of consecutive
blocks. Every better division has each block on one of a few stages, its window; often the windows
contradict each other, and the runs are optimal. Else the programme is solved inside the windows.

Bytes are exact; the rounding of seconds to whole numbers is below 1e-9 of the slowest stage.

Ties: the runs found win when nothing is strictly better. Of runs with that slowest stage, they have
the least total, then the least sum of squared seconds (the most even), then the earliest cuts.
Where runs are not optimal, the solver's fixed seed decides.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from parcompiler.errors import InfeasibleError, InputError
from parcompiler.solver import EFFORT, Model, Term, UndecidedError, Variable, relative_gap, solve

RESOLUTION = 2**56  # sums of whole seconds stay below it, and well inside 64 bits


@dataclass(frozen=True, slots=True)
class Load:
    """What one block asks of its stage.

    `seconds` of forward and backward of one micro-batch; `resident` bytes whatever the schedule
    (parameters, gradients, optimizer states); `saved` bytes kept for the backward, per micro-batch
    in flight; `shared` tensors (name, bytes) are counted once per stage however many of its blocks
    use them.
    """

    seconds: float
    resident: int
    saved: int
    shared: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Flow:
    """A value that crosses blocks.

    Each stage with a consumer, other than the producer's, receives it once: `seconds` to move it
    and its gradient back, `saved` bytes for the received copy, per micro-batch in flight.
    """

    producer: int
    consumers: tuple[int, ...]
    seconds: float
    saved: int = 0


@dataclass(frozen=True, slots=True)
class Division:
    """The stage of each block. No division has an objective (seconds) below `bound`.

    `status` is "optimal", or "feasible" when the work limit came before the proof; `gap` is
    (objective - bound) / objective.
    """

    stage_of: tuple[int, ...]
    status: str
    objective: float
    bound: float
    gap: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a division costs: seconds of a micro-batch, and bytes, on each stage.

    `objective` is the seconds of a step: sum of the stages + (microbatches - 1) * the slowest.
    """

    seconds: tuple[float, ...]
    memory: tuple[int, ...]
    objective: float


class Part(NamedTuple):
    """A share of a stage's memory, in bytes and in words."""

    size: int
    what: str


def divide(
    loads: Sequence[Load],
    flows: Sequence[Flow],
    stages: int,
    microbatches: int,
    in_flight: Sequence[int],
    limits: Sequence[float],
    *,
    names: Sequence[str] = (),
    effort: float = EFFORT,
) -> Division:
    """The division of blocks into stages whose step takes the fewest seconds.

    Args:
        loads: one per block, in topological order.
        flows: the values between blocks; producers come before consumers.
        stages: how many there are; none stays empty.
        microbatches: those of a step.
        in_flight: per stage, the micro-batches whose saved values it holds at once.
        limits: bytes of memory of each stage; may be infinite.
        names: of the blocks, for messages.
        effort: limit of the search, in the solver's deterministic units.

    Raises:
        InfeasibleError: more stages than blocks, or too little memory. Says the least limit that
            would do, and what takes most of it.
        UndecidedError: the search ended with no division and no proof that there is none.
        InputError: the data are no such problem.
    """
    task = _Task(loads, flows, stages, microbatches, in_flight, limits)
    _check(task)
    try:
        stage_of, bound = _fastest(task, effort)
    except InfeasibleError:
        raise _too_little_memory(task, names, effort) from None
    objective = evaluate(loads, flows, stage_of, microbatches, in_flight).objective
    if bound is None:
        return Division(stage_of, "optimal", objective, objective, 0.0)
    least = min(objective, bound * task.unit)
    return Division(stage_of, "feasible", objective, least, relative_gap(objective, least))


def evaluate(
    loads: Sequence[Load],
    flows: Sequence[Flow],
    stage_of: Sequence[int],
    microbatches: int,
    in_flight: Sequence[int],
) -> Evaluation:
    """What a division costs, straight from the definitions; one stage per item of `in_flight`.

    >>> loads = [Load(1.0, 10, 1), Load(2.0, 20, 2)]
    >>> evaluate(loads, [Flow(0, (1,), 0.5, saved=3)], (0, 1), microbatches=4, in_flight=(2, 1))
    Evaluation(seconds=(1.0, 2.5), memory=(12, 25), objective=11.0)
    """
    seconds, memory = [], []
    for j, k in enumerate(in_flight):
        here = [load for load, at in zip(loads, stage_of, strict=True) if at == j]
        received = [flow for flow in flows if _is_received(flow, stage_of, j)]
        shared = {item for load in here for item in load.shared}
        seconds.append(
            math.fsum([load.seconds for load in here] + [flow.seconds for flow in received])
        )
        memory.append(
            sum(load.resident + k * load.saved for load in here)
            + sum(size for _, size in shared)
            + sum(k * flow.saved for flow in received)
        )
    objective = math.fsum(seconds) + (microbatches - 1) * max(seconds)
    return Evaluation(tuple(seconds), tuple(memory), objective)


def memory_parts(
    loads: Sequence[Load],
    flows: Sequence[Flow],
    stage_of: Sequence[int],
    in_flight: Sequence[int],
    stage: int,
    names: Sequence[str] = (),
) -> tuple[Part, ...]:
    """What the memory of one stage consists of; the sizes add up to that of `evaluate`."""
    names = names or [f"block {i}" for i in range(len(loads))]
    k = in_flight[stage]
    here = [i for i, at in enumerate(stage_of) if at == stage]
    received = [flow for flow in flows if _is_received(flow, stage_of, stage)]
    states = [Part(loads[i].resident, names[i]) for i in here]
    shared = [Part(size, name) for name, size in sorted({s for i in here for s in loads[i].shared})]
    saved = [Part(k * loads[i].saved, names[i]) for i in here]
    copies = [Part(k * flow.saved, names[flow.producer]) for flow in received]
    return (
        _total("parameters and optimizer states, most of them of", states),
        _total("shared parameters and their optimizer states, most of them of", shared),
        _total(f"activations of {k} micro-batches in flight, most of them saved by", saved),
        _total(f"values received for {k} micro-batches in flight, most of them from", copies),
    )


def _total(what: str, parts: Sequence[Part]) -> Part:
    largest = max(parts, key=lambda part: part.size, default=Part(0, "nothing"))
    return Part(sum(part.size for part in parts), f"{what} {largest.what}")


def _is_received(flow: Flow, stage_of: Sequence[int], stage: int) -> bool:
    return stage_of[flow.producer] != stage and stage in [stage_of[q] for q in flow.consumers]


@dataclass(frozen=True)
class _Task:
    """A division problem, also in whole numbers: seconds in multiples of `unit`, and bytes."""

    loads: Sequence[Load]
    flows: Sequence[Flow]
    stages: int
    microbatches: int
    in_flight: Sequence[int]
    limits: Sequence[float]

    @cached_property
    def unit(self) -> float:
        """Seconds; all sums of the programme stay below RESOLUTION of them."""
        total = math.fsum(load.seconds for load in self.loads)
        total += math.fsum(flow.seconds * len(flow.consumers) for flow in self.flows)
        return total * (self.stages + self.microbatches) / RESOLUTION or 1.0

    @cached_property
    def compute(self) -> list[int]:
        """Units of each block."""
        return [round(load.seconds / self.unit) for load in self.loads]

    @cached_property
    def move(self) -> list[int]:
        """Units of each flow."""
        return [round(flow.seconds / self.unit) for flow in self.flows]

    @cached_property
    def most(self) -> int:
        """Bytes that no stage can exceed."""
        fixed = sum(load.resident + sum(size for _, size in load.shared) for load in self.loads)
        saved = sum(load.saved for load in self.loads) + sum(flow.saved for flow in self.flows)
        return max(1, fixed + max(self.in_flight) * saved)

    @cached_property
    def room(self) -> list[int]:
        """Bytes of each stage; more than `most` make no difference."""
        return [math.floor(min(limit, self.most)) for limit in self.limits]

    @cached_property
    def arriving(self) -> list[set[int]]:
        """The flows that each block consumes."""
        arriving: list[set[int]] = [set() for _ in self.loads]
        for f, flow in enumerate(self.flows):
            for q in flow.consumers:
                arriving[q].add(f)
        return arriving


def _check(task: _Task) -> None:
    """Refuse data that are no division problem, and more stages than blocks."""
    stages, blocks = task.stages, len(task.loads)
    counts = (len(task.in_flight), len(task.limits))
    seconds = [load.seconds for load in task.loads] + [flow.seconds for flow in task.flows]
    backward = [f for f in task.flows if any(not 0 <= f.producer < q < blocks for q in f.consumers)]
    if stages < 1 or task.microbatches < 1:
        message = f"stages and microbatches must be positive ({stages}, {task.microbatches} given)"
        raise InputError(message)
    if counts != (stages, stages):
        message = f"in_flight and limits need one item per stage ({counts} for {stages} stages)"
        raise InputError(message)
    if not all(limit >= 1 for limit in task.limits):
        message = f"a memory limit must be at least 1 byte ({min(task.limits):g} given)"
        raise InputError(message)
    if not all(0 <= value < math.inf for value in seconds):
        message = (
            f"seconds must be finite and not negative ({min(seconds)} to {max(seconds)} given)"
        )
        raise InputError(message)
    if backward:
        path = f"block {backward[0].producer} to {backward[0].consumers} of {blocks}"
        message = f"a flow does not go forward ({path}): list the blocks in topological order"
        raise InputError(message)
    if stages > blocks:
        message = f"more stages than blocks ({stages} > {blocks}): use fewer stages or finer blocks"
        raise InfeasibleError(message)


def _fastest(task: _Task, effort: float) -> tuple[tuple[int, ...], float | None]:
    """The best division; and a lower bound of the objective in units, None when it is optimal."""
    runs, best = _fastest_runs(task)
    windows = _windows(task, best)
    if windows is None:
        return _nothing_better(runs), None
    layout = _layout(task, windows)
    _limit_memory(layout)
    _minimize_time(layout)
    try:
        solution = solve(layout.model, effort=effort)
    except InfeasibleError:
        return _nothing_better(runs), None
    except UndecidedError as undecided:
        if runs is None:
            raise
        return runs, min(best, undecided.bound)
    is_proven = solution.status == "optimal" or solution.bound >= best
    stage_of = runs if runs and best <= solution.objective else layout.read(solution.values)
    return stage_of, None if is_proven else solution.bound


def _nothing_better(runs: tuple[int, ...] | None) -> tuple[int, ...]:
    """There is nothing better than `runs`; and without those, nothing at all."""
    if runs is None:
        message = "no division satisfies the limits"
        raise InfeasibleError(message)
    return runs


class _Run(NamedTuple):
    """Consecutive blocks as one stage: units of time, and bytes fixed + in_flight * scaled."""

    seconds: int
    fixed: int
    scaled: int


class _Label(NamedTuple):
    """The weights of the stages so far: their sum, the largest, and the sum of squares."""

    total: float
    largest: float
    squares: float


def _fastest_runs(task: _Task) -> tuple[tuple[int, ...] | None, float]:
    """A good division into runs, as even as its slowest stage allows; its objective in units."""

    def objective(label: _Label) -> float:
        return label.total + (task.microbatches - 1) * label.largest

    runs = _runs(task)
    average = sum(task.compute) // task.stages
    for cap in (2 * average + max(task.compute) + max(task.move, default=0), math.inf):
        found = _best_runs(task, runs, _seconds(task, cap), lambda label: (objective(label),))
        if found is not None:
            weigh = _seconds(task, found[1].largest)
            even = _best_runs(task, runs, weigh, lambda label: (label.total, label.squares))
            assert even is not None
            return even[0], objective(even[1])
    return None, math.inf


def _seconds(task: _Task, cap: float) -> Callable[[int, _Run], float | None]:
    """Units of time of a run on a stage, where they and its bytes are within the limits."""

    def weigh(j: int, run: _Run) -> float | None:
        fits = run.fixed + task.in_flight[j] * run.scaled <= task.room[j]
        return run.seconds if fits and run.seconds <= cap else None

    return weigh


def _runs(task: _Task) -> list[list[_Run]]:
    """`runs[a][n]` are the blocks a … a + n. Each number grows with n."""
    return [list(_runs_from(task, a)) for a in range(len(task.loads))]


def _runs_from(task: _Task, a: int) -> Iterator[_Run]:
    seconds = fixed = scaled = 0
    received: set[int] = set()
    held: set[tuple[str, int]] = set()
    for i in range(a, len(task.loads)):
        load = task.loads[i]
        new = {f for f in task.arriving[i] if task.flows[f].producer < a} - received
        seconds += task.compute[i] + sum(task.move[f] for f in new)
        fixed += load.resident + sum(size for _, size in set(load.shared) - held)
        scaled += load.saved + sum(task.flows[f].saved for f in new)
        received |= new
        held.update(load.shared)
        yield _Run(seconds, fixed, scaled)


def _best_runs(
    task: _Task,
    runs: Sequence[Sequence[_Run]],
    weigh: Callable[[int, _Run], float | None],
    rank: Callable[[_Label], tuple[float, ...]],
) -> tuple[tuple[int, ...], _Label] | None:
    """The division into runs whose label has the least rank: a dynamic programme.

    `weigh` says what a run weighs on a stage; None when it does not fit, as then no longer one
    does. Only the best label for the same blocks on the same stages is kept.
    """
    best = {0: _Label(0, 0, 0)}  # by the number of blocks on the stages so far
    cuts: list[dict[int, int]] = []
    for j in range(task.stages):
        end = len(runs) - (task.stages - 1 - j)
        reached: dict[int, _Label] = {}
        cut: dict[int, int] = {}
        for a, label in best.items():
            for b in range(a + 1, end + 1):
                weight = weigh(j, runs[a][b - a - 1])
                if weight is None:
                    break
                longer = _Label(
                    label.total + weight, max(label.largest, weight), label.squares + weight**2
                )
                if b not in reached or rank(longer) < rank(reached[b]):
                    reached[b], cut[b] = longer, a
        best = reached
        cuts.append(cut)
    if len(runs) not in best:
        return None
    stage_of: list[int] = []
    b = len(runs)
    for j in reversed(range(task.stages)):
        stage_of += [j] * (b - cuts[j][b])
        b = cuts[j][b]
    return tuple(reversed(stage_of)), best[len(runs)]


@dataclass(frozen=True)
class _Windows:
    """Block i is on one of the stages first[i] … last[i]; no stage takes more than `slowest`."""

    first: Sequence[int]
    last: Sequence[int]
    slowest: int


@dataclass(frozen=True)
class _Resource:
    """What a stage has a capacity of; block i takes fixed[i] + factor[j] * scaled[i] on stage j."""

    fixed: Sequence[int]
    scaled: Sequence[int]
    factor: Sequence[int]
    capacity: Sequence[int]

    def mirrored(self) -> _Resource:
        """Blocks and stages from last to first."""
        return _Resource(
            self.fixed[::-1], self.scaled[::-1], self.factor[::-1], self.capacity[::-1]
        )


def _windows(task: _Task, best: float) -> _Windows | None:
    """The windows of the divisions better than `best`; None when there is no such division."""
    blocks, final = len(task.loads), task.stages - 1
    above = _ancestors(task)
    below = [{q for q in range(blocks) if i in above[q]} for i in range(blocks)]
    mirrored_below = [{blocks - 1 - q for q in group} for group in reversed(below)]
    # No stage is empty: those beside a block's take blocks that are not above, or not below it.
    first = [max(0, final - blocks + len(group)) for group in above]
    last = [min(final, blocks - len(group)) for group in below]
    while True:
        received = _least_received(task, first, last)
        slowest = _slowest(task, best, sum(received))
        if slowest < 0 or any(low > high for low, high in zip(first, last, strict=True)):
            return None
        resources = _resources(task, [slowest - units for units in received])
        earlier = _earliest(above, first, resources)
        mirror = [resource.mirrored() for resource in resources]
        later = _earliest(mirrored_below, [final - high for high in reversed(last)], mirror)
        narrowed = earlier, [final - low for low in reversed(later)]
        if narrowed == (first, last):
            return _Windows(first, last, slowest)
        first, last = narrowed


def _ancestors(task: _Task) -> list[set[int]]:
    """The blocks that each block depends on, itself included."""
    above: list[set[int]] = []
    for i, flows in enumerate(task.arriving):
        above.append({i}.union(*(above[task.flows[f].producer] for f in flows)))
    return above


def _least_received(task: _Task, first: Sequence[int], last: Sequence[int]) -> list[int]:
    """Units that each stage receives at least: all that the first of its blocks consumes."""
    arriving = [sum(task.move[f] for f in flows) for flows in task.arriving]
    windows = list(zip(arriving, first, last, strict=True))
    return [
        min((units for units, low, high in windows if low <= j <= high), default=0)
        for j in range(task.stages)
    ]


def _slowest(task: _Task, best: float, received: int) -> int:
    """The most units of a stage in a division better than `best`; negative when there is none."""
    total = sum(task.compute)
    if best == math.inf:
        return total + sum(task.move)
    slack = math.ceil(best) - 1 - total - received
    if task.microbatches > 1:
        return slack // (task.microbatches - 1)
    return math.ceil(best) - 1 if slack >= 0 else -1


def _resources(task: _Task, seconds: Sequence[int]) -> list[_Resource]:
    """Time and, where it can run short, memory. Copies and shared tensors are left out."""
    none, zero = [0] * len(task.loads), [0] * task.stages
    time = _Resource(task.compute, none, zero, seconds)
    resident = [load.resident for load in task.loads]
    saved = [load.saved for load in task.loads]
    memory = _Resource(resident, saved, task.in_flight, task.room)
    return [time] if task.most <= min(task.room) else [time, memory]


def _earliest(
    above: Sequence[set[int]], floor: Sequence[int], resources: Sequence[_Resource]
) -> list[int]:
    """The first stage of each block that leaves room for all that it depends on."""
    first = list(floor)
    stages = len(resources[0].capacity)
    for i, group in enumerate(above):
        first[i] = max(first[q] for q in group)
        while first[i] < stages and not all(
            _fits(one, group, first, first[i]) for one in resources
        ):
            first[i] += 1
    return first


def _fits(resource: _Resource, group: set[int], first: Sequence[int], e: int) -> bool:
    """Whether, for every j, those of a group that cannot come before j fit into stages j … e."""
    fixed, scaled = [0] * (e + 1), [0] * (e + 1)
    for q in group:
        fixed[first[q]] += resource.fixed[q]
        scaled[first[q]] += resource.scaled[q]
    needed_fixed = needed_scaled = capacity = 0
    factor = resource.factor[e]
    for j in reversed(range(e + 1)):
        needed_fixed += fixed[j]
        needed_scaled += scaled[j]
        capacity += resource.capacity[j]
        factor = min(factor, resource.factor[j])
        if needed_fixed + factor * needed_scaled > capacity:
            return False
    return True


@dataclass(frozen=True)
class _Layout:
    """The programme and its variables, which exist only where they can be 1."""

    task: _Task
    windows: _Windows
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


def _layout(task: _Task, windows: _Windows) -> _Layout:
    """The variables, and what every division satisfies."""
    layout = _place(task, windows)
    _flow_forward(layout)
    _fill_stages(layout)
    _receive_values(layout)
    _hold_shared(layout)
    return layout


def _place(task: _Task, windows: _Windows) -> _Layout:
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
    layout = _Layout(task, windows, model, free, always, never, x, r, u)
    # A block is on stage j iff it is on j or later, but not on j + 1 or later.
    for (i, j), variable in x.items():
        model.constrain([(1, variable), (-1, layout.y(i, j)), (1, layout.y(i, j + 1))], 0, 0)
    return layout


def _flow_forward(layout: _Layout) -> None:
    """A block is on stage j or later when one that it consumes from is."""
    edges = {(flow.producer, q) for flow in layout.task.flows for q in flow.consumers}
    for p, q in sorted(edges):
        for j in range(1, layout.task.stages):
            layout.model.constrain([(1, layout.y(q, j)), (-1, layout.y(p, j))], low=0)


def _fill_stages(layout: _Layout) -> None:
    """Each stage has a block."""
    for j in range(layout.task.stages):
        here = _sum(layout.x, ((i, 1) for i in range(len(layout.task.loads))), j)
        layout.model.constrain(here, low=1)


def _receive_values(layout: _Layout) -> None:
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


def _hold_shared(layout: _Layout) -> None:
    """A shared tensor is on every stage with a block that uses it."""
    for (i, j), here in layout.x.items():
        for item in layout.task.loads[i].shared:
            layout.model.constrain([(1, layout.u[item, j]), (-1, here)], low=0)


def _limit_memory(layout: _Layout) -> None:
    """A stage takes no more bytes than it has."""
    for j, limit in enumerate(layout.task.room):
        terms = layout.memory(j)
        if sum(a for a, _ in terms) > limit:
            layout.model.constrain(terms, high=limit)


def _minimize_time(layout: _Layout) -> None:
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


def _too_little_memory(task: _Task, names: Sequence[str], effort: float) -> InfeasibleError:
    """The least limit that would do, and what takes most of it."""
    stage_of, proven = _leanest(task, effort)
    names = names or [f"block {i}" for i in range(len(task.loads))]
    memory = evaluate(task.loads, task.flows, stage_of, 1, task.in_flight).memory
    j = max(range(task.stages), key=lambda j: Fraction(memory[j], task.room[j]))
    alike = len(set(task.room)) == 1
    parts = memory_parts(task.loads, task.flows, stage_of, task.in_flight, j, names)
    largest = max(parts, key=lambda part: part.size)
    given = f"{task.room[j]:,} bytes {'a stage' if alike else f'on stage {j}'}"
    least = f"the least {'that would' if proven else 'found to'} do is {memory[j]:,} bytes"
    error = InfeasibleError(
        f"no division into {task.stages} stages fits the memory limit ({given}; {least}"
        f"{'' if alike else ', when all limits grow alike'}): raise the limit, add stages, or "
        f"recompute activations. The largest part there is {largest.what} ({largest.size:,} bytes)"
    )
    for k, size in enumerate(memory):
        here = [name for name, at in zip(names, stage_of, strict=True) if at == k]
        error.add_note(f"with that limit, stage {k} takes {size:,} bytes: {', '.join(here)}")
    return error


def _leanest(task: _Task, effort: float) -> tuple[tuple[int, ...], bool]:
    """The division that needs the smallest multiple of the limits; and whether that is proven.

    Each round asks for a division strictly below the last, until there is none.
    """

    def share(j: int, run: _Run) -> float:
        return (run.fixed + task.in_flight[j] * run.scaled) / task.room[j]

    found = _best_runs(task, _runs(task), share, lambda label: (label.largest,))
    assert found is not None  # there are enough blocks, and every run fits
    stage_of, finished = found[0], True
    while finished:
        memory = evaluate(task.loads, task.flows, stage_of, 1, task.in_flight).memory
        scale = max(map(Fraction, memory, task.room))
        below = [math.ceil(scale * limit) - 1 for limit in task.room]
        try:
            stage_of, finished = _leaner(dataclasses.replace(task, limits=below), effort)
        except (InfeasibleError, UndecidedError) as end:
            return stage_of, isinstance(end, InfeasibleError)
    return stage_of, False


def _leaner(task: _Task, effort: float) -> tuple[tuple[int, ...], bool]:
    """A division of little memory within the limits; and whether the solver finished."""
    windows = _windows(task, math.inf)
    if windows is None:
        return _nothing_better(None), True
    layout = _layout(task, windows)
    _limit_memory(layout)
    _minimize_memory(layout)
    solution = solve(layout.model, effort=effort)
    return layout.read(solution.values), solution.status == "optimal"


def _minimize_memory(layout: _Layout) -> None:
    """The largest multiple of a limit: exactly when they are equal, else to a few per cent."""
    task = layout.task
    limits = [max(1, limit) for limit in task.room]
    weights = [min(16 * max(limits) // limit, 2**60 // task.most) for limit in limits]
    common = math.gcd(*weights)
    largest = layout.model.integer("L", 0, task.most * max(weights) // common)
    for j, weight in enumerate(weights):
        terms = [(weight // common * a, variable) for a, variable in layout.memory(j)]
        layout.model.constrain([*terms, (-1, largest)], high=0)
    layout.model.minimize([(1, largest)])
