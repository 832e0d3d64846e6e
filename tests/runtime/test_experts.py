"""Rows go to the ranks of their experts, each once, and come back where they were."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from parcompiler.runtime import experts

HERE = threading.local()
WIDTH = 3


@dataclass
class Ranks:
    """Threads that exchange rows as ranks do, and count those that others get."""

    size: int
    sent: list[int] = field(init=False)
    board: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sent, self.barrier = [0] * self.size, threading.Barrier(self.size)

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        def one(rank: int) -> Any:
            HERE.axis = Member(self, rank)
            return work(rank)

        with ThreadPoolExecutor(self.size) as pool:
            return [*pool.map(one, range(self.size))]


@dataclass
class Member:
    """One of them, in the place of an `Axis`."""

    ranks: Ranks
    rank: int

    @property
    def size(self) -> int:
        return self.ranks.size

    def exchange(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        assert sum(sent) == len(rows)
        for target, part in enumerate(rows.split(sent)):
            self.ranks.board[self.rank, target] = part
            self.ranks.sent[self.rank] += part.numel() * (target != self.rank)
        self.ranks.barrier.wait()
        parts = [self.ranks.board[source, self.rank] for source in range(self.size)]
        assert [len(part) for part in parts] == received
        self.ranks.barrier.wait()
        return torch.cat(parts)


CASES = {
    "some": ([[2, 0, 3, 1], [1, 1, 0, 4]], 0),
    "one expert gets all": ([[0, 0, 5, 0], [0, 0, 4, 0]], 0),
    "nothing at all": ([[0, 0, 0, 0], [0, 0, 0, 0]], 0),
    "rows of no expert": ([[1, 2, 0, 0], [0, 0, 0, 1]], 2),
    "two experts on each of three": ([[1, 0, 2, 3, 0, 1], [0, 4, 0, 0, 0, 2], [1] * 6], 1),
}


@pytest.mark.parametrize("case", CASES)
def test_every_row_goes_to_its_expert_and_back(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "current", lambda _: HERE.axis)
    counts, more = CASES[case]
    ranks = Ranks(len(counts))
    each = len(counts[0]) // ranks.size
    torch.manual_seed(0)
    every = [torch.randn(sum(own) + more, WIDTH, requires_grad=True) for own in counts]
    expert_of = [torch.repeat_interleave(torch.tensor(own)) for own in counts]

    def work(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows, ends = every[rank], torch.tensor(counts[rank]).cumsum(0, dtype=torch.int32)
        arrivals = experts.expert_arrivals(ends)
        there = experts.dispatch(rows, ends, arrivals)
        here = experts.expert_ends(arrivals).diff(prepend=torch.zeros(1, dtype=torch.int32))
        factors = torch.arange(rank * each, (rank + 1) * each).repeat_interleave(here) + 1.0
        back = experts.combine(there * factors[:, None], ends, arrivals, len(rows))
        back.sum().backward()
        return there.detach(), back.detach()

    found = ranks.run(work)
    for rank, (there, back) in enumerate(found):
        arriving = [
            rows.detach()[: len(of)][of == k]
            for k in range(rank * each, (rank + 1) * each)
            for rows, of in zip(every, expert_of, strict=True)
        ]
        assert torch.equal(there, torch.cat(arriving))
        factor = torch.cat([expert_of[rank] + 1.0, torch.zeros(more)])[:, None]
        assert torch.equal(back, every[rank].detach() * factor)
        torch.testing.assert_close(every[rank].grad, factor.expand_as(back), rtol=0, atol=0)
    for rank, own in enumerate(counts):
        away = sum(own) - sum(own[rank * each : (rank + 1) * each])
        come = sum(sum(other[rank * each : (rank + 1) * each]) for other in counts) - (
            sum(own) - away
        )  # there and back, both twice
        assert ranks.sent[rank] == 2 * WIDTH * (away + come) + each * (ranks.size - 1)
