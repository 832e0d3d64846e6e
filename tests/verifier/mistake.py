"""What a random mistake is, and the random edit of one rank's list that most of them are."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection

from parcompiler.instruction import COMPUTE, Instruction, Kind
from parcompiler.lower import Lowered
from tests.verifier.edits import with_lists

Chance = random.Random
Mutant = Lowered | None
Mistake = Callable[[Chance, Lowered], Mutant]
Lines = list[Instruction]

WORK = COMPUTE | {Kind.UPDATE}
PARTS = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def edited(
    chance: Chance, lowered: Lowered, edit: Callable[[Lines], bool], part: float = 0.25
) -> Mutant:
    """The program after `edit` has changed one rank's list of training, or `part` of the time of
    evaluation; None if it found nothing to change."""
    evaluation = chance.random() < part
    lists = [list(x) for x in (lowered.evaluation if evaluation else lowered.instructions)]
    if not edit(chance.choice(lists)):
        return None
    return with_lists(lowered, lists, evaluation=evaluation)


def where(lines: Lines, kinds: Collection[Kind]) -> list[int]:
    return [k for k, line in enumerate(lines) if line.kind in kinds]
