"""A large model in float64: the same program at fewer tokens and rows.

In float64 the model in one process takes longest of all that is proved. What float64 is to show,
that ranks compute the same function, is seen as well on shorter rows: stages, schedule, pieces and
operators are those of the plan, and only numbers in shapes differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from parcompiler.errors import ParcompilerError
from parcompiler.graph import Graph
from parcompiler.problem import prepared
from parcompiler.symbolic.sizes import sample_at, sizes_of
from parcompiler.verification.reference import Compiled

LARGE = 1e11  # FLOPs of a step that are proved as they are: in float64 about 6 s of a core
ENOUGH = 0.25  # of that: what a larger step is brought down to, if its sizes allow
TOKENS, ROWS = 16, 2  # the fewest; one row alone is computed by other operators than several


@dataclass(frozen=True)
class Shorter:
    """A program's float64 graph at smaller `sizes` (in words); a step of the program itself has so
    many `flops`."""

    graph: Graph
    sizes: str
    flops: float


def shortened(program: Compiled) -> Shorter | None:
    """The graph at sizes where a step has no more than `ENOUGH` FLOPs.

    None: it is not `LARGE`, or the model has other operators there or cannot be captured.
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
    """Whether half of a size is a whole number and not too few."""
    return number % 2 == 0 and number >= 2 * least


def _operators(graph: Graph) -> list[tuple[str, str]]:
    """What the nodes of a graph are called and call."""
    return [(node.name, str(node.target)) for node in graph.fx_graph.nodes]
