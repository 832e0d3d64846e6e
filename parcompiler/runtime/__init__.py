"""The imports of emitted scripts: torch and the standard library only, never the planning half.

RankProgram      the program of one rank: its instructions, and the tensors that enter and leave
Worker           executes it: step, train_step, evaluate
recomputed       runs a layer whose activations are not kept
offloaded        runs a layer whose activations wait in the host's memory
again            runs an operator whose result is not kept
Linear, linear, addmm  linear layers whose backward comes in two parts
sync_batch_norm  batch norm over the batches of all data ranks
Vocabulary       a rank's rows of the embeddings and of the head, with their loss

Layers of which tensor ranks hold pieces call the conversions of `tensor`, the operators of
`sharded`, `piece` for a size that differs between ranks, and draw random numbers in `own_draws`.
"""

from parcompiler.again import again
from parcompiler.data_updates import DataUpdates
from parcompiler.pieces import Shard
from parcompiler.runtime.axis import piece
from parcompiler.runtime.causal import attention_of_rows, ring_attention
from parcompiler.runtime.deferred import Linear, addmm, linear
from parcompiler.runtime.experts import (
    combine,
    dispatch,
    expert_arrivals,
    expert_ends,
    histogram,
)
from parcompiler.runtime.files import loading
from parcompiler.runtime.joining import place, rank_among, rank_device
from parcompiler.runtime.metrics import Metrics
from parcompiler.runtime.offload import offloaded
from parcompiler.runtime.program import Input, KeptOutput, RankProgram, Tied, Value
from parcompiler.runtime.recompute import recomputed
from parcompiler.runtime.rng import own_draws
from parcompiler.runtime.samples import Samples
from parcompiler.runtime.script import command_line, run, worker_of
from parcompiler.runtime.sharded import (
    attention_of_heads,
    cross_entropy,
    cross_entropy_of_rows,
    embedding,
    embedding_bag,
    own_experts,
)
from parcompiler.runtime.stage import Layer, Stage
from parcompiler.runtime.synchronized import sync_batch_norm
from parcompiler.runtime.tensor import (
    all_gather,
    all_reduce,
    all_to_all,
    fan_out,
    first,
    once,
    reduce_scatter,
    take,
)
from parcompiler.runtime.tokens import TokenRows, write_tokens
from parcompiler.runtime.vocabulary import Head, Lookup, Vocabulary, rows
from parcompiler.runtime.worker import TIMEOUT, Worker

__all__ = [
    "TIMEOUT",
    "DataUpdates",
    "Head",
    "Input",
    "KeptOutput",
    "Layer",
    "Linear",
    "Lookup",
    "Metrics",
    "RankProgram",
    "Samples",
    "Shard",
    "Stage",
    "Tied",
    "TokenRows",
    "Value",
    "Vocabulary",
    "Worker",
    "addmm",
    "again",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "attention_of_heads",
    "attention_of_rows",
    "combine",
    "command_line",
    "cross_entropy",
    "cross_entropy_of_rows",
    "dispatch",
    "embedding",
    "embedding_bag",
    "expert_arrivals",
    "expert_ends",
    "fan_out",
    "first",
    "histogram",
    "linear",
    "loading",
    "offloaded",
    "once",
    "own_draws",
    "own_experts",
    "piece",
    "place",
    "rank_among",
    "rank_device",
    "recomputed",
    "reduce_scatter",
    "ring_attention",
    "rows",
    "run",
    "sync_batch_norm",
    "take",
    "worker_of",
    "write_tokens",
]
