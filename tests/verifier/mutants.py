"""Random mistakes in lowered programs, one function for each kind.

Each takes a source of chance and a program and returns another program, or None when the program
has nothing to make that mistake with.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from parcompiler.instruction import COMPUTE, MESSAGES, Instruction, Kind
from parcompiler.lower import Lowered
from tests.verifier.edits import with_lists, with_stage, with_value

Chance = random.Random
Mutant = Lowered | None
Mistake = Callable[[Chance, Lowered], Mutant]
Lines = list[Instruction]


def _edited(
    chance: Chance, lowered: Lowered, edit: Callable[[Lines], bool], part: float = 0.25
) -> Mutant:
    """The program after `edit` has changed one rank's list of training, or `part` of the time of
    evaluation; None if it found nothing to change."""
    evaluation = chance.random() < part
    lists = [list(x) for x in (lowered.evaluation if evaluation else lowered.instructions)]
    if not edit(chance.choice(lists)):
        return None
    return with_lists(lowered, lists, evaluation=evaluation)


def _places(lines: Lines, kinds: Collection[Kind]) -> list[int]:
    return [k for k, line in enumerate(lines) if line.kind in kinds]


def swap_two_receives(chance: Chance, lowered: Lowered) -> Mutant:
    return _edited(chance, lowered, lambda lines: _swap(chance, lines, {Kind.RECV}))


def swap_two_sends(chance: Chance, lowered: Lowered) -> Mutant:
    return _edited(chance, lowered, lambda lines: _swap(chance, lines, {Kind.SEND}))


def swap_two_reductions(chance: Chance, lowered: Lowered) -> Mutant:
    return _edited(
        chance, lowered, lambda lines: _swap(chance, lines, {Kind.REDUCE_GRADIENTS}), part=0
    )


def swap_two_computes(chance: Chance, lowered: Lowered) -> Mutant:
    return _edited(chance, lowered, lambda lines: _swap(chance, lines, COMPUTE))


def _swap(chance: Chance, lines: Lines, kinds: Collection[Kind]) -> bool:
    places = _places(lines, kinds)
    if len(places) < 2:
        return False
    a, b = chance.sample(places, 2)
    lines[a], lines[b] = lines[b], lines[a]
    return True


def swap_neighbours(chance: Chance, lowered: Lowered) -> Mutant:
    def edit(lines: Lines) -> bool:
        k = chance.randrange(1, len(lines)) if len(lines) > 1 else 0
        lines[k - 1], lines[k] = lines[k], lines[k - 1]
        return len(lines) > 1

    return _edited(chance, lowered, edit)


def move_an_instruction(chance: Chance, lowered: Lowered) -> Mutant:
    def edit(lines: Lines) -> bool:
        line = lines.pop(chance.randrange(len(lines)))
        lines.insert(chance.randrange(len(lines) + 1), line)
        return True

    return _edited(chance, lowered, edit)


def shuffle_a_rank(chance: Chance, lowered: Lowered) -> Mutant:
    def edit(lines: Lines) -> bool:
        chance.shuffle(lines)
        return True

    return _edited(chance, lowered, edit)


def drop_a_send(chance: Chance, lowered: Lowered) -> Mutant:
    return _edited(chance, lowered, lambda lines: _drop(chance, lines, {Kind.SEND}))


def drop_a_receive(chance: Chance, lowered: Lowered) -> Mutant:
    return _edited(chance, lowered, lambda lines: _drop(chance, lines, {Kind.RECV}))


def drop_a_forward(chance: Chance, lowered: Lowered) -> Mutant:
    return _edited(chance, lowered, lambda lines: _drop(chance, lines, {Kind.FORWARD}))


def drop_a_backward(chance: Chance, lowered: Lowered) -> Mutant:
    return _edited(chance, lowered, lambda lines: _drop(chance, lines, {Kind.BACKWARD}), part=0)


def drop_a_reduction(chance: Chance, lowered: Lowered) -> Mutant:
    kinds = {Kind.REDUCE_GRADIENTS}
    return _edited(chance, lowered, lambda lines: _drop(chance, lines, kinds), part=0)


def drop_the_loss(chance: Chance, lowered: Lowered) -> Mutant:
    return _edited(chance, lowered, lambda lines: _drop(chance, lines, {Kind.SHARE_LOSS}))


def _drop(chance: Chance, lines: Lines, kinds: Collection[Kind]) -> bool:
    places = _places(lines, kinds)
    if places:
        del lines[chance.choice(places)]
    return bool(places)


def drop_a_message(chance: Chance, lowered: Lowered) -> Mutant:
    """Both ends of a message go."""
    sends = [
        (rank, line)
        for rank, lines in enumerate(lowered.instructions)
        for line in lines
        if line.kind is Kind.SEND
    ]
    if not sends:
        return None
    rank, send = chance.choice(sends)
    receive = replace(send, kind=Kind.RECV, peer=rank)
    gone = {(rank, send), (send.peer, receive)}
    return with_lists(
        lowered,
        [
            [line for line in lines if (r, line) not in gone]
            for r, lines in enumerate(lowered.instructions)
        ],
    )


def repeat_an_instruction(chance: Chance, lowered: Lowered) -> Mutant:
    def edit(lines: Lines) -> bool:
        k = chance.randrange(len(lines))
        lines.insert(chance.randrange(k, len(lines)) + 1, lines[k])
        return True

    return _edited(chance, lowered, edit)


def repeat_a_forward(chance: Chance, lowered: Lowered) -> Mutant:
    def edit(lines: Lines) -> bool:
        k = chance.choice(_places(lines, {Kind.FORWARD}))
        lines.insert(k, lines[k])
        return True

    return _edited(chance, lowered, edit)


def _rewritten(
    chance: Chance,
    lowered: Lowered,
    kinds: Collection[Kind],
    change: Callable[[Instruction], dict[str, Any]],
) -> Mutant:
    """The program with one field of one instruction changed."""

    def edit(lines: Lines) -> bool:
        places = _places(lines, kinds)
        if not places:
            return False
        k = chance.choice(places)
        before = lines[k]
        lines[k] = replace(before, **change(before))
        return lines[k] != before

    return _edited(chance, lowered, edit)


def wrong_peer(chance: Chance, lowered: Lowered) -> Mutant:
    peers = range(-1, lowered.size + 1)
    return _rewritten(chance, lowered, MESSAGES, lambda _: {"peer": chance.choice(peers)})


def wrong_microbatch(chance: Chance, lowered: Lowered) -> Mutant:
    numbers = range(-1, lowered.microbatches + 1)
    kinds = MESSAGES | COMPUTE
    return _rewritten(chance, lowered, kinds, lambda _: {"microbatch": chance.choice(numbers)})


def wrong_value(chance: Chance, lowered: Lowered) -> Mutant:
    names = ["nothing", *lowered.values, *(item.label for item in lowered.tied)]
    kinds = MESSAGES | {Kind.REDUCE_GRADIENTS}
    return _rewritten(chance, lowered, kinds, lambda _: {"value": chance.choice(names)})


def value_for_gradient(chance: Chance, lowered: Lowered) -> Mutant:
    return _rewritten(chance, lowered, MESSAGES, lambda line: {"gradient": not line.gradient})


def wrong_stage(chance: Chance, lowered: Lowered) -> Mutant:
    stages = range(-1, len(lowered.stages) + 1)
    return _rewritten(chance, lowered, COMPUTE, lambda _: {"stage": chance.choice(stages)})


def wrong_kind(chance: Chance, lowered: Lowered) -> Mutant:
    other = {Kind.FORWARD: Kind.BACKWARD, Kind.SEND: Kind.RECV}
    other |= {b: a for a, b in other.items()}
    return _rewritten(chance, lowered, set(other), lambda line: {"kind": other[line.kind]})


def loss_from_another_rank(chance: Chance, lowered: Lowered) -> Mutant:
    ranks = range(-1, lowered.size + 1)
    kinds = {Kind.SHARE_LOSS}
    return _rewritten(chance, lowered, kinds, lambda _: {"peer": chance.choice(ranks)})


def reduce_over_other_ranks(chance: Chance, lowered: Lowered) -> Mutant:
    def change(_: Instruction) -> dict[str, Any]:
        return {"ranks": tuple(r for r in range(lowered.size) if chance.random() < 0.6)}

    return _rewritten(chance, lowered, {Kind.REDUCE_GRADIENTS}, change)


def _stage(chance: Chance, lowered: Lowered) -> int:
    return chance.randrange(len(lowered.stages))


def _picked(chance: Chance, items: Sequence[Any]) -> int | None:
    return chance.randrange(len(items)) if items else None


def _without(items: Sequence[Any], k: int) -> tuple[Any, ...]:
    return (*items[:k], *items[k + 1 :])


def _thinned(field: str) -> Mistake:
    """The mistake that something is missing in a field of a stage."""

    def mutant(chance: Chance, lowered: Lowered) -> Mutant:
        j = _stage(chance, lowered)
        items = getattr(lowered.stages[j], field)
        k = _picked(chance, items)
        return None if k is None else with_stage(lowered, j, **{field: _without(items, k)})

    mutant.__name__ = f"drop_one_of_{field}"
    return mutant


def _grown(field: str) -> Mistake:
    """The mistake that something of another stage is in a field of a stage too."""

    def mutant(chance: Chance, lowered: Lowered) -> Mutant:
        j = _stage(chance, lowered)
        own = getattr(lowered.stages[j], field)
        others = [x for stage in lowered.stages for x in getattr(stage, field) if x not in own]
        k = _picked(chance, others)
        if k is None:
            return None
        at = chance.randrange(len(own) + 1)
        return with_stage(lowered, j, **{field: (*own[:at], others[k], *own[at:])})

    mutant.__name__ = f"add_one_of_{field}"
    return mutant


def swap_two_calls(chance: Chance, lowered: Lowered) -> Mutant:
    j = _stage(chance, lowered)
    calls = list(lowered.stages[j].calls)
    if len(calls) < 2:
        return None
    a, b = chance.sample(range(len(calls)), 2)
    calls[a], calls[b] = calls[b], calls[a]
    return with_stage(lowered, j, calls=tuple(calls))


def move_a_call(chance: Chance, lowered: Lowered) -> Mutant:
    if len(lowered.stages) < 2:
        return None
    j, other = chance.sample(range(len(lowered.stages)), 2)
    calls, theirs = lowered.stages[j].calls, lowered.stages[other].calls
    k = chance.randrange(len(calls))
    smaller = with_stage(lowered, j, calls=_without(calls, k))
    more = (*theirs, calls[k]) if chance.random() < 0.5 else (calls[k], *theirs)
    return with_stage(smaller, other, calls=more)


def _renamed(field: str) -> Mistake:
    """The mistake that a call reads or returns something under the name of another."""

    def mutant(chance: Chance, lowered: Lowered) -> Mutant:
        j = _stage(chance, lowered)
        calls = list(lowered.stages[j].calls)
        c = chance.randrange(len(calls))
        names = list(getattr(calls[c], field))
        k = _picked(chance, names)
        if k is None:
            return None
        other = chance.choice(["nothing", *lowered.variables.values()])
        if other == names[k]:
            return None
        names[k] = other
        changes: dict[str, Any] = {field: tuple(names)}
        calls[c] = replace(calls[c], **changes)
        return with_stage(lowered, j, calls=tuple(calls))

    mutant.__name__ = f"rename_one_of_{field}"
    return mutant


def exchange_two_ranks(chance: Chance, lowered: Lowered) -> Mutant:
    if len(lowered.stages) < 2:
        return None
    a, b = chance.sample(range(len(lowered.stages)), 2)
    swapped = with_stage(lowered, a, rank=lowered.stages[b].rank)
    return with_stage(swapped, b, rank=lowered.stages[a].rank)


def wrong_rank(chance: Chance, lowered: Lowered) -> Mutant:
    j, rank = _stage(chance, lowered), chance.randrange(-1, lowered.size + 1)
    return None if rank == lowered.stages[j].rank else with_stage(lowered, j, rank=rank)


def loss_on_another_stage(chance: Chance, lowered: Lowered) -> Mutant:
    j = _stage(chance, lowered)
    loss = chance.choice([None, "nothing", *lowered.variables.values()])
    return None if loss == lowered.stages[j].loss else with_stage(lowered, j, loss=loss)


def _misdescribed(field: str, others: Sequence[Any]) -> Mistake:
    """The mistake that a value is not as the table says."""

    def mutant(chance: Chance, lowered: Lowered) -> Mutant:
        if not lowered.values:
            return None
        name, other = chance.choice(list(lowered.values)), chance.choice(others)
        if getattr(lowered.values[name], field) == other:
            return None
        return with_value(lowered, name, **{field: other})

    mutant.__name__ = f"wrong_{field}_of_a_value"
    return mutant


def drop_a_value(chance: Chance, lowered: Lowered) -> Mutant:
    if not lowered.values:
        return None
    gone = chance.choice(list(lowered.values))
    return replace(lowered, values={n: v for n, v in lowered.values.items() if n != gone})


def drop_a_tie(chance: Chance, lowered: Lowered) -> Mutant:
    k = _picked(chance, lowered.tied)
    return None if k is None else replace(lowered, tied=_without(lowered.tied, k))


def tie_other_ranks(chance: Chance, lowered: Lowered) -> Mutant:
    k = _picked(chance, lowered.tied)
    if k is None:
        return None
    tied = list(lowered.tied)
    ranks = tuple(r for r in range(lowered.size) if chance.random() < 0.6)
    if ranks == tied[k].ranks:
        return None
    tied[k] = replace(tied[k], ranks=ranks)
    return replace(lowered, tied=tuple(tied))


def forget_a_tie(chance: Chance, lowered: Lowered) -> Mutant:
    """Neither the table nor the lists know of a tensor that several ranks hold."""
    k = _picked(chance, lowered.tied)
    if k is None:
        return None
    label = lowered.tied[k].label
    lists = [[x for x in lines if x.value != label] for lines in lowered.instructions]
    return replace(with_lists(lowered, lists), tied=_without(lowered.tied, k))


def another_number_of_microbatches(chance: Chance, lowered: Lowered) -> Mutant:
    return replace(lowered, microbatches=lowered.microbatches + chance.choice((-1, 1)))


def exchange_two_names(chance: Chance, lowered: Lowered) -> Mutant:
    nodes = list(lowered.variables)
    if len(nodes) < 2:
        return None
    a, b = chance.sample(nodes, 2)
    names = {a: lowered.variables[b], b: lowered.variables[a]}
    return replace(lowered, variables={**lowered.variables, **names})


# Mistakes that only change the order in which instructions stand.
REORDERINGS: tuple[Mistake, ...] = (
    swap_two_receives,
    swap_two_sends,
    swap_two_reductions,
    swap_two_computes,
    swap_neighbours,
    move_an_instruction,
    shuffle_a_rank,
)
MISTAKES: tuple[Mistake, ...] = (
    *REORDERINGS,
    drop_a_send,
    drop_a_receive,
    drop_a_forward,
    drop_a_backward,
    drop_a_reduction,
    drop_the_loss,
    drop_a_message,
    repeat_an_instruction,
    repeat_a_forward,
    wrong_peer,
    wrong_microbatch,
    wrong_value,
    value_for_gradient,
    wrong_stage,
    wrong_kind,
    loss_from_another_rank,
    reduce_over_other_ranks,
    *map(_thinned, ("calls", "prologue", "inputs", "receives", "gives", "tensors")),
    *map(_grown, ("calls", "prologue", "inputs", "receives", "gives", "tensors")),
    swap_two_calls,
    move_a_call,
    _renamed("arguments"),
    _renamed("results"),
    exchange_two_ranks,
    wrong_rank,
    loss_on_another_stage,
    _misdescribed("name", ["nothing"]),
    _misdescribed("shape", [(), (2,), (4, 2), (2, 4)]),
    _misdescribed("dtype", [torch.float64, torch.bfloat16, torch.int64]),
    _misdescribed("differentiable", [True, False]),
    _misdescribed("producer", [-1, 0, 1, 2]),
    _misdescribed("consumers", [(), (0,), (1,), (1, 2), (9,)]),
    drop_a_value,
    drop_a_tie,
    tie_other_ranks,
    forget_a_tie,
    another_number_of_microbatches,
    exchange_two_names,
)
