"""The passes of the vocabulary, which all ranks of a pipeline do together.

    EMBED ─► embedded ─► REDUCE ─► receipts ─► FORWARD of its user
    BACKWARD of its user ─► results ─► BROADCAST ─► gradients ─► EMBED_BACKWARD

    FORWARD ─► x_made ─► BROADCAST ─► x ─► S ─► parts ─► EXCHANGE ─► exchanges ─► loss
    BACKWARD ◄─ gradient_receipts ◄─ REDUCE ◄─ T  (vocab-2: S and the exchange)

Collectives enter a queue in the order of the list; their first user waits for them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from parcompiler.instruction import ASKS_FIRST, Instruction, Kind
from parcompiler.pieces import Span
from parcompiler.runtime import head, lookup
from parcompiler.runtime.channels import Channels
from parcompiler.runtime.program import RankProgram
from parcompiler.runtime.state import Awaited, Key, StepState, key_of, microbatch_of
from parcompiler.runtime.vocabulary import Batch, Vocabulary

FUSED = "PARCOMPILER_FUSED"  # "1": compile the operations on logits into few kernels


@dataclass
class LiveTensors:
    """The live tensors of one step; "parts" are this rank's summands."""

    embedded: dict[Key, torch.Tensor] = field(default_factory=dict)  # parts
    gradients: dict[Key, Awaited] = field(default_factory=dict)  # of embedded values
    x_made: dict[int, torch.Tensor] = field(default_factory=dict)  # by a stage of this rank
    x: dict[int, Awaited] = field(default_factory=dict)
    logits: dict[int, head.HeadLogits] = field(default_factory=dict)
    exchanges: dict[int, Awaited] = field(default_factory=dict)
    factors: dict[int, head.Factors] = field(default_factory=dict)
    x_gradients: dict[int, torch.Tensor] = field(default_factory=dict)  # parts
    x_sums: dict[int, Awaited] = field(default_factory=dict)  # of these parts
    matrices: head.MatrixPool = field(default_factory=head.MatrixPool)


class VocabularyPasses:
    """The layers of the vocabulary on one rank, and their tensors in flight."""

    def __init__(
        self,
        program: RankProgram,
        vocabulary: Vocabulary,
        awaited: Callable[[Awaited], torch.Tensor],
        *,
        fused: bool = False,
    ) -> None:
        self.vocabulary = vocabulary
        self._program = program
        self._awaited = awaited
        self._live = LiveTensors()
        fused = fused or os.environ.get(FUSED) == "1"
        self._head = None if vocabulary.head is None else head.rows_of_head(vocabulary, fused=fused)
        self._asks = vocabulary.method in ASKS_FIRST
        self._early = vocabulary.method == "vocab-2"  # the gradient of x does not wait for T
        self._share = 1.0  # of the gradients of the step
        self.verbs: dict[Kind, Callable[[StepState, Instruction], None]] = {
            Kind.EMBED: self._embed,
            Kind.EMBED_BACKWARD: self._embed_backward,
            Kind.BROADCAST: self._broadcast,
            Kind.REDUCE: self._reduce,
            Kind.EXCHANGE: self._exchange,
            Kind.S: self._s,
            Kind.NORMALIZE: self._normalize,
            Kind.T: self._t,
        }

    def begin(self, channels: Channels, state: StepState) -> None:
        """Begin a step without tensors."""
        self._channels = channels
        self._share = state.scale / (self._program.microbatches * self._program.batches)
        self._live = LiveTensors()

    def take(self, key: Key, tensor: torch.Tensor) -> None:
        """Take the input of the head; other values of stages are ignored."""
        if self._head is not None and key[0] == self._head.head.x:
            self._live.x_made[key[1]] = tensor

    def settle(self, state: StepState) -> None:
        """Wait for the exchanges that only the losses need."""
        for i in [*self._live.exchanges]:
            self._factors(state, i)

    def end(self) -> None:
        """Drop the tensors of the step."""
        self._live = LiveTensors()

    # The embeddings.

    def _embed(self, state: StepState, instruction: Instruction) -> None:
        """Look up the rows of this rank."""
        name, i = key = key_of(instruction)
        weight, span = self._table(name)
        words = self._words(name, state.microbatches[i])
        self._live.embedded[key] = lookup.embed(weight, words, span)

    def _embed_backward(self, state: StepState, instruction: Instruction) -> None:
        """Add the gradient of a lookup to the rows of this rank."""
        name, i = key = key_of(instruction)
        weight, span = self._table(name)
        words = self._words(name, state.microbatches[i])
        gradient = self._awaited(self._live.gradients.pop(key))
        padding = self.vocabulary.lookups[name].padding_idx
        with torch.no_grad():
            lookup.embed_backward(weight, words, span, gradient, padding)

    def _table(self, name: str) -> tuple[torch.Tensor, Span]:
        """The table of a lookup on this rank, and the rows that it has."""
        attribute = self.vocabulary.lookups[name].weight
        return self.vocabulary.tensor(attribute), self.vocabulary.span(attribute)

    def _words(self, name: str, batch: Batch) -> torch.Tensor:
        """The indices of a lookup."""
        spec = self.vocabulary.lookups[name]
        return self.vocabulary.computed(spec.indices, spec.inputs, batch)

    # Messages between ranks.

    def _broadcast(self, state: StepState, instruction: Instruction) -> None:
        """Start broadcasting a tensor to every rank: x, or the gradient of an embedded value."""
        name, i = key = key_of(instruction)
        assert instruction.peer is not None
        value, live = self._program.values[name], self._live
        if instruction.gradient:
            gradient = state.results.pop(key, None)
            pending = self._channels.broadcast_value(gradient, value, instruction.peer)
            live.gradients[key] = Awaited(instruction, pending)
        else:
            x = live.x_made.pop(i, None)
            pending = self._channels.broadcast_value(x, value, instruction.peer)
            live.x[i] = Awaited(instruction, pending)

    def _reduce(self, state: StepState, instruction: Instruction) -> None:
        """Start summing an embedded value, or the gradient of x, on the rank that uses it."""
        name, i = key = key_of(instruction)
        assert instruction.peer is not None
        shape = self._program.values[name].shape
        summand = self._x_gradient(i) if instruction.gradient else self._embedded(key)
        pending = self._channels.reduce_value(lambda: summand().view(shape), instruction.peer)
        message = Awaited(instruction, pending)
        if instruction.gradient and i in self._live.logits:
            self._live.x_sums[i] = message  # before T
        if not self._program.is_near(instruction.peer):
            return
        if instruction.gradient:
            state.gradient_receipts.setdefault(key, []).append(message)
        else:
            state.receipts[key] = message

    def _exchange(self, state: StepState, instruction: Instruction) -> None:
        """Start exchanging the statistics of all ranks."""
        kind, i = key_of(instruction)
        logits = self._live.logits[i]
        if kind == "maximum":
            pending = self._channels.largest(logits.largest.clone())
        else:
            assert logits.statistics is not None
            numbers = head.stacked(logits.statistics)
            if kind == "sum":
                pending = self._channels.summed(numbers[1:].contiguous())
            else:
                pending = self._channels.gathered(numbers)
        self._live.exchanges[i] = Awaited(instruction, pending)

    # The head.

    def _s(self, state: StepState, instruction: Instruction) -> None:
        """The logits of this rank, and their local softmax."""
        i = microbatch_of(instruction)
        rows, live = self._rows, self._live
        x = self._awaited(live.x.pop(i)).flatten(0, -2)
        labels = head.labels_of(rows, self._targets(state.microbatches[i]))
        logits = live.logits[i] = head.products(rows, x, labels, live.matrices)
        if self._asks:
            head.find_largest(rows, logits)
        else:
            head.normalize(rows, logits)
            if self._early and self._wants_x(state):
                head.weigh(rows, logits)
            self._drop_powers_in_evaluation(state, logits)

    def _normalize(self, state: StepState, instruction: Instruction) -> None:
        """Powers of the logits of this rank, with the largest logit of all ranks."""
        i = microbatch_of(instruction)
        logits = self._live.logits[i]
        head.normalize(self._rows, logits, self._awaited(self._live.exchanges.pop(i)))
        self._drop_powers_in_evaluation(state, logits)

    def _t(self, state: StepState, instruction: Instruction) -> None:
        """Gradients of the rows of this rank, and with vocab-1 its part of the gradient of x."""
        i = microbatch_of(instruction)
        factors, live = self._factors(state, i), self._live
        del live.factors[i]
        logits = live.logits.pop(i)
        if self._wants_x(state) and not self._early:
            head.weigh(self._rows, logits)
        x_sum = live.x_sums.pop(i, None)
        if x_sum is None and logits.product is not None:
            live.x_gradients[i] = head.input_gradient(self._rows, logits, factors)
        if factors.everyone is not None and x_sum is not None:
            self._awaited(x_sum)  # that sum reads tensors that T changes
        head.weight_gradient(self._rows, logits, factors)
        live.matrices.give(logits.powers)

    def _drop_powers_in_evaluation(self, state: StepState, logits: head.HeadLogits) -> None:
        """No backward reads the powers in an evaluation."""
        if not state.training:
            self._live.matrices.give(logits.powers)
            logits.powers = logits.powers[:0]

    def _embedded(self, key: Key) -> Callable[[], torch.Tensor]:
        """This rank's part of a lookup."""
        rows = self._live.embedded.pop(key)
        return lambda: rows

    def _x_gradient(self, i: int) -> Callable[[], torch.Tensor]:
        """This rank's part of the gradient of x; with vocab-2 once the statistics have arrived."""
        live = self._live
        if i in live.x_gradients:
            gradient = live.x_gradients.pop(i)
            return lambda: gradient
        logits, exchange = live.logits[i], live.exchanges[i]
        product = logits.product  # a GPU reads it after `logits` has dropped it

        def weighed() -> torch.Tensor:
            factors, _ = self._factors_and_loss(logits, exchange.pending.wait())
            assert product is logits.product
            return head.input_gradient(self._rows, logits, factors)

        return weighed

    def _factors(self, state: StepState, i: int) -> head.Factors:
        """The factors of the gradient of the logits; notes the loss too."""
        live = self._live
        if i not in live.factors:
            exchanged = self._awaited(live.exchanges.pop(i))
            live.factors[i], loss = self._factors_and_loss(live.logits[i], exchanged)
            if self._rows.head.axis:  # the mean over all ranks is then the sum over context ranks
                loss = loss * self._program.context
            state.losses[i] = loss.to(self._program.loss)
        return live.factors[i]

    def _factors_and_loss(
        self, logits: head.HeadLogits, exchanged: torch.Tensor
    ) -> tuple[head.Factors, torch.Tensor]:
        """The factors of this rank's part and the loss, by the statistics of all ranks."""
        rows, part = self._rows, logits.statistics
        assert part is not None
        if self._asks:
            whole, part = head.Statistics(part.largest, *exchanged), head.undivided(part)
        else:
            whole = head.combined(exchanged)
        loss = head.loss(rows.head, rows.classes, logits.labels, whole)
        share = self._share
        return head.factors(rows.head, rows.classes, logits.labels, part, whole, share), loss

    def _targets(self, batch: Batch) -> torch.Tensor:
        """The label of each row."""
        spec = self._rows.head
        return self.vocabulary.computed(spec.targets, spec.inputs, batch).flatten()

    def _wants_x(self, state: StepState) -> bool:
        """Whether the gradient of x is used."""
        return state.training and self._program.values[self._rows.head.x].differentiable

    @property
    def _rows(self) -> head.HeadRows:
        """The rows of the head on this rank."""
        assert self._head is not None
        return self._head

    def check(self, batch: Batch) -> None:
        """Refuse words that are not in the tables, before anything is sent."""
        names = self.vocabulary.names
        for name, spec in self.vocabulary.lookups.items():
            subject = f"the words that {names[spec.weight]!r} is asked for"
            lookup.check(self._words(name, batch), self.vocabulary.size[spec.weight], subject)
        if self._head is not None:
            rows = self._head
            subject = f"the labels of {names[rows.head.weight]!r}"
            lookup.check(self._targets(batch), rows.classes, subject, rows.head.ignore_index)
