"""The bound of an integer input: rows of the tables it indexes, classes that it names."""

from __future__ import annotations

import torch
from torch import fx

from parcompiler.graph import shape_of

_PASS_ON = frozenset(
    "view reshape to slice contiguous pad flatten unsqueeze squeeze clone alias transpose expand "
    "select permute t unbind split split_with_sizes chunk getitem".split()
)
_CLASSES = ("cross_entropy_loss", "nll_loss", "nll_loss_nd")
# For each operator: the operand that indexes, the table that it indexes, and in which dimension.
_INDEX = {"embedding": (1, 0, 0)} | dict.fromkeys(_CLASSES, (1, 0, 1))


def high(node: fx.Node) -> int | None:
    """The smallest bound that the operators which read `node` set; None when none is known."""
    found: list[int] = []
    pending, seen = [node], {node}
    while pending:
        item = pending.pop()
        for user in item.users:
            name = getattr(user.target, "_opname", getattr(user.target, "__name__", ""))
            if name in _INDEX:
                index, table, dim = _INDEX[name]
                if len(user.args) > index and user.args[index] is item:
                    found.append(_size(user.args[table], dim))
            elif name in _PASS_ON and user not in seen:
                seen.add(user)
                pending.append(user)
    return min(found, default=None)


def high_of_example(tensor: torch.Tensor) -> int | None:
    """One more than the largest value of an example batch; None when it has no values."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta or not tensor.numel():
        return None
    return max(int(tensor.max()) + 1, 1)


def _size(table: object, dim: int) -> int:
    """A size of the table that is indexed, or of the classes that are told apart."""
    assert isinstance(table, fx.Node)
    shape = shape_of(table)
    return shape[min(dim, len(shape) - 1)]  # the logits of one example have classes alone
