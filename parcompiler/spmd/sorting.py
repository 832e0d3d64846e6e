"""Rows that each context rank sorts for itself: those of a mixture of experts, by expert.

    whole                       on each of 2 ranks            types
    experts of [b a a b c a]    of [b a a]    of [b c a]      S(0)         as tokens are dealt
    sort         a a a b b c    a a b         a b c           S(0 sorted)
    row of each  1 2 5 0 3 4    1 2 0         2 0 1           S(0 sorted)  numbers of own rows
    ends of each 3 5 6          2 3 3         1 2 3           P(0 sorted)  summands of own rows
    products     by expert      of own rows                   S(0 sorted)
    and back     rows[inverse]                                S(0)

The output of experts for a row depends on that row alone, so that a rank may sort its own rows. Row
numbers are then local, which no rule of a single operator can express: such parts of a graph are
found as a whole, from the sort to the rows in their original order, and offered to the programme.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from parcompiler.capture.effects import CASTS
from parcompiler.graph import Graph
from parcompiler.spmd.call import NodeCall, Operand, call_of
from parcompiler.spmd.experts import GROUPED
from parcompiler.spmd.placement import P, Placement, R, S
from parcompiler.spmd.rows import Rows, SortedNode, causal_lengths
from parcompiler.spmd.rules import strategies
from parcompiler.spmd.segments import VIEWS
from parcompiler.spmd.strategy import SizeArgument, Strategy
from parcompiler.spmd.views import SIZE_ARGUMENTS

OWN_ORDER = "own order"  # numbers are generated for the rank's own rows
PIECE = S(0)
SORTED = replace(PIECE, sorted=True)
COUNTS = replace(P, dim=0, sorted=True)  # other summands are not counts of the rank's rows
SUMS = ("cumsum", *CASTS)


def rows_of(graph: Graph, axis: str) -> Rows | None:
    """Facts about the rows of a graph; None on the tensor axis."""

    def found() -> Rows:
        return Rows(frozenset(causal_lengths(graph)), _sorting(graph))

    return None if axis == "tensor" else graph.once("rows", found)


def _sorting(graph: Graph) -> Mapping[fx.Node, SortedNode]:
    """The nodes that compute with rows which ranks may sort for themselves."""
    sorted_nodes: dict[fx.Node, SortedNode] = {}
    for node in graph.fx_graph.nodes:
        if node.op == "call_function" and call_of(node, graph).base in ("sort", "argsort"):
            sorted_nodes |= _Sorted(graph, node).nodes()
    return sorted_nodes


class _Sorted:
    """The nodes that compute with the rows of one sort.

    `kinds` tells what the elements of each value are: `rows` by expert (and the experts
    themselves), the sorting `order`, the `tokens` of the rows, `counts` by expert, the `inverse` of
    the order, memory for that (`blank`), and rows `back` in their original order.
    """

    def __init__(self, graph: Graph, sort: fx.Node) -> None:
        self.graph, self.sort = graph, sort
        self.tokens = self.rows = 0
        self.kinds: dict[fx.Node, str] = {}
        self.strategies: dict[fx.Node, Strategy] = {}

    def nodes(self) -> Mapping[fx.Node, SortedNode]:
        """The nodes with their strategies; none if one of them needs the rows of all ranks."""
        call = call_of(self.sort, self.graph)
        if [len(shape) for shape in call.shapes] != [1] or call.operands[0].differentiable:
            return {}
        (self.rows,) = call.shapes[0]
        if not self._in_pieces(call.operands[0].node):
            return {}
        self.strategies[self.sort] = Strategy((PIECE,), (SORTED,) * len(call.results))
        self.kinds[self.sort] = "order"
        for node in self.graph.fx_graph.nodes:
            if node is not self.sort and any(one in self.kinds for one in node.all_input_nodes):
                if node.op != "call_function" or not self._follow(call_of(node, self.graph)):
                    return {}
        return {node: SortedNode(x, self.tokens) for node, x in self.strategies.items()}

    def _in_pieces(self, node: fx.Node) -> bool:
        """Whether unsorted rows can be in pieces like their tokens: from the view that makes them
        from the choices of every token."""
        if node in self.strategies:
            return node not in self.kinds or self.kinds[node] == "back"
        if node.op != "call_function":
            return False
        call = call_of(node, self.graph)
        if len(call.shapes) == 1 and call.base in VIEWS and self._joins(call):
            self.tokens = call.shapes[0][0]
            self.strategies[node] = _view(call)
            return True
        return self._each_row(call, PIECE, ())

    def _joins(self, call: NodeCall) -> bool:
        """Whether a view makes rows [tokens · k] from choices [tokens, k], with the same number of
        tokens as all others."""
        (before,), (after,) = call.shapes, call.result_shapes
        known = self.tokens in (0, before[0] if before else 0)
        return len(before) == 2 and after == (self.rows,) and known

    def _follow(self, call: NodeCall) -> bool:
        """Whether a node can be computed with the rows of each rank; notes its strategy."""
        kinds = [self.kinds.get(operand.node, "") for operand in call.operands]
        made = self._known(call, kinds)
        if made is not None:
            kind, strategy = made
            self.strategies[call.node] = strategy
            if kind:
                self.kinds[call.node] = kind
            return True
        inside = set(kinds) - {""}
        if inside not in ({"rows"}, {"back"}):
            return False
        (kind,) = inside
        sorted_operands = [
            operand.node for operand, x in zip(call.operands, kinds, strict=True) if x
        ]
        if self._each_row(call, SORTED if kind == "rows" else PIECE, sorted_operands):
            self.kinds[call.node] = kind
            return True
        return False

    def _known(self, call: NodeCall, kinds: Sequence[str]) -> tuple[str, Strategy] | None:
        """The kind and the strategy of calls that do not act on each row; None for other calls."""
        match call.base, kinds:
            case _, ["order"] if call.is_item and call.operands[0].node is self.sort:
                kind = "order" if call.node.args[1] else "rows"
            case "floor_divide", ["order"] if self._is_token(call):
                kind = "tokens"
            case "index", ["", "tokens"] if call.shapes[0][0] == self.tokens:
                return "rows", Strategy((PIECE, SORTED), (SORTED,))
            case "index", ["" | "back", "order"] if self._in_pieces(call.operands[0].node):
                return "rows", Strategy((PIECE, SORTED), (SORTED,))
            case "index", ["rows", "inverse"]:
                return "back", Strategy((SORTED, SORTED), (PIECE,))
            case "index_add", ["", "tokens", "rows"] if self._is_of_tokens(call):
                return "", Strategy((PIECE, SORTED, SORTED), (PIECE,))
            case "argsort", ["order"]:
                kind = "inverse"
            case "empty_like", ["order"]:
                kind = "blank"
            case "index_put", ["blank", "order", ""] if self._is_numbered(call):
                return "inverse", Strategy((SORTED, SORTED, R), (SORTED,), special=OWN_ORDER)
            case "histc", ["rows"] if _has_bins(call):
                return "counts", Strategy((SORTED,), (COUNTS,))
            case sums, ["counts"] if sums in SUMS:
                return "counts", Strategy((COUNTS,), (COUNTS,))
            case product, ["rows", "", _] if product in GROUPED and self._counted(call.operands[2]):
                return "rows", Strategy((SORTED, R, COUNTS), (SORTED,))
            case view, ["back"] if view in VIEWS and self._parts(call):
                return "", _view(call)
            case _:
                return None
        return kind, Strategy((SORTED,), (SORTED,))

    def _counted(self, operand: Operand) -> bool:
        """Whether a value says how many rows the experts have: of the sorted ones, or of those in
        their first order, where nothing else reads it."""
        node = operand.node
        if node in self.kinds:
            return self.kinds[node] == "counts"
        call = call_of(node, self.graph) if node.op == "call_function" else None
        if call is None or not self._reads_counts(node):
            return False
        (source, *others) = call.operands
        if call.base == "histc" and _has_bins(call):
            of_tokens = source.shape[0] == self.tokens
            known, strategy = (
                of_tokens or self._in_pieces(source.node),
                Strategy((PIECE,), (COUNTS,)),
            )
        else:
            known = call.base in SUMS and not others and self._counted(source)
            strategy = Strategy((COUNTS,), (COUNTS,))
        if known:
            self.strategies[node] = strategy
        return known

    def _reads_counts(self, node: fx.Node) -> bool:
        """Whether sums and products alone read a value."""
        bases = {call_of(x, self.graph).base for x in node.users if x.op == "call_function"}
        return bases <= {*SUMS, *GROUPED} and all(x.op == "call_function" for x in node.users)

    def _is_of_tokens(self, call: NodeCall) -> bool:
        """Whether rows are added to what their tokens have."""
        return call.shapes[0][0] == self.tokens and call.arguments["dim"] == 0

    def _is_token(self, call: NodeCall) -> bool:
        """Whether numbers of rows are divided by the choices of each token."""
        return call.arguments.get("other") == self.rows // self.tokens

    def _is_numbered(self, call: NodeCall) -> bool:
        """Whether the numbers 0, 1, 2, ... of all rows are written."""
        numbers = call.operands[-1].node
        made = call_of(numbers, self.graph) if numbers.op == "call_function" else None
        if made is None or made.base != "arange" or call.arguments.get("accumulate"):
            return False
        bounds = made.arguments.get("start", 0), made.arguments.get("end")
        return bounds == (0, self.rows) and made.arguments.get("step", 1) == 1

    def _parts(self, call: NodeCall) -> bool:
        """Whether a view makes [tokens, k, ...] of rows [tokens · k, ...]."""
        (before,), (after,) = call.shapes, call.result_shapes
        return after == (self.tokens, self.rows // self.tokens, *before[1:])

    def _each_row(self, call: NodeCall, kind: Placement, in_order: Sequence[fx.Node]) -> bool:
        """Whether a call acts on each row alone, of operands `in_order` and others in such pieces
        or whole; notes its strategy."""
        for strategy in strategies(call.node, 2, differentiable=self.graph.differentiable):
            if strategy.special or strategy.draws or {*strategy.types} - {PIECE, R}:
                continue
            pairs = list(zip(call.operands, strategy.inputs, strict=True))
            split = {operand.node for operand, placement in pairs if placement == PIECE}
            rows = all(shape[0] == self.rows for shape in call.result_shapes)
            if R in strategy.outputs or not rows or not split.issuperset(in_order):
                continue
            others = split.difference(in_order)
            if others and (kind == SORTED or not all(map(self._in_pieces, others))):
                continue
            types = (kind if placement == PIECE else R for placement in strategy.types)
            self.strategies[call.node] = strategy.placed(types)
            return True
        return False


def _has_bins(call: NodeCall) -> bool:
    """Whether the bins of a histogram are independent of its data."""
    return bool(call.arguments["min"] < call.arguments["max"])


def _view(call: NodeCall) -> Strategy:
    """A view of pieces of the first dimension."""
    argument, size = SIZE_ARGUMENTS.get(call.base), call.result_shapes[0][0]
    known = argument and call.arguments[argument][0] != -1
    return Strategy((PIECE,), (PIECE,), (SizeArgument(str(argument), 0, size),) if known else ())
