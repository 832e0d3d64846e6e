"""Gradients between data ranks in 16 bits: cast, exchanged, added up as they were, and cast again.

    rank 0   a0 a1 ─ cast ─►  a0 b0   a0 + b0 ─ cast ─►  s0 s1
    rank 1   b0 b1 ─ cast ─►  a1 b1   a1 + b1 ─ cast ─►  s0 s1
                      all-to-all              all-gather

As many bytes as an all-reduce in 16 bits (the hooks `bf16_compress_hook` and `fp16_compress_hook`
of DistributedDataParallel), but a sum is rounded once and not at every rank that it passes, and
summands are added in the order of the ranks: so any process can repeat it to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from parcompiler.runtime.axis import real
from parcompiler.runtime.collective_queue import CollectiveQueue, Pending

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def summed(summands: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """What ranks get for their summands, each of which is sent in `dtype`, as is the sum.

    >>> summed([torch.tensor([1.0]), torch.tensor([0.001])], torch.bfloat16)
    tensor([1.])
    """
    kind = summands[0].dtype
    total = summands[0].to(dtype).to(kind)
    for summand in summands[1:]:
        total = total + summand.to(dtype).to(kind)
    return total.to(dtype).to(kind)


class CastSums:
    """Sums over ranks in `dtype`, one after another, beside the compute."""

    def __init__(self, dtype: torch.dtype, queue: CollectiveQueue) -> None:
        self.dtype, self._queue = dtype, queue

    def sum(self, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> Pending:
        """Start adding up a tensor over a group, in place."""

        def start() -> tuple[torch.Tensor, None]:
            sum_in_order(tensor, group, self.dtype)
            return tensor, None

        return self._queue.put(start)

    def scatter(
        self, segments: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup | None
    ) -> Pending:
        """Start adding up segments [ranks, n] over a group, each rank of which gets its `own`."""

        def start() -> tuple[torch.Tensor, None]:
            flat = real(segments).view(dist.get_world_size(group), -1)
            real(own).view(-1).copy_(_own_sum(flat.to(self.dtype), flat.dtype, group))
            return own, None

        return self._queue.put(start)


class Addends:
    """A reduce-scatter on its way: segment r of the [ranks, n] of every rank goes to rank r, which
    adds them up into `own`, in the order of the ranks, when it waits. With a `dtype` the segments
    and their sum are rounded to that."""

    def __init__(
        self,
        segments: torch.Tensor,
        own: torch.Tensor,
        group: dist.ProcessGroup,
        dtype: torch.dtype | None = None,
    ) -> None:
        me, last = group.rank(), group.size() - 1
        self._own, self._dtype = own.view(-1), dtype
        segments = (segments if dtype is None else segments.to(dtype)).flatten(1)
        sizes = [segments.shape[1]] * (last + 1)
        given, self._mine = segments, list[torch.Tensor]()
        if me in (0, last):  # the others' lie together, and its own need go nowhere
            given = segments[1:] if me == 0 else segments[:last]
            sizes[me], self._mine = 0, [segments[me]]
        self._at, self._received = me, torch.empty_like(given)
        work = dist.all_to_all_single(
            self._received.view(-1), given.reshape(-1), sizes, sizes, group, async_op=True
        )
        assert work is not None
        self._work: dist.Work = work

    def is_completed(self) -> bool:
        """Whether all have come."""
        return bool(self._work.is_completed())

    def wait(self) -> None:
        """Wait for them, and add them up."""
        self._work.wait()
        rows = [*self._received]
        rows[self._at : self._at] = self._mine
        first, second, *others = (row.to(self._own.dtype) for row in rows)
        torch.add(first, second, out=self._own)
        for row in others:
            self._own.add_(row)
        if self._dtype is not None:
            self._own.copy_(self._own.to(self._dtype))


def sum_in_order(tensor: torch.Tensor, group: dist.ProcessGroup | None, dtype: torch.dtype) -> None:
    """Add up a tensor over a group, in place and in the order of its ranks. A collective."""
    flat, size = real(tensor).view(-1), dist.get_world_size(group)
    segments = flat.new_zeros(-(-flat.numel() // size) * size, dtype=dtype)
    segments[: flat.numel()].copy_(flat)
    own = _own_sum(segments.view(size, -1), flat.dtype, group)
    dist.all_gather_single(segments, own, group)
    flat.copy_(segments[: flat.numel()])


def _own_sum(segments: torch.Tensor, kind: torch.dtype, group: Any) -> torch.Tensor:
    """The sum of this rank's segments [ranks, n], added up in `kind`."""
    received = torch.empty_like(segments)
    dist.all_to_all_single(received, segments, group=group)
    return summed([row.to(kind) for row in received], segments.dtype).to(segments.dtype)
