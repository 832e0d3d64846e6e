"""Schedules that torch.distributed.pipelining makes.

It makes them from stages of which it reads a few numbers, without any processes.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import schedules as theirs


def fake(p: int, stages: Sequence[int], total: int) -> list[Any]:
    """Stages of rank 0 as torch's schedules see them."""
    return [
        SimpleNamespace(
            stage_index=j,
            num_stages=total,
            group_size=p,
            group_rank=0,
            is_first=j == 0,
            is_last=j == total - 1,
            has_backward=True,
            submod=None,
        )
        for j in stages
    ]


def make(kind: type[Any], p: int, m: int, v: int) -> Any:
    """A schedule of torch with several stages on each rank."""
    v_shaped = kind is theirs.ScheduleZBVZeroBubble
    own = [0, 2 * p - 1] if v_shaped else range(0, v * p, p)
    return kind(fake(p, own, v * p), m, loss_fn=lambda *_: None)
