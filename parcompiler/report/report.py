"""The report of a compiled program: a frozen value of plain data with several output formats.

Problem, Plan, Lowered, Timeline
        │  of                     gather.py: the figures
        ▼
     Report ◄──► JSON             data.py, serial.py
        │  TABLES                 sections.py: the contents and their wording
        ▼
text (render.py), page (web/), trace for Perfetto (trace.py)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from parcompiler import documents
from parcompiler.errors import InputError
from parcompiler.lower import Lowered
from parcompiler.passes.shard.local import local
from parcompiler.passes.spread import vocabulary_cost
from parcompiler.plan import Plan
from parcompiler.prices import stage_costs
from parcompiler.problem import Problem
from parcompiler.report import bound, events, gather, render, serial, web
from parcompiler.report.data import VERSION, Form, ReportData, Symbol
from parcompiler.report.trace import trace_text
from parcompiler.timeline import Timeline

if TYPE_CHECKING:
    from parcompiler.runtime.interpreter import InstructionTime


@dataclass(frozen=True, slots=True)
class Report(ReportData):
    """The decisions of the compiler and their predicted cost; see `data` for the parts.

    `str(report)` fits one screen of the terminal, and is plain text in a pipe; `to_text` has all
    tables.
    """

    @classmethod
    def of(
        cls,
        problem: Problem,
        plan: Plan,
        lowered: Lowered,
        timeline: Timeline,
        symbols: tuple[Symbol, ...] = (),
        forms: tuple[Form, ...] = (),
        *,
        meshes: bool = False,
    ) -> Report:
        """The report of a `plan`, of the program `lowered` from it, and of the `timeline` of its
        simulated step.

        `problem` is that of the whole model, even if tensor ranks compute pieces; `symbols` and
        `forms` are the closed forms to show. `meshes` weighs neighbouring meshes.
        """
        assert plan.granularity is not None, "a report needs a finished plan"
        graph = problem.graph.undivided
        all_rows = problem.anew(graph=graph, bench=None) if graph else problem
        rank_problem, whole = local(problem, plan), all_rows.priced(1)
        priced = rank_problem.priced(plan.granularity)
        costs = stage_costs(rank_problem, plan, lowered)
        vocabulary = vocabulary_cost(rank_problem, plan)
        shared = vocabulary.compute if vocabulary else 0.0
        under = rank_problem.under(plan)
        updated = gather.updates_within(rank_problem, lowered)
        step = gather.step(problem, whole, lowered, costs, timeline, shared, under, updated)
        device = problem.devices[bound.busiest(timeline)]
        parts = bound.parts(lowered, priced, timeline, device, updated)
        changes = bound.changes(rank_problem, plan, parts, device)
        if meshes and not plan.meshes:
            changes = bound.by_gain(
                (*changes, *bound.other_mesh(problem, plan, parts, step.seconds))
            )
        report = cls(
            plan=plan,
            model=gather.model(problem.graph, priced),
            mesh=gather.mesh(problem),
            step=dataclasses.replace(step, parts=parts, changes=changes),
            stages=gather.stages(lowered, priced, costs),
            ranks=gather.ranks(rank_problem, plan, lowered, timeline),
            values=gather.values(lowered, plan),
            recomputed=gather.recomputed(lowered),
            shared=gather.shared(lowered),
            unread=gather.unread(lowered.graph),
            estimated=gather.estimated(priced),
            trail=gather.trail(timeline),
            staleness=gather.staleness(lowered),
            averaged=gather.averaged(lowered, timeline),
            exchanged=gather.exchanged(priced, lowered, problem.slowest_device),
            rows=gather.row_shares(problem),
            experts=tuple(sorted({item.experts for item in lowered.graph.parameters} - {0})),
            vocabulary=gather.vocabulary(plan, lowered, vocabulary),
            symbols=symbols,
            forms=forms,
            levels=gather.levels(rank_problem, plan),
            owned=gather.owned(plan, lowered),
            lines=bound.lines(priced, device),
            server=gather.server(rank_problem, lowered),
        )
        return dataclasses.replace(serial.rounded(report), plan=plan)

    def __str__(self) -> str:
        """One screen for standard output: coloured on a terminal, plain ASCII in a pipe."""
        return render.for_stdout(self, details=False)

    def to_text(self, width: int = 100) -> str:
        """All tables: plain ASCII text of at most `width` columns, independent of the
        environment."""
        return render.plain(self, width)

    def to_json(self) -> str:
        """Sorted, indented JSON; `from_json` reads it back to an equal report."""
        return serial.to_json(self)

    @classmethod
    def from_json(cls, text: str, plan: Plan | None = None) -> Report:
        """Read a report from its `text`. Raises InputError that names the field and what was
        expected there.

        `plan` is that of an export, for reports of version 1, which have none.
        """
        data = documents.parse(text, "report")
        if plan is not None:
            data = serial.upgraded(data, plan)
        version = data.get("version", VERSION) if isinstance(data, dict) else VERSION
        if type(version) is int and version != VERSION:
            message = f"the report has version {version}; this release reads {VERSION}"
            message += ": export the program again"
            raise InputError(message)
        report = documents.value(cls, data, "report")
        serial.check(report)
        return report

    def to_html(self, path: str | Path) -> None:
        """Write a self-contained page: charts, tables, alternatives and why they lost.

        It follows the reader's light or dark mode, and can be printed. A measured step (see
        `measured`) is drawn under the predicted one. Raises InputError if plotly is missing (the
        extra "report"), OSError if the file cannot be written.
        """
        documents.write(path, web.page(self))

    def to_trace(self, path: str | Path) -> None:
        """Write the simulated step as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing."""
        documents.write(path, trace_text(self))

    def _repr_html_(self) -> str:
        """The HTML for notebooks."""
        return web.fragment(self)

    def measured(
        self, seconds: float, trace: Sequence[Iterable[InstructionTime]] | None = None
    ) -> Report:
        """This report with a measured step of `seconds` beside the predicted one.

        `trace` are the instructions of one step by rank, as `worker.trace()` returns them, of all
        ranks or of those with data and tensor coordinate 0: the mean forward and backward of each
        stage are shown beside the predicted, and `to_html` and `to_trace` draw the measured step
        under the predicted one (`torch.distributed.all_gather_object` brings the traces of all
        ranks together). Raises InputError when the time is no positive number, or the trace has
        another number of ranks or stages.
        """
        measurement = events.measured_step(
            seconds, trace, len(self.stages), self.mesh.pipeline, self.mesh.copies
        )
        return dataclasses.replace(self, measurement=serial.rounded(measurement))
