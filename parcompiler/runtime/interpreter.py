"""Executes one rank's instruction list: the verbs behind SEND, RECV, FORWARD, BACKWARD, UPDATE.

    RECV ─► pending ─► arrived ─► FORWARD ─► results ─► SEND
                          │           │
                          └── saved ◄─┘
                                │
    SEND grad ◄─ leaf.grad ◄─ BACKWARD ◄─ gradients ◄─ RECV grad

A value that arrives is a leaf of the stage's autograd graph; for a value that is sent only its
gradient edge is kept, so that its memory is free once it is sent.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch.autograd.graph import get_gradient_edge

from parcompiler.instruction import BACKWARDS, Instruction, Kind
from parcompiler.runtime.axis import all_active
from parcompiler.runtime.channels import EVALUATION, TRAINING, Channels
from parcompiler.runtime.collective_queue import Pending
from parcompiler.runtime.deferred import Deferral, finish
from parcompiler.runtime.flight import FlightRecorder
from parcompiler.runtime.powersgd import PowerSGD
from parcompiler.runtime.program import RankProgram
from parcompiler.runtime.reduction import Reduction
from parcompiler.runtime.rng import mixed, seeded
from parcompiler.runtime.stage import Stage
from parcompiler.runtime.state import (
    Awaited,
    Key,
    SavedForBackward,
    StepState,
    key_of,
    share_tensors,
)
from parcompiler.runtime.versions import Versions
from parcompiler.runtime.vocabulary import Vocabulary
from parcompiler.runtime.vocabulary_passes import VocabularyPasses
from parcompiler.runtime.zero import DataParts

Around = Callable[[int, int], AbstractContextManager[object]]  # for a stage and micro-batch


class InstructionTime(NamedTuple):
    """When an instruction ran, in seconds since the step began; `waited` of them for messages."""

    instruction: Instruction
    begin: float
    end: float
    waited: float = 0.0


class Interpreter:
    """One rank's stages and channels; `run` executes a list once.

    `fused` compiles the operations on logits in the passes of the vocabulary.
    """

    def __init__(
        self,
        program: RankProgram,
        stages: Mapping[int, Stage],
        channels: Channels,
        vocabulary: Vocabulary | None = None,
        flight: FlightRecorder | None = None,
        *,
        fused: bool = False,
    ) -> None:
        self.program = program
        self.stages = stages
        self.channels = channels
        self.tensors = share_tensors(stages)
        self._passes: VocabularyPasses | None = None
        if vocabulary is not None:
            self.tensors |= dict(vocabulary.tensors())
            self._passes = VocabularyPasses(program, vocabulary, self._awaited, fused=fused)
        self.draws: Around | None = None
        self.update: Callable[[], object] | None = None  # an optimizer step
        self._versions = Versions() if program.asynchronous else None
        held = {j: [*stage.tensor_names().values()] for j, stage in stages.items()}
        self.parts = DataParts(program, self.tensors, channels, held) if program.sharing else None
        # for each use
        self._whole = {j: {*names} for j, names in held.items() if program.sharing == 3}
        self._elsewhere = {*self.tensors}.difference(*held.values())  # tensors of no stage
        if 0 < program.sharing < 3:
            for stage in stages.values():
                self._elsewhere |= self._waiting(stage)
        factored = program.updates.compression == "powersgd"
        self.powersgd = PowerSGD(program.updates.rank, channels) if factored else None
        self._deferral = Deferral()
        awaits = self._deferral.awaits
        self._reduction = Reduction(program, self.tensors, self.parts, self.powersgd, awaits)
        lines = program.instructions
        backwards = {line.stage: line for line in lines if line.kind in BACKWARDS}
        self._trained = {j for j in backwards if j is not None}  # the stages with a backward
        self._last = frozenset(
            line
            for line in lines  # of each stage; all, where each micro-batch is summed by itself
            if line.kind in BACKWARDS and (program.zero > 1 or line == backwards[line.stage])
        )
        self._split = {line.stage for line in lines if line.kind is Kind.BACKWARD_WEIGHT}
        self.seed = torch.initial_seed()
        self.step = 0  # of training
        self.samples = 0  # trained on by all data ranks together
        self._waited = 0.0  # seconds of the current instruction; counted while recording
        self._recording = False
        self.flight = flight or FlightRecorder()
        self._consumers = {
            name: [j for j, stage in stages.items() if name in stage.receives]
            for name in program.values
        }
        self._remote = {
            name: {i.peer for i in program.evaluation if i.kind is Kind.SEND and i.value == name}
            for name in program.values
        }
        self._verbs: dict[Kind, Callable[[StepState, Instruction], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward_input,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.UPDATE: self._update,
            Kind.SEND: self._send,
            Kind.RECV: self._receive,
            Kind.REDUCE_GRADIENTS: self._reduce_gradients,
            Kind.SHARE_LOSS: self._share_loss,
            Kind.UNSHARD: self._unshard,
            Kind.RESHARD: self._reshard,
        }
        if self._passes is not None:
            self._verbs |= self._passes.verbs

    def arrive(self) -> None:
        """Wait for parameters that other data ranks have updated and are sending."""
        if self.parts is not None:
            self.parts.arrive()

    def check(self, microbatches: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Raise InputError for words that are not in a table of the vocabulary's rows."""
        if self._passes is not None:
            for batch in microbatches:
                self._passes.check(batch)

    def run(
        self,
        instructions: Sequence[Instruction],
        microbatches: Sequence[Mapping[str, torch.Tensor]],
        *,
        training: bool,
        record: list[InstructionTime] | None = None,
        scale: float = 1.0,
        kept: dict[str, dict[int, torch.Tensor]] | None = None,
    ) -> torch.Tensor:
        """Execute a list; returns the mean loss of the step. Gradients are of the mean loss times
        `scale`. `kept` is filled with the outputs of the model, by value and micro-batch."""
        state = StepState(microbatches, training, scale=scale, kept=kept)
        self.channels.tag = TRAINING if training else EVALUATION
        self._reduction.begin(self.channels)
        if self._passes is not None:
            self._passes.begin(self.channels, state)
        for axis in all_active():
            axis.summands.clear()  # left by a step that failed
        self._recording = record is not None
        start = time.perf_counter()
        with torch.set_grad_enabled(training):
            self._await(self._elsewhere)
            for line in instructions:
                self.flight.note(line)
                begin = 0.0 if record is None else time.perf_counter()
                self._waited = 0.0
                self._verbs[line.kind](state, line)
                if record is not None:
                    self._synchronize()
                    end = time.perf_counter()
                    record.append(InstructionTime(line, begin - start, end - start, self._waited))
            self._end(start, record)
        self.step += training  # evaluations do not count, so they leave the draws of steps alone
        self.samples += training * self.program.samples_of_step
        assert state.mean is not None
        return state.mean

    def _end(self, start: float, record: list[InstructionTime] | None) -> None:
        """Wait for the sums of gradients, timed as part of the last instruction, and for sends."""
        begin = time.perf_counter()
        if self._passes is not None:
            self._passes.end()
        for line in self._reduction.wait():
            self.flight.note(line, awaited=True)  # an error names this one
        if record:
            self._synchronize()
            end, last = time.perf_counter(), record[-1]
            record[-1] = last._replace(end=end - start, waited=last.waited + end - begin)
        if self.parts is not None:
            self.parts.end()
        self.channels.flush()

    def _forward(self, state: StepState, instruction: Instruction) -> None:
        """Run a stage's module and keep what its backward and the sends need."""
        j, i = _numbers(instruction)
        self._make_whole(j)
        stage = self.stages[j]
        arguments = {name: state.microbatches[i][name] for name in stage.inputs}
        arguments |= {name: self._take(state, (name, i)) for name in stage.receives}
        backward_follows = state.training and j in self._trained
        deferring = state.training and self.defers(j)
        with self._drawing(stage, j, i), self._deferral.forward() if deferring else nullcontext():
            if backward_follows and self._versions is not None:  # updates come before the backward
                outputs = self._versions.forward(stage, j, i, arguments)
            else:
                outputs = stage(**arguments)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        results = dict(zip(stage.gives, outputs, strict=False))
        loss = outputs[len(stage.gives)] if stage.loss else None
        if state.kept is not None:
            for name, tensor in zip(stage.keeps, outputs[-len(stage.keeps) :], strict=False):
                state.kept.setdefault(name, {})[i] = tensor
        if loss is not None:
            state.losses[i] = loss.detach()
        if backward_follows:
            edges = {
                name: get_gradient_edge(tensor)
                for name, tensor in results.items()
                if tensor.requires_grad and self._carries(state, (name, i))
            }
            state.saved[j, i] = SavedForBackward(edges, loss)
        frees = self.program.zero == 3  # so another unit could not read a view of them
        gathered = {p.untyped_storage().data_ptr() for p in stage.parameters()} if frees else ()
        for name, tensor in results.items():
            is_view = frees and tensor.untyped_storage().data_ptr() in gathered
            self._give(state, (name, i), tensor.detach().clone() if is_view else tensor.detach())
        if state.training and j not in self._trained:
            for name in stage.receives:
                self._finish(state, (name, i))

    def _drawing(self, stage: Stage, j: int, i: int) -> AbstractContextManager[object]:
        """The random numbers of one forward: a function of seed, step, stage and micro-batch."""
        if not stage.random:
            return nullcontext()
        if self.draws is not None:
            return self.draws(j, i)
        number = self.program.microbatch(i)  # so that data ranks draw differently
        return seeded(mixed(self.seed, self.step, j, number), self.channels.device)

    def _take(self, state: StepState, key: Key) -> torch.Tensor:
        """A value of another stage: a leaf that collects its gradient."""
        if key not in state.arrived:
            tensor = self._awaited(state.receipts.pop(key))
            state.arrived[key] = tensor.requires_grad_(self._carries(state, key))
        tensor = state.arrived[key]
        if not state.training:
            self._release(state, key)
        return tensor

    def _awaited(self, message: Awaited) -> torch.Tensor:
        """The tensor of a message; while waiting, the flight recorder shows the message's line."""
        computing = self.flight.current
        self.flight.note(message.line, awaited=True)
        tensor = self._received(message.pending)
        assert computing is not None
        self.flight.note(computing)
        return tensor

    def _received(self, pending: Pending) -> torch.Tensor:
        """The tensor of a message; time spent waiting is counted apart from compute."""
        if not self._recording:
            return cast(torch.Tensor, pending.wait())
        begin = time.perf_counter()
        tensor: torch.Tensor = pending.wait()
        self._synchronize()
        self._waited += time.perf_counter() - begin
        return tensor

    def _release(self, state: StepState, key: Key) -> None:
        """Forget an arrived value after its last use on this rank."""
        state.used[key] += 1
        if state.used[key] == len(self._consumers[key[0]]):
            del state.arrived[key], state.used[key]

    def _carries(self, state: StepState, key: Key) -> bool:
        """Whether a gradient comes back for a value in this run."""
        return state.training and self.program.values[key[0]].differentiable

    def _give(self, state: StepState, key: Key, tensor: torch.Tensor) -> None:
        """Keep a result for the sends, and give it to the stages of this rank without a copy."""
        if self._remote[key[0]]:
            state.results[key] = tensor
        if self._consumers[key[0]]:
            state.arrived[key] = tensor.detach().requires_grad_(self._carries(state, key))
        if self._passes is not None:
            self._passes.take(key, tensor)

    def defers(self, j: int) -> bool:
        """Whether a backward of a stage leaves products for weights for later."""
        return j in self._trained and (j in self._split or self._overlaps(j))

    def _overlaps(self, j: int) -> bool:
        """Whether collectives of a stage's backward run beside the products for its weights."""
        axes = any(axis.name != "data" for axis in all_active())
        return axes and j not in self._split and self._versions is None

    def _backward(self, state: StepState, instruction: Instruction) -> None:
        """Gradients of a stage's inputs and parameters for one micro-batch."""
        reduction, overlaps = self._reduction, self._overlaps(_numbers(instruction)[0])
        leaving = self._deferral.beside(reduction.became_final) if overlaps else nullcontext()
        with reduction.watching(instruction), leaving as compute:
            self._go_back(state, instruction, compute)

    def _go_back(
        self,
        state: StepState,
        instruction: Instruction,
        beside: Callable[[], object] | None = None,
    ) -> None:
        """Run autograd from the results and the loss of a stage to its inputs; `beside` is called
        while collectives of tensor ranks run."""
        j, i = _numbers(instruction)
        self._make_whole(j)
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
            share = 1 if self.program.asynchronous else self.program.microbatches
            share *= self.program.batches
            gradients.append(torch.full_like(saved.loss, state.scale / share))
        if roots:
            more = instruction not in self._last
            with ExitStack() as stack:
                for axis in all_active():  # which sum some gradients in a stage's last backward
                    stack.enter_context(axis.expecting(more, beside))
                torch.autograd.backward(roots, gradients)
        for name in self.stages[j].receives:
            self._finish(state, (name, i))

    def _backward_input(self, state: StepState, instruction: Instruction) -> None:
        """A backward that leaves the products for weights to BACKWARD_WEIGHT."""
        with self._deferral.collect() as products:
            self._go_back(state, instruction)
        state.products[_numbers(instruction)] = products

    def _backward_weight(self, state: StepState, instruction: Instruction) -> None:
        """Compute the products that BACKWARD_INPUT left."""
        finish(state.products.pop(_numbers(instruction)))

    def _update(self, state: StepState, instruction: Instruction) -> None:
        """An optimizer step by the gradients of one micro-batch."""
        j, i = _numbers(instruction)
        assert self._versions is not None
        assert self.update is not None
        self._versions.update(self.stages[j], j, i, self.update)

    def _gradient(self, state: StepState, key: Key) -> torch.Tensor | None:
        """The gradient of a value: the sum over the ranks and stages that used it."""
        parts = [self._awaited(message) for message in state.gradient_receipts.pop(key, [])]
        if self._consumers[key[0]]:
            local = state.arrived.pop(key).grad
            parts += [] if local is None else [local]
        if not parts:
            return None
        return functools.reduce(torch.add, parts)

    def _finish(self, state: StepState, key: Key) -> None:
        """After each use of a value: at the last one its gradient is complete."""
        if any(key[0] in self.stages[j].gives for j in self._trained):
            return  # the backward of its stage, on this rank, takes the gradient from the leaf
        state.used[key] += 1
        if state.used[key] == len(self._consumers[key[0]]):
            leaf = state.arrived.pop(key)
            if self.program.values[key[0]].differentiable:
                gradient = leaf.grad
                state.results[key] = torch.zeros_like(leaf) if gradient is None else gradient
            del state.used[key]

    def _send(self, state: StepState, instruction: Instruction) -> None:
        """Start sending a value, or its gradient, and drop it when no other rank needs it."""
        key = key_of(instruction)
        assert instruction.peer is not None
        value = self.program.values[key[0]]
        self.channels.send(state.results[key], value, instruction.peer)
        peers = 1 if instruction.gradient else len(self._remote[key[0]])
        state.sent[key] += 1
        if state.sent[key] == peers:
            del state.results[key], state.sent[key]

    def _receive(self, state: StepState, instruction: Instruction) -> None:
        """Post a receive; the compute instruction that uses it waits for it."""
        key = key_of(instruction)
        assert instruction.peer is not None
        receipt = self.channels.receive(self.program.values[key[0]], instruction.peer)
        message = Awaited(instruction, receipt)
        if instruction.gradient:
            state.gradient_receipts.setdefault(key, []).append(message)
        else:
            state.receipts[key] = message

    def _unshard(self, state: StepState, instruction: Instruction) -> None:
        """Start making the parameters of a stage whole."""
        assert self.parts is not None
        self.parts.unshard(_numbers(instruction)[0])

    def _reshard(self, state: StepState, instruction: Instruction) -> None:
        """Free the parameters of a stage except for this data rank's rows."""
        assert self.parts is not None
        self.parts.reshard(_numbers(instruction)[0])

    def _make_whole(self, j: int) -> None:
        """Wait until the parameters of a stage are whole, if data ranks have pieces."""
        self._reduction.settle()
        self._await(self._whole.get(j, set()))

    def _await(self, names: Set[str]) -> None:
        """Wait until these parameters are whole, if data ranks hold or update rows of them."""
        pending = None if self.parts is None else self.parts.ready(names)
        if pending is not None:
            self._received(pending)

    def _waiting(self, stage: Stage) -> set[str]:
        """Make each layer of a stage wait for its parameters from other data ranks. Returns the
        names of the stage's tensors in no layer."""
        names = stage.tensor_names()
        for path in stage.scopes:
            awaited = {names.pop(place) for place in [*names] if place.startswith(f"{path}.")}
            layer = stage.get_submodule(path)
            layer.register_forward_pre_hook(lambda *_, awaited=awaited: self._await(awaited))
        return {*names.values()}

    def _reduce_gradients(self, state: StepState, instruction: Instruction) -> None:
        """Start summing gradients over ranks, if they are not being summed already."""
        self._reduction.start(instruction)

    def _share_loss(self, state: StepState, instruction: Instruction) -> None:
        """Give every rank the mean loss over the micro-batches, and over the data ranks."""
        assert instruction.peer is not None
        if self._passes is not None:
            self._passes.settle(state)
            if not self.program.is_near(instruction.peer):
                state.losses.clear()  # the head is on all ranks: the loss counts once
        if state.losses:
            mean = torch.stack([state.losses[i] for i in sorted(state.losses)]).mean()
        else:
            mean = torch.zeros((), dtype=self.program.loss, device=self.channels.device)
        if self.program.grid.copies == 1:
            self.channels.broadcast(mean, instruction.peer)
        else:
            apart = state.training and self.program.updates.separate
            mean /= self.program.tensor if apart else self.program.grid.copies
            (self.channels.total_of_step if apart else self.channels.total)(mean)
        state.mean = mean

    def _synchronize(self) -> None:
        """Wait for the device, so that measured times are those of the instruction."""
        if self.channels.device.type == "cuda":
            torch.cuda.synchronize(self.channels.device)


def _numbers(instruction: Instruction) -> tuple[int, int]:
    """Stage and micro-batch of a compute instruction."""
    assert instruction.stage is not None
    assert instruction.microbatch is not None
    return instruction.stage, instruction.microbatch
