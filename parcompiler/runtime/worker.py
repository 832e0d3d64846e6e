"""One rank of a running program: step, train, evaluate, and its part of the model.

worker = program.worker()          # or pc.load(folder).worker(), or an emitted script's
worker.set_optimizer(torch.optim.AdamW, lr=3e-4)
for batch in batches:
    loss = worker.train_step(batch)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn

from parcompiler.errors import InputError, LaunchError
from parcompiler.runtime.batch import microbatches
from parcompiler.runtime.channels import Channels
from parcompiler.runtime.device import backend_of, rank_device
from parcompiler.runtime.failure import Notes, explain, let_go
from parcompiler.runtime.gather import gather
from parcompiler.runtime.interpreter import Around, Interpreter, Record
from parcompiler.runtime.program import RankProgram
from parcompiler.runtime.rows import Rows
from parcompiler.runtime.stage import Stage
from parcompiler.runtime.synchronized import together
from parcompiler.runtime.vocabulary import Vocabulary

# Every optimizer imports torch._dynamo, and its import keeps a process group that is open by then:
# the threads of that group may abort the process at its end. So it is imported here, before any is.
TIMEOUT = timedelta(minutes=10)
_RUNS = count()  # of this process; every rank makes its workers in the same order


class Worker:
    """One rank. `stages` makes its modules; `tensors` are its weights by their names in the model.

    `vocabulary` makes the module of its rows of the vocabulary, where all ranks have some.

    Starts torch.distributed from torchrun's environment unless the caller has; then it is the
    caller's to end. Raises LaunchError when the number of processes is not the plan's, or the ranks
    run different programs. After a failure a worker is closed: all ranks start again from weights.
    """

    def __init__(
        self,
        program: RankProgram,
        stages: Mapping[int, Callable[[], Stage]],
        tensors: Iterable[tuple[str, torch.Tensor]] = (),
        *,
        vocabulary: Callable[[int, int], Vocabulary] | None = None,
        device: torch.device | None = None,
        timeout: timedelta = TIMEOUT,
    ) -> None:
        self.program = program
        self.device = device or rank_device(program.device)
        self._optimizer: torch.optim.Optimizer | None = None
        self._records: list[Record] | None = None
        self._closed = ""  # why nothing runs any more
        self._owner = not dist.is_initialized()
        self._notes = Notes(_start(program, self.device, timeout))
        self._channels = Channels(program, self.device, timeout)
        with self._failing_together():
            self._channels.open()
            self._axis = self._channels.axis
            with self._along_axis(), torch.device(self.device):
                self.stages = {j: make() for j, make in stages.items()}
                self._rows = Rows(program)
                self.vocabulary = None if vocabulary is None else self._rows.make(vocabulary)
            self._interpreter = Interpreter(program, self.stages, self._channels, self.vocabulary)
            self._interpreter.update = self._apply
            if self._axis is not None:
                self._interpreter.seed = self._axis.agreed(self._interpreter.seed % 2**62)
            self._missing = set(self._interpreter.tensors)
            self._load(tensors)

    @property
    def rank(self) -> int:
        """This rank."""
        return self.program.rank

    def step(self, batch: object) -> torch.Tensor:
        """Forward and backward of one batch; the mean loss, on every rank.

        `batch` has the form of the compiled inputs with `microbatches` times the rows. Gradients
        are those of this batch, reduced over the ranks that share a tensor; parameters stay.
        Raises InputError for a batch of another form and for an asynchronous program, LaunchError
        when any rank fails.
        """
        self._check_synchronous()
        return self._trained(batch)

    def train_step(self, batch: object) -> torch.Tensor:
        """`step`, then an optimizer step; the gradients are freed. Returns the mean loss.

        With "pipedream" every micro-batch is a minibatch of its own: the optimizer steps behind
        each backward, by the gradient of that loss alone, so `microbatches` times in a call. (A
        scheduler of the learning rate moves when its own `step` is called, as ever.) The pipe
        fills and drains once in a call: give it many micro-batches.
        """
        self._updating()
        loss = self._trained(batch)
        if not self.program.asynchronous:
            self._apply()
        return loss

    def optimizer_step(self) -> None:
        """Update the parameters by the gradients of the last `step`, and free the gradients.

        Raises InputError for an asynchronous program, whose steps have done it.
        """
        self._check_synchronous()
        self._apply()

    def evaluate(self, batch: object) -> torch.Tensor:
        """The mean loss of one batch in evaluation mode (no dropout), without gradients.

        Neither parameters nor buffers change, and later steps draw the same random numbers.
        """
        modes = {module: module.training for module in self._modules()}
        kept = [(buffer, buffer.clone()) for stage in modes for buffer in stage.buffers()]
        for stage in modes:
            stage.eval()
        try:
            return self._run(batch, training=False)
        finally:
            for stage, mode in modes.items():
                stage.train(mode)
            for buffer, before in kept:
                buffer.copy_(before)

    def set_optimizer(
        self, kind: Callable[..., torch.optim.Optimizer], **options: Any
    ) -> torch.optim.Optimizer:
        """Build the optimizer over this rank's trainable parameters; `options` are its own.

        Returns it, for schedulers of its learning rate.
        """
        parameters = [item for item in self._parameters() if item.requires_grad]
        nothing = [torch.zeros(())]  # a rank without parameters has an optimizer all the same
        self._optimizer = kind(parameters or nothing, **options)
        return self._optimizer

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under their names in the model."""
        for name, tensor in self._interpreter.tensors.items():
            if isinstance(tensor, nn.Parameter):
                yield name, tensor

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's part out of a whole model's state dict (names of the model).

        Raises InputError when a tensor has another shape.
        """
        self._load(state.items())

    def gather_state_dict(self) -> dict[str, torch.Tensor] | None:
        """On rank 0 every parameter and buffer of the model by name; None elsewhere. Collective."""
        found = self._gather(self._interpreter.tensors)
        if found is not None:
            found |= {a: found[name] for a, name in self.program.aliases.items() if name in found}
        return found

    def gather_gradients(self) -> dict[str, torch.Tensor] | None:
        """On rank 0 the gradient of every parameter that has one; None elsewhere. Collective."""
        named = self.named_parameters()
        return self._gather({name: p.grad for name, p in named if p.grad is not None})

    def use_chance(self, around: Around | None) -> None:
        """Draw random numbers as `around(stage, microbatch)` says instead of from the seed."""
        self._interpreter.chance = around

    def record(self, on: bool = True) -> None:
        """Measure the instructions of the steps that follow, for `trace`."""
        self._records = [] if on else None

    def trace(self) -> tuple[Record, ...]:
        """Every instruction of the last step: begin and end in seconds since the step began, and
        how many of these it waited for messages."""
        return tuple(self._records or ())

    def close(self) -> None:
        """Destroy the process groups; also torch.distributed when this worker started it."""
        self._close("worker.close() was called")

    def __enter__(self) -> Worker:
        """Closes itself at the end of a `with` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _modules(self) -> Iterator[nn.Module]:
        """The stages, and the vocabulary."""
        yield from self.stages.values()
        if self.vocabulary is not None:
            yield self.vocabulary

    def _parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters."""
        yield from (parameter for _, parameter in self.named_parameters())

    def _trained(self, batch: object) -> torch.Tensor:
        """The training instructions for one batch, from no gradients; the mean loss."""
        for parameter in self._parameters():
            parameter.grad = None
        return self._run(batch, training=True)

    def _apply(self) -> None:
        """An optimizer step that frees the gradients."""
        optimizer = self._updating()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def _run(self, batch: object, *, training: bool) -> torch.Tensor:
        """Check the batch and execute a list; any failure stops every rank."""
        program = self.program
        instructions = program.instructions if training else program.evaluation
        if self._records is not None:
            self._records.clear()
        with self._failing_together():
            self._check_loaded()
            pieces = [
                {name: tensor.to(self.device) for name, tensor in piece.items()}
                for piece in microbatches(program, batch)
            ]
            with self._along_axis():
                return self._interpreter.run(
                    instructions, pieces, training=training, record=self._records
                )

    @contextmanager
    def _along_axis(self) -> Iterator[None]:
        """Within it, layers find the tensor ranks of this rank's line, and the data ranks."""
        row = self._channels.row
        with (
            nullcontext() if self._axis is None else self._axis.active(),
            nullcontext() if row is None else together(row),
        ):
            yield

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Around what all ranks do: whatever ends it on one rank closes all of them.

        A rank that fails tells the others why and closes the connections that they wait on. One
        that is interrupted closes them too: half a step is not to be continued.
        """
        self._check_open()
        try:
            yield
        except Exception as error:
            known = self._explained(error)
            let_go(error)
            self._close(f"it failed: {known}")
            if known is error:
                raise
            raise known from error
        except BaseException as interruption:
            self._close(f"it was interrupted by {type(interruption).__name__}")
            raise

    def _explained(self, error: Exception) -> Exception:
        """What this rank raises for `error`; the other ranks are told."""
        interpreter: Interpreter | None = getattr(self, "_interpreter", None)
        current = None if interpreter is None else interpreter.current
        stages = () if interpreter is None else interpreter.stages.values()
        return explain(error, self.rank, current, stages, self._notes)

    def _close(self, reason: str) -> None:
        """Close once; the first reason is kept."""
        if self._closed:
            return
        self._closed = reason
        self._channels.close()
        if self._owner and dist.is_initialized():
            dist.destroy_process_group()

    def _check_open(self) -> None:
        """Refuse to use connections that are gone."""
        if self._closed:
            message = f"this worker is closed, because {self._closed}: start all ranks again"
            raise LaunchError(message)

    def _check_synchronous(self) -> None:
        """Refuse to keep gradients where the program uses them up."""
        self._check_open()
        if self.program.asynchronous:
            message = "pipedream updates parameters inside the step: call train_step"
            raise InputError(message)

    def _updating(self) -> torch.optim.Optimizer:
        """The optimizer."""
        self._check_open()
        if self._optimizer is None:
            message = "call worker.set_optimizer(torch.optim.AdamW, lr=...) before train_step"
            raise InputError(message)
        return self._optimizer

    def _gather(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """All ranks' tensors on rank 0."""
        with self._failing_together():
            grid = self.program.grid
            sources = [grid.rank(position) for position in range(1, grid.pipeline)]
            trunk = {n: tensor for n, tensor in tensors.items() if n not in self.program.rows}
            found = gather(self._joined(trunk), self.rank, sources, self._channels)
            return self._rows.gather(tensors, found, self._channels)

    def _joined(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The tensors of this rank, whole on the first rank of each line that others read from."""
        at, shards = self.program.coordinate, self.program.shards
        if self._axis is None or at.data:
            return tensors
        found: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            shard = shards.get(name)
            whole = tensor if shard is None else self._axis.whole(tensor.detach(), shard)
            if at.tensor == 0:
                found[name] = whole.cpu()
        return found

    def _load(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy tensors into this rank's; those of other ranks are passed over."""
        own = self._interpreter.tensors
        with torch.no_grad():
            for given, tensor in named:
                name = self.program.aliases.get(given, given)
                if name not in own:
                    continue
                tensor, target = self._own(name, tensor), self._rows.unpadded(name, own[name])
                if tensor.shape != target.shape:
                    shapes = f"{tuple(target.shape)} needed, {tuple(tensor.shape)} given"
                    message = f"{name!r} has another shape ({shapes}): weights of another model?"
                    raise InputError(message)
                target.copy_(tensor)
                self._missing.discard(name)

    def _own(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's piece of a tensor of the model, if that has the right shape."""
        tensor = self._rows.own(name, tensor, self._interpreter.tensors[name])
        shard, own = self.program.shards.get(name), self._interpreter.tensors[name]
        if shard is None or self._axis is None or tensor.shape != shard.shape(own.shape):
            return tensor
        return shard.take(tensor, self._axis.size, self._axis.rank)

    def _check_loaded(self) -> None:
        """Refuse to compute with tensors that were never filled."""
        if self._missing:
            message = (
                f"this rank lacks the weights of {min(self._missing)!r} ({len(self._missing)} "
                "tensors): export with weights=True, or call worker.load_state_dict first"
            )
            raise InputError(message)


def _start(program: RankProgram, device: torch.device, timeout: timedelta) -> dist.Store | None:
    """Start torch.distributed if needed; the store for failure notes if there is one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dist.is_initialized():
        _check_place(program, dist.get_rank(), dist.get_world_size())
        return None
    if "RANK" in os.environ:
        rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        _check_place(program, rank, size)
        # Keys of an earlier run of this process, or of its failure, are not those of this one.
        store: dist.Store = dist.PrefixStore(f"parcompiler/{next(_RUNS)}", _rendezvous(_address()))
    elif program.size > 1:
        message = f"start this program with torchrun --nproc-per-node {program.size}"
        raise LaunchError(message)
    else:
        rank, size, store = 0, 1, dist.HashStore()
    dist.init_process_group(
        backend_of(device), store=store, rank=rank, world_size=size, timeout=timeout
    )
    return dist.PrefixStore("notes", store)


def _address() -> tuple[str | None, ...]:
    """Where torchrun's environment says that the ranks meet."""
    return tuple(os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"))


@cache
def _rendezvous(address: tuple[str | None, ...]) -> dist.Store:
    """The store that all ranks share, met once in a process: rank 0 may be its server."""
    store: dist.Store
    store, _, _ = next(dist.rendezvous("env://"))
    return store


def _check_place(program: RankProgram, rank: int, size: int) -> None:
    """Refuse a number of processes that is not the plan's, and the program of another rank."""
    if size != program.size:
        message = (
            f"the plan needs {program.size} processes ({size} started): "
            f"torchrun --nproc-per-node {program.size}, or nodes × processes that multiply to it"
        )
        raise LaunchError(message)
    if rank != program.rank:
        message = f"this is rank {rank} with the program of rank {program.rank}"
        raise LaunchError(message)
