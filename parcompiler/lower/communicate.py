"""Orders of compute -> instruction lists: sends, receives and reductions, once for all schedules.

The compute instructions of all ranks are walked in one order of time (`timeline.order`), and
whenever one ends, what others need of it is written down at both ends. Since every receive is
written before its send, no ranks can wait for each other in a circle even if sends blocked, and
both ends of a channel agree on the order; and so do all ranks on the collectives of the vocabulary.
A value goes straight from the stage that makes it to each rank that uses it, however many stages
lie between; its gradient comes straight back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from parcompiler.instruction import COMPUTE, Instruction, Kind
from parcompiler.lower.lines import with_head, written
from parcompiler.lower.lowered import Spread, StageProgram, StageValue, TiedTensor
from parcompiler.schedules import Action

Lists = tuple[tuple[Instruction, ...], ...]


def training(
    orders: Sequence[Sequence[Action]],
    stages: Sequence[StageProgram],
    values: Mapping[str, StageValue],
    tied: Sequence[TiedTensor],
    spread: Spread | None = None,
    *,
    asynchronous: bool = False,
) -> Lists:
    """The instruction list of every rank for one training step.

    An asynchronous step updates the parameters of a stage after each of its backwards. `orders`
    have the head of `spread`, and get its embeddings.
    """
    share = Instruction(Kind.SHARE_LOSS, peer=_loss_rank(stages, spread))
    lists = written(orders, stages, values, spread)
    if asynchronous:
        lists = [tuple(_updated(instructions)) for instructions in lists]
    return tuple(
        (*instructions, *_reductions(rank, tied), share) for rank, instructions in enumerate(lists)
    )


def evaluation(
    ranks: int,
    microbatches: int,
    stages: Sequence[StageProgram],
    values: Mapping[str, StageValue],
    spread: Spread | None = None,
) -> Lists:
    """The instruction list of every rank for one evaluation: forwards only."""
    orders: Sequence[Sequence[Action]] = [
        [
            Action(Kind.FORWARD, stage.index, i)
            for i in range(microbatches)
            for stage in stages
            if stage.rank == rank
        ]
        for rank in range(ranks)
    ]
    share = Instruction(Kind.SHARE_LOSS, peer=_loss_rank(stages, spread))
    if spread is not None:
        orders = with_head(orders, stages, values, spread)
    lists = written(orders, stages, values, spread, training=False)
    return tuple((*lines, share) for lines in lists)


def _updated(instructions: Iterable[Instruction]) -> Iterator[Instruction]:
    """An UPDATE behind every BACKWARD; the gradients that it sends back leave before."""
    pending: list[Instruction] = []
    for line in instructions:
        if line.kind in COMPUTE:
            yield from pending
            pending.clear()
        yield line
        if line.kind is Kind.BACKWARD:
            pending.append(replace(line, kind=Kind.UPDATE))
    yield from pending


def _loss_rank(stages: Sequence[StageProgram], spread: Spread | None) -> int:
    """The rank of the stage that computes the loss, or gives what the head takes."""
    if spread is not None and spread.head is not None:
        return stages[spread.head.stage].rank
    return next(stage.rank for stage in stages if stage.loss is not None)


def _reductions(rank: int, tied: Sequence[TiedTensor]) -> Iterator[Instruction]:
    """The sums of gradients that a rank takes part in, in the same order on all ranks."""
    for item in tied:
        if rank in item.ranks:
            yield Instruction(Kind.REDUCE_GRADIENTS, value=item.label, ranks=item.ranks)
