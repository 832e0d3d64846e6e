"""Nodes of a sharded graph that call functions of `parcompiler.runtime`, and local sizes.

The compiler does not import the runtime: it knows the names of its functions, the bytes they send,
and the shapes they return.

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
from functools import lru_cache
from typing import Any

from torch import fx

from parcompiler.pieces import Shard, piece
from parcompiler.spmd.conversions import BYTES, Action, conversion
from parcompiler.spmd.placement import I, Placement, R, shard_of

Shape = tuple[int, ...]
Actions = tuple[tuple[Action, float], ...]  # each with the bytes of the whole value


class Piece(int):
    """A size that differs between ranks: here that of rank 0, which has the largest piece."""

    whole: int

    def __new__(cls, whole: int, n: int) -> Piece:
        """The size of the first of `n` pieces."""
        made = super().__new__(cls, piece(whole, n, 0).size)
        made.whole = whole
        return made

    def __repr__(self) -> str:
        """The text in templates, equal on all ranks."""
        return f"Piece({self.whole})"


def local_size(whole: int, n: int) -> int:
    """The number of `whole` elements on a rank: equal on all, or a `Piece`."""
    return whole // n if whole % n == 0 else Piece(whole, n)


@dataclass(frozen=True)
class RuntimeCall:
    """The target of a node that calls the function `name` of the runtime.

    `shares` says that the result may lie in the memory of its first operand. `likeness` computes a
    result of the same shape at about the same cost without other ranks.
    """

    name: str
    shares: bool = False
    likeness: Callable[..., Any] | None = field(default=None, compare=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The likeness, for calls that have one."""
        if self.likeness is None:
            message = f"{self!r} runs on a rank"
            raise NotImplementedError(message)
        return self.likeness(*args, **{k: v for k, v in kwargs.items() if k != "axis"})

    def __repr__(self) -> str:
        """The name in emitted code."""
        return f"runtime.{self.name}"

    @property
    def __name__(self) -> str:
        """The name that torch.fx gives the node."""
        return self.name


@dataclass(frozen=True, slots=True)
class NodeCollectives:
    """Collectives of a node among the `n` ranks of an axis: its `meta["exchange"]`.

    The numbers of neighbours among these ranks differ by `apart`. Collectives `within` a call run
    beside its kernels: one beside each step but one.
    """

    n: int
    forward: Actions = ()
    backward: Actions = ()
    apart: int = 1
    axis: str = "tensor"
    within: bool = False


def is_conversion(node: fx.Node) -> bool:
    """Whether a node only turns a value from one placement to another."""
    return (
        isinstance(node.target, RuntimeCall)
        and node.target.likeness is None
        and ("exchange" in node.meta)
    )


def is_same(source: Placement, target: Placement, *, carries: bool) -> bool:
    """Whether nothing needs to be done to convert a value; `carries` says that a gradient comes
    back."""
    row = conversion(source, target, differentiable=carries, ending=True)
    assert row is not None, f"there is no conversion from {source} to {target}"
    return source == target or (not carries and row.forward == "nothing")


@lru_cache(maxsize=1024)  # layers need the same
def conversion_call(
    source: Placement, target: Placement, shape: Shape, nbytes: int,
    n: int, apart: int = 1, axis: str = "tensor", *, carries: bool,
) -> tuple[RuntimeCall, tuple[Any, ...], Mapping[str, Any], NodeCollectives]:  # fmt: skip
    """The call that converts a value of (whole) `shape`; there must be something to do.

    Returns the call, its arguments after the value, its keywords, and its collectives among `n`
    ranks of an axis, whose numbers differ by `apart`. `carries` says that a gradient comes back.
    """
    assert not is_same(source, target, carries=carries), f"{source} is {target} already"
    row = conversion(source, target, differentiable=carries, ending=True)
    assert row is not None, "it was found"
    name, args = _called(source, target, shape, n)
    sides = (source, "zigzag"), (target, "to_zigzag" if name == "all_to_all" else "zigzag")
    zigzag = {key: True for side, key in sides if side.zigzag}
    partial = carries and R in (source, target) and name in ("take", "all_gather", "all_reduce")
    call = RuntimeCall(name, shares=name in ("fan_out", "take", "once"))
    forward: Actions = ((row.forward, float(nbytes)),) if row.forward in BYTES else ()
    returns = carries and row.backward in BYTES
    backward: Actions = ((row.backward, float(nbytes)),) if returns else ()
    collectives = NodeCollectives(n, forward, backward, apart, axis)
    return call, args, {**({"partial": True} if partial else {}), **zigzag}, collectives


def _called(
    source: Placement, target: Placement, shape: Shape, n: int
) -> tuple[str, tuple[Any, ...]]:
    """The function of the runtime, and its arguments without keywords."""
    start, end = (
        None if placement.kind != "S" else shard_of(placement, shape[placement.dim])
        for placement in (source, target)
    )
    args: tuple[Any, ...] = ()
    if start is not None and end is not None:
        name, args = "all_to_all", (source.dim, target.dim, _sizes(start, n), _sizes(end, n, True))
    elif start is not None:
        name, args = "all_gather", (source.dim, _sizes(start, n))
    elif end is not None:
        name = "reduce_scatter" if source.kind == "P" else "take"
        args = target.dim, _sizes(end, n, True)
    elif target.kind == "P":
        name = "first"
    elif (source, target) == (R, I):
        name = "once"
    else:
        name = "all_reduce" if source.kind == "P" else "fan_out"
    while args and args[-1] is None:
        args = args[:-1]
    return name, args


def _sizes(shard: Shard, n: int, known: bool = False) -> int | tuple[int, ...] | None:
    """The argument `sizes` of a conversion; None where the runtime can tell it from the tensor.
    `known`: the rank has the whole of the dimension."""
    if len(shard.sizes) > 1:
        return shard.sizes
    return None if known or shard.even(n) else shard.whole
