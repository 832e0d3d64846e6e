"""What a pass is: one decision, added to a plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from parcompiler.plan import Plan
from parcompiler.problem import Problem

MARGIN = 0.02  # of a step: the plainest plan is taken of those that take so much longer at most
GAIN = 0.01  # of a step: a schedule, method or level of ZeRO that saves less is not weighed


@dataclass(frozen=True)
class Pass(ABC):
    """A decision. Its fields are its options; it reads a problem and returns a larger plan.

    What a plan has decided already stays: a pass before may have decided it together with its own.
    """

    name: ClassVar[str]

    @abstractmethod
    def run(self, problem: Problem, plan: Plan) -> Plan:
        """Decide. Neither argument is changed."""
