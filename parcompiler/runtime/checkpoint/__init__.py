"""Checkpoints: a run's state as pieces of whole tensors in safetensors files, for any plan.

    run/                          the folder that is given to `worker.save` and `worker.load`
      step_00000010/              complete: it was renamed last
        checkpoint.json           step, counters, options of the optimizer, states of `extra`
        tensors.json              dtype, shape and pieces of every tensor, by its name in the model
        rank_0.safetensors ...    what each rank wrote: one of replicas
        SHA256SUMS                what `sha256sum --check` reads
      .step_00000020.partial/     incomplete: no one reads it, the next save removes it

A piece is a box of the whole tensor: its offset and size in every dimension. A rank that loads
reads the overlaps of its own boxes with the stored ones, whatever plan wrote them. Nothing is
pickled.

torch.distributed.checkpoint is not used: its planners exchange pickled objects between ranks, its
safetensors storage keeps one piece of a tensor in a file (a rank has several of a fused projection)
and writes neither an index nor checksums unless it assembles whole tensors.
"""

from parcompiler.runtime.checkpoint.pretrained import SHARD_SIZE
from parcompiler.runtime.checkpoint.saving import Checkpoints
from parcompiler.runtime.checkpoint.state_dict import RankTensors
from parcompiler.runtime.checkpoint.states import RankState

__all__ = ["SHARD_SIZE", "Checkpoints", "RankState", "RankTensors"]
