"""Ranks 2 to 3 of 4: stage 1 of GPT, data coordinates 0 to 1.

Started by `torchrun --nproc-per-node 4 main.py` as a process with RANK=2 to 3.
"""

from datetime import timedelta
from pathlib import Path

import torch

from parcompiler.runtime import TIMEOUT, Input, RankProgram, Tied, Value, Worker, rank_among, run

from stage_1 import Stage1

RANK = rank_among(range(2, 4))  # the rank of this process

# The tensors of one micro-batch: their key in the batch, shape and dtype.
INPUTS = {
    "tokens": Input("tokens", (2, 12), torch.int64, high=96),
    "labels": Input("labels", (2, 12), torch.int64, high=96),
}

# The tensors between stages, for one micro-batch. A gradient comes back for each but those with
# differentiable=False.
VALUES = {
    "layers_1": Value((2, 12, 16), torch.float32),
}

# Tensors that several pipeline coordinates hold: their gradients are summed over all ranks there.
TIED = {
    "tied_0": Tied("embedding.weight", (0, 1)),
}

# The tensors whose gradients are summed together over the data ranks.
BUCKETS = {
    "bucket_1": (
        "norm.bias",
        "norm.weight",
        "layers.3.ffn.down.bias",
        "layers.3.ffn.down.weight",
        "layers.3.ffn.up.bias",
        "layers.3.ffn.up.weight",
        "layers.3.ffn_norm.bias",
        "layers.3.ffn_norm.weight",
        "layers.3.attention.out.bias",
        "layers.3.attention.out.weight",
        "layers.3.attention.qkv.bias",
        "layers.3.attention.qkv.weight",
        "layers.3.attention_norm.bias",
        "layers.3.attention_norm.weight",
        "layers.2.ffn.down.bias",
        "layers.2.ffn.down.weight",
        "layers.2.ffn.up.bias",
        "layers.2.ffn.up.weight",
        "layers.2.ffn_norm.bias",
        "layers.2.ffn_norm.weight",
        "layers.2.attention.out.bias",
        "layers.2.attention.out.weight",
        "layers.2.attention.qkv.bias",
        "layers.2.attention.qkv.weight",
        "layers.2.attention_norm.bias",
        "layers.2.attention_norm.weight",
    ),
}

# Further names of tied tensors.
ALIASES = {
    "head.weight": "embedding.weight",
}

# One training step. A receive is only posted where it stands; its first use waits for it. Peers and
# groups are pipeline coordinates: for this process, coordinate q is rank q * 2 + RANK % 2;
# gradients are summed over the ranks of all data coordinates there.
INSTRUCTIONS = """
# Warm-up
RECV          layers_1       mb 0    from 0
RECV          layers_1       mb 1    from 0
FORWARD       stage 1        mb 0

# Steady state
for i in range(1, 3):
    BACKWARD  stage 1        mb i-1
    SEND      layers_1.grad  mb i-1  to 0
    FORWARD   stage 1        mb i
    RECV      layers_1       mb i+1  from 0

# Cool-down
BACKWARD      stage 1        mb 2
SEND          layers_1.grad  mb 2    to 0
FORWARD       stage 1        mb 3
BACKWARD      stage 1        mb 3
SEND          layers_1.grad  mb 3    to 0

# End of the step
REDUCE_GRADIENTS bucket_1 ranks 1
REDUCE_GRADIENTS tied_0 ranks 0,1
SHARE_LOSS from 1
"""

# One evaluation: forwards only.
EVALUATION = """
RECV         layers_1  mb 0    from 0
for i in range(0, 3):
    RECV     layers_1  mb i+1  from 0
    FORWARD  stage 1   mb i
FORWARD      stage 1   mb 3
SHARE_LOSS from 1
"""

PROGRAM = RankProgram.parsed(
    rank=RANK,
    size=4,
    device="cpu",
    microbatches=4,
    digest="0065c19cb3dcad5",
    loss=torch.float32,
    stages=(1,),
    instructions=INSTRUCTIONS,
    evaluation=EVALUATION,
    inputs=INPUTS,
    values=VALUES,
    tied=TIED,
    buckets=BUCKETS,
    channels=((0, 1), (1, 0)),
    aliases=ALIASES,
    data=2,
)


def worker(timeout: timedelta | float = TIMEOUT, compiled: bool = False) -> Worker:
    """This rank, with the weights beside this file. A wait for other ranks may take `timeout`
    seconds; `compiled` runs layers through torch.compile's compiler."""
    return Worker(
        PROGRAM, {1: Stage1}, folder=Path(__file__).parent, timeout=timeout, compiled=compiled
    )


if __name__ == "__main__":
    run(worker)
