"""What the passes of a spread vocabulary take on one rank: the runtime's own, on rows with data.

    S ─► (what ranks tell each other) ─► NORMALIZE ─► T        EMBED ─► EMBED_BACKWARD

One micro-batch after another on the rows of the first rank, as if the others told the same as it;
what goes between ranks is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from parcompiler import pieces
from parcompiler.cost.times import Clock, medians
from parcompiler.graph import Graph, Head, Lookup, Parameter
from parcompiler.plan import VocabularyTime
from parcompiler.runtime import head as passes
from parcompiler.runtime import lookup
from parcompiler.runtime.vocabulary import Head as OwnHead
from parcompiler.runtime.vocabulary import Vocabulary
from parcompiler.runtime.vocabulary_passes import ASKS_FIRST

SPREAD = 0.02  # the standard deviation of weights


def time_passes(graph: Graph, ranks: int, method: str, device: torch.device) -> VocabularyTime:
    """The medians in s of a micro-batch, for all embeddings together.

    Raises whatever an operator raises that cannot run on the device.
    """
    assert graph.vocabulary is not None, "the graph's vocabulary is not spread"
    generator = torch.Generator().manual_seed(0)
    s = normalize = t = embed = embed_backward = 0.0
    if graph.vocabulary.head is not None:
        head = HeadPasses(graph, graph.vocabulary.head, ranks, method, device, generator)
        s, normalize, t = medians(head.sample, device)
    for item in graph.vocabulary.lookups:
        words = LookupPasses(graph, item, ranks, device, generator)
        forward, backward = medians(words.sample, device)
        embed, embed_backward = embed + forward, embed_backward + backward
    return VocabularyTime(
        method=method,
        s=s,
        normalize=normalize if method in ASKS_FIRST else 0.0,  # the others have no such pass
        t=t,
        embed=embed,
        embed_backward=embed_backward,
    )


class HeadPasses:
    """S, NORMALIZE and T of one rank, micro-batch after micro-batch."""

    def __init__(
        self,
        graph: Graph,
        head: Head,
        ranks: int,
        method: str,
        device: torch.device,
        generator: torch.Generator,
    ) -> None:
        """Make what is read: rows, inputs, labels."""
        self.asks, self.early, self.ranks = method in ASKS_FIRST, method == "vocab-2", ranks
        self.own = passes.rows_of_head(_vocabulary(graph, head, ranks, device, generator))
        like = head.x.meta["val"]
        shape = [int(size) for size in like.shape]
        self.x = torch.randn(shape, generator=generator).to(device, like.dtype).flatten(0, -2)
        labels = torch.randint(self.own.classes, (len(self.x),), generator=generator)
        self.targets = labels.to(device)
        self.room = passes.MatrixPool()

    def sample(self, clock: Clock) -> Sequence[float]:
        """Seconds of S, of NORMALIZE, of T."""
        start = clock()
        part = self._s()
        ends = [clock()]
        largest = part.largest.clone()
        begins = [start, clock()]
        if self.asks:
            passes.normalize(self.own, part, largest)
        ends.append(clock())
        begins.append(clock())
        self._t(part)
        ends.append(clock())
        return [end - begin for begin, end in zip(begins, ends, strict=True)]

    def _s(self) -> passes.HeadLogits:
        """S; what vocab-2 makes of it for the gradient of x is there before T, and counts here."""
        labels = passes.labels_of(self.own, self.targets)
        part = passes.products(self.own, self.x, labels, self.room)
        if self.asks:
            passes.find_largest(self.own, part)
            return part
        passes.normalize(self.own, part)
        if self.early:
            passes.weigh(self.own, part)
            passes.input_gradient(self.own, part, self._factors(part))
        return part

    def _t(self, part: passes.HeadLogits) -> None:
        """T."""
        found = self._factors(part)
        if not self.early:
            passes.weigh(self.own, part)
            passes.input_gradient(self.own, part, found)
        passes.weight_gradient(self.own, part, found)
        self.room.give(part.powers)

    def _factors(self, part: passes.HeadLogits) -> passes.Factors:
        """The factors of the gradients, from the statistics of all ranks."""
        own = part.statistics
        assert own is not None
        exchanged = passes.stacked(own).expand(self.ranks, -1, -1)
        whole = passes.combined(exchanged)
        if self.asks:
            whole = passes.Statistics(own.largest, *exchanged.sum(0)[1:])
            own = passes.undivided(own)
        head, classes = self.own.head, self.own.classes
        return passes.factors(head, classes, part.labels, own, whole, 1.0)


class LookupPasses:
    """EMBED and EMBED_BACKWARD of one embedding on one rank."""

    def __init__(
        self,
        graph: Graph,
        item: Lookup,
        ranks: int,
        device: torch.device,
        generator: torch.Generator,
    ) -> None:
        """Make what is read: rows, words, the gradient of what they become."""
        table = graph.by_name[item.weight]
        like = item.node.meta["val"]
        shape = [int(size) for size in like.shape]
        self.weight = _rows(table, 0, ranks, device, generator)
        self.own = pieces.own_rows(table.shape[0], ranks, 0)
        self.words = torch.randint(table.shape[0], shape[:-1], generator=generator).to(device)
        self.gradient = torch.randn(shape, generator=generator).to(device, like.dtype)
        self.padding = item.padding_idx

    def sample(self, clock: Clock) -> Sequence[float]:
        """Seconds of EMBED, of EMBED_BACKWARD."""
        start = clock()
        lookup.embed(self.weight, self.words, self.own)
        middle = clock()
        with torch.no_grad():
            lookup.embed_backward(self.weight, self.words, self.own, self.gradient, self.padding)
        return middle - start, clock() - middle


def _vocabulary(
    graph: Graph, head: Head, ranks: int, device: torch.device, generator: torch.Generator
) -> Vocabulary:
    """What an exported folder has as a class, for the head alone."""
    weight = graph.by_name[head.weight]
    classes = weight.shape[0]
    names = {"weight": head.weight, "bias": head.bias, "class_weight": head.class_weight}
    said = OwnHead(
        x="x",
        weight="weight",
        inputs=(),
        bias="bias" if head.bias else "",
        logits=head.logits is not None,
        class_weight="class_weight" if head.class_weight else "",
        ignore_index=head.ignore_index,
        label_smoothing=head.label_smoothing,
        reduction=head.reduction,
        scale=head.scale,
    )
    more: dict[str, Any] = {"head": said, "size": dict.fromkeys(names, classes)}
    if head.logits is not None:
        more["logits"] = staticmethod(function_of(head.logits))
    made: Vocabulary = type("Rows", (Vocabulary,), more)(ranks, 0)
    for attribute, name in names.items():
        if name is not None:
            item = graph.by_name[name]
            dim = item.shape.index(classes)
            setattr(made, attribute, _rows(item, dim, ranks, device, generator))
    return made


def _rows(
    item: Parameter, dim: int, ranks: int, device: torch.device, generator: torch.Generator
) -> nn.Parameter:
    """The rows that a rank holds of a tensor, filled."""
    shape = list(item.shape)
    shape[dim] = pieces.rows(shape[dim], ranks)
    filled = torch.rand(shape, generator=generator).mul_(SPREAD).to(device, item.dtype)
    return nn.Parameter(filled, requires_grad=item.trainable)


def function_of(graph: fx.Graph) -> Callable[[torch.Tensor], torch.Tensor]:
    """The small graph of what stands between product and loss."""
    module = fx.GraphModule(nn.Module(), graph)

    def logits(y: torch.Tensor) -> torch.Tensor:
        found = module(y)
        tensor: torch.Tensor = found[0] if isinstance(found, list | tuple) else found
        return tensor

    return logits
