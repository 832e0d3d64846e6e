"""The verbs of the vocabulary, which all ranks of a pipeline do together.

    EMBED ─► embedded ─► REDUCE ─► receipts ─► FORWARD of its user
    BACKWARD of its user ─► results ─► BROADCAST ─► gradients ─► EMBED_BACKWARD

    FORWARD ─► given ─► BROADCAST ─► x ─► S ─► parts ─► EXCHANGE ─► exchanges ─► loss
    BACKWARD ◄─ gradient_receipts ◄─ REDUCE ◄─ T  (vocab-2: S and the exchange)

Collectives get their turn where they stand and are waited for by what uses them first.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from parcompiler.instruction import Instruction, Kind
from parcompiler.runtime import head, lookup
from parcompiler.runtime.channels import Channels
from parcompiler.runtime.program import RankProgram
from parcompiler.runtime.state import Awaited, Key, State
from parcompiler.runtime.statistics import (
    Factors,
    Statistics,
    combined,
    factors,
    loss,
    stacked,
    undivided,
)
from parcompiler.runtime.turns import Turn
from parcompiler.runtime.vocabulary import Batch, Vocabulary

FUSED = "PARCOMPILER_FUSED"  # "1": what is done to logits is compiled into few kernels
ASKS_FIRST = frozenset({"naive", "interlaced"})  # for the largest logit, and normalizes by it


@dataclass
class Held:
    """The tensors of one step."""

    embedded: dict[Key, torch.Tensor] = field(default_factory=dict)  # own parts
    gradients: dict[Key, Turn] = field(default_factory=dict)  # of embedded values
    given: dict[int, torch.Tensor] = field(default_factory=dict)  # x, where it is made
    x: dict[int, Turn] = field(default_factory=dict)
    parts: dict[int, head.Part] = field(default_factory=dict)
    exchanges: dict[int, Turn] = field(default_factory=dict)
    factors: dict[int, Factors] = field(default_factory=dict)
    x_gradients: dict[int, torch.Tensor] = field(default_factory=dict)  # own parts
    returned: dict[int, Turn] = field(default_factory=dict)  # their sums
    room: head.Room = field(default_factory=head.Room)


class Spread:
    """The layers of the vocabulary on one rank, and what is in flight of them."""

    def __init__(
        self,
        program: RankProgram,
        vocabulary: Vocabulary,
        received: Callable[[Turn], torch.Tensor],
    ) -> None:
        self.vocabulary = vocabulary
        self._program = program
        self._received = received
        self._held = Held()
        fused = os.environ.get(FUSED) == "1"
        self._head = None if vocabulary.head is None else head.own_head(vocabulary, fused=fused)
        self._asks = vocabulary.method in ASKS_FIRST
        self._early = vocabulary.method == "vocab-2"  # the gradient of x does not wait for T
        self._share = 1.0  # of the gradients of the step
        self.verbs: dict[Kind, Callable[[State, Instruction], None]] = {
            Kind.EMBED: self._embed,
            Kind.EMBED_BACKWARD: self._embed_backward,
            Kind.BROADCAST: self._broadcast,
            Kind.REDUCE: self._reduce,
            Kind.EXCHANGE: self._exchange,
            Kind.S: self._s,
            Kind.NORMALIZE: self._normalize,
            Kind.T: self._t,
        }

    def begin(self, channels: Channels, state: State) -> None:
        """Begin a step: nothing is held."""
        self._channels = channels
        self._share = state.scale / (self._program.microbatches * self._program.data)
        self._held = Held()

    def give(self, key: Key, tensor: torch.Tensor) -> None:
        """Take what the head reads, of all that stages make."""
        if self._head is not None and key[0] == self._head.head.x:
            self._held.given[key[1]] = tensor

    def settle(self, state: State) -> None:
        """Wait for what only the losses need."""
        for i in [*self._held.exchanges]:
            self._factors(state, i)

    def end(self) -> None:
        """Keep nothing."""
        self._held = Held()

    # The embeddings.

    def _embed(self, state: State, instruction: Instruction) -> None:
        """Look up own rows."""
        name, i = key = _key(instruction)
        item = self.vocabulary.lookups[name]
        weight, own = self.vocabulary.tensor(item.weight), self.vocabulary.span(item.weight)
        words = self._words(name, state.microbatches[i])
        self._held.embedded[key] = lookup.embed(weight, words, own)

    def _embed_backward(self, state: State, instruction: Instruction) -> None:
        """Add the gradient of a lookup to own rows."""
        name, i = key = _key(instruction)
        item = self.vocabulary.lookups[name]
        weight, own = self.vocabulary.tensor(item.weight), self.vocabulary.span(item.weight)
        words = self._words(name, state.microbatches[i])
        gradient = self._received(self._held.gradients.pop(key))
        with torch.no_grad():
            lookup.embed_backward(weight, words, own, gradient, item.padding_idx)

    def _words(self, name: str, batch: Batch) -> torch.Tensor:
        """The indices of a lookup."""
        item = self.vocabulary.lookups[name]
        return self.vocabulary.computed(item.indices, item.inputs, batch)

    # What goes between ranks.

    def _broadcast(self, state: State, instruction: Instruction) -> None:
        """Start giving every rank what one has: x, or the gradient of an embedded value."""
        name, i = key = _key(instruction)
        assert instruction.peer is not None
        if instruction.gradient:
            own = state.results.pop(key, None)
        else:
            own = self._held.given.pop(i, None)
        receipt = self._channels.spread(own, self._program.values[name], instruction.peer)
        if instruction.gradient:
            self._held.gradients[key] = receipt
        else:
            self._held.x[i] = receipt

    def _reduce(self, state: State, instruction: Instruction) -> None:
        """Start adding up an embedded value, or the gradient of x, where it is used."""
        name, i = key = _key(instruction)
        assert instruction.peer is not None
        shape = self._program.values[name].shape
        own = self._x_gradient(i) if instruction.gradient else self._embedded(key)
        turn = self._channels.collect(lambda: own().view(shape), instruction.peer)
        if instruction.gradient and i in self._held.parts:
            self._held.returned[i] = turn  # before T
        if not self._program.is_near(instruction.peer):
            return
        if instruction.gradient:
            state.gradient_receipts.setdefault(key, []).append(Awaited(instruction, turn))
        else:
            state.receipts[key] = Awaited(instruction, turn)

    def _exchange(self, state: State, instruction: Instruction) -> None:
        """Start telling all ranks own numbers of each row."""
        what, i = _key(instruction)
        part = self._held.parts[i]
        if what == "maximum":
            turn = self._channels.largest(part.largest.clone())
        else:
            assert part.own is not None
            own = stacked(part.own)
            turn = (
                self._channels.summed(own[1:].contiguous())
                if what == "sum"
                else self._channels.gathered(own)
            )
        self._held.exchanges[i] = turn

    # The head.

    def _s(self, state: State, instruction: Instruction) -> None:
        """Own logits, and their softmax by itself."""
        i = _microbatch(instruction)
        own, held = self._own, self._held
        x = self._received(held.x.pop(i)).flatten(0, -2)
        labels = head.labels_of(own, self._targets(state.microbatches[i]))
        part = held.parts[i] = head.products(own, x, labels, held.room)
        if self._asks:
            head.find_largest(own, part)
        else:
            head.normalize(own, part)
            if self._early and self._wants_x(state):
                head.weigh(own, part)
            self._thin(state, part)

    def _normalize(self, state: State, instruction: Instruction) -> None:
        """Powers of own logits by the largest of all."""
        i = _microbatch(instruction)
        part = self._held.parts[i]
        head.normalize(self._own, part, self._received(self._held.exchanges.pop(i)))
        self._thin(state, part)

    def _t(self, state: State, instruction: Instruction) -> None:
        """Gradients of own rows, and with vocab-1 own part of the gradient of x."""
        i = _microbatch(instruction)
        found, held = self._factors(state, i), self._held
        del held.factors[i]
        part = held.parts.pop(i)
        if self._wants_x(state) and not self._early:
            head.weigh(self._own, part)
        returned = held.returned.pop(i, None)
        if returned is None and part.product is not None:
            held.x_gradients[i] = head.input_gradient(self._own, part, found)
        if found.everyone is not None and returned is not None:
            self._received(returned)  # it reads what T changes
        head.weight_gradient(self._own, part, found)
        held.room.give(part.powers)

    def _thin(self, state: State, part: head.Part) -> None:
        """In an evaluation nobody comes back for the powers."""
        if not state.training:
            self._held.room.give(part.powers)
            part.powers = part.powers[:0]

    def _embedded(self, key: Key) -> Callable[[], torch.Tensor]:
        """Own rows of a lookup."""
        rows = self._held.embedded.pop(key)
        return lambda: rows

    def _x_gradient(self, i: int) -> Callable[[], torch.Tensor]:
        """Own part of the gradient of x; under vocab-2 once the statistics are there."""
        held = self._held
        if i in held.x_gradients:
            gradient = held.x_gradients.pop(i)
            return lambda: gradient
        part, exchange = held.parts[i], held.exchanges[i]
        product = part.product  # on a GPU it is read when `part` has let go of it

        def weighed() -> torch.Tensor:
            found, _ = self._told(part, exchange.wait())
            assert product is part.product
            return head.input_gradient(self._own, part, found)

        return weighed

    def _factors(self, state: State, i: int) -> Factors:
        """What the exchanges say of the gradient of the logits, and of the loss."""
        held = self._held
        if i not in held.factors:
            exchanged = self._received(held.exchanges.pop(i))
            held.factors[i], lost = self._told(held.parts[i], exchanged)
            state.losses[i] = lost.to(self._program.loss)
        return held.factors[i]

    def _told(self, part: head.Part, exchanged: torch.Tensor) -> tuple[Factors, torch.Tensor]:
        """The factors of own part by what ranks have told each other, and the loss."""
        item, own = self._own, part.own
        assert own is not None
        if self._asks:
            whole, own = Statistics(own.largest, *exchanged), undivided(own)
        else:
            whole = combined(exchanged)
        lost = loss(item.head, item.classes, part.labels, whole)
        return factors(item.head, item.classes, part.labels, own, whole, self._share), lost

    def _targets(self, batch: Batch) -> torch.Tensor:
        """The label of each row."""
        item = self._own.head
        return self.vocabulary.computed(item.targets, item.inputs, batch).flatten()

    def _wants_x(self, state: State) -> bool:
        """Whether the gradient of x is asked for."""
        return state.training and self._program.values[self._own.head.x].differentiable

    @property
    def _own(self) -> head.Own:
        """The head."""
        assert self._head is not None
        return self._head

    def check(self, batch: Batch) -> None:
        """Refuse words that are not in the tables, before anything is sent."""
        names = self.vocabulary.names
        for name, item in self.vocabulary.lookups.items():
            what = f"the words that {names[item.weight]!r} is asked for"
            lookup.check(self._words(name, batch), self.vocabulary.size[item.weight], what)
        if self._head is not None:
            own = self._head
            what = f"the labels of {names[own.head.weight]!r}"
            lookup.check(self._targets(batch), own.classes, what, own.head.ignore_index)


def _key(instruction: Instruction) -> Key:
    """Value and micro-batch of an instruction."""
    assert instruction.value is not None
    return instruction.value, _microbatch(instruction)


def _microbatch(instruction: Instruction) -> int:
    """Its micro-batch."""
    assert instruction.microbatch is not None
    return instruction.microbatch
