"""The passes, one decision a file, in the order in which `compile` runs them."""

from parcompiler.passes.base import Pass
from parcompiler.passes.order import OrderPass
from parcompiler.passes.recompute import RecomputePass
from parcompiler.passes.schedule import SchedulePass
from parcompiler.passes.stage import StagePass

DEFAULT: tuple[Pass, ...] = (RecomputePass(), SchedulePass(), StagePass(), OrderPass())

__all__ = ["DEFAULT", "OrderPass", "Pass", "RecomputePass", "SchedulePass", "StagePass"]
