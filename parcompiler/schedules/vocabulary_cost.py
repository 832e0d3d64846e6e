"""What the layers of the vocabulary cost each rank, and the collectives between all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from parcompiler.instruction import Kind


@dataclass(frozen=True, slots=True)
class VocabularyCost:
    """Seconds and bytes of one micro-batch on each rank; all ranks have equal shares.

    `s` to `embed_backward` are seconds of compute. `broadcast` (of x), `exchange` (once) and
    `reduce` (of the gradient of x) are seconds of the collectives of the head; `embed_reduce` and
    `embed_broadcast` those of all embeddings and of their gradients. `resident` are bytes that a
    rank holds all the time, `saved` from the begin of S to the end of T, without x, and `more`
    while the softmax is computed: in S, or in NORMALIZE where there is one; `update` comes on top
    of `resident` in the optimizer's step. `source` is the stage that gives x, `users` has for each
    embedding the stage that takes it. x has `x_bytes`, all that is embedded `embedded_bytes`.
    `method` says what the last backward waits for.
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
    more: int = 0
    update: int = 0
    source: int = -1
    method: str = "vocab-2"
    users: tuple[int, ...] = ()
    x_bytes: int = 0
    embedded_bytes: int = 0

    @property
    def softmax(self) -> Kind:
        """The pass that computes the softmax."""
        return Kind.NORMALIZE if self.method in ("naive", "interlaced") else Kind.S

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
