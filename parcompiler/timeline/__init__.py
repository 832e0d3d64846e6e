"""The timeline of a step: the one engine that judges candidates and simulates programs."""

from parcompiler.timeline.candidate import Timing, step_time, timing
from parcompiler.timeline.costs import First, Made, Message, StageCost, VocabularyCost
from parcompiler.timeline.program import Ends
from parcompiler.timeline.simulate import free, simulate
from parcompiler.timeline.timeline import Timeline, TimelineEvent

__all__ = [
    "Ends",
    "First",
    "Made",
    "Message",
    "StageCost",
    "Timeline",
    "TimelineEvent",
    "Timing",
    "VocabularyCost",
    "free",
    "simulate",
    "step_time",
    "timing",
]
