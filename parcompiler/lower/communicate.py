"""Orders of compute -> instruction lists with sends, receives and sums, alike for all schedules.

The compute instructions of all ranks are walked in order of time (`timeline.order`); when one ends,
its messages are written on both ranks. As every receive is written before its send, ranks cannot
wait for each other in a circle even if sends blocked, and both ends of a channel agree on the
order, as do all ranks on the collectives of the vocabulary. A value goes straight from the stage
that makes it to each rank that uses it, past any stages in between; its gradient comes straight
back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from parcompiler.instruction import COMPUTE, Instruction, Kind
from parcompiler.lower.lowered import Spread, StageProgram, StageValue, TiedTensor
from parcompiler.schedules.action import NOWHERE, Action
from parcompiler.schedules.rounds import shortened
from parcompiler.timeline.collectives import SharedLayers
from parcompiler.timeline.embeddings import Moment, inserted, whole_walk
from parcompiler.timeline.lists import InstructionNames
from parcompiler.timeline.order import OrderWalk, StageLink, walked

Lists = tuple[tuple[Instruction, ...], ...]
Orders = Sequence[Sequence[Action]]


def training(
    orders: Orders,
    stages: Sequence[StageProgram],
    values: Mapping[str, StageValue],
    tied: Sequence[TiedTensor],
    spread: Spread | None = None,
    *,
    asynchronous: bool = False,
) -> Lists:
    """The instruction list of every rank for one training step.

    An asynchronous step updates the parameters of a stage after each of its backwards. `orders`
    contain the head of `spread`; its embeddings are added.
    """
    wiring = _Wiring(stages, values, spread)
    lists = wiring.written(orders)
    if asynchronous:
        lists = [tuple(_updated(instructions)) for instructions in lists]
    sums = [Instruction(Kind.REDUCE_GRADIENTS, value=x.label, ranks=x.ranks) for x in tied]
    return tuple(
        (*instructions, *(line for line in sums if rank in line.ranks), wiring.share)
        for rank, instructions in enumerate(lists)
    )


def evaluation(
    ranks: int,
    microbatches: int,
    stages: Sequence[StageProgram],
    values: Mapping[str, StageValue],
    spread: Spread | None = None,
) -> Lists:
    """The instruction list of every rank for one evaluation: forwards only."""
    orders: Orders = [
        [
            Action(Kind.FORWARD, stage.index, i)
            for i in range(microbatches)
            for stage in stages
            if stage.rank == rank
        ]
        for rank in range(ranks)
    ]
    wiring = _Wiring(stages, values, spread)
    lists = wiring.written(orders, training=False)
    return tuple((*lines, wiring.share) for lines in lists)


def _updated(instructions: Iterable[Instruction]) -> Iterator[Instruction]:
    """Add an UPDATE after every BACKWARD and the sends of its gradients."""
    pending: list[Instruction] = []
    for line in instructions:
        if line.kind in COMPUTE:
            yield from pending
            pending.clear()
        yield line
        if line.kind is Kind.BACKWARD:
            pending.append(replace(line, kind=Kind.UPDATE))
    yield from pending


class _Wiring:
    """Writes the instruction lists: the stages, and the values that go between their ranks."""

    def __init__(
        self,
        stages: Sequence[StageProgram],
        values: Mapping[str, StageValue],
        spread: Spread | None,
    ) -> None:
        self._placement = [stage.rank for stage in stages]
        made = [value for value in values.values() if value.producer != NOWHERE]
        self._names = [value.name for value in made for _ in _links(value)]
        self._links = [link for value in made for link in _links(value)]
        self._untrained = frozenset(stage.index for stage in stages if not stage.trained)
        self._spread = spread
        # The loss is on the rank of the stage that computes it or makes the input of the head.
        losses = (stage.rank for stage in stages if stage.loss is not None)
        head = None if spread is None else spread.head
        rank = next(losses) if head is None else self._placement[head.stage]
        self.share = Instruction(Kind.SHARE_LOSS, peer=rank)

    def written(self, orders: Orders, *, training: bool = True) -> list[tuple[Instruction, ...]]:
        """The instructions of every rank. `orders` have no embeddings; in training they have the
        head."""
        short, rounds = shortened(orders)
        lists = self._written(short, rounds, training=training)
        if lists is None:  # it has no steady state
            lists = self._written(orders, 0, training=training)
        assert lists is not None
        return lists

    def _written(
        self, orders: Orders, rounds: int, *, training: bool
    ) -> list[tuple[Instruction, ...]] | None:
        """The instructions of the orders with `rounds` more rounds, or None; see
        `InstructionNames.lists`."""
        placement, links, spread = self._placement, self._links, self._spread
        if spread is None:
            walk = walked(placement, orders, links)
            return InstructionNames(self._names).lists(walk, self._untrained, rounds)
        embedded = [(item.value, placement[item.stage]) for item in spread.lookups]
        head = (spread.head.value, placement[spread.head.stage]) if spread.head else ("", NOWHERE)
        basis = None
        if spread.head is not None and not training:
            basis = walked(placement, orders, links)
            orders = self._with_head(orders, basis, spread.head.stage)
        layers = _layers(spread, training=training)
        walk = whole_walk(placement, orders, links, layers, basis)
        names = InstructionNames(self._names, embedded, head)
        return names.lists(walk, self._untrained, rounds)

    def _with_head(self, orders: Orders, walk: OrderWalk, source: int) -> Orders:
        """Orders of forwards with the head's forward passes on every rank after that of stage
        `source`."""
        assert self._spread is not None
        exact = len(_layers(self._spread, training=False).exchanges) > 1
        moments: list[Moment] = [
            (span[1], Action(kind, NOWHERE, action.microbatch))
            for order, spans in zip(orders, walk.spans, strict=True)
            for action, span in zip(order, spans, strict=True)
            if action.stage == source
            for kind in ((Kind.S, Kind.NORMALIZE) if exact else (Kind.S,))
        ]
        return inserted(orders, walk.spans, moments)


def _links(value: StageValue) -> list[StageLink]:
    """The links of a value: to stages from which its gradient comes back, and to others."""
    users = tuple(j for j in value.consumers if j != NOWHERE and j not in value.detached)
    links = [StageLink(value.producer, users, value.differentiable)] if users else []
    return [*links, *([StageLink(value.producer, value.detached, False)] if value.detached else [])]


def _layers(spread: Spread, *, training: bool) -> SharedLayers:
    """The layers of the vocabulary, in the form that `timeline.collectives` needs."""
    users = tuple(item.stage for item in spread.lookups)
    return SharedLayers(spread.method, users, spread.head.stage if spread.head else None, training)
