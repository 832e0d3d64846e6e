"""Instruction lists as tables: one instruction a line, the same word in the same column.

>>> lines = [Instruction.parse(text) for text in ("FORWARD stage 0 mb 0", "SEND h_1 mb 10 to 1")]
>>> print(columns(lines))
FORWARD  stage 0  mb  0
SEND     h_1      mb 10  to 1
>>> lines = ["S mb 3", "EXCHANGE statistics mb 3", "REDUCE ln_f.grad mb 3 to 1"]
>>> print(columns([Instruction.parse(text) for text in lines]))
S                     mb 3
EXCHANGE  statistics  mb 3
REDUCE    ln_f.grad   mb 3  to 1
"""

from __future__ import annotations

from collections.abc import Sequence

from parcompiler.instruction import (
    COMPUTE,
    EMBEDDING,
    HEAD,
    MESSAGES,
    TRANSFERS,
    Instruction,
    Kind,
)

STAGED = COMPUTE | {Kind.UPDATE}  # these name a stage and a micro-batch
VALUED = MESSAGES | TRANSFERS | EMBEDDING | {Kind.EXCHANGE}  # these a value and a micro-batch


def columns(instructions: Sequence[Instruction]) -> str:
    """The text of a program; `parcompiler.instruction.parse` reads it back."""
    rows = [_cells(item) for item in instructions]
    aligned = [row for row in rows if len(row) > 1]
    widths = [max((len(row[k]) for row in aligned if k < len(row)), default=0) for k in range(5)]
    return "\n".join(_line(row, widths) for row in rows)


def _cells(item: Instruction) -> list[str]:
    """The words of an instruction by column; those that stand alone are not in the table."""
    words = str(item).split()
    if item.kind in STAGED:
        return [words[0], " ".join(words[1:3]), *words[3:]]
    if item.kind in HEAD:
        return [words[0], "", *words[1:]]
    if item.kind in VALUED:
        return [*words[:4], *([" ".join(words[4:])] if words[4:] else [])]
    return [str(item)]


def _line(row: list[str], widths: list[int]) -> str:
    """One line of the table; numbers stand at the right of their column."""
    if len(row) == 1:
        return row[0]
    kind, what, mb, number, *peer = row
    line = f"{kind.ljust(widths[0])}  {what.ljust(widths[1])}  {mb} {number.rjust(widths[3])}"
    return "  ".join([line, *peer])
