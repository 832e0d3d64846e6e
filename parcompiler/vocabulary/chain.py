"""From the logits that a cross-entropy reads back to the product that makes them.

    x ──► product ──► + bias ──► functions of each logit, casts ──► views, slices ──► cross_entropy

Functions and operations on rows may come in any order, for they do not touch: the rows can be taken
of x, before the product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import fx

from parcompiler.capture.effects import overload_name
from parcompiler.graph import Graph, dtype_of, shape_of
from parcompiler.vocabulary.criterion import Criterion
from parcompiler.vocabulary.found import Row
from parcompiler.vocabulary.product import Product, product
from parcompiler.vocabulary.reading import arguments, held, is_same

_FUNCTIONS = frozenset(
    "mul div add sub rsub neg tanh sigmoid clamp clamp_min clamp_max hardtanh pow exp log softplus "
    "relu abs sqrt square asinh nan_to_num type_as to _to_copy float double half bfloat16".split()
)
_FORMS = frozenset("view reshape flatten unflatten unsqueeze squeeze _unsafe_view".split())
_SOFTMAX = frozenset(("log_softmax", "_log_softmax"))


@dataclass
class Chain:
    """The way from the product to the loss: `dim` is where the classes are now."""

    product: Product
    dim: int
    rows: list[Row] = field(default_factory=list)
    functions: list[fx.Node] = field(default_factory=list)
    bias: fx.Node | None = None
    normalized: bool = False


class WholeError(Exception):
    """The reason why what looks like a head is none."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def keep_whole(reason: str) -> NoReturn:
    """Raise the reason."""
    raise WholeError(reason)


def follow(graph: Graph, end: Criterion) -> Chain:
    """The chain behind a criterion. Raises WholeError with the reason why there is none."""
    between: list[fx.Node] = []
    node = end.logits
    while (made := product(graph, node)) is None:
        _check(node)
        between.append(node)
        node = _carried(node)
    _check(node)
    if made.dim is None:
        keep_whole("its weight is stored as [h, V]")
    chain = Chain(made, made.dim, rows=list(made.rows), bias=made.bias)
    for item in reversed(between):
        _step(graph, chain, item)
    while chain.functions and _widens(chain.functions[-1]):
        chain.functions.pop()  # the softmax of logits is in float32 anyway
    if end.normalized and not chain.normalized:
        keep_whole("an nll that reads no log-softmax")
    if chain.dim != min(1, len(shape_of(end.logits)) - 1):
        keep_whole("the classes of the loss are not its rows")
    return chain


def _widens(node: fx.Node) -> bool:
    """Whether a node casts 16 bits to float32."""
    (operand,) = node.all_input_nodes[:1]
    cast = overload_name(node) in ("to", "_to_copy", "type_as", "float")
    return cast and dtype_of(operand).itemsize == 2 and dtype_of(node) == torch.float32


def _check(node: fx.Node) -> None:
    """Stop at a node that others read, or that is computed in another mode."""
    if node.op != "call_function":
        keep_whole("its logits are no product with a parameter")
    if len(node.users) != 1:
        keep_whole("a loss that needs whole logits (they are read twice)")
    if node.meta.get("contexts"):
        keep_whole("its logits are computed under autocast or no_grad")


def _carried(node: fx.Node) -> fx.Node:
    """The operand of a node that has the logits."""
    operands = node.all_input_nodes
    if not operands:
        keep_whole("its logits are no product with a parameter")
    first = node.args[0]
    return max(operands, key=lambda item: (_numel(item), item is first))


def _numel(node: fx.Node) -> int:
    """Elements of a value; none of a list."""
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else 0


def _step(graph: Graph, chain: Chain, node: fx.Node) -> None:
    """Add one node behind those before it."""
    name = overload_name(node).removesuffix("_")
    if is_same(node):
        return
    if name in ("add", "add_") and len(node.all_input_nodes) == 2:
        _biased(graph, chain, node)
    elif name in _SOFTMAX:
        _normalized(chain, node)
    elif name in _FUNCTIONS and _is_function(node, name):
        if chain.normalized:
            keep_whole(f"a loss that needs whole logits ({name} of log-probabilities)")
        chain.functions.append(node)
    else:
        chain.rows.append(_row(chain, node, name))


def _is_function(node: fx.Node, name: str) -> bool:
    """Whether a node is a function of each element alone."""
    others = node.all_input_nodes[1:]
    return name == "type_as" or not others


def _biased(graph: Graph, chain: Chain, node: fx.Node) -> None:
    """The sum with a number for each class."""
    first, second = node.args[:2]
    assert isinstance(first, fx.Node)
    assert isinstance(second, fx.Node)
    other = second if _numel(first) >= _numel(second) else first
    known = held(graph, other)
    shape, behind = shape_of(node), len(shape_of(node)) - chain.dim
    mine = shape_of(other)
    aligned = len(mine) >= behind and mine[len(mine) - behind] == shape[chain.dim]
    if known is None or not aligned or math.prod(mine) != shape[chain.dim]:
        keep_whole("something else is added to its logits")
    if chain.functions or chain.normalized or chain.bias is not None:
        keep_whole("its bias is not added to the product itself")
    if node.kwargs.get("alpha", 1) != 1 or dtype_of(other) != dtype_of(node):
        keep_whole("its bias is scaled or of another precision")
    chain.bias = other


def _normalized(chain: Chain, node: fx.Node) -> None:
    """A log-softmax over the classes: the cross-entropy has one of its own."""
    given = arguments(node)
    if given["dim"] % len(shape_of(node)) != chain.dim:
        keep_whole("a log-softmax of another dimension")
    if given.get("dtype") is not None or given.get("half_to_float"):
        (operand,) = node.all_input_nodes
        if dtype_of(operand) != dtype_of(node):
            keep_whole("its log-softmax is in another precision")
    chain.normalized = True


def _row(chain: Chain, node: fx.Node, name: str) -> Row:
    """An operation on rows, with -1 for the size of the classes; moves `dim`."""
    operand = node.args[0]
    if not isinstance(operand, fx.Node):
        keep_whole(f"a loss that needs whole logits ({name})")
    before, after, dim = shape_of(operand), shape_of(node), chain.dim
    given = arguments(node)
    if name in _FORMS:
        ahead = math.prod(before[:dim])
        places = [i for i, size in enumerate(after)
                  if size == before[dim] and math.prod(after[:i]) == ahead]  # fmt: skip
        if not places:
            keep_whole("its classes are divided")
        chain.dim = places[0]
        sizes = [-1 if i == chain.dim else size for i, size in enumerate(after)]
        return Row(node, torch.ops.aten.reshape.default, (sizes,))
    if name in ("transpose", "permute", "t", "swapaxes"):
        order = _order(name, given, len(before))
        chain.dim = order.index(dim)
        return Row(node, torch.ops.aten.permute.default, (order,))
    if name in ("slice", "select", "narrow", "index_select"):
        along = given["dim"] % len(before)
        if along == dim:
            keep_whole("its classes are divided")
        chain.dim -= name == "select" and along < dim
        return Row(node, node.target, tuple(node.args[1:]))
    keep_whole(f"a loss that needs whole logits ({name or node.name})")


def _order(name: str, given: dict[str, object], dims: int) -> list[int]:
    """The dimensions of the operand, in the order of the result."""
    if name == "permute":
        asked = given["dims"]
        assert isinstance(asked, list | tuple)
        return [dim % dims for dim in asked]
    order = list(range(dims))
    one, other = (given["dim0"], given["dim1"]) if name == "transpose" else (0, dims - 1)
    assert isinstance(one, int)
    assert isinstance(other, int)
    order[one % dims], order[other % dims] = order[other % dims], order[one % dims]
    return order
