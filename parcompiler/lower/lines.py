"""Orders of compute as instruction lists, with the names and ranks of stages and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from parcompiler.instruction import Instruction, Kind
from parcompiler.lower.lowered import Spread, StageProgram, StageValue
from parcompiler.schedules.action import NOWHERE, Action
from parcompiler.timeline.collectives import SharedLayers
from parcompiler.timeline.embeddings import Moment, inserted, whole_walk
from parcompiler.timeline.lists import InstructionNames
from parcompiler.timeline.order import StageLink, walked

Orders = Sequence[Sequence[Action]]


def written(
    orders: Orders,
    stages: Sequence[StageProgram],
    values: Mapping[str, StageValue],
    spread: Spread | None,
    *,
    training: bool = True,
) -> list[tuple[Instruction, ...]]:
    """The instructions of every rank; `orders` have the head of `spread`, not its embeddings."""
    placement, links = _wired(stages, values)
    names = [value.name for value in _between(values) for _ in _links(value)]
    untrained = frozenset(stage.index for stage in stages if not stage.trained)
    if spread is None:
        return InstructionNames(names).lists(walked(placement, orders, links), untrained)
    embedded = [(item.value, placement[item.stage]) for item in spread.lookups]
    head = (spread.head.value, placement[spread.head.stage]) if spread.head else ("", NOWHERE)
    walk = whole_walk(placement, orders, links, _layers(spread, training=training))
    return InstructionNames(names, embedded, head).lists(walk, untrained)


def with_head(
    orders: Orders, stages: Sequence[StageProgram], values: Mapping[str, StageValue], spread: Spread
) -> Orders:
    """Forwards alone, with what every rank computes of the head behind that of its stage."""
    if spread.head is None:
        return orders
    exact = len(_layers(spread, training=False).exchanges) > 1
    placement, links = _wired(stages, values)
    walk = walked(placement, orders, links)
    moments: list[Moment] = [
        (span[1], Action(kind, NOWHERE, action.microbatch))
        for order, spans in zip(orders, walk.spans, strict=True)
        for action, span in zip(order, spans, strict=True)
        if action.stage == spread.head.stage
        for kind in ((Kind.S, Kind.NORMALIZE) if exact else (Kind.S,))
    ]
    return inserted(orders, walk.spans, moments)


def _wired(
    stages: Sequence[StageProgram], values: Mapping[str, StageValue]
) -> tuple[list[int], list[StageLink]]:
    """The ranks of the stages, and what goes between these."""
    links = [link for value in _between(values) for link in _links(value)]
    return [stage.rank for stage in stages], links


def _between(values: Mapping[str, StageValue]) -> list[StageValue]:
    """The values that stages make."""
    return [value for value in values.values() if value.producer != NOWHERE]


def _links(value: StageValue) -> list[StageLink]:
    """A value as messages say it: to stages from which its gradient comes back, and to others."""
    users = tuple(j for j in value.consumers if j != NOWHERE and j not in value.detached)
    links = [StageLink(value.producer, users, value.differentiable)] if users else []
    return [*links, *([StageLink(value.producer, value.detached, False)] if value.detached else [])]


def _layers(spread: Spread, *, training: bool) -> SharedLayers:
    """The layers of the vocabulary as their collectives say it."""
    users = tuple(item.stage for item in spread.lookups)
    return SharedLayers(spread.method, users, spread.head.stage if spread.head else None, training)
