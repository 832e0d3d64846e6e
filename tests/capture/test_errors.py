"""What cannot be captured is refused with the module, the line and advice, and nothing printed."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parcompiler.capture import capture
from parcompiler.errors import CaptureError, InputError
from tests.distributed.models import WIDTH, XY, Remembering, Stack, rows


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if x.sum() > 0:  # the values decide
            x = -x
        return x


def test_a_branch_on_values_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CaptureError) as error:
        capture(Stack(Branching), XY)
    text = str(error.value)
    assert "cannot capture Stack" in text
    assert "in module 'layers.0'" in text
    assert "test_errors.py:" in text
    assert "if x.sum() > 0:" in text
    assert "torch.where" in text
    out, err = capfd.readouterr()
    assert not out
    assert not err


def test_a_shape_that_values_decide_is_named() -> None:
    class Selecting(Stack):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            kept = self.layers[0](x)[labels > 1]
            if kept.shape[0] > 1:
                kept = kept[:1]
            total: torch.Tensor = kept.sum()
            return total

    with pytest.raises(CaptureError, match=r"(?s)the model itself.*values of tensors"):
        capture(Selecting(), XY)


def test_an_error_of_the_model_is_shown_with_its_place() -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ x

    with pytest.raises(CaptureError, match=r"(?s)in module 'layers.0', .*return x @ x"):
        capture(Stack(Broken), XY)


def test_outputs_without_a_loss_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"no scalar loss \(a tensor of shape \(4, 8\)\)"):
        capture(nn.Linear(WIDTH, WIDTH), {"input": rows(WIDTH)})
    with pytest.raises(CaptureError, match="scalar tensor"):
        capture(nn.Linear(WIDTH, WIDTH), {"input": rows(WIDTH)}, loss=lambda y: y)


def test_inputs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="labels"):
        capture(Stack(), {"x": rows(WIDTH)})
    with pytest.raises(InputError, match="dict of keyword arguments"):
        capture(Stack(), 3)  # type: ignore[arg-type]


def test_the_model_is_left_as_it_is() -> None:
    model = Remembering()
    before = dict(vars(model))
    capture(model, XY)
    assert vars(model) == before
    assert not hasattr(model, "last")


def test_a_forward_that_exchanges_modules_leaves_the_model_alone() -> None:
    class Exchanging(Stack):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            if not isinstance(self.head, nn.Sequential):
                unused = nn.Linear(WIDTH, WIDTH)
                self.head = nn.Sequential(self.head, nn.Tanh())  # type: ignore[assignment]
                del unused
            return F.cross_entropy(self.head(self.layers[0](x)), labels)

    model = Exchanging()
    graph = capture(model, XY)
    assert isinstance(model.head, nn.Linear)
    assert not graph.random  # the weights of what it made and dropped are not drawn
    assert {"head.weight", "head.bias"} <= set(graph.tensors)


class Unusual(nn.Module):
    """Calls itself something other than self."""

    def forward(me, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportSelfClsParameterName]
        return x.sum() if x.sum() > 0 else -x.sum()


def test_the_place_is_found_whatever_a_module_calls_itself() -> None:
    with pytest.raises(CaptureError, match=r"the model itself.*if x.sum\(\) > 0"):
        capture(Unusual(), (torch.zeros(2),))
