"""Agendas for CP-SAT: the same makespan as trying all orders, and a word for every refusal."""

import itertools
import random

import pytest

from parcompiler.errors import InfeasibleError
from parcompiler.solver import Agenda, UndecidedError, agree


def shop(seed: int, jobs: int) -> tuple[Agenda, list[tuple[int, int]], int]:
    """Each job goes over two machines; so much of it is stored in between."""
    chance = random.Random(seed)
    agenda = Agenda(horizon=100)
    pairs = []
    for i in range(jobs):
        first = agenda.task(f"a{i}", chance.randint(1, 5))
        second = agenda.task(f"b{i}", chance.randint(1, 5))
        agenda.after(first, second)
        pairs.append((first, second))
    agenda.machines += [[first for first, _ in pairs], [second for _, second in pairs]]
    together = chance.randint(1, jobs)
    agenda.store(together, [(first, second, 1) for first, second in pairs])
    return agenda, pairs, together


def by_hand(
    agenda: Agenda, pairs: list[tuple[int, int]], together: int, orders: list[tuple[int, ...]]
) -> int:
    """The makespan when the machines take the jobs in these orders; 1000 when none is possible."""
    ends: dict[int, int] = {}
    free, done = [0, 0], [0, 0]
    while done != [len(pairs)] * 2:
        progress = False
        for machine in (0, 1):
            if done[machine] == len(pairs):
                continue
            job = orders[machine][done[machine]]
            task = pairs[job][machine]
            begin = free[machine]
            if machine == 0 and done[0] >= together:
                given = sorted(ends[pairs[j][1]] for j in orders[0] if pairs[j][1] in ends)
                if len(given) <= done[0] - together:
                    continue
                begin = max(begin, given[done[0] - together])
            if machine == 1:
                if pairs[job][0] not in ends:
                    continue
                begin = max(begin, ends[pairs[job][0]])
            ends[task] = free[machine] = begin + agenda.durations[task]
            done[machine] += 1
            progress = True
        if not progress:
            return 1000
    return max(ends.values())


@pytest.mark.parametrize("seed", range(20))
def test_all_orders_by_hand_give_the_same(seed: int) -> None:
    agenda, pairs, together = shop(seed, 4)
    permutations = list(itertools.permutations(range(4)))
    least = min(
        by_hand(agenda, pairs, together, [a, b]) for a in permutations for b in permutations
    )
    found = agree(agenda)
    assert found.status == "optimal"
    assert found.makespan == found.bound == least
    assert found == agree(agenda)


def test_hints_do_not_change_the_optimum() -> None:
    agenda, *_ = shop(0, 4)
    least = agree(agenda).makespan
    agenda.hints = dict.fromkeys(range(8), 50)
    assert agree(agenda).makespan == least


def test_what_is_impossible_is_refused() -> None:
    agenda = Agenda(horizon=3)
    agenda.machines.append([agenda.task("a", 2), agenda.task("b", 2)])
    with pytest.raises(InfeasibleError, match=r"no begins satisfy the agenda \(2 tasks\)"):
        agree(agenda)


def test_a_limit_too_small_says_so() -> None:
    agenda, *_ = shop(0, 30)
    with pytest.raises(UndecidedError, match="effort=0"):
        agree(agenda, effort=0.0)
