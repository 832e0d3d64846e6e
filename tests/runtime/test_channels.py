"""What is connected before the first step. The order of NCCL's first uses, without NCCL."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import parcompiler as pc
from parcompiler.runtime import channels
from parcompiler.runtime.channels import Channels
from parcompiler.runtime.collective_queue import queue_on

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
    """A group that knows its ranks."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__(0, len(ranks))  # type: ignore[call-arg]
        self.ranks = ranks


def _started(result: torch.Tensor) -> tuple[torch.Tensor, None]:
    """A collective that is done."""
    return result, None


def test_a_compressed_sum_is_not_kept_behind_its_step() -> None:
    program = pc.compile(Layers(), pc.Mesh(), (torch.zeros(2, WIDTH),), microbatches=1)
    own = Channels(program.rank_program(0), torch.device("cpu"), timedelta(seconds=9), print)
    own.beside = queue_on(torch.device("cpu"), print)
    summed = torch.ones(1)
    seen = weakref.ref(summed)
    own.beside.put(partial(_started, summed)).wait()
    del summed
    own.flush()
    own.beside.close()  # its thread has ended
    assert seen() is None


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
        return Group(tuple(ranks)) if rank in ranks else dist.GroupMember.NON_GROUP_MEMBER

    def note(word: str) -> Callable[..., None]:
        """What stands for `dist.send` and `dist.recv`, which return when the message is there."""
        return lambda tensor, peer, group, tag: log.append(
            (word, peer, group.ranks, tensor.numel())
        )

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "send", note("send"))
    monkeypatch.setattr(dist, "recv", note("recv"))
    monkeypatch.setattr(channels, "backend_of", lambda device: "nccl")
    device = torch.device("meta")
    Channels(program.rank_program(rank), device, timedelta(seconds=9), print).open()
    assert made == [(pair, device) for pair in program.rank_program(0).channels]
    assert len(made) == 4
    here = [pair for pair, _ in made if rank in pair]
    assert log == [
        ("send", pair[1], pair, 1) if pair[0] == rank else ("recv", pair[0], pair, 1)
        for pair in here
    ]
