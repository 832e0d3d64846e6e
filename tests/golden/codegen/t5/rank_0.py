"""Rank 0 of 4: stage 0 of T5.

Started by `torchrun --nproc-per-node 4 main.py` as the process with RANK=0.
"""

from datetime import timedelta
from pathlib import Path

import torch

from parcompiler.runtime import TIMEOUT, Input, RankProgram, Tied, Value, Worker, run

from stage_0 import Stage0

# The tensors of one micro-batch: their key in the batch, shape and dtype.
INPUTS = {
    "tokens": Input("tokens", (2, 12), torch.int64, high=96),
    "decoder_tokens": Input("decoder_tokens", (2, 12), torch.int64, high=96),
    "labels": Input("labels", (2, 12), torch.int64, high=96),
}

# The tensors between stages, for one micro-batch. A gradient comes back for each but those with
# differentiable=False.
VALUES = {
    "embedding_encoder_bias": Value((1, 2, 12, 12), torch.float32, order=(2, 0, 3, 1)),
    "encoder_layers_0": Value((2, 12, 16), torch.float32),
    "encoder_norm": Value((2, 12, 16), torch.float32),
    "embedding_decoder_bias_embedding": Value((2, 12, 16), torch.float32),
    "embedding_decoder_bias": Value((1, 2, 12, 12), torch.float32),
    "decoder_layers_0": Value((2, 12, 16), torch.float32),
}

# Tensors that several ranks hold: their gradients are summed.
TIED = {
    "tied_0": Tied("embedding.weight", (0, 1, 3)),
}

# Further names of tied tensors.
ALIASES = {
    "head.weight": "embedding.weight",
}

# One training step. A receive is only posted where it stands; its first use waits for it.
INSTRUCTIONS = """
# Forwards
for i in range(0, 4):
    FORWARD   stage 0                      mb i
    SEND      embedding_encoder_bias       mb i  to 1
    SEND      encoder_layers_0             mb i  to 1

# Backwards
for i in range(0, 4):
    RECV      embedding_encoder_bias.grad  mb i  from 1
    RECV      encoder_layers_0.grad        mb i  from 1
    BACKWARD  stage 0                      mb i

# End of the step
REDUCE_GRADIENTS tied_0 ranks 0,1,3
SHARE_LOSS from 3
"""

# One evaluation: forwards only.
EVALUATION = """
for i in range(0, 4):
    FORWARD  stage 0                 mb i
    SEND     embedding_encoder_bias  mb i  to 1
    SEND     encoder_layers_0        mb i  to 1
SHARE_LOSS from 3
"""

PROGRAM = RankProgram.parsed(
    rank=0,
    size=4,
    device="cpu",
    microbatches=4,
    digest="c4adeba0d68aa55",
    loss=torch.float32,
    stages=(0,),
    instructions=INSTRUCTIONS,
    evaluation=EVALUATION,
    inputs=INPUTS,
    values=VALUES,
    tied=TIED,
    channels=((0, 1), (1, 0), (1, 2), (1, 3), (2, 1), (2, 3), (3, 1), (3, 2)),
    aliases=ALIASES,
)


def worker(timeout: timedelta | float = TIMEOUT, compiled: bool = False) -> Worker:
    """This rank, with the weights beside this file. A wait for other ranks may take `timeout`
    seconds; `compiled` runs layers through torch.compile's compiler."""
    return Worker(
        PROGRAM, {0: Stage0}, folder=Path(__file__).parent, timeout=timeout, compiled=compiled
    )


if __name__ == "__main__":
    run(worker)
