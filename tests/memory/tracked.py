"""What a rank of a program really holds: its stages run in this process under torch's MemTracker.

The runtime's own interpreter executes the rank's list, and its own `Updates` the step of a fused
AdamW behind it, which takes nothing for itself. Only the network is missing: a receive gives
a buffer of zeros, a send lets go of its tensor at once, and a sum of gradients leaves them as they
are. Memory does not depend on what is in a message, so each rank can be looked at alone.

Under a tracker autograd adds any two gradients up in a new tensor (to it, all tensors are like
those of subclasses); without one only where others have the first too, as the product behind the
transposed view that a linear layer returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast
from unittest import mock

import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed._tools.mod_tracker import ModTracker
from torch.utils._python_dispatch import _disable_current_modes

import parcompiler as pc
from parcompiler.codegen.modules import stage_classes
from parcompiler.runtime import Stage, offload
from parcompiler.runtime.batch import microbatches
from parcompiler.runtime.channels import Channels
from parcompiler.runtime.collective_queue import Receipt
from parcompiler.runtime.interpreter import Interpreter
from parcompiler.runtime.program import RankProgram, Value
from parcompiler.runtime.updates import Updates
from tests.runtime.drawn import drawn_batch

CPU = torch.device("cpu")


class Done:
    """A message that has arrived, or a sum that is done."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def wait(self) -> torch.Tensor:
        """The tensor."""
        return self.tensor

    def is_completed(self) -> bool:
        """Not before it is waited for: a network takes its time."""
        return False


class Quiet:
    """Instead of the tracker's hooks on modules: they refuse a module that is called twice before
    its backward, and keep gradients alive that the runtime has let go."""

    is_bw = False

    def register_user_hooks(self, *_: object) -> None:
        """There are none."""

    def clear_user_hooks(self) -> None:
        """There are none."""

    def __enter__(self) -> None:
        """Nothing is hooked."""

    def __exit__(self, *_: object) -> None:
        """Nothing is hooked."""


class Alone:
    """The channels of a rank without others."""

    device = CPU

    def send(self, tensor: torch.Tensor, value: Value, peer: int) -> None:
        """Nothing is kept; a tensor in another order in memory is copied all the same."""
        (tensor.permute(value.order) if value.order else tensor).contiguous()

    def receive(self, value: Value, peer: int) -> Receipt:
        """A new buffer."""
        order = value.order
        size = [value.shape[dim] for dim in order] if order else value.shape
        buffer = torch.zeros(size, dtype=value.dtype)
        if order:
            buffer = buffer.permute([order.index(dim) for dim in range(len(order))])
        return cast(Receipt, Done(buffer))

    def sum(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Done:
        """There is nothing to add."""
        return Done(tensor)

    def scatter(self, segments: torch.Tensor, own: torch.Tensor, ranks: tuple[int, ...]) -> Done:
        """This rank's segment, which is in use until the sum is waited for."""
        own.copy_(segments[:1])
        return Done(segments)

    def gather(self, segments: torch.Tensor, ranks: tuple[int, ...]) -> list[Done]:
        """This rank's segment for all."""
        segments[1:] = segments[:1]
        return [Done(segments)]

    def total(self, tensor: torch.Tensor) -> None:
        """There is nothing to add."""

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """The loss of this rank."""

    def flush(self) -> None:
        """Everything is out."""


@dataclass(frozen=True)
class Held:
    """Bytes that a rank held: at most, and then by kind, under the tracker's names."""

    peak: int
    parts: Mapping[str, int]
    levels: tuple[tuple[str, int, int], ...]  # instruction, bytes behind it, the most so far


class Rank:
    """One rank of a program with real tensors, and an optimizer that has its states; of its data
    replicas the first."""

    def __init__(self, program: pc.Program, rank: int) -> None:
        self.program: RankProgram = program.rank_program(rank * program.lowered.grid.copies)
        classes = stage_classes(program.lowered, rank, "cpu")
        self.stages: dict[int, Stage] = {j: make() for j, make in classes.items()}
        channels = cast(Channels, Alone())
        self.interpreter = Interpreter(self.program, self.stages, channels)
        own, parts = self.interpreter.tensors.items(), self.interpreter.parts
        parameters = {name: t for name, t in own if isinstance(t, torch.nn.Parameter)}
        self.updates = Updates(self.program, parameters, CPU, lambda _: None, parts)
        state = program.problem.graph.tensors
        with torch.no_grad():
            for name, tensor in own:
                if parts is not None and name in parts.in_pieces:
                    if name in parts.parts:
                        parts.parts[name].copy_(parts.rows(name, state[name]))
                else:
                    tensor.copy_(state[name])
        assert program.plan.optimizer == "adamw", "the optimizer is AdamW"
        self.updates.set_optimizer(torch.optim.AdamW, None, {"fused": True})
        changed = parameters if parts is None else parts.parts
        for parameter in changed.values():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        self.updates.apply()  # so that there are states

    def step(self, *, kinds: bool = False) -> Held:
        """What a step holds, the optimizer's among it; gradients are told from activations where
        `kinds` are wanted.

        (The tracker's hook for that does not stand a gradient that comes in two parts.)
        """
        batch = drawn_batch(self.program, torch.Generator().manual_seed(0))
        tracker = MemTracker()
        tracker._mod_tracker = cast(ModTracker, Quiet())
        external: list[Any] = [*self.stages.values(), *_tensors(batch)]
        parts = self.interpreter.parts
        rows = () if parts is None else parts.parts.values()
        trained = self.updates.weights().values()
        tracker.track_external(*external, *rows, *trained, self.updates.optimizer)
        for stage in self.stages.values() if kinds else ():
            tracker._track_module_params_and_buffers(stage, install_grad_hooks=True)
        levels: list[tuple[str, int, int]] = []
        with tracker, mock.patch.object(offload, "to_host", _to_host):
            pieces = microbatches(self.program, batch)
            verbs = self.interpreter._verbs

            def noted(verb: Any) -> Any:
                def call(state: Any, line: object) -> None:
                    verb(state, line)
                    now = tracker.get_tracker_snapshot("current")[CPU]
                    top = tracker.get_tracker_snapshot("peak")[CPU]
                    levels.append((str(line), now["Total"], top["Total"]))

                return call

            self.interpreter._verbs = {kind: noted(verb) for kind, verb in verbs.items()}
            lines, scale = self.program.step, self.updates.begin()
            self.interpreter.run(lines, pieces, training=True, scale=scale)
            self.interpreter._verbs = verbs
            noted(lambda *_: self.updates.apply())(None, "optimizer")
            peak = tracker.get_tracker_snapshot("peak")[CPU]
        by_kind = {getattr(kind, "value", str(kind)): int(size) for kind, size in peak.items()}
        return Held(by_kind.pop("Total"), by_kind, tuple(levels))


def _to_host(whole: torch.Tensor) -> torch.Tensor:
    """A copy that is not on the device: the tracker does not see it."""
    with _disable_current_modes():
        return whole.clone()


def _tensors(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch."""
    found = batch.values() if isinstance(batch, Mapping) else batch
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]
