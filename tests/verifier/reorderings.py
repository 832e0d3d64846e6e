"""Random mistakes that only change the order in which instructions stand."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from parcompiler.instruction import COMPUTE, Kind
from parcompiler.lower import Lowered
from tests.verifier.edits import with_lists
from tests.verifier.mistake import WORK, Chance, Lines, Mistake, Mutant, edited, where


def swap_two_receives(chance: Chance, lowered: Lowered) -> Mutant:
    return edited(chance, lowered, lambda lines: _swap(chance, lines, {Kind.RECV}))


def swap_two_receives_of_a_channel(chance: Chance, lowered: Lowered) -> Mutant:
    def edit(lines: Lines) -> bool:
        peer = chance.randrange(lowered.size)
        places = [k for k in where(lines, {Kind.RECV}) if lines[k].peer == peer]
        return _exchange(chance, lines, places)

    return edited(chance, lowered, edit)


def swap_at_both_ends(chance: Chance, lowered: Lowered) -> Mutant:
    """Two messages of a channel change places where they are sent and where they are received."""
    rank = chance.randrange(lowered.size)
    lists = [list(lines) for lines in lowered.instructions]
    sends = [lists[rank][k] for k in where(lists[rank], {Kind.SEND})]
    peer = chance.randrange(lowered.size)
    sends = [line for line in sends if line.peer == peer]
    if len(sends) < 2:
        return None
    first, second = chance.sample(sends, 2)
    for at, kind, other in ((rank, Kind.SEND, peer), (peer, Kind.RECV, rank)):
        a, b = (lists[at].index(replace(x, kind=kind, peer=other)) for x in (first, second))
        lists[at][a], lists[at][b] = lists[at][b], lists[at][a]
    return with_lists(lowered, lists)


def swap_two_sends(chance: Chance, lowered: Lowered) -> Mutant:
    return edited(chance, lowered, lambda lines: _swap(chance, lines, {Kind.SEND}))


def swap_two_reductions(chance: Chance, lowered: Lowered) -> Mutant:
    return edited(
        chance, lowered, lambda lines: _swap(chance, lines, {Kind.REDUCE_GRADIENTS}), part=0
    )


def swap_two_computes(chance: Chance, lowered: Lowered) -> Mutant:
    return edited(chance, lowered, lambda lines: _swap(chance, lines, COMPUTE))


def swap_an_update(chance: Chance, lowered: Lowered) -> Mutant:
    def edit(lines: Lines) -> bool:
        return bool(where(lines, {Kind.UPDATE})) and _swap(chance, lines, WORK)

    return edited(chance, lowered, edit, part=0)


def weights_before_inputs(chance: Chance, lowered: Lowered) -> Mutant:
    """The parts of a backward change places."""

    def edit(lines: Lines) -> bool:
        places = where(lines, {Kind.BACKWARD_INPUT})
        if not places:
            return False
        k = chance.choice(places)
        other = lines.index(replace(lines[k], kind=Kind.BACKWARD_WEIGHT))
        lines[k], lines[other] = lines[other], lines[k]
        return True

    return edited(chance, lowered, edit, part=0)


def _swap(chance: Chance, lines: Lines, kinds: Collection[Kind]) -> bool:
    return _exchange(chance, lines, where(lines, kinds))


def _exchange(chance: Chance, lines: Lines, places: Sequence[int]) -> bool:
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

    return edited(chance, lowered, edit)


def move_an_instruction(chance: Chance, lowered: Lowered) -> Mutant:
    def edit(lines: Lines) -> bool:
        line = lines.pop(chance.randrange(len(lines)))
        lines.insert(chance.randrange(len(lines) + 1), line)
        return True

    return edited(chance, lowered, edit)


def _shifted(kinds: Collection[Kind], far: int) -> Mistake:
    """The mistake that an instruction stands up to `far` places further up (below 0), or down."""

    def mutant(chance: Chance, lowered: Lowered) -> Mutant:
        def edit(lines: Lines) -> bool:
            places = where(lines, kinds)
            if not places:
                return False
            k = chance.choice(places)
            line = lines.pop(k)
            by = chance.randint(1, abs(far)) * (-1 if far < 0 else 1)
            lines.insert(max(0, k + by), line)
            return True

        return edited(chance, lowered, edit)

    names = "_or_".join(sorted(kind.lower() for kind in kinds))
    mutant.__name__ = f"{names}_too_{'early' if far < 0 else 'late'}"
    return mutant


def shuffle_a_rank(chance: Chance, lowered: Lowered) -> Mutant:
    def edit(lines: Lines) -> bool:
        chance.shuffle(lines)
        return True

    return edited(chance, lowered, edit)


REORDERINGS: tuple[Mistake, ...] = (
    swap_two_receives,
    swap_two_sends,
    swap_two_reductions,
    swap_two_receives_of_a_channel,
    swap_at_both_ends,
    swap_two_computes,
    swap_an_update,
    weights_before_inputs,
    swap_neighbours,
    move_an_instruction,
    shuffle_a_rank,
    _shifted({Kind.SEND}, -6),
    _shifted({Kind.SEND}, 6),
    _shifted({Kind.RECV}, -6),
    _shifted({Kind.RECV}, 6),
    _shifted({Kind.REDUCE_GRADIENTS, Kind.SHARE_LOSS}, -9),
    _shifted({Kind.UPDATE}, -4),
    _shifted({Kind.UPDATE}, 4),
    _shifted({Kind.BACKWARD_WEIGHT}, -6),
    _shifted({Kind.BACKWARD_WEIGHT}, 6),
)
