"""A model captured in 16 bits computes what it says itself, with sums of its loss in float32."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import parcompiler as pc
from parcompiler.capture import capture
from parcompiler.capture.clean import simplify
from parcompiler.capture.loss import WithLoss
from parcompiler.capture.narrow import capture_in, mixed, narrow_batch, narrowed
from parcompiler.capture.untouched import untouched
from parcompiler.graph import Graph
from tests.distributed.models import CLASSES, WIDTH, classes, rows

BF16 = torch.bfloat16


class Norm(nn.Module):
    """As that of Llama: statistics in float32, and back to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Model(nn.Module):
    """A norm behind a residual, a table that stays wide, and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.twin = nn.Linear(WIDTH, CLASSES, bias=False)
        self.twin.weight = self.head.weight
        self.register_buffer("table", torch.linspace(0, 1, WIDTH), persistent=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = x + self.batch_norm(self.linear(self.norm(x)))
        x = x.masked_fill(x > 1e4, torch.finfo(x.dtype).min)
        scores = self.head(x * self.get_buffer("table")) + self.twin(x)
        return F.cross_entropy(scores, labels)


def inputs() -> dict[str, torch.Tensor]:
    return {"x": rows(WIDTH), "labels": classes()}


def run(graph: Graph, batch: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """What the nodes of a graph compute, on its parameters in `dtype` where it says so."""
    by_node = {p.node: graph.tensors[p.name].detach().to(p.dtype) for p in graph.parameters}
    by_node |= {item.node: batch[item.key].to(item.dtype) for item in graph.inputs}
    values = [by_node[n.name] for n in graph.fx_graph.nodes if n.op == "placeholder"]
    (found,) = fx.Interpreter(fx.GraphModule({}, graph.fx_graph)).run(*values)
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_graph_is_the_model_in_16_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, batch = Model(), inputs()
    graph = simplify(capture_in(dtype, model, batch))
    found = run(graph, batch, dtype)
    with mixed(dtype), untouched(model, narrowed(model, dtype)):
        wanted = WithLoss(model, None, in_float32=True)(**narrow_batch(batch, dtype))
    assert found.dtype == graph.loss.meta["val"].dtype == torch.float32
    assert torch.equal(found, wanted)
    exact = model(**batch)
    assert torch.allclose(found, exact, rtol=3e-2)
    assert not torch.equal(found, exact)


def test_parameters_are_in_16_bits_but_those_of_batch_norms() -> None:
    graph = capture_in(BF16, Model(), inputs())
    wide = {p.name for p in graph.parameters if p.dtype == torch.float32}
    assert wide == {
        "table", "batch_norm.weight", "batch_norm.bias", "batch_norm.running_mean",
        "batch_norm.running_var",
    }  # fmt: skip
    assert {item.dtype for item in graph.inputs} == {BF16, torch.int64}


def test_the_model_and_its_tensors_stay_as_they_are() -> None:
    model = Model()
    graph = capture_in(BF16, model, inputs())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert graph.tensors["head.weight"] is model.head.weight
    assert graph.by_name["head.weight"].aliases == ("twin.weight",)
    assert graph.narrow == BF16


def test_what_depends_on_the_dtype_is_that_of_16_bits() -> None:
    graph = capture_in(torch.float16, Model(), inputs())
    (fill,) = [n for n in graph.fx_graph.nodes if "masked_fill" in str(n.target)]
    assert fill.args[2] == -65504.0


def test_a_residual_stays_narrow_beside_a_norm_that_does_not() -> None:
    graph = simplify(capture_in(BF16, Model(), inputs()))
    kinds = {n.name: n.meta["val"].dtype for n in graph.fx_graph.nodes if n.op == "call_function"}
    assert kinds["rsqrt"] == torch.float32
    assert kinds["linear"] == kinds["batch_norm"] == kinds["add_1"] == BF16
    assert kinds["cross_entropy_loss"] == torch.float32


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: F.mse_loss(x, y),
        lambda x, y: F.nll_loss(torch.log_softmax(x, -1), y[:, 0].long().abs() % WIDTH),
        lambda x, y: F.binary_cross_entropy_with_logits(x, torch.sigmoid(y)),
        lambda x, y: nn.SmoothL1Loss()(x, y),
    ],
)
def test_criteria_add_up_in_float32(loss: Callable[..., torch.Tensor]) -> None:
    x, y = rows(WIDTH).to(BF16), rows(WIDTH, seed=3).to(BF16)
    with mixed(BF16):
        found = loss(x, y)
    assert found.dtype == torch.float32


@pytest.mark.parametrize(
    "product",
    [
        lambda a, b: a @ b, lambda a, b: F.linear(a, b), lambda a, b: torch.einsum("ij,jk", a, b),
        lambda a, b: F.scaled_dot_product_attention(a[None], b[None], b[None]),
    ],
)  # fmt: skip
def test_products_of_several_precisions_are_in_16_bits(
    product: Callable[..., torch.Tensor],
) -> None:
    square = torch.randn(WIDTH, WIDTH)
    with mixed(BF16):
        assert product(square, square.to(BF16)).dtype == BF16
        assert product(square, square).dtype == torch.float32


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = Model()
    vars(model)["open"] = (number for number in range(3))
    with pytest.raises(pc.CaptureError, match=r"Model cannot be copied, which another precision"):
        capture_in(BF16, model, inputs())


def test_a_graph_has_the_precision_that_it_was_captured_in() -> None:
    graph = capture(Model(), inputs())
    with pytest.raises(pc.InputError, match=r"captured in \(as it is, asked for: bfloat16\)"):
        pc.compile(graph, pc.Mesh(), precision="bf16")
    narrow = capture_in(BF16, Model(), inputs())
    assert pc.compile(narrow, pc.Mesh(), precision="bf16").plan.precision == "bf16"
    with pytest.raises(pc.InputError, match=r"captured in \(bfloat16, asked for: as it is\)"):
        pc.compile(narrow, pc.Mesh())


def test_a_program_is_captured_again_for_another_precision() -> None:
    program = pc.compile(Model(), pc.Mesh(), inputs())
    narrow = pc.compile(program, pc.Mesh(), precision="fp16")
    assert narrow.captured.narrow == torch.float16
    again = pc.compile(narrow, pc.Mesh(), precision="fp16")
    assert again.captured is narrow.captured
    wide = pc.compile(narrow, pc.Mesh())
    assert wide.plan.fingerprint == program.plan.fingerprint


def test_a_batch_norm_of_a_third_precision_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).half()

    def loss(value: torch.Tensor) -> torch.Tensor:
        return value.sum()

    batch = {"input": torch.randn(3, 4)}
    with pytest.raises(pc.CaptureError, match=r"'1' is a BatchNorm1d in torch.float16, .* float32"):
        capture_in(BF16, model, batch, loss)
    assert capture_in(BF16, model.float(), batch, loss).narrow == BF16
