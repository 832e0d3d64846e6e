"""Attention around a ring of threads is attention to all keys, and passes on each key once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from parcompiler import ring
from parcompiler.pieces import Shard
from parcompiler.ring import RingAttention


class Ring:
    """The rotations of `n` threads; `sent` counts the numbers that each has sent."""

    def __init__(self, n: int) -> None:
        self.queues: list[Queue[torch.Tensor]] = [Queue() for _ in range(n)]
        self.sent = [0] * n

    def rotate_of(self, rank: int) -> Callable[[torch.Tensor], Callable[[], torch.Tensor]]:
        def rotate(row: torch.Tensor) -> Callable[[], torch.Tensor]:
            self.sent[rank] += row.numel()
            self.queues[(rank + 1) % len(self.sent)].put(row)
            return lambda: self.queues[rank].get(timeout=30).clone()

        return rotate


def found(
    n: int, operands: list[torch.Tensor], dy: torch.Tensor, is_causal: bool, zigzag: bool
) -> tuple[list[torch.Tensor], list[int]]:
    """The result and the gradients of all ranks, joined; and what each has sent."""
    threaded = Ring(n)
    shards = [Shard(2, (x.shape[2],), zigzag) for x in (*operands, dy)]

    def attend(rank: int) -> list[torch.Tensor]:
        pairs = zip(shards, (*operands, dy), strict=True)
        *own, gradient = (s.take(x, n, rank).contiguous() for s, x in pairs)
        leaves = [x.detach().requires_grad_() for x in own]
        more = (rank, n), threaded.rotate_of(rank), is_causal, zigzag, 0.3
        result: Any = RingAttention.apply(*leaves, *more)  # type: ignore[no-untyped-call]
        saved = result.grad_fn.saved_tensors
        assert max(x.numel() for x in saved) <= max(x.numel() for x in (*leaves, result))
        return [result.detach(), *torch.autograd.grad(result, leaves, gradient)]

    with ThreadPoolExecutor(n) as threads:
        made = list(threads.map(attend, range(n)))
    joins = zip((shards[3], *shards[:3]), zip(*made, strict=True), strict=True)
    return [shard.join(list(parts)) for shard, parts in joins], threaded.sent


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize(
    ("is_causal", "zigzag", "groups", "width"),
    [
        (True, True, 4, 8),
        (True, True, 2, 8),
        (True, False, 2, 8),
        (False, False, 4, 8),
        (False, True, 1, 8),
        (True, True, 2, 6),  # values of another width have no kernel
        (False, False, 4, 6),
    ],
)
def test_a_ring_attends_to_all_keys(
    n: int, is_causal: bool, zigzag: bool, groups: int, width: int
) -> None:
    generator = torch.Generator().manual_seed(n)

    def draw(heads: int, rows: int, features: int) -> torch.Tensor:
        shape = 2, heads, rows, features
        return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()

    keys = 24 if is_causal else 48
    operands = [draw(4, 24, 8), draw(groups, keys, 8), draw(groups, keys, width)]
    query, key, value = operands
    expected = F.scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, scale=0.3, enable_gqa=True
    )
    dy = torch.randn_like(expected)
    right = [expected.detach(), *torch.autograd.grad(expected, operands, dy)]
    made, sent = found(n, operands, dy, is_causal, zigzag)
    for one, other in zip(made, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    pair = sum(x.numel() for x in operands[1:]) // n  # of one rank
    assert sent == [3 * (n - 1) * pair] * n  # forward; backward, with gradients


def test_sums_are_in_the_order_in_which_cuda_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = ring.BACKWARD

    def reading_in_order(*operands: Any, **more: Any) -> Any:
        *others, sums = operands[:6]
        strides = torch.empty(sums.shape, device="meta").stride()
        in_order = sums.as_strided(sums.shape, strides, sums.storage_offset())
        return kernel(*others, in_order, *operands[6:], **more)

    monkeypatch.setattr(ring, "BACKWARD", reading_in_order)
    test_a_ring_attends_to_all_keys(2, True, True, 2, 8)


def test_a_ring_adds_up_in_float32_what_is_in_16_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    operands = [
        torch.randn(1, 2, 64, 16, generator=generator).bfloat16().requires_grad_() for _ in range(3)
    ]
    wide = query, key, value = [x.detach().double().requires_grad_() for x in operands]
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3)
    dy = torch.randn(expected.shape, generator=generator).bfloat16()
    right = [expected.detach(), *torch.autograd.grad(expected, wide, dy.double())]
    made, _ = found(4, operands, dy, True, True)
    for one, other in zip(made, right, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.double() - other).norm() <= 2**-7 * other.norm()
