"""The rule that what a rank holds fits into its memory, at every instruction of its list.

    held      resident                       all the time
              gradients of parameters        from the first BACKWARD on, or from the first
                                             BACKWARD_INPUT and the first BACKWARD_WEIGHT on
              activations of (stage, mb)     FORWARD      to   BACKWARD or BACKWARD_INPUT
              what linear layers left        BACKWARD_INPUT   to   BACKWARD_WEIGHT
              what is alive for a moment     while one of these runs
              a received value               RECV         to   the last BACKWARD or BACKWARD_INPUT
                                                               of its readers
              a received gradient            RECV         to   BACKWARD or BACKWARD_INPUT
              gradients of masters           in the optimizer's step behind the list

and of the vocabulary, where every rank has rows of it,

    what S saves                   S            to   T
    x, for S and T                 BROADCAST    to   T (in evaluation the last of S and NORMALIZE)
    the gradient of a lookup       BROADCAST    to   EMBED_BACKWARD
    a sum, where it goes           REDUCE       to   the last of its uses, like a message

These are the bytes of the simulator, in the order of the list instead of that of time: a tensor
that is sent leaves with its SEND, and a part of a sum with its REDUCE, and so how fast the links
are is no part of the proof.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from parcompiler.errors import InputError
from parcompiler.instruction import COMPUTE, HEAD, TRANSFERS, Kind
from parcompiler.schedules.action import NOWHERE
from parcompiler.timeline import Made, StageCost, VocabularyCost
from parcompiler.verifier.fault import Fault
from parcompiler.verifier.steps import Part, Places, Step

SUFFICES = "memory suffices"


@dataclass(frozen=True, slots=True)
class Memory:
    """What there is and what it is needed for: bytes of each rank, and what each stage costs.

    `vocabulary` is what every rank has of the layers that all ranks share.
    """

    costs: Sequence[StageCost]
    limits: Sequence[int]
    vocabulary: VocabularyCost | None = None


@dataclass(slots=True)
class Ledger:
    """What comes and goes on a rank, by the place of the instruction that takes or frees it."""

    arriving: Counter[int]  # bytes of messages
    leaving: Counter[int]
    changes: dict[int, tuple[int, int]]  # bytes of activations with its begin, and with its end
    flying: list[
        tuple[int, int, int]
    ]  # place, stage, whether a micro-batch begins (1) or ends (-1)
    made: dict[int, int] = field(default_factory=dict)  # gradients of parameters, by place
    saving: dict[int, int] = field(default_factory=dict)  # what S saves, in bytes
    done: dict[int, int] = field(default_factory=dict)  # and where that ends


class Moment(NamedTuple):
    """What a rank holds at a place of its list, besides what is resident."""

    position: int
    activations: int
    messages: int

    @property
    def total(self) -> int:
        """Bytes."""
        return self.activations + self.messages


def faults(step: Step, memory: Memory) -> Iterator[Fault]:
    """A fault for each rank that holds too much, where it holds most."""
    stages, size = step.wiring.stages, step.wiring.lowered.size
    found = len(memory.costs), len(memory.limits)
    if found != (len(stages), size):
        message = (
            f"every stage needs a cost and every rank a limit ({len(stages)} and {size} wanted, "
            f"{found[0]} and {found[1]} given)"
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
    _share(step, ledgers, memory.vocabulary.saved if memory.vocabulary else 0)
    for rank, ledger in enumerate(ledgers[:size]):
        fullest = max(_moments(ledger), key=lambda moment: moment.total)
        if early[rank] + fullest.total > memory.limits[rank]:
            yield _fault(step, rank, ledger, early[rank], fullest, memory.limits[rank])
        elif step.training:
            yield from _late(step, rank, early[rank], memory)


def _ledgers(step: Step, costs: Sequence[StageCost]) -> list[Ledger]:
    """What comes and goes on each rank."""
    ledgers = [Ledger(Counter(), Counter(), {}, []) for _ in step.lists]
    for j, stage in enumerate(step.wiring.stages):
        if step.training and 0 <= stage.rank < len(ledgers):
            ledger = ledgers[stage.rank]
            made = Made()
            lines = [(at, kind) for kind in COMPUTE for at in step.computed[kind, j].values()]
            for place, kind in sorted(lines):
                before = made.of.get(j, 0)
                taken, given = made.bytes(j, costs[j], kind)
                ledger.changes[place] = taken, given if j in step.wiring.trained else -taken
                ledger.made[place] = made.of.get(j, 0) - before
            ledger.flying += ((at, j, 1) for at in step.computed[Kind.FORWARD, j].values())
            ledger.flying += ((at, j, -1) for at in step.done[j].values())
    for crossing in step.wiring.crossings:
        value = step.wiring.lowered.values.get(crossing.name)
        if value is None or crossing.source == crossing.target:
            continue
        way = (crossing.source, crossing.target, crossing.name, False)
        readers = [
            step.back[j] if step.training else step.computed[Kind.FORWARD, j]
            for j in crossing.readers
        ]
        _arrive(ledgers, crossing.target, step.received.get(way, {}), readers, value.nbytes)
        back = (crossing.target, crossing.source, crossing.name, True)
        uses = [step.back[crossing.maker]]
        _arrive(ledgers, crossing.source, step.received.get(back, {}), uses, value.nbytes)
    return ledgers


def _share(step: Step, ledgers: Sequence[Ledger], saved: int) -> None:
    """Enter what ranks hold of the layers that all share."""
    wiring = step.wiring
    values = wiring.lowered.values
    for rank, ledger in enumerate(ledgers):
        heads = [step.places(rank, Part(kind)) for kind in sorted(HEAD)]
        for i, place in step.places(rank, Part(Kind.S)).items():
            ledger.saving[place] = saved
            ledger.done[max(found[i] for found in heads if i in found)] = saved
        for part, places in step.parts[rank].items():
            if part.kind not in TRANSFERS or part.value not in values:
                continue
            nbytes = values[part.value].nbytes
            uses = heads if part.value not in wiring.lookups else []
            if part.kind is Kind.BROADCAST and part.gradient:
                uses = [step.places(rank, Part(Kind.EMBED_BACKWARD, part.value))]
            elif part.kind is Kind.REDUCE:
                uses = _summed(step, rank, part)
                places = {i: at for i, at in places.items() if step.at(rank, at).peer == rank}
            _arrive(ledgers, rank, places, uses, nbytes)


def _summed(step: Step, rank: int, part: Part) -> list[Places]:
    """What uses a sum on the rank where it goes."""
    wiring = step.wiring
    if part.gradient:
        home = wiring.head.stage if wiring.head else NOWHERE
        return [step.back[home]] if wiring.rank_of(home) == rank else []
    stages = [j for j in wiring.readers.get(part.value, ()) if wiring.rank_of(j) == rank]
    if step.training:
        return [step.back[j] for j in stages]
    return [step.computed[Kind.FORWARD, j] for j in stages]


def _arrive(
    ledgers: Sequence[Ledger], rank: int, places: Places, uses: Sequence[Places], nbytes: int
) -> None:
    """Enter the messages that a rank receives at `places`, each until the last of its uses."""
    for i, place in places.items():
        ledgers[rank].arriving[place] += nbytes
        last = max((use[i] for use in uses if i in use), default=None)
        if last is not None:
            ledgers[rank].leaving[last] += nbytes


def _moments(ledger: Ledger) -> Iterator[Moment]:
    """What a rank holds wherever that changes, the begin included."""
    activations = messages = 0
    yield Moment(0, 0, 0)
    places = {*ledger.arriving, *ledger.leaving, *ledger.changes}
    places |= {*ledger.saving, *ledger.done}
    for place in sorted(places):
        messages += ledger.arriving[place]
        taken, given = ledger.changes.get(place, (0, 0))
        activations += taken + ledger.saving.get(place, 0)
        yield Moment(place, activations, messages)
        messages -= ledger.leaving[place]
        activations += given - ledger.done.get(place, 0)


def _late(step: Step, rank: int, early: int, memory: Memory) -> Iterator[Fault]:
    """A fault where a rank has too little for the optimizer's step."""
    own = [
        x for stage, x in zip(step.wiring.stages, memory.costs, strict=True) if stage.rank == rank
    ]
    resident = early + sum(cost.first.gradients for cost in own)
    update = sum(cost.update for cost in own)
    update += memory.vocabulary.update if memory.vocabulary else 0
    limit, total = memory.limits[rank], resident + update
    if update and total > limit:
        parts = (
            f"limit {_in_units(limit)}; resident {_in_units(resident)}, gradients of masters "
            f"{_in_units(update)} more"
        )
        excess = _in_units(total - limit)
        where = f"rank {rank} holds {_in_units(total)} in the optimizer's step"
        yield Fault(SUFFICES, f"{where}, {excess} too much ({parts})")


def _fault(step: Step, rank: int, ledger: Ledger, early: int, fullest: Moment, limit: int) -> Fault:
    """Where a rank holds most, and what that consists of."""
    place, total = fullest.position, early + fullest.total
    made = sum(size for when, size in ledger.made.items() if when < place)
    flying = Counter[int]()
    for when, j, change in ledger.flying:
        flying[j] += change if when < place or (when == place and change > 0) else 0
    stages = [j for j, stage in enumerate(step.wiring.stages) if stage.rank == rank]
    counts = " + ".join(str(flying[j]) for j in stages)
    noun = "micro-batch" if counts == "1" else "micro-batches"
    parts = (
        f"limit {_in_units(limit)}; resident {_in_units(early + made)}, activations of {counts} "
        f"{noun} {_in_units(fullest.activations - made)}, messages {_in_units(fullest.messages)}"
    )
    at = step.at(rank, place) if step.lists[rank] else "its begin"
    excess = _in_units(total - limit)
    return Fault(
        SUFFICES, f"rank {rank} holds {_in_units(total)} at {at}, {excess} too much ({parts})"
    )


def _in_units(nbytes: float) -> str:
    """Bytes in the largest unit of which there is one.

    >>> _in_units(3 * 2**29), _in_units(1000)
    ('1.5 GiB', '1000 B')
    """
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} GiB"
