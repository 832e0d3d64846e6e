"""The sections about stages: blocks, times and memory; and the closed forms of blocks and
stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parcompiler.report.data import ReportData
from parcompiler.report.names import ranges
from parcompiler.report.table import Cell, Column, Table, facts, number, scaled, short, table, words
from parcompiler.report.units import (
    BYTES,
    COUNT,
    FLOPS,
    NOTHING,
    SECONDS,
    column,
    percent,
    quantity,
    ratio,
)

FULL, NEARLY = 1.0, 0.9  # fractions of a device's memory
SHOWN = 8  # ranks in a summary
LINES = 16  # of the model's source; the last row counts the others
LETTERS = 48  # shown of each


def stages(report: ReportData) -> Table:
    """The blocks of each stage; with ZeRO 3 its units, as in the scripts."""
    stages, names = report.stages, [device.name for device in report.mesh.devices]
    devices = [words("device", (names[stage.rank] for stage in stages))] if names else []
    return table(
        "Units of stages, gathered one by one" if report.plan.zero == 3 else "Stages",
        number("stage", range(len(stages))),
        number("rank", (stage.rank for stage in stages)),
        *devices,
        words("blocks", (ranges(stage.blocks) for stage in stages)),
        scaled("parameters", (stage.parameters for stage in stages), COUNT),
        scaled("size", (stage.parameter_bytes for stage in stages), BYTES),
    )


def summary(report: ReportData) -> Table:
    """The blocks, memory and idle time of each rank of the pipeline, or of the first of many."""
    ranks = [*enumerate(report.ranks)][: SHOWN if len(report.ranks) > SHOWN + 1 else None]
    more = len(report.ranks) - len(ranks)
    blocks = [[b for s in report.stages if s.rank == r for b in s.blocks] for r, _ in ranks]
    shares = [rank.peak_memory / report.mesh.limit(r) for r, rank in ranks]
    return table(
        "Ranks of the pipeline",
        number("rank", [*(r for r, _ in ranks), *([f"{more} more"] if more else [])]),
        words("blocks", (ranges(names, short=True) for names in blocks)),
        number("idle", (percent(rank.idle) for _, rank in ranks)),
        scaled("peak", (rank.peak_memory for _, rank in ranks), BYTES),
        number("of its\nmemory", (Cell(percent(share), alarm(share)) for share in shares)),
    )


def lines(report: ReportData) -> Table:
    """The times of the model's source lines in the blocks of each template, longest first."""
    shown, others = report.lines[:LINES], report.lines[LINES:]
    rest = [f"{len(others)} more lines"] if others else []
    shares = [*(line.share for line in shown), *([sum(line.share for line in others)] * len(rest))]
    return table(
        "Where compute goes, for a micro-batch in a block",
        words("template", [*(f"{line.template} × {line.blocks}" for line in shown), *rest]),
        words("line", (f"{line.place} {shortened(line.text)}".strip() for line in shown)),
        scaled("time", (line.forward + line.backward for line in shown), SECONDS),
        number("of all\ncompute", map(percent, shares)),
        words("bound by", (line.bound for line in shown)),
    )


def shortened(text: str) -> str:
    """A line, cut to `LETTERS` letters.

    >>> shortened("x = self.mlp(self.norm(x)) * self.weight_of_the_residual_stream")
    'x = self.mlp(self.norm(x)) * self.weight_of_the…'
    """
    return text if len(text) <= LETTERS else f"{text[: LETTERS - 1]}…"


def work(report: ReportData) -> Table:
    """The compute and messages of each stage for one micro-batch."""
    stages = report.stages
    seconds = [stage.forward + stage.backward for stage in stages]
    mean = sum(seconds) / len(seconds)
    flops = [stage.forward_flops + stage.backward_flops for stage in stages]
    return table(
        "Work of a micro-batch",
        number("stage", range(len(stages))),
        scaled("forward\nFLOPs", (stage.forward_flops for stage in stages), FLOPS),
        scaled("FLOPs with\nbackward", flops, FLOPS),
        scaled("forward\ntime", (stage.forward for stage in stages), SECONDS),
        scaled("backward\ntime", (stage.backward for stage in stages), SECONDS),
        number("of\nmean", (ratio(time / mean) if mean else NOTHING for time in seconds)),
        scaled("sent", (stage.sent for stage in stages), BYTES),
        scaled("sent\nback", (stage.sent_back for stage in stages), BYTES),
        _by_rank("rank\nidle", report, [percent(rank.idle) for rank in report.ranks]),
    )


def memory(report: ReportData) -> Table:
    """The memory of each stage, and the peak of its rank."""
    stages, mesh = report.stages, report.mesh
    peaks = [rank.peak_memory for rank in report.ranks]
    fractions = [peak / mesh.limit(rank) for rank, peak in enumerate(peaks)]
    limit = "its device" if mesh.devices else quantity(mesh.memory, BYTES)
    shares = [Cell(percent(fraction), alarm(fraction)) for fraction in fractions]
    return table(
        "Memory",
        number("stage", range(len(stages))),
        scaled("weights,\noptimizer", (stage.state for stage in stages), BYTES),
        scaled("saved per\nmicro-batch", (stage.activations for stage in stages), BYTES),
        number("in\nflight", (f"× {stage.in_flight}" for stage in stages)),
        scaled("saved\nin all", (s.activations * s.in_flight for s in stages), BYTES),
        _by_rank("peak of\nrank", report, column(peaks, BYTES)),
        _by_rank(f"of\n{limit}", report, shares),
    )


def versions(report: ReportData) -> Table:
    """The staleness of stages' weights; empty if every step ends with its update."""
    stages = report.staleness
    return table(
        "Staleness of weights",
        number("stage", range(len(stages))),
        number("updates\nold", (stage.updates for stage in stages)),
        number("versions\nkept", (stage.versions for stage in stages)),
        scaled("size of\nold ones", (stage.nbytes for stage in stages), BYTES),
    )


def kept(report: ReportData) -> Table:
    """The parameters, gradients and states on a data or context rank, by rank of the pipeline;
    empty without such ranks."""
    ranks = report.ranks if report.mesh.copies > report.mesh.tensor else ()
    return table(
        f"Kept on each of {report.mesh.replicas} (zero {report.plan.zero or 0})",
        number("rank", range(len(ranks))),
        scaled("parameters", (rank.parameters for rank in ranks), BYTES),
        scaled("gradients", (rank.gradients for rank in ranks), BYTES),
        scaled("states,\nmasters", (rank.states for rank in ranks), BYTES),
        scaled("peak", (rank.peak_memory for rank in ranks), BYTES),
    )


def averaged(report: ReportData) -> Table:
    """Sums of gradients over the data replicas of each pipeline rank."""
    ranks = report.averaged
    return table(
        f"Gradients averaged over {report.mesh.replicas}",
        number("rank", range(len(ranks))),
        number("sums", (rank.sums for rank in ranks)),
        scaled("size", (rank.nbytes for rank in ranks), BYTES),
        scaled("time", (rank.seconds for rank in ranks), SECONDS),
        scaled("exposed", (rank.exposed for rank in ranks), SECONDS),
    )


def measured(report: ReportData) -> Table:
    """Measured stages beside predicted ones; empty without measurements."""
    title, step = "Predicted and measured", report.measurement
    if step is None or not step.forward:
        return table(title)
    return table(
        title,
        number("stage", range(len(report.stages))),
        *_beside("forward", [stage.forward for stage in report.stages], step.forward),
        *_beside("backward", [stage.backward for stage in report.stages], step.backward),
    )


def symbols(report: ReportData) -> Table:
    """The meaning of the letters of the closed forms."""
    rows = (
        (item.letter, f"{item.word}{', from 2 on' * (item.letter == 'b')}, here {item.now:,}")
        if item.now is not None
        else (item.word, f"as captured: {item.reason}")
        for item in report.symbols
    )
    return facts("Symbols in the closed forms", rows)


def forms(report: ReportData) -> Table:
    """The closed forms of blocks and stages, for one micro-batch on a rank."""
    forms = report.forms
    return table(
        "Closed forms",
        words("of", (form.name for form in forms)),
        number("blocks", (f"× {form.blocks}" if form.blocks else "" for form in forms)),
        short("what", (form.what for form in forms)),
        words("for one micro-batch", (form.value.replace("**", "^") for form in forms)),
    )


def _beside(
    name: str, predicted: Sequence[float], measured: Sequence[float | None]
) -> Iterator[Column]:
    """Predicted, measured and their ratio."""
    texts = column([*predicted, *(value or 0.0 for value in measured)], SECONDS)
    pairs = zip(predicted, measured, strict=True)
    yield number(f"{name}\npredicted", texts[: len(predicted)])
    yield number("\nmeasured", texts[len(predicted) :])
    yield number("\nratio", (ratio(m / p) if p and m else NOTHING for p, m in pairs))


def _by_rank(heading: str, report: ReportData, figures: Sequence[str | Cell]) -> Column:
    """A figure of each rank, beside the first of its stages."""
    first: dict[int, int] = {}
    for j, stage in enumerate(report.stages):
        first.setdefault(stage.rank, j)
    stages = enumerate(report.stages)
    return number(heading, (figures[s.rank] if first[s.rank] == j else "" for j, s in stages))


def alarm(fraction: float) -> str:
    """The style of a fraction of the memory."""
    return "error" if fraction > FULL else "warning" if fraction > NEARLY else ""
