"""Counts the bytes of receive buffers that are alive, the same way for both runtimes.

Every message of both comes in through `ProcessGroup.recv`. Around a step, that method remembers the
storage of the buffer without owning it; what still exists of them at any later receive, and at the
end of the step, is alive.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef


class Received:
    """`most` is the largest number of bytes alive at once, so far."""

    def __init__(self) -> None:
        self.most = 0
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def add(self, tensor: torch.Tensor) -> None:
        """A receive is posted into `tensor`."""
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        self._seen[reference.cdata] = (reference, storage.nbytes())
        self.look()

    def look(self) -> None:
        """Count what is alive now."""
        alive = {k: item for k, item in self._seen.items() if not item[0].expired()}
        self._seen = alive
        self.most = max(self.most, sum(size for _, size in alive.values()))


@contextmanager
def counting() -> Iterator[Received]:
    """Within it, all receives of this process are counted."""
    found = Received()
    group: Any = dist.ProcessGroup
    receive, method = group.recv, vars(group)["recv"]

    def counted(self: Any, tensors: list[torch.Tensor], *arguments: Any) -> Any:
        for tensor in tensors:
            found.add(tensor)
        return receive(self, tensors, *arguments)

    group.recv = counted
    try:
        yield found
        found.look()
    finally:
        group.recv = method
