"""All rules, one family after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from parcompiler.errors import PlanError
from parcompiler.lower.lowered import Lowered
from parcompiler.verifier import (
    buckets,
    collectives,
    computes,
    held,
    messages,
    parts,
    signature,
    stages,
    tensors,
    vocabulary,
    waiting,
)
from parcompiler.verifier.fault import Fault
from parcompiler.verifier.held import Memory
from parcompiler.verifier.steps import Step, steps_of
from parcompiler.verifier.wiring import Wiring

SHOWN = 20  # faults that an error lists; one mistake may break many rules


def verify(lowered: Lowered, memory: Memory | None = None) -> None:
    """Prove a lowered program, and that it fits into memory where a limit is given.

    Raises PlanError that lists what is wrong.
    """
    found = list(faults(lowered, memory))
    if found:
        raise PlanError(_summary(found))


def faults(lowered: Lowered, memory: Memory | None = None) -> Iterator[Fault]:
    """Every fault of a lowered program; none if it does what the model does."""
    wiring = Wiring(lowered)
    yield from signature.faults(wiring)
    yield from stages.faults(wiring)
    yield from tensors.faults(wiring)
    yield from vocabulary.faults(wiring)
    yield from buckets.faults(wiring)
    if len(lowered.evaluation) != lowered.size:
        return  # as `stages` has said
    for step in steps_of(wiring, lowered):
        for fault in _of_step(step, memory):
            yield fault if step.training else _in_evaluation(fault)


def _of_step(step: Step, memory: Memory | None) -> Iterator[Fault]:
    """The faults of the instruction lists."""
    yield from step.faults
    yield from computes.faults(step)
    yield from messages.faults(step)
    yield from parts.faults(step)
    yield from collectives.faults(step)
    yield from waiting.faults(step)
    if memory is not None:
        yield from held.faults(step, memory)


def _in_evaluation(fault: Fault) -> Fault:
    """A fault that says where it is; most are in both programs or in training."""
    return dataclasses.replace(fault, detail=f"in evaluation, {fault.detail}")


def _summary(found: list[Fault]) -> str:
    """What the error says."""
    count = f"{len(found)} rule{'s' if len(found) > 1 else ''}"
    lines = [f"  * {fault}" for fault in found[:SHOWN]]
    if len(found) > SHOWN:
        lines.append(f"  … and {len(found) - SHOWN} more (parcompiler.verifier.faults yields all)")
    return "\n".join([f"the lowered program breaks {count}:", *lines])
