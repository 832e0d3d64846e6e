"""Orders of compute -> instruction lists: sends, receives and reductions, once for all schedules.

Around each compute instruction of a rank:

    RECV  what it needs from other ranks        posted one compute instruction early
    FORWARD stage j mb i
    SEND  what other ranks need of its results  as soon as there is something to send

A value goes straight from the stage that makes it to each rank that uses it, however many stages
lie between; its gradient comes straight back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from parcompiler.instruction import Instruction, Kind
from parcompiler.lower.lowered import Stage, Tied, Value
from parcompiler.schedules import Action


def training(
    orders: Sequence[Sequence[Action]],
    stages: Sequence[Stage],
    values: Mapping[str, Value],
    tied: Sequence[Tied],
) -> tuple[tuple[Instruction, ...], ...]:
    """The instruction list of every rank for one training step."""
    messages = _Messages(stages, values)
    loss_rank = next(stage.rank for stage in stages if stage.loss is not None)
    return tuple(
        (
            *_with_messages(order, messages),
            *(
                Instruction(Kind.REDUCE_GRADIENTS, value=item.label, ranks=item.ranks)
                for item in tied
                if rank in item.ranks
            ),
            Instruction(Kind.SHARE_LOSS, peer=loss_rank),
        )
        for rank, order in enumerate(orders)
    )


def evaluation(
    ranks: int, microbatches: int, stages: Sequence[Stage], values: Mapping[str, Value]
) -> tuple[tuple[Instruction, ...], ...]:
    """The instruction list of every rank for one evaluation: forwards only."""
    messages = _Messages(stages, values)
    loss_rank = next(stage.rank for stage in stages if stage.loss is not None)
    lists = []
    for rank in range(ranks):
        own = [stage.index for stage in stages if stage.rank == rank]
        order = [Action(Kind.FORWARD, j, i) for i in range(microbatches) for j in own]
        share = Instruction(Kind.SHARE_LOSS, peer=loss_rank)
        lists.append((*_with_messages(order, messages), share))
    return tuple(lists)


class _Messages:
    """Which messages surround each compute instruction."""

    def __init__(self, stages: Sequence[Stage], values: Mapping[str, Value]) -> None:
        self.stages = stages
        self.values = values

    def before(self, action: Action) -> Iterator[Instruction]:
        """What a compute instruction receives from other ranks."""
        stage, i = self.stages[action.stage], action.microbatch
        if action.kind is Kind.FORWARD:
            for name in stage.receives:
                if self._first_on_rank(name, stage):
                    peer = self.stages[self.values[name].producer].rank
                    yield Instruction(Kind.RECV, microbatch=i, value=name, peer=peer)
        else:
            for name in stage.gives:
                if self.values[name].differentiable:
                    for peer in self._remote_consumers(name, stage):
                        yield Instruction(
                            Kind.RECV, microbatch=i, value=name, gradient=True, peer=peer
                        )

    def after(self, action: Action) -> Iterator[Instruction]:
        """What a compute instruction sends to other ranks."""
        stage, i = self.stages[action.stage], action.microbatch
        if action.kind is Kind.FORWARD:
            for name in stage.gives:
                for peer in self._remote_consumers(name, stage):
                    yield Instruction(Kind.SEND, microbatch=i, value=name, peer=peer)
        else:
            for name in stage.receives:
                value = self.values[name]
                if value.differentiable and self._first_on_rank(name, stage):
                    peer = self.stages[value.producer].rank
                    yield Instruction(Kind.SEND, microbatch=i, value=name, gradient=True, peer=peer)

    def _remote_consumers(self, name: str, stage: Stage) -> list[int]:
        """The other ranks that use a value, each once."""
        ranks = {self.stages[j].rank for j in self.values[name].consumers}
        return sorted(ranks - {stage.rank})

    def _first_on_rank(self, name: str, stage: Stage) -> bool:
        """Whether a value comes from another rank and `stage` is its first user on this rank.

        The first stage to use it is the last whose backward adds to its gradient.
        """
        value = self.values[name]
        users = [j for j in value.consumers if self.stages[j].rank == stage.rank]
        return self.stages[value.producer].rank != stage.rank and users[0] == stage.index


def _with_messages(order: Iterable[Action], messages: _Messages) -> Iterator[Instruction]:
    """Compute instructions with their messages; receives stand one compute instruction early."""
    actions = list(order)
    if actions:
        yield from messages.before(actions[0])
    for k, action in enumerate(actions):
        if k + 1 < len(actions):
            yield from messages.before(actions[k + 1])
        yield Instruction(action.kind, stage=action.stage, microbatch=action.microbatch)
        yield from messages.after(action)
