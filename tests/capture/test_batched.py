"""Functions under torch.vmap become operators on batches, with the same gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

import parcompiler as pc
from parcompiler.capture import capture

WIDTH, ROWS = 4, 3
Step = Callable[["Mapped", torch.Tensor, torch.Tensor], torch.Tensor]


class Mapped(nn.Module):
    """Layers around a step that maps a function."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = (step,)
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(4)
        )
        self.tables = nn.Parameter(torch.randn(2, WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.after(self.step[0](self, self.before(x), kinds)).square()
        return found.mean()


def layer(self: Mapped, x: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = torch.vmap(lambda row: self.after(row) * row.detach().sum())(x)
    return y


def nested(self: Mapped, x: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    def of_row(row: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.vmap(lambda table: torch.softmax(row @ table, 0))(self.tables)
        return y.sum(0)

    y: torch.Tensor = torch.vmap(of_row, chunk_size=2)(x)
    return y


def in_place(self: Mapped, x: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    def cleared(row: torch.Tensor) -> torch.Tensor:
        row = row * 2
        row[0] = 0.0
        return row

    y: torch.Tensor = torch.vmap(cleared)(x)
    return y


def masked(self: Mapped, x: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    """As transformers makes masks that look at the batch."""

    def mask(i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return (j <= i) | (kinds[i] == kinds[j])

    places = torch.arange(len(x))
    mapped = torch.vmap(torch.vmap(mask, in_dims=(None, 0)), in_dims=(0, None))
    with TransformGetItemToIndex():
        allowed: torch.Tensor = mapped(places, places)
    return allowed.to(x.dtype) @ x


def indexed(self: Mapped, x: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    """The same with an index into what has a gradient."""
    with TransformGetItemToIndex():
        y: torch.Tensor = torch.vmap(lambda kind: x[kind, kind].sin())(kinds)
    return x * y[:, None]


@pytest.mark.parametrize("step", [layer, nested, in_place, masked, indexed])
def test_a_mapped_function_computes_what_it_maps(step: Step) -> None:
    torch.manual_seed(0)
    model = Mapped(step)
    kinds = torch.tensor([0, 1, 0])
    inputs = {"x": torch.randn(ROWS, WIDTH), "kinds": kinds}
    captured = capture(model, inputs)
    nodes = list(captured.fx_graph.nodes)
    assert not any("batch_dim" in node.name or "vmap" in node.name for node in nodes)
    tensors = {item.node: captured.tensors[item.name] for item in captured.parameters}
    for other in (kinds, torch.tensor([1, 1, 2])):
        inputs = {"x": torch.randn(ROWS, WIDTH), "kinds": other}
        fed = tensors | {item.node: inputs[item.key] for item in captured.inputs}
        graph = torch.fx.GraphModule({}, captured.fx_graph)
        names = [node.name for node in nodes if node.op == "placeholder"]
        (loss,) = graph(*map(fed.__getitem__, names))
        wanted = model(**inputs)
        assert torch.equal(loss, wanted)
        unread = {*model.layers.parameters(), *([] if step is nested else [model.tables])}
        parameters = [p for p in model.parameters() if p not in unread]
        gradients = torch.autograd.grad(wanted, parameters)
        torch.testing.assert_close(torch.autograd.grad(loss, parameters), gradients)


def normed(self: Mapped, x: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    for each in self.layers:
        x = x + torch.vmap(each)(x)  # the operator of a norm yields statistics too
    return x


@pytest.mark.parametrize("step", [nested, normed])
def test_a_mapped_function_over_two_stages(step: Step) -> None:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(ROWS, WIDTH), "kinds": torch.tensor([0, 1, 0])}
    program = pc.compile(Mapped(step), pc.Mesh(pipeline=2), inputs, microbatches=2)
    assert program.verify().gradient_error <= 1e-9
