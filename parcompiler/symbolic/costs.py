"""What a program's stages cost as functions of its sizes: `program.costs`.

The forms are for reading, and are computed when first asked for. Figures at other sizes need none:
the model is captured there, lowered and simulated.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from parcompiler.cost import BlockCost
from parcompiler.cost.times import modelled
from parcompiler.errors import InputError, ParcompilerError
from parcompiler.passes.shard.local import local
from parcompiler.plan import Plan, TemplateTime
from parcompiler.problem import Problem
from parcompiler.symbolic.degrees import number_of, with_copies, with_pipeline, with_tensor
from parcompiler.symbolic.figures import StepFigures, figures_of
from parcompiler.symbolic.forms import (
    FEWEST,
    ClosedForms,
    Forms,
    RankCosts,
    check_ranks,
    closed_forms,
    over_ranks,
    quantities,
    states_of,
)
from parcompiler.symbolic.naming import names_in, names_of
from parcompiler.symbolic.sizes import InputSize, Sizes, Unfit, resized, sizes_of
from parcompiler.symbolic.stages import stage_forms

RANKS = (2, 4, 8, 3, 6, 16, 5, 32)  # tensor ranks that are tried, until one more than FEWEST do


@dataclass(frozen=True, repr=False)
class Costs:
    """The closed forms of a program's blocks and stages on one rank, and figures at other sizes.

    `problem` is that of the whole model. The symbols are those of `sizes`: `b` batch (of two rows
    and more: one alone is computed by other operators), `s` sequence; and `t` tensor ranks in those
    that are `named`.
    """

    problem: Problem
    plan: Plan

    def __repr__(self) -> str:
        """What there is to ask for; the forms themselves take a moment to find."""
        counts = len(self.plan.stages or ()), self.plan.microbatches
        name = f"{self.plan.model}, {counts[0]} stages, {counts[1]} micro-batches"
        return f"Costs({name}: .templates, .stages, .at(batch=..., sequence=...))"

    @cached_property
    def rank_problem(self) -> Problem:
        """The problem of one rank's stages."""
        return local(self.problem, self.plan)

    @cached_property
    def rank_costs(self) -> RankCosts:
        """What the templates of a rank cost at any sizes."""
        known = sizes_of(self.problem.graph)
        captured = dataclasses.replace(self.problem, bench=None)

        def at(sizes: Sizes) -> Problem:
            numbers = {size.letter: size.now for size in known} | dict(sizes)
            return local(resized(captured, known, numbers), self.plan)

        return RankCosts(self.rank_problem, self._level, at)

    @cached_property
    def closed(self) -> ClosedForms:
        """The forms in sizes, for the tensor ranks of the plan."""
        return closed_forms(self.rank_costs)

    @property
    def _level(self) -> int:
        assert self.plan.granularity is not None, "costs need a finished plan"
        return self.plan.granularity

    @property
    def sizes(self) -> tuple[InputSize, ...]:
        """The sizes that the forms are in: letter, word, and number at capture."""
        return self.closed.sizes

    @property
    def refused(self) -> tuple[tuple[str, str], ...]:
        """The words of sizes that the forms are not in, and why: they stay as captured."""
        return self.closed.refused

    @cached_property
    def templates(self) -> Mapping[str, Forms]:
        """What a block of each template costs for one micro-batch, as expressions of sympy."""
        return {name: self.closed.forms(name) for name in self.blocks}

    @property
    def blocks(self) -> Mapping[str, int]:
        """How many blocks each template has."""
        return Counter(block.template for block in self.rank_problem.priced(self._level).cut.blocks)

    @cached_property
    def names(self) -> Mapping[str, int]:
        """The sizes of the model that `named` and reports write as letters: h, V, f."""
        return names_of(self.problem.graph)

    @cached_property
    def _names(self) -> Mapping[str, Mapping[str, int]]:
        """The letters for sizes of the model in each template."""
        first, graph = self.rank_costs.first, self.rank_problem.graph
        return {name: names_in(self.names, first[name], graph) for name in self.blocks}

    @cached_property
    def named(self) -> Mapping[str, Forms]:
        """`templates` with letters for sizes of the model, which are numbers all the same, and for
        the number of tensor ranks."""
        return {name: self.over_ranks.forms(name, self._names[name]) for name in self.blocks}

    @cached_property
    def stages(self) -> tuple[Forms, ...]:
        """The forms of stages: sums over their blocks, what they share once. Recomputing counts
        with the backward, and `message` is what the stage gives to others, as often as it goes."""
        names = {name: dict[str, int]() for name in self.blocks}
        return stage_forms(self.rank_problem, self.plan, self.closed, names)

    @cached_property
    def named_stages(self) -> tuple[Forms, ...]:
        """`stages` with letters for sizes of the model and for the number of tensor ranks."""
        return stage_forms(self.rank_problem, self.plan, self.over_ranks, self._names)

    @cached_property
    def over_ranks(self) -> ClosedForms:
        """The forms in the number of tensor ranks, `t`, as well, from those at some numbers."""
        if self.plan.sharding is None:
            return self.closed
        point = self.closed.points.near[0]
        alike: dict[int, RankCosts] = {}
        others: dict[int, RankCosts] = {}
        for t in RANKS:
            if len(alike) <= FEWEST:
                try:
                    costs = self._on(t)
                except ParcompilerError:  # fewer pieces than ranks
                    continue
                if costs.is_even(t, self.closed.points):
                    same = costs.operators(point) == self.rank_costs.operators(point)
                    (alike if same else others)[t] = costs
        try:
            forms = over_ranks(self.closed, alike)
            if len(alike) < FEWEST:
                check_ranks(forms, {1: self._on(1), **others})
        except Unfit as unfit:
            return dataclasses.replace(self.closed, reason=str(unfit))
        return forms

    def _on(self, ranks: int) -> RankCosts:
        """What the templates cost on one of so many tensor ranks; nothing is measured for them."""
        if ranks == self.plan.mesh.tensor:
            return self.rank_costs
        plan, problem = dataclasses.replace(self.plan, costs=None), self.problem
        return Costs(*with_tensor(dataclasses.replace(problem, bench=None), plan, ranks)).rank_costs

    def evaluate(self, template: str, **sizes: int) -> dict[str, float]:
        """The forms of a template as numbers, by their names; `sizes` by word, others as captured.

        Raises InputError for a size that the costs are not in.
        """
        problem = self._problem_at(self._numbers(sizes), self.plan)
        costs = _by_template(problem, self._level)
        if template not in costs:
            message = f"no template {template!r} (known: {', '.join(costs)})"
            raise InputError(message)
        blocks = problem.priced(self._level).cut.blocks
        first = next(block for block in blocks if block.template == template)
        rows = quantities(costs[template]) | states_of(problem, first)
        return {name: float(sum(row)) for name, row in rows.items() if name != "inner"}

    def at(
        self,
        microbatches: int | None = None,
        data: int | None = None,
        tensor: int | None = None,
        pipeline: int | None = None,
        **sizes: int,
    ) -> StepFigures:
        """The step at other sizes, by word: `at(batch=8, sequence=4096, microbatches=64)`.

        What is not given is as it was compiled; stages, schedule and strategies stay those of the
        plan, also for another number of tensor ranks. For another number of pipeline ranks the
        passes divide again, under the plan's schedule, with these micro-batches and degrees and
        the batch and sequence of the capture. The figures are those of `Program.simulate` for a
        program that is compiled at these sizes with these decisions: the model is captured there.
        Seconds that were measured change as the device's figures do. Memory is not compared with
        the device's.
        Raises InputError for a size that the inputs do not have or that the model cannot have, for
        a degree that the plan cannot have, or for times that would have to be measured again.
        """
        if tensor is not None and number_of("tensor", tensor) != self.plan.mesh.tensor:
            other = self._elsewhere("tensor", tensor, self.plan)
            return other.at(microbatches, data, None, pipeline, **sizes)
        plan = with_copies(self.plan, microbatches, data)
        if pipeline is not None and number_of("pipeline", pipeline) != plan.mesh.pipeline:
            return self._elsewhere("pipeline", pipeline, plan).at(**sizes)
        numbers, known = self._numbers(sizes), sizes_of(self.problem.graph)
        words = {size.word: numbers[size.letter] for size in known}
        degrees = {name: getattr(plan.mesh, name) for name in ("data", "tensor", "pipeline")}
        return figures_of(
            self._problem_at(numbers, plan),
            plan,
            sizes=words | {"microbatches": plan.microbatches} | degrees,
            scaled=bool(self.rank_problem.cache.times)
            and any(numbers[size.letter] != size.now for size in known),
        )

    def _problem_at(self, numbers: Sizes, plan: Plan) -> Problem:
        """The problem of one rank's stages at some sizes, with the copies of a plan."""
        known, options = sizes_of(self.problem.graph), self.problem.options
        level = options.zero if plan.zero is None else plan.zero
        changes: dict[str, Any] = {
            "mesh": dataclasses.replace(self.problem.mesh, data=plan.mesh.data),
            "options": dataclasses.replace(options, microbatches=plan.microbatches, zero=level),
        }
        if all(numbers[size.letter] == size.now for size in known):
            return dataclasses.replace(self.rank_problem, **changes)
        where = ", ".join(f"{size.word} {numbers[size.letter]}" for size in known)
        try:
            whole = resized(self.problem, known, numbers)
        except Unfit as unfit:
            message = f"the model does not run at {where}: {unfit}"
            raise InputError(message) from unfit
        problem = local(dataclasses.replace(whole, **changes), plan)
        names = {block.name for block in problem.priced(self._level).cut.blocks}
        if not names.issuperset(name for stage in plan.stages or () for name in stage.blocks):
            message = f"the model has other blocks at {where}: compile for these sizes"
            raise InputError(message)
        times = self.rank_problem.cache.times
        return _timed(problem, self.rank_problem, self._level) if times else problem

    def _elsewhere(self, name: str, number: int, plan: Plan) -> Costs:
        """The costs for another degree of the mesh."""
        key = name, number, plan.microbatches, plan.mesh.data
        if key not in self._other_degrees:
            with_degree = {"tensor": with_tensor, "pipeline": with_pipeline}[name]
            self._other_degrees[key] = Costs(*with_degree(self.problem, plan, number))
        return self._other_degrees[key]

    @cached_property
    def _other_degrees(self) -> dict[tuple[str, int, int, int], Costs]:
        return {}

    def _numbers(self, wanted: Mapping[str, int]) -> dict[str, int]:
        """The numbers of all symbols."""
        known = {size.word: size for size in sizes_of(self.problem.graph)}
        numbers = {size.letter: size.now for size in known.values()}
        for word, number in wanted.items():
            if word not in known:
                words = ", ".join(known) or "none"
                message = f"the costs are in no size {word!r} (known: {words})"
                raise InputError(message)
            if type(number) is not int or number < 1:
                message = f"{word} must be a positive whole number ({number!r} given)"
                raise InputError(message)
            numbers[known[word].letter] = number
        return numbers


def _by_template(problem: Problem, level: int) -> dict[str, BlockCost]:
    """The cost of a block of each template."""
    priced = problem.priced(level)
    return {b.template: cost for b, cost in zip(priced.cut.blocks, priced.costs, strict=True)}


def _timed(problem: Problem, like: Problem, level: int) -> Problem:
    """A problem at other sizes with measured seconds, which change as those do that the figures of
    the device give."""
    before, after = _by_template(like, level), _by_template(problem, level)
    timed = problem.anew()
    for name, cost in after.items():
        measured = like.cache.times.get((level, name))
        if measured is not None:
            one, two = (modelled(name, item, problem.device) for item in (before[name], cost))
            timed.cache.times[level, name] = scaled(measured, one, two)
    return timed


def scaled(measured: TemplateTime, before: TemplateTime, after: TemplateTime) -> TemplateTime:
    """Measured seconds at other sizes; `before` and `after` are modelled at both.

    >>> one, two = TemplateTime("Layer", 1.0, 2.0, 0.5), TemplateTime("Layer", 2.0, 6.0, 1.0)
    >>> scaled(TemplateTime("Layer", 3.0, 3.0, 1.0), one, two)
    TemplateTime(template='Layer', forward=6.0, backward=9.0, weight=2.0, hidden=0.0)
    """
    seconds: dict[str, Any] = {}
    for name in ("forward", "backward", "weight", "hidden"):
        known, old, new = (getattr(item, name) for item in (measured, before, after))
        seconds[name] = float(known * (new / old) if old else known)
    return dataclasses.replace(measured, **seconds)
