"""Rank 1 of 2: stage 1 of Gemma2ForCausalLM, with rows 48 to 95 of a vocabulary of 96.

Started by `torchrun --nproc-per-node 2 main.py` as the process with RANK=1.
"""

from datetime import timedelta
from pathlib import Path

import torch

from parcompiler.runtime import TIMEOUT, Input, RankProgram, Value, Worker, run

from stage_1 import Stage1
from vocabulary import Vocabulary

# The tensors of one micro-batch: their key in the batch, shape and dtype.
INPUTS = {
    "input_ids": Input("input_ids", (2, 12), torch.int64, high=96),
    "labels": Input("labels", (2, 12), torch.int64, high=96),
}

# Values of a batch that are no tensors: all steps are computed with these.
CONSTANTS = {
    "use_cache": False,
}

# The tensors between stages, for one micro-batch. A gradient comes back for each but those with
# differentiable=False.
VALUES = {
    "embed_tokens": Value((2, 12, 16), torch.float32),
    "layers_1": Value((2, 12, 16), torch.float32),
    "norm": Value((24, 16), torch.float32),
}

# Tensors of which every rank of a pipeline holds some rows: the number of all rows.
ROWS = {
    "model.embed_tokens.weight": 96,
}

# Further names of tied tensors.
ALIASES = {
    "lm_head.weight": "model.embed_tokens.weight",
}

# Tensors that the model's state dict lacks: constants, buffers that are not persistent.
UNSAVED = (
    "model.embed_tokens.embed_scale",
    "model.rotary_emb.inv_freq",
    "model.rotary_emb.original_inv_freq",
)

# One training step. A receive is only posted where it stands; its first use waits for it.
INSTRUCTIONS = """
# Warm-up
for i in range(0, 3):
    EMBED       embed_tokens       mb i            # rows of the table that are here, else zeros
    REDUCE      embed_tokens       mb i    to 0    # summed over all ranks
RECV            layers_1           mb 0    from 0
RECV            layers_1           mb 1    from 0
FORWARD         stage 1            mb 0
BROADCAST       norm               mb 0    from 1  # to all ranks
EMBED           embed_tokens       mb 3
REDUCE          embed_tokens       mb 3    to 0
S                                  mb 0            # logits of this rank's rows of the vocabulary
EXCHANGE        statistics         mb 0            # a few numbers per row, over all ranks
RECV            layers_1           mb 2    from 0
FORWARD         stage 1            mb 1
BROADCAST       norm               mb 1    from 1
T                                  mb 0            # gradients of this rank's rows of the head
REDUCE          norm.grad          mb 0    to 1
S                                  mb 1
EXCHANGE        statistics         mb 1
RECV            layers_1           mb 3    from 0

# Steady state
for i in range(2, 4):
    FORWARD     stage 1            mb i
    BROADCAST   norm               mb i    from 1
    BACKWARD    stage 1            mb i-2
    SEND        layers_1.grad      mb i-2  to 0
    T                              mb i-1
    REDUCE      norm.grad          mb i-1  to 1
    S                              mb i
    EXCHANGE    statistics         mb i

# Cool-down
BROADCAST       embed_tokens.grad  mb 0    from 0
BACKWARD        stage 1            mb 2
SEND            layers_1.grad      mb 2    to 0
T                                  mb 3
REDUCE          norm.grad          mb 3    to 1
EMBED_BACKWARD  embed_tokens       mb 0            # gradients of the table's rows that are here
BACKWARD        stage 1            mb 3
SEND            layers_1.grad      mb 3    to 0
BROADCAST       embed_tokens.grad  mb 1    from 0
BROADCAST       embed_tokens.grad  mb 2    from 0
BROADCAST       embed_tokens.grad  mb 3    from 0
EMBED_BACKWARD  embed_tokens       mb 1
EMBED_BACKWARD  embed_tokens       mb 2
EMBED_BACKWARD  embed_tokens       mb 3

# End of the step
SHARE_LOSS from 1
"""

# One evaluation: forwards only.
EVALUATION = """
for i in range(0, 3):
    EMBED      embed_tokens  mb i            # rows of the table that are here, else zeros
    REDUCE     embed_tokens  mb i    to 0    # summed over all ranks
RECV           layers_1      mb 0    from 0
RECV           layers_1      mb 1    from 0
FORWARD        stage 1       mb 0
BROADCAST      norm          mb 0    from 1  # to all ranks
EMBED          embed_tokens  mb 3
REDUCE         embed_tokens  mb 3    to 0
for i in range(1, 3):
    S                        mb i-1          # logits of this rank's rows of the vocabulary
    EXCHANGE   statistics    mb i-1          # a few numbers per row, over all ranks
    RECV       layers_1      mb i+1  from 0
    FORWARD    stage 1       mb i
    BROADCAST  norm          mb i    from 1
S                            mb 2
EXCHANGE       statistics    mb 2
FORWARD        stage 1       mb 3
BROADCAST      norm          mb 3    from 1
S                            mb 3
EXCHANGE       statistics    mb 3
SHARE_LOSS from 1
"""

PROGRAM = RankProgram.parsed(
    rank=1,
    size=2,
    device="cpu",
    microbatches=4,
    digest="b153ff218c7463b",
    loss=torch.float32,
    stages=(1,),
    instructions=INSTRUCTIONS,
    evaluation=EVALUATION,
    inputs=INPUTS,
    values=VALUES,
    channels=((0, 1), (1, 0)),
    aliases=ALIASES,
    rows=ROWS,
    unsaved=UNSAVED,
    constants=CONSTANTS,
)


def worker(timeout: timedelta | float = TIMEOUT, compiled: bool = False) -> Worker:
    """This rank, with the weights beside this file. A wait for other ranks may take `timeout`
    seconds; `compiled` runs layers through torch.compile's compiler."""
    return Worker(
        PROGRAM,
        {1: Stage1},
        folder=Path(__file__).parent,
        vocabulary=Vocabulary,
        timeout=timeout,
        compiled=compiled,
    )


if __name__ == "__main__":
    run(worker)
