"""The closed forms of stages: sums of those of their blocks; what blocks share counts once."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import sympy
from torch import fx

from parcompiler.graph import Block
from parcompiler.passes.estimate import carried
from parcompiler.passes.footprint import Footprint
from parcompiler.plan import Plan
from parcompiler.problem import Priced, Problem
from parcompiler.symbolic.fit import Polynomials
from parcompiler.symbolic.forms import FIELDS, STATE, Forms, Template, expression

Names = Mapping[str, int]  # letters for sizes of the model


@dataclass(frozen=True)
class Parts:
    """What the forms of stages are made of: the templates, the shapes of the values between
    blocks by the names of the first that have them, and the letters in each template."""

    problem: Problem
    plan: Plan
    templates: Mapping[str, Template]
    shapes: Mapping[str, Polynomials]
    like: Mapping[fx.Node, fx.Node]
    names: Mapping[str, Names]

    def stages(self) -> tuple[Forms, ...]:
        """The forms of all stages; `message` is what a stage gives to others, as often as it goes,
        and recomputing counts with the backward."""
        assert self.plan.stages is not None
        blocks = {block.name: block for block in self._priced.cut.blocks}
        return tuple(
            self._stage(j, [blocks[name] for name in choice.blocks])
            for j, choice in enumerate(self.plan.stages)
        )

    @property
    def _priced(self) -> Priced:
        return self.problem.under(self.plan)

    def _stage(self, j: int, blocks: list[Block]) -> Forms:
        again = self._priced.recomputed
        counts = Counter((block.template, block.name in again) for block in blocks)
        forms = {name: item.named(self.names[name]) for name, item in self.templates.items()}
        own = [(_with_forward(forms[name], again=twice), n) for (name, twice), n in counts.items()]
        sums = {
            field: sympy.Add(*(sympy.expand(n * getattr(form, field)) for form, n in own))
            for field in FIELDS
            if field not in ("message", "saved", *STATE)
        }
        sent = carried(self.problem, self.plan)
        message = (len(users) * self._nbytes(node) for i, users, node in sent if i == j)
        values, optimizer = self._states(blocks)
        return Forms(
            **sums,
            saved=self._saved(blocks),
            message=sympy.Add(*message),
            parameters=values,
            gradients=values,
            optimizer=optimizer,
        )

    def _states(self, blocks: list[Block]) -> tuple[sympy.Expr, sympy.Expr]:
        """Bytes of the tensors that some of the blocks train, and of their optimizer states."""
        found: dict[str, tuple[sympy.Expr, sympy.Expr]] = {}
        for block in blocks:
            template = self.templates[block.template]
            states = template.states(self.names[block.template])
            for k, pair in zip(template.tensors, states, strict=True):
                found.setdefault(block.tensors[k].name, pair)
        values, optimizer = (sympy.Add(*(pair[k] for pair in found.values())) for k in (0, 1))
        return values, optimizer

    def _saved(self, blocks: list[Block]) -> sympy.Expr:
        """Bytes that a stage keeps from the forward to the backward: a value between its blocks
        once."""
        priced, graph = self._priced, self.problem.graph
        index = {block.name: b for b, block in enumerate(priced.cut.blocks)}
        places = tuple(sorted(index[block.name] for block in blocks))
        kept = Footprint(priced, places, graph.differentiable, {}).kept
        own = [node for block in blocks for node in block.outputs if node in kept]
        inner = (
            self.templates[block.template].inner(self.names[block.template])
            for block in blocks
            if block.name not in priced.recomputed
        )
        early = (node for node in priced.cut.prologue if node in kept)
        return sympy.Add(
            *map(sympy.expand, inner),
            *(self._nbytes(node) for node in own),
            *(self._nbytes(node, memory=True) for node in early),
        )

    def _nbytes(self, node: fx.Node, *, memory: bool = False) -> sympy.Expr:
        """The bytes of a value; `memory`: that it occupies, where it is spread out less."""
        value, home = node.meta["val"], self._priced.home.get(node)
        template = None if home is None else self._priced.cut.blocks[home].template
        shape = self.shapes[self.like.get(node, node).name]
        sizes = (
            expression(shape, [dim], self.names.get(template or "", {}))
            for dim in range(value.dim())
            if value.stride(dim) or not memory
        )
        return sympy.expand(value.dtype.itemsize * sympy.Mul(*sizes))


def _with_forward(forms: Forms, *, again: bool) -> Forms:
    """The forms of a block, those of its forward twice where it is recomputed."""
    if not again:
        return forms
    more = {
        f"{name}_backward": getattr(forms, f"{name}_forward") + getattr(forms, f"{name}_backward")
        for name in ("flops", "bytes", "sent")
    }
    return dataclasses.replace(forms, **more)
