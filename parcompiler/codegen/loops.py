"""Gathers calls of layers into loops, in which each round reads results of the one before.

h_0 ─► h_1 ─► h_2         for layer in self.h:
 mask ┴──────┘                hidden_states = layer(hidden_states, mask)

attn_0 ─► ffn_0 ─► attn_1 ─► ffn_1         for attn, ffn in zip(self.attn, self.ffn):
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from parcompiler.lower.lowered import Call, StageProgram

PERIODS = range(1, 9)  # calls in a round: pieces of a layer

# The source of an argument of a round: the round itself ("inside") or the one before, with the
# indices of call and result; or outside of the loop, with the name of the value.
Source = tuple[str, tuple[int, int] | str]


@dataclass(frozen=True, slots=True)
class Loop:
    """Rounds of calls; a single call is one round of one.

    `fresh` says for each position in a round whether every round has a new layer there. `carried`
    are the values that a round reads from the one before: indices of the call and of its result,
    and the value that the first round reads instead.
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
    """The longest loop from call `start` on with `period` calls a round."""
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
    """For each position, whether its layers are all new (True) or all the same; None if mixed."""
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
    """The values that each round reads from the one before; None if rounds are wired
    differently."""
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
    """The source of each argument of a round, call by call."""
    inside = {name: (p, r) for p, call in enumerate(calls) for r, name in enumerate(call.results)}
    earlier = {name: (p, r) for p, call in enumerate(before) for r, name in enumerate(call.results)}
    places: list[Source] = []
    for name in (name for call in calls for name in call.arguments):
        if name in inside:
            places.append(("inside", inside[name]))
        elif name in earlier:
            places.append(("before", earlier[name]))
        else:
            places.append(("outside", name))
    return places


def _is_read_elsewhere(loop: Loop, stage: StageProgram) -> bool:
    """Whether something after the loop reads a value of a round that is not the last."""
    inside = {name for part in loop.rounds[:-1] for call in part for name in call.results}
    blocks = {call.block.name for call in loop.calls}
    read = {n for call in stage.calls if call.block.name not in blocks for n in call.arguments}
    return bool(inside & (read | {*stage.gives, *stage.keeps}))
