"""Rules on the compute of a step: every stage once for every micro-batch, in an order that works.

A backward is BACKWARD, or BACKWARD_INPUT and later BACKWARD_WEIGHT. Below, `back` computes
gradients of inputs (BACKWARD or BACKWARD_INPUT) and `done` those of weights (BACKWARD or
BACKWARD_WEIGHT). A dependency between instructions *on the same rank* is a pair of positions in its
list:

    FORWARD of the maker     before   the SEND of the value
    RECV of a value          before   the FORWARD of each stage that reads it
    RECV of its gradient     before   back of the maker
    back of each reader      before   the SEND of the gradient
    FORWARD, back            before   back, done
    last FORWARD             before   SHARE_LOSS
    last done                before   REDUCE_GRADIENTS
    done                     before   REDUCE_GRADIENTS of the micro-batch, the last one after all

and in an asynchronous step, of every stage

    BACKWARD                 before   its UPDATE
    UPDATE                   before   the next FORWARD or BACKWARD

so that an update uses the gradients of one micro-batch only, and a forward and its backward use the
weights after all earlier backwards.

Missing instructions are reported by the rule that counts them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain, pairwise

from parcompiler.instruction import BACKWARDS, Kind
from parcompiler.schedules.action import NOWHERE
from parcompiler.verifier import shared_vocabulary
from parcompiler.verifier.fault import Fault, numbers
from parcompiler.verifier.steps import Pair, Phase, Places, StepIndex
from parcompiler.verifier.wiring import Crossing

ONCE = "every stage runs every micro-batch"
FORM = "a backward is whole or in two parts"
IN_TURN = "buffers see the micro-batches in order"
UPDATED = "every backward is followed by its update"


def faults(step: StepIndex) -> Iterator[Fault]:
    """All faults of the compute instructions and of the order around them."""
    yield from _missing(step)
    for pair in chain(_pairs(step), shared_vocabulary.pairs(step)):
        yield from _swapped(step, pair)


def _missing(step: StepIndex) -> Iterator[Fault]:
    """Every stage has its FORWARD, in training its backward, for every micro-batch."""
    if not step.microbatches:
        yield Fault(ONCE, f"there is none ({step.wiring.lowered.microbatches} micro-batches)")
    every = set(step.microbatches)
    for j, stage in enumerate(step.wiring.stages):
        yield from _absent(stage.rank, Kind.FORWARD, j, every - set(step.computed[Kind.FORWARD, j]))
        if step.training:
            yield from _backwards(step, j, every)
        if step.asynchronous and j in step.wiring.trained:
            yield from _absent(
                stage.rank, Kind.UPDATE, j, every - set(step.computed[Kind.UPDATE, j])
            )


def _absent(rank: int, kind: Kind, j: int, missing: set[int], why: str = "") -> Iterator[Fault]:
    """A fault for the micro-batches for which a stage lacks an instruction."""
    if missing:
        yield Fault(ONCE, f"rank {rank} has no {kind} stage {j} {numbers(missing)}{why}")


def _backwards(step: StepIndex, j: int, every: set[int]) -> Iterator[Fault]:
    """A stage has the backward of every micro-batch, in one of the two forms and complete."""
    rank = step.wiring.stages[j].rank
    whole, inputs, weights = (
        set(step.computed[kind, j])
        for kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    )
    if j not in step.wiring.trained:
        for kind in (*sorted(BACKWARDS), Kind.BACKWARD_WEIGHT, Kind.UPDATE):
            if present := set(step.computed[kind, j]):
                detail = (
                    f"rank {rank} has {kind} stage {j} {numbers(present)}, which trains nothing"
                )
                yield Fault(FORM, detail)
        return
    yield from _absent(rank, Kind.BACKWARD, j, every - whole - inputs - weights)
    why = " after its BACKWARD_INPUT: what that keeps is never used nor released"
    yield from _absent(rank, Kind.BACKWARD_WEIGHT, j, inputs - whole - weights, why)
    why = " for its BACKWARD_WEIGHT"
    yield from _absent(rank, Kind.BACKWARD_INPUT, j, weights - whole - inputs, why)
    for kind, part in ((Kind.BACKWARD_INPUT, inputs), (Kind.BACKWARD_WEIGHT, weights)):
        if whole & part:
            detail = f"rank {rank} has BACKWARD and {kind} of stage {j} {numbers(whole & part)}"
            yield Fault(FORM, detail)


def _swapped(step: StepIndex, pair: Pair) -> Iterator[Fault]:
    """One fault for all micro-batches for which a pair is in the wrong order."""
    wrong = [i for i, place in pair.then.items() if place < pair.first.get(i, -1)]
    if wrong:
        first, then = (step.at(pair.rank, places[wrong[0]]) for places in (pair.first, pair.then))
        more = f" (and so for {numbers(wrong[1:])})" if wrong[1:] else ""
        yield Fault(pair.rule, f"rank {pair.rank}: {then} stands before {first}{more}")


def _pairs(step: StepIndex) -> Iterator[Pair]:
    """All pairs of instructions that must be in order."""
    for j, stage in enumerate(step.wiring.stages):
        forward = step.computed[Kind.FORWARD, j]
        yield Pair(stage.rank, forward, step.back[j])
        yield Pair(stage.rank, step.back[j], step.done[j])
        if step.asynchronous:
            yield from _updated(step, j)
        if step.wiring.updates_buffers(stage):
            # Running statistics depend on the order in which the micro-batches were averaged.
            before = {i + 1: place for i, place in forward.items()}
            yield Pair(stage.rank, before, forward, IN_TURN)
    for crossing in step.wiring.crossings:
        if crossing.source != crossing.target:
            yield from _sent(step, crossing)
            continue
        rank, maker = crossing.source, crossing.maker
        for j in crossing.readers:
            yield Pair(rank, step.computed[Kind.FORWARD, maker], step.computed[Kind.FORWARD, j])
            if crossing.differentiable:
                yield Pair(rank, step.back[j], step.back[maker])
    yield from _collected(step)


def _updated(step: StepIndex, j: int) -> Iterator[Pair]:
    """The order around the updates of a stage."""
    rank, update = step.wiring.stages[j].rank, step.computed[Kind.UPDATE, j]
    forward, backward = step.computed[Kind.FORWARD, j], step.computed[Kind.BACKWARD, j]
    microbatch = {place: i for i, place in backward.items()}
    places = sorted((*forward.values(), *microbatch))
    following = {microbatch[place]: then for place, then in pairwise(places) if place in microbatch}
    yield Pair(rank, backward, update, UPDATED)
    yield Pair(rank, update, following, UPDATED)


def _sent(step: StepIndex, crossing: Crossing) -> Iterator[Pair]:
    """The order around a message and, at both ends, around that of its gradient."""
    source, target, name = crossing.source, crossing.target, crossing.name
    way, back = (source, target, name, False), (target, source, name, True)
    yield Pair(source, step.computed[Kind.FORWARD, crossing.maker], step.sent[way])
    yield Pair(source, step.received[back], step.back[crossing.maker])
    for j in crossing.readers:
        yield Pair(target, step.received[way], step.computed[Kind.FORWARD, j])
        yield Pair(target, step.back[j], step.sent[back])


def _collected(step: StepIndex) -> Iterator[Pair]:
    """The order around collectives: they come after the computation of all their operands."""
    names = {item.label: item.names for item in step.wiring.lowered.sums}
    stages = {item.label: item.stage for item in step.wiring.lowered.buckets}
    for rank in range(len(step.lists)):
        last = {n: max(places.values()) for n, places in step.scatters[rank].items()}
        for label, places in step.scatters[rank].items():
            j = stages.get(label, NOWHERE)
            if j != NOWHERE and step.wiring.rank_of(j) == rank:
                yield Pair(rank, step.done[j], places)
        for label, place in (*step.reductions[rank].items(), *last.items()):
            holders = (step.wiring.holders.get(name, ()) for name in names.get(label, ()))
            for j in dict.fromkeys(chain.from_iterable(holders)):
                if step.wiring.stages[j].rank == rank:
                    yield Pair(rank, step.done[j], dict.fromkeys(step.done[j], place))
            for done in _in_rows(step, rank, names.get(label, ())):
                yield Pair(rank, done, dict.fromkeys(done, place))
    for j, stage in enumerate(step.wiring.stages):
        share = step.shares[stage.rank] if 0 <= stage.rank < len(step.shares) else None
        if stage.loss is not None and share is not None:
            forward = step.computed[Kind.FORWARD, j]
            yield Pair(stage.rank, forward, dict.fromkeys(forward, share))


def _in_rows(step: StepIndex, rank: int, names: Collection[str]) -> Iterator[Places]:
    """Where a rank adds to the gradients of its rows of these tensors."""
    wiring = step.wiring
    for value, item in wiring.lookups.items():
        if item.layer.weight in names:
            yield step.places(rank, Phase(Kind.EMBED_BACKWARD, value))
    if wiring.head is not None and {wiring.head.layer.weight, wiring.head.layer.bias} & {*names}:
        yield step.places(rank, Phase(Kind.T))
