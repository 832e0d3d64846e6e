"""Instruction lists of few rounds, with the others written again, are those of all rounds."""

import random

import pytest

from parcompiler.schedules import SCHEDULES, build
from parcompiler.schedules.rounds import shortened
from parcompiler.schedules.vocabulary import spread
from parcompiler.schedules.vocabulary_walk import METHODS
from parcompiler.timeline.collectives import SharedLayers
from parcompiler.timeline.embeddings import whole_walk
from parcompiler.timeline.lists import InstructionNames
from parcompiler.timeline.order import StageLink, walked

LOOPED = [name for name in SCHEDULES if name != "gpipe"]


def some_links(rng: random.Random, stages: int) -> list[StageLink]:
    """From each stage to the next, and some that skip stages or return no gradient."""
    links = [StageLink(j, (j + 1,), returns=True) for j in range(stages - 1)]
    for _ in range(rng.choice((0, 1, 3))):
        source = rng.randrange(stages - 1)
        later = range(source + 1, stages)
        targets = tuple(sorted(rng.sample(later, rng.randint(1, len(later)))))
        links.append(StageLink(source, targets, returns=rng.random() < 0.8))
    return links


@pytest.mark.parametrize("method", [None, "embeddings", *METHODS])
@pytest.mark.parametrize("name", LOOPED)
def test_rounds_are_written_as_a_walk_through_all_writes_them(
    name: str, method: str | None
) -> None:
    if name == "pipedream" and method is not None:
        return
    rng = random.Random(f"{name} {method}")
    for ranks, microbatches in ((2, 33), (3, 50), (4, 90)):
        schedule = build(name, ranks, microbatches, 2 if name == "interleaved" else 1)
        last, layers = len(schedule.placement) - 1, None
        if method == "embeddings":
            layers = SharedLayers("vocab-2", (0, last // 2), None)
        elif method is not None:
            layers = SharedLayers(method, rng.choice(((), (0,), (0, last // 2))), last)
            schedule = spread(schedule, method)
        links = some_links(rng, last + 1)
        names = InstructionNames(
            [f"x{k}" for k in range(len(links))], [("e", 0), ("f", 1)], ("h", 0)
        )
        orders, rounds = shortened(schedule.orders)
        short = whole_walk(schedule.placement, orders, links, layers)
        whole = whole_walk(schedule.placement, schedule.orders, links, layers)
        assert names.lists(short, frozenset({1}), rounds) == names.lists(whole, frozenset({1}))


def test_a_walk_that_waits_for_ever_says_nothing_of_more_rounds() -> None:
    orders = build("1f1b", 2, 12).orders
    walk = walked((0, 1), (orders[0], orders[1][::-1]), [StageLink(0, (1,), returns=True)])
    assert walk.stuck
    assert InstructionNames(["x"]).lists(walk, rounds=1) is None
