"""Choose the level of ZeRO (what data ranks share out): the fastest level that fits in memory.

    level   a data rank keeps        exchanged in a step of m micro-batches
    0       everything               gradients: all-reduce, beside the last backward
    1       parts of states          gradients: reduce-scatter there; parameters: all-gather,
                                     beside the next forward
    2       and of gradients         as level 1, but a reduce-scatter beside each of m backwards
    3       and of parameters        for each block and micro-batch, beside the compute of other
                                     blocks: all-gather of its parameters before both its passes,
                                     reduce-scatter of its gradients after them

Rajbhandari et al. 2020, arXiv 1910.02054, sections 5 and 7. Each level takes less memory than the
one before it, and most take longer to exchange. So a level pays where memory would otherwise force
recomputation, a slower schedule, or no plan at all. Level 1 exchanges as many bytes as level 0, and
each data rank updates only its part: it also pays where the update is a large share of the step.
(Level 3 with parameters that stay gathered between micro-batches would be level 2.)

    lean     the plan with the memory of the highest level and no exchange: no plan computes faster
    levels   at which `lean` fits: the lowest whose step is at most MARGIN longer than the shortest
    others   are planned anew if they may be faster than that one's lowered step; `lean` and every
             refusal bound that
    all      plans of a pipeline that were completed are compared by their lowered steps, and so is
             `lean` at its fastest level
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from parcompiler.cost import collective
from parcompiler.errors import InfeasibleError, PlanError
from parcompiler.passes.base import GAIN, MARGIN, Bounding
from parcompiler.passes.estimate import estimate, update_seconds
from parcompiler.passes.exchange import exchanges, judged_step, step_of, tensors
from parcompiler.passes.shard.local import local
from parcompiler.passes.stage import reconsidered
from parcompiler.plan import Plan
from parcompiler.problem import LEVELS, Problem, filled
from parcompiler.schedules.planned import outline


@dataclass(frozen=True, slots=True)
class DataShare:
    """Memory and time of the stages of a plan at a level of ZeRO.

    `parameters`, `gradients` and optimizer `states` are bytes on the rank with most of them,
    `memory` is the peak of any rank, `fits` says whether every rank has enough. `step` is in
    seconds, `exchange` the seconds in which a rank exchanges with its data replicas; `exposed` are
    those of them beside no compute.
    """

    level: int
    parameters: int
    gradients: int
    states: int
    memory: int
    fits: bool
    step: float
    exchange: float
    exposed: float


def weighed(
    problem: Problem,
    plan: Plan,
    complete: Callable[[Plan, float], Plan],
    bound: Bounding,
    most: float = math.inf,
) -> Plan:
    """The plan at the level that it has, or at the level of the shortest step that fits.

    `complete(plan, below)` makes all other decisions, and may raise InfeasibleError if no step is
    below `below` seconds; `bound` is a lower bound on the steps of these plans (see `least_step`).
    Only steps below `most` seconds are wanted. Raises InfeasibleError when nothing fits, or nothing
    is below that.
    """
    if plan.zero is not None or problem.mesh.replicas == 1:
        return complete(plan, most)
    if not problem.zero:
        return complete(dataclasses.replace(plan, zero=0), most)
    at = {level: dataclasses.replace(plan, zero=level) for level in LEVELS}
    lean = complete(plan, most)
    if lean.zero is not None:  # a user's pass decided it
        return lean
    try:
        return _best_level(problem, at, lean, complete, bound, most)
    except PlanError as error:
        if isinstance(error, InfeasibleError):
            raise
        return dataclasses.replace(lean, zero=0)  # an order never ends: the verifier says why


def _best_level(
    problem: Problem,
    at: Mapping[int, Plan],
    lean: Plan,
    complete: Callable[[Plan, float], Plan],
    bound: Bounding,
    most: float,
) -> Plan:
    """The lowest level at which the lean plan takes about as long as at any, or a faster plan."""
    rank_problem = local(problem, lean)
    whole = share_of(rank_problem, lean, 0)
    if whole.fits:  # the highest levels have longer steps than the first
        shared = _is_slow(rank_problem, lean, whole) and share_of(rank_problem, lean, 1).fits
        return dataclasses.replace(lean, zero=int(shared))
    shares = [_share_with_step(rank_problem, lean, level) for level in at]
    fitting = [share for share in shares if share.fits]
    best, tried = None, list[Plan]()
    if fitting:
        fastest = min(fitting, key=lambda share: share.step)
        first = next(x for x in fitting if x.step <= fastest.step / (1 - MARGIN))
        tried = [_at_level(problem, lean, x) for x in sorted({first.level, fastest.level})]
        best = judged_step(local(problem, tried[0]), tried[0]), tried[0]
    least, refusal = estimate(rank_problem, lean).step_time, None

    def needed() -> float:
        return min(most, math.inf if best is None else (1 - GAIN) * best[0])

    def is_open(share: DataShare) -> bool:
        """Whether the lean plan may not be the best of a level: it does not fit, or much of its
        exchange is exposed."""
        others = share.level == 3 or problem.mesh.pipeline > 1  # one stage below 3: all are alike
        return not share.fits or (others and share.exposed > GAIN * share.step)

    known = needed()
    open_to = list(filter(is_open, shares))
    bounds = {x.level: bound(at[x.level], known) if least < known else 0.0 for x in open_to}
    floors = {level: max(least, seconds) for level, seconds in bounds.items()}
    for share in sorted(open_to, key=lambda x: (floors[x.level], bounds[x.level], -x.level)):
        below = needed()
        if floors[share.level] >= below and (best or below < math.inf):
            continue
        try:
            trial = complete(at[share.level], below)
        except InfeasibleError as error:
            refusal = refusal or error
            if best or most < math.inf:  # lower levels, with less memory, are not faster
                floors |= {k: max(below, floors[k]) for k in floors if k < share.level}
            continue
        step = judged_step(local(problem, trial), trial)
        tried.append(trial)
        if best is None or step < (1 - GAIN) * best[0]:
            best = step, trial
    if best is None or _lower_bound(problem, best[1]) >= most:
        message = f"no level of ZeRO that fits has a step below {most:.6g} s"
        raise refusal or InfeasibleError(message)
    plan = _at_lowest_level(problem, best[1], min(most, best[0] / (1 - MARGIN)))
    return _judged(problem, [plan, *tried])


def _judged(problem: Problem, plans: Sequence[Plan]) -> Plan:
    """The first plan if its lowered step is at most MARGIN longer than that of any other, else the
    one with the shortest: where much exchange is exposed, estimates are up to 9 % off."""
    steps = [judged_step(local(problem, plan), plan) for plan in plans]
    enough = min(steps) / (1 - MARGIN)
    return plans[0] if steps[0] <= enough else plans[steps.index(min(steps))]


def _at_level(problem: Problem, plan: Plan, level: int) -> Plan:
    """The plan at a level of ZeRO, where the solver's statement about its stages may differ, as
    blocks gather or do not."""
    plan = dataclasses.replace(plan, zero=level)
    return reconsidered(local(problem, plan), plan)


def _at_lowest_level(problem: Problem, plan: Plan, enough: float) -> Plan:
    """The plan at the lowest level at which it fits and its step is at most `enough` seconds."""
    for level in range(plan.zero or 0):
        share = share_of(local(problem, plan), plan, level)
        if share.fits and share.step <= enough:
            return _at_level(problem, plan, level)
    return plan


def _is_slow(problem: Problem, plan: Plan, whole: DataShare) -> bool:
    """Whether sharing out the update would save MARGIN of the step of a plan with everything
    `whole`; no level saves more."""
    first, none = problem.at_zero(1), problem.at_zero(0)
    saved = update_seconds(none, plan) - max(
        sum(map(first.update_seconds, items)) for items in tensors(first, plan)
    )
    late = [max(x.late for x in exchanges(at, plan)) for at in (none, first)]
    return saved + late[0] - late[1] > MARGIN * whole.step


def _share_with_step(problem: Problem, plan: Plan, level: int) -> DataShare:
    """`share_of` a plan whose level is open, with the step of `step_of`."""
    share = share_of(problem, plan, level)
    if level < 3 or not share.fits:
        return share
    step = step_of(problem.at_zero(level), dataclasses.replace(plan, zero=level))
    return dataclasses.replace(share, step=step, exposed=share.exposed + step - share.step)


def _lower_bound(problem: Problem, plan: Plan) -> float:
    """Lower bound on a plan's step, in seconds: its compute, and the exchange of the mean rank."""
    rank_problem = local(problem, plan)
    return estimate(rank_problem, plan).step_time + least_exchange(rank_problem, plan)


def least_exchange(problem: Problem, plan: Plan, *, again: bool = True) -> float:
    """Lower bound on the seconds of `exchanges` after the last compute if stages are even, at the
    level of `problem`, which is that of a rank. 0 at level 3, whose gathers and scatters are part
    of the seconds of blocks. With `again`, blocks may be recomputed in the backward, which hides
    more. It is False where the bound is added to a step without recomputation, which would take as
    many seconds as it hides."""
    mesh, level, m = problem.mesh, problem.zero, plan.microbatches
    if mesh.replicas == 1 or problem.options.asynchronous or level == 3:
        return 0.0
    priced = problem.priced(problem.levels[0])
    forward, backward = (sum(x) / mesh.pipeline for x in (priced.forward, priced.backward))
    action = "reduce-scatter" if level else "all-reduce"
    ranks = mesh.grid.replicas([0])
    key = "summed", problem.bucket, problem.options.data_updates, mesh.expert > 1
    sizes = problem.graph.once(key, lambda: _bucket_counts(problem)).items()
    each = (number * collective.joined(mesh, action, size, ranks) for size, number in sizes)
    sums = sum(each) / mesh.pipeline
    # the first rank ends with the first of its stages, whose blocks may run twice
    late = max(0.0, sums - forward - backward) * mesh.pipeline / len(outline(plan).placement)
    if level == 2:
        late += (m - 1) * max(0.0, sums - (1 + again) * forward - backward)
    return late


def _bucket_counts(problem: Problem) -> Counter[int]:
    """The number of buckets that all data ranks sum, by their bytes, without those of a vocabulary
    on all ranks."""
    shared = problem.graph.vocabulary.tensors if problem.graph.vocabulary else ()
    items = (x for x in problem.graph.parameters if x.trainable and x.name not in shared)
    summed = [x for x in items if problem.sharers(x) == problem.mesh.replicas]
    return Counter(map(problem.sent_bytes, filled(summed, problem.bucket)))


def share_of(problem: Problem, plan: Plan, level: int) -> DataShare:
    """Memory and time of the stages of a plan at a level; `problem` is that of a rank."""
    problem = problem.at_zero(level)
    whole, timing = problem.at_zero(0), estimate(problem, plan)
    compute = estimate(whole, plan).step_time - update_seconds(whole, plan)
    kept = [
        [*zip(*map(problem.kept_bytes, items), strict=True)] for items in tensors(problem, plan)
    ]
    sizes = max(([*map(sum, columns)] for columns in kept), key=sum)
    all_exchanges = exchanges(problem, plan)
    step = timing.step_time + max(exchange.late for exchange in all_exchanges)
    return DataShare(
        level=level,
        parameters=sizes[0],
        gradients=sizes[1],
        states=sizes[2],
        memory=max(timing.peak_memory),
        fits=all(map(int.__le__, timing.peak_memory, problem.memories)),
        step=step,
        exchange=max(exchange.seconds for exchange in all_exchanges),
        exposed=step - update_seconds(problem, plan) - compute,
    )
