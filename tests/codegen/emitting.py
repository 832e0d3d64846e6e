"""From a model and stages written by hand to the emitted files, past all solvers and costs."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from parcompiler.capture import capture
from parcompiler.capture.blocks import cut
from parcompiler.capture.clean import simplify
from parcompiler.codegen.folder import texts
from parcompiler.graph import Graph
from parcompiler.lower import Lowered, lower
from parcompiler.plan import Plan, Shape, StageChoice, VocabularyChoice
from parcompiler.verifier import verify
from parcompiler.vocabulary import find, spread


def graph_of(model: nn.Module, inputs: Any) -> Graph:
    torch.manual_seed(0)
    return simplify(capture(model, inputs))


def lowered_by(
    graph: Graph,
    stages: Sequence[Sequence[str]],
    *,
    granularity: int = 1,
    microbatches: int = 4,
    sent: Sequence[str] = (),
    schedule: str = "1f1b",
    recompute: Sequence[str] = (),
    tensor: int = 1,
    data: int = 1,
    vocabulary: str = "whole",
) -> Lowered:
    """The program whose stages hold these blocks, one stage a rank.

    With another `vocabulary` than "whole" its layers are on all ranks by that method.
    """
    choice = None
    if vocabulary != "whole":
        choice = spread_choice(graph, vocabulary, len(stages) * tensor)
        graph = spread(graph, choice, len(stages) * tensor)
    plan = Plan(
        model=graph.name,
        fingerprint=graph.fingerprint,
        mesh=Shape(pipeline=len(stages), tensor=tensor, data=data),
        microbatches=microbatches,
        schedule=schedule,
        granularity=granularity,
        recompute=tuple(recompute),
        stages=tuple(StageChoice(tuple(blocks), rank) for rank, blocks in enumerate(stages)),
        vocabulary=choice,
    )
    nodes = [node for node in graph.fx_graph.nodes if node.name in sent]
    lowered = lower(graph, plan, cut(graph, granularity, nodes))
    verify(lowered)
    return lowered


def spread_choice(graph: Graph, method: str, ranks: int) -> VocabularyChoice:
    """All layers of the vocabulary that `ranks` ranks can share."""
    found = find(graph, ranks)
    return VocabularyChoice(method, found.tables, found.head.weight if found.head else None)


def files_of(lowered: Lowered) -> dict[str, str]:
    """Every file that people read, by its name."""
    return texts(lowered, ["cpu"] * lowered.size, "(the report)", standalone=False)
