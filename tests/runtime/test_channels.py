"""What is connected before the first step. The order of NCCL's first uses, without NCCL."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import parcompiler as pc
from parcompiler.runtime import channels
from parcompiler.runtime.channels import Channels

WIDTH = 4


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


class Group(dist.ProcessGroup):
    """A group that notes what goes through it."""

    def __init__(self, ranks: tuple[int, ...], log: list[Any]) -> None:
        super().__init__(0, len(ranks))  # type: ignore[call-arg]
        self.ranks, self.log = ranks, log

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int) -> Any:
        self.log.append(("send", self.ranks, tensors[0].numel()))
        return self

    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int) -> Any:
        self.log.append(("recv", self.ranks, tensors[0].numel()))
        return self

    def wait(self) -> None:
        self.log.append("wait")


@pytest.mark.parametrize("rank", range(3))
def test_communicators_and_connections_of_nccl_are_made_when_a_rank_starts(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """In one order on all ranks: (sender, receiver) by the list of the program's channels."""
    program = pc.compile(
        Layers(), pc.Mesh(pipeline=3), (torch.zeros(2, WIDTH),), microbatches=3, schedule="1f1b"
    )
    made: list[tuple[tuple[int, ...], Any]] = []
    log: list[Any] = []

    def new_group(ranks: Any, timeout: Any, backend: str, device_id: Any) -> Any:
        assert backend == "nccl"
        made.append((tuple(ranks), device_id))
        return Group(tuple(ranks), log) if rank in ranks else dist.GroupMember.NON_GROUP_MEMBER

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_group_rank", lambda group, peer: group.ranks.index(peer))
    monkeypatch.setattr(channels, "backend_of", lambda device: "nccl")
    device = torch.device("meta")
    Channels(program.rank_program(rank), device, timedelta(seconds=9), print).open()
    assert made == [(pair, device) for pair in program.rank_program(0).channels]
    assert len(made) == 4
    here = [pair for pair, _ in made if rank in pair]
    words = ["send" if pair[0] == rank else "recv" for pair in here]
    assert log[::2] == [(word, pair, 1) for word, pair in zip(words, here, strict=True)]
    assert log[1::2] == ["wait"] * len(here)
