"""A lifted graph and a lifted model compute the same, in the higher precision throughout."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from parcompiler.capture import capture
from parcompiler.capture.blocks import cut
from parcompiler.capture.clean import simplify
from parcompiler.capture.lift import lift, lifted, lifting
from parcompiler.capture.untouched import untouched
from tests.distributed.models import WIDTH, rows

Step = Callable[[torch.Tensor], torch.Tensor]


class Scaled(nn.Module):
    """A factor between layers that is a buffer in a narrower precision, as in RecurrentGemma."""

    def __init__(self) -> None:
        super().__init__()
        self.between = nn.Module()
        factor = torch.tensor(3.0, dtype=torch.bfloat16)
        self.between.register_buffer("factor", factor, persistent=False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        factor = self.between.get_buffer("factor").type(x.dtype)
        y: torch.Tensor = self.layers[1](x * factor)
        return y.mean()


class Wrapped(nn.Module):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.step(self.linear(x)).mean()


def inner_float(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x.float(), dim=-1, dtype=torch.float32).to(x.dtype)


def integer_division(x: torch.Tensor) -> torch.Tensor:
    return x * (torch.arange(WIDTH) / 3) + torch.sqrt(torch.arange(WIDTH) + 1)


def two_numbers(x: torch.Tensor) -> torch.Tensor:
    return x * torch.where(torch.arange(WIDTH) > 2, 0.5, 2.0)


def two_numbers_that_are_rounded(x: torch.Tensor) -> torch.Tensor:
    return x * torch.where(torch.arange(WIDTH) > 2, 0.1, 2.0)


def mask_and_number(x: torch.Tensor) -> torch.Tensor:
    return x * torch.add(0.3333, torch.arange(WIDTH) > 2, alpha=0.6667)


def constants(x: torch.Tensor) -> torch.Tensor:
    return x * torch.tensor(0.1) + torch.tensor([0.3] * WIDTH, dtype=x.dtype)


def constants_of_other_dtypes(x: torch.Tensor) -> torch.Tensor:
    narrow, wide = torch.as_tensor(0.1, dtype=torch.bfloat16), torch.tensor(0.1, dtype=torch.double)
    x = torch.as_tensor(x, dtype=torch.float32) * narrow
    return x + torch.asarray([0.3] * WIDTH) * wide.to(x.dtype) + torch.scalar_tensor(0.7)


def turned(x: torch.Tensor) -> torch.Tensor:
    angles = torch.polar(torch.ones(4), torch.arange(4) * 0.1).to(torch.complex64)
    return torch.view_as_real(torch.view_as_complex(x.float().view(-1, 4, 2)) * angles)


def by_precision(x: torch.Tensor) -> torch.Tensor:
    eps = 1e-5 if x.dtype == torch.float32 else 1e-3
    kind, x = x.dtype, x.float()
    return ((x - x.mean()) / (x.var() + eps).sqrt()).to(kind) * torch.ones(1, dtype=kind)


def limits(x: torch.Tensor) -> torch.Tensor:
    tiny = torch.finfo(x.dtype).eps
    return x.clamp(-1 + tiny, 1 - tiny) + tiny * 1e4


def sparse(x: torch.Tensor) -> torch.Tensor:
    places, values = torch.arange(len(x)).expand(2, -1), torch.arange(len(x), dtype=x.dtype)
    result: torch.Tensor = torch.sparse.mm(
        torch.sparse_coo_tensor(places, values, (len(x), len(x))), x
    )
    return result


def autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.linear(x, x)


def plain(x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, x)


@pytest.mark.parametrize(
    "step",
    [
        inner_float, integer_division, two_numbers, mask_and_number, constants, turned, limits,
        sparse, autocast, by_precision, constants_of_other_dtypes,
    ],
)  # fmt: skip
def test_a_lifted_graph_is_the_lifted_model(step: Step) -> None:
    model, x = Wrapped(step), rows(WIDTH)
    graph = simplify(lift(capture(model, {"x": x}), torch.float64))
    for node in graph.fx_graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and node.op == "placeholder":
            assert value.dtype == torch.float64
    if step is autocast:
        vars(model)["step"] = plain  # lifting leaves autocast out
    with untouched(model, lifted(torch.float64)), lifting(torch.float64):
        wanted = model(x.double())
    by_name = {p.node: graph.tensors[p.name].double() for p in graph.parameters}
    values = [
        by_name.get(node.name, x.double())
        for node in graph.fx_graph.nodes
        if node.op == "placeholder"
    ]
    (found,) = fx.Interpreter(fx.GraphModule({}, graph.fx_graph)).run(*values)
    assert found.dtype == graph.loss.meta["val"].dtype == torch.float64
    assert torch.equal(found, wanted)


def test_constants_of_a_double_model_keep_their_rounding() -> None:
    model, x = Wrapped(constants).double(), rows(WIDTH).double()
    with lifting(torch.float64, torch.float64):
        found = model(x)
    assert torch.equal(found, model(x))


@pytest.mark.parametrize("step", [integer_division, two_numbers_that_are_rounded, constants])
def test_a_graph_keeps_the_default_dtype_that_it_was_captured_under(step: Step) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        model, x = Wrapped(step), rows(WIDTH).double()
        wanted, graph = model(x), simplify(capture(model, {"x": x}))
    finally:
        torch.set_default_dtype(torch.float32)
    by_name = {p.node: graph.tensors[p.name] for p in graph.parameters}
    nodes = [node for node in graph.fx_graph.nodes if node.op == "placeholder"]
    values = [by_name.get(node.name, x) for node in nodes]
    (found,) = fx.Interpreter(fx.GraphModule({}, graph.fx_graph)).run(*values)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("step", [two_numbers, integer_division])
def test_nodes_keep_their_operands_in_a_lifted_graph(step: Step) -> None:
    """The placements of tensor ranks are those of the operands before."""
    graph = capture(Wrapped(step), {"x": rows(WIDTH)})
    before = {node.name: len(node.all_input_nodes) for node in graph.fx_graph.nodes}
    after = {n.name: len(n.all_input_nodes) for n in lift(graph, torch.float64).fx_graph.nodes}
    assert {name: after[name] for name in before} == before


def test_a_graph_is_lifted_once() -> None:
    graph = capture(Wrapped(plain), {"x": rows(WIDTH)})
    assert lift(graph, torch.float64) is lift(graph, torch.float64)
    assert lift(graph, torch.float64) is not graph
    assert lift(graph, torch.float32) is not lift(graph, torch.float64)


def test_blocks_have_the_same_names_in_a_lifted_graph() -> None:
    graph = simplify(capture(Scaled(), {"x": rows(WIDTH)}))
    wide = simplify(lift(graph, torch.float64))
    names = [[block.name for block in cut(item, 1).blocks] for item in (graph, wide)]
    assert names[0] == names[1] == ["layers.0", "between", "layers.1"]


def test_recorded_values_are_what_runs() -> None:
    graph = lift(capture(Wrapped(turned), {"x": rows(WIDTH)}), torch.float64)
    kinds = {str(n.meta["val"].dtype) for n in graph.fx_graph.nodes if n.op == "call_function"}
    assert kinds == {"torch.float64", "torch.complex128", "torch.int64"}


def test_complex_tensors_are_lifted_as_such() -> None:
    model = nn.Module()
    model.register_buffer("turns", torch.tensor([1j, 2.0]))
    with untouched(model, lifted(torch.float64)):
        assert model.turns.dtype == torch.complex128
    assert model.turns.dtype == torch.complex64


def test_rows_by_experts_are_multiplied_in_float64_too() -> None:
    x, weight, ends = rows(8), rows(8, 8), torch.tensor([1, 1, 4, 4], dtype=torch.int32)
    narrow = F.grouped_mm(x, weight, offs=ends)
    with lifting(torch.float64):
        wide = F.grouped_mm(x.double(), weight.double(), offs=ends)
    wanted = [x[row].double() @ weight[expert].double() for row, expert in enumerate((0, 2, 2, 2))]
    torch.testing.assert_close(wide, torch.stack(wanted), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(narrow, wide.float())
