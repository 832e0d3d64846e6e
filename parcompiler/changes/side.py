"""One side of a comparison: a plan, read from any of the files that contain one, and its figures.

out/            an exported folder: plan.json with report.json
plan.json       what `parcompiler plan --json` wrote: a plan with its figures, or a bare plan
all.json        what `parcompiler plan --format json` printed: {"plan": ..., "report": ...}
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from parcompiler import documents
from parcompiler.errors import InputError, path_of
from parcompiler.plan import Plan
from parcompiler.report import Report
from parcompiler.schedules import Schedule

EXPORTED = "plan.json"
PREDICTED = "predicted"  # beside the fields of a plan: `Plan.from_json` leaves it out


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of the predicted step, the mean fraction that ranks are idle, the fraction of their
    FLOPs that is used, and the bytes of the fullest rank at each pipeline coordinate.

    `plan` is the digest of the plan, `limit` the memory of one device in bytes; of several devices
    the least.
    """

    plan: str
    seconds: float
    idle: float
    mfu: float
    memory: tuple[int, ...]
    limit: int

    @property
    def peak(self) -> int:
        """The bytes of the fullest rank."""
        return max(self.memory, default=0)

    @classmethod
    def of(cls, plan: Plan, report: Report) -> Prediction:
        """The prediction in a report of this plan."""
        step, memory = report.step, tuple(rank.peak_memory for rank in report.ranks)
        return cls(digest(plan), step.seconds, step.idle, step.mfu, memory, report.mesh.memory)


@dataclass(frozen=True, slots=True)
class Side:
    """A plan with the name of its file, and its prediction or the reason `why` it has none."""

    name: str
    plan: Plan
    prediction: Prediction | None = None
    why: str = ""


def digest(plan: Plan) -> str:
    """A short hash of a plan."""
    return hashlib.sha256(plan.to_json().encode()).hexdigest()[:16]


def written(plan: Plan, report: Report) -> str:
    """A plan as JSON, with its prediction; `Plan.from_json` reads it, and so does `read`."""
    predicted = {PREDICTED: dataclasses.asdict(Prediction.of(plan, report))}
    return json.dumps(json.loads(plan.to_json()) | predicted, indent=2, sort_keys=True) + "\n"


def read(path: Path) -> Side:
    """A plan from a file or an exported folder.

    Raises InputError, naming the file, when there is none or its fields are not as expected.
    """
    if not path_of(path).is_dir():
        return _parsed(path, lambda text: _side(str(path), text))
    file, report = path / EXPORTED, path / "report.json"
    if not file.is_file():
        message = f"{path} is no exported program: it has no {EXPORTED}"
        raise InputError(message)
    side = _parsed(file, lambda text: _side(str(path), text))
    if report.is_file():
        return _parsed(report, lambda text: _reported(side.name, side.plan, text))
    return side


def _parsed(path: Path, parse: Callable[[str], Side]) -> Side:
    """The side in a file. Raises InputError that names the file."""
    text = documents.text_of(path)
    try:
        return parse(text)
    except InputError as error:
        message = f"{path}: {error}"
        raise InputError(message) from error


def _side(name: str, text: str) -> Side:
    """A plan with the figures in the same file."""
    data = documents.parse(text, "plan")
    printed = isinstance(data, dict) and isinstance(data.get("plan"), dict)
    printed = printed and "fingerprint" not in data
    plan = Plan.from_json(json.dumps(data["plan"]) if printed else text)
    for message in _faults(plan):
        raise InputError(message)
    if printed and data.get("report") is not None:
        return _reported(name, plan, json.dumps(data["report"]))
    if printed or PREDICTED not in data:
        return Side(name, plan, why="it has no report" if printed else "it is a plan alone")
    prediction = documents.value(Prediction, data[PREDICTED], PREDICTED)
    if prediction.plan != digest(plan):
        return Side(name, plan, why="it was edited after its figures were predicted")
    return Side(name, plan, prediction)


def _reported(name: str, plan: Plan, text: str) -> Side:
    """A side with the prediction of a report, unless the plan was edited after that."""
    match documents.parse(text, "report"):
        case {"version": 1}:  # it does not say whether the plan was edited
            return Side(name, plan, why="its report is of an earlier release")
    report = Report.from_json(text)
    if report.plan != plan:
        return Side(name, plan, why="it was edited after its report was made")
    return Side(name, plan, Prediction.of(plan, report))


def _faults(plan: Plan) -> Iterator[str]:
    """Faults in the numbers of a plan, edited by hand, that no model can have; `compile(plan=...)`
    finds those that depend on the model.

    >>> from parcompiler.plan import Shape
    >>> next(_faults(Plan("GPT", "0f", Shape(pipeline=2), 0)))
    'plan.microbatches must be at least 1 (0 found)'
    """
    mesh, last = plan.mesh, plan.mesh.pipeline - 1
    least = {"microbatches": (plan.microbatches, 1), "virtual_stages": (plan.virtual_stages, 1)}
    for name, (count, low) in (least | {"granularity": (plan.granularity or 0, 0)}).items():
        if count < low:
            yield f"plan.{name} must be at least {low} ({count} found)"
    seen = set[str]()
    for j, stage in enumerate(plan.stages or ()):
        place = f"plan.stages[{j}]"
        if not 0 <= stage.rank <= last:
            wanted = f"from 0 to {last}, as mesh.pipeline says"
            yield f"{place}.rank must be {wanted} ({stage.rank} found)"
        if not stage.blocks:
            yield f"{place}.blocks must name at least one block (none found)"
        for name in stage.blocks:
            if name in seen:
                yield f"{place}.blocks names {name!r}, which stands in the stages already"
            seen.add(name)
    if plan.orders is not None:
        if len(plan.orders) != mesh.pipeline:
            wanted = f"a row for each of {mesh.pipeline} pipeline ranks"
            yield f"plan.orders must have {wanted} ({len(plan.orders)} found)"
        try:
            Schedule.parse(plan.schedule or "", plan.orders)
        except InputError as error:
            yield f"plan.orders: {error}"
