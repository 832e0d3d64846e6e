"""The exchange of data ranks in a step: sums of gradients, and gathers of parameters.

compute     F0 F1 B0 B1 | update
sums                 s1   s0          `late`: after the last compute,
gathers   g0 g1                       and before the first
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from parcompiler.cost import collective
from parcompiler.cost.vocabulary import vocabulary_rows
from parcompiler.graph import Parameter
from parcompiler.instruction import Kind
from parcompiler.passes.estimate import costs, decisions, estimate, held, step_edges
from parcompiler.plan import Plan
from parcompiler.problem import Judge, Problem, filled
from parcompiler.schedules.planned import outline
from parcompiler.timeline import StageCost
from parcompiler.timeline.candidate import StepEdges

DEEP = 16  # most ranks of a pipeline whose lowered step is simulated to choose a plan


def step_of(problem: Problem, plan: Plan) -> float:
    """Seconds of the step of a plan, with the exchange of data ranks after its last compute; at
    level 0 where the level is still open. `problem` is that of a rank.

    At level 3 of a pipeline gathers and scatters go one after another beside passes that also wait
    for other stages, which stage costs cannot express: there it is `judged_step`.
    """
    if problem.gathers and _judge(problem, plan) is not None:
        return judged_step(problem, plan)
    seconds = estimate(problem, plan).step_time
    if problem.mesh.replicas == 1 or problem.options.asynchronous:
        return seconds
    whole = problem.at_zero(plan.zero or 0)
    return seconds + max(exchange.late for exchange in exchanges(whole, plan))


def judged_step(problem: Problem, plan: Plan) -> float:
    """Seconds of the lowered step where data ranks exchange beside a pipeline, unless it is so DEEP
    that lowering takes too long; else `step_of`. `problem` is that of a rank. Cached."""
    judge = _judge(problem, plan)
    if judge is None:
        return step_of(problem, plan)
    return problem.once(("judged", plan.zero, *decisions(plan)), lambda: judge(problem, plan))


def _judge(problem: Problem, plan: Plan) -> Judge | None:
    """The function that simulates the lowered step, where plans are compared by it."""
    exchanged = problem.mesh.replicas > 1 and not problem.options.asynchronous
    return problem.judge if exchanged and 1 < plan.mesh.pipeline <= DEEP else None


def tensors(problem: Problem, plan: Plan) -> list[list[Parameter]]:
    """The parameters and buffers of each rank: of its stages, and its rows of the vocabulary."""
    by_name, rows = problem.graph.by_name, _rows(problem, plan)
    return [[*(by_name[name] for name in sorted(names)), *rows] for names in held(problem, plan)]


def _rows(problem: Problem, plan: Plan) -> list[Parameter]:
    """A rank's rows of the tables that all ranks share."""
    if problem.graph.vocabulary is None:
        return []
    return vocabulary_rows(problem.graph, plan.mesh.pipeline * plan.mesh.tensor)


class Exchange(NamedTuple):
    """Seconds in which a rank exchanges with its data replicas in a step; `late` are those before
    its first compute and after its last."""

    seconds: float
    late: float


def exchanges(problem: Problem, plan: Plan) -> list[Exchange]:
    """The exchange of each rank at the level of a problem, as the simulator times it. Sums begin as
    gradients become final in the last backward, from level 2 on in each. The first forward begins
    so late that parameters gathered beside it come before they are read, if all buckets have equal
    parts in it. Cached."""
    return problem.once(("exchanges", *decisions(plan)), lambda: _exchanges(problem, plan))


def _exchanges(problem: Problem, plan: Plan) -> list[Exchange]:
    """Uncached body of `exchanges`."""
    m, level, placement = plan.microbatches, problem.zero, outline(plan).placement
    units = _unit_seconds(problem, plan)
    stages = costs(problem if level == 3 else problem.at_zero(0), plan)  # equally long below 3
    edges = step_edges(problem, plan)
    made, all_exchanges = _gradient_bytes(problem, plan), []
    for rank, on_rank in enumerate(tensors(problem, plan)):
        bucketed = on_rank if level < 3 else on_rank[len(on_rank) - len(_rows(problem, plan)) :]
        count, sums, gathers = 0, 0.0, 0.0
        for expert in (None, 0):  # experts apart from all others
            items = [x for x in bucketed if x.trainable and bool(x.experts) == (expert == 0)]
            items = [item for item in items if problem.sharers(item) > 1]
            ranks = problem.mesh.grid.replicas([rank], expert=expert)
            each = functools.cache(functools.partial(collective.joined, problem.mesh, ranks=ranks))
            for bucket in filled(items, problem.bucket):
                count += 1
                action = "reduce-scatter" if level else "all-reduce"
                sums += each(action, nbytes=problem.sent_bytes(bucket))
                if level:
                    gathers += each("all-gather", nbytes=sum(item.nbytes for item in bucket))
        count = max(1, count)
        mine = [cost for cost, home in zip(stages, placement, strict=True) if home == rank]
        seconds = sums + gathers
        if level >= 2:
            seconds += (m - 1) * sums
        late = _late_sums(problem, plan, edges[rank], sums, count, made, mine)
        late += _late_gathers(edges[rank], gathers, count, made, stages)
        if units[rank]:  # gathered for both passes; the first and the last beside no other block
            seconds += m * sum(2 * gather + scatter for gather, scatter in units[rank])
            late = max(late, sum(units[rank][0]))
        all_exchanges.append(Exchange(seconds, late))
    return all_exchanges


def _gradient_bytes(problem: Problem, plan: Plan) -> list[int]:
    """Bytes of the gradients that the blocks of each stage make."""
    items = (item for item in problem.graph.parameters if item.trainable)
    trained = {item.name: item.summed_nbytes() for item in items}
    sizes = {
        block.name: sum(trained.get(name, 0) for name in {x.name for x in block.tensors})
        for block in problem.under(plan).cut.blocks
    }
    return [sum(sizes[name] for name in choice.blocks) for choice in plan.stages or ()]


def _late_sums(
    problem: Problem,
    plan: Plan,
    edges: StepEdges,
    sums: float,
    count: int,
    made: Sequence[int],
    stages: Sequence[StageCost],
) -> float:
    """Seconds by which a rank's sums, `count` that take `sums` seconds, end after the last compute
    of any rank. They run one after another: those of a stage begin in its last backward, from level
    2 on in each, after its last block, or after the whole backward where it comes in two parts."""
    finals = edges.finals
    if not finals or plan.stages is None:
        return sums
    last = {action.stage: action for action, _ in finals}
    priced = problem.at_zero("auto").under(plan).on(plan.stages[finals[0][0].stage].rank)
    backward = dict(zip((b.name for b in priced.cut.blocks), priced.backward, strict=True))
    total, end = sum(made[j] for j in last) or 1, -math.inf
    for action, before in finals:
        if problem.zero >= 2 or action is last[action.stage]:
            whole = action.kind is Kind.BACKWARD
            inside = plan.stages[action.stage].blocks[:-1] if whole else ()
            begin = -before - sum(backward[name] for name in inside)
            end = max(end, begin) + sums * made[action.stage] / total
    if problem.zero >= 2:  # not all micro-batches may have been run
        compute = sum(cost.forward + cost.backward for cost in stages)
        end += (plan.microbatches - len(finals) // len(last)) * max(0.0, sums - compute)
    return max(0.0, end, sums / count - finals[-1][1])


def _late_gathers(
    edges: StepEdges,
    gathers: float,
    count: int,
    made: Sequence[int],
    stages: Sequence[StageCost],
) -> float:
    """Seconds by which a rank waits for parameters, `count` gathers that take `gathers` seconds.
    They run one after another in the order of the stages, each beside the forward of the blocks
    before its own."""
    total, arrived, late = sum(made[j] for j in edges.begins) or 1, 0.0, 0.0
    for j in sorted(edges.begins):
        part = made[j] / total
        arrived += gathers * part
        beside = stages[j].forward * (1 - 1 / max(1.0, count * part))
        first = arrived - gathers * part + gathers / count
        late = max(late, max(arrived - beside, first) - edges.begins[j])
    return late


def _unit_seconds(problem: Problem, plan: Plan) -> list[list[tuple[float, float]]]:
    """By rank, the seconds in which the parameters of each of its blocks are gathered, and the
    gradients scattered; empty below level 3."""
    parameters: list[list[tuple[float, float]]] = [[] for _ in range(plan.mesh.pipeline)]
    if problem.gathers:
        priced = problem.under(plan)
        blocks = [block.name for block in priced.cut.blocks]
        by_name = dict(zip(blocks, problem.exchanges(priced), strict=True))
        for choice in plan.stages or ():
            parameters[choice.rank] += [by_name[name] for name in choice.blocks]
    return parameters
