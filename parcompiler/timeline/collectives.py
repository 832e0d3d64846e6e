"""The collectives of the layers that all ranks share, and where they stand on each rank.

    embedding   EMBED on every rank ─► REDUCE e to its user ─► FORWARD
                BACKWARD ─► BROADCAST e.grad ─► EMBED_BACKWARD on every rank
    head        FORWARD ─► BROADCAST x ─► S on every rank ─► EXCHANGE ─► ...
                                                       ... ─► REDUCE x.grad ─► BACKWARD

No collective holds up a rank, but all ranks must begin them in one order: that in which the rank
that gives x comes to them. Each has them in this order as early as it can, behind what it gives
itself. So that x never waits for an embedding, these go along with an S (vocab-2, L has F and B):

    rank L   F3 x3 │ B1 │ EMBED e5, e5 │ T2 │ S3 │ EXCHANGE 3, x3.grad, e1.grad │ F4 x4
    rank r      x3 │ F5 │ EMBED e5, e5 │ T2 │ S3 │ EXCHANGE 3, x3.grad, e1.grad, x4 │ B2

e1.grad goes with the first S that the rank of its user does behind the backward; what is behind the
last S goes when all else is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parcompiler.instruction import BACKWARDS, Kind
from parcompiler.schedules.action import Action

KIND_OF = {
    "x": Kind.BROADCAST,
    "x.grad": Kind.REDUCE,
    "e": Kind.REDUCE,
    "e.grad": Kind.BROADCAST,
}  # everything else is an EXCHANGE


class Collective(NamedTuple):
    """A collective for a micro-batch: `what` is x, x.grad, e, e.grad, or what is exchanged.

    `number` is that of an embedding.
    """

    what: str
    number: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class SharedLayers:
    """The layers that all ranks share: `users` of the embeddings, `source` of what the head takes.

    These are stages; `source` is None without a head.
    """

    method: str
    users: tuple[int, ...]
    source: int | None
    training: bool = True

    @property
    def early(self) -> bool:
        """Whether the gradient of x comes of S, not of T."""
        return self.method == "vocab-2"

    @property
    def exchanges(self) -> tuple[str, ...]:
        """What follows S, and NORMALIZE where there is one."""
        exact = self.method in ("naive", "interlaced")
        return ("maximum", "sum") if exact else ("statistics",)


def rows_of(layers: SharedLayers) -> Iterator[tuple[str, int]]:
    """What collectives there are for each micro-batch, with the number of an embedding."""
    for k in range(len(layers.users)):
        yield from (("e", k), ("e.grad", k))
    if layers.source is not None:
        yield from ((what, 0) for what in ("x", *layers.exchanges, "x.grad"))


def done(action: Action) -> Action:
    """What others wait for: both backwards that give gradients of inputs count as one."""
    return action._replace(kind=Kind.BACKWARD) if action.kind in BACKWARDS else action


def needs(action: Action, layers: SharedLayers) -> Iterator[Collective]:
    """The collectives that must be over before an action."""
    kind, j, i = action
    if kind is Kind.FORWARD:
        yield from (Collective("e", k, i) for k, user in enumerate(layers.users) if user == j)
    elif kind in BACKWARDS and j == layers.source:
        yield Collective("x.grad", 0, i)
    elif kind is Kind.EMBED_BACKWARD:
        yield Collective("e.grad", j, i)
    elif kind is Kind.S:
        yield Collective("x", 0, i)
    elif kind is Kind.NORMALIZE:
        yield Collective(layers.exchanges[0], 0, i)
    elif kind is Kind.T:
        yield Collective(layers.exchanges[-1], 0, i)


def returned(
    order: Iterable[Action], k: int, layers: SharedLayers
) -> tuple[dict[int, list[int]], list[int]]:
    """Behind which S the gradients of an embedding go to all: the next one on the user's rank.

    By micro-batch of that S, the micro-batches; and those behind which there is none.
    """
    found: dict[int, list[int]] = {}
    pending: list[int] = []
    for kind, j, i in order:
        if kind in BACKWARDS and j == layers.users[k]:
            pending.append(i)
        elif kind is Kind.S and pending:
            found[i], pending = pending, []
    return found, pending


def placed(
    placement: Sequence[int], orders: Sequence[Sequence[Action]], layers: SharedLayers
) -> list[list[Action | Collective]]:
    """The orders with all collectives."""
    stages = [*layers.users[:1]] if layers.source is None else [layers.source]
    homes = [placement[j] for j in layers.users]
    common: list[_Line] = []
    for j in stages:
        gradients = [returned(orders[home], k, layers) for k, home in enumerate(homes)]
        common += _sequence(orders[placement[j]], layers, gradients)
    ends = [
        next((a for a in reversed(order) if a.kind is not Kind.EMBED_BACKWARD), None)
        for order in orders
    ]
    return [
        list(_merged(order, [_own(line, end, rank, placement) for line in common]))
        for rank, (order, end) in enumerate(zip(orders, ends, strict=True))
    ]


class _Line(NamedTuple):
    """A collective behind what every rank gives for it, or `one` alone."""

    meeting: Collective
    given: Action | None
    one: Action | None = None
    last: bool = False  # whether the others do all else before


def _sequence(
    order: Iterable[Action],
    layers: SharedLayers,
    gradients: Sequence[tuple[dict[int, list[int]], list[int]]],
) -> Iterator[_Line]:
    """The collectives that all ranks have in common, from the order of the rank that gives x."""
    for action in order:
        kind, j, i = action
        if kind is Kind.EMBED:
            yield _Line(Collective("e", j, i), action)
        elif kind is Kind.EMBED_BACKWARD and layers.source is None:
            yield _Line(Collective("e.grad", j, i), None, Action(Kind.BACKWARD, layers.users[j], i))
        elif kind is Kind.FORWARD and j == layers.source:
            yield _Line(Collective("x", 0, i), None, action)
        elif kind is Kind.S:
            yield _Line(Collective(layers.exchanges[0], 0, i), action)
        elif kind is Kind.NORMALIZE:
            yield _Line(Collective(layers.exchanges[-1], 0, i), action)
        if kind is (Kind.S if layers.early else Kind.T) and layers.training:
            yield _Line(Collective("x.grad", 0, i), action)
        if kind is Kind.S:
            for k, (found, _) in enumerate(gradients):
                yield from (_Line(Collective("e.grad", k, x), action) for x in found.get(i, ()))
    if layers.source is not None:
        for k, (_, rest) in enumerate(gradients):
            for i in rest:
                one = Action(Kind.BACKWARD, layers.users[k], i)
                yield _Line(Collective("e.grad", k, i), None, one, last=True)


def _own(
    line: _Line, end: Action | None, rank: int, placement: Sequence[int]
) -> tuple[Collective, Action | None]:
    """A collective with what a rank has it behind, at last its `end`; None for nothing."""
    meeting, given, one, last = line
    if one is not None and placement[one.stage] == rank:
        given = one
    elif last:
        given = end
    return meeting, None if given is None else done(given)


def _merged(
    order: Sequence[Action], lines: Sequence[tuple[Collective, Action | None]]
) -> Iterator[Action | Collective]:
    """The order of one rank with each collective as early as it can be."""
    had: set[Action | None] = {None}
    k = 0
    for action in order:
        while k < len(lines) and lines[k][1] in had:
            yield lines[k][0]
            k += 1
        yield action
        had.add(done(action))
    yield from (meeting for meeting, _ in lines[k:])
