"""Finds the vocabulary's layers in a graph, by what they compute and not by their names.

    tokens ──► embedding(W [V, h]) ──► ... layers ... ──► x W'ᵀ ──► soft cap ──► cross_entropy

A table can be divided among all ranks if every reader of it is such a lookup or such a head. Tables
that almost match, or that would not pay, are listed with the reason. The graph is not changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import fx

from parcompiler.capture.effects import (
    Effects,
    arguments_of,
    effects_of,
    is_random,
    name_of,
    outside,
)
from parcompiler.capture.prologue import cone, is_sendable
from parcompiler.graph import EmbeddingLookup, Graph, Parameter, shape_of
from parcompiler.vocabulary.head_pattern import (
    CROSS_ENTROPIES,
    Chain,
    Criterion,
    WholeError,
    keep_whole,
    match_chain,
    match_loss,
    match_product,
)
from parcompiler.vocabulary.nodes import extract, readers, source, tensor_of

NOTICEABLE = 0.05  # least size of a table, as a share of a rank's other parameters
CONSTANT = "are constants"


@dataclass(frozen=True, slots=True)
class HeadMatch:
    """The chain from the head's product to its criterion; `bias` and `class_weight` are names in
    the model."""

    chain: Chain
    criterion: Criterion
    bias: str | None = None
    class_weight: str | None = None

    @property
    def weight(self) -> str:
        """The name of the table."""
        return self.chain.product.weight.name


@dataclass(frozen=True, slots=True)
class VocabularyMatch:
    """The layers of the vocabulary that all ranks can share; other tables stay `whole`, by name
    with the reason."""

    lookups: tuple[EmbeddingLookup, ...] = ()
    head: HeadMatch | None = None
    whole: Mapping[str, str] = field(default_factory=dict)

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the parameters of lookups."""
        return tuple(dict.fromkeys(item.weight for item in self.lookups))

    @property
    def kept(self) -> tuple[str, ...]:
        """A line for each table that stays whole."""
        return tuple(f"{name}: {reason}" for name, reason in self.whole.items())


def find(graph: Graph, ranks: int) -> VocabularyMatch:
    """The vocabulary layers of `graph` that `ranks` ranks can share, and tables that stay whole."""
    return graph.once(("vocabulary", ranks), lambda: _Matching(graph, ranks).match())


def obstacle(graph: Graph, node: fx.Node, effects: Effects) -> str | None:
    """Why not every rank can compute `node` (indices, targets) from its batch; None when it can."""
    members = cone(node, effects)
    leaves = {*outside([*members])} | ({node} - members)
    tensors = (graph.by_node.get(leaf.name) for leaf in leaves)
    if any(item is not None and (not item.buffer or item.mutated) for item in tensors):
        return "depend on parameters"
    if any(is_random(item) or not is_sendable(item) for item in members):
        return "depend on chance"
    if not any(leaf.name in graph.input_nodes for leaf in leaves):
        return CONSTANT
    return None


class _Matching:
    """The search for the layers of one graph."""

    def __init__(self, graph: Graph, ranks: int) -> None:
        self.graph = graph
        self.ranks = ranks
        self.effects = effects_of(graph)
        self.whole: dict[str, str] = {}

    def match(self) -> VocabularyMatch:
        """The layers whose tables have no reason to stay whole."""
        lookups = [item for node in self.graph.fx_graph.nodes for item in self._lookup(node)]
        head = self._head({item.weight for item in lookups})
        names = [item.weight for item in lookups] + ([head.weight] if head else [])
        for name in dict.fromkeys(names):
            reason = self._reason(name, lookups, head)
            if reason is not None:
                self.whole.setdefault(name, reason)
        return VocabularyMatch(
            tuple(item for item in lookups if item.weight not in self.whole),
            head if head is not None and head.weight not in self.whole else None,
            self.whole,
        )

    def _lookup(self, node: fx.Node) -> Iterator[EmbeddingLookup]:
        """The lookup of an embedding of the batch; records why one must stay whole."""
        if name_of(node) not in ("embedding", "embedding_bag", "_embedding_bag"):
            return
        values = arguments_of(node)
        table, index = tensor_of(self.graph, values["weight"]), values["indices"]
        if table is None or len(table.shape) != 2 or not isinstance(index, fx.Node):
            return
        why = obstacle(self.graph, index, self.effects)
        if why == CONSTANT:
            return  # positions
        if name_of(node) != "embedding":
            self.whole[table.name] = "a sum over bags of rows"
        elif why is not None:
            self.whole[table.name] = f"its indices {why}"
        elif values["scale_grad_by_freq"]:
            self.whole[table.name] = "a gradient that is scaled by frequency"
        elif table.looked_up:
            self.whole[table.name] = "a gradient of the rows that are looked up"
        elif node.name not in self.graph.differentiable:
            self.whole[table.name] = "frozen"
        else:
            padding = values["padding_idx"]
            indices = extract(self.graph, index)
            yield EmbeddingLookup(node, table.name, indices, None if padding == -1 else padding)

    def _head(self, looked_up: set[str]) -> HeadMatch | None:
        """The head; records why a table at the end of the model that looks like one stays whole."""
        try:
            criterion = match_loss(self.graph)
            return self._checked(criterion, match_chain(self.graph, criterion))
        except WholeError as stop:
            for item in self._last_products(looked_up):
                self.whole.setdefault(item.name, stop.reason)
            return None

    def _checked(self, criterion: Criterion, chain: Chain) -> HeadMatch:
        """The head, if its surroundings allow ranks to share it. Raises WholeError otherwise."""
        table = chain.product.weight
        size = table.shape[0]
        bias = self._per_class(chain.bias, size, "bias")
        classes = self._per_class(criterion.weight, size, "class weights")
        if classes is not None and self.graph.by_name[classes].trainable:
            keep_whole("its class weights are trained")
        why = obstacle(self.graph, criterion.targets, self.effects)
        if why is not None:
            keep_whole(f"its targets {why}")
        x = source(chain.product.x)
        if x.op != "call_function" or x.name not in self.graph.differentiable:
            keep_whole("its input carries no gradient")
        if name_of(x) == "embedding" and tensor_of(self.graph, x.args[0]) is not None:
            keep_whole("its input is no value of a layer")
        if shape_of(chain.product.x)[-1] != table.shape[1] and not chain.product.rows:
            keep_whole("its input is of another width")
        return HeadMatch(chain, criterion, bias, classes)

    def _per_class(self, node: fx.Node | None, size: int, role: str) -> str | None:
        """The name of a tensor with a number for each class that only the head reads."""
        if node is None:
            return None
        tensor = tensor_of(self.graph, node)
        if tensor is None or tensor.numel != size:
            keep_whole(f"its {role} is no tensor of the model with a number for each class")
        if tensor.mutated or len(list(readers(self.graph.placeholders[tensor.node]))) != 1:
            keep_whole(f"its {role} is also used elsewhere")
        return tensor.name

    def _reason(
        self, name: str, lookups: list[EmbeddingLookup], head: HeadMatch | None
    ) -> str | None:
        """Why a matched table stays whole; None when it need not."""
        table = self.graph.by_name[name]
        is_head = head is not None and head.weight == name
        others = set(readers(self.graph.placeholders[table.node]))
        others -= {item.node for item in lookups if item.weight == name}
        if head is not None and is_head:
            others.discard(head.chain.product.node)
        if table.shape[0] < self.ranks:
            return f"V ({table.shape[0]}) is smaller than the number of ranks ({self.ranks})"
        if table.mutated:
            return "its rows are changed in the forward (max_norm)"
        if others:
            first = min(node.name for node in others)
            return f"its weight is also read by {first!r}, which is no such layer"
        if not table.trainable:
            return "frozen"
        if not is_head and not self._is_noticeable(table):
            return "small beside the other parameters"
        return None

    def _is_noticeable(self, item: Parameter) -> bool:
        """Whether a table is large beside a rank's share of the other parameters."""
        total = sum(other.nbytes for other in self.graph.parameters if not other.buffer)
        return item.nbytes > NOTICEABLE * (total - item.nbytes) / self.ranks

    def _last_products(self, looked_up: set[str]) -> Iterator[Parameter]:
        """Tables that look like a head: those of the last products before a cross-entropy (or else
        the loss) that are also tables of lookups, or are large with more rows than columns."""
        ends = [node for node in self.graph.fx_graph.nodes if name_of(node) in CROSS_ENTROPIES]
        pending, seen = ends or [self.graph.loss], set()
        while pending:
            node = pending.pop()
            if node in seen or node.op != "call_function":
                continue
            seen.add(node)
            product = match_product(self.graph, node)
            if product is None:
                pending.extend(node.all_input_nodes)
                continue
            table = product.weight
            large = table.shape[0] > table.shape[1] and self._is_noticeable(table)
            if table.trainable and (table.name in looked_up or large):
                yield table
