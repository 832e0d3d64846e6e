"""Rank 1 of 2: stage 1 of GPT.

Started by `torchrun --nproc-per-node 2 main.py` as the process with RANK=1.
"""

from datetime import timedelta
from pathlib import Path

import torch

from parcompiler.runtime import TIMEOUT, Input, RankProgram, Tied, Value, Worker, run

from stage_1 import Stage1

# The tensors of a batch, for one micro-batch: their key in the batch, shape, dtype.
INPUTS = {
    "tokens": Input("0", (1, 4), torch.int64, high=16),
    "labels": Input("1", (1, 4), torch.int64, high=16),
}

# The tensors between stages, for one micro-batch; gradients come back unless it says not.
VALUES = {
    "layers_0": Value((1, 4, 8), torch.float64),
}

# Tensors that several ranks hold: their gradients are summed.
TIED = {
    "tied_0": Tied("embedding.weight", (0, 1)),
}

# Further names of tied tensors.
ALIASES = {
    "head.weight": "embedding.weight",
}

# One training step. A receive is only posted where it stands; its first use waits for it.
INSTRUCTIONS = """
# Warm-up
RECV          layers_0       mb 0  from 0
RECV          layers_0       mb 1  from 0

# Steady state
for i in range(0, 2):
    FORWARD   stage 1        mb i
    BACKWARD  stage 1        mb i
    SEND      layers_0.grad  mb i  to 0

# End of the step
REDUCE_GRADIENTS tied_0 ranks 0,1
SHARE_LOSS from 1
"""

# One evaluation: forwards only.
EVALUATION = """
RECV     layers_0  mb 0  from 0
RECV     layers_0  mb 1  from 0
FORWARD  stage 1   mb 0
FORWARD  stage 1   mb 1
SHARE_LOSS from 1
"""

PROGRAM = RankProgram.parsed(
    rank=1,
    size=2,
    device="cpu",
    microbatches=2,
    digest="5e1cee5f3e532ef",
    loss=torch.float64,
    stages=(1,),
    instructions=INSTRUCTIONS,
    evaluation=EVALUATION,
    inputs=INPUTS,
    values=VALUES,
    tied=TIED,
    channels=((0, 1), (1, 0)),
    aliases=ALIASES,
    positional=True,
)


def worker(timeout: timedelta | float = TIMEOUT) -> Worker:
    """This rank, with the weights beside this file; `timeout` is for waits, in seconds."""
    return Worker(PROGRAM, {1: Stage1}, folder=Path(__file__).parent, timeout=timeout)


if __name__ == "__main__":
    run(worker)
