"""Executes one rank's instruction list: the verbs behind SEND, RECV, FORWARD, BACKWARD.

    RECV ─► pending ─► arrived ─► FORWARD ─► results ─► SEND
                          │           │
                          └── saved ◄─┘
                                │
    SEND grad ◄─ leaf.grad ◄─ BACKWARD ◄─ gradients ◄─ RECV grad

A value that comes in is a leaf of the stage's autograd graph; what goes out is remembered by its
gradient edge, so that its memory is free once it is sent.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from parcompiler.instruction import Instruction, Kind
from parcompiler.runtime.chance import mixed, seeded
from parcompiler.runtime.channels import Channels, Receipt
from parcompiler.runtime.program import RankProgram
from parcompiler.runtime.stage import Stage

Around = Callable[[int, int], AbstractContextManager[object]]  # of a stage and micro-batch
Key = tuple[str, int]  # the name of a value and its micro-batch


class Record(NamedTuple):
    """When an instruction ran, in seconds since the step began."""

    instruction: Instruction
    begin: float
    end: float


class Saved(NamedTuple):
    """What the backward of one stage and micro-batch needs: edges of the outputs, and leaves."""

    edges: dict[str, GradientEdge]
    loss: torch.Tensor | None


@dataclass
class State:
    """The tensors alive during one step."""

    microbatches: Sequence[Mapping[str, torch.Tensor]]
    training: bool
    receipts: dict[Key, Receipt] = field(default_factory=dict)
    gradient_receipts: dict[Key, list[Receipt]] = field(default_factory=dict)
    arrived: dict[Key, torch.Tensor] = field(default_factory=dict)
    results: dict[Key, torch.Tensor] = field(default_factory=dict)
    saved: dict[tuple[int, int], Saved] = field(default_factory=dict)
    used: Counter[Key] = field(default_factory=Counter)  # by stages of this rank
    sent: Counter[Key] = field(default_factory=Counter)  # to other ranks
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    mean: torch.Tensor | None = None


class Interpreter:
    """One rank's stages and channels; `run` executes a list once."""

    def __init__(
        self, program: RankProgram, stages: Mapping[int, Stage], channels: Channels
    ) -> None:
        self.program = program
        self.stages = stages
        self.channels = channels
        self.tensors = tensors_of(stages)
        self.chance: Around | None = None
        self._seed = torch.initial_seed()
        self._step = 0
        self.current: Instruction | None = None
        self._consumers = {
            name: [j for j, stage in stages.items() if name in stage.receives]
            for name in program.values
        }
        self._remote = {
            name: {i.peer for i in program.evaluation if i.kind is Kind.SEND and i.value == name}
            for name in program.values
        }
        self._verbs: dict[Kind, Callable[[State, Instruction], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.SEND: self._send,
            Kind.RECV: self._receive,
            Kind.REDUCE_GRADIENTS: self._reduce_gradients,
            Kind.SHARE_LOSS: self._share_loss,
        }

    def run(
        self,
        instructions: Sequence[Instruction],
        microbatches: Sequence[Mapping[str, torch.Tensor]],
        *,
        training: bool,
        record: list[Record] | None = None,
    ) -> torch.Tensor:
        """Execute a list; returns the mean loss of the step."""
        state = State(microbatches, training)
        start = time.perf_counter()
        with torch.set_grad_enabled(training):
            for self.current in instructions:
                begin = time.perf_counter()
                self._verbs[self.current.kind](state, self.current)
                if record is not None:
                    self._synchronize()
                    record.append(Record(self.current, begin - start, time.perf_counter() - start))
            self.channels.flush()
        self.current = None
        self._step += training  # so that an evaluation between steps changes none of their draws
        assert state.mean is not None
        return state.mean

    def _forward(self, state: State, instruction: Instruction) -> None:
        """Run a stage's module and keep what its backward and the sends need."""
        j, i = _numbers(instruction)
        stage = self.stages[j]
        arguments = {name: state.microbatches[i][name] for name in stage.inputs}
        arguments |= {name: self._take(state, (name, i)) for name in stage.receives}
        with self._drawing(stage, j, i):
            outputs = stage(**arguments)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        results = dict(zip(stage.gives, outputs, strict=False))
        loss = outputs[-1] if stage.loss else None
        if loss is not None:
            state.losses[i] = loss.detach()
        if state.training:
            edges = {n: get_gradient_edge(t) for n, t in results.items() if t.requires_grad}
            state.saved[j, i] = Saved(edges, loss)
        for name, tensor in results.items():
            self._give(state, (name, i), tensor.detach())

    def _drawing(self, stage: Stage, j: int, i: int) -> AbstractContextManager[object]:
        """The random numbers of one forward: a function of seed, step, stage and micro-batch."""
        if not stage.random:
            return nullcontext()
        if self.chance is not None:
            return self.chance(j, i)
        return seeded(mixed(self._seed, self._step, j, i), self.channels.device)

    def _take(self, state: State, key: Key) -> torch.Tensor:
        """A value that another stage made: a leaf that collects its gradient."""
        if key not in state.arrived:
            tensor = state.receipts.pop(key).wait()
            state.arrived[key] = tensor.requires_grad_(self._carries(state, key))
        tensor = state.arrived[key]
        if not state.training:
            self._release(state, key)
        return tensor

    def _release(self, state: State, key: Key) -> None:
        """Forget an arrived value after its last use on this rank."""
        state.used[key] += 1
        if state.used[key] == len(self._consumers[key[0]]):
            del state.arrived[key], state.used[key]

    def _carries(self, state: State, key: Key) -> bool:
        """Whether a gradient comes back for a value in this run."""
        return state.training and self.program.values[key[0]].differentiable

    def _give(self, state: State, key: Key, tensor: torch.Tensor) -> None:
        """Keep a result for the sends, and hand it to the stages of this rank without a copy."""
        if self._remote[key[0]]:
            state.results[key] = tensor
        if self._consumers[key[0]]:
            state.arrived[key] = tensor.detach().requires_grad_(self._carries(state, key))

    def _backward(self, state: State, instruction: Instruction) -> None:
        """Gradients of a stage's inputs and parameters for one micro-batch."""
        j, i = _numbers(instruction)
        saved = state.saved.pop((j, i))
        roots: list[Any] = []
        gradients: list[torch.Tensor] = []
        for name in self.stages[j].gives:
            gradient = self._gradient(state, (name, i))
            if gradient is not None and name in saved.edges:
                roots.append(saved.edges[name])
                gradients.append(gradient)
        if saved.loss is not None and saved.loss.requires_grad:
            roots.append(saved.loss)
            gradients.append(torch.full_like(saved.loss, 1.0 / self.program.microbatches))
        if roots:
            torch.autograd.backward(roots, gradients)
        for name in self.stages[j].receives:
            self._finish(state, (name, i))

    def _gradient(self, state: State, key: Key) -> torch.Tensor | None:
        """The gradient of a value: the sum over the ranks and stages that used it."""
        parts = [receipt.wait() for receipt in state.gradient_receipts.pop(key, [])]
        if self._consumers[key[0]]:
            local = state.arrived.pop(key).grad
            parts += [] if local is None else [local]
        if not parts:
            return None
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def _finish(self, state: State, key: Key) -> None:
        """After the last backward that used a value: its gradient is complete."""
        producer_is_here = any(key[0] in stage.gives for stage in self.stages.values())
        if producer_is_here:
            return  # the producer's backward takes the gradient from the leaf
        state.used[key] += 1
        if state.used[key] == len(self._consumers[key[0]]):
            leaf = state.arrived.pop(key)
            if self.program.values[key[0]].differentiable:
                gradient = leaf.grad
                state.results[key] = torch.zeros_like(leaf) if gradient is None else gradient
            del state.used[key]

    def _send(self, state: State, instruction: Instruction) -> None:
        """Start sending a value, or its gradient, and drop it when no other rank needs it."""
        key = _key(instruction)
        assert instruction.peer is not None
        value = self.program.values[key[0]]
        self.channels.send(state.results[key], value, instruction.peer)
        peers = 1 if instruction.gradient else len(self._remote[key[0]])
        state.sent[key] += 1
        if state.sent[key] == peers:
            del state.results[key], state.sent[key]

    def _receive(self, state: State, instruction: Instruction) -> None:
        """Post a receive; the compute instruction that uses it waits for it."""
        key = _key(instruction)
        assert instruction.peer is not None
        receipt = self.channels.receive(self.program.values[key[0]], instruction.peer)
        if instruction.gradient:
            state.gradient_receipts.setdefault(key, []).append(receipt)
        else:
            state.receipts[key] = receipt

    def _reduce_gradients(self, state: State, instruction: Instruction) -> None:
        """Sum the gradients of a tied tensor over the ranks that hold it."""
        assert instruction.value is not None
        tied = self.program.tied[instruction.value]
        parameter = self.tensors[tied.name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        self.channels.sum(parameter.grad, tied.ranks)

    def _share_loss(self, state: State, instruction: Instruction) -> None:
        """Give every rank the mean loss over the micro-batches."""
        assert instruction.peer is not None
        if state.losses:
            mean = torch.stack([state.losses[i] for i in sorted(state.losses)]).mean()
        else:
            mean = torch.zeros((), dtype=self.program.loss, device=self.channels.device)
        self.channels.broadcast(mean, instruction.peer)
        state.mean = mean

    def _synchronize(self) -> None:
        """Wait for the device, so that measured times are those of the instruction."""
        if self.channels.device.type == "cuda":
            torch.cuda.synchronize(self.channels.device)


def tensors_of(stages: Mapping[int, Stage]) -> dict[str, torch.Tensor]:
    """Parameters and buffers of stages by their name in the model, each once."""
    found: dict[str, torch.Tensor] = {}
    for stage in stages.values():
        for attribute, name in stage.tensor_names().items():
            owner, _, leaf = attribute.rpartition(".")
            found.setdefault(name, getattr(stage.get_submodule(owner), leaf))
    return found


def _numbers(instruction: Instruction) -> tuple[int, int]:
    """Stage and micro-batch of a compute instruction."""
    assert instruction.stage is not None
    assert instruction.microbatch is not None
    return instruction.stage, instruction.microbatch


def _key(instruction: Instruction) -> Key:
    """Value and micro-batch of a message."""
    assert instruction.value is not None
    assert instruction.microbatch is not None
    return instruction.value, instruction.microbatch
