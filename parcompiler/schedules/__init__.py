"""Pipeline schedules by name: pure functions from ranks and micro-batches to orders of compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from parcompiler.errors import InputError
from parcompiler.schedules.action import Action, Orders
from parcompiler.schedules.interleaved import interleaved
from parcompiler.schedules.schedule import Schedule
from parcompiler.schedules.single_stage import gpipe, naive, one_f_one_b
from parcompiler.schedules.v_shape import v_placement
from parcompiler.schedules.v_slots import v_half, v_min
from parcompiler.schedules.zb_v import zb_v
from parcompiler.schedules.zero_bubble import zb_h1, zb_h2

__all__ = ["SCHEDULES", "Action", "Schedule", "build", "stages_per_rank"]

Order = Callable[[int, int], Orders]  # (ranks, micro-batches) -> orders

SINGLE: dict[str, Order] = {  # one stage on each rank
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "pipedream": one_f_one_b,
}
V: dict[str, Order] = {  # two stages on each rank, down the ranks and up again
    "zb-v": zb_v,
    "v-half": v_half,
    "v-min": v_min,
}
ASYNCHRONOUS = "pipedream"  # updates after every backward
SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", *V, ASYNCHRONOUS)


@lru_cache(maxsize=256)
def build(name: str, ranks: int, microbatches: int, virtual_stages: int = 1) -> Schedule:
    """The named schedule on `ranks` ranks for `microbatches` per step.

    `virtual_stages` is the number of stages on each rank: 2 or more for interleaved; the schedules
    on a V always have 2, whether it is given or left out; the others have 1. The schedule named
    "pipedream" has the order of 1F1B, without its flush.

    Raises InputError for an unknown name, counts that are not positive, and virtual stages that
    the schedule cannot have.
    """
    _check(name, ranks, microbatches, virtual_stages)
    if name == "interleaved":
        placement = tuple(range(ranks)) * virtual_stages
        return Schedule(name, placement, interleaved(ranks, microbatches, virtual_stages))
    if name in V:
        return Schedule(name, v_placement(ranks), V[name](ranks, microbatches))
    orders = SINGLE[name](ranks, microbatches)
    return Schedule(name, tuple(range(ranks)), orders, asynchronous=name == ASYNCHRONOUS)


def stages_per_rank(name: str, wanted: int) -> int:
    """The stages on each rank of a named schedule; `wanted` is 1 by default.

    >>> stages_per_rank("interleaved", 1), stages_per_rank("zb-v", 1), stages_per_rank("1f1b", 1)
    (2, 2, 1)
    """
    return 2 if wanted == 1 and (name == "interleaved" or name in V) else wanted


def _check(name: str, ranks: int, microbatches: int, virtual_stages: int) -> None:
    """Raise InputError for arguments from which no schedule can be built."""
    if name not in SCHEDULES:
        message = f"unknown schedule {name!r} (known: {', '.join(SCHEDULES)})"
        raise InputError(message)
    counts = {"ranks": ranks, "micro-batches": microbatches, "virtual stages": virtual_stages}
    for noun, count in counts.items():
        if count < 1:
            message = f"a schedule needs at least one of {noun} ({count} given)"
            raise InputError(message)
    wanted = _wanted(name, virtual_stages)
    if wanted is not None:
        message = f"{name} {wanted} (virtual_stages={virtual_stages} given)"
        raise InputError(message)


def _wanted(name: str, virtual_stages: int) -> str | None:
    """The fault in a number of stages on each rank, if any."""
    if name == "interleaved":
        return "needs virtual_stages >= 2" if virtual_stages < 2 else None
    if name in V:
        return "always has 2 stages on each rank" if virtual_stages > 2 else None
    if virtual_stages > 1:
        return "has one stage on each rank: for several take interleaved"
    return None
