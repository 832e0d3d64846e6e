"""Units: parts of stages whose parameters are gathered together where data ranks hold pieces.

    UNSHARD h_0             [1] gather the rows of all data ranks, for one unit
    UNSHARD h_1             [2] one unit ahead, beside the compute
    FORWARD h_0
    RESHARD h_0             [3] free all but the rows of this data rank
    UNSHARD h_2
    FORWARD h_1 ...         likewise in the order of the backwards, with the sums of gradients

Rajbhandari et al. 2020, arXiv 1910.02054, section 5.3: ZeRO 3. A unit is a stage of its own, of one
block, on the rank of the stage from which it comes; a block with few parameters joins the unit of a
neighbour. So under every schedule values go from unit to unit as between several stages of a rank,
and the lists say when parameters are whole.

Parameters that a rank uses again within KEEP computations stay whole: they would be gathered again
while the computation in between runs. BACKWARD_WEIGHT reads no parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

from parcompiler.capture.blocks import Cut
from parcompiler.graph import Graph
from parcompiler.instruction import BACKWARDS, Instruction, Kind
from parcompiler.lower.lowered import StageProgram
from parcompiler.plan import Plan, StageChoice
from parcompiler.schedules.action import Action, Orders

KEEP = 2  # computations of units on a rank

Lines = tuple[Instruction, ...]


def in_units(plan: Plan, cut: Cut) -> tuple[Plan, list[int]]:
    """The plan with a stage for each unit, and the number of units of each original stage."""
    assert plan.stages is not None
    weights = {block.name: block.weights for block in cut.blocks}
    units: list[StageChoice] = []
    counts = []
    for choice in plan.stages:
        numbers, before = cut.units(weights[name] for name in choice.blocks), len(units)
        for _, members in groupby(zip(numbers, choice.blocks, strict=True), key=itemgetter(0)):
            units.append(StageChoice(tuple(name for _, name in members), choice.rank))
        counts.append(len(units) - before)
    return replace(plan, stages=tuple(units)), counts


def unit_orders(orders: Sequence[Sequence[Action]], counts: Sequence[int]) -> Orders:
    """The orders with units in place of stages: forwards in order, backwards in reverse."""
    first = [sum(counts[:j]) for j in range(len(counts))]
    return tuple(tuple(_in_units(order, first, counts)) for order in orders)


def sharded(
    lists: Sequence[Lines], stages: Sequence[StageProgram], graph: Graph
) -> tuple[Lines, ...]:
    """The lists with UNSHARD and RESHARD around the uses of the parameters of each stage."""
    having: set[int | None] = {
        stage.index
        for stage in stages
        if any(not graph.by_name[name].buffer for name in stage.tensors)
    }
    return tuple(tuple(_sharded(rank, lines, having)) for rank, lines in enumerate(lists))


def _in_units(
    order: Iterable[Action], first: Sequence[int], counts: Sequence[int]
) -> Iterator[Action]:
    """The order of a rank."""
    for action in order:
        if action.stage < 0:
            yield action
            continue
        units = range(first[action.stage], first[action.stage] + counts[action.stage])
        for unit in units if action.kind is Kind.FORWARD else reversed(units):
            yield action._replace(stage=unit)


def _sharded(rank: int, lines: Lines, having: Container[int | None]) -> Iterator[Instruction]:
    """The list of one rank."""
    uses = [
        k
        for k, line in enumerate(lines)
        if line.stage in having and (line.kind is Kind.FORWARD or line.kind in BACKWARDS)
    ]
    places: dict[int | None, list[int]] = defaultdict(list)  # among the uses, by stage
    for n, k in enumerate(uses):
        places[lines[k].stage].append(n)
    before: dict[int, list[Instruction]] = defaultdict(list)
    behind: dict[int, list[Instruction]] = defaultdict(list)
    for each in places.values():
        for m, n in enumerate(each):
            line = lines[uses[n]]
            if m == 0 or n - each[m - 1] > KEEP:
                unshard = replace(line, kind=Kind.UNSHARD, ranks=(rank,))
                before[uses[max(0, n - 1)]].append(unshard)
            if m + 1 == len(each) or each[m + 1] - n > KEEP:
                behind[uses[n]].append(replace(line, kind=Kind.RESHARD))
    for k, line in enumerate(lines):
        # The unit that is used here is gathered before the next one.
        yield from sorted(before[k], key=lambda item, stage=line.stage: item.stage != stage)  # type: ignore[misc]
        yield line
        yield from behind[k]
