"""When every instruction runs and what memory it takes."""

from parcompiler.schedules.timing import StageCost
from parcompiler.simulator.run import free, simulate, simulate_lowered
from parcompiler.simulator.timeline import Event, Timeline
from parcompiler.simulator.uses import Ends

__all__ = ["Ends", "Event", "StageCost", "Timeline", "free", "simulate", "simulate_lowered"]
