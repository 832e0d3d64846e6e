"""The schedule of a plan, by its name or its orders, and the micro-batches in flight under it."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from itertools import pairwise
from statistics import median_low

from parcompiler.errors import PlanError, shown
from parcompiler.instruction import COMPUTE, Kind
from parcompiler.plan import Plan
from parcompiler.schedules import SCHEDULES, build
from parcompiler.schedules.rounds import loops_of_actions, rounds_to_spare
from parcompiler.schedules.schedule import Schedule
from parcompiler.schedules.staleness import waiting
from parcompiler.schedules.vocabulary import spread

Identity = tuple[str | None, tuple[str, ...] | None, int, int, int, str | None]


def planned(plan: Plan) -> Schedule:
    """The order of compute under `plan`, with the head where all ranks share it.

    Raises PlanError as `trunk` does.
    """
    return _planned(*identity(plan))


def trunk(plan: Plan) -> Schedule:
    """The order of compute under `plan` without a head on all ranks.

    Raises PlanError when the schedule is undecided, unknown, or of another size than the plan.
    """
    return _planned(*identity(plan)[:-1], None)


def outline(plan: Plan) -> Schedule:
    """The schedule of a plan for one micro-batch if it has a name, else the whole: enough for the
    placement of the stages and `asynchronous`, without the orders of thousands of micro-batches."""
    name, orders, ranks, _, virtual_stages, _ = identity(plan)
    if orders is None and name in SCHEDULES:
        return build(name, ranks, 1, virtual_stages)
    return trunk(plan)


def held(plan: Plan) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """By rank, the vectors of micro-batches whose activations its stages keep (`Schedule.held`)."""
    return _held(*identity(plan))


def left(plan: Plan) -> int:
    """The most micro-batches that wait for their weight gradients on a stage."""
    return _left(*identity(plan))


def usually_left(plan: Plan) -> tuple[int, ...]:
    """By rank, the micro-batches that wait for their weight gradients on one of its stages after a
    backward for inputs: the median, at least 1."""
    return _usually_left(*identity(plan))


def input_follows_weight(plan: Plan) -> tuple[bool, ...]:
    """By rank, whether a backward for inputs follows one for weights."""
    return _input_follows_weight(*identity(plan))


def identity(plan: Plan) -> Identity:
    """The decisions that fix the order of compute: name, orders, ranks, micro-batches, stages on a
    rank, and the method of a head that all ranks share."""
    choice = plan.vocabulary
    shared = choice is not None and choice.spread and choice.head is not None
    method = choice.method if choice is not None and shared else None
    size = plan.mesh.pipeline, plan.microbatches, plan.virtual_stages
    return plan.schedule, plan.orders, *size, method


@lru_cache(maxsize=256)  # a plan is asked for its schedule again and again
def _planned(
    name: str | None,
    orders: tuple[str, ...] | None,
    ranks: int,
    microbatches: int,
    virtual_stages: int,
    method: str | None,
) -> Schedule:
    """The schedule with this name or these orders, with the head that `method` shares."""
    if method is not None:
        alone = _planned(name, orders, ranks, microbatches, virtual_stages, None)
        return spread(alone, method)
    if name is None:
        message = "the plan leaves 'schedule' undecided"
        raise PlanError(message)
    if orders is None:
        if name not in SCHEDULES:
            message = (
                f"the plan has schedule {shown(name)} without its orders (known by name: "
                f"{', '.join(SCHEDULES)})"
            )
            raise PlanError(message)
        return build(name, ranks, microbatches, virtual_stages)
    schedule = Schedule.parse(name, orders)
    check_size(schedule, ranks, microbatches)
    return schedule


@lru_cache(maxsize=256)
def _shorter(*known: *Identity) -> Schedule:
    """The schedule for fewer micro-batches where each rank has a loop: it begins and ends like that
    of the plan, and holds as much. Else the schedule of the plan."""
    name, orders, ranks, microbatches, virtual_stages, method = known
    rounds = rounds_to_spare(ranks, microbatches) if orders is None else 0
    if rounds:
        less = microbatches - rounds * ranks
        few = _planned(name, orders, ranks, less, virtual_stages, method)
        if loops_of_actions(few.orders) is not None:
            return few
    return _planned(*known)


@lru_cache(maxsize=256)
def _held(*known: *Identity) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Uncached body of `held`."""
    schedule = _shorter(*known)
    return tuple(map(schedule.held, range(schedule.ranks)))


@lru_cache(maxsize=256)
def _left(*known: *Identity) -> int:
    """Uncached body of `left`."""
    schedule = _shorter(*known)
    return max(waiting(schedule.orders[r], j) for j, r in enumerate(schedule.placement))


@lru_cache(maxsize=256)
def _usually_left(*known: *Identity) -> tuple[int, ...]:
    """Uncached body of `usually_left`."""
    medians = []
    for order in _shorter(*known).orders:
        counts, after = Counter[int](), list[int]()
        for action in order:
            if action.kind is Kind.BACKWARD_INPUT:
                counts[action.stage] += 1
                after.append(counts[action.stage])
            elif action.kind is Kind.BACKWARD_WEIGHT:
                counts[action.stage] -= 1
        medians.append(median_low(after) if after else 1)
    return tuple(medians)


def check_size(schedule: Schedule, ranks: int, microbatches: int) -> None:
    """Raise PlanError unless a schedule has this many ranks and micro-batches."""
    size = schedule.ranks, schedule.microbatches
    if size != (ranks, microbatches):
        message = (
            f"the schedule {schedule.name!r} is for {size[0]} ranks and {size[1]} micro-batches, "
            f"the plan has pipeline={ranks} and microbatches={microbatches}"
        )
        raise PlanError(message)


@lru_cache(maxsize=256)
def _input_follows_weight(*known: *Identity) -> tuple[bool, ...]:
    """Uncached body of `input_follows_weight`."""
    kinds = ([x.kind for x in order if x.kind in COMPUTE] for order in _shorter(*known).orders)
    both = Kind.BACKWARD_WEIGHT, Kind.BACKWARD_INPUT
    return tuple(both in pairwise(each) for each in kinds)
