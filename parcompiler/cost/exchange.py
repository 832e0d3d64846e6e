"""What the tensor ranks tell each other in a block, as operations that take the link's time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from parcompiler.cost.operation import Operation
from parcompiler.cost.recorder import Recorder
from parcompiler.cost.stand_in import stand_in, tensors
from parcompiler.spmd.exchange import Exchange

EXCHANGE = "exchange"


def exchanged(node: fx.Node, args: Sequence[Any], recorder: Recorder) -> Any:
    """The result of a conversion; what it sends, forward and backward, is noted."""
    said: Exchange = node.meta["exchange"]
    (value,) = tensors(args)
    shares = getattr(node.target, "shares", False) and value.shape == node.meta["val"].shape
    make: Callable[[], Any] = lambda: stand_in(node.meta["val"])  # noqa: E731
    return _Exchanged.apply(value, said, recorder, None if shares else make)  # type: ignore[no-untyped-call]


def note(said: Exchange, dtype: torch.dtype, recorder: Recorder, *, backward: bool = False) -> None:
    """Note the collectives of one side."""
    for action, nbytes in said.backward if backward else said.forward:
        sent = said.sent_by(action, nbytes)
        recorder.add(Operation(action, EXCHANGE, 0.0, sent, dtype, said.n))


class _Exchanged(torch.autograd.Function):
    """A conversion without data: the shapes of both sides, and what is sent."""

    @staticmethod
    def forward(
        ctx: Any,
        value: torch.Tensor,
        said: Exchange,
        recorder: Recorder,
        make: Callable[[], torch.Tensor] | None,
    ) -> torch.Tensor:
        ctx.said, ctx.recorder = said, recorder
        ctx.like = value.shape, value.dtype
        note(said, value.dtype, recorder)
        return value.view_as(value) if make is None else make()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        shape, dtype = ctx.like
        note(ctx.said, dtype, ctx.recorder, backward=True)
        made: torch.Tensor = stand_in(torch.empty(shape, dtype=dtype, device="meta"))
        return made, None, None, None
