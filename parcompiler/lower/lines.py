"""Orders of compute as instruction lists: every step of `schedules.lines` by its instruction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from parcompiler.instruction import EMBEDDING, Instruction, Kind
from parcompiler.lower.lowered import Spread, Stage, Value
from parcompiler.schedules.action import NOWHERE, Action
from parcompiler.schedules.lines import Lines, Link, Step, Transfer
from parcompiler.schedules.vocabulary_embeddings import Moment, inserted, with_embeddings
from parcompiler.schedules.vocabulary_lines import Layers, Meeting

Orders = Sequence[Sequence[Action]]


def written(
    orders: Orders,
    stages: Sequence[Stage],
    values: Mapping[str, Value],
    spread: Spread | None,
    *,
    training: bool = True,
) -> list[tuple[Instruction, ...]]:
    """The instructions of every rank; `orders` have the head of `spread`, not its embeddings."""
    placement, links = _wired(stages, values)
    layers = None
    if spread is not None:
        layers = _layers(spread, training=training)
        orders = with_embeddings(placement, orders, links, layers)
    steps = Lines(placement, orders, links, layers).steps
    writer = _Writer(placement, values, spread)
    return [tuple(map(writer.line, found)) for found in steps]


def with_head(
    orders: Orders, stages: Sequence[Stage], values: Mapping[str, Value], spread: Spread
) -> Orders:
    """Forwards alone, with what every rank computes of the head behind that of its stage."""
    if spread.head is None:
        return orders
    exact = len(_layers(spread, training=False).exchanges) > 1
    placement, links = _wired(stages, values)
    walk = Lines(placement, orders, links)
    moments: list[Moment] = [
        (span[1], Action(kind, NOWHERE, action.microbatch))
        for order, spans in zip(orders, walk.spans, strict=True)
        for action, span in zip(order, spans, strict=True)
        if action.stage == spread.head.stage
        for kind in ((Kind.S, Kind.NORMALIZE) if exact else (Kind.S,))
    ]
    return inserted(orders, walk.spans, moments)


def _wired(stages: Sequence[Stage], values: Mapping[str, Value]) -> tuple[list[int], list[Link]]:
    """The ranks of the stages, and what goes between these."""
    return [stage.rank for stage in stages], [_link(value) for value in _between(values)]


def _between(values: Mapping[str, Value]) -> list[Value]:
    """The values that stages make."""
    return [value for value in values.values() if value.producer != NOWHERE]


def _link(value: Value) -> Link:
    """A value as messages between stages say it."""
    users = tuple(j for j in value.consumers if j != NOWHERE)
    return Link(value.producer, users, value.differentiable)


def _layers(spread: Spread, *, training: bool) -> Layers:
    """The layers of the vocabulary as their collectives say it."""
    users = tuple(item.stage for item in spread.lookups)
    return Layers(spread.method, users, spread.head.stage if spread.head else None, training)


class _Writer:
    """The names and ranks that instructions have."""

    def __init__(
        self, placement: Sequence[int], values: Mapping[str, Value], spread: Spread | None
    ) -> None:
        self.names = [value.name for value in _between(values)]
        lookups, head = (spread.lookups, spread.head) if spread else ((), None)
        self.embedded = [(item.value, placement[item.stage]) for item in lookups]
        self.x = (head.value, placement[head.stage]) if head else ("", NOWHERE)

    def line(self, step: Step) -> Instruction:
        """The instruction of a step."""
        if isinstance(step, Meeting):
            return self._collective(step)
        if isinstance(step, Transfer):
            number, gradient, peer, i, leaves = step
            kind, value = Kind.SEND if leaves else Kind.RECV, self.names[number]
            return Instruction(kind, value=value, gradient=gradient, microbatch=i, peer=peer)
        kind, j, i = step
        if kind in EMBEDDING:
            return Instruction(kind, value=self.embedded[j][0], microbatch=i)
        return Instruction(kind, stage=None if j == NOWHERE else j, microbatch=i)

    def _collective(self, meeting: Meeting) -> Instruction:
        """The instruction of a collective."""
        what, k, i = meeting
        carried, _, gradient = what.partition(".")
        if carried not in ("x", "e"):
            return Instruction(Kind.EXCHANGE, value=what, microbatch=i)
        value, peer = self.x if carried == "x" else self.embedded[k]
        kind = Kind.BROADCAST if what in ("x", "e.grad") else Kind.REDUCE
        grads = bool(gradient)
        return Instruction(kind, value=value, gradient=grads, microbatch=i, peer=peer)
