"""Ranks 0 to 1 of 4: stage 0 of GPT, tensor ranks 0 to 1.

Started by `torchrun --nproc-per-node 4 main.py` as a process with RANK=0 to 1.
"""

from datetime import timedelta
from pathlib import Path

import torch

from parcompiler.runtime import (
    TIMEOUT,
    Input,
    RankProgram,
    Shard,
    Tied,
    Value,
    Worker,
    rank_among,
    run,
)

from stage_0 import Stage0

RANK = rank_among(range(0, 2))  # the rank of this process

# The tensors of one micro-batch: their key in the batch, shape and dtype.
INPUTS = {
    "tokens": Input("tokens", (2, 12), torch.int64, high=97),
    "labels": Input("labels", (2, 12), torch.int64, high=97),
}

# The tensors between stages, for one micro-batch. A gradient comes back for each but those with
# differentiable=False.
VALUES = {
    "layers_0": Value((2, 12, 16), torch.float32),
}

# Tensors that several ranks hold: their gradients are summed.
TIED = {
    "tied_0": Tied("embedding.weight", (0, 1)),
}

# Tensors of which each tensor rank holds a piece: the split dimension and its size.
SHARDS = {
    "embedding.weight": Shard(0, (97,)),
    "layers.0.attention.qkv.weight": Shard(0, (48,)),
    "layers.0.attention.qkv.bias": Shard(0, (48,)),
    "layers.0.attention.out.weight": Shard(1, (16,)),
    "layers.0.ffn.up.weight": Shard(0, (64,)),
    "layers.0.ffn.up.bias": Shard(0, (64,)),
    "layers.0.ffn.down.weight": Shard(1, (64,)),
    "layers.1.attention.qkv.weight": Shard(0, (48,)),
    "layers.1.attention.qkv.bias": Shard(0, (48,)),
    "layers.1.attention.out.weight": Shard(1, (16,)),
    "layers.1.ffn.up.weight": Shard(0, (64,)),
    "layers.1.ffn.up.bias": Shard(0, (64,)),
    "layers.1.ffn.down.weight": Shard(1, (64,)),
}

# Further names of tied tensors.
ALIASES = {
    "head.weight": "embedding.weight",
}

# One training step. A receive is only posted where it stands; its first use waits for it. Peers and
# groups are pipeline coordinates: for this process, coordinate q is rank q * 2 + RANK % 2.
INSTRUCTIONS = """
# Warm-up
FORWARD       stage 0        mb 0
SEND          layers_0       mb 0    to 1

# Steady state
for i in range(1, 4):
    FORWARD   stage 0        mb i
    SEND      layers_0       mb i    to 1
    RECV      layers_0.grad  mb i-1  from 1
    BACKWARD  stage 0        mb i-1

# Cool-down
RECV          layers_0.grad  mb 3    from 1
BACKWARD      stage 0        mb 3

# End of the step
REDUCE_GRADIENTS tied_0 ranks 0,1
SHARE_LOSS from 1
"""

# One evaluation: forwards only.
EVALUATION = """
for i in range(0, 4):
    FORWARD  stage 0   mb i
    SEND     layers_0  mb i  to 1
SHARE_LOSS from 1
"""

PROGRAM = RankProgram.parsed(
    rank=RANK,
    size=4,
    device="cpu",
    microbatches=4,
    digest="2c25ae23293616d",
    loss=torch.float32,
    stages=(0,),
    instructions=INSTRUCTIONS,
    evaluation=EVALUATION,
    inputs=INPUTS,
    values=VALUES,
    tied=TIED,
    channels=((0, 1), (1, 0)),
    aliases=ALIASES,
    tensor=2,
    shards=SHARDS,
)


def worker(timeout: timedelta | float = TIMEOUT, compiled: bool = False) -> Worker:
    """This rank, with the weights beside this file. A wait for other ranks may take `timeout`
    seconds; `compiled` runs layers through torch.compile's compiler."""
    return Worker(
        PROGRAM, {0: Stage0}, folder=Path(__file__).parent, timeout=timeout, compiled=compiled
    )


if __name__ == "__main__":
    run(worker)
