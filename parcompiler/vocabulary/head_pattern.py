"""Matches the end of a model, from the loss back to the product with the vocabulary's table.

    x ──► product ──► + bias ──► functions of each logit, casts ──► views, slices ──► cross_entropy

The loss is a cross-entropy, or log-softmax and nll, perhaps times a constant; on a context rank it
is that of its own rows, and an all-reduce adds up the losses of all. Functions and operations on
rows may come in any order, as they are independent: rows can be taken of x, before the product. The
product may be written in several ways:

    linear(x, W, b)   matmul(x, Wᵀ)   mm(x, Wᵀ)   addmm(b, x, Wᵀ)   einsum("bsh,vh->bsv", x, W)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import fx

from parcompiler.capture.effects import CASTS, arguments_of, name_of, overload_name
from parcompiler.graph import CrossEntropy, Graph, Parameter, dtype_of, shape_of
from parcompiler.spmd.elementwise import REDUCTIONS
from parcompiler.spmd.views import RESHAPES, permutation
from parcompiler.vocabulary.nodes import (
    is_copy,
    source,
    tensor_of,
    transposed,
)

CROSS_ENTROPIES = ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")
_OF_ROWS = "cross_entropy_of_rows"  # that of a context rank's own rows
_FUNCTIONS = frozenset(
    "mul div add sub rsub neg tanh sigmoid clamp clamp_min clamp_max hardtanh pow exp log softplus "
    "relu abs sqrt square asinh nan_to_num type_as to _to_copy float double half bfloat16".split()
)


class WholeError(Exception):
    """Raised where a layer that looks like a head cannot be shared, with the reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def keep_whole(reason: str) -> NoReturn:
    """Raise WholeError with this reason."""
    raise WholeError(reason)


def _needs_logits(operator: str) -> NoReturn:
    keep_whole(f"a loss that needs whole logits ({operator})")


@dataclass(frozen=True, slots=True)
class RowOperation:
    """An operation on rows of the logits, in the form that it has on rows of the head's input.

    `args` follow that input; `node` is the node on the logits.
    """

    node: fx.Node
    target: Any
    args: tuple[Any, ...]


# The cross-entropy


@dataclass(frozen=True, slots=True)
class Criterion:
    """The cross-entropy at the end of a graph; classes are dimension 1 of the logits (or 0).

    `normalized` says that the logits must already be log-probabilities.
    """

    node: fx.Node
    logits: fx.Node
    targets: fx.Node
    weight: fx.Node | None
    loss: CrossEntropy
    normalized: bool = False


def match_loss(graph: Graph) -> Criterion:
    """The cross-entropy of the loss of `graph`. Raises WholeError with the reason if it is none."""
    node, scale, reduction = graph.loss, 1.0, ""  # a reduction after that of the cross-entropy
    axis = ""
    while (criterion := _cross_entropy(node)) is None:
        name = name_of(node)
        operand, number = (*node.args, None, None)[:2]
        if name in ("add", "sub", "add_") and len(node.all_input_nodes) > 1:
            others = any(name_of(item) in CROSS_ENTROPIES for item in graph.fx_graph.nodes)
            terms = "the loss has other terms besides the cross-entropy"
            keep_whole(terms if others else "the loss is no cross-entropy")
        if not isinstance(operand, fx.Node) or len(operand.users) != 1:
            _needs_logits(name or node.name)
        if name in ("mul", "div") and isinstance(number, int | float):
            if node.kwargs.get("rounding_mode") is not None:
                _needs_logits(name)
            scale = scale * number if name == "mul" else scale / number
        elif name == "neg":
            scale = -scale
        elif name == "all_reduce" and node.kwargs.get("axis") == "context":
            axis = "context"
        elif name == "once":
            keep_whole("every context rank computes its loss on all rows")
        elif name in ("mean", "sum") and not (reduction or shape_of(node) or len(node.args) > 1):
            if dtype_of(node) != dtype_of(operand):
                _needs_logits(name)
            reduction = name
        elif not is_copy(node):
            if name not in RESHAPES or operand.meta["val"].numel() != 1:
                _needs_logits(name)
        node = operand
    loss = replace(criterion.loss, axis=axis, scale=scale)
    if loss.reduction == "none":
        count = math.prod(shape_of(criterion.targets))
        if not reduction and count != 1:
            keep_whole("a loss that needs that of each token")
        scale = scale / count if reduction == "mean" else scale
        loss = replace(loss, reduction="sum", scale=scale)
    # After any other reduction, a sum or mean is that of one number.
    return replace(criterion, loss=loss)


def _cross_entropy(node: fx.Node) -> Criterion | None:
    """The criterion if a node is a cross-entropy, else None."""
    name, values = name_of(node), arguments_of(node)
    if name == _OF_ROWS:
        return _of_rows(node)
    if name not in CROSS_ENTROPIES:
        return None
    if values["target"].meta["val"].is_floating_point():
        keep_whole("targets that are probabilities need whole logits")
    normalized = name != "cross_entropy_loss"
    return Criterion(
        node=node,
        logits=values["self"],
        targets=values["target"],
        weight=values["weight"],
        loss=CrossEntropy(
            values["ignore_index"],
            0.0 if normalized else float(values["label_smoothing"]),
            REDUCTIONS[values["reduction"]],
        ),
        normalized=normalized,
    )


def _of_rows(node: fx.Node) -> Criterion:
    """The criterion of a context rank's rows, whose mean is over the rows of all."""
    logits, targets = node.args
    assert isinstance(logits, fx.Node)
    assert isinstance(targets, fx.Node)
    values: Any = node.kwargs
    if "weight" in values:
        keep_whole("its mean counts rows of other context ranks by the weights of their classes")
    names = ("ignore_index", "label_smoothing", "zigzag")
    arguments = {name: values[name] for name in names if name in values}
    loss = CrossEntropy(sizes=tuple(values.get("sizes", shape_of(targets))), **arguments)
    return Criterion(node, logits, targets, None, loss)


# The product


@dataclass(frozen=True, slots=True)
class TableProduct:
    """x Wᵀ for a parameter W [V, h]: `dim` is the dimension of V in the result.

    `rows` move the dimension of h in x to `dim`. A product with a parameter [h, V] has no `dim`.
    """

    node: fx.Node
    x: fx.Node
    weight: Parameter
    dim: int | None
    bias: fx.Node | None = None
    rows: tuple[RowOperation, ...] = ()


def match_product(graph: Graph, node: fx.Node) -> TableProduct | None:
    """The product with a table that a node is; None when it is something else."""
    name, bias = name_of(node), None
    if name == "einsum":
        return _einsum(graph, node)
    if name in ("matmul", "mm"):
        x, table = node.args[:2]
    elif name == "linear":
        values = arguments_of(node)
        x, table, bias = values["input"], values["weight"], values["bias"]
    elif name == "addmm":
        values = arguments_of(node)
        if not values["beta"] == values["alpha"] == 1:
            return None
        x, table, bias = values["mat1"], values["mat2"], values["self"]
    else:
        return None
    if not isinstance(x, fx.Node) or not isinstance(table, fx.Node):
        return None
    matrix = transposed(table)
    tensor = graph.by_node.get((source(table) if matrix is None else matrix).name)
    if tensor is None or len(tensor.shape) != 2:
        return None
    has_rows = (matrix is not None) == (name != "linear")  # stored as [V, h]
    dim = len(shape_of(node)) - 1 if has_rows else None
    return TableProduct(node, x, tensor, dim, bias if isinstance(bias, fx.Node) else None)


def _einsum(graph: Graph, node: fx.Node) -> TableProduct | None:
    """An einsum of two operands, one of them the table, that sums over one letter only."""
    equation, operands = node.args[0], node.args[1]
    if not isinstance(equation, str) or not isinstance(operands, list | tuple):
        return None
    left, _, result = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != 2 or len(operands) != 2 or "." in equation or not result:
        return None
    for place in (1, 0):
        table, x = operands[place], operands[1 - place]
        letters, other = terms[place], terms[1 - place]
        assert isinstance(table, fx.Node)
        assert isinstance(x, fx.Node)
        tensor = graph.by_node.get(source(table).name)
        if tensor is None or len(letters) != 2:
            continue
        new = [letter for letter in letters if letter in result and letter not in other]
        summed = [letter for letter in letters if letter in other and letter not in result]
        if len(new) != 1 or len(summed) != 1:
            continue
        if sorted(result.replace(new[0], summed[0])) != sorted(other):
            continue
        order = [other.index(summed[0] if letter == new[0] else letter) for letter in result]
        moved = RowOperation(node, torch.ops.aten.permute.default, (order,))
        rows = () if order == list(range(len(order))) else (moved,)
        dim = result.index(new[0]) if letters[0] == new[0] else None
        return TableProduct(node, x, tensor, dim, rows=rows)
    return None


# Between the product and the loss


@dataclass
class Chain:
    """The nodes from the product to the loss; `dim` is the dimension of the classes so far.

    `kept` are the nodes that are kept outputs, with whether they come after all functions or are
    the plain product.
    """

    product: TableProduct
    dim: int
    rows: list[RowOperation] = field(default_factory=list)
    functions: list[fx.Node] = field(default_factory=list)
    bias: fx.Node | None = None
    normalized: bool = False
    kept: dict[fx.Node, bool] = field(default_factory=dict)


def match_chain(graph: Graph, criterion: Criterion) -> Chain:
    """The chain that leads to a criterion. Raises WholeError with the reason if there is none."""
    between: list[fx.Node] = []
    node = criterion.logits
    while True:
        product = match_product(graph, node)
        operands = node.all_input_nodes
        if node.op != "call_function" or not (product or operands):
            keep_whole("its logits are no product with a parameter")
        if sum(user.op != "output" for user in node.users) != 1:
            keep_whole("a loss that needs whole logits (they are read twice)")
        if node.meta.get("contexts"):
            keep_whole("its logits are computed under autocast or no_grad")
        if product is not None:
            break
        between.append(node)
        first = node.args[0]
        node = max(operands, key=lambda item: (_numel(item), item is first))
    if product.dim is None:
        keep_whole("its weight is stored as [h, V]")
    chain = Chain(product, product.dim, rows=list(product.rows), bias=product.bias)
    for item in reversed(between):
        _add(graph, chain, item)
    while chain.functions and overload_name(last := chain.functions[-1]) in CASTS:
        if (dtype_of(last.all_input_nodes[0]).itemsize, dtype_of(last)) != (2, torch.float32):
            break
        chain.functions.pop()  # softmax computes in float32 anyway
    _note_kept(chain, between[::-1])
    if criterion.normalized and not chain.normalized:
        keep_whole("an nll that reads no log-softmax")
    if chain.dim != min(1, len(shape_of(criterion.logits)) - 1):
        keep_whole("the classes of the loss are not its rows")
    return chain


def _note_kept(chain: Chain, behind: list[fx.Node]) -> None:
    """Record the nodes that are kept outputs: the product, or a function in `behind` after it."""
    product, moved = chain.product, {row.node for row in chain.rows}
    for k, node in enumerate([product.node, *behind]):
        if not any(user.op == "output" for user in node.users):
            continue
        before, after = {product.node, *behind[:k]}, {*behind[k:]}
        done = [function for function in chain.functions if function in before]
        added = chain.bias not in (None, product.bias)
        whole = product.dim == len(shape_of(product.node)) - 1 and not moved & before
        ready = not added or any(chain.bias in item.all_input_nodes for item in before)
        if not (whole and ready) or (done and {*chain.functions} & after):
            keep_whole("an output that is kept of its logits is neither its product nor their end")
        chain.kept[node] = bool(done)


def _numel(node: fx.Node) -> int:
    """Number of elements of a value; 0 for a list, and where it depends on the data."""
    value = node.meta.get("val")
    numel = value.numel() if isinstance(value, torch.Tensor) else 0
    return numel if isinstance(numel, int) else 0


def _add(graph: Graph, chain: Chain, node: fx.Node) -> None:
    """Append one node to the chain."""
    name = overload_name(node).removesuffix("_")
    if is_copy(node):
        return
    if name == "add" and len(node.all_input_nodes) == 2:
        _add_bias(graph, chain, node)
    elif name in ("log_softmax", "_log_softmax"):
        _add_softmax(chain, node)
    elif name in _FUNCTIONS and (name == "type_as" or len(node.all_input_nodes) == 1):
        if chain.normalized:
            _needs_logits(f"{name} of log-probabilities")
        chain.functions.append(node)
    else:
        chain.rows.append(_row_operation(chain, node, name))


def _add_bias(graph: Graph, chain: Chain, node: fx.Node) -> None:
    """Append the addition of a bias, a number for each class."""
    first, second = node.args[:2]
    assert isinstance(first, fx.Node)
    assert isinstance(second, fx.Node)
    bias = second if _numel(first) >= _numel(second) else first
    shape, bias_shape = shape_of(node), shape_of(bias)
    behind = len(shape) - chain.dim
    aligned = len(bias_shape) >= behind and bias_shape[-behind] == shape[chain.dim]
    one_each = math.prod(bias_shape) == shape[chain.dim]
    if tensor_of(graph, bias) is None or not aligned or not one_each:
        keep_whole("something else is added to its logits")
    if chain.functions or chain.normalized or chain.bias is not None:
        keep_whole("its bias is not added to the product itself")
    if node.kwargs.get("alpha", 1) != 1 or dtype_of(bias) != dtype_of(node):
        keep_whole("its bias is scaled or of another precision")
    chain.bias = bias


def _add_softmax(chain: Chain, node: fx.Node) -> None:
    """Append a log-softmax over the classes, which the shared head includes."""
    values = arguments_of(node)
    if values["dim"] % len(shape_of(node)) != chain.dim:
        keep_whole("a log-softmax of another dimension")
    if values.get("dtype") is not None or values.get("half_to_float"):
        (operand,) = node.all_input_nodes
        if dtype_of(operand) != dtype_of(node):
            keep_whole("its log-softmax is in another precision")
    chain.normalized = True


def _row_operation(chain: Chain, node: fx.Node, name: str) -> RowOperation:
    """The row operation of a node, with -1 for the number of classes; updates `dim`."""
    operand = node.args[0]
    if not isinstance(operand, fx.Node):
        _needs_logits(name)
    before, after, dim = shape_of(operand), shape_of(node), chain.dim
    values = arguments_of(node)
    if name in RESHAPES:
        ahead = math.prod(before[:dim])
        places = [i for i, size in enumerate(after)
                  if size == before[dim] and math.prod(after[:i]) == ahead]  # fmt: skip
        if not places:
            keep_whole("its classes are divided")
        chain.dim = places[0]
        sizes = [-1 if i == chain.dim else size for i, size in enumerate(after)]
        return RowOperation(node, torch.ops.aten.reshape.default, (sizes,))
    if (order := permutation(node)) is not None:
        chain.dim = order.index(dim)
        return RowOperation(node, torch.ops.aten.permute.default, (order,))
    if name in ("slice", "select", "narrow", "index_select"):
        along = values["dim"] % len(before)
        if along == dim:
            keep_whole("its classes are divided")
        chain.dim -= name == "select" and along < dim
        return RowOperation(node, node.target, tuple(node.args[1:]))
    _needs_logits(name or node.name)
