"""What a pass is: one decision, added to a plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from parcompiler.plan import Plan
from parcompiler.problem import Problem

MARGIN = 0.02  # of a step: the plainest plan is taken of those that take so much longer at most
GAIN = 0.01  # of a step: a schedule, method or level of ZeRO that saves less is not weighed

# What no step of a plan that is begun is below, as far as that is below so many seconds.
Bounding = Callable[[Plan, float], float]


def unbounded(plan: Plan, enough: float) -> float:
    """The bound where nothing is known."""
    return 0.0


@dataclass(frozen=True)
class Pass(ABC):
    """A decision. Its fields are its options; it reads a problem and returns a larger plan.

    What a plan has decided already stays: a pass before may have decided it together with its own.
    """

    name: ClassVar[str]

    @abstractmethod
    def run(self, problem: Problem, plan: Plan) -> Plan:
        """Decide. Neither argument is changed."""
