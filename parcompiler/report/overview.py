"""The first sections and the head of a page: model, mesh, decisions, and the step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from parcompiler.cost.memory import OPTIMIZERS
from parcompiler.data_updates import DataUpdates
from parcompiler.pieces import Shard, Span
from parcompiler.plan import Solution
from parcompiler.report.alternatives import runner_up
from parcompiler.report.data import DeviceMesh, ReportData, TrainedModel
from parcompiler.report.division import alarm
from parcompiler.report.names import clean, ranges
from parcompiler.report.table import Cell, Table, facts, number, scaled, table, words
from parcompiler.report.units import (
    BYTES,
    COUNT,
    FLOPS,
    NOTHING,
    SECONDS,
    Scale,
    column,
    percent,
    quantity,
    rate,
    ratio,
)

SHARED = (
    "every data rank holds everything",
    "data ranks share optimizer states and masters out",
    "data ranks share gradients, optimizer states and masters out",
    "data ranks share parameters, gradients, optimizer states and masters out",
)


DIGITS = {"bf16": 8, "fp16": 11}  # bits of a significand
SOONER = 0.01  # of a step: smaller differences are not shown


def overview(report: ReportData) -> Table:
    """Model, mesh and decisions."""
    return facts(title(report), _facts(report))


def _row_shares(report: ReportData) -> str:
    """The rows of the inputs on each context rank, in words."""
    inputs = defaultdict[Shard, list[str]](list)
    for item in report.rows:
        inputs[Shard(1, (item.rows,), item.zigzag)].append(item.key)
    n = report.mesh.context

    def has(shard: Shard, rank: int) -> str:
        first, *more = runs = shard.spans(n, rank)
        if more and first.start + first.size == more[0].start:  # they meet in the middle
            runs = (Span(first.start, first.size + more[0].size),)
        return " and ".join(f"{run.start:,} to {run.start + run.size - 1:,}" for run in runs)

    return "; ".join(
        f"of the {shard.whole:,} rows of {', '.join(keys)} rank 0 has {has(shard, 0)}, … rank "
        f"{n - 1} {has(shard, n - 1)}"
        for shard, keys in inputs.items()
    )


def _expert_shares(report: ReportData) -> str:
    """The experts on each expert rank, in words; layers may have different numbers of experts."""
    ranks = report.mesh.expert
    shares = (
        f"of {count:,} rank 0 has 0 to {count // ranks - 1:,}, … rank {ranks - 1} "
        f"{count - count // ranks:,} to {count - 1:,}"
        for count in report.experts
    )
    return f"{'; '.join(shares)}, by the data axis; tokens are taken to spread evenly"


def _exchange(report: ReportData, axis: str) -> str:
    """The exchanges of a rank along an axis within blocks in a step, averaged over stages."""
    items = [item for item in report.exchanged if item.axis == axis]
    steps, ranks = report.plan.microbatches, report.mesh.pipeline
    times = [item.blocks * (1 if item.once else steps) / ranks for item in items]

    def total(each: Iterable[float]) -> float:
        return sum(a * b for a, b in zip(each, times, strict=True))

    sent = quantity(total(item.sent for item in items), BYTES)
    seconds = quantity(total(item.seconds for item in items), SECONDS)
    exposed = _or_none(total(item.exposed for item in items), SECONDS)
    return f"each sends {sent} a step in {seconds}, {exposed} of them beside no compute"


def _or_none(value: float, scale: Scale) -> str:
    """A number within a sentence."""
    return quantity(value, scale) if value else "none"


def title(report: ReportData) -> str:
    """The report in one line."""
    return f"{report.model.name} on {report.mesh.counted}"


def _of_masters(report: ReportData) -> float:
    """Bytes that float32 masters and optimizer states would add on the rank with the most."""
    kept = OPTIMIZERS[report.plan.optimizer]  # states like each parameter, in 16 bits
    return max(r.states * (1 + 2 / kept) if kept else 2.0 * r.parameters for r in report.ranks)


def _facts(report: ReportData) -> Iterator[tuple[str, str]]:
    model, mesh, plan = report.model, report.mesh, report.plan
    frozen = f", {quantity(model.frozen, COUNT)} of them not trained" if model.frozen else ""
    size = f"{quantity(model.parameters, COUNT)} ({quantity(model.parameter_bytes, BYTES)})"
    axes = " × ".join(f"{name} {size}" for name, size in mesh.axes.items())
    yield "parameters", size + frozen
    if model.evaluating:
        yield "mode", _mode(model)
    each = "" if mesh.devices else f", {quantity(mesh.memory, BYTES)} each"
    kept = f", {percent(mesh.margin)} of it kept free" if mesh.margin else ""
    yield "mesh", f"{axes}{each}{kept}"
    if report.rows:
        yield "context", f"{_row_shares(report)}; {_exchange(report, 'context')}"
    if mesh.expert > 1:
        yield "experts", f"{_expert_shares(report)}; {_exchange(report, 'expert')}"
    each = " on each data rank" if mesh.data > 1 else ""
    yield "micro-batches", f"{plan.microbatches} a step{each}"
    as_is = f"{model.dtype}, as the model is"
    if model.dtype in ("bfloat16", "float16"):
        name = {"bfloat16": "bf16", "float16": "fp16"}[model.dtype]
        more = quantity(_of_masters(report), BYTES)
        as_is += f"; --precision {name} would keep float32 masters and states (+{more} a rank)"
    yield "precision", plan.precision or as_is
    yield "optimizer", plan.optimizer
    for form in model.attention:
        yield "attention", f"{form.text} ({form.count})"
    if (rows := model.row_gradients) is not None:
        text = (
            f"at most {rows.looked_up:,} rows of {rows.rows:,} in a step, of {rows.tables} tables"
        )
        yield "sparse gradients", text
    if plan.zero is not None:
        but = " (experts: among those with the same ones)" * (mesh.expert > 1)
        yield "zero", f"{plan.zero}: {SHARED[plan.zero]}{but}"
    if plan.updates is not None:
        yield "updates", _meaning(plan.updates, report.server)
    several = f", {plan.virtual_stages} stages on each rank" * (plan.virtual_stages > 1)
    yield "schedule", f"{plan.schedule}{several}"
    if report.staleness:
        yield "staleness", _oldest(report)
    different = f"{model.templates} different, granularity {plan.granularity}"
    yield "blocks", f"{sum(len(stage.blocks) for stage in report.stages)} ({different})"
    if plan.recompute:
        count, names = len(plan.recompute), ranges(plan.recompute)
        blocks = f"{count} block{'s' * (count > 1)}"
        listed = f"{names.removesuffix(f' ({count})')} ({blocks})"
        if plan.offload:
            most = quantity(max(rank.host for rank in report.ranks), BYTES)
            listed += f", up to {most} of a rank in its host's memory"
        yield "offloaded" if plan.offload else "recomputed", listed
        without = [rank.without for rank in report.ranks if rank.without is not None]
        if without:
            yield "no offload" if plan.offload else "no recompute", _without(without, mesh)
    if plan.selective:
        yield "runs again", "norms, gates and gathers, whose results are not kept (selective)"
    if plan.runner_up is not None:
        yield "runner-up", runner_up(report)
    yield "random operators", "yes" if model.random else "no"
    for name, solver in (("solver", plan.solution), ("search", plan.search)):
        if solver is not None:
            yield name, ", ".join(_proof(solver))


def _meaning(updates: DataUpdates, server: tuple[int, ...] = ()) -> str:
    """What data ranks do, and how far results equal those of one process; for a `server`, the bytes
    through its link and those of its states."""
    link, states = server or (0, 0)
    load = f"data rank 0 has {quantity(link, BYTES)} through its link in a step"
    load += f", and states of {quantity(states, BYTES)}, others none" if states else ""
    match updates.compression:
        case "bf16" | "fp16" as name:
            return (
                f"all-reduce in {name}: gradients, and their sums, are rounded to {DIGITS[name]} "
                "bits, so the numbers are near those of one process"
            )
    if updates.rank:
        return (
            f"all-reduce of factors of rank {updates.rank} for each matrix, with error feedback: "
            "what a step leaves out is added to the next; near the numbers of one process over "
            "many steps, not in each"
        )
    if updates.way == "local":
        rate, momentum = updates.outer
        step = f"as a step with learning rate {rate:g} and Nesterov's momentum {momentum:g}"
        how = "as they are" if updates.averages else step
        return (
            f"local: each data rank steps by its own gradients, and every {updates.every} steps "
            f"weights are averaged, {how}; other numbers than those of one process, repeatable"
        )
    if updates.way == "parameter-server":
        return f"parameter-server: {load}; the numbers of one process, as with an all-reduce"
    if updates.way == "asynchronous":
        return (
            f"asynchronous: {load}; each gradient counts as it arrives, of data ranks that are at "
            f"most {updates.staleness} steps ahead of the slowest; other numbers in each run, "
            "repeatable from worker.arrivals"
        )
    return "all-reduce: the numbers of one process"


def _mode(model: TrainedModel) -> str:
    """The parts of the model in evaluation mode, and the effect."""
    kept = f"dropouts that do not act: {model.dropouts}, norms that keep their statistics: "
    kept += str(model.norms)
    if "" in model.evaluating:
        return f"evaluation ({kept})"
    return f"training; in evaluation mode: {ranges(model.evaluating)} ({kept})"


def _without(sizes: Sequence[int], mesh: DeviceMesh) -> str:
    """The rank that would be nearest to its limit without recomputation, and what it lacks."""
    rank = max(range(len(sizes)), key=lambda rank: sizes[rank] - mesh.limit(rank))
    over = sizes[rank] - mesh.limit(rank)
    lacking = f"{quantity(over, BYTES)} over the limit" if over > 0 else "within the limit"
    return f"rank {rank} would need {quantity(sizes[rank], BYTES)}, {lacking}"


def _oldest(report: ReportData) -> str:
    """The stage with the stalest weights."""
    stages = report.staleness
    j = max(range(len(stages)), key=lambda j: stages[j].updates)
    size = _or_none(stages[j].nbytes, BYTES)
    age = f"stage {j} uses weights up to {stages[j].updates} updates old"
    return f"{age}, {stages[j].versions} versions, {size} for the old ones"


def _proof(solver: Solution) -> Iterator[str]:
    """The status of a solution, and its proven gap; a choice of the user has none."""
    yield solver.status
    if solver.status != "given":
        yield f"gap {percent(solver.gap)}"
    yield f"by its own estimate of {quantity(solver.objective, SECONDS)}"


def step(report: ReportData) -> Table:
    """The predicted step, and the measured one beside it."""
    names, *figures = zip_longest(*_step(report), fillvalue="")
    columns = map(number, ("predicted", "measured", "ratio"), figures)
    return table("Step", words("", (Cell(name, "dim") for name in names)), *columns)


def _step(report: ReportData) -> Iterator[tuple[str, ...]]:
    """A row for each figure; measured ones if there are any."""
    predicted = report.step
    times = [predicted.seconds]
    if report.measurement is not None:
        times.append(report.measurement.seconds)
    ratios = [ratio(times[1] / times[0])] if len(times) > 1 and times[0] else []
    yield "time", *column(times, SECONDS), *ratios
    if 0 < predicted.period < (1 - SOONER) * predicted.seconds:
        yield "from step to step, if ranks do not meet", quantity(predicted.period, SECONDS)
    yield "ideal: even stages, no idle time, free messages", quantity(predicted.ideal, SECONDS)
    yield "idle, mean of the ranks", percent(predicted.idle)
    yield "imbalance: busiest rank over mean", ratio(predicted.imbalance)
    for name, count in (("samples", predicted.rows), ("tokens", predicted.tokens)):
        if count is not None:
            yield f"{name} a second", *(rate(count / seconds) for seconds in times if seconds)
    used = (predicted.mfu * times[0] / seconds for seconds in times if seconds)
    yield "FLOPs used (MFU)", *map(percent, used)


def bounded(report: ReportData) -> str:
    """The largest part of the busiest rank's step, in a sentence."""
    if not report.step.parts or not report.step.seconds:
        return ""
    first, seconds = report.step.parts[0], report.step.seconds
    share = percent(first.seconds / seconds)
    return f"{share} of the busiest rank's {quantity(seconds, SECONDS)} goes into {first.name}."


def following(report: ReportData) -> str:
    """The changes that would train more samples a second, in a sentence."""
    mesh = report.mesh
    by_hand = not report.plan.meshes and mesh.pipeline * mesh.copies > 1
    by_hand = by_hand and not any(change.option == "mesh" for change in report.step.changes)
    others = "; --mesh auto weighs other meshes" if by_hand else ""
    if not report.step.changes:
        return f"No other number of micro-batches, schedule or precision gains 1 %{others}."
    gains = ((f"--{c.option} {c.value}", percent(c.gain)) for c in report.step.changes)
    options = (f"{option} (+{gain} samples a second)" for option, gain in gains)
    return f"Try next: {'; '.join(options)}{others}."


def bounds(report: ReportData) -> Table:
    """The parts of the busiest rank's step, longest first."""
    parts, step = report.step.parts, report.step.seconds
    return table(
        "What bounds the step",
        words("of the busiest rank", (part.name for part in parts)),
        scaled("seconds", (part.seconds for part in parts), SECONDS),
        number("of the step", (percent(p.seconds / step) if step else NOTHING for p in parts)),
    )


def changes(report: ReportData) -> Table:
    """The changes that would train more samples a second, as options."""
    changes = report.step.changes
    return table(
        "What to try next",
        words("option", (f"--{change.option} {change.value}" for change in changes)),
        number("samples\na second", (f"+{percent(change.gain)}" for change in changes)),
        scaled("step", (change.seconds for change in changes), SECONDS),
    )


@dataclass(frozen=True, slots=True)
class Tile:
    """A figure with its name and a note to compare it with; `style` is "", "warning" or "error"."""

    name: str
    figure: str
    note: str
    style: str = ""


def tiles(report: ReportData) -> Iterator[Tile]:
    """The figures in order of interest."""
    step, mesh = report.step, report.mesh
    ideal = f"{quantity(step.ideal, SECONDS)} without idle time"
    yield Tile("Predicted step", quantity(step.seconds, SECONDS), ideal)
    if report.measurement is not None:
        seconds = report.measurement.seconds
        against = f"{ratio(seconds / step.seconds)} the predicted" if step.seconds else ""
        yield Tile("Measured step", quantity(seconds, SECONDS), against)
    idle = f"busiest rank {ratio(step.imbalance)} the mean"
    yield Tile("Bubble", percent(step.idle), idle)
    rank, fraction = report.fullest
    style = alarm(fraction)
    verdict = "too much: " if style == "error" else ""
    note = f"{verdict}{percent(fraction)} of {quantity(mesh.limit(rank), BYTES)}, rank {rank}"
    yield Tile("Peak memory", quantity(report.ranks[rank].peak_memory, BYTES), note, style)
    devices = mesh.pipeline * mesh.copies
    yield Tile("MFU", percent(step.mfu), f"of {devices:,} × {quantity(mesh.peak, FLOPS)}FLOP/s")
    for name, count in (("Tokens a second", step.tokens), ("Samples a second", step.rows)):
        if count is not None and step.seconds:
            yield Tile(name, rate(count / step.seconds), f"{count:,} in a step")
            return


def subtitle(report: ReportData) -> str:
    """Model, mesh and schedule in a sentence."""
    model, mesh, plan = report.model, report.mesh, report.plan
    named = [f"{name} {size}" for name, size in mesh.axes.items() if size > 1] or ["one rank"]
    each = " on each data rank" if mesh.data > 1 else ""
    return clean(
        f"{quantity(model.parameters, COUNT)} parameters on {' × '.join(named)}: schedule "
        f"{plan.schedule}, {plan.microbatches} micro-batches a step{each}"
    )
