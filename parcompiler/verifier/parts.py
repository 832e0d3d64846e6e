"""Rules on the vocabulary in a step: every rank does its part once, between the right collectives.

All ranks have the same lines for the layers of the vocabulary, every micro-batch once. On a rank,
what stands on the left must stand before what stands on the right; e is an embedded value, used on
rank Z, and x what the head takes, from rank L:

    EMBED e                                    REDUCE e to Z
    REDUCE e                  (on Z)           FORWARD of each stage that reads it
    BACKWARD of each of them  (on Z)           BROADCAST e.grad from Z
    BROADCAST e.grad                           EMBED_BACKWARD e
    FORWARD of the maker      (on L)           BROADCAST x from L
    BROADCAST x                                S
    S                                          EXCHANGE maximum, or statistics
    EXCHANGE maximum                           NORMALIZE
    NORMALIZE                                  EXCHANGE sum
    EXCHANGE sum or statistics                 T;  "vocab-2": and REDUCE x.grad
    T                         ("vocab-2": no)  REDUCE x.grad to L
    REDUCE x.grad             (on L)           BACKWARD of the maker
    EXCHANGE sum or statistics                 SHARE_LOSS

Since the collectives of all ranks meet in one order, what stands before one on a rank has been done
before what uses it, or one behind it, on another. Neither S nor T need go through the micro-batches
in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from parcompiler.instruction import TRANSFERS, Kind
from parcompiler.verifier.fault import Fault, numbers
from parcompiler.verifier.steps import Pair, Part, Places, Step

ONCE = "every rank does its part of the vocabulary"
WANTED = "no part of the vocabulary is in vain"
MEETING = "what all ranks have together goes from and to the right rank"
ORDERED = "collectives keep their order"

EXCHANGES = {  # what follows S, and NORMALIZE where there is one
    "naive": ("maximum", "sum"),
    "interlaced": ("maximum", "sum"),
    "vocab-1": ("statistics",),
    "vocab-2": ("statistics",),
}


class Use(NamedTuple):
    """On `rank`, what stands at `places` uses what a collective brings."""

    rank: int
    collective: Part
    places: Places


def faults(step: Step) -> Iterator[Fault]:
    """All faults of what ranks do for the vocabulary, but those of its order beside stages."""
    if step.wiring.spread is None:
        return
    expected = list(parts(step))
    for rank, found in enumerate(step.parts):
        for part in expected:
            missing = set(step.microbatches) - set(found.get(part, ()))
            if missing:
                yield Fault(ONCE, f"rank {rank} has no {part} {numbers(missing)}")
        for part, places in found.items():
            if part not in expected:
                detail = f"rank {rank}: {part} {numbers(places)}: {_reason(step, part)}"
                yield Fault(WANTED, detail)
            elif part.kind in TRANSFERS:
                yield from _peers(step, rank, part, places)
    yield from _order(step)


def parts(step: Step) -> Iterator[Part]:
    """What every rank has for each micro-batch."""
    wiring, training = step.wiring, step.training
    for name in wiring.lookups:
        yield Part(Kind.EMBED, name)
        yield Part(Kind.REDUCE, name)
        if training and wiring.differentiable(name):
            yield Part(Kind.BROADCAST, name, gradient=True)
            yield Part(Kind.EMBED_BACKWARD, name)
    if wiring.head is not None:
        yield Part(Kind.BROADCAST, wiring.head.value)
        yield Part(Kind.S)
        first, *second = exchanges(step)
        yield first
        if second:
            yield Part(Kind.NORMALIZE)
            yield from second
        if training:
            yield Part(Kind.T)
            yield Part(Kind.REDUCE, wiring.head.value, gradient=True)


def exchanges(step: Step) -> list[Part]:
    """The exchanges of the head: one, or two with NORMALIZE between."""
    spread = step.wiring.spread
    names = EXCHANGES.get(spread.method if spread else "", ("statistics",))
    return [Part(Kind.EXCHANGE, name) for name in names]


def uses(step: Step) -> Iterator[Use]:
    """Everything that needs what a collective brings, on its rank."""
    wiring, done = step.wiring, step.computed
    for name, item in wiring.lookups.items():
        home = wiring.rank_of(item.stage)
        for j in wiring.readers.get(name, ()):
            if home is not None and wiring.rank_of(j) == home:
                yield Use(home, Part(Kind.REDUCE, name), done[Kind.FORWARD, j])
    if wiring.head is not None:
        home, x = wiring.rank_of(wiring.head.stage), wiring.head.value
        if home is not None and step.training:
            yield Use(home, Part(Kind.REDUCE, x, gradient=True), step.back[wiring.head.stage])
    for rank in range(len(step.lists)):
        yield from _uses_everywhere(step, rank)


def _uses_everywhere(step: Step, rank: int) -> Iterator[Use]:
    """What a rank does like all others with what a collective brings."""
    wiring = step.wiring
    for name in wiring.lookups:
        gradient = Part(Kind.BROADCAST, name, gradient=True)
        yield Use(rank, gradient, step.places(rank, Part(Kind.EMBED_BACKWARD, name)))
    if wiring.head is not None:
        first, last = exchanges(step)[0], exchanges(step)[-1]
        yield Use(rank, Part(Kind.BROADCAST, wiring.head.value), step.places(rank, Part(Kind.S)))
        yield Use(rank, first, step.places(rank, Part(Kind.NORMALIZE)))
        yield Use(rank, last, step.places(rank, Part(Kind.T)))
        if (share := step.shares[rank]) is not None:
            yield Use(rank, last, dict.fromkeys(step.microbatches, share))


def starting(step: Step, rank: int) -> Places:
    """The collectives that go on with what another one brings, and hold nobody: those of x.grad."""
    wiring = step.wiring
    if wiring.spread is None or wiring.head is None or wiring.spread.method != "vocab-2":
        return {}
    return step.places(rank, Part(Kind.REDUCE, wiring.head.value, gradient=True))


def pairs(step: Step) -> Iterator[Pair]:
    """What must stand before something else, because of what collectives take and bring."""
    for rank, collective, places in uses(step):
        yield Pair(rank, step.places(rank, collective), places)
    wiring = step.wiring
    for name, item in wiring.lookups.items():
        home = wiring.rank_of(item.stage)
        for j in wiring.readers.get(name, ()):
            if home is not None and wiring.rank_of(j) == home:
                gradient = step.places(home, Part(Kind.BROADCAST, name, gradient=True))
                yield Pair(home, step.back[j], gradient)
    if wiring.head is not None:
        home, x = wiring.rank_of(wiring.head.stage), wiring.head.value
        if home is not None:
            made = step.computed[Kind.FORWARD, wiring.head.stage]
            yield Pair(home, made, step.places(home, Part(Kind.BROADCAST, x)))
    for rank in range(len(step.lists)):
        yield from _taken(step, rank)


def _taken(step: Step, rank: int) -> Iterator[Pair]:
    """What a rank computes like all others, before the collective that takes it."""
    wiring = step.wiring
    for name in wiring.lookups:
        embedded = step.places(rank, Part(Kind.EMBED, name))
        yield Pair(rank, embedded, step.places(rank, Part(Kind.REDUCE, name)))
    if wiring.head is not None:
        first, *second = exchanges(step)
        yield Pair(rank, step.places(rank, Part(Kind.S)), step.places(rank, first))
        for part in second:
            yield Pair(rank, step.places(rank, Part(Kind.NORMALIZE)), step.places(rank, part))
        last, onward = exchanges(step)[-1], starting(step, rank)
        yield Pair(rank, step.places(rank, last), onward)
        if not onward:
            returned = Part(Kind.REDUCE, wiring.head.value, gradient=True)
            yield Pair(rank, step.places(rank, Part(Kind.T)), step.places(rank, returned))


def sequences(step: Step) -> list[list[tuple[Part, int]]]:
    """The collectives of the vocabulary on each rank, in order; those that some rank lacks left
    out."""
    collective = {Kind.EXCHANGE, *TRANSFERS}
    found = [
        {(part, i): place for part, places in own.items() if part.kind in collective
         for i, place in places.items()}
        for own in step.parts
    ]  # fmt: skip
    common = set.intersection(*map(set, found)) if found else set()
    return [sorted(common & set(own), key=own.__getitem__) for own in found]


def _peers(step: Step, rank: int, part: Part, places: Places) -> Iterator[Fault]:
    """A collective has the rank of the stage that uses, or gives, what all ranks have."""
    wiring = step.wiring
    lookup, head = wiring.lookups.get(part.value), wiring.head
    j = lookup.stage if lookup else head.stage if head else -1
    home = wiring.rank_of(j)
    wrong = [i for i, place in places.items() if step.at(rank, place).peer != home]
    if wrong:
        line = step.at(rank, places[wrong[0]])
        more = f" (and so for {numbers(wrong[1:])})" if wrong[1:] else ""
        yield Fault(MEETING, f"rank {rank}: {line}: stage {j} is on rank {home}{more}")


def _order(step: Step) -> Iterator[Fault]:
    """All ranks meet in one order."""
    first, *others = sequences(step)
    for rank, other in enumerate(others, start=1):
        if other != first:
            k = next(k for k, (a, b) in enumerate(zip(first, other, strict=True)) if a != b)
            ends = [f"{part} mb {i}" for part, i in (first[k], other[k])]
            detail = f"number {k + 1} of the vocabulary is {ends[0]} on rank 0"
            yield Fault(ORDERED, f"{detail} and {ends[1]} on rank {rank}")


def _reason(step: Step, part: Part) -> str:
    """Why nobody needs a part."""
    wiring = step.wiring
    method = wiring.spread.method if wiring.spread else ""
    known = {*wiring.lookups, *([wiring.head.value] if wiring.head else [])}
    if part.kind is Kind.EXCHANGE:
        wanted = " and ".join(item.value for item in exchanges(step))
        return f"{method!r} exchanges {wanted}" if wiring.head else "the head is on a stage"
    if part.kind is Kind.NORMALIZE and wiring.head:
        return f"{method!r} has no such part"
    if not part.value:
        return "the head is on a stage"
    if part.value not in known:
        return f"the ranks have no {part.value} together"
    if part.gradient and not wiring.differentiable(part.value):
        return f"{part.value} carries no gradient"
    return f"{part.value} is {'looked up' if part.value in wiring.lookups else 'for the head'}"
