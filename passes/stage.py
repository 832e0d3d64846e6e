"""Which block runs on which pipeline stage.

The programme is in `divide/`. Here the blocks become its data, at the coarsest granularity that
is good enough: layers first; pieces of layers only when whole layers leave the step more than
`slack` above what a perfectly even division would take, and pieces really shorten it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from parcompiler.errors import InfeasibleError
from parcompiler.graph import nbytes_of
from parcompiler.passes import given
from parcompiler.passes.base import Pass
from parcompiler.passes.divide import Division, Flow, Load, divide, evaluate, memory_parts
from parcompiler.plan import Plan, Solution, StageChoice
from parcompiler.problem import Priced, Problem
from parcompiler.schedules import build


@dataclass(frozen=True)
class StagePass(Pass):
    """Decides `plan.stages`, `plan.granularity` and `plan.sent`.

    `slack` is the share of the step time that finer blocks must be able to save to be tried,
    `gain` the share that they must really save.
    """

    name: ClassVar[str] = "stage"
    slack: float = 0.05
    gain: float = 0.02

    def run(self, problem: Problem, plan: Plan) -> Plan:
        """Divide as the user asked: by the ILP, evenly, or by counts."""
        wanted = problem.options.stages
        if wanted == "auto":
            level, division = self._automatic(problem, plan)
        else:
            level, stage_of = given.division(problem, wanted, plan.mesh.pipeline)
            division = _evaluated(problem, plan, level, stage_of)
        return _decided(problem, plan, level, division)

    def _automatic(self, problem: Problem, plan: Plan) -> tuple[int, Division]:
        """The coarsest granularity that is good enough, and its best division."""
        best: tuple[int, Division] | None = None
        refusal: InfeasibleError | None = None
        for level in problem.levels:
            priced = problem.priced(level)
            if best is not None and len(priced.cut.blocks) == len(
                problem.priced(best[0]).cut.blocks
            ):
                continue
            try:
                division = _divide(problem, plan, level)
            except InfeasibleError as error:
                refusal = error
                continue
            if best is None or division.objective < (1 - self.gain) * best[1].objective:
                best = level, division
            if best[1].objective <= (1 + self.slack) * _ideal(problem, plan, best[0]):
                break
        if best is None:
            assert refusal is not None
            raise refusal
        return best


def data(problem: Problem, level: int) -> tuple[tuple[Load, ...], tuple[Flow, ...]]:
    """The blocks at a granularity and the values between them, as the programme's data."""
    priced = problem.priced(level)
    return tuple(_loads(problem, priced)), tuple(_flows(problem, priced))


def _loads(problem: Problem, priced: Priced) -> Iterator[Load]:
    """One load per block; tensors that several blocks read are counted once per stage."""
    blocks = priced.cut.blocks
    names = [{binding.name for binding in block.tensors} for block in blocks]
    users: dict[str, int] = {}
    for held in names:
        for name in held:
            users[name] = users.get(name, 0) + 1
    for b, held in enumerate(names):
        sizes = {name: problem.state_bytes(problem.graph.by_name[name]) for name in sorted(held)}
        yield Load(
            seconds=priced.forward[b] + priced.backward[b],
            resident=sum(size for name, size in sizes.items() if users[name] == 1),
            saved=priced.saved[b],
            shared=tuple((name, size) for name, size in sizes.items() if users[name] > 1),
        )


def _flows(problem: Problem, priced: Priced) -> Iterator[Flow]:
    """One flow per value that other blocks use."""
    for b, block in enumerate(priced.cut.blocks):
        for node in block.outputs:
            consumers = sorted({priced.home[u] for u in node.users if u in priced.home} - {b})
            if consumers:
                yield Flow(b, tuple(consumers), problem.message_seconds(node), nbytes_of(node))


def _in_flight(plan: Plan) -> tuple[int, ...]:
    """Micro-batches that each stage keeps activations of."""
    assert plan.schedule is not None
    schedule = build(plan.schedule, plan.mesh.pipeline, plan.microbatches)
    return tuple(schedule.in_flight(j) for j in range(plan.mesh.pipeline))


def _divide(problem: Problem, plan: Plan, level: int) -> Division:
    """The best division at a granularity."""
    loads, flows = data(problem, level)
    stages = plan.mesh.pipeline
    limits = [float(problem.device.memory)] * stages
    names = [block.name for block in problem.priced(level).cut.blocks]
    return divide(loads, flows, stages, plan.microbatches, _in_flight(plan), limits, names=names)


def _evaluated(problem: Problem, plan: Plan, level: int, stage_of: Sequence[int]) -> Division:
    """A division that the user gave, with its predicted step time. Its memory must fit."""
    loads, flows = data(problem, level)
    in_flight = _in_flight(plan)
    found = evaluate(loads, flows, stage_of, plan.microbatches, in_flight)
    worst = max(range(len(found.memory)), key=found.memory.__getitem__)
    if found.memory[worst] > problem.device.memory:
        names = [block.name for block in problem.priced(level).cut.blocks]
        parts = memory_parts(loads, flows, stage_of, in_flight, worst, names)
        largest = max(parts, key=lambda part: part.size)
        message = (
            f"stage {worst} of this division needs {found.memory[worst]:,} bytes, "
            f"{problem.device.name} has {problem.device.memory:,}; the largest part is "
            f'{largest.what} ({largest.size:,} bytes). stages="auto" may find one that fits'
        )
        raise InfeasibleError(message)
    return Division(tuple(stage_of), "given", found.objective, 0.0, 1.0)


def reconsidered(problem: Problem, plan: Plan) -> Plan:
    """A finished plan, with what a solver said of it dropped when it was edited since.

    Raises InfeasibleError when a stage does not fit into the memory.
    """
    assert plan.granularity is not None
    assert plan.stages is not None
    home = {name: j for j, choice in enumerate(plan.stages) for name in choice.blocks}
    blocks = problem.priced(plan.granularity).cut.blocks
    stage_of = tuple(home[block.name] for block in blocks)
    division = _evaluated(problem, plan, plan.granularity, stage_of)
    if plan.solution is not None and plan.solution.objective == division.objective:
        return plan
    return dataclasses.replace(plan, solution=_solution(division))


def _solution(division: Division) -> Solution:
    """What is known of a division."""
    return Solution(division.status, division.objective, division.bound, division.gap)


def _decided(problem: Problem, plan: Plan, level: int, division: Division) -> Plan:
    """The plan with the division in it."""
    priced = problem.priced(level)
    stages = tuple(
        StageChoice(
            tuple(
                block.name
                for block, at in zip(priced.cut.blocks, division.stage_of, strict=True)
                if at == j
            ),
            rank=j,
        )
        for j in range(plan.mesh.pipeline)
    )
    return dataclasses.replace(
        plan,
        granularity=level,
        sent=tuple(node.name for node in priced.sent),
        stages=stages,
        solution=_solution(division),
    )


def _ideal(problem: Problem, plan: Plan, level: int) -> float:
    """The step time of a perfectly even division without messages."""
    total = sum(load.seconds for load in data(problem, level)[0])
    return total + (plan.microbatches - 1) * total / plan.mesh.pipeline
