"""Calls of layers gathered into loops, where each round takes from the one before.

h_0 ─► h_1 ─► h_2         for layer in self.h:
 mask ┴──────┘                hidden_states = layer(hidden_states, mask)

attn_0 ─► ffn_0 ─► attn_1 ─► ffn_1         for attn, ffn in zip(self.attn, self.ffn):
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from parcompiler.lower.lowered import Call, StageProgram

PERIODS = range(1, 9)  # a layer has at most so many pieces

# Where an argument of a round comes from: the round itself ("inside") or the one before, with the
# place of the call and of the result; or from outside of the loop, with the name of the value.
Source = tuple[str, tuple[int, int] | str]


@dataclass(frozen=True, slots=True)
class Loop:
    """Rounds of calls; a single call is one round of one.

    `fresh` says for each place in a round whether every round has a layer of its own there.
    `carried` are the values that a round takes from the one before: the place of the call that
    makes it, the place among its results, and what the first round takes instead.
    """

    rounds: tuple[tuple[Call, ...], ...]
    fresh: tuple[bool, ...] = (True,)
    carried: tuple[tuple[int, int, str], ...] = ()

    @property
    def calls(self) -> tuple[Call, ...]:
        """All calls, in order."""
        return tuple(call for part in self.rounds for call in part)


def loops(stage: StageProgram, instances: Mapping[str, str]) -> Iterator[Loop]:
    """The calls of a stage in order; `instances` names for each block the layer that it runs."""
    calls = list(stage.calls)
    start = 0
    while start < len(calls):
        candidates = [_longest(stage, instances, start, period) for period in PERIODS]
        best = max(candidates, key=lambda loop: len(loop.calls) if len(loop.rounds) > 1 else 1)
        best = best if len(best.rounds) > 1 else Loop(((calls[start],),))
        yield best
        start += len(best.calls)


def _longest(stage: StageProgram, instances: Mapping[str, str], start: int, period: int) -> Loop:
    """The loop of most rounds that begins at a call and has so many calls a round."""
    calls = stage.calls[start:]
    rounds = [tuple(calls[:period])]
    best = Loop(tuple(rounds))
    for begin in range(period, len(calls) - period + 1, period):
        rounds.append(tuple(calls[begin : begin + period]))
        fresh = _fresh(rounds, instances)
        if fresh is None:
            break
        carried = _carried(rounds)
        if carried is None:
            break
        loop = Loop(tuple(rounds), fresh, carried)
        if not _is_read_elsewhere(loop, stage):
            best = loop
    return best


def _fresh(
    rounds: Sequence[Sequence[Call]], instances: Mapping[str, str]
) -> tuple[bool, ...] | None:
    """For each place whether its layers are all new there, or all one; None if mixed."""
    fresh = []
    for members in zip(*rounds, strict=True):
        layers = [instances[call.block.name] for call in members]
        new = all(i == call.block.name for i, call in zip(layers, members, strict=True))
        alike = len({(call.block.template, call.recompute, call.offload) for call in members}) == 1
        if not alike or not (new or len(set(layers)) == 1):
            return None
        fresh.append(new)
    return tuple(fresh)


def _carried(rounds: Sequence[Sequence[Call]]) -> tuple[tuple[int, int, str], ...] | None:
    """What each round takes from the one before; None when rounds are not wired alike."""
    first, second = sources(rounds[0], ()), sources(rounds[1], rounds[0])
    initial: dict[tuple[int, int], str] = {}
    for (kind, value), (again, place) in zip(first, second, strict=True):
        if again == "before":
            assert not isinstance(place, str)
            if kind != "outside" or initial.setdefault(place, str(value)) != value:
                return None
        elif (kind, value) != (again, place):
            return None
    if any(sources(after, before) != second for before, after in itertools.pairwise(rounds)):
        return None
    return tuple((p, r, name) for (p, r), name in initial.items()) or None


def sources(calls: Sequence[Call], before: Sequence[Call]) -> list[Source]:
    """Where each argument of a round comes from, call after call."""
    here = {name: (p, r) for p, call in enumerate(calls) for r, name in enumerate(call.results)}
    there = {name: (p, r) for p, call in enumerate(before) for r, name in enumerate(call.results)}
    places: list[Source] = []
    for name in (name for call in calls for name in call.arguments):
        if name in here:
            places.append(("inside", here[name]))
        elif name in there:
            places.append(("before", there[name]))
        else:
            places.append(("outside", name))
    return places


def _is_read_elsewhere(loop: Loop, stage: StageProgram) -> bool:
    """Whether something after the loop reads a value of a round that is not the last."""
    inside = {name for part in loop.rounds[:-1] for call in part for name in call.results}
    blocks = {call.block.name for call in loop.calls}
    read = {n for call in stage.calls if call.block.name not in blocks for n in call.arguments}
    return bool(inside & (read | {*stage.gives, *stage.keeps}))
