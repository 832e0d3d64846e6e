"""Random mistakes in lowered programs, one function for each kind.

Each takes a source of chance and a program and returns another program, or None when the program
has nothing to make that mistake with.
"""

from __future__ import annotations

from tests.verifier.mistake import Mistake
from tests.verifier.reorderings import REORDERINGS
from tests.verifier.wrong_lines import WRONG_LINES
from tests.verifier.wrong_stages import WRONG_STAGES

MISTAKES: tuple[Mistake, ...] = (*REORDERINGS, *WRONG_LINES, *WRONG_STAGES)
