"""Which layers of a graph are the vocabulary's: found by what they compute, never by their names.

    tokens ──► embedding(W [V, h]) ──► ... layers ... ──► x W'ᵀ ──► soft cap ──► cross_entropy

A table can be divided among all ranks when every reader of it is such a lookup or such a head. What
looks like one and is not, or would not pay, is named with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from parcompiler.capture.effects import effects_of
from parcompiler.graph import Graph, Parameter, shape_of
from parcompiler.vocabulary.chain import Chain, WholeError, follow, keep_whole
from parcompiler.vocabulary.computed import CONSTANT, obstacle
from parcompiler.vocabulary.criterion import CROSS_ENTROPIES, Criterion, criterion
from parcompiler.vocabulary.found import Found, FoundHead, FoundLookup, Whole
from parcompiler.vocabulary.product import product
from parcompiler.vocabulary.reading import arguments, held, name_of, readers, source

NOTICEABLE = 0.05  # of what a rank has of the other parameters


def find(graph: Graph, ranks: int) -> Found:
    """The vocabulary layers of `graph` that `ranks` ranks can share, and what stays whole."""
    return graph.once(("vocabulary", ranks), lambda: _Finding(graph, ranks).found())


class _Finding:
    """What is known of one graph while its layers are found."""

    def __init__(self, graph: Graph, ranks: int) -> None:
        self.graph = graph
        self.ranks = ranks
        self.effects = effects_of(graph)
        self.nodes = {node.name: node for node in graph.fx_graph.nodes if node.op == "placeholder"}
        self.whole: dict[str, str] = {}

    def found(self) -> Found:
        """The layers that are left when all reasons are known."""
        lookups = [item for node in self.graph.fx_graph.nodes for item in self._lookup(node)]
        head = self._head({item.weight for item in lookups})
        names = [item.weight for item in lookups] + ([head.weight] if head else [])
        for name in dict.fromkeys(names):
            reason = self._reason(name, lookups, head)
            if reason is not None:
                self.whole.setdefault(name, reason)
        return Found(
            tuple(item for item in lookups if item.weight not in self.whole),
            head if head is not None and head.weight not in self.whole else None,
            tuple(Whole(name, reason) for name, reason in self.whole.items()),
        )

    def _lookup(self, node: fx.Node) -> Iterator[FoundLookup]:
        """An embedding of something in the batch; one that must stay whole is noted."""
        if name_of(node) not in ("embedding", "embedding_bag", "_embedding_bag"):
            return
        given = arguments(node)
        known = held(self.graph, given["weight"])
        index = given["indices"]
        if known is None or len(known.shape) != 2 or not isinstance(index, fx.Node):
            return
        why = obstacle(self.graph, index, self.effects)
        if why == CONSTANT:
            return  # positions
        if name_of(node) != "embedding":
            self.whole[known.name] = "a sum over bags of rows"
        elif why is not None:
            self.whole[known.name] = f"its indices {why}"
        elif given["scale_grad_by_freq"]:
            self.whole[known.name] = "a gradient that is scaled by frequency"
        elif node.name not in self.graph.differentiable:
            self.whole[known.name] = "frozen"
        else:
            padding = given["padding_idx"]
            yield FoundLookup(node, known.name, index, None if padding == -1 else padding)

    def _head(self, looked_up: set[str]) -> FoundHead | None:
        """The head; what the model ends with and looks like one is noted."""
        end = criterion(self.graph)
        try:
            if isinstance(end, str):
                keep_whole(end)
            return self._checked(end, follow(self.graph, end))
        except WholeError as stop:
            for item in self._last_products(looked_up):
                self.whole.setdefault(item.name, stop.reason)
            return None

    def _checked(self, end: Criterion, chain: Chain) -> FoundHead:
        """The head when all around it is as ranks need it. Raises WholeError."""
        known = chain.product.weight
        size = known.shape[0]
        bias = self._own(chain.bias, size, "bias")
        classes = self._own(end.weight, size, "class weights")
        if classes is not None and self.graph.by_name[classes].trainable:
            keep_whole("its class weights are trained")
        why = obstacle(self.graph, end.targets, self.effects)
        if why is not None:
            keep_whole(f"its targets {why}")
        x = source(chain.product.x)
        if x.op != "call_function" or x.name not in self.graph.differentiable:
            keep_whole("its input carries no gradient")
        if name_of(x) == "embedding" and held(self.graph, x.args[0]) is not None:
            keep_whole("its input is no value of a layer")
        if shape_of(chain.product.x)[-1] != known.shape[1] and not chain.product.rows:
            keep_whole("its input is of another width")
        return FoundHead(
            product=chain.product.node,
            x=chain.product.x,
            weight=known.name,
            targets=end.targets,
            rows=tuple(chain.rows),
            functions=tuple(chain.functions),
            dim=chain.dim,
            bias=bias,
            class_weight=classes,
            ignore_index=end.ignore_index,
            label_smoothing=end.label_smoothing,
            reduction=end.reduction,
            scale=end.scale,
        )

    def _own(self, node: fx.Node | None, size: int, what: str) -> str | None:
        """The name of a tensor with a number for each class that only the head reads."""
        if node is None:
            return None
        known = held(self.graph, node)
        if known is None or known.numel != size:
            keep_whole(f"its {what} is no tensor of the model with a number for each class")
        if known.mutated or len(list(readers(self.nodes[known.node]))) != 1:
            keep_whole(f"its {what} is also used elsewhere")
        return known.name

    def _reason(self, name: str, lookups: list[FoundLookup], head: FoundHead | None) -> str | None:
        """Why a table that is found stays whole; None when it need not."""
        known = self.graph.by_name[name]
        mine = {item.node for item in lookups if item.weight == name}
        is_head = head is not None and head.weight == name
        others = set(readers(self.nodes[known.node])) - mine
        if head is not None and is_head:
            others.discard(head.product)
        if known.shape[0] < self.ranks:
            return f"V ({known.shape[0]}) is smaller than the number of ranks ({self.ranks})"
        if known.mutated:
            return "its rows are changed in the forward (max_norm)"
        if others:
            first = min(node.name for node in others)
            return f"its weight is also read by {first!r}, which is no such layer"
        if not known.trainable:
            return "frozen"
        if not is_head and not self._is_noticeable(known):
            return "small beside the other parameters"
        return None

    def _is_noticeable(self, item: Parameter) -> bool:
        """Whether a table is large beside what a rank has of the other parameters."""
        total = sum(other.nbytes for other in self.graph.parameters if not other.buffer)
        return item.nbytes > NOTICEABLE * (total - item.nbytes) / self.ranks

    def _last_products(self, looked_up: set[str]) -> Iterator[Parameter]:
        """The tables that look like a head's: of the last products before a cross-entropy, or else
        the loss, if they are looked up in, or are large and have more rows than columns."""
        ends = [node for node in self.graph.fx_graph.nodes if name_of(node) in CROSS_ENTROPIES]
        for item in self._products_before(ends or [self.graph.loss]):
            large = item.shape[0] > item.shape[1] and self._is_noticeable(item)
            if item.trainable and (item.name in looked_up or large):
                yield item

    def _products_before(self, ends: list[fx.Node]) -> Iterator[Parameter]:
        """The tables of the products from which there is a way to `ends` without another."""
        pending, seen = list(ends), set()
        while pending:
            node = pending.pop()
            if node in seen or node.op != "call_function":
                continue
            seen.add(node)
            made = product(self.graph, node)
            if made is None:
                pending.extend(node.all_input_nodes)
            else:
                yield made.weight
