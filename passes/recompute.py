"""Choose the blocks that keep no activations: their backward runs their forward again.

    kept         F ──── all that its backward reads ────► B
    selective    F ──── all but results of cheap ops ───► norms, gates .. B
    recomputed   F ──── its inputs ─────────────────────► F B
    offloaded    F ──── as selective, on the host ──────► norms, gates .. B

With "auto" the stage pass chooses recomputed blocks together with the stages, only where memory
forces it and at the least cost (see `forced`). Such a plan is weighed against one with selective
recomputation of all other blocks, and against one that offloads blocks instead of recomputing them
(see `decide` and `cost.selective`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from parcompiler.capture.blocks import matches, unmatched
from parcompiler.capture.effects import saves_early
from parcompiler.errors import InputError
from parcompiler.passes.base import Pass
from parcompiler.plan import Plan
from parcompiler.problem import Problem


@dataclass(frozen=True)
class RecomputePass(Pass):
    """Decides `plan.recompute` at the coarsest granularity, unless the option is "auto".

    The stage pass decides it again at its own granularity, and always for "auto". Where a user's
    pass has decided the stages, it is decided here, at theirs; "auto" recomputes nothing then.
    """

    name: ClassVar[str] = "recompute"

    def run(self, problem: Problem, plan: Plan) -> Plan:
        """Raises InputError for patterns that match no block, or one that cannot run twice."""
        wanted, is_divided = problem.options.recompute, plan.stages is not None
        if is_divided and plan.recompute is not None:
            return plan
        if wanted == "auto":
            return dataclasses.replace(plan, recompute=()) if is_divided else plan
        if not isinstance(wanted, str):
            check_patterns(problem, wanted)
        level = problem.levels[0] if plan.granularity is None else plan.granularity
        names = chosen(problem, level, wanted)
        return dataclasses.replace(plan, recompute=names)


def chosen(problem: Problem, level: int, wanted: str | Mapping[str, bool]) -> tuple[str, ...]:
    """Names of the blocks that an option recomputes, at a granularity.

    "full" and "offload" leave out blocks that keep nothing; "full" also those that must run once
    (running statistics), "offload" those that save memory before they write it (`saves_early`).
    A pattern matches a block by its name or by that of a module around it; the last one decides.
    Raises InputError when patterns choose a block that must run once only.
    """
    priced = problem.priced(level)
    names = [block.name for block in priced.cut.blocks]
    if wanted in ("none", "selective"):
        return ()
    if isinstance(wanted, str):
        saved = {name for name, cost in zip(names, priced.costs, strict=True) if cost.saved}
        early = {block.name for block in priced.cut.blocks if saves_early(block.nodes)}
        able = saved - early if wanted == "offload" else priced.repeatable & saved
        return tuple(name for name in names if name in able)
    blocks = tuple(name for name in names if _decision(name, wanted))
    for name in blocks:
        if name not in priced.repeatable:
            message = (
                f"block {name!r} cannot be recomputed: it updates buffers (running statistics), "
                "which must happen once, or has an rrelu. Exclude it: recompute={..., "
                + f"{name!r}: False}}"
            )
            raise InputError(message)
    return blocks


def _decision(name: str, wanted: Mapping[str, bool]) -> bool:
    """Whether the patterns recompute a block; the last that matches decides."""
    return next((wanted[p] for p in reversed(list(wanted)) if matches(name, p)), False)


def check_patterns(problem: Problem, patterns: Mapping[str, bool]) -> None:
    """Raises InputError for patterns of which no granularity has blocks for each."""
    cuts = [problem.priced(level).cut for level in problem.levels]
    missing = [unmatched(cut, patterns) for cut in cuts]
    if not all(missing):
        return
    pattern = next((p for p in patterns if all(p in left for left in missing)), None)
    where = "" if pattern is not None else " where the others match one"
    coarsest = cuts[0].blocks
    listed = ", ".join(block.name for block in coarsest[:12])
    more = ", …" if len(coarsest) > 12 else ""
    message = (
        f"the pattern {pattern or missing[0][0]!r} of recompute matches no block{where} "
        f"({listed}{more})"
    )
    raise InputError(message)
