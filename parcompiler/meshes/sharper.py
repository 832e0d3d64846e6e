"""A bound of the seconds of a step that takes a second: with what tensor ranks really do.

The vocabulary and the sharding are decided as the passes decide them, and so the blocks cost what
they cost in the plan, collectives of the tensor axis among them. How they are divided into stages
and in which order they run is left open: no rank is faster than its whole blocks (`bounds.Work`),
none begins before a micro-batch has come to it (`fill`). What is found here the passes find again
without finding it anew.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from parcompiler.errors import InputError, PlanError
from parcompiler.meshes.bounds import ROUNDING, Work
from parcompiler.meshes.fill import Piece, least_step
from parcompiler.passes.decide import start
from parcompiler.passes.schedule import CANDIDATES
from parcompiler.passes.shard import ShardPass
from parcompiler.passes.shard.local import local
from parcompiler.passes.spread import vocabulary_cost
from parcompiler.passes.vocabulary import choices_for
from parcompiler.plan import VocabularyChoice
from parcompiler.problem import Priced, Problem
from parcompiler.schedules import Schedule, build, stages_per_rank


def least_seconds(problem: Problem) -> float:
    """Seconds that no step of a problem is below under the default passes.

    0, which is a bound as well, where nothing fits or an option is wrong: the passes will say so.
    """
    try:
        return filled_seconds(problem, _works(problem))
    except (PlanError, InputError):
        return 0.0


def filled_seconds(problem: Problem, works: Iterable[Work]) -> float:
    """The same when all there is to do is one of these works: on the ranks of a pipeline, which
    begin one after the other."""
    ranks, microbatches = problem.mesh.pipeline, problem.options.microbatches
    placements = _placements(problem)
    steps = []
    for work in works:
        least = work.slowest(ranks) * microbatches
        filled = [
            least_step(work.pieces, work.floating, placement, microbatches)
            for placement in placements
        ]
        steps.append(max(least, min(filled, default=0.0)))
    return min(steps, default=0.0) * ROUNDING


def _works(problem: Problem) -> Iterator[Work]:
    """The blocks at every granularity, for every way with the vocabulary."""
    plan = start(problem)
    choices: Sequence[VocabularyChoice | None]
    choices = choices_for(problem) if problem.mesh.pipeline > 1 else [None]
    own: dict[tuple[object, ...], Problem] = {}  # by what is spread: methods share a sharding
    for choice in choices:
        trial = dataclasses.replace(plan, vocabulary=choice, schedule="1f1b")
        key = (choice.lookups, choice.head) if choice is not None and choice.spread else ()
        if key not in own:
            own[key] = local(problem, ShardPass().run(local(problem, trial), trial))
        cost = vocabulary_cost(own[key], trial)
        everywhere = cost.compute * problem.mesh.pipeline if cost else 0.0
        for level in own[key].levels:
            yield _work(own[key].priced(level), everywhere)


def _work(priced: Priced, floating: float) -> Work:
    """The blocks at a granularity, those of a template together."""
    counts = Counter(block.template for block in priced.cut.blocks)
    rows = zip(priced.cut.blocks, priced.forward, priced.backward, priced.weight, strict=True)
    pieces = {
        block.template: Piece(counts[block.template], forward, backward - weight, weight)
        for block, forward, backward, weight in rows
    }
    return Work(tuple(pieces.values()), floating)


def _placements(problem: Problem) -> set[tuple[int, ...]]:
    """The ranks of the stages under the schedules in question."""
    options, ranks = problem.options, problem.mesh.pipeline
    if isinstance(options.schedule, Schedule):
        return {options.schedule.placement}
    if ranks == 1:
        return set()
    found = set()
    for name in CANDIDATES if options.schedule in ("auto", "search") else (options.schedule,):
        with suppress(InputError):  # it cannot have so many stages on a rank
            stages = stages_per_rank(name, options.virtual_stages)
            found.add(build(name, ranks, ranks, stages).placement)
    return found
