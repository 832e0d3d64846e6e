"""Rank 0 of 2: stage 0 of GPT, with rows 0 to 47 of a vocabulary of 96.

Started by `torchrun --nproc-per-node 2 main.py` as the process with RANK=0.
"""

from datetime import timedelta
from pathlib import Path

import torch

from parcompiler.runtime import TIMEOUT, Input, RankProgram, Value, Worker, run

from stage_0 import Stage0
from vocabulary import Vocabulary

# The tensors of one micro-batch: their key in the batch, shape and dtype.
INPUTS = {
    "tokens": Input("tokens", (2, 12), torch.int64, high=96),
    "labels": Input("labels", (2, 12), torch.int64, high=96),
}

# The tensors between stages, for one micro-batch. A gradient comes back for each but those with
# differentiable=False.
VALUES = {
    "embedding": Value((2, 12, 16), torch.float32),
    "layers_1": Value((2, 12, 16), torch.float32),
    "norm": Value((24, 16), torch.float32),
}

# Tensors of which every rank of a pipeline holds some rows: the number of all rows.
ROWS = {
    "embedding.weight": 96,
}

# Further names of tied tensors.
ALIASES = {
    "head.weight": "embedding.weight",
}

# One training step. A receive is only posted where it stands; its first use waits for it.
INSTRUCTIONS = """
# Warm-up
EMBED           embedding       mb 0            # rows of the table that are here, else zeros
REDUCE          embedding       mb 0    to 0    # summed over all ranks
EMBED           embedding       mb 1
REDUCE          embedding       mb 1    to 0
FORWARD         stage 0         mb 0
SEND            layers_1        mb 0    to 1
EMBED           embedding       mb 2
REDUCE          embedding       mb 2    to 0
BROADCAST       norm            mb 0    from 1  # to all ranks
FORWARD         stage 0         mb 1
SEND            layers_1        mb 1    to 1
EMBED           embedding       mb 3
REDUCE          embedding       mb 3    to 0
S                               mb 0            # logits of this rank's rows of the vocabulary
EXCHANGE        statistics      mb 0            # a few numbers per row, over all ranks
REDUCE          norm.grad       mb 0    to 1
BROADCAST       norm            mb 1    from 1
FORWARD         stage 0         mb 2
SEND            layers_1        mb 2    to 1
T                               mb 0            # gradients of this rank's rows of the head
S                               mb 1
EXCHANGE        statistics      mb 1
REDUCE          norm.grad       mb 1    to 1
BROADCAST       norm            mb 2    from 1
RECV            layers_1.grad   mb 0    from 1

# Steady state
BACKWARD        stage 0         mb 0
T                               mb 1
S                               mb 2
EXCHANGE        statistics      mb 2
REDUCE          norm.grad       mb 2    to 1
BROADCAST       embedding.grad  mb 0    from 0
BROADCAST       norm            mb 3    from 1
FORWARD         stage 0         mb 3
SEND            layers_1        mb 3    to 1

# Cool-down
RECV            layers_1.grad   mb 1    from 1
BACKWARD        stage 0         mb 1
T                               mb 2
EMBED_BACKWARD  embedding       mb 0            # gradients of the table's rows that are here
S                               mb 3
EXCHANGE        statistics      mb 3
REDUCE          norm.grad       mb 3    to 1
for i in range(1, 3):
    BROADCAST   embedding.grad  mb i    from 0
    RECV        layers_1.grad   mb i+1  from 1
    BACKWARD    stage 0         mb i+1
BROADCAST       embedding.grad  mb 3    from 0
T                               mb 3
EMBED_BACKWARD  embedding       mb 1
EMBED_BACKWARD  embedding       mb 2
EMBED_BACKWARD  embedding       mb 3

# End of the step
SHARE_LOSS from 1
"""

# One evaluation: forwards only.
EVALUATION = """
EMBED          embedding   mb 0            # rows of the table that are here, else zeros
REDUCE         embedding   mb 0    to 0    # summed over all ranks
EMBED          embedding   mb 1
REDUCE         embedding   mb 1    to 0
FORWARD        stage 0     mb 0
SEND           layers_1    mb 0    to 1
EMBED          embedding   mb 2
REDUCE         embedding   mb 2    to 0
BROADCAST      norm        mb 0    from 1  # to all ranks
FORWARD        stage 0     mb 1
SEND           layers_1    mb 1    to 1
EMBED          embedding   mb 3
REDUCE         embedding   mb 3    to 0
for i in range(2, 4):
    S                      mb i-2          # logits of this rank's rows of the vocabulary
    EXCHANGE   statistics  mb i-2          # a few numbers per row, over all ranks
    BROADCAST  norm        mb i-1  from 1
    FORWARD    stage 0     mb i
    SEND       layers_1    mb i    to 1
S                          mb 2
EXCHANGE       statistics  mb 2
BROADCAST      norm        mb 3    from 1
S                          mb 3
EXCHANGE       statistics  mb 3
SHARE_LOSS from 1
"""

PROGRAM = RankProgram.parsed(
    rank=0,
    size=2,
    device="cpu",
    microbatches=4,
    digest="978a9d815465cad",
    loss=torch.float32,
    stages=(0,),
    instructions=INSTRUCTIONS,
    evaluation=EVALUATION,
    inputs=INPUTS,
    values=VALUES,
    channels=((0, 1), (1, 0)),
    aliases=ALIASES,
    rows=ROWS,
)


def worker(timeout: timedelta | float = TIMEOUT, compiled: bool = False) -> Worker:
    """This rank, with the weights beside this file. A wait for other ranks may take `timeout`
    seconds; `compiled` runs layers through torch.compile's compiler."""
    return Worker(
        PROGRAM,
        {0: Stage0},
        folder=Path(__file__).parent,
        vocabulary=Vocabulary,
        timeout=timeout,
        compiled=compiled,
    )


if __name__ == "__main__":
    run(worker)
