"""Costs of the tasks of a step: seconds and bytes of stages, of messages, of the vocabulary.

The first backward of a stage allocates the gradients of its parameters; later micro-batches add to
them.

    F0 F1 B0 F2 B1 ..       [1] B0 makes all gradients
    F0 F1 I0 F2 I1 W0 ..    [2] I0 makes those that linear layers do not leave to W, W0 the rest

>>> cost = StageCost(1.0, 2.0, resident=9, saved=10, first=First(gradients=7, backward_more=2))
>>> made = Made()
>>> [made.bytes(0, cost, kind) for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD)]
[(10, 0), (2, -5), (0, -10)]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from parcompiler.instruction import ASKS_FIRST, Kind


@dataclass(frozen=True, slots=True)
class First:
    """The first backward of a step on a stage: it leaves `gradients` bytes, `later` of them by its
    second part where it has two. As they are made one by one, `backward_more`, `input_more` and
    `weight_more` replace those of `StageCost` in the first backward."""

    gradients: int = 0
    later: int = 0
    backward_more: int = 0
    input_more: int = 0
    weight_more: int = 0


@dataclass(frozen=True, slots=True)
class StageCost:
    """Costs of one micro-batch on one stage.

    `forward` and `backward` are seconds of compute, `weight` the part of `backward` that can be
    left for later (products for weight gradients). Where the two parts of a backward run apart, the
    first takes `hidden` seconds more, as no such product then runs beside a collective. `saved` are
    bytes kept from the start of FORWARD to the end of BACKWARD of one micro-batch, without received
    tensors; where the backward has two parts, to the end of the first, and then `left` bytes (None:
    as many) to the end of the second. Bytes alive only during one instruction come on top:
    `forward_more` during FORWARD; `backward_more`, `input_more` and `weight_more` during BACKWARD
    and its two parts.

    `resident` are bytes of parameters, gradients, optimizer states and constants; the gradients
    among them exist from the `first` backward of a step on. `update` bytes (shards of summed
    gradients, and the copy of a bucket) are added in the optimizer's step, which takes `step`
    seconds for the stage's parameters. `gathered` are bytes of the whole parameters, from the start
    of their gather until they are in parts again. `ready` are seconds after the optimizer's step
    before which the first forward may not start, so that the parameters that it reads are gathered
    in time. `host` are bytes in the host's memory for each micro-batch in flight. A stage that is
    not `trained` has no backward, and frees what it saves after its forward.
    """

    forward: float
    backward: float
    resident: int
    saved: int
    weight: float = 0.0
    hidden: float = 0.0
    left: int | None = None
    forward_more: int = 0
    backward_more: int = 0
    input_more: int = 0
    weight_more: int = 0
    update: int = 0
    first: First = field(default_factory=First)
    trained: bool = True
    gathered: int = 0
    step: float = 0.0
    ready: float = 0.0
    host: int = 0

    @property
    def early(self) -> int:
        """Bytes held before the first backward of a step, besides those of micro-batches."""
        return self.resident - self.first.gradients

    def bytes(self, kind: Kind) -> tuple[int, int]:
        """Bytes that one compute instruction adds at its start, and adds (negative: frees) at its
        end, without gradients that stay (see `Made`).

        >>> cost = StageCost(1.0, 2.0, resident=0, saved=10, left=4, input_more=3)
        >>> [cost.bytes(kind) for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)]
        [(10, 0), (3, -9), (0, -4)]
        """
        left = self.saved if self.left is None else self.left
        match kind:
            case Kind.FORWARD:
                return self.saved + self.forward_more, -self.forward_more
            case Kind.BACKWARD_INPUT:
                return self.input_more, left - self.saved - self.input_more
            case Kind.BACKWARD_WEIGHT:
                return self.weight_more, -left - self.weight_more
        return self.backward_more, -self.saved - self.backward_more

    def seconds(self, kind: Kind) -> float:
        """Seconds of one compute instruction."""
        match kind:
            case Kind.FORWARD:
                return self.forward
            case Kind.BACKWARD_INPUT:
                return self.backward - self.weight + self.hidden
            case Kind.BACKWARD_WEIGHT:
                return self.weight
        return self.backward


@dataclass(frozen=True, slots=True)
class Message:
    """A value of `nbytes` that stage `source` gives to the stages `targets`.

    It occupies a link for `seconds`, its gradient for `gradient` seconds (None: no gradient).
    """

    source: int
    targets: tuple[int, ...]
    seconds: float
    gradient: float | None
    nbytes: int


class Made:
    """Gradients allocated so far; `bytes` must be called for all compute instructions in order."""

    def __init__(self) -> None:
        self.of: dict[int, int] = {}  # bytes by stage
        self.complete: set[int] = set()  # stages whose gradients are all allocated

    def bytes(self, stage: int, cost: StageCost, kind: Kind) -> tuple[int, int]:
        """Bytes that an instruction of a stage adds at its start, and at its end."""
        taken, freed = cost.bytes(kind)
        if kind is Kind.FORWARD or stage in self.complete:
            return taken, freed
        first = cost.first
        match kind:
            case Kind.BACKWARD if stage not in self.of:
                more, new = first.backward_more, first.gradients
            case Kind.BACKWARD_INPUT if stage not in self.of:
                more, new = first.input_more, first.gradients - first.later
            case Kind.BACKWARD_WEIGHT:
                more, new = first.weight_more, first.later
            case Kind.BACKWARD:  # after a first part
                more, new = taken + first.later, first.later
            case _:
                return taken, freed
        self.of[stage] = self.of.get(stage, 0) + new
        if kind is not Kind.BACKWARD_INPUT or not first.later:
            self.complete.add(stage)
        return more, taken + freed + new - more


@dataclass(frozen=True, slots=True)
class VocabularyCost:
    """Costs of a vocabulary on all ranks, for one micro-batch on each rank, in equal shares.

    `s` to `embed_backward` are seconds of compute. `broadcast` (of x), `exchange` (once) and
    `reduce` (of the gradient of x) are seconds of the collectives of the head; `embed_reduce` and
    `embed_broadcast` those of all embeddings and of their gradients. `resident` are bytes held all
    the time, `saved` from the start of S to the end of T, without x, and `more` while the softmax
    is computed: in S, or in NORMALIZE where there is one. Of `saved`, later micro-batches reuse the
    memory of `reused` bytes, which stays to the end of the step. The optimizer's step takes `step`
    seconds for its parameters. `source` is the stage that gives x, `users` has for each embedding
    the stage that reads it. x has `x_bytes`, all embedded values together `embedded_bytes`.
    `method` decides what the last backward waits for.
    """

    s: float = 0.0
    normalize: float = 0.0
    t: float = 0.0
    embed: float = 0.0
    embed_backward: float = 0.0
    broadcast: float = 0.0
    exchange: float = 0.0
    reduce: float = 0.0
    embed_reduce: float = 0.0
    embed_broadcast: float = 0.0
    resident: int = 0
    saved: int = 0
    reused: int = 0
    more: int = 0
    step: float = 0.0
    source: int = -1
    method: str = "vocab-2"
    users: tuple[int, ...] = ()
    x_bytes: int = 0
    embedded_bytes: int = 0

    @property
    def softmax(self) -> Kind:
        """The pass that computes the softmax."""
        return Kind.NORMALIZE if self.method in ASKS_FIRST else Kind.S

    @property
    def compute(self) -> float:
        """Seconds that a rank computes for one micro-batch."""
        return self.s + self.normalize + self.t + self.embed + self.embed_backward

    def seconds(self, kind: Kind) -> float:
        """Seconds of one compute instruction, for all embeddings together."""
        match kind:
            case Kind.S:
                return self.s
            case Kind.NORMALIZE:
                return self.normalize
            case Kind.T:
                return self.t
            case Kind.EMBED:
                return self.embed
            case Kind.EMBED_BACKWARD:
                return self.embed_backward
        raise AssertionError(kind)

    def collective(self, kind: Kind, *, embedded: bool) -> float:
        """Seconds of one collective, of the head or of all embeddings together."""
        if embedded:
            return self.embed_reduce if kind is Kind.REDUCE else self.embed_broadcast
        if kind is Kind.EXCHANGE:
            return self.exchange
        return self.broadcast if kind is Kind.BROADCAST else self.reduce


def optimizer_seconds(
    placement: Sequence[int], costs: Sequence[StageCost], vocabulary: VocabularyCost | None
) -> list[float]:
    """Seconds of the optimizer's step on each rank; stage j is on rank `placement[j]`.

    It begins when all sums of gradients have ended: norms and checks of them wait for all ranks.
    """
    shared = 0.0 if vocabulary is None else vocabulary.step
    seconds = [shared] * (1 + max(placement))
    for rank, cost in zip(placement, costs, strict=True):
        seconds[rank] += cost.step if cost.trained else 0.0
    return seconds
