"""A custom autograd Function stays one node, and one that ranks could not call is refused."""

from typing import Any

import pytest
import torch
from torch import nn

import parcompiler as pc
from parcompiler.capture import capture
from parcompiler.capture.effects import is_random
from parcompiler.capture.functions import Applied
from parcompiler.errors import CaptureError
from tests.distributed.models import WIDTH, XY, Clipped, Custom, Stack, rows


class Noisy(torch.autograd.Function):
    """Two results, one of them drawn."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 2


class Hiding(torch.autograd.Function):
    """Takes a module, whose parameters autograd does not see."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
        result: torch.Tensor = module(x)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def applied(model: nn.Module, inputs: Any) -> list[torch.fx.Node]:
    nodes = capture(model, inputs).fx_graph.nodes
    return [node for node in nodes if isinstance(node.target, Applied)]


def test_it_is_one_node_that_calls_it() -> None:
    nodes = applied(Stack(Custom), XY)
    assert len(nodes) == 4
    assert repr(nodes[0].target) == "tests.distributed.models.Clipped.apply"
    assert nodes[0].args[1] == 0.01
    assert not is_random(nodes[0])


def test_what_it_draws_and_returns_is_known() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            double, noise = Noisy.apply(self.linear(x))  # type: ignore[no-untyped-call]
            return (double + noise).sum()  # type: ignore[no-any-return]

    (node,) = applied(Model(), {"x": rows(WIDTH)})
    assert is_random(node)
    assert len(node.users) == 2


def test_one_that_hides_parameters_is_refused_with_its_place() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Hiding.apply(x, self.inner).sum()  # type: ignore[no-untyped-call, no-any-return]

    with pytest.raises(CaptureError, match=r"(?s)hide parameters.*Hiding\.apply"):
        capture(Model(), {"x": rows(WIDTH)})


def test_one_that_cannot_be_imported_is_refused() -> None:
    class Local(Clipped):
        pass

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Local.apply(self.inner(x), 0.1).sum()  # type: ignore[no-untyped-call, no-any-return]

    with pytest.raises(CaptureError, match="cannot be imported"):
        capture(Model(), {"x": rows(WIDTH)})


class Reversed(torch.autograd.Function):
    """Turns gradients round, `by` so much; its context is set up by itself."""

    @staticmethod
    def forward(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.by = inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return -ctx.by * gradients[0], None


reverse: Any = Reversed.apply  # as the documentation of torch says it


class Adversarial(nn.Module):
    """Layers with a Function between them, under a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.last(reverse(self.first(x))).square().mean()
        return loss


def test_one_that_is_called_by_another_name_keeps_its_backward() -> None:
    model, inputs = Adversarial(), {"x": torch.randn(2, 4)}
    nodes = capture(model, inputs).fx_graph.nodes
    assert [repr(n.target) for n in nodes if isinstance(n.target, Applied)] == [
        "tests.capture.test_functions.Reversed.apply"
    ]
    program = pc.compile(model, pc.Mesh(pipeline=2), inputs, microbatches=2)
    found = program.verify()
    assert found.ok, str(found)
    assert found.lifted is not None, found.note


def test_afterwards_functions_are_as_before() -> None:
    before = dict(vars(Clipped))
    capture(Stack(Custom), XY)
    assert dict(vars(Clipped)) == before
    x = torch.ones(2, requires_grad=True)
    Clipped.apply(x, 0.5).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert x.grad.tolist() == [0.5, 0.5]


class Lazy(nn.Module):
    """A Function that is defined when the forward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        class Halved(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
                return gradients[0] / 2

        y: torch.Tensor = Halved.apply(self.layer(x))  # type: ignore[no-untyped-call]
        return y.sum()


def test_one_that_is_defined_in_a_forward_is_refused() -> None:
    with pytest.raises(CaptureError, match="Halved cannot be imported by the ranks"):
        capture(Lazy(), {"x": torch.ones(2, 4)})
