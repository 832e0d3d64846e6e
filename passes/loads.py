"""Data of the stage solver: a load for each block, a flow for each value between blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from parcompiler.graph import nbytes_of
from parcompiler.passes.divide import Flow, Load
from parcompiler.passes.estimate import exchanged
from parcompiler.passes.spread import vocabulary_cost
from parcompiler.plan import Plan
from parcompiler.priced import Priced
from parcompiler.problem import Problem
from parcompiler.schedules.planned import left, outline


def data(
    problem: Problem,
    level: int,
    *,
    versions: bool = False,
    recompute: Collection[str] = (),
    left: int = 0,
) -> tuple[tuple[Load, ...], tuple[Flow, ...]]:
    """Loads of the blocks at a granularity, and flows between them.

    `versions`: every micro-batch in flight keeps the weights of its forward. Blocks in `recompute`
    keep their inputs only. At most `left` micro-batches wait for their weight gradients.
    """
    key = "loads", level, versions, frozenset(recompute), left

    def find() -> tuple[tuple[Load, ...], tuple[Flow, ...]]:
        priced = problem.recomputing(level, recompute)
        if left and any(priced.later):  # schedules differ in this alone
            loads, flows = data(problem, level, versions=versions, recompute=recompute)
            pairs = zip(loads, priced.later, strict=True)
            return tuple(load.holding(left * size) for load, size in pairs), flows
        loads = tuple(_loads(problem, priced, versions=versions))
        flows = problem.once(("flows", level), lambda: tuple(_flows(problem, priced)))
        assert priced.cut is problem.priced(level).cut, "recomputation cuts no block"
        return loads, flows

    return problem.once(key, find)


def data_under(
    problem: Problem, plan: Plan, level: int
) -> tuple[tuple[Load, ...], tuple[Flow, ...]]:
    """Loads and flows under the schedule and the recomputation of a plan."""
    versions, recompute = outline(plan).asynchronous, plan.recompute or ()
    return data(problem, level, versions=versions, recompute=recompute, left=left(plan))


def _loads(problem: Problem, priced: Priced, *, versions: bool) -> Iterator[Load]:
    """One load for each block; shared tensors and constants count once on each rank."""
    blocks = priced.cut.blocks
    names = [sorted({binding.name for binding in block.tensors}) for block in blocks]
    users = Counter(name for read in names for name in read)
    passing = _exchanged(problem, priced)
    for b, read in enumerate(names):
        items = [problem.graph.by_name[name] for name in read]
        unshared = [item for item in items if users[item.name] == 1]
        weights = sum(item.nbytes for item in unshared if item.trainable) if versions else 0
        times = tuple(one.forward[b] + one.backward[b] for one in priced.ranks)
        yield Load(
            seconds=min(times, default=priced.forward[b] + priced.backward[b]),
            resident=sum(map(problem.state_bytes, unshared)) - weights,
            saved=priced.saved[b] + weights,
            moment=priced.moments[b] + passing[b],
            shared=tuple(
                (item.name, problem.state_bytes(item)) for item in items if users[item.name] > 1
            )
            + tuple(problem.constant_bytes(priced.cut, [b]).items()),
            by_rank=times,
        )


def _exchanged(problem: Problem, priced: Priced) -> list[int]:
    """Bytes that data ranks exchange during each block's forward or backward; see `footprint`."""
    if not problem.scatters:
        return [0] * len(priced.cut.blocks)
    bytes_of = exchanged(problem, priced, range(len(priced.cut.blocks)))
    return [
        max(bytes_of.forward(b), bytes_of.backward(b) + bytes_of.own(b))
        for b in range(len(priced.cut.blocks))
    ]


def _flows(problem: Problem, priced: Priced) -> Iterator[Flow]:
    """One flow for each value that other blocks read."""
    for b, block in enumerate(priced.cut.blocks):
        for node in block.outputs:
            consumers = sorted({priced.home[u] for u in node.users if u in priced.home} - {b})
            if consumers:
                yield Flow(b, tuple(consumers), problem.message_seconds(node), nbytes_of(node))


def reserved(problem: Problem, plan: Plan) -> int:
    """Bytes reserved on every rank besides its blocks: a vocabulary on all ranks, a bucket of
    gradients unless loads count it (`_exchanged`), and the batch."""
    bucket = 0 if problem.scatters else problem.bucket_bytes
    return bucket + problem.held_batch_bytes + _spread(problem, plan)


def _spread(problem: Problem, plan: Plan) -> int:
    """Bytes on every rank of a vocabulary that all ranks share."""
    cost = vocabulary_cost(problem, plan)
    return cost.resident + cost.saved + cost.more if cost else 0
