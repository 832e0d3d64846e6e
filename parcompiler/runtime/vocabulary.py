"""The layers of the vocabulary on one rank: its rows of every table, and the model's functions.

    rank 0   rows 0 ... k-1       of the embedding, of the head, of its bias and class weights
    rank 1   rows k ... 2k-1      on every rank of a pipeline
    rank 2   rows 2k ... V-1, 0   padded with zeros to k rows, which are no words

The model, its checkpoints and gathered gradients have whole tensors [V, ...]. `vocabulary.py` of an
exported folder has a class on this base; `vocabulary_passes` runs `head` and `lookup` on it.

>>> rows(13, 4, ranks=2).shape, rows(13, ranks=2).shape
(torch.Size([8, 4]), torch.Size([8]))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from parcompiler import pieces
from parcompiler.pieces import Span
from parcompiler.runtime.program import RankProgram

Batch = Mapping[str, torch.Tensor]  # a micro-batch by the names of its tensors


@dataclass(frozen=True, slots=True)
class Lookup:
    """An embedding: rows of `weight` by indices that are computed from `inputs` of the batch.

    `indices` names the method that computes them; without one they are the only input. The row
    `padding_idx` gets no gradient.
    """

    weight: str
    inputs: tuple[str, ...]
    indices: str = ""
    padding_idx: int | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """`scale * cross_entropy(logits(x Wᵀ + b), targets)`, of the value `x` [n, h].

    The fields name attributes and methods of the emitted class. `targets` [n] are the only input
    where no method computes them; `logits` says that there is a method of this name, an elementwise
    function. If `axis` is set, each of its ranks has some of the rows, and the loss is the sum over
    ranks; with `sizes` the targets are of all rows, in segments of which each rank has a piece
    (`zigzag`: a chunk from either end).
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
    axis: str = ""
    sizes: tuple[int, ...] = ()
    zigzag: bool = False


class Vocabulary(nn.Module):
    """The base of the emitted class; this is rank `index` of the `ranks` that share the rows.

    `size` has the total rows of every tensor by attribute, `lookups` the embeddings by the values
    that they compute, `names` the tensors' names in the model.
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
        tensor = getattr(self, attribute)
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters and buffers by their names in the model."""
        for attribute, name in self.names.items():
            yield name, self.tensor(attribute)

    def computed(self, method: str, names: tuple[str, ...], batch: Batch) -> torch.Tensor:
        """The result of a method on tensors of the batch; the only tensor if `method` is empty."""
        tensors = [batch[name] for name in names]
        if not method:
            (tensor,) = tensors
            return tensor
        result = getattr(self, method)(*tensors)
        assert isinstance(result, torch.Tensor)
        return result


def rows(*sizes: int, ranks: int, dim: int = 0, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Zeros for the rows that each of `ranks` ranks holds of a tensor with these sizes.

    They lie along `dim`: a bias may be [1, V] in the model.
    """
    number = pieces.rows(sizes[dim], ranks)
    return torch.zeros(*sizes[:dim], number, *sizes[dim + 1 :], dtype=dtype)


class VocabularyRows:
    """The rows of this rank of the tensors in `program.rows`."""

    def __init__(self, program: RankProgram) -> None:
        self.sizes = program.rows
        self.ranks = program.grid.plane(program.coordinate.data)
        self._index = self.ranks.index(program.rank)

    def make(self, vocabulary: Callable[[int, int], Vocabulary]) -> Vocabulary:
        """The module of this rank."""
        return vocabulary(len(self.ranks), self._index)

    def place(self, name: str, padded: torch.Tensor) -> tuple[int, pieces.Span]:
        """The dimension of the rows of a tensor, and the rows of the model that this rank has."""
        size, ranks = self.sizes[name], len(self.ranks)
        dim = padded.shape.index(pieces.rows(size, ranks))  # a bias may be [1, V] in the model
        return dim, pieces.own_rows(size, ranks, self._index)

    def unpadded(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of this rank without padding; a tensor that is not in rows as it is."""
        if name not in self.sizes:
            return tensor
        dim, span = self.place(name, tensor)
        return tensor.narrow(dim, 0, span.size)
