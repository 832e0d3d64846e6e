"""Attention in the form of its fastest kernels: constant masks become flags, repeated heads groups.

    mask = arange(s)[None, :] <= arange(s)[:, None]             the kernel that reads a mask
    F.scaled_dot_product_attention(q, k, v, attn_mask=mask)     [..., s, s] for every micro-batch
        │  the mask depends on no input and no parameter: it is computed here and compared
        ▼
    F.scaled_dot_product_attention(q, k, v, is_causal=True)     the causal kernel, half the scores

| the mask                             | becomes                                                |
|--------------------------------------|--------------------------------------------------------|
| each query sees the keys up to it    | `is_causal=True` (row i sees columns 0 to i, as torch) |
| each query sees all keys             | nothing                                                |
| another, or it depends on the batch  | itself                                                 |

Without a mask, heads of keys and values that were repeated for a group of queries are read
unrepeated (`enable_gqa=True`), where kernels support that: elsewhere torch would store all scores.
Sums are added in another order, so that results differ in their last bits.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from parcompiler.capture.clean import drop_dead
from parcompiler.capture.effects import arguments_of, effects_of, overload_name
from parcompiler.capture.prologue import cone, constants, evaluated
from parcompiler.capture.rewriting import copied
from parcompiler.graph import Graph
from parcompiler.ring import WIDEST

LARGEST = 1 << 28  # elements of a value on the way to a mask: 16,384 positions
FEW = 512  # positions that stand for a larger number, as the formula is the same
SHORT = 128  # positions of the attention that is run in both forms
EQUAL = 1e-12  # relative, in float64
_HIDDEN = -3e38  # values up to this hide a key: float32's least, or bfloat16's

Arguments = dict[str, Any]  # of an attention, by name


def with_kernels(graph: Graph, *, on_cpu: bool) -> Graph:
    """`graph` with attention in the forms above; each such node is marked in `meta["kernel"]`.

    `on_cpu`: torch's kernel there takes groups of heads in every precision, GPU kernels only in 16
    bits.
    """
    return graph.once(("kernels", on_cpu), lambda: _with_kernels(graph, on_cpu=on_cpu))


def _with_kernels(graph: Graph, *, on_cpu: bool) -> Graph:
    """Uncached body of `with_kernels`."""
    forms = dict(_forms(graph, on_cpu=on_cpu))
    if not forms:
        return graph
    copies = copied(graph)
    nodes = copies.nodes
    for node, after in forms.items():
        copy = nodes[node]
        copy.meta["kernel"] = tuple(_words(arguments_of(node), after))
        copy.args = tuple(nodes[after[name]] for name in _OPERANDS)
        copy.kwargs = {
            name: nodes[item] if isinstance(item, fx.Node) else item
            for name, item in after.items()
            if name in _DEFAULTS and item != _DEFAULTS[name]
        }
    drop_dead(copies.made)
    return copies.rewritten(str([(node.name, nodes[node].meta["kernel"]) for node in forms]))


def _forms(graph: Graph, *, on_cpu: bool) -> Iterator[tuple[fx.Node, Arguments]]:
    """The attention nodes to change, each with its new arguments."""
    masks = ConstantMasks(graph)
    proved: dict[str, bool] = {}
    for node in graph.fx_graph.nodes:
        if overload_name(node) == "scaled_dot_product_attention":
            before = arguments_of(node)
            after = _in_groups(_with_flags(before, masks, node), node, on_cpu=on_cpu)
            template = repr([_shown(form) for form in (before, after)])
            if after != before and template not in proved:
                masked = before["attn_mask"] is not after["attn_mask"]
                proved[template] = _same(before, after, masks.read(node) if masked else None)
            if after != before and proved[template]:
                yield node, after


_OPERANDS = ("query", "key", "value")
_DEFAULTS: Arguments = {
    "attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False,
}  # fmt: skip


def _shown(arguments: Arguments) -> list[object]:
    """The shapes and flags of an attention."""
    return [
        tuple(item.meta["val"].shape) if isinstance(item, fx.Node) else item
        for item in arguments.values()
    ]


def _words(before: Arguments, after: Arguments) -> Iterator[str]:
    """Descriptions of the changes."""
    if after["is_causal"] and not before["is_causal"]:
        yield "causal kernel, recognised from a mask"
    elif before["attn_mask"] is not None and after["attn_mask"] is None:
        yield "no mask, as it hid nothing"
    if after["enable_gqa"] and not before["enable_gqa"]:
        yield "groups of heads instead of repeated keys and values"


# Masks


@dataclass(frozen=True, slots=True)
class ConstantMask:
    """A mask that is the same for every batch: "causal", or "open" where it hides nothing; and its
    first rows and columns, [queries, keys], at most `SHORT` of each."""

    kind: str
    corner: torch.Tensor


class ConstantMasks:
    """The masks of a graph that are the same for every batch and equivalent to a flag."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._effects = effects_of(graph)
        self._position = {node: index for index, node in enumerate(graph.fx_graph.nodes)}
        self._known: dict[str, ConstantMask | None] = {}

    def read(self, attention: fx.Node) -> ConstantMask | None:
        """The constant mask of an attention, cached by its formula, as layers share it; None for
        any other mask."""
        mask = arguments_of(attention)["attn_mask"]
        writers = self._effects.writers.get(self._effects.root(mask), ())
        position = self._position
        if mask not in constants(self._graph) or any(
            position[writer] > position[attention] for writer in writers
        ):
            return None
        members = sorted(cone(mask, self._effects), key=position.__getitem__)
        number = {node: f"%{index}" for index, node in enumerate(members)}

        def name(node: fx.Node) -> str:
            return number.get(node, node.name)

        lines = [(str(n.target), fx.map_arg((n.args, n.kwargs), name)) for n in members]
        formula = repr((lines, name(mask)))
        if formula not in self._known:
            value = self._value(mask, members)
            self._known[formula] = None if value is None else _as_flag(value)
        return self._known[formula]

    def _value(self, mask: fx.Node, members: Sequence[fx.Node]) -> torch.Tensor | None:
        """The value of a mask in every micro-batch; None where it cannot be computed here.

        A mask of too many positions is computed for `FEW` of them, by the same formula, if the
        other numbers in the formula are so small that their effect shows among these.
        """
        length, known = 0, mask.meta["val"]
        read = {operand for node in members for operand in node.all_input_nodes}
        if not all(map(_is_small, members)):
            length = known.shape[-1]
            if read - {*members} or not all(_is_formula(node, length) for node in members):
                return None
        try:
            values = {
                node: self._buffer(node) for node in read | {mask} if node.op == "placeholder"
            }
            value = evaluated(mask, members, values, lambda item: _shorter(item, length))
        except (RuntimeError, NotImplementedError, KeyError, TypeError):
            return None  # a formula that does not run here is left to the ranks
        shape = [_shorter(size, length) for size in known.shape]
        same = (list(value.shape), value.dtype) == (shape, known.dtype)
        return value if same else None

    def _buffer(self, node: fx.Node) -> torch.Tensor:
        """The value of a buffer. Raises KeyError where it has none."""
        value = self._graph.tensors[self._graph.by_node[node.name].name]
        if value.is_meta:
            raise KeyError(node.name)
        return value.detach().cpu()


def _is_known(node: fx.Node) -> bool:
    """Whether a node is an operator of torch."""
    return isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem


def _is_formula(node: fx.Node, length: int) -> bool:
    """Whether a node computes the same on `FEW` positions as on `length`: every number among its
    arguments counts positions, or is small against `FEW`, or is larger than any distance."""
    numbers = [x for x in tree_leaves((node.args, dict(node.kwargs))) if isinstance(x, int | float)]
    others = [n for n in numbers if _shorter(n, length) == n]
    return _is_known(node) and not any(FEW // 4 < abs(n) < 2 * length for n in others)


def _shorter(item: Any, length: int) -> Any:
    """An argument, with `FEW` in place of `length` if it is a number of positions."""
    near = length and isinstance(item, int) and not isinstance(item, bool)
    return item - length + FEW if near and abs(item - length) <= 2 else item


def _is_small(node: fx.Node) -> bool:
    """Whether a value can be computed while compiling: by its size, and by an operator of torch."""
    leaves = node.meta.get("val")
    sizes = [leaves] if isinstance(leaves, torch.Tensor) else leaves
    return (
        _is_known(node)
        and isinstance(sizes, list | tuple)
        and all(isinstance(one, torch.Tensor) and math.prod(one.shape) <= LARGEST for one in sizes)
    )


def _as_flag(mask: torch.Tensor) -> ConstantMask | None:
    """The flag that is equivalent to a mask [..., queries, keys], if all rows and heads agree.

    Booleans are true, floating numbers 0, where a key is seen. The least number of a dtype hides a
    key as -inf does: it dominates any score, and its exponential is 0.
    """
    if mask.dim() < 2:
        return None
    for dim in range(mask.dim() - 2):
        if mask.stride(dim) == 0:  # the same memory
            mask = mask.narrow(dim, 0, 1)
    seen = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool:
        hidden = mask <= max(torch.finfo(mask.dtype).min, _HIDDEN)
        if not (seen | hidden).all():
            return None
    triangle = torch.ones(mask.shape[-2:], dtype=torch.bool).tril_()
    kind = "open" if seen.all() else "causal"
    matrices = seen.reshape(-1, *mask.shape[-2:])
    if kind == "causal" and not all(torch.equal(one, triangle) for one in matrices):
        return None
    corner = mask.reshape(-1, *mask.shape[-2:])[0, :SHORT, :SHORT].clone()
    return ConstantMask(kind, corner if mask.dtype == torch.bool else corner.double())


def _with_flags(before: Arguments, masks: ConstantMasks, node: fx.Node) -> Arguments:
    """The arguments without a mask, where a flag or nothing is equivalent."""
    mask = before["attn_mask"]
    if mask is None or before["is_causal"]:
        return before
    known = masks.read(node)
    if known is None or mask.meta["val"].dim() > node.meta["val"].dim():
        return before
    causal = known.kind == "causal"
    queries, keys = (before[name].meta["val"].shape[-2] for name in ("query", "key"))
    if causal and tuple(mask.meta["val"].shape[-2:]) != (queries, keys):
        return before
    return {**before, "attn_mask": None, "is_causal": causal}


# Heads


def _in_groups(before: Arguments, node: fx.Node, *, on_cpu: bool) -> Arguments:
    """The arguments with keys and values as they were before each head was repeated."""
    query, key, value = before["query"], before["key"], before["value"]
    width = [operand.meta["val"].shape[-1] for operand in (key, value)]
    taken = on_cpu or query.meta["val"].dtype.itemsize == 2
    if not taken or before["attn_mask"] is not None or before["enable_gqa"]:
        return before
    if width[0] != width[1] or width[0] > WIDEST or node.meta["val"].dim() != 4:
        return before
    sources = _repeated(key), _repeated(value)
    shapes = {tuple(one.meta["val"].shape) for one in sources if one is not None}
    alike = key.meta["val"].shape[:2] == query.meta["val"].shape[:2]  # no head serves all
    if None in sources or len(shapes) != 1 or not alike:
        return before
    return {**before, "key": sources[0], "value": sources[1], "enable_gqa": True}


def _repeated(node: fx.Node) -> fx.Node | None:
    """The tensor [b, heads, s, d] whose heads a node [b, n · heads, s, d] repeats n times each.

    Either `repeat_interleave(x, n, dim=1)`, or its usual spelling: `x[:, :, None].expand(b, heads,
    n, s, d).reshape(b, heads * n, s, d)`.
    """
    if overload_name(node) == "repeat_interleave" and len(node.args) >= 2:
        source, times, *rest = node.args
        dim = rest[0] if rest else node.kwargs.get("dim")
        by_heads = isinstance(times, int) and dim in (1, -3)
        return source if by_heads and isinstance(source, fx.Node) else None
    if overload_name(node) not in ("reshape", "view", "_unsafe_view", "flatten"):
        return None
    expanded = next(iter(node.args), None)
    if not isinstance(expanded, fx.Node) or overload_name(expanded) != "expand":
        return None
    inserted = expanded.args[0]
    if not isinstance(inserted, fx.Node) or overload_name(inserted) != "unsqueeze":
        return None
    source = inserted.args[0]
    assert isinstance(source, fx.Node)
    shapes = [tuple(one.meta["val"].shape) for one in (source, inserted, expanded, node)]
    if len(shapes[0]) != 4 or len(shapes[2]) != 5:
        return None
    rows, heads, *rest = shapes[0]
    times = shapes[2][2]
    wanted = [(rows, heads, 1, *rest), (rows, heads, times, *rest), (rows, heads * times, *rest)]
    by_heads = shapes[1:] == wanted and inserted.args[1] in (2, -3)
    return source if by_heads else None


# The proof


def _same(before: Arguments, after: Arguments, mask: ConstantMask | None) -> bool:
    """Whether both forms give equal results and gradients on random numbers in float64.

    They have one row, two groups of heads, the features of the template, and at most `SHORT`
    positions: the mask was compared as a whole before.
    """
    query, key, value = (after[name].meta["val"].shape for name in ("query", "key", "value"))
    groups = [min(2, size) for size in key[-3:-2]]  # none without heads
    heads = [number * query[-3] // key[-3] for number in groups]
    long = [min(shape[-2], SHORT) for shape in (query, key)]
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    operands = [
        random(*heads, long[0], query[-1]), random(*groups, long[1], key[-1]),
        random(*groups, long[1], value[-1]),
    ]  # fmt: skip
    seed = random(*heads, long[0], value[-1])

    def run(arguments: Arguments, corner: torch.Tensor | None, times: int) -> list[torch.Tensor]:
        leaves = [operand.clone().requires_grad_() for operand in operands]
        left, right = (x.repeat_interleave(times, -3) if times > 1 else x for x in leaves[1:])
        options = {name: arguments[name] for name in ("is_causal", "scale", "enable_gqa")}
        with torch.enable_grad():
            result = F.scaled_dot_product_attention(leaves[0], left, right, corner, **options)
            return [result.detach(), *torch.autograd.grad(result, leaves, seed)]

    grouped = after["enable_gqa"] and not before["enable_gqa"]
    corner = None if mask is None else mask.corner.expand(*long)
    first = run(before, corner, heads[0] // groups[0] if grouped else 1)
    second = run(after, None, 1)
    pairs = zip(first, second, strict=True)
    return all((one - two).abs().max() <= EQUAL * one.abs().max() for one, two in pairs)
