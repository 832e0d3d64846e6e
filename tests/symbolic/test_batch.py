"""A problem at other rows is that of a model captured at these rows, as it was captured before."""

import pytest
import torch
from torch import nn

from parcompiler.capture import capture
from parcompiler.capture.narrow import capture_in
from parcompiler.capture.read import fingerprint
from parcompiler.graph import Graph
from parcompiler.mesh import Mesh
from parcompiler.options import Options
from parcompiler.problem import Problem, prepared
from parcompiler.symbolic.sizes import Unfit, batch_of, resized
from tests.symbolic.models import made


def problem_of(rows: int, precision: str | None, *, training: bool) -> Problem:
    """A GPT, with a dropout, captured at so many rows."""
    options = Options(4, precision=precision)
    model, inputs = made("gpt", rows)
    model.train(training)
    narrow = options.narrow
    graph = capture(model, inputs) if narrow is None else capture_in(narrow, model, inputs)
    model.train()  # whatever becomes of it later
    mesh = Mesh(pipeline=2, device="h100")
    return Problem(prepared(graph, options, mesh, options.dtype), mesh, options)


def digest(graph: Graph) -> str:
    """Operators, numbers and shapes, node for node."""
    return fingerprint(graph.fx_graph, {item.node: item.name for item in graph.parameters})


@pytest.mark.parametrize(
    ("precision", "captured", "rows", "training"),
    [(None, 1, 4, True), (None, 4, 1, False), ("bf16", 2, 6, False), ("fp64", 2, 3, True)],
)
def test_all_nodes_and_costs_are_those_of_a_capture(
    precision: str | None, captured: int, rows: int, training: bool
) -> None:
    first = problem_of(captured, precision, training=training)
    again = resized(first, [batch_of(first.graph)], {"b": rows})
    fresh = problem_of(rows, precision, training=training)
    assert digest(again.graph) == digest(fresh.graph) != digest(first.graph)
    assert again.graph.inputs == fresh.graph.inputs
    for level in again.levels:
        assert again.priced(level).costs == fresh.priced(level).costs
        assert again.priced(level).saved == fresh.priced(level).saved


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
