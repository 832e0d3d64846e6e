"""The only users of OR-tools: linear programmes (`linear`) and agendas of tasks (`agenda`)."""

from parcompiler.solver.agenda import Agenda, agree
from parcompiler.solver.linear import (
    EFFORT,
    ROUNDING,
    Constraint,
    SolverModel,
    Status,
    Term,
    UndecidedError,
    Variable,
    relative_gap,
    solve,
)

__all__ = [
    "EFFORT", "ROUNDING", "Agenda", "Constraint", "SolverModel", "Status", "Term", "UndecidedError",
    "Variable", "agree", "relative_gap", "solve",
]  # fmt: skip
