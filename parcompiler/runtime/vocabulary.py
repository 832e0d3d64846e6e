"""The layers of the vocabulary on one rank: own rows of every table, and what the model does there.

    rank 0   rows 0 ... k-1       of the embedding, of the head, of its bias and class weights
    rank 1   rows k ... 2k-1      alike on all ranks of a pipeline
    rank 2   rows 2k ... V-1, 0   padded with zeros to k rows, which are no words

`vocabulary.py` of an exported folder has a class on this base; `spread` runs the passes of `head`
and `lookup` on it.

>>> rows(13, 4, ranks=2).shape, rows(13, ranks=2).shape
(torch.Size([8, 4]), torch.Size([8]))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from parcompiler import pieces
from parcompiler.pieces import Span

Batch = Mapping[str, torch.Tensor]  # a micro-batch by the names of its tensors


@dataclass(frozen=True, slots=True)
class Lookup:
    """An embedding: rows of `weight` by indices that are computed from `inputs` of the batch.

    `indices` names the method that does it; without one the only input is the indices. The row
    `padding_idx` gets no gradient.
    """

    weight: str
    inputs: tuple[str, ...]
    indices: str = ""
    padding_idx: int | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """`scale * cross_entropy(logits(x Wᵀ + b), targets)`, of the value `x` [n, h].

    Names of attributes and methods: those without a default are always there. `targets` [n] are
    the only input where no method computes them; `logits` says that there is a method of this name,
    an elementwise function.
    """

    x: str
    weight: str
    inputs: tuple[str, ...]
    targets: str = ""
    bias: str = ""
    logits: bool = False
    class_weight: str = ""
    ignore_index: int = -100
    label_smoothing: float = 0.0
    reduction: str = "mean"
    scale: float = 1.0


class Vocabulary(nn.Module):
    """The base of the emitted class; this is rank `index` of those that have all rows.

    `size` has the rows on the whole of every tensor by its attribute, `lookups` the embeddings by
    the values that they give, `names` the tensors' names in the model.
    """

    method: ClassVar[str] = "vocab-2"
    size: ClassVar[Mapping[str, int]] = {}
    lookups: ClassVar[Mapping[str, Lookup]] = {}
    head: ClassVar[Head | None] = None
    names: ClassVar[Mapping[str, str]] = {}

    def __init__(self, ranks: int, index: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.index = index

    def span(self, attribute: str) -> Span:
        """The rows of a tensor that this rank holds."""
        return pieces.own_rows(self.size[attribute], self.ranks, self.index)

    def tensor(self, attribute: str) -> torch.Tensor:
        """A parameter or buffer."""
        found = getattr(self, attribute)
        assert isinstance(found, torch.Tensor)
        return found

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters and buffers by their names in the model."""
        for attribute, name in self.names.items():
            yield name, self.tensor(attribute)

    def computed(self, method: str, names: tuple[str, ...], batch: Batch) -> torch.Tensor:
        """What a method makes of tensors of the batch, or the only one where it has no name."""
        tensors = [batch[name] for name in names]
        if not method:
            (tensor,) = tensors
            return tensor
        found = getattr(self, method)(*tensors)
        assert isinstance(found, torch.Tensor)
        return found


def rows(*sizes: int, ranks: int, dim: int = 0, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Zeros for the rows that each of `ranks` ranks holds of a tensor with these sizes.

    They lie along `dim`: a bias may be [1, V] in the model.
    """
    own = pieces.rows(sizes[dim], ranks)
    return torch.zeros(*sizes[:dim], own, *sizes[dim + 1 :], dtype=dtype)
