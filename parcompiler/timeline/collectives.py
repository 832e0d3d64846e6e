"""The collectives of the layers that all ranks share, and their places in the order of each rank.

    embedding   EMBED on every rank ─► REDUCE e to its user ─► FORWARD
                BACKWARD ─► BROADCAST e.grad ─► EMBED_BACKWARD on every rank
    head        FORWARD ─► BROADCAST x ─► S on every rank ─► EXCHANGE ─► ...
                                                       ... ─► REDUCE x.grad ─► BACKWARD

No collective holds up a rank, but all ranks must begin them in one order: that of the rank that
gives x. Each rank has them in this order as early as it can, after its own contribution. So that x
never waits for an embedding, these go along with an S (vocab-2; L is the rank that gives x):

    rank L   F3 x3 │ B1 │ EMBED e5, e5 │ T2 │ S3 │ EXCHANGE 3, x3.grad, e1.grad │ F4 x4
    rank r      x3 │ F5 │ EMBED e5, e5 │ T2 │ S3 │ EXCHANGE 3, x3.grad, e1.grad, x4 │ B2

e1.grad goes with the first S on its user's rank after the backward; gradients after the last S go
at the end, after everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parcompiler.instruction import ASKS_FIRST, BACKWARDS, Kind
from parcompiler.schedules.action import Action

KIND_OF = {
    "x": Kind.BROADCAST,
    "x.grad": Kind.REDUCE,
    "e": Kind.REDUCE,
    "e.grad": Kind.BROADCAST,
}  # everything else is an EXCHANGE


class Collective(NamedTuple):
    """A collective for a micro-batch: `what` is x, x.grad, e, e.grad, or the name of an exchange.

    `number` is that of the embedding.
    """

    what: str
    number: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class SharedLayers:
    """The layers that all ranks share: `users` are the stages that read the embeddings, `source` is
    the stage that makes the input x of the head (None without a head)."""

    method: str
    users: tuple[int, ...]
    source: int | None
    training: bool = True

    @property
    def early(self) -> bool:
        """Whether S makes the gradient of x, not T."""
        return self.method == "vocab-2"

    @property
    def exchanges(self) -> tuple[str, ...]:
        """The exchanges after S and, where there is one, after NORMALIZE."""
        return ("maximum", "sum") if self.method in ASKS_FIRST else ("statistics",)


def rows_of(layers: SharedLayers) -> Iterator[tuple[str, int]]:
    """The collectives of each micro-batch, as pairs (what, number of the embedding)."""
    for k in range(len(layers.users)):
        yield from (("e", k), ("e.grad", k))
    if layers.source is not None:
        yield from ((name, 0) for name in ("x", *layers.exchanges, "x.grad"))


def done(action: Action) -> Action:
    """The action as others wait for it: both backwards that give gradients of inputs are one."""
    return action._replace(kind=Kind.BACKWARD) if action.kind in BACKWARDS else action


def needs(action: Action, layers: SharedLayers) -> Iterator[Collective]:
    """The collectives that must have ended before an action."""
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
    """The S after which the gradients of embedding `k` are broadcast: the next on the user's rank.

    Maps the micro-batch of each such S to the micro-batches of the gradients; then lists those
    after which there is no S.
    """
    gradients: dict[int, list[int]] = {}
    pending: list[int] = []
    for kind, j, i in order:
        if kind in BACKWARDS and j == layers.users[k]:
            pending.append(i)
        elif kind is Kind.S and pending:
            gradients[i], pending = pending, []
    return gradients, pending


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
        list(_merged(order, [_on_rank(line, end, rank, placement) for line in common]))
        for rank, (order, end) in enumerate(zip(orders, ends, strict=True))
    ]


class _Line(NamedTuple):
    """A collective, and the action that it follows: `after` on every rank, or `one` on its rank."""

    meeting: Collective
    after: Action | None
    one: Action | None = None
    last: bool = False  # whether it is at the end of the other ranks' orders


def _sequence(
    order: Iterable[Action],
    layers: SharedLayers,
    gradients: Sequence[tuple[dict[int, list[int]], list[int]]],
) -> Iterator[_Line]:
    """The common sequence of collectives, from the order of the rank that gives x."""
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
            for k, (returns, _) in enumerate(gradients):
                yield from (_Line(Collective("e.grad", k, x), action) for x in returns.get(i, ()))
    if layers.source is not None:
        for k, (_, rest) in enumerate(gradients):
            for i in rest:
                one = Action(Kind.BACKWARD, layers.users[k], i)
                yield _Line(Collective("e.grad", k, i), None, one, last=True)


def _on_rank(
    line: _Line, end: Action | None, rank: int, placement: Sequence[int]
) -> tuple[Collective, Action | None]:
    """A collective with the action that it follows on a rank (None: no action). `end` is the action
    that the last collectives follow."""
    meeting, after, one, last = line
    if one is not None and placement[one.stage] == rank:
        after = one
    elif last:
        after = end
    return meeting, None if after is None else done(after)


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
