"""A measured step -> the times that stand beside the predicted ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import isfinite
from typing import Protocol

from parcompiler.errors import InputError
from parcompiler.instruction import Instruction, Kind
from parcompiler.report.data import Measured


class Recorded(Protocol):
    """A measured instruction; seconds since the step began. `worker.trace()` gives these."""

    @property
    def instruction(self) -> Instruction: ...

    @property
    def begin(self) -> float: ...

    @property
    def end(self) -> float: ...


def measured(
    seconds: float, trace: Sequence[Iterable[Recorded]] | None, stages: int, ranks: int
) -> Measured:
    """The time of a step and, from its trace by rank, the means of each stage.

    Raises InputError when the time is no positive number, or the trace is of another program.
    """
    if not (isfinite(seconds) and seconds > 0):
        message = f"a measured step takes a positive number of seconds ({seconds} given)"
        raise InputError(message)
    if trace is None:
        return Measured(float(seconds))
    if len(trace) != ranks:
        message = f"a trace has the instructions of each rank ({ranks} ranks, {len(trace)} given)"
        raise InputError(message)
    records = [record for own in trace for record in own]
    means = (tuple(_means(records, kind, stages)) for kind in (Kind.FORWARD, Kind.BACKWARD))
    return Measured(float(seconds), *means)


def _means(records: Iterable[Recorded], kind: Kind, stages: int) -> Iterator[float | None]:
    """For each stage the mean time of its instructions of a kind; None where there is none."""
    found: list[list[float]] = [[] for _ in range(stages)]
    for record in records:
        stage = record.instruction.stage
        if stage is not None and record.instruction.kind is kind:
            if stage >= stages:
                message = f"the trace has a stage {stage} (the report has {stages} stages)"
                raise InputError(message)
            found[stage].append(record.end - record.begin)
    for times in found:
        yield sum(times) / len(times) if times else None
