"""What stands in a sharded graph for the functions of `parcompiler.runtime`, and local sizes.

The graph-level half does not know the runtime: it knows the names of its functions, what they send,
and the shapes of what they return.

>>> call = RuntimeCall("all_reduce")
>>> call, call.__name__
(runtime.all_reduce, 'all_reduce')
>>> size = Piece(50257, 4)
>>> size + 0, size
(12565, Piece(50257))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from parcompiler.pieces import Shard, piece
from parcompiler.spmd.conversions import Action, conversion, moved
from parcompiler.spmd.placement import Placement, R, shard_of

Shape = tuple[int, ...]
Said = tuple[tuple[Action, float], ...]  # actions, each with the bytes of the whole it is about


class Piece(int):
    """A size that differs between ranks: here that of rank 0, which has the largest piece."""

    whole: int

    def __new__(cls, whole: int, n: int) -> Piece:
        """The size of the first of `n` pieces."""
        made = super().__new__(cls, piece(whole, n, 0).size)
        made.whole = whole
        return made

    def __repr__(self) -> str:
        """As in the text of templates, which is the same for all ranks."""
        return f"Piece({self.whole})"


def local_size(whole: int, n: int) -> int:
    """How many of `whole` elements a rank holds: a number, or one that ranks find themselves."""
    return whole // n if whole % n == 0 else Piece(whole, n)


@dataclass(frozen=True)
class RuntimeCall:
    """The target of a node that calls the function `name` of the runtime.

    `shares` says that the result may lie in the memory of its first operand. `likeness` computes
    something of the same shapes and about the same cost on one rank.
    """

    name: str
    shares: bool = False
    likeness: Callable[..., Any] | None = field(default=None, compare=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What a rank computes, as far as it does so alone."""
        if self.likeness is None:
            message = f"{self!r} runs on a rank"
            raise NotImplementedError(message)
        return self.likeness(*args, **kwargs)

    def __repr__(self) -> str:
        """As emitted code calls it."""
        return f"runtime.{self.name}"

    @property
    def __name__(self) -> str:
        """What torch.fx calls the node."""
        return self.name


@dataclass(frozen=True, slots=True)
class Exchange:
    """What the ranks of an axis of `n` tell each other in a node: its `meta["exchange"]`."""

    n: int
    forward: Said = ()
    backward: Said = ()

    def sent_by(self, action: Action, nbytes: float) -> float:
        """Bytes that each rank sends in one action."""
        return moved(action, nbytes, self.n)

    @property
    def sent(self) -> tuple[float, float]:
        """Bytes that each rank sends, forward and backward."""
        forward, backward = (
            sum(moved(action, nbytes, self.n) for action, nbytes in said)
            for said in (self.forward, self.backward)
        )
        return forward, backward


TALKING = frozenset({"all-reduce", "all-gather", "reduce-scatter", "all-to-all"})


def is_conversion(node: fx.Node) -> bool:
    """Whether a node only turns a value from one placement to another."""
    return (
        isinstance(node.target, RuntimeCall)
        and node.target.likeness is None
        and ("exchange" in node.meta)
    )


def converting(
    source: Placement, target: Placement, shape: Shape, nbytes: int, n: int, *, carries: bool
) -> tuple[RuntimeCall, tuple[Any, ...], Mapping[str, Any], Exchange] | None:
    """The call that converts a value of `shape` (whole); None where nothing needs to be done.

    With it its arguments behind the value, and what is exchanged. `carries` says that a gradient
    comes back.
    """
    row = conversion(source, target, differentiable=carries)
    assert row is not None, f"there is no conversion from {source} to {target}"
    if source == target or (not carries and row.forward == "nothing"):
        return None
    name, args = _called(source, target, shape, n)
    partial = carries and R in (source, target) and name in ("take", "all_gather", "all_reduce")
    call = RuntimeCall(name, shares=name in ("fan_out", "take"))
    forward: Said = ((row.forward, float(nbytes)),)
    backward: Said = ((row.backward, float(nbytes)),)
    exchange = Exchange(
        n,
        forward if row.forward in TALKING else (),
        backward if carries and row.backward in TALKING else (),
    )
    return call, args, {"partial": True} if partial else {}, exchange


def _called(
    source: Placement, target: Placement, shape: Shape, n: int
) -> tuple[str, tuple[Any, ...]]:
    """The function of the runtime, and its arguments without keywords."""
    if source.kind == "S" and target.kind == "S":
        start, end = shard_of(source, shape[source.dim]), shard_of(target, shape[target.dim])
        dims = (source.dim, target.dim)
        return "all_to_all", _trimmed(*dims, _sizes(start, n, known=False), _sizes(end, n))
    if source.kind == "S":
        shard = shard_of(source, shape[source.dim])
        return "all_gather", _trimmed(source.dim, _sizes(shard, n, known=False))
    if target.kind == "S":
        shard = shard_of(target, shape[target.dim])
        name = "reduce_scatter" if source.kind == "P" else "take"
        return name, _trimmed(target.dim, _sizes(shard, n))
    if target.kind == "P":
        return "first", ()
    return ("all_reduce" if source.kind == "P" else "fan_out"), ()


def _trimmed(*args: Any) -> tuple[Any, ...]:
    """Without the None at the end."""
    while args and args[-1] is None:
        args = args[:-1]
    return args


def _sizes(shard: Shard, n: int, *, known: bool = True) -> int | tuple[int, ...] | None:
    """What must be said of the sizes along a dimension; `known` is that of the whole."""
    if len(shard.sizes) > 1:
        return shard.sizes
    return None if known or shard.even(n) else shard.whole
