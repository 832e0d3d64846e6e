"""What emitted scripts import: torch and the standard library only, never the planning half.

RankProgram   what one rank does: its instructions and what goes in and out of its stages
Worker        executes it: step, train_step, evaluate
Channels      every process group, made in one place
"""

from parcompiler.runtime.device import rank_device
from parcompiler.runtime.program import Input, RankProgram, Tied, Value
from parcompiler.runtime.script import run
from parcompiler.runtime.stage import Block, Stage
from parcompiler.runtime.weights import stored
from parcompiler.runtime.worker import Worker

__all__ = [
    "Block",
    "Input",
    "RankProgram",
    "Stage",
    "Tied",
    "Value",
    "Worker",
    "rank_device",
    "run",
    "stored",
]
