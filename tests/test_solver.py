"""The door to OR-tools: the same values as trying all of them, and a word for every refusal."""

import itertools
import math
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest

from parcompiler.errors import InfeasibleError, InputError, PlanError
from parcompiler.solver.linear import (
    SolverModel,
    SolverResult,
    UndecidedError,
    relative_gap,
    satisfies,
    solve,
)


def random_model(seed: int, *, whole: bool) -> SolverModel:
    """Six variables, three constraints; about a quarter of these models are infeasible."""
    chance = random.Random(seed)

    def number() -> float:
        return chance.randint(-9, 9) if whole else chance.uniform(-9, 9)

    model = SolverModel()
    variables = [model.binary(f"x[{i}]") for i in range(4)]
    variables += [model.integer(f"n[{i}]", -2, 2) for i in range(2)]
    for _ in range(3):
        low = number()
        model.constrain([(number(), v) for v in variables], low, low + abs(number()) / 2)
    model.minimize([(number(), v) for v in variables], number())
    return model


def all_values(model: SolverModel) -> Iterator[tuple[int, ...]]:
    """Every point within the bounds."""
    spans = [range(int(v.low), int(v.high) + 1) for v in model.variables]
    return itertools.product(*spans)


def least(model: SolverModel) -> float:
    """The smallest objective, found by trying everything; infinity when nothing satisfies."""
    objectives = [
        math.fsum([model.constant, *(a * values[v.index] for a, v in model.objective)])
        for values in all_values(model)
        if satisfies(model, values)
    ]
    return min(objectives, default=math.inf)


@pytest.mark.parametrize("relax", [False, True])
@pytest.mark.parametrize("whole", [True, False])
def test_the_optimum_is_that_of_trying_everything(whole: bool, relax: bool) -> None:
    outcomes = set()
    for seed in range(20):
        model = random_model(seed, whole=whole)
        expected = least(model)
        try:
            solution = solve(model, relax=relax)
        except InfeasibleError:
            assert expected == math.inf
            outcomes.add("infeasible")
            continue
        assert solution.status == "optimal"
        assert solution.objective == pytest.approx(expected, rel=1e-12)
        assert satisfies(model, solution.values)
        assert solution.bound <= solution.objective
        assert solution.gap <= 1e-9
        assert solution.gap == 0 or not whole
        outcomes.add("optimal")
    assert outcomes == {"optimal", "infeasible"}


def assignment(size: int) -> SolverModel:
    """Workers to jobs: the linear relaxation is whole."""
    model = SolverModel()
    x = {ij: model.binary(f"x[{ij}]") for ij in itertools.product(range(size), repeat=2)}
    for i in range(size):
        model.constrain([(1, x[i, j]) for j in range(size)], 1, 1)
        model.constrain([(1, x[j, i]) for j in range(size)], 1, 1)
    model.minimize([(abs(3 * i - 2 * j), x[i, j]) for i, j in x])
    return model


def partition(size: int) -> SolverModel:
    """Numbers of thirty bits into two halves of nearly equal sum: search, and little to learn."""
    chance = random.Random(0)
    model = SolverModel()
    x = [model.binary(f"x[{i}]") for i in range(size)]
    sizes = [chance.getrandbits(30) for _ in x]
    larger = model.integer("larger", 0, sum(sizes))
    model.constrain([(1, larger), *((-a, v) for a, v in zip(sizes, x, strict=True))], low=0)
    model.constrain([(1, larger), *zip(sizes, x, strict=True)], low=sum(sizes))
    model.minimize([(2, larger)], -sum(sizes))
    return model


@pytest.mark.parametrize("relax", [False, True])
def test_a_whole_relaxation_is_the_answer(relax: bool) -> None:
    solution = solve(assignment(7), relax=relax)
    assert (solution.status, solution.objective, solution.gap) == ("optimal", 21, 0)
    assert all(type(value) is int for value in solution.values)


def test_a_relaxation_that_is_not_whole_is_where_the_search_begins() -> None:
    model = SolverModel()
    x = [model.binary(f"x[{i}]") for i in range(3)]
    for one, other in itertools.combinations(x, 2):
        model.constrain([(1, one), (1, other)], high=1)
    model.minimize([(-1, v) for v in x])
    assert solve(model, relax=True) == SolverResult("optimal", -1, -1, solve(model).values)


def test_continuous_variables_are_real() -> None:
    model = SolverModel()
    x, y = model.continuous("x"), model.continuous("y", high=1.25)
    model.constrain([(2, x), (1, y)], low=3)
    model.minimize([(3, x), (1, y)], 10)
    solution = solve(model)
    assert solution.status == "optimal"
    assert [solution[x], solution[y]] == pytest.approx([0.875, 1.25])
    assert solution.objective == pytest.approx(13.875)


@pytest.mark.parametrize("model", [partition(16), assignment(5)])
def test_the_same_model_has_the_same_solution(model: SolverModel) -> None:
    assert solve(model) == solve(model)


def test_a_hint_changes_neither_optimum_nor_bound() -> None:
    plain, hinted = assignment(6), assignment(6)
    for variable in hinted.variables:
        hinted.hint(variable, 1)
    assert solve(plain).objective == solve(hinted).objective == solve(hinted).bound


def test_a_search_cut_short_says_how_good_it_is() -> None:
    solution = solve(partition(40), effort=0.05)
    assert solution.status == "feasible"
    assert 0 <= solution.bound < solution.objective
    assert solution.gap == relative_gap(solution.objective, solution.bound) > 0


def test_a_search_cut_short_before_a_solution_is_undecided() -> None:
    model = partition(40)
    larger = model.variables[-1]
    half = -model.constant / 2
    model.constrain([(1, larger)], high=math.ceil(half))
    with pytest.raises(UndecidedError, match="no solution within its limit") as caught:
        solve(model, effort=0.05)
    assert 0 <= caught.value.bound <= 1
    assert isinstance(caught.value, PlanError)
    assert not isinstance(caught.value, InfeasibleError)


def contradiction(model: SolverModel, *, whole: bool) -> SolverModel:
    x = model.binary("x") if whole else model.continuous("x")
    model.constrain([(1, x)], low=1)
    model.constrain([(1, x)], high=0.5)
    return model


@pytest.mark.parametrize("relax", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_constraints_that_contradict_each_other_are_refused(whole: bool, relax: bool) -> None:
    model = contradiction(SolverModel(), whole=whole)
    with pytest.raises(InfeasibleError, match=r"constraints \(1 variables, 2 constraints\)"):
        solve(model, relax=relax)


def test_an_objective_without_a_bound_is_refused() -> None:
    model = SolverModel()
    model.minimize([(-1, model.continuous("x"))])
    with pytest.raises(InputError, match="the objective has no lower bound"):
        solve(model)


def test_numbers_beyond_the_solver_are_refused() -> None:
    model = SolverModel()
    model.minimize([(2**62, model.integer("x", 0, 2**40))])
    with pytest.raises(InputError, match=r"the solver refuses the model .*: use smaller numbers"):
        solve(model)


def test_a_model_without_objective_asks_only_for_values() -> None:
    model = SolverModel()
    x = model.integer("x", 0, 9)
    model.constrain([(2, x)], 7, 9)
    assert solve(model) == SolverResult("optimal", 0, 0, (4,))


def test_a_model_prints_as_it_would_be_written() -> None:
    model = SolverModel()
    x, n = model.binary("x[block3,1]"), model.integer("n", 0, 9)
    model.constrain([(1, x), (-2.5, n)], high=4)
    model.constrain([(-1, x), (1, n)], 1, 1)
    model.minimize([(3, n)], 7)
    assert str(model).splitlines() == [
        "minimize 3 n + 7",
        "  x[block3,1] - 2.5 n <= 4",
        "  -x[block3,1] + n == 1",
    ]


@pytest.mark.parametrize(
    ("objective", "bound", "gap"),
    [(4.0, 3.0, 0.25), (4.0, 4.0, 0), (-4.0, -5.0, 0.25), (0, -1, math.inf)],
)
def test_a_gap_is_relative_to_the_objective(objective: float, bound: float, gap: float) -> None:
    assert relative_gap(objective, bound) == gap


def test_an_interruption_is_pythons_again_after_a_long_solve() -> None:
    script = """
import os, random, signal, time
from parcompiler.solver import SolverModel, solve
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
random.seed(0)
model = SolverModel()
x = [model.integer(f"x{i}", 0, 100) for i in range(200)]
for _ in range(150):
    model.constrain([(random.randint(1, 9), v) for v in random.sample(x, 20)], high=500)
model.minimize([(-1, v) for v in x])
solve(model, effort=1.0)
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)
except KeyboardInterrupt:
    print("interrupted")
"""
    run = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert run.stdout == "interrupted\n"
