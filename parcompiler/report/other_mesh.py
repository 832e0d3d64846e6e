"""A neighbouring mesh on which the same batch would train faster: planned as `compile` would.

A neighbour has half of the ranks along one axis and twice as many along another. Those are tried
first that halve an axis on which the busiest rank loses much time and double one that costs little.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

from parcompiler.errors import ParcompilerError
from parcompiler.lower import lower
from parcompiler.mesh import AXES, Mesh
from parcompiler.passes import DEFAULT
from parcompiler.passes.decide import decide
from parcompiler.passes.shard.axes import on_axes
from parcompiler.passes.shard.context import LONG, positions
from parcompiler.passes.shard.local import local
from parcompiler.plan import Plan
from parcompiler.prices import simulated
from parcompiler.problem import Problem
from parcompiler.report.bound import DATA, MESSAGE, WAITING, WORTH
from parcompiler.report.data import OptionGain, StepShare

LOST = {"data": (DATA,), "pipeline": (WAITING, MESSAGE), "tensor": ("tensor ranks",)}
MORE = {"data": 0.5, "pipeline": 1.0, "tensor": 1.0}  # of that, what twice the ranks add
UNKNOWN = 0.05  # of the step: what an axis that is not divided may cost once it is
TRIED = 2  # neighbours: planning one takes a fraction of compile


def other_mesh(
    problem: Problem, plan: Plan, parts: Iterable[StepShare], seconds: float
) -> tuple[OptionGain, ...]:
    """The first of the neighbours tried that gains more on a step of `seconds` than the cost model
    can tell, if one does.

    `problem` is that of the whole model. Nothing is tried where more than the mesh would have to
    change: stages by number, measured costs, context and expert ranks, several devices.
    """
    mesh, options = problem.mesh, problem.options
    chosen = (
        not isinstance(options.stages, str) or plan.orders is not None or plan.updates is not None
    )
    if chosen or problem.bench is not None or not mesh.is_uniform or mesh.context * mesh.expert > 1:
        return ()
    rows = 1 if problem.graph.kept else positions(problem.graph)
    short = rows >= LONG and rows % 2 == 0 and bool(plan.recompute or plan.selective)
    neighbours = _neighbours(mesh, plan.microbatches, parts, seconds, context=short)
    for other, count in itertools.islice(neighbours, TRIED):
        named = dataclasses.replace(options, microbatches=count)
        try:
            trial = on_axes(problem.anew(mesh=other, options=named, explain=False))
            step = _step(trial, decide(trial, DEFAULT))
        except ParcompilerError:
            continue  # it does not fit, or has more stages than the model has blocks
        if seconds / step - 1 > WORTH:
            degrees = ((axis, getattr(other, axis)) for axis in AXES)
            sizes = ",".join(f"{axis}={degree}" for axis, degree in degrees if degree > 1)
            text = sizes if count == plan.microbatches else f"{sizes} --microbatches {count}"
            return (OptionGain("mesh", text, seconds / step - 1, step),)
    return ()


def _neighbours(
    mesh: Mesh, microbatches: int, parts: Iterable[StepShare], step: float, *, context: bool
) -> Iterator[tuple[Mesh, int]]:
    """Meshes beside this one with their micro-batches on a data rank, the most promising first;
    with `context` ranks where rows are long and memory is short."""
    spent = {part.name: part.seconds for part in parts}
    lost = {axis: sum(spent.get(name, 0.0) for name in names) for axis, names in LOST.items()}
    added = {axis: MORE[axis] * seconds if getattr(mesh, axis) > 1 else UNKNOWN * step
             for axis, seconds in lost.items()}  # fmt: skip
    pairs = [*itertools.permutations(LOST, 2), *((axis, "context") for axis in LOST if context)]
    added["context"] = 0.0  # they make the room that is paid for with time
    for less, more in sorted(pairs, key=lambda pair: added[pair[1]] - lost[pair[0]]):
        half, odd = divmod(getattr(mesh, less), 2)
        if odd:
            continue
        other = dataclasses.replace(mesh, **{less: half, more: 2 * getattr(mesh, more)})
        count, rest = divmod(microbatches * mesh.data, other.data)
        if count and not rest:
            yield other, count


def _step(problem: Problem, plan: Plan) -> float:
    """The simulated seconds of a step."""
    assert plan.granularity is not None, "the passes decide it"
    rank_problem = local(problem, plan)
    lowered = lower(rank_problem.graph, plan, rank_problem.priced(plan.granularity).cut)
    return simulated(problem, plan, lowered).step_time
