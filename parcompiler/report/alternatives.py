"""The sections about alternatives: meshes, schedules and methods of the vocabulary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat

from parcompiler.passes.zero import DataShare
from parcompiler.plan import STAYS, MeshChoice, Plan
from parcompiler.report.data import ReportData
from parcompiler.report.table import Cell, Column, Table, number, scaled, table, words
from parcompiler.report.units import BYTES, NOTHING, SECONDS, percent, quantity, ratio

NAMED = 3  # parameters of a data rank
SHOWN = 10  # meshes; the last row counts the others


def schedules(report: ReportData) -> Table:
    """The schedules that were considered, and why the others lost."""
    plan, weighed = report.plan, report.plan.weighed or ()
    ours = plan.schedule, plan.virtual_stages
    chosen = [(item.schedule, item.virtual_stages) == ours for item in weighed]
    seconds = _as_predicted([item.seconds for item in weighed], chosen, report.step.seconds)
    return table(
        "Schedules considered",
        words("schedule", _marked((item.schedule for item in weighed), chosen)),
        number("stages\non a rank", (item.virtual_stages for item in weighed)),
        scaled("step", seconds, SECONDS),
        _over(seconds, min(filter(None, seconds), default=None)),
        words("why not", (item.reason or "" for item in weighed)),
    )


def methods(report: ReportData) -> Table:
    """The methods of the vocabulary that were considered, and why the others lost."""
    choice = report.plan.vocabulary
    weighed = choice.weighed or () if choice else ()
    chosen = [choice and item.method == choice.method for item in weighed]
    seconds = _as_predicted([item.seconds for item in weighed], chosen, report.step.seconds)
    memory = _as_predicted([item.memory for item in weighed], chosen, _fullest(report))
    return table(
        "Vocabulary methods considered",
        words("vocabulary", _marked((item.method for item in weighed), chosen)),
        words("schedule", (item.schedule or NOTHING for item in weighed)),
        scaled("step", seconds, SECONDS),
        _over(seconds, min(filter(None, seconds), default=None)),
        scaled("fullest\nrank", memory, BYTES),
        words("why not", (item.reason or "" for item in weighed)),
    )


def levels(report: ReportData) -> Table:
    """The memory and traffic of data ranks at each level of ZeRO, with the stages of the plan."""
    shares = report.levels
    chosen = report.plan.zero
    is_chosen = [share.level == chosen for share in shares]
    steps = _as_predicted([share.step for share in shares], is_chosen, report.step.seconds)
    memory = _as_predicted([share.memory for share in shares], is_chosen, _fullest(report))
    return table(
        f"Levels of ZeRO with these stages, on {report.mesh.replicas}",
        number("zero", _marked((share.level for share in shares), is_chosen)),
        scaled("para-\nmeters", (share.parameters for share in shares), BYTES),
        scaled("gra-\ndients", (share.gradients for share in shares), BYTES),
        scaled("states,\nmasters", (share.states for share in shares), BYTES),
        scaled("fullest\nrank", memory, BYTES),
        scaled("exchanged\nin", (share.exchange for share in shares), SECONDS),
        scaled("of that\nexposed", (share.exposed for share in shares), SECONDS),
        scaled("step,\nestimated", steps, SECONDS),
        words("", (_place(share, chosen) for share in shares)),
    )


def owned(report: ReportData) -> Table:
    """The data rank that updates each parameter, if the optimizer takes whole ones."""
    parts = report.owned
    return table(
        f"Whole parameters, as {report.plan.optimizer} takes them, by their data rank",
        number("rank", (part.rank for part in parts)),
        number("data\nrank", (part.data for part in parts)),
        number("count", (len(part.names) for part in parts)),
        scaled("size", (part.nbytes for part in parts), BYTES),
        words("names", (_some(part.names) for part in parts)),
    )


def _some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _as_predicted(
    figures: Sequence[float | None], chosen: Sequence[object], predicted: float
) -> list[float | None]:
    """Estimated seconds or bytes, shifted so that the plan's are the predicted ones, which include
    more (sums over data ranks, updates; what they share out of memory was not decided yet)."""
    known = (x for x, is_chosen in zip(figures, chosen, strict=True) if x and is_chosen)
    more = predicted - next(known, predicted)
    return [x + more if x else x for x in figures]


def _fullest(report: ReportData) -> int:
    """The peak memory of the fullest rank."""
    return max(rank.peak_memory for rank in report.ranks)


def _marked(names: Iterable[object], chosen: Iterable[object]) -> Iterator[Cell]:
    """The first cells of rows: strong in the plan's row."""
    for name, is_chosen in zip(names, chain(chosen, repeat(False)), strict=False):
        yield Cell(str(name), "strong" if is_chosen else "")


def _place(share: DataShare, chosen: int | None) -> str:
    """The note on a level: this plan, or does not fit."""
    if share.level == chosen:
        return "this plan"
    return "" if share.fits else "does not fit"


def meshes(report: ReportData) -> Table:
    """The best ten meshes with the parts of their steps, and counts of the others by reason."""
    every = [*(report.plan.meshes or ())]
    best, others = every[:SHOWN], Counter(map(_loss, every[SHOWN:]))
    seconds = [item.seconds for item in best]
    steps = scaled("step", seconds, SECONDS)
    memory = scaled("fullest\nrank", (item.memory for item in best), BYTES)
    return table(
        "Meshes considered",
        number(
            "pipeline ×\ntensor × data",
            _marked(
                [
                    *(f"{item.pipeline} × {item.tensor} × {item.data}" for item in best),
                    *(f"{count} more" for count in others.values()),
                ],
                [True],
            ),
        ),
        *_degrees(every, best),
        number(
            "micro-\nbatches\n× rows",
            (
                item.microbatches if item.rows is None else f"{item.microbatches} × {item.rows}"
                for item in best
            ),
        ),
        words("plan", (", ".join(_plan(item)) or NOTHING for item in best)),
        _bounded(steps, best),
        _over(seconds, seconds[0] if best else None),
        _part("com-\npute", [item.compute for item in best], seconds),
        _part("ex-\nchange", [item.exchange for item in best], seconds),
        _part("idle", [item.idle for item in best], seconds),
        _bounded(memory, best),
        words(
            "why not",
            [
                *(_why(item, best[0], report.mesh.memory) for item in best),
                *others,
            ],
        ),
    )


def _degrees(meshes: Sequence[MeshChoice], best: Sequence[MeshChoice]) -> Iterator[Column]:
    """Columns for the context and expert degrees, if any mesh has them."""
    for axis in ("context", "expert"):
        if any(getattr(item, axis) > 1 for item in meshes):
            yield number(axis, (str(getattr(item, axis)) for item in best))


def _over(seconds: Sequence[float | None], least: float | None) -> Column:
    """Step times as multiples of the shortest."""
    return number("of\nbest", (ratio(s / least) if s and least else NOTHING for s in seconds))


def _bounded(figures: Column, meshes: Sequence[MeshChoice]) -> Column:
    """The figures of meshes, with a sign before those that are lower bounds over all plans."""
    pairs = zip(figures.cells, meshes, strict=True)
    marked = (
        cell if mesh.reason is None or cell.text == NOTHING else f">= {cell.text}"
        for cell, mesh in pairs
    )
    return number(figures.heading, marked)


def _part(heading: str, parts: Sequence[float | None], seconds: Sequence[float | None]) -> Column:
    """A column with the share of a part in each step."""
    pairs = zip(parts, seconds, strict=True)
    return number(heading, (percent(p / s) if p is not None and s else NOTHING for p, s in pairs))


def runner_up(report: ReportData) -> str:
    """The fastest plan beside that of the report, and by how much it differs."""
    other, step = report.plan.runner_up, report.step.seconds
    if other is None or not other.seconds:
        return NOTHING
    ours = _estimated(report.plan)
    _, seconds = _as_predicted((ours, other.seconds), (True, False), step)
    assert seconds is not None
    by = f"{percent(abs(seconds / step - 1))} "
    by += "shorter" if seconds < step else "longer"
    why = ", but less simple" if seconds < step else ""
    plan = ", ".join((other.degrees, *_plan(other)))
    return f"{plan}: {quantity(seconds, SECONDS)}, {by}{why}"


def _estimated(plan: Plan) -> float | None:
    """The step of a plan by the estimate that its alternatives have; None if none is recorded."""
    if plan.meshes:
        return plan.meshes[0].seconds
    ours, method = (plan.schedule, plan.virtual_stages), plan.vocabulary and plan.vocabulary.method
    schedules = (x.seconds for x in plan.weighed or () if (x.schedule, x.virtual_stages) == ours)
    weighed = plan.vocabulary.weighed if plan.vocabulary else None
    methods = (x.seconds for x in weighed or () if x.method == method)
    return next((x for x in (*schedules, *methods) if x), None)


def _plan(mesh: MeshChoice) -> Iterator[str]:
    """The decisions for a mesh, in a few words."""
    if mesh.schedule:
        yield mesh.schedule
    if mesh.vocabulary not in (None, "whole"):
        yield str(mesh.vocabulary)
    if mesh.zero:
        yield f"zero {mesh.zero}"
    if mesh.recomputed:
        yield f"{mesh.recomputed} {'offloaded' if mesh.offload else 'recomputed'}"


def _why(mesh: MeshChoice, best: MeshChoice, memory: int) -> str:
    """Why a mesh lost: the memory it lacks, or the part of its step that is longer than the best
    one's."""
    if mesh is best:
        return ""
    if mesh.reason is not None:
        over = (mesh.memory or 0) - memory
        return f"{mesh.reason} (+{quantity(over, BYTES)})" if over > 0 else mesh.reason
    if (mesh.seconds or 0.0) < (best.seconds or 0.0):
        return "hardly faster, and less simple"
    more, part = max(
        ((getattr(mesh, part) or 0.0) - (getattr(best, part) or 0.0), part)
        for part in ("compute", "exchange", "idle")
    )
    return (
        f"{quantity(more, SECONDS)} more {part}"
        if more > 0
        else "as fast, but the simpler mesh is preferred"
    )


def _loss(mesh: MeshChoice) -> str:
    """Why a mesh that the table leaves out has lost."""
    if mesh.reason is None:
        return "slower"
    if mesh.seconds:
        return "no plan can be as fast"
    if mesh.memory or "memory" in mesh.reason:
        return "too little memory"
    if mesh.reason.startswith(STAYS):
        return mesh.reason
    if mesh.reason.startswith("not weighed"):
        return "not weighed: few layers on each of many ranks"
    return "the batch or the blocks cannot be divided"
