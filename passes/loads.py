"""What the stage programme is told: the blocks at a granularity and the values between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from parcompiler.graph import nbytes_of
from parcompiler.passes.divide import Flow, Load, evaluate
from parcompiler.passes.spread import vocabulary_cost
from parcompiler.plan import Plan
from parcompiler.problem import Priced, Problem
from parcompiler.schedules import Schedule
from parcompiler.schedules.planned import planned
from parcompiler.schedules.waiting import waiting


def data(
    problem: Problem,
    level: int,
    *,
    versions: bool = False,
    recompute: Collection[str] = (),
    left: int = 0,
) -> tuple[tuple[Load, ...], tuple[Flow, ...]]:
    """The blocks at a granularity and the values between them, as the programme's data.

    With `versions` every micro-batch in flight keeps the weights of its forward. The blocks in
    `recompute` keep what they read only; at most `left` micro-batches wait for weight gradients.
    """
    priced = problem.recomputing(level, recompute)
    loads = _loads(problem, priced, versions=versions, left=left)
    return tuple(loads), tuple(_flows(problem, priced))


def data_under(
    problem: Problem, plan: Plan, level: int
) -> tuple[tuple[Load, ...], tuple[Flow, ...]]:
    """The programme's data under the schedule and the recomputation of a plan."""
    schedule = planned(plan)
    left = _left(schedule)
    recompute = plan.recompute or ()
    return data(problem, level, versions=schedule.asynchronous, recompute=recompute, left=left)


def _left(schedule: Schedule) -> int:
    """The most micro-batches that wait for their weight gradients on a stage."""
    return max(waiting(schedule.orders[r], j) for j, r in enumerate(schedule.placement))


def _loads(problem: Problem, priced: Priced, *, versions: bool, left: int) -> Iterator[Load]:
    """One load per block; tensors that several blocks read are counted once per rank."""
    blocks = priced.cut.blocks
    names = [sorted({binding.name for binding in block.tensors}) for block in blocks]
    users = Counter(name for held in names for name in held)
    for b, held in enumerate(names):
        items = [problem.graph.by_name[name] for name in held]
        own = [item for item in items if users[item.name] == 1]
        weights = sum(item.nbytes for item in own if item.trainable) if versions else 0
        yield Load(
            seconds=priced.forward[b] + priced.backward[b],
            resident=sum(map(problem.state_bytes, own)) - weights + left * priced.again[b],
            saved=priced.saved[b] + weights,
            shared=tuple(
                (item.name, problem.state_bytes(item)) for item in items if users[item.name] > 1
            ),
        )


def _flows(problem: Problem, priced: Priced) -> Iterator[Flow]:
    """One flow per value that other blocks use."""
    for b, block in enumerate(priced.cut.blocks):
        for node in block.outputs:
            consumers = sorted({priced.home[u] for u in node.users if u in priced.home} - {b})
            if consumers:
                yield Flow(b, tuple(consumers), problem.message_seconds(node), nbytes_of(node))


def held(schedule: Schedule) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Micro-batches that the stages of each rank keep activations of."""
    return tuple(map(schedule.held, range(schedule.ranks)))


def reserved(problem: Problem, plan: Plan, level: int) -> int:
    """Bytes that no rank may fill before it recomputes the largest block on each of its stages,
    before data ranks reduce gradients, and for the layers of the vocabulary.

    Where weight gradients are left for later, the loads contain what is recomputed.
    """
    schedule = planned(plan)
    largest = max(problem.recomputing(level, plan.recompute or ()).again, default=0)
    again = 0 if _left(schedule) else largest * len(schedule.placement) // schedule.ranks
    return again + problem.bucket_bytes + _spread(problem, plan)


def _spread(problem: Problem, plan: Plan) -> int:
    """Bytes on every rank for the layers of the vocabulary that all ranks compute."""
    cost = vocabulary_cost(problem, plan)
    return cost.resident + cost.saved if cost else 0


def with_recomputed(
    problem: Problem, plan: Plan, level: int, stage_of: Sequence[int], memory: Sequence[int]
) -> list[int]:
    """The bytes on each rank of which `memory` are all but those to recompute a block in, to reduce
    gradients in, and of the layers of the vocabulary."""
    schedule, everywhere = planned(plan), problem.bucket_bytes + _spread(problem, plan)
    found = [size + everywhere for size in memory]
    priced = problem.recomputing(level, plan.recompute or ())
    for j, rank in enumerate(schedule.placement if not _left(schedule) else ()):
        blocks = [b for b, at in enumerate(stage_of) if at == j]
        found[rank] += priced.recomputed_bytes(blocks, 0)
    return found


def needed(problem: Problem, plan: Plan, level: int, stage_of: Sequence[int]) -> list[int]:
    """What a division takes on each rank, as the programme counts it."""
    schedule = planned(plan)
    loads, flows = data_under(problem, plan, level)
    found = evaluate(loads, flows, stage_of, schedule.placement, plan.microbatches, held(schedule))
    return with_recomputed(problem, plan, level, stage_of, found.memory)
