"""Linear and integer programmes: a model in, the values of its variables or InfeasibleError out.

>>> model = SolverModel()
>>> x = [model.binary(f"x[{i}]") for i in range(3)]
>>> model.constrain([(1, x[0]), (1, x[1]), (1, x[2])], low=2)
>>> model.minimize([(3, x[0]), (5, x[1]), (4, x[2])])
>>> print(model)
minimize 3 x[0] + 5 x[1] + 4 x[2]
  2 <= x[0] + x[1] + x[2]
>>> solution = solve(model)
>>> solution.status, solution.objective, [solution[variable] for variable in x]
('optimal', 7, [1, 0, 1])

Choice of the solver, as measured with OR-tools 9.15 on one core:

* Integer variables: CP-SAT, whose arithmetic is exact. It divides 40 random blocks into 8 stages in
  0.3 s (SCIP 12 s, HiGHS 25 s), and shards as fast as those two. It is called directly, because the
  linear_solver interface rounds (it called a feasible division infeasible) and crashes on HiGHS.
* CP-SAT searches by propagation for a quarter of the effort, then with linear relaxations: a
  division often takes 0.1 s by the first and 5 s by the second, packing the other way round.
* CP-SAT's presolve is off: with it, 1 in 250 random divisions was called optimal and was up to 20 %
  off (like google/or-tools issue 5293, still open in 9.15); without it, none of 60,000. It saves
  little here.
* `relax=True` for programmes whose linear relaxation is tight, such as sharding: GLOP solves the
  relaxation first (thousands of binaries in 0.02 s); if it is integral, it is the answer. Otherwise
  CP-SAT starts from it, with relaxations (0.3 s; propagation alone takes more than 60 s).
* Continuous variables: GLOP. No programme has both kinds.

Equal models have equal values: one worker, because parallel ones race; a fixed seed; and a limit
that counts the solver's operations, because times vary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

from parcompiler.errors import InfeasibleError, InputError, PlanError

if TYPE_CHECKING:  # OR-tools takes 0.4 s to import: that is done with the first programme
    from ortools.linear_solver.python import model_builder
    from ortools.sat.python import cp_model

Status = Literal["optimal", "feasible"]

EFFORT = 5.0  # default limit, in CP-SAT's deterministic units: 0.3 to 2 s of one core each
TOLERANCE = 1e-6  # of the floating-point solvers
ROUNDING = 1e-9  # relative error of a sum of floats that is added up in another order
PRECISION = 52  # bits; rows with fractions are scaled to about this size, then rounded
ONE, NONE = Fraction(1), Fraction(0)  # scale and error of a sum with integer coefficients

PROPAGATE, RELAX = 0, 2  # CP-SAT's linearization_level


class UndecidedError(PlanError):
    """The limit was reached with neither a solution nor a proof that there is none.

    `bound` is a lower bound of the objective.
    """

    def __init__(self, effort: float, bound: float) -> None:
        super().__init__(
            f"the solver found no solution within its limit (effort={effort:g}), and no proof that "
            "there is none: allow it more effort"
        )
        self.bound = bound


@dataclass(frozen=True, slots=True)
class Variable:
    """An unknown of a model, between `low` and `high` (both included)."""

    index: int
    name: str
    low: float
    high: float
    whole: bool


Term = tuple[float, Variable]
"""A coefficient and its variable."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """`low <= sum(coefficient * variable) <= high`."""

    terms: tuple[Term, ...]
    low: float
    high: float

    def __str__(self) -> str:
        """The inequality, without the sides that are infinite."""
        if self.low == self.high:
            return f"{linear(self.terms)} == {self.low:g}"
        low = f"{self.low:g} <= " if self.low > -math.inf else ""
        high = f" <= {self.high:g}" if self.high < math.inf else ""
        return f"{low}{linear(self.terms)}{high}"


@dataclass(slots=True)
class SolverModel:
    """A linear programme, built row by row; it prints in the usual notation."""

    variables: list[Variable] = field(default_factory=list)
    rows: list[Constraint] = field(default_factory=list)
    objective: tuple[Term, ...] = ()
    constant: float = 0
    hints: dict[Variable, float] = field(default_factory=dict)

    def binary(self, name: str) -> Variable:
        """A new variable that is 0 or 1."""
        return self.integer(name, 0, 1)

    def integer(self, name: str, low: int, high: int) -> Variable:
        """A new integer variable."""
        return self._new(name, low, high, whole=True)

    def continuous(self, name: str, low: float = 0, high: float = math.inf) -> Variable:
        """A new real variable."""
        return self._new(name, low, high, whole=False)

    def constrain(
        self, terms: Iterable[Term], low: float = -math.inf, high: float = math.inf
    ) -> None:
        """Demand `low <= sum(terms) <= high`."""
        self.rows.append(Constraint(tuple(terms), low, high))

    def minimize(self, terms: Iterable[Term], constant: float = 0) -> None:
        """Set the objective. With integer coefficients it, its bound and its gap are exact."""
        self.objective, self.constant = tuple(terms), constant

    def hint(self, variable: Variable, value: float) -> None:
        """Suggest a value to try first. Hints change neither the optimum nor the bound."""
        self.hints[variable] = value

    def _new(self, name: str, low: float, high: float, whole: bool) -> Variable:
        variable = Variable(len(self.variables), name, low, high, whole)
        self.variables.append(variable)
        return variable

    def __str__(self) -> str:
        """The objective, and one line per constraint."""
        constant = f" + {self.constant:g}" if self.constant else ""
        return "\n  ".join([f"minimize {linear(self.objective)}{constant}", *map(str, self.rows)])


@dataclass(frozen=True, slots=True)
class SolverResult:
    """Values of the variables, and how good they are.

    `bound` is a lower bound of the objective; `gap` is (objective - bound) / |objective|.
    """

    status: Status
    objective: float
    bound: float
    values: tuple[float, ...] = field(repr=False)

    @property
    def gap(self) -> float:
        """The relative gap between the objective and its bound."""
        return relative_gap(self.objective, self.bound)

    def __getitem__(self, variable: Variable) -> float:
        """The value of a variable; an int for an integer variable."""
        return self.values[variable.index]


def solve(model: SolverModel, *, relax: bool = False, effort: float = EFFORT) -> SolverResult:
    """Minimize the objective.

    Args:
        model: what to solve.
        relax: begin with the linear relaxation, because it is probably tight.
        effort: the limit of the search, in CP-SAT's deterministic units (0.3 to 2 s of one core);
            past it, the best solution so far is returned as "feasible".

    Raises:
        InfeasibleError: no values satisfy the constraints.
        UndecidedError: the limit was reached before the first solution.
        InputError: the objective has no lower bound, or the numbers are too large.
    """
    if not any(variable.whole for variable in model.variables):
        return _floating(model, effort)
    assert all(variable.whole for variable in model.variables), "variables of both kinds"
    return _relax_first(model, effort) if relax else _propagate_first(model, effort)


def _relax_first(model: SolverModel, effort: float) -> SolverResult:
    """The solution of the linear relaxation if it is integral; else a search that starts there."""
    try:
        relaxed = _floating(model, effort)
    except UndecidedError:  # GLOP gives up where coefficients are many orders of magnitude apart
        return _exact(model, model.hints, RELAX, effort)
    rounded = tuple(round(value) for value in relaxed.values)
    objective = value_of(model, rounded)
    bound = min(objective, relaxed.objective)
    if satisfies(model, rounded) and relative_gap(objective, bound) <= ROUNDING:
        return SolverResult("optimal", objective, bound, rounded)
    near = {
        variable: whole
        for variable, whole in zip(model.variables, rounded, strict=True)
        if abs(relaxed[variable] - whole) <= TOLERANCE
    }
    return _exact(model, {**near, **model.hints}, RELAX, effort)


def _propagate_first(model: SolverModel, effort: float) -> SolverResult:
    """A short search by propagation; if that does not finish, a long one with relaxations."""
    try:
        first = _exact(model, model.hints, PROPAGATE, effort / 4)
    except UndecidedError:
        return _exact(model, model.hints, RELAX, 3 * effort / 4)
    if first.status == "optimal":
        return first
    hints = dict(zip(model.variables, first.values, strict=True))
    try:
        second = _exact(model, hints, RELAX, 3 * effort / 4)
    except UndecidedError:
        return first
    best = min(second, first, key=lambda solution: solution.objective)
    bound = min(best.objective, max(first.bound, second.bound))
    return SolverResult(second.status, best.objective, bound, best.values)


def relative_gap(objective: float, bound: float) -> float:
    """(objective - bound) / |objective|; 0 when the bound is reached."""
    if objective <= bound:
        return 0.0
    return (objective - bound) / abs(objective) if objective else math.inf


def value_of(model: SolverModel, values: Sequence[float]) -> float:
    """The objective at these values."""
    return _sum(model.objective, values) + model.constant


def satisfies(model: SolverModel, values: Sequence[float]) -> bool:
    """Whether the values satisfy every bound and constraint exactly."""
    bounded = all(v.low <= x <= v.high for v, x in zip(model.variables, values, strict=True))
    return bounded and all(row.low <= _sum(row.terms, values) <= row.high for row in model.rows)


def linear(terms: Iterable[Term]) -> str:
    """A sum in the usual notation."""
    text = ""
    for coefficient, variable in terms:
        size = "" if abs(coefficient) == 1 else f"{abs(coefficient):g} "
        text += f" {'-' if coefficient < 0 else '+'} {size}{variable.name}"
    first = "-" if text.startswith(" - ") else ""
    return first + text[3:] or "0"


def _sum(terms: Iterable[Term], values: Sequence[float]) -> float:
    return sum(coefficient * values[variable.index] for coefficient, variable in terms)


def _exact(
    model: SolverModel, hints: Mapping[Variable, float], linearization: int, effort: float
) -> SolverResult:
    """Solve with CP-SAT: integer variables, integer coefficients."""
    from ortools.sat.python import cp_model

    target = cp_model.CpModel()
    variables = [target.new_int_var(int(v.low), int(v.high), v.name) for v in model.variables]

    def add(row: _WholeSum) -> cp_model.LinearExprT:
        chosen = [variables[index] for index in row.indices]
        return cp_model.LinearExpr.weighted_sum(chosen, row.coefficients)

    for row in model.rows:
        whole = _WholeSum.of(row.terms)
        low, high = whole.sides(row)
        target.add_linear_constraint(add(whole), low, high)
    objective = _WholeSum.of(model.objective)
    target.minimize(add(objective))
    for variable, value in hints.items():
        target.add_hint(variables[variable.index], round(value))

    solver, status = run(target, linearization, effort)
    if status == cp_model.INFEASIBLE:
        raise _infeasible(model)
    bound = float((Fraction(solver.best_objective_bound) - objective.error) / objective.scale)
    bound += model.constant
    if status == cp_model.UNKNOWN:
        raise UndecidedError(effort, bound)
    values = tuple(int(solver.value(variable)) for variable in variables)
    reached = value_of(model, values)
    if status == cp_model.OPTIMAL:
        return SolverResult(
            "optimal", reached, min(bound, reached) if objective.error else reached, values
        )
    return SolverResult("feasible", reached, min(bound, reached), values)


def run(
    target: cp_model.CpModel, linearization: int, effort: float
) -> tuple[cp_model.CpSolver, cp_model.CpSolverStatus]:
    """Solve a model with CP-SAT; returns the solver and its status. Raises InputError for numbers
    that are too large."""
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.catch_sigint_signal = False  # it would leave the default handler behind
    solver.parameters.max_deterministic_time = effort
    solver.parameters.linearization_level = linearization
    solver.parameters.cp_model_presolve = False  # in 9.15 it can lose the optimum, see above
    status = solver.solve(target)
    if status == cp_model.MODEL_INVALID:
        reason = " ".join(target.validate().split())
        message = f"the solver refuses the model ({reason}): use smaller numbers"
        raise InputError(message)
    return solver, status


@dataclass(frozen=True, slots=True)
class _WholeSum:
    """A sum times `scale` with rounded coefficients; the rounding changes it by at most `error`."""

    indices: list[int]
    coefficients: list[int]
    scale: Fraction
    error: Fraction

    @staticmethod
    def of(terms: Sequence[Term]) -> _WholeSum:
        """The sum of these terms; integer coefficients are not scaled."""
        indices = [variable.index for _, variable in terms]
        if all(float(a).is_integer() for a, _ in terms):
            return _WholeSum(indices, [int(a) for a, _ in terms], ONE, NONE)
        reach = [Fraction(max(abs(v.low), abs(v.high))) for _, v in terms]
        largest = sum(abs(a) * max(float(x), 1.0) for (a, _), x in zip(terms, reach, strict=True))
        scale = Fraction(2) ** (PRECISION - math.frexp(largest)[1])
        coefficients = [round(Fraction(a) * scale) for a, _ in terms]
        return _WholeSum(indices, coefficients, scale, sum(reach, Fraction(0)) / 2)

    def sides(self, row: Constraint) -> tuple[int, int]:
        """The sides of a constraint in the same scale, widened by the error."""
        low, high = -(2**63), 2**63 - 1  # CP-SAT's infinities
        if self.scale is ONE:  # most rows: fractions take long
            below, above = math.isfinite(row.low), math.isfinite(row.high)
            return math.ceil(row.low) if below else low, math.floor(row.high) if above else high
        if math.isfinite(row.low):
            low = math.ceil(Fraction(row.low) * self.scale - self.error)
        if math.isfinite(row.high):
            high = math.floor(Fraction(row.high) * self.scale + self.error)
        return low, high


def _floating(model: SolverModel, effort: float) -> SolverResult:
    """Solve the linear relaxation with GLOP."""
    from ortools.linear_solver.python import model_builder

    target = model_builder.Model()  # type: ignore[no-untyped-call]
    variables = [target.new_var(v.low, v.high, False, v.name) for v in model.variables]

    def add(terms: Sequence[Term]) -> model_builder.LinearExpr:
        chosen = [variables[variable.index] for _, variable in terms]
        return model_builder.LinearExpr.weighted_sum(chosen, [float(a) for a, _ in terms])

    for row in model.rows:
        target.add_linear_constraint(add(row.terms), row.low, row.high)
    target.minimize(add(model.objective))
    solver = model_builder.Solver("glop")
    status = solver.solve(target)
    if status in (model_builder.SolveStatus.INFEASIBLE, model_builder.SolveStatus.UNBOUNDED):
        # GLOP confuses the two. Without an objective the model can only be infeasible.
        target.minimize(0)
        if solver.solve(target) == model_builder.SolveStatus.INFEASIBLE:
            raise _infeasible(model)
        message = "the objective has no lower bound: bound its variables"
        raise InputError(message)
    if status != model_builder.SolveStatus.OPTIMAL:
        raise UndecidedError(effort, -math.inf)
    values = tuple(float(solver.value(variable)) for variable in variables)
    objective = value_of(model, values)
    return SolverResult("optimal", objective, objective, values)


def _infeasible(model: SolverModel) -> InfeasibleError:
    counts = f"{len(model.variables)} variables, {len(model.rows)} constraints"
    return InfeasibleError(f"no values satisfy the constraints ({counts}): loosen one of them")
