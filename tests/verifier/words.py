"""Legal programs with the vocabulary on all ranks: a small GPT under plans written by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise

import torch

from parcompiler.capture import capture
from parcompiler.capture.blocks import Cut, cut
from parcompiler.graph import Graph
from parcompiler.lower import Lowered, lower
from parcompiler.models import gpt
from parcompiler.plan import Plan, Shape, StageChoice, VocabularyChoice
from parcompiler.schedules import build
from parcompiler.vocabulary import find, spread
from tests.verifier.programs import even, planless

METHODS = ("vocab-2", "vocab-1", "naive", "interlaced")


@cache
def captured(tied: bool) -> Graph:
    """Four blocks: positions, two layers, the last norm."""
    sizes = gpt.Config(layers=2, heads=2, hidden=8, vocabulary=32, sequence=4, tied=tied)
    tokens = torch.zeros(2, 4, dtype=torch.long)
    return capture(gpt.GPT(sizes), {"tokens": tokens, "labels": tokens})


@cache
def trunk(tied: bool, ranks: int) -> tuple[VocabularyChoice, Graph, Cut]:
    """What is on all ranks, and the blocks that are left."""
    found = find(captured(tied), ranks)
    assert found.head is not None
    choice = VocabularyChoice("", found.tables, found.head.weight, found.kept)
    graph = spread(captured(tied), choice, ranks)
    return choice, graph, cut(graph, 1)


@cache
def words(
    method: str,
    ranks: int = 2,
    schedule: str = "1f1b",
    microbatches: int = 3,
    virtual_stages: int = 1,
    data: int = 1,
    *,
    tied: bool = False,
) -> Lowered:
    """The program of the GPT."""
    choice, graph, parts = trunk(tied, ranks)
    names = [block.name for block in parts.blocks]
    ends = [0, *accumulate(even(ranks * virtual_stages, len(names)))]
    placement = build(schedule, ranks, microbatches, virtual_stages).placement
    stages = [
        StageChoice(tuple(names[a:b]), rank)
        for (a, b), rank in zip(pairwise(ends), placement, strict=True)
    ]
    plan = Plan(
        "gpt",
        "",
        Shape(pipeline=ranks, data=data),
        microbatches,
        schedule=schedule,
        virtual_stages=virtual_stages,
        granularity=1,
        stages=tuple(stages),
        vocabulary=replace(choice, method=method),
    )
    return planless(lower(graph, plan, parts))
