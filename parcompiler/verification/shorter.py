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

LARGE = 1e11  # FLOPs of a step that are proved as they are: in float64 about 5 s of a core
TOKENS, ROWS = 32, 2  # the fewest; one row alone is computed by other operators than several


@dataclass(frozen=True)
class Shorter:
    """A program's float64 graph at smaller `sizes` (in words), where a step is so many `times`
    less work."""

    graph: Graph
    sizes: str
    times: float


def shortened(program: Compiled) -> Shorter | None:
    """The graph at sizes where a step is not `LARGE`.

    None: it is small, or the model has other operators at other sizes or cannot be captured there.
    """
    captured, flops = program.captured, program.report().step.flops
    sizes, least = sizes_of(captured), {"batch": ROWS}
    numbers, times = {size.letter: size.now for size in sizes}, 1
    for size in reversed(sizes):  # tokens first, and rows at last
        while flops > LARGE * times and _halves(numbers[size.letter], least.get(size.word, TOKENS)):
            numbers[size.letter] //= 2
            times *= 2
    if times == 1 or captured.recapture is None:
        return None
    options, mesh = program.problem.options, program.problem.mesh
    try:
        again = captured.recapture(sample_at(captured, sizes, numbers))
        graph = prepared(again, options, mesh, torch.float64)
        if _operators(graph) != _operators(prepared(captured, options, mesh, torch.float64)):
            return None
        program.on(graph)
    except ParcompilerError:
        return None
    changed = (size for size in sizes if numbers[size.letter] != size.now)
    words = (f"{size.word} {numbers[size.letter]} for {size.now}" for size in changed)
    return Shorter(graph, ", ".join(words), times)


def _halves(number: int, least: int) -> bool:
    """Whether half of a size is a whole number and not too few."""
    return number % 2 == 0 and number >= 2 * least


def _operators(graph: Graph) -> list[tuple[str, str]]:
    """What the nodes of a graph are called and call."""
    return [(node.name, str(node.target)) for node in graph.fx_graph.nodes]
