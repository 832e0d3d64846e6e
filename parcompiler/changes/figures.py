"""What a plan comes to, in a few numbers: kept beside it, and set beside those of another plan.

>>> figures = Figures("0f", 0.5, 0.1, 0.4, (2**30, 2**29), 2**34)
>>> Figures.read(figures.data()) == figures, figures.peak == 2**30
(True, True)
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import Any

from parcompiler import documents
from parcompiler.plan import Plan
from parcompiler.report import Report


@dataclass(frozen=True, slots=True)
class Figures:
    """Seconds of the predicted step, the mean fraction that ranks are idle, the fraction of their
    FLOPs that is used, and the bytes of the fullest rank at each pipeline coordinate.

    `plan` is the digest of the plan that they are of, `limit` the memory of one device in bytes;
    of several devices the least.
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
    def of(cls, plan: Plan, report: Report) -> Figures:
        """The figures in a report of this plan."""
        step, memory = report.step, tuple(rank.peak_memory for rank in report.ranks)
        return cls(digest(plan), step.seconds, step.idle, step.mfu, memory, report.mesh.memory)

    @classmethod
    def read(cls, data: object) -> Figures:
        """What `data()` gave. Raises InputError that names the field and what was expected."""
        return documents.value(cls, data, "predicted")

    def data(self) -> dict[str, Any]:
        """The figures as the json module writes them."""
        return {**dataclasses.asdict(self), "memory": list(self.memory)}


def digest(plan: Plan) -> str:
    """A short text that differs for plans that differ."""
    return hashlib.sha256(plan.to_json().encode()).hexdigest()[:16]
