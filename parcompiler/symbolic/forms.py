"""What the blocks of a template cost in the sizes of the captured model, in closed form.

priced blocks, at the sizes of the capture
    │  ResizableGraph    the first block of each template at some other sizes
    │  trace_block       what it costs there
    │  fit               polynomials, exact, and right at further points
    ▼
ClosedForms              FLOPs and bytes of each template as expressions
    │  over_ranks        once more for each of some numbers of tensor ranks
    ▼
ClosedForms in t

The largest memory that is alive at once is a maximum over moments, and so no polynomial: it has no
form. A value that was expanded over the rows has less memory than elements, and of a table an
operator reads no more rows than there are: such costs are the smaller of two polynomials.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import sympy
import torch
from torch import fx

from parcompiler.cost import BlockCost, trace_block
from parcompiler.cost.collective import SENT
from parcompiler.cost.operation import EXCHANGE, label
from parcompiler.graph import Block, Graph
from parcompiler.problem import Problem
from parcompiler.spmd.runtime_call import Piece, RuntimeCall
from parcompiler.symbolic.naming import symbol
from parcompiler.symbolic.polynomials import Polynomial, Term, expression, fit, value
from parcompiler.symbolic.resizable import ResizableGraph
from parcompiler.symbolic.sizes import CaptureAt, InputSize, Sizes, Unfit, sizes_of, subsets


@dataclass(frozen=True)
class Forms:
    """What a block of a template costs for one micro-batch on one rank, as expressions.

    `flops_*` count a multiplication with its addition as 2; all others are bytes: `bytes_*` are
    moved between the device and its memory, `sent_*` what the rank sends to others of the tensor
    axis, `saved` is kept from the forward to the backward, `message` the size of all outputs.
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
RANKS = (2, 4, 8, 3, 6, 16, 5, 32)  # tensor ranks that are tried, until there are `ENOUGH`
FEWEST, ENOUGH = 3, 4  # to tell A + B/t, and C/t² too, and to check it once

# A template and a field of `Forms` or "inner", the bytes saved besides those of the outputs; or ""
# and the name of a node, whose numbers are its shape.
Key = tuple[str, str]
Row = tuple[Key, int]
Values = Mapping[Key, list[float]]


def quantities(cost: BlockCost) -> dict[str, list[float]]:
    """The numbers of a cost whose sums are the fields of `Forms`, but those of parameters."""
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


class TemplateCosts:
    """What the templates of a problem cost at any sizes."""

    def __init__(
        self, problem: Problem, sizes: tuple[InputSize, ...], again: CaptureAt | None, level: int
    ) -> None:
        self.problem = problem
        self.resizable = ResizableGraph(problem, sizes, again, level)
        self.like: dict[str, BlockCost] = {}  # at the sizes that were asked for first
        self.tables: dict[str, dict[int, int]] = {}  # bytes by the place of the operator
        self._known: dict[tuple[int, ...], Values] = {}

    @property
    def operators(self) -> dict[str, list[list[str]]]:
        """The operators that each template runs."""
        return {
            name: [[operation.name for operation in side] for side in (cost.forward, cost.backward)]
            for name, cost in self.like.items()
        }

    def at(self, sizes: Sizes) -> Values:
        """The quantities of each template and the shapes of values between blocks. Raises Unfit.

        What is read of tables is not in `bytes_forward`: for each it is as much as the operator
        yields, one element for each FLOP, but no more than the bytes under "tables".
        """
        key = tuple(sizes.values())
        if key not in self._known:
            self._known[key] = self._states() | self._quantities(sizes)
        return self._known[key]

    def _quantities(self, sizes: Sizes) -> dict[Key, list[float]]:
        """What runs at these sizes."""
        graph, numbers = self.problem.graph, dict[Key, list[float]]()
        trainable = {item.node for item in graph.parameters if item.trainable}
        others = {item.node for item in graph.parameters} - trainable
        run = self.resizable.templates_at(sizes)
        for name, block in run.blocks.items():
            parts = block.nodes, block.inputs, block.outputs
            given = *parts, trainable, others, graph.differentiable
            cost = trace_block(*given, accelerator=self.problem.accelerator)
            if name not in self.like:
                self.like[name] = cost
                self.tables[name] = _tables(self.resizable.first[name], cost, graph)
            if _kind(cost) != _kind(self.like[name]):
                message = f"blocks of {name} run other operators at other sizes"
                raise Unfit(message)
            numbers |= {(name, field): row for field, row in quantities(cost).items()}
            for k, nbytes in self.tables[name].items():
                read = cost.forward[k].dtype.itemsize * cost.forward[k].flops
                numbers[name, "bytes_forward"][k] -= min(read, nbytes)
            numbers[name, "tables"] = [*self.tables[name].values()]
        ends = (node for block in self.resizable.first.values() for node in block.outputs)
        for node in (*ends, *self.resizable.cut.prologue):
            if isinstance(run.values[node], torch.Tensor):
                numbers["", node.name] = [*run.values[node].shape]
        return numbers

    def _states(self) -> dict[Key, list[float]]:
        """Bytes of each trainable tensor of a template, and of its optimizer states."""
        graph, numbers = self.problem.graph, dict[Key, list[float]]()
        for name, block in self.resizable.first.items():
            items = [graph.by_name[binding.name] for binding in block.tensors]
            items = [item for item in items if item.trainable]
            nbytes: list[float] = [item.nbytes for item in items]
            more: list[float] = [self.problem.state_bytes(item) - 2 * item.nbytes for item in items]
            numbers |= {(name, "parameters"): nbytes, (name, "gradients"): nbytes}
            numbers[name, "optimizer"] = more
        return numbers


def _tables(block: Block, cost: BlockCost, graph: Graph) -> dict[int, int]:
    """The bytes of parameters and buffers that operators of a block's forward read as tables, by
    the place of the operator."""
    tables = {}
    for name in TABLES:
        places = [k for k, operation in enumerate(cost.forward) if operation.name == name]
        nodes = [node for node in block.nodes if name == _operator(node)]
        if len(nodes) == len(places):
            for node, k in zip(nodes, places, strict=True):
                read = node.args[isinstance(node.target, RuntimeCall)]  # behind the indices there
                if str(read) in graph.by_node:
                    tables[k] = graph.by_node[str(read)].nbytes
    return tables


def _operator(node: fx.Node) -> str:
    """The operator that a node runs; looking up a rank's own rows is an embedding."""
    sharded = isinstance(node.target, RuntimeCall) and node.target.name == "embedding"
    return TABLES[0] if sharded else label(node.target)


def _kind(cost: BlockCost) -> object:
    """What is the same at all sizes: the operators, and which values are kept."""
    sides = (
        tuple((one.name, one.kind, one.dtype, one.ranks) for one in side)
        for side in (cost.forward, cost.backward)
    )
    return tuple(sides), cost.estimated, cost.kept_inputs, cost.kept_outputs


@dataclass(frozen=True)
class ClosedForms:
    """The terms of all quantities, in `sizes`; `refused` says which sizes are no symbols (their
    words), and why.

    A batch of one row lies in memory in another way than others, so that other operators run: the
    forms are those of two rows and more. Those in the number of tensor ranks, `t`, too are right
    for the numbers in `ranks`; where there are none, `reason` says why.
    """

    sizes: tuple[InputSize, ...]
    costs: TemplateCosts
    terms: Mapping[Key, tuple[Term, ...]]
    refused: tuple[tuple[str, str], ...] = ()
    ranks: tuple[int, ...] = ()
    reason: str = ""

    def forms(self, template: str, names: Mapping[str, int] | None = None) -> Forms:
        """The sums of a template, as expressions in which sizes of the model may have names."""
        return Forms(**{field: expression(self.terms[template, field], names or {})
                        for field in FIELDS})  # fmt: skip


def closed_forms(problem: Problem, level: int, again: CaptureAt | None = None) -> ClosedForms:
    """The closed forms of the blocks of a granularity, in as many sizes as have one.

    `again` captures the model at other sizes, and is asked where the graph alone leaves it open
    which sizes its numbers follow from.
    """
    known, reasons = sizes_of(problem.graph), dict[str, str]()
    for sizes in subsets(known):
        costs, faults = TemplateCosts(problem, sizes, again, level), []
        for degree in (2, 3):
            try:
                terms = _terms(costs, degree)
            except Unfit as unfit:
                faults.append(str(unfit))
            else:
                refused = [size.word for size in known if size not in sizes]
                return ClosedForms(sizes, costs, terms, tuple((w, reasons[w]) for w in refused))
        reasons |= {size.word: faults[0] for size in sizes}
    message = "without sizes nothing changes"
    raise AssertionError(message)


def _terms(costs: TemplateCosts, degree: int) -> dict[Key, tuple[Term, ...]]:
    """Terms with powers of the lengths of `degree` at most together, less than that of the batch.

    Raises Unfit.
    """
    probes = costs.resizable.probes
    ranges = (range(degree + (letter != "b")) for letter in probes)
    powers = [dict(zip(probes, power, strict=True)) for power in itertools.product(*ranges)]
    powers = [power for power in powers if sum(power.values()) - power.get("b", 0) <= degree]
    monomials = [tuple(power.items()) for power in powers]
    near = [{letter: probes[letter].grid[k] for letter, k in power.items()} for power in powers]
    columns = _columns(costs, near)
    fitted = fit(monomials, near, columns.values())
    terms = {row: Term(one) for row, one in zip(columns, fitted, strict=True)}
    if "b" in probes:
        # More rows than any length has elements: what was expanded over the rows has less memory.
        most = 8 * max(number for probe in probes.values() for number in probe.grid)
        far = [{**point, "b": most * point["b"]} for point in near]
        values = _columns(costs, far[:1])
        wrong = [row for row in terms if not _close(terms[row].at(far[0]), values[row][0])]
        columns = _columns(costs, far) if wrong else {}
        others = fit(monomials, far, [columns[row] for row in wrong])
        terms |= {
            row: Term({}, (terms[row].sum, one)) for row, one in zip(wrong, others, strict=True)
        }
    for point in ({x: probe.odd for x, probe in probes.items()}, costs.resizable.generic):
        for row, (number,) in _columns(costs, [point]).items():
            if not _close(terms[row].at(point), number):
                message = "the costs are no polynomial of low degree"
                raise Unfit(message)
    quantities = {key: tuple(terms[key, k] for k in range(len(row)))
             for key, row in costs.at(near[0]).items()}  # fmt: skip
    for name, tables in costs.tables.items():
        for i, k in enumerate(tables):
            itemsize = costs.like[name].forward[k].dtype.itemsize
            flops = terms[(name, "flops_forward"), k].sum
            read = {monomial: itemsize * number for monomial, number in flops.items()}
            least = Term({}, (read, terms[(name, "tables"), i].sum))
            quantities[name, "bytes_forward"] += (least,)
    return quantities


def _close(one: Fraction, other: float) -> bool:
    """Whether numbers are equal but for the rounding of large ones."""
    return math.isclose(one, other, rel_tol=1e-12)


def _columns(costs: TemplateCosts, points: list[dict[str, int]]) -> dict[Row, list[float]]:
    """The values of each quantity at some points."""
    values = [costs.at(point) for point in points]
    return {
        (key, k): [value[key][k] for value in values]
        for key, row in values[0].items()
        for k in range(len(row))
    }


def over_ranks(plan: ClosedForms, closed: Mapping[int, ClosedForms]) -> ClosedForms:
    """The forms of a plan in the number of tensor ranks as well, from those for some numbers.

    A rank computes, moves and sends a part of the whole, which is a sum of A, B/t and, where all
    send to all, C/t². Two or three numbers of ranks tell these apart, and the forms must be right
    at the others. Raises Unfit.
    """
    if len(closed) < FEWEST - 1:
        said = ", ".join(map(str, closed)) or "none"
        message = f"too few numbers of ranks run the same operators on even pieces ({said})"
        raise Unfit(message)
    known: dict[Any, Polynomial] = {}

    def through(polynomials: Mapping[int, Polynomial]) -> Polynomial:
        key = tuple(tuple(one.items()) for one in polynomials.values())
        if key not in known:
            known[key] = _through(polynomials)
        return known[key]

    def term(terms: Mapping[int, Term]) -> Term:
        counts = {len(one.choices) for one in terms.values()}
        if len(counts) > 1:
            message = "its costs are no polynomials of low degree in 1/t"
            raise Unfit(message)
        return Term(
            through({t: one.sum for t, one in terms.items()}),
            tuple(
                through({t: one.choices[k] for t, one in terms.items()}) for k in range(max(counts))
            ),
        )

    terms = {
        key: tuple(
            term({t: one.terms[key][k] for t, one in closed.items()}) for k in range(len(row))
        )
        for key, row in plan.terms.items()
    }
    return dataclasses.replace(plan, terms=terms, ranks=tuple(sorted(closed)))


def _through(polynomials: Mapping[int, Polynomial]) -> Polynomial:
    """A polynomial with t as a letter from those at some numbers of ranks. Raises Unfit."""
    powers = [(("t", -k),) for k in range(3 if len(polynomials) >= ENOUGH else 2)]
    points = [{"t": t} for t in [*polynomials][: len(powers)]]
    monomials = list(dict.fromkeys(m for one in polynomials.values() for m in one))
    columns = [[polynomials[p["t"]].get(m, 0) for p in points] for m in monomials]
    through: dict[Any, Any] = {}
    for monomial, parts in zip(monomials, fit(powers, points, columns), strict=True):
        for t, one in polynomials.items():
            if value(parts, {"t": t}) != one.get(monomial, 0):
                message = "its costs are no polynomials of low degree in 1/t"
                raise Unfit(message)
        through |= {(*monomial, *power): number for power, number in parts.items()}
    return through


def check_ranks(forms: ClosedForms, others: Mapping[int, ClosedForms]) -> None:
    """Refuse forms of which a field is right for none of other numbers of ranks. These run other
    operators (one rank exchanges nothing), so that it need not be right for all. Raises Unfit."""
    for template in forms.costs.like:
        for field in FIELDS:
            form = expression(forms.terms[template, field], {})
            known = {t: expression(one.terms[template, field], {})
                     for t, one in others.items() if (template, field) in one.terms}  # fmt: skip
            if all(sympy.expand(form.subs(symbol("t"), t) - one) != 0 for t, one in known.items()):
                ranks = ", ".join(map(str, forms.ranks))
                message = f"{field} of {template} on {ranks} ranks does not tell it on others"
                raise Unfit(message)


def is_even(graph: Graph, ranks: int) -> bool:
    """Whether all tensor ranks hold and compute as much, in the graph of one of them."""

    def uneven(argument: object) -> bool:
        if isinstance(argument, list | tuple):
            return any(map(uneven, argument))
        return isinstance(argument, Piece)

    shards = (item.shard for item in graph.parameters if item.shard is not None)
    arguments = ((node.args, *node.kwargs.values()) for node in graph.fx_graph.nodes)
    return all(shard.even(ranks) for shard in shards) and not any(map(uneven, arguments))
