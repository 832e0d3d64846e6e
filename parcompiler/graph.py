"""The model: its captured graph, its parameters, and the blocks it is cut into.

The nodes are those of `torch.fx`; here are small frozen values around them. A *block* is a run of
nodes (usually one layer); blocks of the same structure share a *template*. Values that need no
parameters and no gradient and are used by several blocks (masks, position ids, rotary tables) form
the *prologue*, which every stage may compute for itself; those of them that do not depend on the
batch either are *constants*, computed once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import fx

from parcompiler.data_updates import ALL_REDUCE, DataUpdates, is_factored
from parcompiler.pieces import Shard

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter or buffer of the model, under its name there.

    `aliases` are further names of the same tensor (tied weights); `mutated` says that the forward
    updates it in place (running statistics). Only a parameter that the loss depends on is
    `trainable`: others get no gradient, and no optimizer changes them. Constants met while tracing
    are buffers too. `unsaved` are those of its names that the model's state dict does not have: of
    constants, of non-persistent buffers, of parameters of the loss. If tensor ranks hold pieces,
    `shape` is that of the largest piece, and `shard` tells how it is split. `experts` is the whole
    size of the first dimension if expert ranks hold equal pieces of it (0: all hold the whole).
    `looked_up` is the number of rows in a row gradient, for a step on all data ranks (0: the
    gradient is whole). A 16-bit parameter that `has_master`, which the optimizer changes,
    accumulates gradients in float32.
    """

    name: str
    node: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool = True
    buffer: bool = False
    mutated: bool = False
    aliases: tuple[str, ...] = ()
    shard: Shard | None = None
    unsaved: tuple[str, ...] = ()
    experts: int = 0
    looked_up: int = 0
    has_master: bool = False

    @property
    def whole(self) -> Parameter:
        """The parameter that ranks hold pieces of."""
        shape = self.shape if self.shard is None else self.shard.shape(self.shape)
        shape = (self.experts, *shape[1:]) if self.experts else shape
        return replace(self, shape=shape, shard=None, experts=0)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.numel * self.dtype.itemsize

    @property
    def wide_dtype(self) -> torch.dtype:
        """The dtype of gradient sums, and of the optimizer's states."""
        return torch.float32 if self.has_master else self.dtype

    @property
    def gradient_nbytes(self) -> int:
        """Bytes of its gradient in a step; a row gradient has the rows of all data ranks, and their
        indices."""
        if not self.looked_up:
            return self.numel * self.wide_dtype.itemsize
        return self.looked_up * (self.nbytes // self.shape[0] + torch.int64.itemsize)

    def summed_nbytes(self, updates: DataUpdates = ALL_REDUCE) -> int:
        """Bytes of the all-reduce of its gradient over data ranks, compressed as `updates` say. A
        row gradient takes an all-gather, which moves half the bytes of an all-reduce."""
        if updates.compression is None:
            return self.gradient_nbytes // (2 if self.looked_up else 1)
        if not updates.rank:
            return self.numel * 2 * (1 + self.dtype.is_complex)
        if not is_factored(self.shape, updates.rank):
            return self.gradient_nbytes
        factors = (self.shape[0] + self.numel // self.shape[0]) * updates.rank
        return factors * max(4, self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class BatchInput:
    """A tensor of the batch: its `key` there, and the `shape` in one micro-batch.

    Integers that index a table or name a class are below `high` (None: not known). `label` is the
    argument of the model's forward.
    """

    key: str
    node: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    high: int | None = None
    label: str = ""


@dataclass(frozen=True, slots=True)
class Binding:
    """One tensor of a block: `attribute` in the template, `name` in the model."""

    attribute: str
    name: str


@dataclass(frozen=True, slots=True)
class Block:
    """A run of nodes that stays together on one stage.

    `inputs` are nodes of other blocks, of the prologue, or of the batch, by first use; `outputs`
    are its nodes that others use. Two blocks of one `template` have the same operators, constants
    and wiring, node for node, input for input, tensor for tensor. `scope` is the layer that
    tensors are named from, `weights` the bytes of the parameters.
    """

    name: str
    template: str
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    tensors: tuple[Binding, ...]
    scope: str = ""
    weights: int = 0


@dataclass(frozen=True, slots=True)
class NodeRoles:
    """Roles of nodes, by name: placeholders of trainable `parameters`, of `buffers` (frozen
    parameters included), and of parameters with `masters`, whose gradients are summed in float32;
    and the nodes that carry gradients."""

    parameters: Collection[str]
    buffers: Collection[str]
    differentiable: Collection[str]
    masters: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class EmbeddingLookup:
    """An embedding whose table all ranks hold rows of; `node` yields the rows that are looked up.

    `indices` computes them from tensors of the batch (placeholders of the same names).
    """

    node: fx.Node
    weight: str
    indices: fx.Graph
    padding_idx: int | None = None

    @property
    def tensors(self) -> tuple[str, ...]:
        """The parameters that ranks hold rows of."""
        return (self.weight,)


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """scale · cross_entropy(logits, targets), by torch's options.

    If `axis` is set, each of its ranks has some of the rows, and the loss is the sum over ranks;
    with `sizes` the targets are of all rows, in segments of which each rank has a piece (`zigzag`:
    a chunk from either end).
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    reduction: str = "mean"
    scale: float = 1.0
    axis: str = ""
    sizes: tuple[int, ...] = ()
    zigzag: bool = False


@dataclass(frozen=True, slots=True)
class VocabularyHead:
    """The product with the vocabulary and the loss: `node` reads `x` [n, h] and is the loss.

    It is the `loss` of logits(x Wᵀ + bias) for a weight [V, h]. `targets` computes the classes [n]
    from tensors of the batch, `logits` is elementwise (None: nothing). Kept `outputs` are the
    product with its bias or, if true, the result of `logits`, each in its dtype.
    """

    node: fx.Node
    x: fx.Node
    weight: str
    targets: fx.Graph
    bias: str | None = None
    class_weight: str | None = None
    logits: fx.Graph | None = None
    loss: CrossEntropy = CrossEntropy()
    outputs: Mapping[str, tuple[bool, torch.dtype]] = field(default_factory=dict)

    @property
    def tensors(self) -> tuple[str, ...]:
        """The parameters and buffers that ranks hold rows of."""
        return tuple(filter(None, (self.weight, self.bias, self.class_weight)))


@dataclass(frozen=True, slots=True)
class VocabularyLayers:
    """The layers on no stage: all ranks hold rows of their tables."""

    lookups: tuple[EmbeddingLookup, ...] = ()
    head: VocabularyHead | None = None

    @property
    def all(self) -> tuple[EmbeddingLookup | VocabularyHead, ...]:
        """The lookups, then the head."""
        return (*self.lookups, *([self.head] if self.head else []))

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The nodes of these layers."""
        return tuple(layer.node for layer in self.all)

    @property
    def tensors(self) -> tuple[str, ...]:
        """The parameters and buffers that ranks hold rows of, each once."""
        return tuple(dict.fromkeys(name for layer in self.all for name in layer.tensors))


@dataclass(frozen=True, slots=True)
class Modes:
    """Names of the modules in evaluation mode when a model was captured; "" is the model itself.

    In training, `dropouts` of them would draw random numbers, and `norms` would update running
    statistics. `unfollowed` says why evaluations take the branches on `self.training` that training
    takes, where they do.
    """

    evaluating: tuple[str, ...] = ()
    dropouts: int = 0
    norms: int = 0
    unfollowed: str = ""

    @property
    def outermost(self) -> tuple[str, ...]:
        """The modules in evaluation mode that are in no other such module."""
        known = set(self.evaluating)
        return tuple(n for n in self.evaluating if not n or n.rpartition(".")[0] not in known)


@dataclass(frozen=True, slots=True)
class Hook:
    """The hooks on a parameter's gradient as an elementwise graph; `places` are their names and
    lines.

    `graph` has one placeholder, the gradient.
    """

    graph: fx.Graph
    places: tuple[str, ...]


@dataclass(frozen=True)
class Graph:
    """A captured model: one micro-batch in, the scalar loss out.

    `fx_graph` has a placeholder per parameter, buffer and input, and ATen operators otherwise.
    `tensors` holds the model's own parameters and buffers by name (not copies).
    `differentiable` are the names of the nodes that carry gradients, `sample` the inputs
    that the model was captured on. The nodes of `vocabulary` belong to no block. `narrow` is the
    16-bit dtype of a model that was captured in fewer bits than its parameters have. `modes` are
    those of the model's modules at capture, whatever they are set to later. `hooks` are applied to
    complete gradients, by the name of the parameter. `recapture` captures the model on other
    inputs; None if the graph comes from no model. `outputs` are the names of kept outputs, which
    the graph returns after the loss. With `counts` the loss is a sum over targets, and `counts`
    computes their number in a micro-batch from the inputs that it names. For the graph of one
    context rank, `undivided` is the whole graph.
    """

    name: str
    fx_graph: fx.Graph
    parameters: tuple[Parameter, ...]
    inputs: tuple[BatchInput, ...]
    loss: fx.Node
    tensors: Mapping[str, torch.Tensor] = field(repr=False)
    differentiable: frozenset[str] = field(repr=False)
    sample: Any = field(default=None, repr=False)
    fingerprint: str = ""
    positional: bool = False
    random: bool = False
    vocabulary: VocabularyLayers | None = None
    narrow: torch.dtype | None = None
    modes: Modes = Modes()
    hooks: Mapping[str, Hook] = field(default_factory=dict)
    recapture: Callable[[Any], Graph] | None = field(default=None, repr=False, compare=False)
    outputs: tuple[str, ...] = ()
    counts: fx.Graph | None = field(default=None, repr=False)
    undivided: Graph | None = field(default=None, repr=False)
    _known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, key: Hashable, find: Callable[[], T]) -> T:
        """The result of `find`, cached for each `key`: the nodes of a graph never change.

        It must depend on the graph and the key only. A graph made by `replace` starts with an empty
        cache.
        """
        if key not in self._known:
            self._known[key] = find()
        known: T = self._known[key]
        return known

    @cached_property
    def by_node(self) -> Mapping[str, Parameter]:
        """Parameters and buffers by the name of their placeholder."""
        return {parameter.node: parameter for parameter in self.parameters}

    @cached_property
    def by_name(self) -> Mapping[str, Parameter]:
        """Parameters and buffers by their name in the model (not by their aliases)."""
        return {parameter.name: parameter for parameter in self.parameters}

    @cached_property
    def roles(self) -> NodeRoles:
        """The roles of placeholders and nodes."""
        trained = frozenset(item.node for item in self.parameters if item.trainable)
        masters = frozenset(item.node for item in self.parameters if item.has_master)
        return NodeRoles(trained, self.by_node.keys() - trained, self.differentiable, masters)

    @cached_property
    def updates_weights(self) -> tuple[str, ...]:
        """Names of the parameters that the forward itself updates, as `Embedding(max_norm=)`
        does."""
        return tuple(x.name for x in self.parameters if x.mutated and not x.buffer)

    @cached_property
    def has_row_gradients(self) -> bool:
        """Whether gradients of some tables are the rows that a step looks up."""
        return any(item.looked_up for item in self.parameters)

    @property
    def dtype(self) -> torch.dtype:
        """The floating dtype of most elements of the parameters (of complex ones, the dtype of
        their parts)."""
        sizes = {torch.float32: 0}
        for item in self.parameters:
            if (item.dtype.is_floating_point or item.dtype.is_complex) and not item.buffer:
                dtype = item.dtype.to_real()
                sizes[dtype] = sizes.get(dtype, 0) + item.numel
        return max(sizes, key=lambda dtype: sizes[dtype])

    @property
    def kept(self) -> dict[str, fx.Node]:
        """The nodes of kept outputs, by name; for logits of a spread vocabulary, the node that the
        head's product reads."""
        output = next(node for node in reversed(self.fx_graph.nodes) if node.op == "output")
        nodes: Any = output.args[0]
        return dict(zip(self.outputs, nodes[1:], strict=True))

    def trains(self, blocks: Iterable[Block]) -> bool:
        """Whether something in some blocks depends on a trained parameter and leads to the loss."""
        return any(node.name in self.differentiable for block in blocks for node in block.nodes)

    @cached_property
    def input_nodes(self) -> frozenset[str]:
        """The placeholders of tensors of the batch."""
        return frozenset(item.node for item in self.inputs)

    @cached_property
    def placeholders(self) -> dict[str, fx.Node]:
        """The placeholder of each parameter, buffer and input, by the name of the node."""
        return {node.name: node for node in self.fx_graph.find_nodes(op="placeholder")}

    @cached_property
    def unread(self) -> frozenset[str]:
        """The parameters and buffers that no stage reads: the first holds them."""
        spread = self.vocabulary or VocabularyLayers()
        nodes = (node for node in self.fx_graph.nodes if node not in spread.nodes)
        used = {operand.name for node in nodes for operand in node.all_input_nodes}
        others = {item.name for item in self.parameters if item.node not in used}
        return frozenset(others.difference(spread.tensors))


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists and dictionaries, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, Mapping):
        yield from tensors_of(list(value.values()))


def is_floating(value: Any) -> bool:
    """Whether a value can have a gradient: it is a floating or complex tensor."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The shape of the tensor that a node yields for one micro-batch."""
    return tuple(node.meta["val"].shape)


def dtype_of(node: fx.Node) -> torch.dtype:
    """The dtype of the tensor that a node yields."""
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def order_of(node: fx.Node) -> tuple[int, ...]:
    """The dimensions of a node's value from the outermost in memory to the innermost.

    Empty if that is their own order. Draws of dropout, and `view`, depend on the memory order.
    """
    value: torch.Tensor = node.meta["val"]
    if value.is_contiguous():
        return ()
    stride = value.stride()
    order = tuple(sorted(range(value.dim()), key=lambda dim: -stride[dim]))
    return () if order == tuple(range(value.dim())) else order


def nbytes_of(node: fx.Node) -> int:
    """The size in bytes of the tensor that a node yields for one micro-batch."""
    return torch.Size(shape_of(node)).numel() * dtype_of(node).itemsize
