"""The closed forms of stages: sums of those of their blocks, with shared tensors once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import fx

from parcompiler.graph import Block
from parcompiler.passes.estimate import carried
from parcompiler.passes.footprint import Footprint
from parcompiler.plan import Plan
from parcompiler.problem import Problem
from parcompiler.symbolic.forms import FIELDS, STATE, ClosedForms, Forms, expression

if TYPE_CHECKING:
    import sympy

Names = Mapping[str, Mapping[str, int]]  # letters for sizes of the model, by template


def stage_forms(
    problem: Problem, plan: Plan, closed: ClosedForms, names: Names
) -> tuple[Forms, ...]:
    """The forms of all stages; `message` is all that a stage sends, each time it is sent, and
    recomputation counts in the backward."""
    import sympy

    assert plan.stages is not None
    priced, first = problem.under(plan), closed.costs.first
    like: dict[fx.Node, fx.Node] = {}  # the corresponding value of a template's first block
    for block in priced.cut.blocks:
        like.update(zip(block.outputs, first[block.template].outputs, strict=True))
    index = {block.name: b for b, block in enumerate(priced.cut.blocks)}
    templates = {name: closed.forms(name, names[name]) for name in first}
    sent = list(carried(problem, plan))

    def nbytes(node: fx.Node, *, memory: bool = False) -> sympy.Expr:
        """The bytes of a value; `memory`: those that it occupies, if it is expanded."""
        home, tensor = priced.home.get(node), node.meta["val"]
        known = {} if home is None else names[priced.cut.blocks[home].template]
        shape = closed.terms["", like.get(node, node).name]
        sizes = [
            expression([size], known)
            for dim, size in enumerate(shape)
            if tensor.stride(dim) or not memory
        ]
        return sympy.expand(tensor.dtype.itemsize * sympy.Mul(*sizes))

    def states(blocks: list[Block], field: str) -> sympy.Expr:
        """Bytes of the tensors that some of the blocks train, or of their optimizer states."""
        parts: dict[str, sympy.Expr] = {}
        for block in blocks:
            trained = [x.name for x in block.tensors if problem.graph.by_name[x.name].trainable]
            for name, term in zip(trained, closed.terms[block.template, field], strict=True):
                parts.setdefault(name, expression([term], names[block.template]))
        return sympy.Add(*parts.values())

    def saved(blocks: list[Block]) -> sympy.Expr:
        """Bytes kept from the forward to the backward; values between blocks of the stage count
        once."""
        places = tuple(sorted(index[block.name] for block in blocks))
        kept = Footprint(priced, places, problem.graph.differentiable, {}).kept
        inner = Counter(
            b.template for b in blocks if b.name not in {*priced.recomputed, *priced.copies}
        )
        early = [n for n in priced.cut.prologue if n in kept and n not in priced.cut.constants]
        terms = {name: expression(closed.terms[name, "inner"], names[name]) for name in inner}
        return sympy.Add(
            *(n * terms[name] for name, n in inner.items()),
            *(nbytes(node) for block in blocks for node in block.outputs if node in kept),
            *(nbytes(node, memory=True) for node in early),
        )

    def cost(blocks: list[Block], field: str) -> sympy.Expr:
        """FLOPs or bytes of all blocks."""
        fields = [(block.template, field) for block in blocks]
        if field.endswith("_backward"):
            again = (block.template for block in blocks if block.name in priced.recomputed)
            fields += [(name, field.replace("_backward", "_forward")) for name in again]
        return sympy.Add(
            *(sympy.expand(n * getattr(templates[t], f)) for (t, f), n in Counter(fields).items())
        )

    def forms(j: int, blocks: list[Block]) -> Forms:
        sums = {field: states(blocks, field) for field in STATE}
        sums |= {field: cost(blocks, field) for field in FIELDS
                 if field not in ("saved", "message", *STATE)}  # fmt: skip
        message = (len(users) * nbytes(node) for source, users, node in sent if source == j)
        return Forms(**sums, saved=saved(blocks), message=sympy.Add(*message))

    return tuple(
        forms(j, [priced.cut.blocks[index[name]] for name in choice.blocks])
        for j, choice in enumerate(plan.stages)
    )
