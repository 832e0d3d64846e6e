"""compile(), the entry of the compiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from parcompiler.data_updates import ALL_REDUCE, DataUpdates
from parcompiler.mesh import Cluster, Mesh
from parcompiler.temporary import uncollected

if TYPE_CHECKING:  # importing the compiler takes 0.3 s: only in a call of `compile`
    from parcompiler.capture.inputs import Batch
    from parcompiler.graph import Graph
    from parcompiler.passes import Pass
    from parcompiler.plan import Plan
    from parcompiler.program import Program
    from parcompiler.schedules import Schedule


@uncollected()
def compile(
    model: nn.Module | Graph | Program,
    mesh: Mesh | Cluster,
    inputs: Batch | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    microbatches: int | None = None,
    schedule: str | Schedule = "auto",
    virtual_stages: int = 1,
    vocabulary: str = "auto",
    stages: str | Sequence[int] = "auto",
    sharding: str | Mapping[str, str] = "auto",
    recompute: str | Mapping[str, bool] = "auto",
    precision: str | None = None,
    optimizer: str = "adamw",
    costs: str = "model",
    passes: Sequence[Pass] | None = None,
    plan: Plan | None = None,
    progress: bool = True,
    microbatch: str | Sequence[int] = "given",
    zero: str | int = "auto",
    updates: str = "all-reduce",
    compression: str | None = None,
    every: int | None = None,
    outer: str | tuple[float, float] | None = None,
    staleness: int | None = None,
    compression_rank: int | None = None,
    exact: bool = False,
    outputs: Sequence[str] | None = None,
    loss_weights: str | None = None,
    memory_margin: float = 0.0,
) -> Program:
    """Divide the training of `model` over the ranks of `mesh`, or of the best mesh of a `Cluster`.

    The model's parameters may be real or meta, and it is not modified. It is compiled in the mode
    that its modules are in: one in evaluation mode trains without dropout, which a line on stderr
    says (call `model.train()` first). Given a `Program` as the model, its model is compiled again
    without another capture.

    - `inputs` is ONE micro-batch of ONE data rank, a dict of keyword arguments or a tuple of
      positional ones.
    - `loss` maps the model's outputs to a scalar; without it the model returns the loss (a scalar,
      `.loss` or `["loss"]`). The loss of a step is the mean of its micro-batches' losses;
      `loss_weights` "tokens" makes it the mean over all targets that count in their
      cross-entropies, as transformers' Trainer does.
    - `outputs` are names of the outputs that `worker.predict` returns: keys (`logits`) or positions
      in a tuple (`0`).
    - `microbatches` per step and data rank default to 4 · pipeline, or the plan's; with a `Cluster`
      they are those of a step on all devices together, shared equally by the data ranks of each
      mesh, and default to 4 for each device: so all meshes train the same batch.
    - `schedule` is a name, "auto" (the fastest that fits), "search" (an order found for this model)
      or a `pc.Schedule`; `virtual_stages` is the number of stages on each rank for the schedules
      that use several (1 means their least number, 2; "auto" also weighs more of them).
    - `vocabulary` is where embedding and head are: "whole" (on one stage each), "naive", "vocab-1",
      "vocab-2" or "interlaced" (on all ranks), "auto" (the shortest step that fits).
    - `stages` are "auto" (by time), "even" (equal numbers of layers) or the numbers of blocks of
      each; `sharding` is "auto" or {pattern of parameter names: placement}, such as
      `{"*.up.weight": "S(0)"}`.
    - `recompute` says which blocks run again in their backward instead of keeping activations:
      "none", "full" (all that may), "selective" (only their norms, gates and gathers), "offload"
      (as "selective", with the blocks' saved tensors in the host's memory), "auto" (what memory
      forces, in the fastest way), or {pattern of block names: bool}, where the last match decides.
    - `precision` "bf16" or "fp16" computes in 16 bits, with masters of the parameters in float32;
      "fp32" and "fp64" compute in those; None in the parameters' own.
    - `optimizer` determines the memory of states: "adamw", "adagrad", "sgd", "sgd-momentum", "muon"
      or "none", which counts none: for a loop that updates the parameters itself. What
      `worker.set_optimizer` makes may be another, and `zero` shares its states out all the same.
      With "sgd" and "adagrad" gradients of tables with `sparse=True` are the rows that a step looks
      up.
    - `zero` is what data ranks share out: 0 nothing, 1 optimizer states and masters, 2 gradients
      too, 3 parameters too, "auto" decides by time under memory.
    - `updates` is how data ranks combine their gradients or weights: "all-reduce" (gradients are
      averaged), "parameter-server" (one rank of each data row updates for all), "asynchronous"
      (likewise, but none waits for the others unless it is `staleness` steps ahead of the slowest)
      or "local" (each updates by itself, and after `every` so many steps the weights are averaged,
      as a step of an `outer` optimizer: "nesterov", "average", or a learning rate and a momentum).
    - `compression` of the gradients between data ranks is "bf16", "fp16" or "powersgd" (of rank
      `compression_rank`).
    - `memory_margin` is the part of each device's memory that plans keep free (0.05 is 5 %), for
      memory that no plan counts: CUDA's context, NCCL's buffers, fragmentation.
    - `exact` keeps the model's own operators: without it, attention whose mask is the same for
      every batch runs in the causal kernel, or without a mask, and reads repeated heads in groups,
      which changes the last bits.
    - `costs` is "model", or "measured": every distinct block is run on the device of this machine,
      for about a second, and so are the passes of a spread vocabulary; their times are kept in the
      plan. "compiled" compiles the blocks first, as `worker(compiled=True)` does. Collectives of
      tensor ranks on a CPU are measured among as many processes, if there is an idle core for each
      of them.
    - `plan` reuses a plan, perhaps an edited one; `passes` decide instead of `passes.DEFAULT`.
    - `microbatch`, with a `Cluster`: "auto" also weighs micro-batches of 1, 2, 4, 8, ... rows, or
      of a list of rows, with the number of micro-batches changed so that the rows of a step stay
      the same (the loss must be a mean over rows; if it may not be, the micro-batch stays as
      given); the model is captured on each, and the best is used.
    - `progress` shows the steps of the compiler on a terminal.

    Raises InputError for arguments of the wrong form, CaptureError for a model that cannot be
    captured, InfeasibleError when nothing fits, PlanError for a plan that breaks rules.
    """
    from parcompiler.checks import check_types
    from parcompiler.cost import WHOLE
    from parcompiler.flow import flow
    from parcompiler.meshes import global_microbatches
    from parcompiler.options import Options

    check_types(mesh, loss, plan, passes)
    if isinstance(mesh, Cluster):
        microbatches = global_microbatches(mesh, microbatches)
    elif microbatches is None:  # enough to keep the ranks busy
        microbatches = 4 * mesh.pipeline if plan is None else plan.microbatches
    data_updates = DataUpdates.of(updates, compression, every, outer, staleness, compression_rank)
    if plan is not None and data_updates == ALL_REDUCE:
        data_updates = plan.updates or data_updates
    if zero == "auto" and (plan is not None or data_updates != ALL_REDUCE):
        zero = 0 if plan is None else plan.zero or 0
    if isinstance(optimizer, str) and optimizer in WHOLE and vocabulary == "auto":
        vocabulary = "whole"  # the optimizer would take rows for whole matrices
    options = Options(
        microbatches=microbatches,
        schedule=schedule,
        virtual_stages=virtual_stages,
        stages=stages,
        sharding=sharding,
        recompute=recompute,
        vocabulary=vocabulary,
        precision=precision,
        optimizer=optimizer,
        costs=costs,
        zero=zero,
        **data_updates.options,
        exact=exact,
        loss_weights=loss_weights,
        memory_margin=memory_margin,
    )
    return flow(
        model, inputs, loss, mesh, options, microbatch=microbatch, outputs=outputs, passes=passes,
        plan=plan, progress=progress,
    )  # fmt: skip
