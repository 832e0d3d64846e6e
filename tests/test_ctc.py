"""The CTC loss of a program is torch's own, and its gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import parcompiler as pc
from parcompiler.ctc import ctc_loss

TIME, ROWS, CLASSES, LONGEST = 7, 3, 5, 4


def given(flat: bool, rows: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores with a gradient, targets, and the lengths of both."""
    torch.manual_seed(0)
    scores = torch.randn(TIME, ROWS, CLASSES, dtype=torch.float64).log_softmax(-1)
    targets = torch.tensor([[1, 2, 0, 0], [3, 3, 3, 3], [4, 1, 0, 0]])
    times, lengths = torch.tensor([7, 6, 5]), torch.tensor([2, 4, 0])  # four threes need seven
    if rows is None:
        scores, targets, times, lengths = scores[:, 0], targets[0, :2], times[0], lengths[0]
    elif flat:
        targets = targets[torch.arange(LONGEST) < lengths[:, None]]
    return scores.requires_grad_(), targets, times, lengths


@pytest.mark.parametrize(("flat", "rows"), [(False, ROWS), (True, ROWS), (False, None)])
@pytest.mark.parametrize("reduction", range(3))
@pytest.mark.parametrize("zero_infinity", [False, True])
def test_the_loss_and_its_gradient_are_those_of_torch(
    flat: bool, rows: int | None, reduction: int, zero_infinity: bool
) -> None:
    found = []
    for function in (torch.ctc_loss, ctc_loss):
        scores, targets, times, lengths = given(flat, rows)
        loss = function(scores, targets, times, lengths, 0, reduction, zero_infinity)
        loss.sum().backward()
        found.append((loss.detach(), scores.grad))
    (wanted, wanted_gradient), (loss, gradient) = found
    assert torch.equal(loss, wanted)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=0, atol=0, equal_nan=True)


class Listener(nn.Module):
    """Scores of letters over time, and their CTC loss; letters below zero are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, sound: Tensor, letters: Tensor) -> Tensor:
        for layer in self.layers:
            sound = sound + torch.tanh(layer(sound))
        scores = F.log_softmax(self.head(sound), -1).transpose(0, 1)
        spoken = letters >= 0
        times = torch.full((sound.shape[0],), sound.shape[1])
        return F.ctc_loss(scores, letters.masked_select(spoken), times, spoken.sum(-1))


@pytest.mark.parametrize("mesh", [pc.Mesh(pipeline=2), pc.Mesh(tensor=2)], ids=str)
def test_a_model_with_a_ctc_loss_equals_one_process(mesh: pc.Mesh) -> None:
    letters = torch.tensor([[1, 2, 3, -100], [4, 4, -100, -100]])
    inputs = {"sound": torch.randn(2, 10, 8), "letters": letters}
    program = pc.compile(Listener(), mesh, inputs, microbatches=2)
    assert program.verify().ok
