"""The times of instructions, in the simulated step and in a measured one.

In seconds since the step began; memory is in bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

from parcompiler.errors import InputError
from parcompiler.instruction import Instruction, Kind

if TYPE_CHECKING:
    from parcompiler.runtime.interpreter import InstructionTime

_FORWARD = {Kind.FORWARD}
_BACKWARD = {Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}


@dataclass(frozen=True, slots=True)
class StepEvent:
    """An instruction of `rank`, with its text.

    `waited` are the seconds that it waited for messages in a measured step; None in the simulated
    one.

    >>> StepEvent.parse("0 0.5 1.5 FORWARD stage 0 mb 3").instruction.microbatch
    3
    >>> StepEvent.parse("0 0.5 1.5 0.25 FORWARD stage 0 mb 3").waited
    0.25
    """

    rank: int
    begin: float
    end: float
    text: str
    waited: float | None = None

    def __str__(self) -> str:
        """The line that `parse` reads."""
        waited = "" if self.waited is None else f"{self.waited!r} "
        return f"{self.rank} {self.begin!r} {self.end!r} {waited}{self.text}"

    @classmethod
    def parse(cls, line: str) -> StepEvent:
        """Read one line. Raises InputError when it is not an event."""
        try:
            rank, begin, end, text = line.split(maxsplit=3)
            waited = None
            if not text[:1].isalpha():
                seconds, text = text.split(maxsplit=1)
                waited = _seconds(seconds)
            event = cls(int(rank), _seconds(begin), _seconds(end), text, waited)
            Instruction.parse(text)
            if event.end < event.begin:
                raise ValueError
        except ValueError as error:
            message = (
                "an event reads 'rank begin end instruction', with the seconds waited before the "
                f"instruction in a measured step ({line[:60]!r} found)"
            )
            raise InputError(message) from error
        return event

    @property
    def kind(self) -> Kind:
        """The kind of the instruction."""
        return Kind(self.text.split(maxsplit=1)[0])

    @property
    def instruction(self) -> Instruction:
        """The instruction."""
        return Instruction.parse(self.text)


@dataclass(frozen=True, slots=True)
class Level:
    """The memory of a rank from `second` on: `nbytes`."""

    second: float
    nbytes: int

    def __str__(self) -> str:
        """The line that `parse` reads."""
        return f"{self.second!r} {self.nbytes}"

    @classmethod
    def parse(cls, line: str) -> Level:
        """Read one line. Raises InputError when it is not a level."""
        try:
            second, nbytes = line.split()
            return cls(_seconds(second), int(nbytes))
        except ValueError as error:
            message = f"a level of memory reads 'second bytes' ({line[:60]!r} found)"
            raise InputError(message) from error


@dataclass(frozen=True, slots=True)
class Trail:
    """The simulated step: events by their begin, and for each rank the levels of its memory."""

    events: tuple[StepEvent, ...]
    memory: tuple[tuple[Level, ...], ...]


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A real step: its seconds, and by stage the mean of its forwards and backwards, if known.

    `events` are its instructions by their begin, where they were recorded.
    """

    seconds: float
    forward: tuple[float | None, ...] = ()
    backward: tuple[float | None, ...] = ()
    events: tuple[StepEvent, ...] = ()


def measured_step(
    seconds: float,
    trace: Sequence[Iterable[InstructionTime]] | None,
    stages: int,
    ranks: int,
    replicas: int,
) -> MeasuredStep:
    """The time of a step and, from its trace by rank, its events and the means of each stage.

    The pipeline has `ranks` ranks, each in `replicas` (data · tensor) that run the same
    instructions. A trace has all ranks, of which those with data and tensor coordinate 0 are kept,
    or only these. Raises InputError when the time is not a positive number, or the trace is of
    another program.
    """
    if not (isfinite(seconds) and seconds > 0):
        message = f"a measured step takes a positive number of seconds ({seconds} given)"
        raise InputError(message)
    if trace is None:
        return MeasuredStep(float(seconds))
    if len(trace) not in (ranks, ranks * replicas):
        every = f" or {ranks * replicas}" * (replicas > 1)
        message = (
            f"a trace has the instructions of each rank ({ranks}{every} ranks, {len(trace)} given)"
        )
        raise InputError(message)
    by_rank = [tuple(records) for records in trace[:: len(trace) // ranks]]
    events = [
        StepEvent(rank, float(r.begin), float(r.end), str(r.instruction), float(r.waited))
        for rank, records in enumerate(by_rank)
        for r in records
    ]
    records = [record for records in by_rank for record in records]
    forward, backward = (tuple(_means(records, kinds, stages)) for kinds in (_FORWARD, _BACKWARD))
    events.sort(key=lambda event: (event.begin, event.rank))
    return MeasuredStep(float(seconds), forward, backward, tuple(events))


def _means(
    records: Iterable[InstructionTime], kinds: Collection[Kind], stages: int
) -> Iterator[float | None]:
    """For each stage the mean time of its micro-batches; None if there are none.

    A backward in two parts takes the time of both.
    """
    times = [0.0] * stages
    counts: list[set[int | None]] = [set() for _ in range(stages)]
    for record in records:
        line = record.instruction
        if line.stage is not None and line.kind in kinds:
            if line.stage >= stages:
                message = f"the trace has a stage {line.stage} (the report has {stages} stages)"
                raise InputError(message)
            times[line.stage] += record.end - record.begin - record.waited
            counts[line.stage].add(line.microbatch)
    for seconds, microbatches in zip(times, counts, strict=True):
        yield seconds / len(microbatches) if microbatches else None


def _seconds(text: str) -> float:
    """A time in the step. Raises ValueError for an invalid one."""
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise ValueError
    return seconds
