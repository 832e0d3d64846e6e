"""The model on data ranks that share their statistics is the plain model on all rows at once."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import parcompiler as pc
from parcompiler.verification.batches import random_batch
from parcompiler.verification.reference import Original, accumulated
from parcompiler.verification.synchronized import accumulated_together

ROWS, WIDTH = 3, 4


class Normed(nn.Module):
    """An update in place behind a norm, one used twice, and one that counts its own rows alone."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.SyncBatchNorm(WIDTH)
        self.local: nn.Module = nn.BatchNorm1d(WIDTH)
        self.leave = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        y = self.norm(x)
        x = x + self.local(y.relu_())
        return F.cross_entropy(self.leave(self.norm(x)), labels)


RATE = 0.1
DESCENT = partial(torch.optim.SGD, lr=RATE)


def original(model: nn.Module, data: int) -> tuple[Original, dict[str, torch.Tensor]]:
    """The model, and a batch of as many data ranks."""
    inputs = {"x": torch.randn(ROWS, WIDTH), "labels": torch.tensor([0, 1, 2])}
    program = pc.compile(model, pc.Mesh(data=data), inputs, microbatches=1, precision="fp64")
    batch = random_batch(program.problem.graph, data, seed=0)
    return Original(program, 0, torch.float64), batch


def test_loss_gradients_and_statistics_are_those_of_all_rows() -> None:
    torch.manual_seed(0)
    model = Normed()
    model.local = nn.Identity()
    own, batch = original(model, 3)
    with own:
        found = accumulated_together(own, batch, 3, DESCENT, 3)
    model = model.double()
    loss = model(**batch)
    loss.backward()
    assert torch.allclose(found.loss, loss.detach(), rtol=1e-12)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(found.gradients[name], parameter.grad, rtol=1e-9, atol=1e-12), name
        stepped = parameter.detach() - RATE * parameter.grad
        assert torch.allclose(found.state[name], stepped, rtol=1e-9, atol=1e-12), name
    for name, buffer in model.named_buffers():
        assert torch.allclose(found.state[name], buffer, rtol=1e-12), name


def test_they_are_not_those_of_ranks_alone() -> None:
    torch.manual_seed(0)
    own, batch = original(Normed(), 2)
    with own:
        together = accumulated_together(own, batch, 2, DESCENT, 2)
    with own:
        alone = accumulated(own, batch, 2, DESCENT, ranks=2)
    assert abs(float(together.loss - alone.loss)) > 1e-3


def test_what_a_rank_raises_is_raised_and_the_others_end() -> None:
    torch.manual_seed(0)
    own, batch = original(Normed(), 3)
    batch["labels"][ROWS] = 99  # of the second rank
    with own, pytest.raises(IndexError, match="Target 99"):
        accumulated_together(own, batch, 3, DESCENT, 3)


class Uneven(Normed):
    """Leaves its first norm out where the first label says so."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        if not x.is_meta and not torch.compiler.is_compiling() and labels[0] == 1:
            return F.cross_entropy(self.leave(x), labels)
        return F.cross_entropy(self.leave(self.norm(x)), labels)


def test_a_rank_that_has_fewer_norms_ends_the_others() -> None:
    torch.manual_seed(0)
    own, batch = original(Uneven(), 2)
    batch["labels"] = torch.tensor([0, 1, 2, 1, 2, 0])
    with own, pytest.raises(RuntimeError, match="has not come to this SyncBatchNorm"):
        accumulated_together(own, batch, 2, DESCENT, 2)
