"""What the way of the data axis means for the numbers, in words."""

from __future__ import annotations

from parcompiler.data_updates import DataUpdates
from parcompiler.report.units import BYTES, quantity

DIGITS = {"bf16": 8, "fp16": 11}  # bits of a significand


def meaning(updates: DataUpdates, server: tuple[int, ...] = ()) -> str:
    """What data ranks do, and how far the numbers are those of one process; of a `server` the
    bytes through its link and those of its states."""
    link, states = (quantity(size, BYTES) for size in server or (0, 0))
    load = f"data rank 0 has {link} through its link in a step, and states of {states}, others none"
    match updates.compression:
        case "bf16" | "fp16" as name:
            return (
                f"all-reduce in {name}: gradients, and their sums, are rounded to {DIGITS[name]} "
                "bits, so the numbers are near those of one process"
            )
    if updates.rank:
        return (
            f"all-reduce of factors of rank {updates.rank} for each matrix, with error feedback: "
            "what a step leaves out is added to the next; near the numbers of one process over "
            "many steps, not in each"
        )
    if updates.way == "local":
        rate, momentum = updates.outer
        step = f"as a step with learning rate {rate:g} and Nesterov's momentum {momentum:g}"
        how = "as they are" if updates.averages else step
        return (
            f"local: each data rank steps by its own gradients, and every {updates.every} steps "
            f"weights are averaged, {how}; other numbers than those of one process, repeatable"
        )
    if updates.way == "parameter-server":
        return f"parameter-server: {load}; the numbers of one process, as with an all-reduce"
    if updates.way == "asynchronous":
        return (
            f"asynchronous: {load}; each gradient counts as it arrives, of data ranks that are at "
            f"most {updates.staleness} steps ahead of the slowest; other numbers in each run, "
            "repeatable from worker.arrivals"
        )
    return "all-reduce: the numbers of one process"
