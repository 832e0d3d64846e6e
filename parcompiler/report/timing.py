"""A measured step -> the times that stand beside the predicted ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from math import isfinite
from typing import Protocol

from parcompiler.errors import InputError
from parcompiler.instruction import Instruction, Kind
from parcompiler.report.data import Mesh
from parcompiler.report.events import Measured, Ran

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
    seconds: float, trace: Sequence[Iterable[Recorded]] | None, stages: int, mesh: Mesh
) -> Measured:
    """The time of a step and, from its trace by rank, its events and the means of each stage.

    A trace has all ranks of the mesh, of which those with data and tensor coordinate 0 are kept, or
    these alone. Raises InputError when the time is no positive number, or the trace is of another
    program.
    """
    if not (isfinite(seconds) and seconds > 0):
        message = f"a measured step takes a positive number of seconds ({seconds} given)"
        raise InputError(message)
    if trace is None:
        return Measured(float(seconds))
    own = [tuple(records) for records in _column(trace, mesh)]
    records = [record for some in own for record in some]
    forward, backward = (tuple(_means(records, kinds, stages)) for kinds in (_FORWARD, _BACKWARD))
    return Measured(float(seconds), forward, backward, tuple(_events(own)))


def _column(trace: Sequence[Iterable[Recorded]], mesh: Mesh) -> Sequence[Iterable[Recorded]]:
    """The ranks with data and tensor coordinate 0: the others run the same instructions."""
    ranks, copies = mesh.pipeline, mesh.data * mesh.tensor
    if len(trace) == ranks * copies:
        return trace[::copies]
    if len(trace) != ranks:
        every = f" or {ranks * copies}" * (copies > 1)
        message = (
            f"a trace has the instructions of each rank ({ranks}{every} ranks, {len(trace)} given)"
        )
        raise InputError(message)
    return trace


def _events(trace: Sequence[Sequence[Recorded]]) -> list[Ran]:
    """The instructions of all ranks, by their begin."""
    events = (
        Ran(rank, float(own.begin), float(own.end), float(own.waited), str(own.instruction))
        for rank, records in enumerate(trace)
        for own in records
    )
    return sorted(events, key=lambda event: (event.begin, event.rank))


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
