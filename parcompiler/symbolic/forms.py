"""The costs of a template's blocks as closed forms in the sizes of the captured model.

the model, captured at some sizes
    │  local, trace_block     the cost of each template's first block there, on a tensor rank
    │  fit                    exact polynomials, checked at further sizes
    ▼
ClosedForms                   FLOPs and bytes of each template as expressions

A cost of a block is a sum of products of sizes, of low degree: 1 in the batch, 2 in the lengths
together (attention). One of `t` ranks computes, moves and sends a part of the whole: a sum of A,
B/t and, for all-to-alls, C/t². The coefficients follow exactly from the values at equally many
points; further points show whether the degrees were high enough.

The workspace peak is a maximum over operators, and so has no polynomial form. An operator reads at
most all rows of a table: such a cost is the smaller of two polynomials.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from parcompiler.cost import BlockCost, trace_block
from parcompiler.cost.collective import SENT
from parcompiler.cost.operation import EXCHANGE, label
from parcompiler.errors import ParcompilerError
from parcompiler.graph import Block, Graph
from parcompiler.problem import Problem
from parcompiler.spmd.runtime_call import Piece, RuntimeCall
from parcompiler.symbolic.naming import named, symbol
from parcompiler.symbolic.sizes import InputSize, Sizes, Unfit, sizes_of

if TYPE_CHECKING:
    import sympy
    from sympy.polys.matrices import DomainMatrix


@dataclass(frozen=True)
class Forms:
    """The costs of a template's block for one micro-batch on one rank, as expressions.

    `flops_*` count a multiplication with its addition as 2; all others are bytes: `bytes_*` are
    moved between the device and its memory, `sent_*` are sent to other ranks of the tensor axis,
    `saved` is kept from the forward to the backward, `message` is the size of all outputs.
    `parameters`, `gradients` and `optimizer` are those of trainable parameters.
    """

    flops_forward: sympy.Expr
    flops_backward: sympy.Expr
    bytes_forward: sympy.Expr
    bytes_backward: sympy.Expr
    sent_forward: sympy.Expr
    sent_backward: sympy.Expr
    saved: sympy.Expr
    message: sympy.Expr
    parameters: sympy.Expr
    gradients: sympy.Expr
    optimizer: sympy.Expr

    @property
    def averaged(self) -> sympy.Expr:
        """Bytes that the rank sends to its data replicas, `d` with itself, once a step."""
        share: Callable[..., Any] = SENT["all-reduce"]
        sent: sympy.Expr = share(self.gradients, symbol("d"))
        return sent


STATE = ("parameters", "gradients", "optimizer")
FIELDS = tuple(field.name for field in dataclasses.fields(Forms))
TABLES = ("aten.embedding.default", "aten.index_select.default", "aten.index.Tensor")
FEWEST = 3  # numbers of tensor ranks to fit A + B/t and check it; one more for C/t²
FINEST = 4096  # the largest denominator of a cost, as ranks send fractions of the whole

# A template and a field of `Forms`, "inner" (the bytes saved besides those of the outputs) or
# "tables"; or "" and the name of a node, whose numbers are its shape.
Key = tuple[str, str]
Quantities = Mapping[Key, Sequence[float]]  # at some sizes
Monomial = tuple[tuple[str, int], ...]  # the power of each letter
Polynomial = Mapping[Monomial, Fraction]  # the coefficients that are not 0
ProblemAt = Callable[[Sizes], Problem]  # a rank's problem for the model at these sizes


def quantities(cost: BlockCost) -> dict[str, list[float]]:
    """The numbers of a cost whose sums are the fields of `Forms`, except those of parameters."""
    numbers: dict[str, list[float]] = {
        "saved": [cost.saved],
        "inner": [cost.saved - cost.saved_outputs],
        "message": [cost.output_bytes],
    }
    for side in ("forward", "backward"):
        operations = getattr(cost, side)
        sent = [one.nbytes * (one.kind == EXCHANGE) for one in operations]
        numbers[f"flops_{side}"] = [one.flops for one in operations]
        numbers[f"sent_{side}"] = sent
        numbers[f"bytes_{side}"] = [
            one.nbytes - nbytes for one, nbytes in zip(operations, sent, strict=True)
        ]
    return numbers


def states_of(problem: Problem, block: Block) -> dict[str, list[float]]:
    """Bytes of each trainable tensor of a block, of its gradient, and of its optimizer states."""
    tensors = [problem.graph.by_name[binding.name] for binding in block.tensors]
    tensors = [tensor for tensor in tensors if tensor.trainable]
    nbytes: list[float] = [tensor.nbytes for tensor in tensors]
    optimizer: list[float] = [problem.kept_bytes(one)[2] for one in tensors]
    return {"parameters": nbytes, "gradients": nbytes, "optimizer": optimizer}


class RankCosts:
    """The costs of a rank's templates at any sizes; `at` returns the rank's problem there."""

    def __init__(self, problem: Problem, level: int, at: ProblemAt) -> None:
        self.problem, self.at = problem, at
        self.cut = problem.priced(level).cut
        self.first: dict[str, Block] = {}  # of each template, on behalf of the others
        for block in self.cut.blocks:
            self.first.setdefault(block.template, block)
        self._problems: dict[tuple[int, ...], Problem] = {}
        self._traced: dict[tuple[int, ...], dict[str, BlockCost]] = {}

    def problem_at(self, sizes: Sizes) -> Problem:
        """The problem at some sizes. Raises Unfit."""
        key = tuple(sizes.values())
        if key not in self._problems:
            try:
                self._problems[key] = self.at(sizes)
            except ParcompilerError as error:
                raise Unfit(str(error)) from error
        return self._problems[key]

    def traced(self, sizes: Sizes) -> dict[str, BlockCost]:
        """The cost of a block of each template at some sizes. Raises Unfit."""
        key = tuple(sizes.values())
        if key not in self._traced:
            graph = self.problem_at(sizes).graph
            self._traced[key] = {}
            for name, block in self.first.items():
                nodes, inputs, outputs = (
                    _twins(nodes, graph) for nodes in (block.nodes, block.inputs, block.outputs)
                )
                self._traced[key][name] = trace_block(
                    nodes, inputs, outputs, graph.roles, accelerator=self.problem.accelerator
                )
        return self._traced[key]

    def quantities(self, sizes: Sizes) -> Quantities:
        """The quantities of each template, and the shapes of values between blocks, at some sizes.
        Raises Unfit.

        Reads of tables are not in `bytes_forward`: each is as large as the operator's result (one
        element for each FLOP), but at most the bytes under "tables".
        """
        problem, numbers = self.problem_at(sizes), dict[Key, Sequence[float]]()
        for name, cost in self.traced(sizes).items():
            block = self.first[name]
            tables = tables_of(block, cost, problem.graph)
            fields = quantities(cost) | states_of(problem, block)
            fields["tables"] = [*tables.values()]
            for k, nbytes in tables.items():
                read = cost.forward[k].dtype.itemsize * cost.forward[k].flops
                fields["bytes_forward"][k] -= min(read, nbytes)
            numbers |= {(name, field): row for field, row in fields.items()}
        ends = (node for block in self.first.values() for node in block.outputs)
        for node in _twins((*ends, *self.cut.prologue), problem.graph):
            if isinstance(node.meta["val"], torch.Tensor):
                numbers["", node.name] = [*node.meta["val"].shape]
        return numbers

    def operators(self, sizes: Sizes) -> object:
        """The operators that each template runs, and which values are kept; must be equal at all
        sizes."""
        return {
            name: (
                [(one.name, one.kind, one.dtype) for one in (*cost.forward, *cost.backward)],
                (cost.estimated, cost.kept_inputs, cost.kept_outputs),
            )
            for name, cost in self.traced(sizes).items()
        }

    def is_even(self, ranks: int, points: Points) -> bool:
        """Whether all tensor ranks hold and compute equally much, at all points."""
        try:
            problems = [self.problem_at(point) for point in (*points.near, points.last)]
        except Unfit:
            return False
        return all(_is_even(problem.graph, ranks) for problem in problems)


def _twins(nodes: Iterable[fx.Node], graph: Graph) -> list[fx.Node]:
    """The nodes of the same names in the graph at other sizes. Raises Unfit."""
    by_name = graph.once("nodes", lambda: {node.name: node for node in graph.fx_graph.nodes})
    twins = []
    for node in nodes:
        twin = by_name.get(node.name)
        if twin is None or twin.target != node.target:
            message = f"{node.name!r} is another operator at other sizes"
            raise Unfit(message)
        twins.append(twin)
    return twins


def tables_of(block: Block, cost: BlockCost, graph: Graph) -> dict[int, int]:
    """The bytes of parameters and buffers that operators of a block's forward read as tables, by
    the index of the operator."""
    tables = {}
    for k, operation in enumerate(cost.forward):
        if operation.name in TABLES and operation.place is not None:
            node = block.nodes[operation.place]
            read = node.args[isinstance(node.target, RuntimeCall)]  # after the indices there
            if _operator(node) == operation.name and str(read) in graph.by_node:
                tables[k] = graph.by_node[str(read)].nbytes
    return tables


def _operator(node: fx.Node) -> str:
    """The operator that a node runs; looking up a rank's own rows is an embedding."""
    sharded = isinstance(node.target, RuntimeCall) and node.target.name == "embedding"
    return TABLES[0] if sharded else label(node.target)


@dataclass(frozen=True)
class Points:
    """The sizes at which costs are sampled, for polynomials of degree 1 in the batch and of
    `degree` in the lengths together.

    Lengths go down from that of the capture, where tables of positions end, in multiples of the
    tensor ranks. Batches have several rows, as a single row has another memory layout.
    """

    sizes: tuple[InputSize, ...]
    degree: int
    ranks: int

    @property
    def powers(self) -> list[tuple[int, ...]]:
        """The powers of the sizes in the monomials."""
        ranges = [range(2 if size.letter == "b" else self.degree + 1) for size in self.sizes]
        lengths = slice(any(size.letter == "b" for size in self.sizes), None)
        return [row for row in itertools.product(*ranges) if sum(row[lengths]) <= self.degree]

    @property
    def near(self) -> list[dict[str, int]]:
        """Sample points, one for each monomial."""
        grid = [(size.letter, self._numbers(size)) for size in self.sizes]
        return [{x: row[k] for (x, row), k in zip(grid, ks, strict=True)} for ks in self.powers]

    @property
    def last(self) -> dict[str, int]:
        """A further point, for checks."""
        return {size.letter: self._numbers(size)[3] for size in self.sizes}

    @property
    def odd(self) -> dict[str, int]:
        """A further point whose lengths are primes times the ranks, for models that round sizes."""
        point = self.last
        for number, size in enumerate(self.sizes):
            if size.letter != "b":
                primes = [k for k in range(size.now // self.ranks - 1, 2, -1)
                          if all(k % n for n in range(2, k))]  # fmt: skip
                odd = [k * self.ranks for k in primes if k * self.ranks not in self._numbers(size)]
                point[size.letter] = odd[number % len(odd)] if odd else point[size.letter]
        return point

    def _numbers(self, size: InputSize) -> tuple[int, int, int, int]:
        now, ranks = size.now, self.ranks
        if size.letter == "b":
            return (rows := max(2, now)), 2 * rows, 3 * rows, 4 * rows
        step = now // (4 * ranks) * ranks or now // 4 or -now
        return now, now - 2 * step, now - 3 * step, now - step


@dataclass(frozen=True)
class ClosedForms:
    """The terms of all quantities, in `sizes`; `refused` has the words of sizes that are no
    symbols, and why.

    A batch of one row has another memory layout, so that other operators run: the forms are for two
    rows or more. Forms in the number of tensor ranks, `t`, are right for the numbers in `ranks`; if
    there are none, `reason` says why.
    """

    points: Points
    costs: RankCosts
    terms: Mapping[Key, tuple[Polynomial, ...]]
    refused: tuple[tuple[str, str], ...] = ()
    ranks: tuple[int, ...] = ()
    reason: str = ""

    @property
    def sizes(self) -> tuple[InputSize, ...]:
        """The sizes that are symbols."""
        return self.points.sizes

    def forms(self, template: str, names: Mapping[str, int] | None = None) -> Forms:
        """The sums of a template, as expressions in which sizes of the model may have names."""
        import sympy

        sums = {field: expression(self.terms[template, field], names or {}) for field in FIELDS}
        tables = [*zip(*self._tables(template), strict=True)]
        least = (sympy.Min(*(expression([one], names or {}) for one in pair)) for pair in tables)
        sums["bytes_forward"] = sympy.Add(sums["bytes_forward"], *least)
        return Forms(**sums)

    def _tables(self, template: str) -> tuple[list[Polynomial], tuple[Polynomial, ...]]:
        """The bytes that operators would read of tables by the size of their results, and the bytes
        of those tables."""
        cost = self.costs.traced(self.points.near[0])[template]
        flops, block = self.terms[template, "flops_forward"], self.costs.first[template]
        read = [
            {m: cost.forward[k].dtype.itemsize * number for m, number in flops[k].items()}
            for k in tables_of(block, cost, self.costs.problem.graph)
        ]
        return [*read], self.terms[template, "tables"]


def closed_forms(costs: RankCosts) -> ClosedForms:
    """The closed forms of a rank's blocks, in as many sizes as possible: all, the batch alone, the
    lengths alone, or none."""
    known, reasons = sizes_of(costs.problem.graph), dict[str, str]()
    batch = tuple(size for size in known if size.letter == "b")
    lengths = tuple(size for size in known if size.letter != "b")
    for sizes in dict.fromkeys((known, batch, lengths, ())):
        faults = []
        for degree in (2, 3):
            points = Points(sizes, degree, costs.problem.mesh.tensor)
            try:
                terms = _fit({1: costs}, points, points.odd)
            except Unfit as unfit:
                faults.append(str(unfit))
            else:
                refused = tuple((s.word, reasons[s.word]) for s in known if s not in sizes)
                return ClosedForms(points, costs, terms, refused)
        reasons |= {size.word: faults[0] for size in sizes}
    message = "without sizes nothing changes"
    raise AssertionError(message)


def over_ranks(plan: ClosedForms, costs: Mapping[int, RankCosts]) -> ClosedForms:
    """The forms of a plan in the number of tensor ranks as well, from costs for some numbers.

    `costs` are of ranks that run the same operators on even pieces; two or three numbers determine
    A, B/t and C/t², and the forms must be right at the others. Raises Unfit.
    """
    if len(costs) < FEWEST - 1:
        ranks = ", ".join(map(str, costs)) or "none"
        message = f"too few numbers of ranks run the same operators on even pieces ({ranks})"
        raise Unfit(message)
    powers = 3 if len(costs) > FEWEST else 2
    terms = _fit(costs, plan.points, plan.points.last, powers)
    return dataclasses.replace(plan, terms=terms, ranks=tuple(sorted(costs)))


def check_ranks(forms: ClosedForms, others: Mapping[int, RankCosts]) -> None:
    """Refuse forms with a field that is right for none of the other numbers of ranks. These run
    other operators (one rank exchanges nothing), so it need not be right for all. Raises Unfit."""
    at = forms.points.near[-1]
    known = {t: one.quantities(at) for t, one in others.items()}
    for key in itertools.product(forms.costs.first, FIELDS):
        sums = {t: sum(row[key]) for t, row in known.items() if key in row}
        said = {t: sum(value(one, {**at, "t": t}) for one in forms.terms[key]) for t in sums}
        if not any(_is_close(said[t], number) for t, number in sums.items()):
            ranks = ", ".join(map(str, forms.ranks))
            message = f"{key[1]} of {key[0]} on {ranks} ranks does not tell it on others"
            raise Unfit(message)


def _is_even(graph: Graph, ranks: int) -> bool:
    """Whether all tensor ranks hold and compute equally much, by the graph of one of them."""

    def uneven(argument: object) -> bool:
        if isinstance(argument, list | tuple):
            return any(map(uneven, argument))
        return isinstance(argument, Piece)

    shards = (item.shard for item in graph.parameters if item.shard is not None)
    arguments = ((node.args, *node.kwargs.values()) for node in graph.fx_graph.nodes)
    return all(shard.even(ranks) for shard in shards) and not any(map(uneven, arguments))


def _fit(
    costs: Mapping[int, RankCosts], points: Points, check: Sizes, powers: int = 1
) -> dict[Key, tuple[Polynomial, ...]]:
    """Polynomials through the quantities at all points, with `powers` powers of 1/t. At `check`
    they must be right for all numbers of tensor ranks. Raises Unfit."""
    first = [*costs][:powers]
    near = [(costs[t].quantities(at), {**at, "t": t}) for at in points.near for t in first]
    checks = [(one.quantities(check), {**check, "t": t}) for t, one in costs.items()]
    monomials = [
        (*zip(check, exponents, strict=True), ("t", -k))
        for exponents in points.powers
        for k in range(powers)
    ]
    for one in costs.values():
        if any(one.operators(at) != one.operators(check) for at in points.near):
            message = "blocks run other operators at other sizes"
            raise Unfit(message)
    columns: dict[Key, list[tuple[Fraction, ...]]] = {}
    for key in near[0][0]:
        rows = [known.get(key, ()) for known, _ in (*near, *checks)]
        if len({len(row) for row in rows}) > 1:
            message = "tensor ranks run other operators"
            raise Unfit(message)
        columns[key] = [tuple(map(exact, column)) for column in zip(*rows, strict=True)]
    distinct = list(dict.fromkeys(itertools.chain.from_iterable(columns.values())))
    matrix = _matrix([[_product(m, at) for m in monomials] for _, at in near])
    values = _matrix([list(row) for row in zip(*distinct, strict=True)][: len(near)])
    polynomials: dict[tuple[Fraction, ...], Polynomial] = {}
    for column, row in zip(distinct, matrix.lu_solve(values).transpose().to_list(), strict=True):
        numbers = [Fraction(int(x.numerator), int(x.denominator)) for x in row]
        polynomials[column] = {m: x for m, x in zip(monomials, numbers, strict=True) if x}
        for (_, at), number in zip(checks, column[len(near) :], strict=True):
            if not _is_close(value(polynomials[column], at), number):
                message = "the costs are no polynomial of low degree"
                raise Unfit(message + " in 1/t" * (powers > 1))
    return {key: tuple(polynomials[column] for column in row) for key, row in columns.items()}


def _matrix(rows: Sequence[Sequence[Fraction]]) -> DomainMatrix:
    from sympy import QQ
    from sympy.polys.matrices import DomainMatrix

    values = [[QQ(number.numerator, number.denominator) for number in row] for row in rows]
    return DomainMatrix(values, (len(rows), len(rows[0])), QQ)


def _product(monomial: Monomial, sizes: Sizes) -> Fraction:
    return prod((Fraction(sizes[letter]) ** power for letter, power in monomial), start=Fraction(1))


def value(polynomial: Polynomial, sizes: Sizes) -> Fraction:
    """The value of a polynomial, exactly."""
    return sum((c * _product(m, sizes) for m, c in polynomial.items()), Fraction())


def exact(number: float) -> Fraction:
    """A number of FLOPs or bytes as a fraction; a float sum of thirds, say, may be off by a
    rounding.

    >>> exact(12.0), exact(8 / 3)
    (Fraction(12, 1), Fraction(8, 3))
    """
    whole = Fraction(number)
    return whole.limit_denominator(FINEST) if isinstance(number, float) else whole


def _is_close(one: float | Fraction, other: float | Fraction) -> bool:
    """Whether numbers are equal up to the rounding of large ones."""
    return math.isclose(one, other, rel_tol=1e-12)


def expression(polynomials: Iterable[Polynomial], names: Mapping[str, int]) -> sympy.Expr:
    """The sum of polynomials, with names for sizes in each coefficient."""
    import sympy

    terms = Counter(term for polynomial in polynomials for term in polynomial.items())
    return sympy.Add(
        *(
            count * named(number, names) * sympy.Mul(*(symbol(x) ** power for x, power in m))
            for (m, number), count in terms.items()
        )
    )
