"""Rules on parameters of which each data rank keeps only rows: whole when they are read, and freed
when they are not.

    UNSHARD stage 2 mb 0      whole from here on
    FORWARD stage 2 mb 0      reads them, and so do BACKWARD and BACKWARD_INPUT
    RESHARD stage 2 mb 0      rows from here on

Which stages have parameters is derived from the operators. Data replicas run one list, and so meet
in one order; that their rows make up whole tensors follows from `pieces`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from parcompiler.instruction import Instruction, Kind
from parcompiler.verifier.fault import Fault
from parcompiler.verifier.steps import StepIndex

WHOLE = "a stage computes with whole parameters"
FREED = "whole parameters are freed"
AHEAD = 2  # stages of a rank that may be whole besides the one that computes


def faults(step: StepIndex) -> Iterator[Fault]:
    """All faults of the instructions that make parameters whole and free them."""
    if step.wiring.lowered.zero < 3:
        return
    for j, stage in enumerate(step.wiring.stages):
        if 0 <= stage.rank < len(step.lists):
            yield from _of_stage(step, j, stage.rank)
    for rank in range(len(step.lists)):
        yield from _crowded(step, rank)


def _of_stage(step: StepIndex, j: int, rank: int) -> Iterator[Fault]:
    """A stage is whole where it computes, and freed after its last use."""
    changes = {place: step.at(rank, place) for place in step.sharding.get(j, ())}
    if not _has_parameters(step, j):
        for line in changes.values():
            yield Fault(FREED, f"rank {rank}: {line}: the stage has no parameters")
        return
    kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT)
    reads = chain.from_iterable(step.computed[kind, j].values() for kind in kinds)
    whole: Instruction | None = None
    last: Instruction | None = None
    for place in sorted({*changes, *reads}):
        line = step.at(rank, place)
        if line.kind is Kind.UNSHARD:
            if whole is not None:
                yield Fault(FREED, f"rank {rank}: {line}: it is whole since {whole}")
            whole = last = line
        elif line.kind is Kind.RESHARD:
            if whole is None:
                yield Fault(FREED, f"rank {rank}: {line}: it is not whole")
            whole = None
        elif whole is None:
            freed = f" (freed behind {last})" if last is not None else ""
            yield Fault(WHOLE, f"rank {rank}: {line} has rows of its parameters alone{freed}")
    if whole is not None:
        yield Fault(FREED, f"rank {rank} never reshards stage {j} after {whole}")


def _crowded(step: StepIndex, rank: int) -> Iterator[Fault]:
    """Few stages of a rank are whole at once."""
    whole: set[int | None] = set()
    for line in step.lists[rank]:
        if line.kind is Kind.UNSHARD:
            whole.add(line.stage)
            if len(whole) > AHEAD + 1:
                text = ", ".join(str(j) for j in sorted(j for j in whole if j is not None))
                yield Fault(FREED, f"rank {rank}: {line}: stages {text} are whole at once")
                return
        elif line.kind is Kind.RESHARD:
            whole.discard(line.stage)


def _has_parameters(step: StepIndex, j: int) -> bool:
    """Whether a stage holds parameters."""
    by_name = step.wiring.graph.by_name
    held = (by_name.get(name) for name in step.wiring.stages[j].tensors)
    return any(item is not None and not item.buffer for item in held)
