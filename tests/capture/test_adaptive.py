"""An adaptive softmax runs with the shapes of a graph, and is torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import parcompiler as pc
from parcompiler.capture.adaptive import on_all_rows

WORDS, WIDTH, CUTOFFS = 60, 16, [10, 30]


class Model(nn.Module):
    """An embedding, layers and an adaptive softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.AdaptiveLogSoftmaxWithLoss(
            WIDTH, WORDS, CUTOFFS, div_value=2.0, head_bias=True
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.table(x)
        for layer in self.layers:
            x = layer(x).tanh()
        loss: torch.Tensor = self.head(x.flatten(0, 1), y.flatten()).loss
        return loss


def head() -> nn.AdaptiveLogSoftmaxWithLoss:
    torch.manual_seed(0)
    return nn.AdaptiveLogSoftmaxWithLoss(WIDTH, WORDS, CUTOFFS, div_value=2.0).double()


@pytest.mark.parametrize("targets", [[0, 59, 30, 9, 10], [3, 3, 1], [45, 45]])
def test_it_has_the_result_and_the_gradients_of_torch(targets: list[int]) -> None:
    layer, y = head(), torch.tensor(targets)
    x = torch.randn(len(targets), WIDTH, dtype=torch.float64, requires_grad=True)
    every = [x, *layer.parameters()]
    for wanted, found in zip(
        (layer(x, y), *torch.autograd.grad(layer(x, y).loss, every, materialize_grads=True)),
        (on_all_rows(layer, x, y), *torch.autograd.grad(on_all_rows(layer, x, y).loss, every)),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


def test_it_takes_one_row() -> None:
    layer, x, y = head(), torch.randn(WIDTH, dtype=torch.float64), torch.tensor(12)
    torch.testing.assert_close(on_all_rows(layer, x, y), layer(x, y))


@pytest.mark.parametrize("target", [-1, WORDS])
def test_what_is_no_class_raises(target: int) -> None:
    x = torch.randn(2, WIDTH, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"out of bounds|out of range"):
        on_all_rows(head(), x, torch.tensor([0, target]))


def test_a_model_with_one_is_divided_and_says_that_it_stays_whole() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(WORDS, (2, 6))
    before = nn.AdaptiveLogSoftmaxWithLoss.forward
    program = pc.compile(
        Model(), pc.Mesh(pipeline=2), {"x": tokens, "y": tokens}, microbatches=3,
        vocabulary="vocab-2",
    )  # fmt: skip
    assert nn.AdaptiveLogSoftmaxWithLoss.forward is before
    choice = program.plan.vocabulary
    assert choice is not None
    assert choice.lookups == ("table.weight",)
    assert "head.tail.1.1.weight: the loss is no cross-entropy" in choice.kept
    assert "the loss is no cross-entropy" in program.report().to_text()
    found = program.verify()
    assert found.ok, str(found)
    assert max(found.loss_error, found.gradient_error, found.parameter_error) <= 1e-9
