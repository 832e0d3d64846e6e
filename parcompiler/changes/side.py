"""One side of a comparison: a plan, read from wherever it was written, and its figures.

out/            an exported folder: plan.json with report.json
plan.json       what `parcompiler plan --json` wrote: a plan with its figures, or a bare plan
all.json        what `parcompiler plan --format json` printed: {"plan": ..., "report": ...}
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from parcompiler import documents
from parcompiler.changes.figures import Figures, digest
from parcompiler.changes.sense import check
from parcompiler.errors import InputError
from parcompiler.plan import Plan
from parcompiler.report import Report

EXPORTED = "plan.json"
PREDICTED = "predicted"  # beside the fields of a plan: `Plan.from_json` leaves it out


@dataclass(frozen=True, slots=True)
class Side:
    """A plan and where it is from. Without `figures`, `why` says why there are none."""

    name: str
    plan: Plan
    figures: Figures | None = None
    why: str = ""


def written(plan: Plan, report: Report) -> str:
    """A plan as JSON, with its figures; `Plan.from_json` reads it, and so does `read`."""
    data = json.loads(plan.to_json()) | {PREDICTED: Figures.of(plan, report).data()}
    return json.dumps(data, indent=2, sort_keys=True) + "\n"


def read(path: Path) -> Side:
    """A plan from a file or an exported folder.

    Raises InputError, naming the file, when there is none or its fields are not as expected.
    """
    folder = documents.path_of(path).is_dir()
    if folder and not (path / EXPORTED).is_file():
        message = f"{path} is no exported program: it has no {EXPORTED}"
        raise InputError(message)
    file = path / EXPORTED if folder else path
    text = documents.text_of(file)
    try:
        side = _side(str(path), text)
    except InputError as error:
        message = f"{file}: {error}"
        raise InputError(message) from error
    report = file.with_name("report.json")
    return _reported(side, report) if folder and report.is_file() else side


def agrees(plan: Plan, report: Report) -> bool:
    """Whether a report is of this plan, as far as it tells: not of it before it was edited."""
    mesh, choices = report.mesh, report.choices
    names = tuple(device.name for device in mesh.devices) or (mesh.device,) * mesh.pipeline
    shape = (mesh.pipeline, mesh.data, mesh.tensor, names)
    found = (choices.microbatches, choices.precision, choices.optimizer, choices.schedule)
    stages = tuple((stage.blocks, stage.rank) for stage in report.stages)
    own = plan.mesh
    return (
        report.model.name == plan.model
        and shape == (own.pipeline, own.data, own.tensor, own.devices)
        and found == (plan.microbatches, plan.precision, plan.optimizer, plan.schedule)
        and stages == tuple((stage.blocks, stage.rank) for stage in plan.stages or ())
        and choices.recompute == (plan.recompute or ())
    )


def _side(name: str, text: str) -> Side:
    """A plan with what stands beside it in its file."""
    data = documents.parse(text, "plan")
    if isinstance(data, dict) and isinstance(data.get("plan"), dict) and "fingerprint" not in data:
        plan = Plan.from_json(json.dumps(data["plan"]))
        check(plan)
        report = data.get("report")
        if report is None:
            return Side(name, plan, why="it has no report")
        return _checked(name, plan, Report.from_json(json.dumps(report)))
    plan = Plan.from_json(text)
    check(plan)
    if PREDICTED not in data:
        return Side(name, plan, why="it is a plan alone")
    figures = Figures.read(data[PREDICTED])
    if figures.plan != digest(plan):
        return Side(name, plan, why="it was edited after its figures were predicted")
    return Side(name, plan, figures)


def _reported(side: Side, path: Path) -> Side:
    """The side with the figures of a report beside its plan."""
    try:
        return _checked(side.name, side.plan, Report.from_json(documents.text_of(path)))
    except InputError as error:
        message = f"{path}: {error}"
        raise InputError(message) from error


def _checked(name: str, plan: Plan, report: Report) -> Side:
    """A side with a report, unless that is of another plan."""
    if not agrees(plan, report):
        return Side(name, plan, why="it was edited after its report was made")
    return Side(name, plan, Figures.of(plan, report))
