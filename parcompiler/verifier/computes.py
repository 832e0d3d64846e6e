"""Rules on the compute of a step: every stage once for every micro-batch, in an order that works.

Whatever one instruction needs of another *on the same rank* is a pair of places in its list:

    FORWARD of the maker     before   the SEND of the value
    RECV of a value          before   the FORWARD of each stage that reads it
    RECV of its gradient     before   the BACKWARD of the maker
    BACKWARD of each reader  before   the SEND of the gradient
    last FORWARD, BACKWARD   before   SHARE_LOSS, REDUCE_GRADIENTS

What does not stand there at all is reported by the rule that counts it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from parcompiler.instruction import Kind
from parcompiler.verifier.fault import Fault, numbers
from parcompiler.verifier.steps import Step
from parcompiler.verifier.wiring import Crossing

ONCE = "every stage runs every micro-batch"
ORDERED = "nothing is used before it is there"
IN_TURN = "buffers see the micro-batches in order"


class Pair(NamedTuple):
    """On `rank`, what stands at `first[i]` must stand before what stands at `then[i]`."""

    rank: int
    first: Mapping[int, int]
    then: Mapping[int, int]
    rule: str = ORDERED


def faults(step: Step) -> Iterator[Fault]:
    """All faults of the compute instructions and of what must surround them."""
    yield from _missing(step)
    for pair in _pairs(step):
        yield from _swapped(step, pair)


def _missing(step: Step) -> Iterator[Fault]:
    """Every stage has its FORWARD, and in training its BACKWARD, for every micro-batch."""
    if not step.microbatches:
        yield Fault(ONCE, f"there is none ({step.wiring.lowered.microbatches} micro-batches)")
    kinds = (Kind.FORWARD, Kind.BACKWARD) if step.training else (Kind.FORWARD,)
    for j, stage in enumerate(step.wiring.stages):
        for kind in kinds:
            missing = set(step.microbatches) - set(step.computed[kind, j])
            if missing:
                detail = f"rank {stage.rank} has no {kind} stage {j} {numbers(missing)}"
                yield Fault(ONCE, detail)


def _swapped(step: Step, pair: Pair) -> Iterator[Fault]:
    """One fault for all micro-batches of which a pair is the wrong way round."""
    wrong = [i for i, place in pair.then.items() if place < pair.first.get(i, -1)]
    if wrong:
        first, then = (step.at(pair.rank, places[wrong[0]]) for places in (pair.first, pair.then))
        more = f" (and so for {numbers(wrong[1:])})" if wrong[1:] else ""
        yield Fault(pair.rule, f"rank {pair.rank}: {then} stands before {first}{more}")


def _pairs(step: Step) -> Iterator[Pair]:
    """Everything that must stand before something else."""
    for j, stage in enumerate(step.wiring.stages):
        forward = step.computed[Kind.FORWARD, j]
        yield Pair(stage.rank, forward, step.computed[Kind.BACKWARD, j])
        if step.wiring.updates_buffers(stage):
            # Running statistics depend on the order in which the micro-batches were averaged.
            before = {i + 1: place for i, place in forward.items()}
            yield Pair(stage.rank, before, forward, IN_TURN)
    for crossing in step.wiring.crossings:
        local = crossing.source == crossing.target
        yield from _handed_over(step, crossing) if local else _sent(step, crossing)
    yield from _collected(step)


def _handed_over(step: Step, crossing: Crossing) -> Iterator[Pair]:
    """The order around a value that stays on its rank."""
    rank, maker = crossing.source, crossing.maker
    for j in crossing.readers:
        yield Pair(rank, step.computed[Kind.FORWARD, maker], step.computed[Kind.FORWARD, j])
        if crossing.differentiable:
            yield Pair(rank, step.computed[Kind.BACKWARD, j], step.computed[Kind.BACKWARD, maker])


def _sent(step: Step, crossing: Crossing) -> Iterator[Pair]:
    """The order around a message and, at both ends, around that of its gradient."""
    source, target, name = crossing.source, crossing.target, crossing.name
    way, back = (source, target, name, False), (target, source, name, True)
    yield Pair(source, step.computed[Kind.FORWARD, crossing.maker], step.sent[way])
    yield Pair(source, step.received[back], step.computed[Kind.BACKWARD, crossing.maker])
    for j in crossing.readers:
        yield Pair(target, step.received[way], step.computed[Kind.FORWARD, j])
        yield Pair(target, step.computed[Kind.BACKWARD, j], step.sent[back])


def _collected(step: Step) -> Iterator[Pair]:
    """The order around collectives: they come when all that they collect has been computed."""
    tied = {item.label: item.name for item in step.wiring.lowered.tied}
    for rank in range(len(step.lists)):
        for label, place in step.reductions[rank].items():
            holders = step.wiring.holders.get(tied.get(label, ""), ())
            for j in holders:
                if step.wiring.stages[j].rank == rank:
                    backward = step.computed[Kind.BACKWARD, j]
                    yield Pair(rank, backward, dict.fromkeys(backward, place))
    for j, stage in enumerate(step.wiring.stages):
        share = step.shares[stage.rank] if 0 <= stage.rank < len(step.shares) else None
        if stage.loss is not None and share is not None:
            forward = step.computed[Kind.FORWARD, j]
            yield Pair(stage.rank, forward, dict.fromkeys(forward, share))
