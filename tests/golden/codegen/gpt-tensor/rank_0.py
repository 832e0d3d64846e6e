"""Rank 0 of 4: stage 0 of GPT, piece 0 of 2.

Started by `torchrun --nproc-per-node 4 main.py` as the process with RANK=0.
"""

from datetime import timedelta
from pathlib import Path

import torch

from parcompiler.runtime import TIMEOUT, Input, RankProgram, Shard, Tied, Value, Worker, run

from stage_0 import Stage0

# The tensors of a batch, for one micro-batch: their key in the batch, shape, dtype.
INPUTS = {
    "tokens": Input("tokens", (2, 12), torch.int64, high=97),
    "labels": Input("labels", (2, 12), torch.int64, high=97),
}

# The tensors between stages, for one micro-batch; gradients come back unless it says not.
VALUES = {
    "layers_0": Value((2, 12, 16), torch.float32),
}

# Tensors that several ranks hold: their gradients are summed.
TIED = {
    "tied_0": Tied("embedding.weight", (0, 1)),
}

# Tensors that the tensor ranks hold in pieces: along which dimension, and its size on the whole.
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

# One training step. A receive is only posted where it stands; its first use waits for it.
INSTRUCTIONS = """
FORWARD   stage 0        mb 0
SEND      layers_0       mb 0  to 2
FORWARD   stage 0        mb 1
SEND      layers_0       mb 1  to 2
RECV      layers_0.grad  mb 0  from 2
BACKWARD  stage 0        mb 0
FORWARD   stage 0        mb 2
SEND      layers_0       mb 2  to 2
RECV      layers_0.grad  mb 1  from 2
BACKWARD  stage 0        mb 1
FORWARD   stage 0        mb 3
SEND      layers_0       mb 3  to 2
RECV      layers_0.grad  mb 2  from 2
BACKWARD  stage 0        mb 2
RECV      layers_0.grad  mb 3  from 2
BACKWARD  stage 0        mb 3
REDUCE_GRADIENTS tied_0 ranks 0,2
SHARE_LOSS from 2
"""

# One evaluation: forwards only.
EVALUATION = """
FORWARD  stage 0   mb 0
SEND     layers_0  mb 0  to 2
FORWARD  stage 0   mb 1
SEND     layers_0  mb 1  to 2
FORWARD  stage 0   mb 2
SEND     layers_0  mb 2  to 2
FORWARD  stage 0   mb 3
SEND     layers_0  mb 3  to 2
SHARE_LOSS from 2
"""

PROGRAM = RankProgram.parsed(
    rank=0,
    size=4,
    device="cpu",
    microbatches=4,
    digest="eba510430451e93",
    loss=torch.float32,
    tensor=2,
    inputs=INPUTS,
    values=VALUES,
    tied=TIED,
    shards=SHARDS,
    aliases=ALIASES,
    channels=((0, 1), (1, 0)),
    stages=(0,),
    instructions=INSTRUCTIONS,
    evaluation=EVALUATION,
)


def worker(timeout: timedelta | float = TIMEOUT) -> Worker:
    """This rank, with the weights beside this file; `timeout` is for waits, in seconds."""
    return Worker(PROGRAM, {0: Stage0}, folder=Path(__file__).parent, timeout=timeout)


if __name__ == "__main__":
    run(worker)
