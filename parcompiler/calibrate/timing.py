"""The time of a call: the median of samples, each of as many calls as make it long enough."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

SAMPLE = 0.002  # s: a clock and a scheduler disturb shorter samples
FEWEST, MOST = 3, 25  # samples


def seconds_of(
    call: Callable[[], object],
    budget: float,
    synchronize: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
    shortest: float = SAMPLE,
    agreed: Callable[[float], float] = lambda seconds: seconds,
) -> float:
    """The median time of `call` in s, from samples that take about `budget` s together.

    A median forgets the samples that another process disturbed. `synchronize` waits for the
    device, so that calls that only start work are timed to its end. A sample takes at least
    `shortest` s, or `budget`. Where several ranks call together, `agreed` makes the time of a
    sample the same on all, so that all call equally often.

    >>> ticks = iter([0, 9, 9, 12, 12, 15])  # something disturbed the first sample
    >>> seconds_of(lambda: None, 1.0, clock=lambda: next(ticks))
    3.0
    """

    def sample(calls: int) -> float:
        start = clock()
        for _ in range(calls):
            call()
        synchronize()
        return clock() - start

    call()  # the first allocates memory and chooses kernels
    synchronize()
    calls, seconds = 1, agreed(sample(1))
    while seconds < min(shortest, budget):
        calls *= 2
        seconds = agreed(sample(calls))
    count = min(MOST, max(FEWEST, int(budget / max(seconds, 1e-9))))
    samples = [seconds, *(sample(calls) for _ in range(count - 1))]
    return statistics.median(samples) / calls
