"""The one door to OR-tools: linear programmes (`linear`) and agendas of tasks (`agenda`)."""

from parcompiler.solver.agenda import Agenda, Agreement, agree
from parcompiler.solver.linear import (
    EFFORT,
    Constraint,
    SolverModel,
    SolverResult,
    Status,
    Term,
    UndecidedError,
    Variable,
    linear,
    relative_gap,
    satisfies,
    solve,
    value_of,
)

__all__ = [
    "EFFORT",
    "Agenda",
    "Agreement",
    "Constraint",
    "SolverModel",
    "SolverResult",
    "Status",
    "Term",
    "UndecidedError",
    "Variable",
    "agree",
    "linear",
    "relative_gap",
    "satisfies",
    "solve",
    "value_of",
]
