"""The predicted step of a plan before it is lowered: costs of its stages, and messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from itertools import accumulate
from operator import mul

from torch import fx

from parcompiler.cost import collective
from parcompiler.cost.vocabulary import vocabulary_rows
from parcompiler.graph import Block, Parameter, nbytes_of
from parcompiler.instruction import HEAD
from parcompiler.passes.footprint import (
    IN_FLIGHT,
    NOTHING,
    Exchanged,
    Footprint,
    Summed,
    in_flight,
)
from parcompiler.passes.spread import vocabulary_cost
from parcompiler.plan import Plan
from parcompiler.priced import Priced
from parcompiler.problem import Problem, T, filled
from parcompiler.schedules.planned import held as kept_by
from parcompiler.schedules.planned import input_follows_weight, outline, planned, usually_left
from parcompiler.schedules.schedule import Schedule
from parcompiler.schedules.staleness import versions
from parcompiler.timeline import Message, StageCost, Timing, VocabularyCost, step_time
from parcompiler.timeline.candidate import StepEdges, edges_of_many, timing_of_many
from parcompiler.timeline.costs import optimizer_seconds
from parcompiler.timeline.order import detached


def estimate(problem: Problem, plan: Plan) -> Timing:
    """The simulated step of a plan with schedule and stages. Cached."""

    def find() -> Timing:
        everywhere, stages = vocabulary_cost(problem, plan), costs(problem, plan)
        inputs = stages, messages(problem, plan), everywhere
        result = timing_of_many(orders_of(plan, planned), plan.microbatches, *inputs)
        return replace(result, step_time=result.step_time + _update(plan, stages, everywhere))

    return problem.once(("estimate", *decisions(plan)), find)


def step_edges(problem: Problem, plan: Plan) -> list[StepEdges]:
    """What each rank does at the edges of `estimate`'s step."""
    inputs = costs(problem, plan), messages(problem, plan), vocabulary_cost(problem, plan)
    return edges_of_many(orders_of(plan, planned), plan.microbatches, *inputs)


def update_seconds(problem: Problem, plan: Plan) -> float:
    """Seconds of the optimizer's step, which `estimate` adds to those of the schedule."""
    return _update(plan, costs(problem, plan), vocabulary_cost(problem, plan))


def _update(plan: Plan, stages: Sequence[StageCost], everywhere: VocabularyCost | None) -> float:
    """Seconds of the optimizer's step on the slowest rank."""
    return max(optimizer_seconds([x.rank for x in plan.stages or ()], stages, everywhere))


def least_update(problem: Problem) -> float:
    """Lower bound of the optimizer's step of any plan, in seconds: the mean over ranks."""
    if problem.options.asynchronous:
        return 0.0

    def find() -> float:
        graph, mesh = problem.graph, problem.mesh
        shared = graph.vocabulary.tensors if graph.vocabulary else ()
        items = (item for item in graph.parameters if item.name not in shared)
        rows = vocabulary_rows(graph, mesh.pipeline * mesh.tensor) if shared else ()
        return _seconds_to_update(problem, items) / mesh.pipeline + _seconds_to_update(
            problem, rows
        )

    return problem.once(("least update", problem.graph.vocabulary is not None), find)


def _seconds_to_update(problem: Problem, tensors: Iterable[Parameter]) -> float:
    """Seconds of the optimizer's step for these tensors."""
    return sum(map(problem.update_seconds, tensors))


def orders_of(plan: Plan, find: Callable[[Plan], Schedule]) -> Callable[[int], Schedule]:
    """The schedule of the plan as a function of the number of micro-batches; orders that were given
    have that of the plan."""
    if plan.orders is not None:
        return lambda _: find(plan)
    return lambda microbatches: find(replace(plan, microbatches=microbatches))


def alone(problem: Problem, plan: Plan) -> float:
    """Lower bound of `estimate`'s step: without the time of a vocabulary on all ranks.

    Exact where the vocabulary is on stages, and cheaper to compute.
    """
    inputs = costs(problem, plan), messages(problem, plan)
    update = _update(plan, inputs[0], vocabulary_cost(problem, plan))
    return step_time(orders_of(plan, _headless), plan.microbatches, *inputs) + update


def _headless(plan: Plan) -> Schedule:
    """The plan's schedule without the passes of a shared head; differs from `trunk`'s order."""
    schedule = planned(plan)
    orders = tuple(tuple(a for a in order if a.kind not in HEAD) for order in schedule.orders)
    return replace(schedule, orders=orders)


def decisions(plan: Plan) -> tuple[Hashable, ...]:
    """Cache key: the decisions that the step of a plan depends on."""
    choice = plan.vocabulary
    order = plan.schedule, plan.orders, plan.virtual_stages, plan.microbatches
    blocks = plan.granularity, plan.sent, plan.stages, plan.recompute
    return *order, *blocks, choice and choice.method


def costs(
    problem: Problem, plan: Plan, tensors: Sequence[Collection[str]] | None = None
) -> tuple[StageCost, ...]:
    """Seconds and bytes of one micro-batch on each stage. Cached.

    `tensors` are the names of the tensors that each stage holds, once a program is lowered; by
    default those that its blocks read. A tensor that several stages of a rank hold counts with the
    first of them, as do the batch and the buckets of the data ranks. Asynchronous schedules also
    hold earlier versions of the weights.
    """
    if tensors is None:
        every = _blocks(problem, plan)
        key = "stage costs", *decisions(plan)
        return problem.once(key, lambda: _costs(problem, plan, _tensors_read(problem, plan, every)))
    return _costs(problem, plan, tensors, lowered=True)


def _costs(
    problem: Problem, plan: Plan, held: Sequence[Collection[str]], *, lowered: bool = False
) -> tuple[StageCost, ...]:
    """`costs` of stages that hold these tensors. In `lowered` programs gathers of parameters are
    instructions of their own and do not count with the compute."""
    timed = problem.at_zero("auto").under(plan) if lowered else problem.under(plan)
    blocks = _blocks(problem, plan)
    placement = [choice.rank for choice in plan.stages or ()]
    users = Counter(
        (rank, name) for rank, names in zip(placement, held, strict=True) for name in names
    )
    homes = [(rank, b) for rank, members in zip(placement, blocks, strict=True) for b in members]
    seen: set[tuple[int, str]] = set()
    orders = [tuple(sorted(members)) for members in blocks]
    alike = "stage cost", plan.granularity, plan.recompute
    is_kept = not lowered and not outline(plan).asynchronous

    def once(key: tuple[Hashable, ...], find: Callable[[], T]) -> T:
        """Cached where possible: other divisions may have the same stage."""
        return problem.once((*alike, *key), find) if is_kept else find()

    each = [once((order,), partial(exchanged, problem, timed, order)) for order in orders]
    costs = []
    for j, (members, names) in enumerate(zip(blocks, held, strict=True)):
        rank = placement[j]
        new = [problem.graph.by_name[n] for n in sorted(names) if (rank, n) not in seen]
        seen.update((rank, name) for name in names)
        alone = {name for name in names if users[rank, name] == 1}
        beside = {b for home, b in homes if home == rank}.difference(members)
        exchange = each[j]
        if problem.gathers:
            exchange = _beside(each, j, [k for k, home in enumerate(placement) if home == rank])
            exchange = exchange._replace(input_follows_weight=input_follows_weight(plan)[rank])
        if problem.scatters:
            exchange = exchange._replace(waiting=usually_left(plan)[rank])
        reads = tuple(x.name for x in new), frozenset(alone), frozenset(beside)
        between = (
            exchange.beside,
            exchange.before,
            exchange.resident,
            exchange.input_follows_weight,
            exchange.waiting,
        )
        key = rank, orders[j], *reads, *between
        if lowered:  # gathered parameters are tensors of their own
            exchange = exchange._replace(gathered=())
        arguments = problem, plan, j, timed.on(rank), orders[j], new, alone, beside, exchange
        cost = once(key, partial(_cost, *arguments))
        costs.append(replace(cost, gathered=sum(each[j].gathered) if lowered else 0))
    for rank in dict.fromkeys(placement):
        parts = [each[k] for k, home in enumerate(placement) if home == rank]
        first = placement.index(rank)
        left, last = zip(*(part.at_end for part in parts), strict=True)
        costs[first] = replace(
            costs[first],
            resident=costs[first].resident + problem.held_batch_bytes + in_flight(parts),
            update=sum(left) + max(last),
        )
    return tuple(costs)


def _beside(each: Sequence[Exchanged], j: int, stages: Sequence[int]) -> Exchanged:
    """What data ranks exchange for stage `j` of a rank that has `stages`, where parameters
    are gathered: units of its other stages are prefetched, and their buckets are under way."""
    done = [bucket for k in reversed(stages) if k > j for bucket in each[k].buckets]
    return each[j]._replace(
        beside=max((each[k].at_ends for k in stages if k != j), default=0),
        before=tuple(done[-IN_FLIGHT:]),
        resident=in_flight([each[k] for k in stages]),
    )


def host_bytes(problem: Problem, plan: Plan) -> list[int]:
    """The most bytes of offloaded activations that each rank keeps in the memory of its host."""
    pairs = [*zip(plan.stages or (), costs(problem, plan), strict=True)]
    sizes_of = [
        [cost.host for choice, cost in pairs if choice.rank == r] for r in range(plan.mesh.pipeline)
    ]
    return [
        max(sum(map(mul, sizes, counts)) for counts in vectors)
        for sizes, vectors in zip(sizes_of, kept_by(plan), strict=True)
    ]


def messages(problem: Problem, plan: Plan) -> tuple[Message, ...]:
    """The messages between stages, for one micro-batch."""
    return tuple(_messages(problem, plan))


def _blocks(problem: Problem, plan: Plan) -> list[list[int]]:
    """The numbers of each stage's blocks."""
    assert plan.stages is not None
    index = {block.name: b for b, block in enumerate(problem.under(plan).cut.blocks)}
    return [[index[name] for name in choice.blocks] for choice in plan.stages]


def _tensors_read(problem: Problem, plan: Plan, blocks: Sequence[Sequence[int]]) -> list[set[str]]:
    """Names of the tensors that each stage reads; the first stage also holds unread ones."""
    cut = problem.under(plan).cut
    names = [
        {binding.name for b in members for binding in cut.blocks[b].tensors} for members in blocks
    ]
    names[0] |= problem.graph.unread
    return names


def held(problem: Problem, plan: Plan) -> list[set[str]]:
    """Names of the tensors that each rank holds for its stages."""
    names_on: list[set[str]] = [set() for _ in range(plan.mesh.pipeline)]
    every = _tensors_read(problem, plan, _blocks(problem, plan))
    for rank, names in zip(outline(plan).placement, every, strict=True):
        names_on[rank] |= names
    return names_on


def _cost(
    problem: Problem,
    plan: Plan,
    j: int,
    priced: Priced,
    blocks: tuple[int, ...],
    tensors: Sequence[Parameter],
    alone: AbstractSet[str],
    beside: AbstractSet[int],
    exchange: Exchanged,
) -> StageCost:
    """The cost of these blocks as stage `j`.

    `tensors` are counted with this stage; of the names in `alone` no other stage of its rank has a
    tensor. `beside` are the blocks of the rank's other stages.
    """
    assert plan.stages is not None
    schedule, rank = outline(plan), plan.stages[j].rank
    stashed = versions(planned(plan).orders[rank], j) - 1 if schedule.asynchronous else 0
    weights = {item.name: item.nbytes for item in tensors if item.trainable}
    freed = () if schedule.asynchronous else alone & weights.keys()  # an update frees gradients
    made = {name: problem.kept_bytes(problem.graph.by_name[name])[1] for name in freed}
    step = _seconds_to_update(problem, tensors)
    each = step if schedule.asynchronous else 0.0  # after every backward
    differentiable = problem.graph.differentiable
    bytes_of = Footprint(priced, blocks, differentiable, weights, beside, exchange)
    leaving, returning = bytes_of.waits
    return StageCost(
        forward=sum(priced.forward[b] for b in blocks) + leaving,
        backward=sum(priced.backward[b] for b in blocks) + returning + each,
        weight=sum(priced.weight[b] for b in blocks),
        hidden=sum(priced.hidden[b] for b in blocks),
        resident=sum(map(problem.state_bytes, tensors))
        + sum(problem.constant_bytes(priced.cut, blocks).values())
        + stashed * sum(item.nbytes for item in tensors if item.trainable),
        saved=bytes_of.saved,
        left=bytes_of.left,
        forward_more=bytes_of.forward_more,
        backward_more=bytes_of.backward_more,
        input_more=bytes_of.input_more,
        weight_more=bytes_of.weight_more,
        first=bytes_of.first(made),
        step=step - each,
        host=bytes_of.host,
        trained=problem.graph.trains([priced.cut.blocks[b] for b in blocks]),
    )


def exchanged(problem: Problem, priced: Priced, blocks: Sequence[int]) -> Exchanged:
    """The bytes that data ranks exchange for the blocks of a stage."""
    if problem.mesh.replicas == 1 or problem.options.asynchronous:
        return NOTHING
    parts = [priced.cut.blocks[b] for b in blocks]
    level = problem.options.zero if isinstance(problem.options.zero, int) else 0
    trained = _last_uses(problem, parts)
    units = priced.cut.units(part.weights for part in parts) if level == 3 else [0] * len(parts)
    buckets = _buckets(problem, trained, units)
    packed = problem.options.compression is not None  # sent and received, however large
    largest = max((bucket.size for bucket in buckets), default=0)
    return Exchanged(
        level=level,
        made=tuple(sum(item.nbytes for item in items) for items in trained),
        gathered=tuple(map(problem.unit_bytes, parts)) if problem.gathers else (),
        units=units,
        repeats=problem.mesh.pipeline > 1,
        buckets=tuple(buckets),
        gone=tuple(accumulate((bucket.made for bucket in buckets), initial=0)),
        copied=2 * largest if packed else min(problem.bucket, largest),
    )


def _last_uses(problem: Problem, blocks: Sequence[Block]) -> list[list[Parameter]]:
    """By block, the parameters with data replicas whose gradients it completes: those that no
    earlier block reads."""
    shared, seen = [], set[str]()
    for block in blocks:
        names = [name for name in dict.fromkeys(x.name for x in block.tensors) if name not in seen]
        seen.update(names)
        items = (problem.graph.by_name[name] for name in names)
        shared.append([item for item in items if item.trainable and problem.sharers(item) > 1])
    return shared


def _buckets(
    problem: Problem, trained: Sequence[Sequence[Parameter]], units: Sequence[int]
) -> list[Summed]:
    """The buckets of gradients, as in `lower.buckets`, in the order of the backward. A bucket has
    gradients of one unit only."""
    home = {item.name: k for k, items in enumerate(trained) for item in items}
    backward = [(units[k], item) for k, items in enumerate(trained) for item in items][::-1]
    buckets = [
        Summed(
            size=sum(item.summed_nbytes() for item in part),
            block=home[part[-1].name],
            ranks=problem.sharers(part[0]),
            made=sum(item.nbytes for item in part),
        )
        for unit in dict.fromkeys(unit for unit, _ in backward)
        for part in filled((item for at, item in backward if at == unit), problem.bucket)
    ]
    return sorted(buckets, key=lambda bucket: -bucket.block)


def carried(problem: Problem, plan: Plan) -> Iterator[tuple[int, dict[int, bool], fx.Node]]:
    """The values that cross stages, in order of execution: source stage, users, node.

    `users` tells for each stage that reads the value whether the loss depends on it through there.
    """
    assert plan.stages is not None
    priced = problem.under(plan)
    home = {name: j for j, choice in enumerate(plan.stages) for name in choice.blocks}
    stage_of = [home[block.name] for block in priced.cut.blocks]
    for b, block in enumerate(priced.cut.blocks):
        for node in block.outputs:
            users: dict[int, bool] = {}
            for user in node.users:
                j = stage_of[priced.home.get(user, b)]
                if j != stage_of[b]:
                    users[j] = users.get(j, False) or user.name in problem.graph.differentiable
            if users:
                yield stage_of[b], users, node


def _messages(problem: Problem, plan: Plan) -> Iterator[Message]:
    """One message for each value that crosses stages, in order of execution."""
    placement = outline(plan).placement
    for source, users, node in carried(problem, plan):
        returns = node.name in problem.graph.differentiable
        apart = detached(source, users, placement) if returns else ()
        for targets in (tuple(j for j in sorted(users) if j not in apart), apart):
            if targets:
                pairs = [(placement[source], placement[j]) for j in targets]
                seconds = collective.message(problem.mesh, pairs, nbytes_of(node))
                yield Message(
                    source=source,
                    targets=targets,
                    seconds=seconds,
                    gradient=seconds if returns and targets != apart else None,
                    nbytes=nbytes_of(node),
                )
