"""Questions about values: answered from constants and for assertions, refused for the batch."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from parcompiler.capture import capture
from parcompiler.errors import CaptureError
from tests.distributed.models import WIDTH, rows

Step = Callable[[torch.Tensor], torch.Tensor]


class Asking(nn.Module):
    """A layer, and in front of it a step that asks for values."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step
        self.linear = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(self.step(x)).sum()
        return result


def operators(step: Step) -> list[str]:
    graph = capture(Asking(step), {"x": rows(WIDTH)})
    return [str(n.target) for n in graph.fx_graph.nodes if n.op == "call_function"]


def from_constants(x: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(3, WIDTH)
    mask[0] = torch.arange(WIDTH)
    if (mask[1:] > 0).any():
        return x.sin()
    return x.cos() if mask.sum().item() == 28 else x


def from_shapes(x: torch.Tensor) -> torch.Tensor:
    return x.cos() if torch.ones_like(x).all() else x.sin()


def asserting(x: torch.Tensor) -> torch.Tensor:
    assert (x < 9).all(), "large"
    assert not (x > 9).any()
    assert torch.all(x < 9).item()
    return x.cos()


def refusing(x: torch.Tensor) -> torch.Tensor:
    if (x > 9).any() or x.max() > 9:
        raise ValueError
    if not (x < 9).all():
        message = f"large: {x.shape}"
        raise ValueError(message)
    return x.cos()


def checking_numbers(x: torch.Tensor) -> torch.Tensor:
    return x.cos() if x.isfinite().all() and not torch.isnan(x).any() else x.sin()


def dropping_never(x: torch.Tensor) -> torch.Tensor:
    return x.sin() if torch.rand([]) < 0.0 else x.cos()


@pytest.mark.parametrize(
    "step",
    [from_constants, from_shapes, asserting, refusing, checking_numbers, dropping_never],
)
def test_what_is_known_is_answered(step: Step) -> None:
    found = operators(step)
    assert "aten.cos.default" in found
    assert "aten.sin.default" not in found


def branching(x: torch.Tensor) -> torch.Tensor:
    return x.cos() if x.sum() > 0 else x.sin()


def branching_on_a_mixture(x: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(WIDTH)
    view = mask[0]
    mask[0] = x.sum()
    return x.cos() if view > 0 else x.sin()


def raising_after_work(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        x = x.sin()
    return x.cos()


def dropping_sometimes(x: torch.Tensor) -> torch.Tensor:
    return x.sin() if torch.rand([]) < 0.5 else x.cos()


def ambiguous(x: torch.Tensor) -> torch.Tensor:
    if not (x < 9).all() or (x > 9).any():
        raise ValueError
    return x


@pytest.mark.parametrize(
    "step",
    [branching, branching_on_a_mixture, raising_after_work, dropping_sometimes, ambiguous],
)
def test_what_the_batch_decides_is_refused(step: Step) -> None:
    with pytest.raises(CaptureError, match="values of tensors") as error:
        operators(step)
    assert "test_known.py" in str(error.value)


def test_a_large_constant_is_not_computed() -> None:
    def large(x: torch.Tensor) -> torch.Tensor:
        return x.cos() if torch.ones(1 << 12, 1 << 12).all() else x.sin()

    with pytest.raises(CaptureError):
        operators(large)


def test_the_generator_is_left_alone() -> None:
    model = Asking(lambda x: x + torch.bernoulli(torch.full((WIDTH,), 0.5)) + torch.rand(WIDTH))
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    capture(model, {"x": rows(WIDTH)})
    assert torch.equal(torch.rand(2), wanted)
