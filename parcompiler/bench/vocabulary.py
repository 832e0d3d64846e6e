"""Times of the passes of a spread vocabulary on one rank: the runtime's own, on random data.

    S ─► (statistics of all ranks) ─► NORMALIZE ─► T        EMBED ─► EMBED_BACKWARD

One micro-batch after another on the rows of the first rank, as if all ranks had its statistics;
collectives are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import fx, nn

from parcompiler import pieces
from parcompiler.cost.times import Clock, medians
from parcompiler.graph import EmbeddingLookup, Graph, VocabularyHead
from parcompiler.instruction import ASKS_FIRST
from parcompiler.plan import VocabularyTime
from parcompiler.runtime import head as passes
from parcompiler.runtime import lookup
from parcompiler.runtime.vocabulary import Head, Vocabulary

SPREAD = 0.02  # the standard deviation of weights


def time_passes(
    graph: Graph, ranks: int, method: str, device: torch.device, *, fused: bool = False
) -> VocabularyTime:
    """The medians in s of a micro-batch, for all embeddings together; `fused` compiles the
    operations on logits.

    Raises the error of an operator that cannot run on the device.
    """
    assert graph.vocabulary is not None, "the graph's vocabulary is not spread"
    data = RandomData(graph, ranks, device)
    s = normalize = t = embed = embed_backward = 0.0
    if graph.vocabulary.head is not None:
        s, normalize, t = medians(
            HeadPasses(data, graph.vocabulary.head, method, fused).sample, device
        )
    for item in graph.vocabulary.lookups:
        forward, backward = medians(LookupPasses(data, item).sample, device)
        embed, embed_backward = embed + forward, embed_backward + backward
    return VocabularyTime(
        method=method,
        s=s,
        normalize=normalize if method in ASKS_FIRST else 0.0,  # other methods have no such pass
        t=t,
        embed=embed,
        embed_backward=embed_backward,
    )


class RandomData:
    """Random parameters and inputs of the first of `ranks` ranks, on a device."""

    def __init__(self, graph: Graph, ranks: int, device: torch.device) -> None:
        """Seed the generator."""
        self.graph, self.ranks, self.device = graph, ranks, device
        self.generator = torch.Generator().manual_seed(0)

    def rows(self, name: str, dim: int) -> nn.Parameter:
        """The rows of a tensor that the rank has, along `dim`."""
        tensor = self.graph.by_name[name]
        shape = list(tensor.shape)
        shape[dim] = pieces.rows(shape[dim], self.ranks)
        filled = torch.rand(shape, generator=self.generator).mul_(SPREAD)
        return nn.Parameter(filled.to(self.device, tensor.dtype), requires_grad=tensor.trainable)

    def values(self, node: fx.Node) -> torch.Tensor:
        """A random tensor with a node's shape and dtype."""
        like = node.meta["val"]
        shape = [int(size) for size in like.shape]
        return torch.randn(shape, generator=self.generator).to(self.device, like.dtype)

    def integers(self, below: int, shape: Sequence[int]) -> torch.Tensor:
        """Words or labels."""
        return torch.randint(below, tuple(shape), generator=self.generator).to(self.device)


class HeadPasses:
    """S, NORMALIZE and T of one rank, micro-batch after micro-batch."""

    def __init__(
        self, data: RandomData, head: VocabularyHead, method: str, fused: bool = False
    ) -> None:
        """Make rows, inputs and labels."""
        self.asks, self.early, self.ranks = method in ASKS_FIRST, method == "vocab-2", data.ranks
        self.head = passes.rows_of_head(_vocabulary(data, head), fused=fused)
        self.x = data.values(head.x).flatten(0, -2)
        self.targets = data.integers(self.head.classes, (len(self.x),))
        self.room = passes.MatrixPool()

    def sample(self, clock: Clock) -> Sequence[float]:
        """Seconds of S, of NORMALIZE, of T."""
        start = clock()
        part = self._s()
        ends = [clock()]
        largest = part.largest.clone()
        begins = [start, clock()]
        if self.asks:
            passes.normalize(self.head, part, largest)
        ends.append(clock())
        begins.append(clock())
        factors = self._factors(part)
        if not self.early:
            self._input_gradient(part, factors)
        passes.weight_gradient(self.head, part, factors)
        self.room.give(part.powers)
        ends.append(clock())
        return [end - begin for begin, end in zip(begins, ends, strict=True)]

    def _s(self) -> passes.HeadLogits:
        """S, including vocab-2's part of the gradient of x, which comes before T."""
        labels = passes.labels_of(self.head, self.targets)
        part = passes.products(self.head, self.x, labels, self.room)
        if self.asks:
            passes.find_largest(self.head, part)
            return part
        passes.normalize(self.head, part)
        if self.early:
            self._input_gradient(part, self._factors(part))
        return part

    def _input_gradient(self, part: passes.HeadLogits, factors: passes.Factors) -> None:
        """The rank's part of the gradient of x."""
        passes.weigh(self.head, part)
        passes.input_gradient(self.head, part, factors)

    def _factors(self, part: passes.HeadLogits) -> passes.Factors:
        """The factors that follow from the statistics of all ranks."""
        statistics = part.statistics
        assert statistics is not None
        of_ranks = passes.stacked(statistics).expand(self.ranks, -1, -1)
        whole = passes.combined(of_ranks)
        if self.asks:
            whole = passes.Statistics(statistics.largest, *of_ranks.sum(0)[1:])
            statistics = passes.undivided(statistics)
        head, classes = self.head.head, self.head.classes
        return passes.factors(head, classes, part.labels, statistics, whole, 1.0)


class LookupPasses:
    """EMBED and EMBED_BACKWARD of one embedding on one rank."""

    def __init__(self, data: RandomData, item: EmbeddingLookup) -> None:
        """Make rows, words, and the gradient of their embeddings."""
        size = data.graph.by_name[item.weight].shape[0]
        self.weight = data.rows(item.weight, 0)
        self.rows = pieces.own_rows(size, data.ranks, 0)
        self.gradient = data.values(item.node)
        self.words = data.integers(size, self.gradient.shape[:-1])
        self.padding = item.padding_idx

    def sample(self, clock: Clock) -> Sequence[float]:
        """Seconds of EMBED, of EMBED_BACKWARD."""
        start = clock()
        lookup.embed(self.weight, self.words, self.rows)
        middle = clock()
        with torch.no_grad():
            lookup.embed_backward(self.weight, self.words, self.rows, self.gradient, self.padding)
        return middle - start, clock() - middle


def _vocabulary(data: RandomData, head: VocabularyHead) -> Vocabulary:
    """The emitted class of a vocabulary, for the head alone."""
    classes = data.graph.by_name[head.weight].shape[0]
    names = {"weight": head.weight, "bias": head.bias, "class_weight": head.class_weight}
    runtime_head = Head(
        x="x",
        weight="weight",
        inputs=(),
        bias="bias" if head.bias else "",
        logits=head.logits is not None,
        class_weight="class_weight" if head.class_weight else "",
        **asdict(replace(head.loss, axis="", sizes=())),  # one rank has all rows
    )
    members: dict[str, Any] = {"head": runtime_head, "size": dict.fromkeys(names, classes)}
    if head.logits is not None:
        members["logits"] = staticmethod(function_of(head.logits))
    made: Vocabulary = type("Rows", (Vocabulary,), members)(data.ranks, 0)
    for attribute, name in names.items():
        if name is not None:
            dim = data.graph.by_name[name].shape.index(classes)
            setattr(made, attribute, data.rows(name, dim))
    return made


def function_of(graph: fx.Graph) -> Callable[[torch.Tensor], torch.Tensor]:
    """The small graph between product and loss as a function."""
    module = fx.GraphModule(nn.Module(), graph)

    def logits(y: torch.Tensor) -> torch.Tensor:
        result = module(y)
        tensor: torch.Tensor = result[0] if isinstance(result, list | tuple) else result
        return tensor

    return logits
