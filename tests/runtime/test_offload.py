"""Layers whose activations wait in the host's memory: the same bits, and nothing on the device."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parcompiler.runtime import offload, offloaded
from parcompiler.runtime.offload import transfers

WIDTH = 8


class Layer(nn.Module):
    """A linear map of which the backward reads what it multiplies and makes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key = (x @ self.weight).tanh().chunk(2, -1)  # views of one storage
        return x + torch.cat([query * key, F.dropout(key, 0.5)], -1)


@pytest.fixture
def layers() -> list[Layer]:
    torch.manual_seed(0)
    return [Layer() for _ in range(3)]


def results(layers: Sequence[nn.Module], *, away: bool) -> list[torch.Tensor]:
    """The output, and the gradients of the input and of all weights."""
    torch.manual_seed(1)
    x = torch.randn(4, WIDTH).requires_grad_()
    y = x
    with transfers():
        for layer in layers:
            y = offloaded(layer, y) if away else layer(y)
    y.sum().backward()
    found = [x.grad, *(p.grad for layer in layers for p in layer.parameters())]
    for layer in layers:
        layer.zero_grad()
    return [y.detach(), *(gradient for gradient in found if gradient is not None)]


def test_an_offloaded_layer_has_the_same_bits(layers: list[Layer]) -> None:
    wanted, found = (results(layers, away=away) for away in (False, True))
    assert len(found) == 5
    assert all(map(torch.equal, wanted, found))


class Gates(nn.Module):
    """Chunks that count their changes each for itself are changed in place, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.rnn(x.unsqueeze(0))[0].squeeze(0)
        return y


def test_what_chunks_of_one_storage_hold_is_copied_when_each_is_done() -> None:
    torch.manual_seed(0)
    layers = [Gates() for _ in range(2)]
    wanted, found = (results(layers, away=away) for away in (False, True))
    assert len(found) == 2 + 2 * 4
    assert all(map(torch.equal, wanted, found))


def test_each_storage_is_copied_once_and_weights_and_leaves_stay(layers: list[Layer]) -> None:
    sizes: list[int] = []

    def to_host(whole: torch.Tensor) -> torch.Tensor:
        sizes.append(len(whole))
        return whole.clone()

    with mock.patch.object(offload, "to_host", to_host):
        results(layers, away=True)
    half, whole = 4 * 4 * WIDTH // 2, 4 * 4 * WIDTH
    first = [whole, half]  # the tangent, and what dropout keeps
    assert sorted(sizes) == sorted([*first, *2 * [whole, *first]])  # the others' inputs too


def test_copies_come_back_with_the_layer_behind(layers: list[Layer]) -> None:
    y, copies = torch.randn(4, WIDTH).requires_grad_(), list[offload.HostCopy]()
    made = offload.HostCopy.__init__

    def noted(self: offload.HostCopy, *given: object) -> None:
        made(self, *given)  # type: ignore[arg-type]
        copies.append(self)

    counts: list[int] = []
    with mock.patch.object(offload.HostCopy, "__init__", noted), transfers():
        for layer in layers:
            y = offloaded(layer, y)
            counts.append(len(copies))
            y.register_hook(lambda _: counts.append(sum(c.back is not None for c in copies)))
    assert sum(copy.back is not None for copy in copies) == 0
    y.sum().backward()
    first, _, third, *back = counts  # before the backward of each layer, the last one first
    assert back == [0, third - first, third]


def test_an_evaluation_copies_nothing(layers: list[Layer]) -> None:
    with mock.patch.object(offload, "HostCopy") as copy, torch.no_grad(), transfers():
        y = offloaded(layers[0], torch.randn(2, WIDTH))
    assert not y.requires_grad
    assert not copy.called
