"""A stupid evaluator: communication is free and holds nobody, ranks wait for barriers alone."""

from collections.abc import Iterator

from parcompiler.instruction import BACKWARDS, HEAD, Kind
from parcompiler.schedules import Action, Schedule
from parcompiler.schedules.action import NOWHERE

Done = tuple[Kind, int, int]


def step_time(
    schedule: Schedule, method: str, f: float, b: float, s: float, t: float, w: float = 0.0
) -> float:
    """Seconds of a step; f, b and w are those of all stages of a rank. Fails where ranks wait."""
    share = len(schedule.placement) // schedule.ranks
    seconds = {
        Kind.FORWARD: f / share,
        Kind.BACKWARD: b / share,
        Kind.BACKWARD_INPUT: (b - w) / share,
        Kind.BACKWARD_WEIGHT: w / share,
        Kind.S: s,
        Kind.NORMALIZE: 0.0,
        Kind.T: t,
    }
    ends: dict[Done, list[float]] = {}
    now, left = [0.0] * schedule.ranks, [list(order) for order in schedule.orders]
    while any(left):
        before = sum(map(len, left))
        for rank, order in enumerate(left):
            while order and _come(order[0], schedule, method, ends):
                action = order.pop(0)
                needs = _needs(action, len(schedule.placement) - 1, method)
                begin = max([now[rank], *(max(ends[key]) for key in needs)])
                now[rank] = begin + seconds[action.kind]
                kind = Kind.BACKWARD if action.kind in BACKWARDS else action.kind
                ends.setdefault((kind, *action[1:]), []).append(now[rank])
        assert sum(map(len, left)) < before, f"ranks wait for each other: {left}"
    return max(now)


def _come(action: Action, schedule: Schedule, method: str, ends: dict[Done, list[float]]) -> bool:
    """Whether all that an action needs has ended, on all ranks where all do it."""
    needs = _needs(action, len(schedule.placement) - 1, method)
    wanted = {key: schedule.ranks if key[0] in HEAD else 1 for key in needs}
    return all(len(ends.get(key, ())) == number for key, number in wanted.items())


def _needs(action: Action, last: int, method: str) -> Iterator[Done]:
    """What must have ended before an action."""
    kind, j, i = action
    exact = method in ("naive", "interlaced")
    if kind is Kind.FORWARD and j > 0:
        yield Kind.FORWARD, j - 1, i
    elif kind in BACKWARDS:
        yield Kind.FORWARD, j, i
        if j < last:
            yield Kind.BACKWARD, j + 1, i
        else:
            yield (Kind.S if method == "vocab-2" else Kind.T), NOWHERE, i
    elif kind is Kind.S:
        yield Kind.FORWARD, last, i
    elif kind is Kind.NORMALIZE:
        yield Kind.S, NOWHERE, i
    elif kind is Kind.T:
        yield (Kind.NORMALIZE if exact else Kind.S), NOWHERE, i
