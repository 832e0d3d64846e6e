"""What was found of the vocabulary in a graph: tables to look up in, the head, and what is neither.

The nodes are those of the captured graph, which is not changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import fx


@dataclass(frozen=True, slots=True)
class FoundLookup:
    """An embedding: `node` yields rows of the parameter `weight` [V, h] for `index`."""

    node: fx.Node
    weight: str
    index: fx.Node
    padding_idx: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """An operation on rows of the logits, as the same on rows of the head's input.

    `args` stand behind that input; `node` is the one of the logits.
    """

    node: fx.Node
    target: Any
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class FoundHead:
    """From `x`, the operand of `product`, to the loss.

    `rows` are the operations on rows, `functions` those on each logit, both in order. The classes
    are dimension `dim` behind all `rows`; `bias` and `class_weight` are names in the model.
    """

    product: fx.Node
    x: fx.Node
    weight: str
    targets: fx.Node
    rows: tuple[Row, ...]
    functions: tuple[fx.Node, ...]
    dim: int
    bias: str | None = None
    class_weight: str | None = None
    ignore_index: int = -100
    label_smoothing: float = 0.0
    reduction: str = "mean"
    scale: float = 1.0


class Whole(NamedTuple):
    """A layer that could be of the vocabulary and stays on its stage, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        """A line for a report."""
        return f"{self.name}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Found:
    """The layers of the vocabulary that all ranks can share."""

    lookups: tuple[FoundLookup, ...] = ()
    head: FoundHead | None = None
    whole: tuple[Whole, ...] = ()

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the parameters that are looked up in."""
        return tuple(dict.fromkeys(item.weight for item in self.lookups))

    @property
    def kept(self) -> tuple[str, ...]:
        """What stays whole, a line each."""
        return tuple(map(str, self.whole))
