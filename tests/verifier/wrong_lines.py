"""Random mistakes in instruction lists: lines that are missing, too many, or say something else."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from parcompiler.instruction import BACKWARDS, COMPUTE, MESSAGES, Instruction, Kind
from parcompiler.lower import Lowered
from tests.verifier.edits import with_lists
from tests.verifier.mistake import PARTS, WORK, Chance, Lines, Mistake, Mutant, edited, where


def drop_a_send(chance: Chance, lowered: Lowered) -> Mutant:
    return edited(chance, lowered, lambda lines: _drop(chance, lines, {Kind.SEND}))


def drop_a_receive(chance: Chance, lowered: Lowered) -> Mutant:
    return edited(chance, lowered, lambda lines: _drop(chance, lines, {Kind.RECV}))


def drop_a_forward(chance: Chance, lowered: Lowered) -> Mutant:
    return edited(chance, lowered, lambda lines: _drop(chance, lines, {Kind.FORWARD}))


def drop_a_backward(chance: Chance, lowered: Lowered) -> Mutant:
    return edited(chance, lowered, lambda lines: _drop(chance, lines, BACKWARDS), part=0)


def drop_a_backward_for_weights(chance: Chance, lowered: Lowered) -> Mutant:
    kinds = {Kind.BACKWARD_WEIGHT}
    return edited(chance, lowered, lambda lines: _drop(chance, lines, kinds), part=0)


def drop_an_update(chance: Chance, lowered: Lowered) -> Mutant:
    return edited(chance, lowered, lambda lines: _drop(chance, lines, {Kind.UPDATE}), part=0)


def drop_a_reduction(chance: Chance, lowered: Lowered) -> Mutant:
    kinds = {Kind.REDUCE_GRADIENTS}
    return edited(chance, lowered, lambda lines: _drop(chance, lines, kinds), part=0)


def drop_the_loss(chance: Chance, lowered: Lowered) -> Mutant:
    return edited(chance, lowered, lambda lines: _drop(chance, lines, {Kind.SHARE_LOSS}))


def _drop(chance: Chance, lines: Lines, kinds: Collection[Kind]) -> bool:
    places = where(lines, kinds)
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

    return edited(chance, lowered, edit)


def add_an_update(chance: Chance, lowered: Lowered) -> Mutant:
    """After a compute instruction, whether the program is asynchronous or not."""

    def edit(lines: Lines) -> bool:
        k = chance.choice(where(lines, COMPUTE))
        lines.insert(k + 1, replace(lines[k], kind=Kind.UPDATE))
        return True

    return edited(chance, lowered, edit)


def with_and_without_flush(chance: Chance, lowered: Lowered) -> Mutant:
    """A synchronous program passes for an asynchronous one, or the other way round."""
    return replace(lowered, asynchronous=not lowered.asynchronous)


def split_a_backward(chance: Chance, lowered: Lowered) -> Mutant:
    """In parts: perhaps the wrong way round, without one of them, or with the whole there too."""

    def edit(lines: Lines) -> bool:
        places = where(lines, {Kind.BACKWARD})
        if not places:
            return False
        k = chance.choice(places)
        kinds = chance.sample((*PARTS, Kind.BACKWARD), chance.randint(1, 3))
        lines[k : k + 1] = [replace(lines[k], kind=kind) for kind in kinds]
        return kinds != [Kind.BACKWARD]

    return edited(chance, lowered, edit, part=0)


def merge_a_backward(chance: Chance, lowered: Lowered) -> Mutant:
    """A whole one in the place of a part; the other part may be left."""

    def edit(lines: Lines) -> bool:
        places = where(lines, PARTS)
        if not places:
            return False
        k = chance.choice(places)
        part = lines[k]
        other = replace(part, kind=PARTS[part.kind is PARTS[0]])
        lines[k] = replace(part, kind=Kind.BACKWARD)
        if chance.random() < 0.5:
            lines.remove(other)
        return True

    return edited(chance, lowered, edit, part=0)


def repeat_a_forward(chance: Chance, lowered: Lowered) -> Mutant:
    def edit(lines: Lines) -> bool:
        k = chance.choice(where(lines, {Kind.FORWARD}))
        lines.insert(k, lines[k])
        return True

    return edited(chance, lowered, edit)


def _rewritten(
    chance: Chance,
    lowered: Lowered,
    kinds: Collection[Kind],
    change: Callable[[Instruction], dict[str, Any]],
) -> Mutant:
    """The program with one field of one instruction changed."""

    def edit(lines: Lines) -> bool:
        places = where(lines, kinds)
        if not places:
            return False
        k = chance.choice(places)
        before = lines[k]
        lines[k] = replace(before, **change(before))
        return lines[k] != before

    return edited(chance, lowered, edit)


def wrong_peer(chance: Chance, lowered: Lowered) -> Mutant:
    peers = range(-1, lowered.size + 1)
    return _rewritten(chance, lowered, MESSAGES, lambda _: {"peer": chance.choice(peers)})


def wrong_microbatch(chance: Chance, lowered: Lowered) -> Mutant:
    numbers = range(-1, lowered.microbatches + 1)
    kinds = MESSAGES | WORK
    return _rewritten(chance, lowered, kinds, lambda _: {"microbatch": chance.choice(numbers)})


def wrong_value(chance: Chance, lowered: Lowered) -> Mutant:
    names = ["nothing", *lowered.values, *(item.label for item in lowered.tied)]
    kinds = MESSAGES | {Kind.REDUCE_GRADIENTS}
    return _rewritten(chance, lowered, kinds, lambda _: {"value": chance.choice(names)})


def value_for_gradient(chance: Chance, lowered: Lowered) -> Mutant:
    return _rewritten(chance, lowered, MESSAGES, lambda line: {"gradient": not line.gradient})


def wrong_stage(chance: Chance, lowered: Lowered) -> Mutant:
    stages = range(-1, len(lowered.stages) + 1)
    return _rewritten(chance, lowered, WORK, lambda _: {"stage": chance.choice(stages)})


def wrong_kind(chance: Chance, lowered: Lowered) -> Mutant:
    def change(line: Instruction) -> dict[str, Any]:
        kinds = MESSAGES if line.kind in MESSAGES else WORK
        return {"kind": chance.choice(sorted(kinds - {line.kind}))}

    return _rewritten(chance, lowered, MESSAGES | WORK, change)


def loss_from_another_rank(chance: Chance, lowered: Lowered) -> Mutant:
    ranks = range(-1, lowered.size + 1)
    kinds = {Kind.SHARE_LOSS}
    return _rewritten(chance, lowered, kinds, lambda _: {"peer": chance.choice(ranks)})


def reduce_over_other_ranks(chance: Chance, lowered: Lowered) -> Mutant:
    def change(_: Instruction) -> dict[str, Any]:
        return {"ranks": tuple(r for r in range(lowered.size) if chance.random() < 0.6)}

    return _rewritten(chance, lowered, {Kind.REDUCE_GRADIENTS}, change)


WRONG_LINES: tuple[Mistake, ...] = (
    drop_a_send,
    drop_a_receive,
    drop_a_forward,
    drop_a_backward,
    drop_a_backward_for_weights,
    drop_an_update,
    add_an_update,
    with_and_without_flush,
    split_a_backward,
    merge_a_backward,
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
)
