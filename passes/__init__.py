"""The passes, one decision a file, in the order in which `compile` runs them."""

from parcompiler.passes.base import Pass
from parcompiler.passes.schedule import SchedulePass
from parcompiler.passes.stage import StagePass

DEFAULT: tuple[Pass, ...] = (SchedulePass(), StagePass())

__all__ = ["DEFAULT", "Pass", "SchedulePass", "StagePass"]
