"""Choose whether embedding and head are on stages or spread over all ranks, and the method.

"auto" completes the plan with every method and takes the shortest step that fits into memory, so
that vocabulary and stages are decided together. Methods are ordered from the plainest; a later one
must save more than `gain` of the step, and is skipped where even stages would not save it (`even`).
The schedule is chosen for the first method that spreads the vocabulary, and kept for the others.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from parcompiler.capture.blocks import cut
from parcompiler.errors import InfeasibleError, InputError, PlanError
from parcompiler.options import METHODS
from parcompiler.passes.base import GAIN, Bounding, Pass, unbounded
from parcompiler.passes.estimate import estimate
from parcompiler.passes.exchange import step_of
from parcompiler.passes.recompute import RecomputePass
from parcompiler.passes.schedule import SchedulePass
from parcompiler.passes.shard import ShardPass
from parcompiler.passes.shard.local import local
from parcompiler.passes.shard.pins import read
from parcompiler.passes.stage import StagePass, ideal
from parcompiler.plan import Method, Plan, VocabularyChoice
from parcompiler.problem import Problem
from parcompiler.schedules import Schedule
from parcompiler.vocabulary import VocabularyMatch, find

CANDIDATES = ("whole", "vocab-2", "vocab-1")
PINNED = "a pin of sharding= says how tensor ranks hold it"
ALONE = "there is one pipeline rank (on tensor ranks, the sharding splits it)"
NOTHING = "it looks up no words of the batch and has no head with a cross-entropy"


@dataclass(frozen=True)
class VocabularyPass(Pass):
    """Decides `plan.vocabulary` and, where methods are weighed, the rest of the plan by `others`.

    `below` and `floor` are those of the schedule pass: a known step, and a lower bound.
    """

    name: ClassVar[str] = "vocabulary"
    gain: float = GAIN
    below: float = math.inf
    floor: Bounding = unbounded
    others: tuple[Pass, ...] = (ShardPass(), RecomputePass(), SchedulePass(), StagePass())

    def run(self, problem: Problem, plan: Plan) -> Plan:
        """The requested method, as far as the model has such layers, or the fastest that fits.

        Stages that are decided have the blocks of a model whose vocabulary is whole.
        """
        is_whole = plan.stages is not None and problem.options.vocabulary == "auto"
        if plan.vocabulary is not None or is_whole:
            return plan
        if plan.mesh.pipeline == 1:
            return plan if problem.options.vocabulary not in METHODS else _one_rank(problem, plan)
        choices = choices_for(problem)
        if len(choices) == 1:
            return dataclasses.replace(plan, vocabulary=choices[0])
        return self._fastest(problem, plan, choices)

    def _fastest(self, problem: Problem, plan: Plan, choices: list[VocabularyChoice]) -> Plan:
        """The method with the shortest step that fits, and all that were weighed."""
        best: tuple[float, Plan] | None = None
        refusal: InfeasibleError | InputError | None = None
        weighed: list[Method] = []
        known = plan
        for choice in choices:
            trial = dataclasses.replace(known if choice.spread else plan, vocabulary=choice)
            try:
                saved = math.inf if best is None else (1 - self.gain) * best[0]
                decided = self._decided(problem, trial, min(self.below, saved))
            except (InfeasibleError, InputError) as error:  # of the plainest, if all fail
                refusal = refusal or error
                weighed.append(Method(choice.method, None, None, None, str(error)))
                continue
            rank_problem = local(problem, decided)
            try:
                seconds = step_of(rank_problem, decided)
            except PlanError:  # an order that never ends: the verifier says why
                return decided
            peak = max(estimate(rank_problem, decided).peak_memory)
            weighed.append(Method(choice.method, decided.schedule, seconds, peak))
            if choice.spread and known is plan:
                known = _scheduled(plan, decided)
            if best is None or seconds < (1 - self.gain) * best[0]:
                best = seconds, decided
            if choice.method == "whole" and best[0] * (1 - self.gain) <= ideal(
                rank_problem, decided
            ):
                break  # no balance can save more than that
        if best is None:
            assert refusal is not None
            raise refusal
        assert best[1].vocabulary is not None
        chosen = dataclasses.replace(best[1].vocabulary, weighed=tuple(weighed))
        return dataclasses.replace(best[1], vocabulary=chosen)

    def _decided(self, problem: Problem, plan: Plan, below: float) -> Plan:
        """The plan completed by the other passes, if its step may be shorter than `below`."""
        for item in self.others:
            if isinstance(item, SchedulePass):
                item = dataclasses.replace(item, below=below, floor=self.floor)
            if isinstance(item, StagePass) and not problem.explain:
                item = dataclasses.replace(item, below=below)
            plan = item.run(local(problem, plan), plan)
        return plan


def choices_for(problem: Problem) -> list[VocabularyChoice]:
    """The methods that are weighed for a pipeline, plainest first."""
    wanted = problem.options.vocabulary
    methods = CANDIDATES if wanted == "auto" and not _asynchronous(problem) else (wanted,)
    return list(_choices(methods, _spread(problem)))


def _one_rank(problem: Problem, plan: Plan) -> Plan:
    """The plan of one pipeline rank, with the reason why nothing is spread."""
    kept = (f"{problem.graph.name}: {ALONE}",)
    return dataclasses.replace(plan, vocabulary=VocabularyChoice("whole", kept=kept))


def _scheduled(plan: Plan, decided: Plan) -> Plan:
    """The plan with the schedule of a decided one."""
    return dataclasses.replace(
        plan,
        schedule=decided.schedule,
        virtual_stages=decided.virtual_stages,
        orders=decided.orders,
        weighed=decided.weighed,
    )


def _spread(problem: Problem) -> VocabularyChoice:
    """The layers that can be spread, and which stay whole and why, without a method."""
    ranks = problem.mesh.pipeline * problem.mesh.tensor
    match = find(problem.graph, ranks)
    kept, several = match.kept, _read_by_several(problem, match)
    pinned = _pinned(problem, match)
    if problem.options.vocabulary in METHODS and match == VocabularyMatch():
        kept = (f"{problem.graph.name}: {NOTHING}",)
    head = match.head.weight if match.head else None
    return VocabularyChoice(
        method="",
        lookups=tuple(name for name in match.tables if name not in (*several, *pinned)),
        head=None if head in (*several, *pinned) else head,
        kept=(
            *kept,
            *(f"{name}: several layers read its rows" for name in several),
            *(f"{name}: {PINNED}" for name in pinned),
        ),
    )


def _pinned(problem: Problem, match: VocabularyMatch) -> list[str]:
    """The tables and the head of which a pin says how tensor ranks hold them."""
    if problem.mesh.tensor == 1:
        return []
    pins = read(problem.options.sharding, problem.graph)
    names = (*match.tables, *([match.head.weight] if match.head else ()))
    return [name for name in dict.fromkeys(names) if pins.of(name)]


def _read_by_several(problem: Problem, match: VocabularyMatch) -> tuple[str, ...]:
    """The tables whose rows several layers read: those of a spread table go to one stage."""
    blocks = cut(problem.graph, problem.levels[0]).blocks
    home = {node: b for b, block in enumerate(blocks) for node in block.nodes}
    readers = (
        (item.weight, {home[user] for user in item.node.users if user in home})
        for item in match.lookups
    )
    return tuple(dict.fromkeys(name for name, places in readers if len(places) > 1))


def _choices(methods: tuple[str, ...], spread: VocabularyChoice) -> Iterator[VocabularyChoice]:
    """The distinct choices: only one where nothing can be spread."""
    able = spread.lookups or spread.head
    for method in dict.fromkeys(method if able else "whole" for method in methods):
        if method in ("auto", "whole"):
            yield VocabularyChoice("whole", kept=spread.kept)
        elif spread.head or method == "vocab-2" or len(methods) == 1:  # methods are of heads
            yield dataclasses.replace(spread, method=method)


def _asynchronous(problem: Problem) -> bool:
    """Whether the requested schedule updates parameters within the step, as PipeDream does."""
    wanted = problem.options.schedule
    return wanted.asynchronous if isinstance(wanted, Schedule) else wanted == "pipedream"
