"""A large model in float64: the same program at fewer tokens and rows.

The model in one process in float64 is the slowest part of a verification. That ranks compute the
same function can be shown as well on shorter rows: stages, schedule, pieces and operators are those
of the plan, and only sizes differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from parcompiler.errors import ParcompilerError
from parcompiler.graph import Graph
from parcompiler.problem import prepared
from parcompiler.symbolic.sizes import sample_at, sizes_of
from parcompiler.verification.reference import Compiled

LARGE = 1e11  # FLOPs of a step up to which full size is used: in float64 about 6 s of a core
ENOUGH = 0.25  # of that: target for larger steps, if sizes allow
TOKENS, ROWS = 16, 2  # the fewest; a single row is computed by other operators


@dataclass(frozen=True)
class Shorter:
    """A program's float64 graph at smaller `sizes` (in words); `flops` are those of a step at full
    size."""

    graph: Graph
    sizes: str
    flops: float


def shortened(program: Compiled) -> Shorter | None:
    """The graph at sizes where a step has no more than `ENOUGH` FLOPs.

    None if it is not `LARGE`, or the model has other operators there or cannot be captured.
    """
    captured, flops = program.captured, program.report(meshes=False).step.flops
    if flops <= LARGE or captured.recapture is None:
        return None
    sizes, times = sizes_of(captured), 1
    numbers = {size.letter: size.now for size in sizes}
    for size in reversed(sizes):  # tokens first, and rows at last
        least = ROWS if size.word == "batch" else TOKENS
        while flops > ENOUGH * LARGE * times and _halves(numbers[size.letter], least):
            numbers[size.letter] //= 2
            times *= 2
    if times == 1:
        return None
    options, mesh = program.problem.options, program.problem.mesh
    try:
        again = captured.recapture(sample_at(captured, sizes, numbers))
        smaller, whole = (prepared(graph, options, mesh, None) for graph in (again, captured))
        if _operators(smaller) != _operators(whole):
            return None
        graph = prepared(again, options, mesh, torch.float64)
        program.on(graph)
    except ParcompilerError:
        return None
    changed = (size for size in sizes if numbers[size.letter] != size.now)
    words = (f"{size.word} {numbers[size.letter]} for {size.now}" for size in changed)
    return Shorter(graph, ", ".join(words), flops)


def _halves(number: int, least: int) -> bool:
    """Whether a size can be halved and is still at least `least`."""
    return number % 2 == 0 and number >= 2 * least


def _operators(graph: Graph) -> list[tuple[str, str]]:
    """Names and targets of the nodes of a graph."""
    return [(node.name, str(node.target)) for node in graph.fx_graph.nodes]
