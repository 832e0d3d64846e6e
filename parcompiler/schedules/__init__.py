"""Pipeline schedules by name: pure functions from ranks and micro-batches to orders of compute."""

from __future__ import annotations

from parcompiler.errors import InputError
from parcompiler.schedules.gpipe import gpipe
from parcompiler.schedules.naive import naive
from parcompiler.schedules.one_f_one_b import one_f_one_b
from parcompiler.schedules.schedule import Action, Schedule

SCHEDULES = {"naive": naive, "gpipe": gpipe, "1f1b": one_f_one_b}

__all__ = ["SCHEDULES", "Action", "Schedule", "build"]


def build(name: str, ranks: int, microbatches: int) -> Schedule:
    """The named schedule for `ranks` stages, one on each rank, and `microbatches` per step.

    Raises InputError for an unknown name or counts that are not positive.
    """
    if name not in SCHEDULES:
        message = f"unknown schedule {name!r} (known: {', '.join(SCHEDULES)})"
        raise InputError(message)
    for what, count in (("ranks", ranks), ("micro-batches", microbatches)):
        if count < 1:
            message = f"a schedule needs at least one of {what} ({count} given)"
            raise InputError(message)
    return Schedule(name, tuple(range(ranks)), SCHEDULES[name](ranks, microbatches))
