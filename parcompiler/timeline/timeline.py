"""A simulated step: the time of every instruction, and the memory of every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from parcompiler.instruction import BEHIND, WORK, Instruction, Kind
from parcompiler.schedules.action import LETTERS

WIDTH = 64  # columns of the drawn step
BUSY = WORK | {Kind.UPDATE}  # a rank is not idle in these
DRAWN = {**LETTERS, Kind.UPDATE: "U"}


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """Seconds from the start of the step: compute and collectives on `rank`, a SEND on its link."""

    rank: int
    begin: float
    end: float
    instruction: Instruction


@dataclass(frozen=True)
class Timeline:
    """A simulated step. Seconds and bytes; one entry per rank where it is a tuple of numbers.

    `bubble` is the fraction of the step in which a rank does not compute. `peak_memory` counts
    resident bytes, activations of micro-batches in flight, message buffers, and at the end the
    bytes of the optimizer's step; `memory` has for each rank its changes (second, bytes from then
    on). `events` are sorted by their start.
    """

    step_time: float
    bubble: tuple[float, ...]
    peak_memory: tuple[int, ...]
    events: tuple[TimelineEvent, ...] = field(repr=False)
    memory: tuple[tuple[tuple[float, int], ...], ...] = field(repr=False)

    @property
    def period(self) -> float:
        """Seconds from one step to the next if no rank waits at its end for the others: the longest
        time of a rank from its first compute to the end of its own update.

        A norm for clipping, or the check of a loss scale, makes ranks wait: then the next step
        follows after `step_time`. (Qi et al. 2023, arXiv 2401.10241, section 4, validate after the
        update.)
        """
        spans = []
        for rank in range(len(self.bubble)):
            events = [event for event in self.events if event.rank == rank]
            behind = [e for e in events if e.instruction.kind in BEHIND | {Kind.UPDATE}]
            before = [e for e in events if e.instruction.kind in BUSY | {Kind.REDUCE_GRADIENTS}]
            first = min((event.begin for event in before), default=0.0)
            ends = [event.end for event in before if event.instruction.kind is not Kind.UPDATE]
            update = sum(event.end - event.begin for event in behind)
            spans.append(max(ends, default=0.0) - first + update)
        return min(self.step_time, max(spans, default=0.0))

    def __str__(self) -> str:
        """The numbers of each rank and a drawing of its step; `.` is idle."""
        idle = sum(self.bubble) / len(self.bubble) if self.bubble else 0.0
        largest = in_units(max(self.peak_memory, default=0))
        first = f"step {self.step_time:.6g} s, {100 * idle:.1f} % idle, at most {largest} on a rank"
        return "\n".join([first, *self._rows()])

    def _rows(self) -> Iterator[str]:
        """One line per rank."""
        scale = WIDTH / self.step_time if self.step_time else 0.0
        drawn = [["."] * WIDTH for _ in self.bubble]
        for event in self.events:
            if event.instruction.kind in DRAWN:
                begin, end = round(event.begin * scale), round(event.end * scale)
                line = event.instruction
                label = f"{DRAWN[line.kind]}{'' if line.microbatch is None else line.microbatch}"
                drawn[event.rank][begin:end] = label.ljust(end - begin, "-")[: end - begin]
        for rank, (bubble, peak) in enumerate(zip(self.bubble, self.peak_memory, strict=True)):
            numbers = f"rank {rank:<3} {100 * bubble:4.1f} % {in_units(peak):>12}"
            yield f"{numbers}  {''.join(drawn[rank])}"


def idle(events: Iterable[TimelineEvent], step_time: float, ranks: int) -> tuple[float, ...]:
    """The fraction of the step in which each rank does not compute."""
    busy = [0.0] * ranks
    for event in events:
        if event.instruction.kind in BUSY:
            busy[event.rank] += event.end - event.begin
    return tuple(1.0 - seconds / step_time if step_time else 0.0 for seconds in busy)


def in_units(nbytes: float) -> str:
    """Bytes in the largest unit that does not exceed them.

    >>> in_units(3 * 2**29), in_units(1000)
    ('1.5 GiB', '1000 B')
    """
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} GiB"
