"""The costs of a program's stages as functions of its sizes: `program.costs`.

The closed forms are for reading, and are computed on first use. Figures at other sizes do not use
them: the model is captured at those sizes, lowered and simulated.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from parcompiler import prices
from parcompiler.cost import BlockCost
from parcompiler.cost.times import modelled
from parcompiler.errors import InputError, ParcompilerError
from parcompiler.lower import lower
from parcompiler.mesh import positive
from parcompiler.passes.shard.local import local
from parcompiler.passes.spread import modelled_parts
from parcompiler.plan import VOCABULARY_PASSES, Plan, TemplateTime
from parcompiler.problem import Problem
from parcompiler.report import data, gather, names
from parcompiler.symbolic.degrees import with_copies, with_pipeline, with_tensor
from parcompiler.symbolic.forms import (
    FEWEST,
    ClosedForms,
    Forms,
    RankCosts,
    check_ranks,
    closed_forms,
    over_ranks,
)
from parcompiler.symbolic.naming import names_in, names_of
from parcompiler.symbolic.sizes import Sizes, Unfit, resized, sizes_of
from parcompiler.symbolic.stages import stage_forms

RANKS = (2, 4, 8, 3, 6, 16, 5, 32)  # numbers of tensor ranks to try, until FEWEST + 1 work

# Names of the fields of `Forms` in reports.
WHAT = {
    "flops_forward": "FLOPs, forward",
    "flops_backward": "FLOPs, backward",
    "bytes_forward": "bytes moved, forward",
    "bytes_backward": "bytes moved, backward",
    "sent_forward": "bytes to tensor ranks, forward",
    "sent_backward": "bytes to tensor ranks, backward",
    "saved": "bytes saved",
    "message": "bytes of outputs",
    "parameters": "bytes of parameters",
    "gradients": "bytes of gradients",
    "optimizer": "bytes of optimizer states",
}
OF_STAGES = WHAT | {
    "message": "bytes to other stages",
    "averaged": "bytes to data ranks, once a step",
}
WORDS = {"h": "hidden", "V": "vocabulary", "f": "inner"}


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The figures of a step at some `sizes`, by word, with micro-batches and degrees among them.

    `step_time` in s, `peak_memory` in bytes and `bubble`, the idle fraction, of each pipeline rank
    are those of `Program.simulate`; `stages`, the `messages` between them and the sums over data
    replicas (`averaged`) are those of its report. `scaled` says that seconds are scaled from
    measurements at other sizes.
    """

    sizes: tuple[tuple[str, int], ...]
    stages: tuple[data.StageSummary, ...]
    step_time: float
    peak_memory: tuple[int, ...]
    bubble: tuple[float, ...]
    messages: tuple[data.SentValue, ...]
    averaged: tuple[data.Averaged, ...]
    scaled: bool


@dataclass(frozen=True, repr=False)
class Costs:
    """The closed forms of a program's blocks and stages on one rank, and figures at other sizes.

    `problem` is that of the whole model. The symbols are those of `closed.sizes`: `b` batch (of two
    rows or more: a single row is computed by other operators), `s` sequence; and `t` tensor ranks
    in the `named` ones.
    """

    problem: Problem
    plan: Plan

    def __repr__(self) -> str:
        """An overview of the attributes, without computing the forms."""
        counts = len(self.plan.stages or ()), self.plan.microbatches
        name = f"{self.plan.model}, {counts[0]} stages, {counts[1]} micro-batches"
        return f"Costs({name}: .templates, .stages, .at(batch=..., sequence=...))"

    @cached_property
    def rank_problem(self) -> Problem:
        """The problem of one rank's stages."""
        return local(self.problem, self.plan)

    @cached_property
    def rank_costs(self) -> RankCosts:
        """The costs of a rank's templates at any sizes."""
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

    @cached_property
    def templates(self) -> Mapping[str, Forms]:
        """The costs of a block of each template for one micro-batch, as sympy expressions."""
        return {name: self.closed.forms(name) for name in self.blocks}

    @property
    def blocks(self) -> Mapping[str, int]:
        """The number of blocks of each template."""
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
        """`templates` with letters for sizes of the model, though these are fixed numbers, and for
        the number of tensor ranks."""
        return {name: self.over_ranks.forms(name, self._names[name]) for name in self.blocks}

    @cached_property
    def stages(self) -> tuple[Forms, ...]:
        """The forms of stages: sums over their blocks, with shared tensors once. Recomputation
        counts in the backward, and `message` is all that the stage sends, each time it is sent."""
        names = {name: dict[str, int]() for name in self.blocks}
        return stage_forms(self.rank_problem, self.plan, self.closed, names)

    @cached_property
    def named_stages(self) -> tuple[Forms, ...]:
        """`stages` with letters for sizes of the model and for the number of tensor ranks."""
        return stage_forms(self.rank_problem, self.plan, self.over_ranks, self._names)

    @cached_property
    def over_ranks(self) -> ClosedForms:
        """The forms that include the number of tensor ranks, `t`, fitted to some numbers."""
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
        """The costs of the templates on one of `ranks` tensor ranks, without measurements."""
        if ranks == self.plan.mesh.tensor:
            return self.rank_costs
        plan, problem = dataclasses.replace(self.plan, costs=None), self.problem
        return Costs(*with_tensor(dataclasses.replace(problem, bench=None), plan, ranks)).rank_costs

    def at(
        self,
        microbatches: int | None = None,
        data: int | None = None,
        tensor: int | None = None,
        pipeline: int | None = None,
        **sizes: int,
    ) -> StepFigures:
        """The step at other sizes, by word: `at(batch=8, sequence=4096, microbatches=64)`.

        Sizes that are not given are as compiled; stages, schedule and strategies stay those of the
        plan, also for another number of tensor ranks. For another number of pipeline ranks the
        passes divide again, under the plan's schedule, with these micro-batches and degrees and the
        batch and sequence of the capture. The figures are those of `Program.simulate` for a program
        compiled at these sizes with these decisions: the model is captured at them. Measured
        seconds are scaled by the ratio of modelled ones. Memory is not compared with the device's.
        Raises InputError for a size that the inputs do not have or that the model cannot have, for
        a degree that the plan cannot have, or for times that would have to be measured again.
        """
        if tensor is not None and positive("tensor", tensor) != self.plan.mesh.tensor:
            other = self._elsewhere("tensor", tensor, self.plan)
            return other.at(microbatches, data, None, pipeline, **sizes)
        plan = with_copies(self.plan, microbatches, data)
        if pipeline is not None and positive("pipeline", pipeline) != plan.mesh.pipeline:
            return self._elsewhere("pipeline", pipeline, plan).at(**sizes)
        numbers, known = self._numbers(sizes), sizes_of(self.problem.graph)
        words = {size.word: numbers[size.letter] for size in known}
        degrees = {name: getattr(plan.mesh, name) for name in ("data", "tensor", "pipeline")}
        return _figures_of(
            self._problem_at(numbers, plan),
            plan,
            sizes=words | {"microbatches": plan.microbatches} | degrees,
            scaled=self._is_measured and any(numbers[size.letter] != size.now for size in known),
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
        return _timed(problem, self.rank_problem, plan) if self._is_measured else problem

    @property
    def _is_measured(self) -> bool:
        """Whether any seconds are measured."""
        cache = self.rank_problem.cache
        return bool(cache.times or cache.vocabulary_times)

    @cached_property
    def _elsewhere(self) -> Callable[[str, int, Plan], Costs]:
        """The costs for another degree of the mesh, cached for each."""
        ways = {"tensor": with_tensor, "pipeline": with_pipeline}
        return cache(lambda name, number, plan: Costs(*ways[name](self.problem, plan, number)))

    def _numbers(self, wanted: Mapping[str, int]) -> dict[str, int]:
        """The numbers of all symbols."""
        known = {size.word: size for size in sizes_of(self.problem.graph)}
        numbers = {size.letter: size.now for size in known.values()}
        for word, number in wanted.items():
            if word not in known:
                words = ", ".join(known) or "none"
                message = f"the costs do not depend on {word!r} (known: {words})"
                raise InputError(message)
            numbers[known[word].letter] = positive(word, number)
        return numbers


def _figures_of(
    problem: Problem, plan: Plan, sizes: Mapping[str, int], *, scaled: bool
) -> StepFigures:
    """The figures of a plan, lowered and simulated; `problem` is that of one tensor rank."""
    assert plan.granularity is not None
    priced = problem.priced(plan.granularity)
    lowered = lower(problem.graph, plan, priced.cut)
    costs = prices.stage_costs(problem, plan, lowered)
    timeline = prices.simulated(problem, plan, lowered)
    return StepFigures(
        sizes=tuple(sizes.items()),
        stages=gather.stages(lowered, priced, costs),
        step_time=timeline.step_time,
        peak_memory=timeline.peak_memory,
        bubble=timeline.bubble,
        messages=gather.values(lowered, plan),
        averaged=gather.averaged(lowered, timeline),
        scaled=scaled,
    )


def symbols_of(costs: Costs) -> tuple[data.Symbol, ...]:
    """The symbols, and the sizes that are none."""
    sizes = (data.Symbol(size.letter, size.word, size.now) for size in costs.closed.sizes)
    named = (data.Symbol(letter, WORDS[letter], size) for letter, size in costs.names.items())
    refused = (data.Symbol("", word, reason=reason) for word, reason in costs.closed.refused)
    mesh, ranks = costs.plan.mesh, costs.over_ranks
    exact = ", ".join(map(str, ranks.ranks))
    tensor = [data.Symbol("t", f"tensor ranks, exact for {exact}", mesh.tensor)] if exact else []
    unknown = [data.Symbol("", "tensor ranks", reason=ranks.reason)] if ranks.reason else []
    copies = data.Symbol("d", "data ranks", mesh.data)
    return (*sizes, *named, *tensor, copies, *refused, *unknown)


def forms_of(costs: Costs) -> tuple[data.Form, ...]:
    """The forms of each template and of each stage; equal stages once."""
    stages: dict[Forms, list[int]] = {}
    for j, forms in enumerate(costs.named_stages):
        stages.setdefault(forms, []).append(j)
    parts = [(name, costs.blocks[name], forms, WHAT) for name, forms in costs.named.items()]
    for forms, places in stages.items():
        name = f"stage{'s' * (len(places) > 1)} {names.numbers(places)}"
        parts.append((name, 0, forms, OF_STAGES))
    return tuple(
        data.Form(name, blocks, description, str(value))
        for name, blocks, forms, fields in parts
        for field, description in fields.items()
        if (value := getattr(forms, field)) != 0
    )


def _by_template(problem: Problem, level: int) -> dict[str, BlockCost]:
    """The cost of a block of each template."""
    priced = problem.priced(level)
    return {b.template: cost for b, cost in zip(priced.cut.blocks, priced.costs, strict=True)}


def _timed(problem: Problem, like: Problem, plan: Plan) -> Problem:
    """A problem at other sizes with measured seconds, scaled by the ratio of modelled ones."""
    assert plan.granularity is not None
    level, timed = plan.granularity, problem.anew()
    # What selective recomputation repeats is added to the times of blocks that do not.
    before, after = (_by_template(item.selectively(False), level) for item in (like, problem))
    for name, cost in after.items():
        measured = like.cache.times.get((level, name))
        if measured is not None:
            one, two = (modelled(name, item, problem.device) for item in (before[name], cost))
            timed.cache.times[level, name] = scaled(measured, one, two)
    method = plan.vocabulary.method if plan.vocabulary else ""
    passes = like.cache.vocabulary_times.get(method)
    if passes is not None:
        ranks = plan.mesh.pipeline * plan.mesh.tensor
        old, new = (modelled_parts(item, ranks, passes.method) for item in (like, problem))
        seconds: dict[str, Any] = {
            x: _scaled(getattr(passes, x), old[x], new[x]) for x in VOCABULARY_PASSES
        }
        timed.cache.vocabulary_times[passes.method] = dataclasses.replace(passes, **seconds)
    return timed


def scaled(measured: TemplateTime, before: TemplateTime, after: TemplateTime) -> TemplateTime:
    """Measured seconds at other sizes; `before` and `after` are modelled, at the old and at the new
    sizes.

    >>> one, two = TemplateTime("Layer", 1.0, 2.0, 0.5), TemplateTime("Layer", 2.0, 6.0, 1.0)
    >>> scaled(TemplateTime("Layer", 3.0, 3.0, 1.0), one, two)
    TemplateTime(template='Layer', forward=6.0, backward=9.0, weight=2.0, hidden=0.0)
    """
    fields = "forward", "backward", "weight", "hidden"
    seconds: dict[str, Any] = {
        name: _scaled(*(getattr(item, name) for item in (measured, before, after)))
        for name in fields
    }
    return dataclasses.replace(measured, **seconds)


def _scaled(measured: float, before: float, after: float) -> float:
    """Measured seconds times the ratio of modelled ones, where these are above 0."""
    return float(measured * (after / before) if before else measured)
