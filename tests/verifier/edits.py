"""Small changes to lowered programs: instructions by their text, stages by their number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from parcompiler.instruction import Instruction
from parcompiler.lower import Lowered
from parcompiler.verifier import faults

Lines = list[str]


def texts(lowered: Lowered) -> list[str]:
    """All faults as text."""
    return [str(fault) for fault in faults(lowered)]


def with_lists(
    lowered: Lowered, lists: Sequence[Sequence[Instruction]], *, evaluation: bool = False
) -> Lowered:
    """The program with other instructions."""
    frozen = tuple(tuple(lines) for lines in lists)
    if evaluation:
        return replace(lowered, evaluation=frozen)
    return replace(lowered, instructions=frozen)


def edited(
    lowered: Lowered, rank: int, edit: Callable[[Lines], Any], *, evaluation: bool = False
) -> Lowered:
    """The program after `edit` has changed the lines of one rank in place."""
    lists = list(lowered.evaluation if evaluation else lowered.instructions)
    lines = [str(line) for line in lists[rank]]
    edit(lines)
    lists[rank] = tuple(map(Instruction.parse, lines))
    return with_lists(lowered, lists, evaluation=evaluation)


def dropped(lowered: Lowered, rank: int, *gone: str, evaluation: bool = False) -> Lowered:
    """The program without some lines of a rank."""

    def edit(lines: Lines) -> None:
        for line in gone:
            lines.remove(line)

    return edited(lowered, rank, edit, evaluation=evaluation)


def swapped(lowered: Lowered, rank: int, first: str, second: str) -> Lowered:
    """The program with two lines of a rank exchanged."""

    def edit(lines: Lines) -> None:
        a, b = lines.index(first), lines.index(second)
        lines[a], lines[b] = lines[b], lines[a]

    return edited(lowered, rank, edit)


def rewritten(lowered: Lowered, rank: int, old: str, new: str) -> Lowered:
    """The program with another line in the place of one."""

    def edit(lines: Lines) -> None:
        lines[lines.index(old)] = new

    return edited(lowered, rank, edit)


def moved(lowered: Lowered, rank: int, line: str, before: str) -> Lowered:
    """The program with one line of a rank in front of another."""

    def edit(lines: Lines) -> None:
        lines.remove(line)
        lines.insert(lines.index(before), line)

    return edited(lowered, rank, edit)


def with_stage(lowered: Lowered, j: int, /, **changes: Any) -> Lowered:
    """The program with some fields of one stage changed."""
    stages = list(lowered.stages)
    stages[j] = replace(stages[j], **changes)
    return replace(lowered, stages=tuple(stages))


def with_value(lowered: Lowered, name: str, /, **changes: Any) -> Lowered:
    """The program with some fields of one value changed."""
    value = replace(lowered.values[name], **changes)
    return replace(lowered, values={**lowered.values, name: value})
