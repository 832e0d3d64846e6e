"""All rules, one family after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from parcompiler.errors import PlanError
from parcompiler.lower.lowered import Lowered
from parcompiler.verifier import (
    communication,
    compute,
    deadlock,
    memory_ledger,
    sharding,
    shared_vocabulary,
    signature,
    stages,
    tensors,
)
from parcompiler.verifier.fault import Fault
from parcompiler.verifier.memory_ledger import MemoryLimits
from parcompiler.verifier.steps import StepIndex
from parcompiler.verifier.wiring import Wiring

SHOWN = 20  # faults that an error lists; one mistake may break many rules


def verify(lowered: Lowered, memory: MemoryLimits | None = None) -> None:
    """Verify a lowered program, and that it fits into memory if limits are given.

    Raises a PlanError that lists all faults.
    """
    broken = list(faults(lowered, memory))
    if not broken:
        return
    lines = [f"the lowered program breaks {len(broken)} rule{'s' if len(broken) > 1 else ''}:"]
    lines += [f"  * {fault}" for fault in broken[:SHOWN]]
    if len(broken) > SHOWN:
        lines.append(f"  … and {len(broken) - SHOWN} more (parcompiler.verifier.faults yields all)")
    raise PlanError("\n".join(lines))


def faults(lowered: Lowered, memory: MemoryLimits | None = None) -> Iterator[Fault]:
    """Every fault of a lowered program; none if it computes what the model computes."""
    wiring = Wiring(lowered)
    for of_program in (signature, stages, tensors):
        yield from of_program.faults(wiring)
    yield from shared_vocabulary.layer_faults(wiring)
    if len(lowered.evaluation) != lowered.size:
        return  # already reported by `stages`
    yield from _step_faults(StepIndex(wiring, lowered.instructions, training=True), memory)
    for fault in _step_faults(StepIndex(wiring, lowered.evaluation, training=False), memory):
        yield dataclasses.replace(fault, detail=f"in evaluation, {fault.detail}")


def _step_faults(step: StepIndex, memory: MemoryLimits | None) -> Iterator[Fault]:
    """The faults of the instruction lists of training or of evaluation."""
    yield from step.faults
    for of_step in (compute, communication, shared_vocabulary, sharding, deadlock):
        yield from of_step.faults(step)
    if memory is not None:
        yield from memory_ledger.faults(step, memory)
