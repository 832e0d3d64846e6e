"""Find the order of compute on every rank with the shortest step, for given seconds and bytes.

Given       f[j], b[j], w[j]   seconds of forward, input backward, weight backward of stage j
            c[x], g[x]         seconds of each message x between ranks, and of its gradient
            s[j], L[r]         bytes of a micro-batch on stage j; bytes that rank r has for them
            schedules          known ones to start from; they say which rank has which stage
Decide      the order of F[j,i], I[j,i], W[j,i] on each rank
Minimize    the end of the last action
Subject to  a rank does one thing at once, a link carries one message at once      `timing`
            F[j,i] waits for the values, I[j,i] for the gradients that it needs    `timing`
            micro-batches in flight take no more than L[r]                         `has_room`

[1] The best of the given schedules are annealed, and the best result once more (`anneal`). [2] The
result is mostly optimal: often simple bounds prove it (`bounds`), else CP-SAT tries to prove it or
to find a better order (`programme`). [3] Backwards in two parts are merged where that costs nothing
(`merge`). All orders are judged by `timing`, whose arithmetic is the simulator's, so that the
result is never slower than a given schedule.

Ties: the first of the best given schedules wins unless an order is strictly shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parcompiler.errors import InfeasibleError, InputError
from parcompiler.passes.search.anneal import Walked, anneal
from parcompiler.passes.search.bounds import simple_bound
from parcompiler.passes.search.merge import merged
from parcompiler.passes.search.programme import prove
from parcompiler.passes.search.task import SearchTask, Word
from parcompiler.schedules import Schedule
from parcompiler.solver import Status, relative_gap
from parcompiler.timeline import Message, StageCost, timing

EFFORT = 10.0  # limit of the search, about in seconds of one core
ACTIONS = 1_000_000  # actions to anneal per unit of effort
SOLVER = 0.1  # CP-SAT's deterministic units per unit of effort
PROVEN = 1e-6  # relative gap that counts as none: CP-SAT counts in 1/2**24 of the step
NAMED = 2  # given schedules to try on each placement, at most


@dataclass(frozen=True, slots=True)
class SearchResult:
    """A schedule, and how good it is.

    `bound` is a lower bound on the seconds of every order with one of the given placements.
    """

    schedule: Schedule
    step_time: float
    bound: float
    status: Status


@dataclass(slots=True)
class _Incumbent:
    """The shortest order so far: a given schedule, or words."""

    step_time: float = float("inf")
    schedule: Schedule | None = None
    words: tuple[SearchTask, Sequence[Word]] | None = None

    def offer(self, task: SearchTask, walked: Walked) -> None:
        """Take words when they are strictly shorter."""
        if walked.step_time < self.step_time:
            self.step_time, self.words = walked.step_time, (task, walked.words)


def search(
    start: Sequence[Schedule],
    costs: Sequence[StageCost],
    messages: Sequence[Message],
    limits: Sequence[float],
    effort: float = EFFORT,
) -> SearchResult:
    """The shortest schedule found with the stages and placements of the schedules in `start`.

    Args:
        start: schedules of the same stages, ranks and micro-batches; those that do not fit into
            the memory only give their placement.
        costs: seconds and bytes of one micro-batch on each stage.
        messages: the values between stages.
        limits: bytes of memory of each rank; may be infinite.
        effort: limit of the search, in units of about a second of one core.

    Raises:
        InfeasibleError: no order fits into the memory. Says the least that one would need.
        InputError: nothing to start from, or data of other sizes.
    """
    _check(start, limits)
    placements = dict.fromkeys(schedule.placement for schedule in start)
    inputs = tuple(costs), tuple(messages), tuple(limits), start[0].microbatches
    each = [SearchTask(placement, *inputs) for placement in placements]
    tasks = [task for task in each if not _lacking(task)]
    if not tasks:
        raise _refusal(each[0])
    best = _best_given(start, tasks)
    bounds = [_improve(task, start, best, effort / len(tasks)) for task in tasks]
    schedule = best.schedule if best.words is None else merged(*best.words)
    if schedule is None:
        raise _refusal(tasks[0])
    searched = Schedule("search", schedule.placement, schedule.orders)
    step_time = timing(searched, costs, messages).step_time
    bound = min(step_time, *bounds)
    status: Status = "optimal" if relative_gap(step_time, bound) <= PROVEN else "feasible"
    return SearchResult(searched, step_time, bound, status)


def _check(start: Sequence[Schedule], limits: Sequence[float]) -> None:
    """Raise InputError unless all schedules are of one size, that of the limits."""
    if not start:
        message = "a search needs a schedule to start from (0 given)"
        raise InputError(message)
    sizes = {(len(s.placement), s.ranks, s.microbatches) for s in start}
    if len(sizes) > 1 or start[0].ranks != len(limits):
        ranks = ", ".join(f"{s.name}: {s.ranks} ranks, {s.microbatches}" for s in start)
        message = (
            f"all schedules of a search have the same stages, ranks and micro-batches ({ranks}), "
            f"and each rank has a memory limit ({len(limits)} given)"
        )
        raise InputError(message)


def _best_given(start: Sequence[Schedule], tasks: Sequence[SearchTask]) -> _Incumbent:
    """The shortest given schedule that fits in memory."""
    best = _Incumbent()
    for task in tasks:
        for schedule in start:
            if schedule.placement == task.placement:
                timed = timing(schedule, task.costs, task.messages)
                fits = all(a <= b for a, b in zip(timed.peak_memory, task.limits, strict=True))
                if fits and timed.step_time < best.step_time:
                    best.step_time, best.schedule = timed.step_time, schedule
    return best


def _improve(task: SearchTask, start: Sequence[Schedule], best: _Incumbent, effort: float) -> float:
    """Offer better schedules of one placement; returns a lower bound on the seconds of all of them.

    Half of the effort is for all starts, the other half for the best result.
    """
    bound = simple_bound(task)
    starts = _starts(task, start)
    walked: Walked | None = None
    for _ in range(2):
        walked = _shorter(walked, _walk(task, starts, bound, effort / 2))
        if walked is None:
            return bound
        best.offer(task, walked)
        if relative_gap(walked.step_time, bound) <= PROVEN:
            return bound
        words, proven = prove(task, walked, effort * SOLVER / 2)
        bound = max(bound, proven)
        if words is not None and task.fits(words):
            walked = _shorter(walked, Walked(task.step_time(words), tuple(words)))
            assert walked is not None
            best.offer(task, walked)
        if relative_gap(walked.step_time, bound) <= PROVEN:
            return bound
        starts = [list(walked.words)]
    return bound


def _walk(
    task: SearchTask, starts: Sequence[Sequence[Word]], bound: float, effort: float
) -> Walked | None:
    """The best result of annealing the starts one by one, until one reaches the bound."""
    steps = int(effort * ACTIONS / len(starts) / sum(map(len, starts[0])))
    best: Walked | None = None
    for words in starts:
        best = _shorter(best, anneal(task, words, steps, bound))
        if best is not None and relative_gap(best.step_time, bound) <= PROVEN:
            break
    return best


def _shorter(one: Walked | None, other: Walked | None) -> Walked | None:
    """The shorter of two, the first of equals."""
    if one is None or other is None:
        return one or other
    return other if other.step_time < one.step_time else one


def _starts(task: SearchTask, start: Sequence[Schedule]) -> list[list[Word]]:
    """The orders to anneal: the shortest of the given schedules that fit, or, where none does, one
    micro-batch after the other."""
    candidates = [task.words(s) for s in start if s.placement == task.placement]
    fitting = [words for words in candidates if task.has_rooms(words)]
    return sorted(fitting or [task.one_at_a_time()], key=task.step_time)[:NAMED]


def _lacking(task: SearchTask) -> bool:
    """Whether one micro-batch alone exceeds the memory of a rank."""
    return any(need > limit for need, limit in zip(_least(task), task.limits, strict=True))


def _least(task: SearchTask) -> tuple[int, ...]:
    """By rank, resident bytes and those of one micro-batch in flight."""
    return tuple(
        size + sum(task.sizes[j] for j, at in enumerate(task.placement) if at == rank)
        for rank, size in enumerate(task.resident)
    )


def _refusal(task: SearchTask) -> InfeasibleError:
    """The error when no order fits, about the rank that lacks most."""
    words = task.one_at_a_time()
    least = _least(task) if _lacking(task) else task.peaks(words)
    rank = max(range(len(least)), key=lambda r: least[r] - task.limits[r])
    message = (
        f"no order of compute fits into the memory: with one micro-batch in flight rank {rank} "
        f"needs {least[rank]:,} bytes, {task.resident[rank]:,} of them for its parameters, and it "
        f"has {task.limits[rank]:,.0f}: use more ranks or smaller micro-batches"
    )
    return InfeasibleError(message)
