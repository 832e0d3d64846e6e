"""The rule that memory suffices: a ledger of what is resident and in flight, at every instruction.

    states of parameters           all the time
    gradients of parameters        from the first BACKWARD on, or from the first
                                   BACKWARD_INPUT and the first BACKWARD_WEIGHT on
    activations of (stage, mb)     FORWARD          to   BACKWARD or BACKWARD_INPUT
    deferred products of weights   BACKWARD_INPUT   to   BACKWARD_WEIGHT
    workspace                      while one of these runs
    a received value               RECV             to   the last BACKWARD or BACKWARD_INPUT
                                                         of its readers
    a received gradient            RECV             to   BACKWARD or BACKWARD_INPUT
    gathered parameters            UNSHARD          to   RESHARD
    shards of summed gradients     behind the list, in the optimizer's step

and of the vocabulary, where every rank has rows of it,

    what S saves                   S                to   T
    x, for S and T                 BROADCAST        to   T (in evaluation S or NORMALIZE)
    the gradient of a lookup       BROADCAST        to   EMBED_BACKWARD
    a sum, on its target           REDUCE           to   the last of its uses, like a message

These are the bytes of the simulator, in the order of the list instead of time: a sent tensor is
freed at its SEND, and a summand at its REDUCE, so that the proof does not depend on the speed of
links.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from parcompiler.errors import InputError
from parcompiler.instruction import COMPUTE, HEAD, SHARDING, TRANSFERS, Kind
from parcompiler.schedules.action import NOWHERE
from parcompiler.timeline import Made, StageCost, VocabularyCost
from parcompiler.timeline.timeline import in_units
from parcompiler.verifier.fault import Fault
from parcompiler.verifier.steps import Phase, Places, StepIndex

SUFFICES = "memory suffices"


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Bytes of each rank, and the costs of each stage.

    `vocabulary` are the costs, on every rank, of the layers that all ranks share.
    """

    costs: Sequence[StageCost]
    limits: Sequence[int]
    vocabulary: VocabularyCost | None = None


@dataclass(slots=True)
class MemoryLedger:
    """Bytes taken and freed on a rank, by the position of the instruction."""

    arriving: Counter[int] = field(default_factory=Counter)  # of messages
    leaving: Counter[int] = field(default_factory=Counter)
    begins: Counter[int] = field(default_factory=Counter)  # of activations and gradients
    ends: Counter[int] = field(default_factory=Counter)
    gradients: dict[int, int] = field(default_factory=dict)  # of parameters, by position
    # Position, stage, and whether a micro-batch begins (1) or ends (-1) there.
    in_flight: list[tuple[int, int, int]] = field(default_factory=list)


class Moment(NamedTuple):
    """Non-resident bytes on a rank at one instruction of its list."""

    position: int
    activations: int
    messages: int

    @property
    def total(self) -> int:
        """Bytes."""
        return self.activations + self.messages


def faults(step: StepIndex, memory: MemoryLimits) -> Iterator[Fault]:
    """A fault for each rank that exceeds its limit, at its peak."""
    stages, size = step.wiring.stages, step.wiring.lowered.size
    counts = len(memory.costs), len(memory.limits)
    if counts != (len(stages), size):
        message = (
            f"every stage needs a cost and every rank a limit ({len(stages)} and {size} wanted, "
            f"{counts[0]} and {counts[1]} given)"
        )
        raise InputError(message)
    if step.wiring.spread is not None and memory.vocabulary is None:
        message = "what all ranks have of the vocabulary needs a cost (none given)"
        raise InputError(message)
    early = [memory.vocabulary.resident if memory.vocabulary else 0] * size
    for stage, cost in zip(stages, memory.costs, strict=True):
        if 0 <= stage.rank < size:
            early[stage.rank] += cost.early
    ledgers = _ledgers(step, memory.costs)
    _add_vocabulary(step, ledgers, memory.vocabulary or VocabularyCost())
    for rank, ledger in enumerate(ledgers[:size]):
        fullest = _fullest(ledger)
        if early[rank] + fullest.total > memory.limits[rank]:
            yield from _at_most(step, rank, ledger, early[rank], fullest, memory.limits[rank])
        elif step.training:
            yield from _late(step, rank, early[rank], memory)


def _ledgers(step: StepIndex, costs: Sequence[StageCost]) -> list[MemoryLedger]:
    """The ledger of each rank."""
    ledgers = [MemoryLedger() for _ in step.lists]
    for j, stage in enumerate(step.wiring.stages):
        if step.training and 0 <= stage.rank < len(ledgers):
            ledger = ledgers[stage.rank]
            made = Made()
            lines = [(at, kind) for kind in COMPUTE for at in step.computed[kind, j].values()]
            for place, kind in sorted(lines):
                before = made.of.get(j, 0)
                begin, end = made.bytes(j, costs[j], kind)
                ledger.begins[place] += begin
                ledger.ends[place] += end if j in step.wiring.trained else -begin
                ledger.gradients[place] = made.of.get(j, 0) - before
            ledger.in_flight += ((at, j, 1) for at in step.computed[Kind.FORWARD, j].values())
            ledger.in_flight += ((at, j, -1) for at in step.done[j].values())
    for ledger, program in zip(ledgers, step.lists, strict=True):
        for place, line in enumerate(program):
            if line.kind in SHARDING and line.stage is not None and 0 <= line.stage < len(costs):
                side = ledger.arriving if line.kind is Kind.UNSHARD else ledger.leaving
                side[place] += costs[line.stage].gathered
    for crossing in step.wiring.crossings:
        value = step.wiring.lowered.values.get(crossing.name)
        if value is None or crossing.source == crossing.target:
            continue
        way = (crossing.source, crossing.target, crossing.name, False)
        readers = _last_uses(step, crossing.readers)
        _arrive(ledgers, crossing.target, step.received.get(way, {}), readers, value.nbytes)
        back = (crossing.target, crossing.source, crossing.name, True)
        uses = [step.back[crossing.maker]]
        _arrive(ledgers, crossing.source, step.received.get(back, {}), uses, value.nbytes)
    return ledgers


def _add_vocabulary(step: StepIndex, ledgers: Sequence[MemoryLedger], cost: VocabularyCost) -> None:
    """Enter the bytes that ranks save and receive for the layers of the vocabulary."""
    wiring = step.wiring
    values = wiring.lowered.values
    for rank, ledger in enumerate(ledgers):
        heads = [step.places(rank, Phase(kind)) for kind in sorted(HEAD)]
        first = step.places(rank, Phase(Kind.S))
        last = {i: max(places[i] for places in heads if i in places) for i in first}
        begins, ends = {*first.values()}, {*last.values()}
        in_flight = most = 0
        for place in sorted(begins | ends):
            if place in begins:
                in_flight += 1
                ledger.begins[place] += cost.saved - (cost.reused if in_flight <= most else 0)
                most = max(most, in_flight)
            if place in ends:
                in_flight -= 1
                ledger.ends[place] -= cost.saved - cost.reused
        for part, places in step.parts[rank].items():
            if part.kind not in TRANSFERS or part.value not in values:
                continue
            nbytes = values[part.value].nbytes
            uses = heads if part.value not in wiring.lookups else []
            if part.kind is Kind.BROADCAST and part.gradient:
                uses = [step.places(rank, Phase(Kind.EMBED_BACKWARD, part.value))]
            elif part.kind is Kind.REDUCE:
                uses = _summed(step, rank, part)
                places = {i: at for i, at in places.items() if step.at(rank, at).peer == rank}
            _arrive(ledgers, rank, places, uses, nbytes)


def _summed(step: StepIndex, rank: int, part: Phase) -> list[Places]:
    """The instructions that use a sum, if this rank is its target."""
    wiring = step.wiring
    if part.gradient:
        home = wiring.head.stage if wiring.head else NOWHERE
        return [step.back[home]] if wiring.rank_of(home) == rank else []
    readers = wiring.readers.get(part.value, ())
    return _last_uses(step, [j for j in readers if wiring.rank_of(j) == rank])


def _last_uses(step: StepIndex, stages: Iterable[int]) -> list[Places]:
    """The instructions of some stages that use a received value last."""
    if step.training:
        return [step.back[j] for j in stages]
    return [step.computed[Kind.FORWARD, j] for j in stages]


def _arrive(
    ledgers: Sequence[MemoryLedger], rank: int, places: Places, uses: Sequence[Places], nbytes: int
) -> None:
    """Enter the messages that a rank receives at `places`, each until the last of its uses."""
    arriving, leaving = ledgers[rank].arriving, ledgers[rank].leaving
    for i, place in places.items():
        arriving[place] += nbytes
        last = max([use[i] for use in uses if i in use], default=None)
        if last is not None:
            leaving[last] += nbytes


def _fullest(ledger: MemoryLedger) -> Moment:
    """The first moment at which a rank holds most."""
    activations = messages = 0
    fullest = Moment(0, 0, 0)
    for place in sorted({*ledger.arriving, *ledger.leaving, *ledger.begins, *ledger.ends}):
        messages += ledger.arriving[place]
        activations += ledger.begins[place]
        if activations + messages > fullest.total:
            fullest = Moment(place, activations, messages)
        messages -= ledger.leaving[place]
        activations += ledger.ends[place]
    return fullest


def _late(step: StepIndex, rank: int, early: int, memory: MemoryLimits) -> Iterator[Fault]:
    """A fault if a rank has too little memory for the optimizer's step."""
    stages = zip(step.wiring.stages, memory.costs, strict=True)
    costs = [cost for stage, cost in stages if stage.rank == rank]
    resident = early + sum(cost.first.gradients for cost in costs)
    update = sum(cost.update for cost in costs)
    if update:
        parts = f"resident {in_units(resident)}, shards of summed gradients {in_units(update)} more"
        where, total = "in the optimizer's step", resident + update
        yield from _too_much(rank, total, memory.limits[rank], where, parts)


def _at_most(
    step: StepIndex, rank: int, ledger: MemoryLedger, early: int, fullest: Moment, limit: int
) -> Iterator[Fault]:
    """A fault at a rank's peak, if that is too much."""
    place = fullest.position
    gradients = sum(size for when, size in ledger.gradients.items() if when < place)
    in_flight = Counter[int]()
    for when, j, change in ledger.in_flight:
        in_flight[j] += change if when < place or (when == place and change > 0) else 0
    stages = [j for j, stage in enumerate(step.wiring.stages) if stage.rank == rank]
    counts = " + ".join(str(in_flight[j]) for j in stages)
    noun = "micro-batch" if counts == "1" else "micro-batches"
    activations = in_units(fullest.activations - gradients)
    parts = (
        f"resident {in_units(early + gradients)}, activations of {counts} {noun} {activations}, "
        f"messages {in_units(fullest.messages)}"
    )
    where = f"at {step.at(rank, place) if step.lists[rank] else 'its begin'}"
    yield from _too_much(rank, early + fullest.total, limit, where, parts)


def _too_much(rank: int, total: int, limit: int, where: str, parts: str) -> Iterator[Fault]:
    """A fault with the bytes by which a rank exceeds its limit, and their parts."""
    if total > limit:
        excess, parts = in_units(total - limit), f"limit {in_units(limit)}; {parts}"
        detail = f"rank {rank} holds {in_units(total)} {where}, {excess} too much ({parts})"
        yield Fault(SUFFICES, detail)
