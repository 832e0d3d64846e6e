"""Gradients between data ranks in 16 bits: cast, exchanged, added up as they were, and cast again.

    rank 0   a0 a1 ─ cast ─►  a0 b0   a0 + b0 ─ cast ─►  s0 s1
    rank 1   b0 b1 ─ cast ─►  a1 b1   a1 + b1 ─ cast ─►  s0 s1
                      all-to-all              all-gather

It sends as many bytes as an all-reduce in 16 bits (the hooks `bf16_compress_hook` and
`fp16_compress_hook` of DistributedDataParallel), but a sum is rounded once and not at every rank
that it passes, and summands are added in the order of the ranks, so that any process can repeat it
to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from parcompiler.runtime.axis import real
from parcompiler.runtime.collective_queue import Arrival

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def summed(summands: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The sum that ranks get; the summands are sent in `dtype`, and so is the sum.

    >>> summed([torch.tensor([1.0]), torch.tensor([0.001])], torch.bfloat16)
    tensor([1.])
    """
    first, *others = map(real, summands)
    total = first.to(dtype).to(first.dtype)
    for summand in others:
        total = total + summand.to(dtype).to(first.dtype)
    total = total.to(dtype).to(first.dtype)
    return torch.view_as_complex(total) if summands[0].is_complex() else total


def scattered(
    segments: torch.Tensor, total: torch.Tensor, group: dist.ProcessGroup | None,
    dtype: torch.dtype | None = None,
) -> Arrival:  # fmt: skip
    """Start a reduce-scatter: segment r of the [ranks, n] of every rank goes to rank r, which adds
    them up into `total`, in the order of the ranks, when it waits. With a `dtype` the segments and
    their sum are rounded to that."""
    assert group is not None
    me, last = group.rank(), group.size() - 1
    total, segments = total.view(-1), (segments if dtype is None else segments.to(dtype)).flatten(1)
    sizes = [segments.shape[1]] * (last + 1)
    sent, mine = segments, list[torch.Tensor]()
    if me in (0, last):  # the others' are contiguous, and its own is not sent
        sent = segments[1:] if me == 0 else segments[:last]
        sizes[me], mine = 0, [segments[me]]
    received = torch.empty_like(sent)
    work = dist.all_to_all_single(
        received.view(-1), sent.reshape(-1), sizes, sizes, group, async_op=True
    )

    def add_up() -> None:
        rows = [*received]
        rows[me:me] = mine
        total.copy_(rows[0])
        for row in rows[1:]:
            total.add_(row.to(total.dtype))
        if dtype is not None:
            total.copy_(total.to(dtype))

    return Arrival([work], add_up)


def sum_in_order(tensor: torch.Tensor, group: dist.ProcessGroup | None, dtype: torch.dtype) -> None:
    """Add up a tensor over a group, in place and in the order of its ranks, as `summed` does. A
    collective."""
    flat, size = real(tensor).view(-1), dist.get_world_size(group)
    segments = flat.new_zeros(size, -(-flat.numel() // size), dtype=dtype)
    whole = segments.view(-1)[: flat.numel()]
    whole.copy_(flat)
    segment = flat.new_empty(segments.shape[1])
    scattered(segments, segment, group, dtype).wait()
    dist.all_gather_single(segments.view(-1), segment.to(dtype), group)
    flat.copy_(whole)
