"""A measured step -> the times that stand beside the predicted ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from math import isfinite
from typing import Protocol

from parcompiler.errors import InputError
from parcompiler.instruction import Instruction, Kind
from parcompiler.report.data import Measured

_FORWARD = {Kind.FORWARD}
_BACKWARD = {Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}


class Recorded(Protocol):
    """A measured instruction; seconds since the step began, `waited` of them for messages.

    `worker.trace()` gives these.
    """

    @property
    def instruction(self) -> Instruction: ...

    @property
    def begin(self) -> float: ...

    @property
    def end(self) -> float: ...

    @property
    def waited(self) -> float: ...


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
    means = (tuple(_means(records, kinds, stages)) for kinds in (_FORWARD, _BACKWARD))
    return Measured(float(seconds), *means)


def _means(
    records: Iterable[Recorded], kinds: Collection[Kind], stages: int
) -> Iterator[float | None]:
    """For each stage the mean time of its micro-batches; None where there is none.

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
