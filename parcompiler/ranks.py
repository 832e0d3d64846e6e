"""Ranks of programs: which one this process is, and how their instructions print."""

from __future__ import annotations

import torch.distributed as dist

from parcompiler.errors import LaunchError
from parcompiler.instruction import Instruction, listing
from parcompiler.runtime.joining import place


class Instructions(tuple[Instruction, ...]):
    """One rank's instruction list; prints one instruction a line."""

    __slots__ = ()

    def __str__(self) -> str:
        """The text that `parcompiler.instruction.parse` reads."""
        return listing(self)


def current_rank(size: int) -> int:
    """The rank of this process. Raises LaunchError when it cannot be one of `size`."""
    if dist.is_initialized():
        rank, found = dist.get_rank(), dist.get_world_size()
    else:
        rank, found = place() or (0, 1)
    if found != size:
        message = (
            f"the plan needs {size} processes ({found} started): start this script with "
            f"torchrun --nproc-per-node {size}"
        )
        raise LaunchError(message)
    return rank
