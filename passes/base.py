"""The base class of passes. A pass adds one decision to a plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from parcompiler.plan import Plan
from parcompiler.problem import Problem

MARGIN = 0.02  # share of a step: of all plans at most this much slower the plainest is taken
GAIN = 0.01  # share of a step: a schedule, method or level of ZeRO that saves less is not weighed

# (partial plan, enough) -> lower bound, in seconds, on the step of every plan that completes it.
# The bound is refined only until it reaches `enough`.
Bounding = Callable[[Plan, float], float]


def unbounded(plan: Plan, enough: float) -> float:
    """The trivial lower bound."""
    return 0.0


@dataclass(frozen=True)
class Pass(ABC):
    """A decision. Its fields are its options; it reads a problem and returns a larger plan.

    A decision that the plan already has stays: an earlier pass may have made it with its own.
    """

    name: ClassVar[str]

    @abstractmethod
    def run(self, problem: Problem, plan: Plan) -> Plan:
        """Decide. Neither argument is changed."""
