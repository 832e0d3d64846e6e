"""What a schedule takes with stages that are quickly found: even ones, and what they recompute.

The stage pass finds better ones, which takes it a second for a large model and schedule. Its
choice among schedules hardly depends on that: where the quick stages are far slower than stages
that were found under another schedule, the best ones are as well.
"""

from __future__ import annotations

import dataclasses
import math

from parcompiler.passes.divide.again import Repeatable
from parcompiler.passes.divide.improve import even_runs, lean_runs
from parcompiler.passes.estimate import alone, estimate
from parcompiler.passes.even import as_asked, task_of
from parcompiler.passes.forced import names_of
from parcompiler.passes.stage import placed
from parcompiler.plan import Plan
from parcompiler.problem import Problem


def quick_step(problem: Problem, plan: Plan, below: float = math.inf) -> float | None:
    """Seconds of a step under the schedule of a plan; None where the quick stages do not fit.

    Where the stages alone take `below` seconds or more, it is their seconds, without those of a
    vocabulary on all ranks.
    """
    level = problem.levels[0]
    trial = as_asked(problem, plan, level)
    task, again = task_of(problem, trial, level)
    if task.stages > len(task.loads):
        return None
    for start in (even_runs, lean_runs):
        stage_of = start(task)
        twice = Repeatable(task, tuple(again)).spared(stage_of)
        if twice is not None:
            names = (*(trial.recompute or ()), *names_of(problem, level, twice))
            found = dataclasses.replace(trial, recompute=names)
            trial = placed(problem, found, level, stage_of)
            least = alone(problem, trial) if below < math.inf else 0.0
            return least if least >= below else estimate(problem, trial).step_time
    return None
