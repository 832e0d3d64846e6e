"""A whole graph at other rows is the graph that a capture at these rows makes."""

from functools import cache

import pytest
import torch
from torch import nn

from parcompiler.capture import capture
from parcompiler.capture.clean import simplify
from parcompiler.capture.read import fingerprint
from parcompiler.graph import Graph
from parcompiler.mesh import Mesh
from parcompiler.options import Options
from parcompiler.problem import Problem
from parcompiler.symbolic import ResizableGraph, Unfit, batch_of, capture_at, sizes_of
from parcompiler.symbolic.sizes import CaptureAt
from tests.symbolic.models import made


@cache
def graph_of(name: str, rows: int) -> Graph:
    """A model captured at so many rows."""
    return simplify(capture(*made(name, rows)))


def problem_of(graph: Graph) -> Problem:
    """Its blocks on a pipeline, so that both parts of a backward are looked at."""
    return Problem(graph, Mesh(pipeline=2, device="h100"), Options(4))


def at_rows(graph: Graph, rows: int, again: CaptureAt | None = None) -> Graph:
    """A graph at so many rows."""
    return ResizableGraph(problem_of(graph), (batch_of(graph),), again).at({"b": rows})


def digest(graph: Graph) -> str:
    """Operators, numbers and shapes, node for node."""
    return fingerprint(graph.fx_graph, {item.node: item.name for item in graph.parameters})


@pytest.mark.parametrize(("name", "captured", "rows"), [("gpt", 1, 4), ("gpt", 4, 1), ("t5", 2, 6)])
def test_all_nodes_and_costs_are_those_of_a_capture(name: str, captured: int, rows: int) -> None:
    found = at_rows(graph_of(name, captured), rows)
    fresh = graph_of(name, rows)
    assert digest(found) == digest(fresh) != digest(graph_of(name, captured))
    assert found.inputs == fresh.inputs
    check_costs(found, fresh)


@pytest.mark.parametrize("name", ["dlrm", pytest.param("hf", marks=pytest.mark.sweep)])
def test_a_second_capture_says_what_the_graph_leaves_open(name: str) -> None:
    graph = graph_of(name, 2)
    with pytest.raises(Unfit, match=r"may follow from other sizes|may mean the size 2"):
        at_rows(graph, 6)
    again = capture_at(made(name, 2)[0], graph, sizes_of(graph), None)
    check_costs(at_rows(graph, 6, again), graph_of(name, 6))


def check_costs(found: Graph, fresh: Graph) -> None:
    """All blocks have the costs of the other graph's, the memory that they need at once too."""
    one, two = problem_of(found), problem_of(fresh)
    assert one.levels == two.levels
    for level in one.levels:
        assert one.priced(level).costs == two.priced(level).costs
        assert one.priced(level).saved == two.priced(level).saved


def test_inputs_that_share_no_rows_have_no_other_batch() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            moved: torch.Tensor = self.layer(x) + positions
            return moved.mean()

    graph = capture(Positions(), (torch.zeros(2, 3, 4), torch.zeros(3, 4)))
    with pytest.raises(Unfit, match=r"the inputs share no rows \('1' has 3\)"):
        batch_of(graph)
