"""Rank 0 of 2: stage 0 of Regions.

Started by `torchrun --nproc-per-node 2 main.py` as the process with RANK=0.
"""

from datetime import timedelta
from pathlib import Path

import torch

from parcompiler.runtime import TIMEOUT, Input, RankProgram, Value, Worker, run

from stage_0 import Stage0

# The tensors of one micro-batch: their key in the batch, shape and dtype.
INPUTS = {
    "signal": Input("signal", (2, 1, 6), torch.float32),
    "labels": Input("labels", (2,), torch.int64, high=3),
}

# The tensors between stages, for one micro-batch. A gradient comes back for each but those with
# differentiable=False.
VALUES = {
    "mixers_0": Value((2, 8, 6), torch.float32),
}

# One training step. A receive is only posted where it stands; its first use waits for it.
INSTRUCTIONS = """
# Warm-up
FORWARD       stage 0        mb 0
SEND          mixers_0       mb 0    to 1

# Steady state
for i in range(1, 4):
    FORWARD   stage 0        mb i
    SEND      mixers_0       mb i    to 1
    RECV      mixers_0.grad  mb i-1  from 1
    BACKWARD  stage 0        mb i-1

# Cool-down
RECV          mixers_0.grad  mb 3    from 1
BACKWARD      stage 0        mb 3

# End of the step
SHARE_LOSS from 1
"""

# One evaluation: forwards only.
EVALUATION = """
for i in range(0, 4):
    FORWARD  stage 0   mb i
    SEND     mixers_0  mb i  to 1
SHARE_LOSS from 1
"""

PROGRAM = RankProgram.parsed(
    rank=0,
    size=2,
    device="cpu",
    microbatches=4,
    digest="815eab5ed71419d",
    loss=torch.float32,
    stages=(0,),
    instructions=INSTRUCTIONS,
    evaluation=EVALUATION,
    inputs=INPUTS,
    values=VALUES,
    channels=((0, 1), (1, 0)),
)


def worker(timeout: timedelta | float = TIMEOUT, compiled: bool = False) -> Worker:
    """This rank, with the weights beside this file. A wait for other ranks may take `timeout`
    seconds; `compiled` runs layers through torch.compile's compiler."""
    return Worker(
        PROGRAM, {0: Stage0}, folder=Path(__file__).parent, timeout=timeout, compiled=compiled
    )


if __name__ == "__main__":
    run(worker)
