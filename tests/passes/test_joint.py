"""Stages and what runs twice, together: as trying every division with every choice."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import pytest

import parcompiler as pc
from parcompiler.passes.divide import (
    DivisionTask,
    Flow,
    Load,
    StageDivision,
    divide,
    evaluate,
    relaxed,
)
from parcompiler.passes.divide.relaxed import least_slowest_rank
from parcompiler.passes.divide.twice import BlockKind, _solved, cheapest

CASES = 12  # cases in each of the random tests


class Case(NamedTuple):
    loads: list[Load]
    again: list[Load | None]
    flows: list[Flow]
    placement: list[int]
    microbatches: int
    held: list[list[tuple[int, ...]]]
    limits: list[float]

    @property
    def task(self) -> DivisionTask:
        return DivisionTask(self.loads, *self[2:], self.again)

    def under(self, twice: Sequence[bool]) -> list[Load]:
        """The blocks when some of them run twice."""
        rows = zip(twice, self.again, self.loads, strict=True)
        return [other if chosen and other else load for chosen, other, load in rows]

    def objective(self, stage_of: Sequence[int], twice: Sequence[bool]) -> float:
        """Seconds of a step; infinite where it does not fit."""
        _, _, flows, placement, microbatches, held, limits = self
        found = evaluate(self.under(twice), flows, stage_of, placement, microbatches, held)
        fits = all(size <= limit for size, limit in zip(found.memory, limits, strict=True))
        return found.objective if fits else math.inf


def brute_force(case: Case) -> float:
    """The least objective of all divisions with all choices; infinite when none fits."""
    stages = range(len(case.placement))
    best = math.inf
    choices = [(False,) if other is None else (False, True) for other in case.again]
    for stage_of in itertools.product(stages, repeat=len(case.loads)):
        forward = all(stage_of[f.producer] <= stage_of[q] for f in case.flows for q in f.consumers)
        if forward and set(stage_of) == set(stages):
            found = (case.objective(stage_of, twice) for twice in itertools.product(*choices))
            best = min(best, *found)
    return best


def random_case(rng: random.Random) -> Case:
    """Few blocks, of which some are alike; a chain or any graph; one or two stages on a rank."""
    each = rng.choice((1, 1, 2))
    ranks = rng.randint(1, 3 if each == 1 else 2)
    blocks = rng.randint(ranks * each, 5)
    kinds = [_kind(rng) for _ in range(rng.randint(1, blocks))]
    loads, again = map(list, zip(*(rng.choice(kinds) for _ in range(blocks)), strict=True))
    down = list(range(ranks))
    held = [
        [tuple(rng.randint(0, 4) for _ in range(each)) for _ in range(rng.randint(1, each))]
        for _ in down
    ]
    limits = [float(rng.randint(5, 60))] * ranks
    if rng.random() < 0.3:
        limits = [float(rng.randint(5, 60)) for _ in down]
    placement = down if each == 1 else down + rng.choice((down, down[::-1]))
    return Case(loads, again, _flows(rng, blocks), placement, rng.randint(1, 5), held, limits)


def unequal(case: Case, rng: random.Random) -> Case:
    """The same blocks on ranks of unequal speed."""
    slower = [rng.choice((1, 1, 2, 3)) for _ in case.limits]

    def timed(load: Load) -> Load:
        times = tuple(load.seconds * factor for factor in slower)
        return dataclasses.replace(load, seconds=min(times), by_rank=times)

    again = [None if other is None else timed(other) for other in case.again]
    return case._replace(loads=list(map(timed, case.loads)), again=again)


def _kind(rng: random.Random) -> tuple[Load, Load | None]:
    """A block, and what it is when it runs twice."""
    load = Load(rng.randint(1, 9), rng.randint(0, 9), rng.randint(0, 9), (), rng.randint(0, 6))
    if rng.random() < 0.2:
        return load, None
    seconds, resident = load.seconds + rng.randint(0, 4), load.resident + rng.choice((0, 0, 1))
    return load, Load(seconds, resident, rng.randint(0, load.saved), (), rng.randint(0, 12))


def _flows(rng: random.Random, blocks: int) -> list[Flow]:
    """Values from each block to the next, or any."""
    if rng.random() < 0.6 or blocks < 2:
        return [Flow(i, (i + 1,), rng.randint(0, 3), rng.randint(0, 3)) for i in range(blocks - 1)]
    found = []
    for _ in range(rng.randint(0, blocks)):
        producer = rng.randrange(blocks - 1)
        behind = range(producer + 1, blocks)
        consumers = sorted(rng.sample(behind, rng.randint(1, min(2, len(behind)))))
        found.append(Flow(producer, tuple(consumers), rng.randint(0, 3), rng.randint(0, 3)))
    return found


@pytest.mark.parametrize("seed", range(CASES))
def test_no_division_is_better_than_one_in_fractions(seed: int) -> None:
    case = random_case(random.Random(seed))
    least = least_slowest_rank(case.task)
    each = len(case.placement) // len(case.limits)
    total = math.fsum(load.seconds for load in case.loads)
    bound = total / each + (case.microbatches - 1) * least if least < math.inf else math.inf
    assert bound <= brute_force(case) * (1 + 1e-6)


def check(case: Case) -> str:
    """Compare with brute force, which is not reached with several stages on a rank; what the case
    is an example of."""
    wanted, is_exact = brute_force(case), len(case.placement) == len(case.limits)
    try:
        found = divide(case.task, explain=False)
    except pc.InfeasibleError:
        assert wanted == math.inf or not is_exact, case
        return "nothing fits"
    twice = [i in found.twice for i in range(len(case.loads))]
    assert all(case.again[i] is not None for i in found.twice)
    objective = case.objective(found.stage_of, twice)
    assert found.objective == pytest.approx(objective, rel=1e-12)
    assert wanted * (1 - 1e-9) <= objective < math.inf, case
    assert found.bound <= wanted * (1 + 1e-9)
    if is_exact:
        assert objective == pytest.approx(wanted, rel=1e-9), case
        assert found.status == "optimal"
    return "some run twice" if found.twice else "none run twice"


@pytest.mark.parametrize("seed", range(20))
def test_the_best_of_all_divisions_and_choices_is_found(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(CASES):
        check(random_case(rng))


@pytest.mark.parametrize("seed", range(10))
def test_the_best_of_all_divisions_over_unequal_ranks_and_choices_is_found(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(CASES):
        check(unequal(random_case(rng), rng))


def test_the_random_cases_are_of_all_sorts() -> None:
    rng = random.Random(99)
    sorts = Counter(check(random_case(rng)) for _ in range(40))
    assert min(sorts[sort] for sort in ("nothing fits", "some run twice", "none run twice")) >= 3


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(100, 400))
def test_the_best_is_found_in_thousands_of_cases(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(CASES):
        check(random_case(rng))


def by_trying_all(kinds: list[BlockKind], over: list[int]) -> tuple[int, int] | None:
    """Seconds and blocks of the cheapest choice that fits."""
    ranges = [range(1 if kind.again is None else kind.blocks + 1) for kind in kinds]
    fitting = []
    for counts in itertools.product(*ranges):
        if fits(kinds, over, counts):
            seconds = sum(n * (kind.again or 0) for n, kind in zip(counts, kinds, strict=True))
            fitting.append((seconds, sum(counts)))
    return min(fitting, default=None)


def fits(kinds: list[BlockKind], over: list[int], counts: tuple[int, ...]) -> bool:
    """Whether what these blocks free is enough, also while the largest of all computes."""
    pairs = [*zip(kinds, counts, strict=True)]
    once = [kind.moment for kind, n in pairs if n < kind.blocks]
    moment = max(once + [kind.moment_again for kind, n in pairs if n])
    freed = [sum(n * kind.freed[v] for kind, n in pairs) for v in range(len(over))]
    return all(size + moment <= most for size, most in zip(over, freed, strict=True))


def test_the_cheapest_blocks_are_those_of_trying_all() -> None:
    rng = random.Random(0)
    fitting = 0
    for _ in range(200):
        kinds = []
        for _ in range(rng.randint(1, 2)):  # kinds that differ in their moments alone, or not
            again, freed = rng.choice((None, *range(9))), (rng.randint(0, 9), rng.randint(0, 9))
            kinds += [
                BlockKind(rng.randint(1, 3), again, freed, rng.randint(0, 9), rng.randint(0, 15))
                for _ in range(rng.randint(1, 3))
            ]
        rng.shuffle(kinds)
        over = [rng.randint(-20, 20), rng.randint(-20, 20)]
        best = by_trying_all(kinds, over)
        for choice in (cheapest(kinds, over), _solved(kinds, over)):
            assert (choice and (choice.seconds, sum(choice.counts))) == best
            assert choice is None or fits(kinds, over, choice.counts)
        fitting += best is not None
    assert fitting > 50


def test_stages_and_choice_together_are_better_than_one_after_the_other() -> None:
    """The first rank has two micro-batches in flight, and room for 5 of 8 blocks with one."""
    load, again = Load(2.0, 0, 10), Load(3.0, 0, 1)
    case = Case([load] * 8, [again] * 8, [Flow(i, (i + 1,), 0.0) for i in range(7)], [0, 1], 8,
                [[(2,)], [(1,)]], [50.0, 60.0])  # fmt: skip
    found = divide(case.task, explain=False)
    even = case.objective([0] * 4 + [1] * 4, [True, True] + [False] * 6)
    shifted = case.objective([0] * 2 + [1] * 6, [False] * 8)
    assert found.stage_of == (0, 0, 0, 1, 1, 1, 1, 1)
    assert len(found.twice) == 1
    assert found.objective < min(even, shifted) < math.inf
    dear = divide(case._replace(again=[Load(20.0, 0, 1)] * 8).task, explain=False)
    assert (dear.stage_of, dear.twice) == ((0, 0, 1, 1, 1, 1, 1, 1), frozenset())


def many(limit: float, each: int = 1, blocks: int = 128, ranks: int = 16) -> StageDivision:
    """Layers of one kind between an embedding and a head."""
    layer, again = Load(3.0, 3200, 900, (), 400), Load(4.0, 3200, 33, (), 1300)
    loads = [Load(0.2, 4000, 10, (), 10), *[layer] * (blocks - 2), Load(4.0, 4000, 500, (), 2000)]
    flows = [Flow(i, (i + 1,), 0.01, 33) for i in range(blocks - 1)]
    twice = [None, *[again] * (blocks - 2), None]
    placement = [*range(ranks)] * each
    held = [[(ranks - r,) * each] for r in range(ranks)]
    task = DivisionTask(loads, flows, placement, 64, held, [limit] * ranks, twice)
    return divide(task, explain=False)


@pytest.mark.parametrize("limit", [140e3, 80e3, 36e3])
def test_126_layers_on_16_stages_take_a_moment(limit: float) -> None:
    begin = time.process_time()
    found = many(limit)
    assert time.process_time() - begin < 2
    assert found.status == "optimal"
    assert bool(found.twice) == (limit < 140e3)


def test_what_the_solver_is_not_asked_about_has_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [random_case(random.Random(seed)).task for seed in range(200)]
    with monkeypatch.context() as patch:
        patch.setattr(relaxed, "solve", lambda model: pytest.fail("it was asked"))
        large = [task for task in cases if relaxed._is_too_large(task)]
        assert all(least_slowest_rank(task) == math.inf for task in large)
    monkeypatch.setattr(relaxed, "_is_too_large", lambda task: False)
    none = [task for task in cases if least_slowest_rank(task) == math.inf]
    assert len(none) >= len(large) > len(none) / 2
    assert all(task in none for task in large)
