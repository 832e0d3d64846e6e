"""The programme of the shard pass: its answers are those of trying everything."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest

from parcompiler.errors import InfeasibleError
from parcompiler.passes.shard.ilp import (
    BlockBytes,
    ChoiceEvent,
    Decision,
    Edge,
    EdgeEnd,
    EdgeEvent,
    Event,
    Programme,
    ProgrammeSolver,
    SharedCost,
    bytes_of,
    decide,
    due,
    pair_of,
)
from parcompiler.spmd import I, P, R, S

TYPES = (R, I, P, S(0), S(1))


def is_possible(data: Programme, choices: tuple[int, ...]) -> bool:
    """Whether every edge leads through a pair that is allowed, and memory suffices."""
    leads = all(pair_of(edge, choices) in edge.allowed for edge in data.edges)
    if data.budget is None:
        return leads
    again = []
    for block in data.blocks:
        shared = sum(cost.nbytes for cost in filter(due(data, choices), block.shared))
        own = sum(nbytes[choices[decision]] for decision, nbytes in block.decisions)
        again.append(data.weight * (own + shared))
    return leads and bytes_of(data, choices) + max(again, default=0.0) <= data.budget


def seconds_of(data: Programme, choices: tuple[int, ...]) -> float:
    """The objective."""
    decided = (x.seconds[s] for x, s in zip(data.decisions, choices, strict=True))
    return sum(decided) + sum(cost.seconds for cost in filter(due(data, choices), data.shared))


def variables(data: Programme) -> int:
    return len(ProgrammeSolver(data).model.variables)


def tried(data: Programme) -> float | None:
    """The fewest seconds of all choices that are possible; None if none is."""
    every = itertools.product(*(range(len(group.seconds)) for group in data.decisions))
    possible = [seconds_of(data, choices) for choices in every if is_possible(data, choices)]
    return min(possible, default=None)


def some(seed: int) -> Programme:
    """A random programme: a chain or a net of a few groups, with shared conversions."""
    chance = random.Random(seed)
    groups = tuple(
        Decision(
            f"g{number}",
            tuple(chance.randrange(20) * 1e-6 for _ in range(count)),
            tuple(chance.randrange(20) * 1e3 for _ in range(count)),
        )
        for number, count in enumerate(chance.choices((1, 2, 3, 4), k=chance.randint(2, 6)))
    )

    def end(number: int) -> EdgeEnd:
        return EdgeEnd(number, tuple(chance.choice(TYPES) for _ in groups[number].seconds))

    edges: list[Edge] = []
    charges: list[SharedCost] = []
    for source in range(len(groups) - 1):
        start = end(source)
        readers = chance.sample(range(source + 1, len(groups)), chance.randint(1, 2)
                                if source + 2 < len(groups) else 1)  # fmt: skip
        own = range(len(edges), len(edges) + len(readers))
        for reader in readers:
            target = end(reader)
            pairs = {(a, t) for a in start.types for t in target.types}
            allowed = {pair for pair in sorted(pairs, key=str) if chance.random() < 0.8}
            allowed |= {(a, t) for a, t in pairs if a == t}
            edges.append(Edge(f"{source}.{reader}", start, target, frozenset(allowed)))
        for pair in itertools.product(TYPES, TYPES):
            events: list[Event] = [EdgeEvent(k, frozenset({pair})) for k in own]
            if chance.random() < 0.2:
                events.append(ChoiceEvent(source, frozenset({0})))
            if pair[0] != pair[1]:
                charge = chance.randrange(9) * 1e-6, chance.randrange(9) * 1e3
                charges.append(SharedCost(tuple(events), *charge))
    budget = chance.choice((None, None, 40e3, 60e3, 90e3))
    blocks = []
    for _ in range(chance.choice((0, 1, 3))):  # that run again
        number = chance.randrange(len(groups))
        sizes = tuple(chance.randrange(40) * 1e3 for _ in groups[number].seconds)
        held = tuple(dataclasses.replace(x, seconds=0.0) for x in chance.sample(charges, 3))
        blocks.append(BlockBytes(((number, sizes),), held))
    weight = chance.choice((1.0, 1.5))
    return Programme(groups, tuple(edges), tuple(charges), budget, tuple(blocks), weight)


def check(seed: int) -> None:
    """The answer to a random programme is that of trying everything."""
    data = some(seed)
    best = tried(data)
    if best is None:
        with pytest.raises(InfeasibleError):
            decide(data)
        return
    answer = decide(data)
    assert is_possible(data, answer.choices), seed
    assert seconds_of(data, answer.choices) == pytest.approx(best, rel=1e-9, abs=1e-12), seed
    assert answer.solution.objective == pytest.approx(best, rel=1e-7, abs=1e-12)
    assert answer.solution.status == "optimal"
    assert answer.nbytes == bytes_of(data, answer.choices)
    free = tried(dataclasses.replace(data, budget=None))
    assert answer.is_short or best == free


@pytest.mark.parametrize("part", range(8))
def test_the_objective_is_that_of_trying_everything(part: int) -> None:
    for seed in range(40 * part, 40 * part + 40):
        check(seed)


@pytest.mark.parametrize("seed", [362, 1400, 3625])
def test_values_that_blocks_share_while_they_run_again_take_memory(seed: int) -> None:
    check(seed)


@pytest.mark.parametrize("seed", [seed for seed in range(60) if some(seed).budget is not None])
def test_a_part_of_the_memory_is_less_memory(seed: int) -> None:
    data = some(seed)
    assert data.budget is not None
    solver = ProgrammeSolver(data)
    for part in (0.5, 0.8, 1.0, 0.5):
        best = tried(dataclasses.replace(data, budget=part * data.budget))
        if best is None:
            with pytest.raises(InfeasibleError):
                solver.within(part)
        else:
            found = solver.within(part)
            assert seconds_of(data, found.choices) == pytest.approx(best, rel=1e-9, abs=1e-12)


def test_random_programmes_are_of_every_sort() -> None:
    programmes = [some(seed) for seed in range(320)]
    found = [tried(data) for data in programmes]
    assert sum(best is None for best in found) > 10
    for limits in ("budget", "blocks"):
        without: dict[str, Any] = {"budget": None} if limits == "budget" else {"blocks": ()}
        limited = [
            data
            for data, best in zip(programmes, found, strict=True)
            if best is not None
            and data.budget is not None
            and best > (tried(dataclasses.replace(data, **without)) or 0)
        ]
        assert len(limited) > 10


def test_an_edge_with_one_type_at_an_end_has_no_variables() -> None:
    wide, narrow = (R, S(0), S(1)), (R,)
    every = frozenset(itertools.product(wide, wide))
    groups = tuple(Decision(f"g{k}", (0.0,) * 3, (0.0,) * 3) for k in range(2))
    edge = Edge("k", EdgeEnd(0, wide), EdgeEnd(1, wide), every)
    assert variables(Programme(groups, (edge,), ())) == 6 + 9
    constant = Edge("k", EdgeEnd(0, wide), EdgeEnd(1, narrow * 3), every)
    assert variables(Programme(groups, (constant,), ())) == 6


def test_a_conversion_that_two_readers_share_is_paid_once() -> None:
    groups = (Decision("a", (0.0,), (0.0,)), *(Decision(f"b{k}", (0.0,), (0.0,)) for k in range(2)))
    edges = tuple(
        Edge(f"k{k}", EdgeEnd(0, (P,)), EdgeEnd(k + 1, (I,)), frozenset({(P, I)})) for k in range(2)
    )
    events = tuple(EdgeEvent(k, frozenset({(P, I)})) for k in range(2))
    assert decide(Programme(groups, edges, (SharedCost(events, 1.0),))).solution.objective == 1.0


def test_the_least_memory_is_found_where_nothing_fits() -> None:
    groups = (Decision("a", (1.0, 2.0, 3.0), (30e6, 10e6, 20e6)),)
    data = Programme(groups, (), (), budget=5e6)
    with pytest.raises(InfeasibleError):
        decide(data)
    answer = ProgrammeSolver(data).least
    assert answer.choices == (1,)
    assert answer.nbytes == 10e6
