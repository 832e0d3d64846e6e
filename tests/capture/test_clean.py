"""What of an exported graph runs: what the loss and the buffers depend on, updates in place too."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parcompiler as pc
from parcompiler.capture import capture
from parcompiler.graph import Graph
from tests.distributed.models import CLASSES, WIDTH, XY, Stack


def operators(graph: Graph) -> list[str]:
    nodes = [node for node in graph.fx_graph.nodes if node.op == "call_function"]
    return [str(getattr(node.target, "_opname", node.target)) for node in nodes]


class Measured(Stack):
    """Returns probabilities, which nothing uses, beside an accuracy without a gradient."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        y = self.head(self.layers[0](x))
        probabilities = y.softmax(-1)
        with torch.no_grad():
            accuracy = (y.argmax(-1) == labels).float().mean()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            also = F.linear(y, y)
        outputs = {"probabilities": probabilities, "accuracy": accuracy, "also": also}
        return {"loss": F.cross_entropy(y, labels), **outputs}


def test_what_is_returned_beside_a_region_and_not_used_is_dropped() -> None:
    assert operators(capture(Measured(), XY)) == ["linear", "linear", "cross_entropy_loss"]


class Watching(Stack):
    """Running statistics of what the loss does not use, after an update of it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scaled = x * 1.5
        F.relu(scaled, inplace=True)
        self.norm(scaled)
        scaled.mul_(2.0)  # nobody reads that
        return F.cross_entropy(self.head(self.layers[0](x)), labels)


def test_what_leads_to_an_update_of_a_buffer_stays_and_what_is_updated_for_nobody_goes() -> None:
    names = operators(capture(Watching(), XY))
    assert names[:4] == ["mul", "relu_", "add_", "batch_norm"]
    assert "mul_" not in names


class Unused(Stack):
    """An embedding that only memory reads which nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros_like(x)
        rows += self.embed(labels)
        (rows + 1).mul_(rows)
        return super().forward(x, labels)


def test_an_embedding_for_nobody_is_dropped_and_not_spread() -> None:
    assert operators(capture(Unused(), XY)) == operators(capture(Stack(), XY))
    program = pc.compile(Unused(), pc.Mesh(pipeline=2), XY, vocabulary="vocab-1")
    assert program.lowered.vocabulary is None or not program.lowered.vocabulary.lookups


class Unrecorded(nn.Module):
    """A value that is used by itself, and as what `form` makes of it without a gradient."""

    def __init__(self, form: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.form = form

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = torch.tanh(self.first(x))
        with torch.no_grad():
            made = self.form(value)
        total: torch.Tensor = (self.second(made) * value + made).square().sum()
        return total


FORMS: dict[str, tuple[bool, Callable[[torch.Tensor], torch.Tensor]]] = {
    "cast": (True, lambda x: x.to(torch.float32)),
    "cast like itself": (True, lambda x: x.type_as(x)),
    "move": (True, lambda x: x.cpu()),
    "flat": (True, lambda x: x.flatten(1)),
    "contiguous": (True, lambda x: x.contiguous()),
    "no dropout": (True, lambda x: nn.functional.dropout(x, 0.5, training=False)),
    "alias": (False, lambda x: x[...]),
    "view": (False, lambda x: x.view_as(x)),
    "wider": (False, lambda x: x.double().float()),
    "updated": (False, lambda x: x.clone().mul_(2.0)),
}


@pytest.mark.parametrize("name", FORMS)
def test_what_returns_its_operand_without_a_gradient_keeps_its_history(name: str) -> None:
    """`to` returns the tensor itself where the dtype is that: then `no_grad` has no effect on it. A
    view is another tensor, whose history ends."""
    flows, form = FORMS[name]
    model, x = Unrecorded(form), torch.randn(2, 4)
    value = model.first(x)
    with torch.no_grad():
        assert (form(value) is value) == flows
    program = pc.compile(model, pc.Mesh(), {"x": x}, microbatches=1)
    model(x).backward()
    with program.worker() as worker:
        worker.step({"x": x})
        gradients = worker.gather_gradients()
    assert gradients is not None
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(gradients[key], parameter.grad)


class Transformed(nn.Module):
    """Its layer in a function that torch transforms."""

    def __init__(self, transform: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.transform = nn.Linear(4, 4), (transform,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.transform[0](self, x).sum()


def mapped(self: Any, x: torch.Tensor) -> torch.Tensor:
    def drop(row: torch.Tensor) -> torch.Tensor:
        dropped: torch.Tensor = nn.functional.dropout(self.linear(row))  # no evaluation has it
        return dropped

    y: torch.Tensor = torch.vmap(drop, randomness="different")(x)
    return y


def mapped_in_parts(self: Any, x: torch.Tensor) -> torch.Tensor:
    def half(row: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            gate: torch.Tensor = self.linear(row)
        return row * gate

    y: torch.Tensor = torch.vmap(half)(self.linear(x))
    return y


def derived(self: Any, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = torch.func.grad(lambda row: (row**3).sum())(x)
    return cast(torch.Tensor, self.linear(y))


def derived_of_a_layer(self: Any, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = torch.func.grad(lambda row: (self.linear(row) ** 2).sum())(x)
    return y


def along(self: Any, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = torch.func.jvp(lambda row: self.linear(row), (x,), (x,))[1]
    return y


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (mapped, r"torch\.vmap of dropout, .* cannot be divided.*test_clean"),
        (mapped_in_parts, r"torch\.vmap .* or under no_grad cannot be divided.*test_clean"),
        (derived, r"torch\.func\.grad cannot be divided: write the derivative out.*test_clean"),
        (derived_of_a_layer, r"(?s)transforms of torch\.func \(grad, vjp, .* cannot be divided"),
        (along, r"torch\.func\.jvp cannot be divided: write the derivative out.*test_clean"),
    ],
)
def test_a_function_that_torch_transforms_is_refused_by_name(transform: Any, message: str) -> None:
    with pytest.raises(pc.CaptureError, match=message):
        capture(Transformed(transform), {"x": torch.ones(2, 4)})


class Routed(nn.Module):
    """A layer in float32 within autocast."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.layer(x)
            with torch.autocast("cpu", enabled=False):
                x = self.router(x.float())
        return x.square().mean()


def test_what_autocast_leaves_out_is_computed_in_float32() -> None:
    model, x = Routed(), torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    program = pc.compile(model, pc.Mesh(device="cpu"), (x,), microbatches=1, progress=False)
    with program.worker() as worker:
        assert worker.step((x,)).item() == model(x).item()
