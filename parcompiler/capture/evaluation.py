"""Forwards that branch on `self.training`: one graph that computes as either mode does.

Operators with an argument for the mode (dropout, batch norms) follow it in emitted code. A trace
has lost other branches of Python: stochastic depth, jitter, power iterations of spectral norms. A
model with such nodes is traced in evaluation mode too, and the graph chooses by the mode where an
operand differs:

    training     x ─► rand, mul ─► m ─► add(h, m)
    evaluation   x ───────────────────► add(h, x)
    merged       x ─► rand, mul ─► m ─► by_mode(m, x) ─► add(h, ·)

>>> torch.ops.parcompiler.by_mode(torch.ones(2), torch.zeros(2))  # a step takes the first
tensor([1., 1.])
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Collection, Hashable, Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.utils import _pytree as pytree

from parcompiler.capture.clean import where
from parcompiler.capture.effects import (
    MODES,
    Effects,
    arguments_of,
    draws_in_evaluation,
    is_random,
    mutated_operands,
    overload_name,
)
from parcompiler.capture.rewriting import called, inserted
from parcompiler.errors import CaptureError
from parcompiler.graph import is_floating, tensors_of

_library = torch.library.Library("parcompiler", "FRAGMENT")
_library.define("by_mode(Tensor(a) trained, Tensor evaluated) -> Tensor(a)")
_library.impl("by_mode", lambda x, _: torch.ops.aten.alias(x), "CompositeImplicitAutograd")

BY_MODE = torch.ops.parcompiler.by_mode.default
_FOLLOWING = frozenset({"batch_norm", "instance_norm"})  # update buffers in training mode only


def branches(model: nn.Module, graph: fx.Graph) -> bool:
    """Whether a forward, traced in training, may compute something else in evaluation.

    It does if it draws numbers or updates floating buffers outside of operators that follow the
    mode; it may if its source reads `self.training`.
    """
    writers = Effects(graph).writers.items()
    written = (
        node
        for root, nodes in writers
        if root.op == "placeholder" and is_floating(root.meta["val"])
        for node in nodes
    )
    return (
        any(map(draws_in_evaluation, graph.nodes))
        or any(overload_name(node) not in _FOLLOWING for node in written)
        or any(map(_asks_for_mode, {base for m in model.modules() for base in type(m).__mro__}))
    )


def _asks_for_mode(kind: type) -> bool:
    """Whether the source of a class computes by `self.training`."""
    if kind.__module__.partition(".")[0] in ("builtins", "torch"):
        return False
    with suppress(KeyError, OSError, TypeError):
        return kind.__name__ in _asking(inspect.getsource(sys.modules[kind.__module__]))
    for method in filter(inspect.isfunction, vars(kind).values()):  # a notebook has no file
        with suppress(OSError, SyntaxError):
            if _reads_mode(ast.parse(textwrap.dedent(inspect.getsource(method)))):
                return True
    return False


@lru_cache(maxsize=64)
def _asking(source: str) -> frozenset[str]:
    """The classes of a module that compute by the mode: a file is parsed once for all of them."""
    try:
        nodes = ast.walk(ast.parse(source)) if "training" in source else ()
    except SyntaxError:
        return frozenset()
    return frozenset(n.name for n in nodes if isinstance(n, ast.ClassDef) and _reads_mode(n))


def _reads_mode(node: ast.AST) -> bool:
    """Whether source reads the mode, other than for operators that follow it (dropout, norms), for
    checkpointing, or to check or set it."""
    match node:
        case ast.Attribute(attr="training", ctx=ast.Load()):
            return True
        case ast.Call(func=func) if re.search(r"drop|batch_norm|\.train$", ast.unparse(func)):
            return False
        case ast.IfExp() if re.search("drop|checkpoint", ast.unparse(node)):
            return False
        case ast.If(test=test) if re.search("drop|checkpoint", ast.unparse(test)):
            return any(map(_reads_mode, (*node.body, *node.orelse)))
        case ast.Assert() | ast.FunctionDef(name="train"):
            return False
    return any(map(_reads_mode, ast.iter_child_nodes(node)))


def add_evaluation(trained: ExportedProgram, evaluated: ExportedProgram, outputs: int) -> None:
    """Make the graph of a trace in training compute as one in evaluation mode does.

    Both return the loss and `outputs` further values. Nodes of both that stand at one place of the
    model's source are one node. Raises CaptureError where the two cannot be merged: they have other
    inputs, or only one of them changes memory that both use. The graph is that of training then.
    """
    graph, other = trained.graph_module.graph, evaluated.graph_module.graph
    for one, two in (graph, other), (other, graph):
        _leave_shared_memory(one, {_place(node) for node in two.nodes})
    merging = _Merging(graph, other)
    merging.pair_constants(_constants(trained), _constants(evaluated))
    merging.pair_up(outputs)
    merging.apply()
    for spec in evaluated.graph_signature.input_specs:
        node = merging.alone.get(spec.arg.name)
        if node is not None:
            target = f"{spec.target}_of_evaluation"
            made = InputSpec(spec.kind, TensorArgument(merging.image[node].name), target)
            trained.graph_signature.input_specs.append(made)
            trained.constants[target] = evaluated.constants[str(spec.target)]


def _constants(program: ExportedProgram) -> dict[fx.Node, Any]:
    """The tensors that a forward made of numbers, by placeholder."""
    nodes = {node.name: node for node in program.graph_module.graph.nodes}
    return {
        nodes[spec.arg.name]: program.constants[str(spec.target)]
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.CONSTANT_TENSOR and spec.arg.name in nodes
    }


def _leave_shared_memory(graph: fx.Graph, others: Collection[Hashable]) -> None:
    """Make updates that one graph alone has (`x += noise`), of memory that both have, new values.

    Nothing may read the memory under an earlier name afterwards. `others` are the places of the
    other graph's nodes.
    """
    effects = Effects(graph)
    for root, writers in effects.writers.items():
        for node in writers if root.op != "placeholder" and _place(root) in others else ():
            name, _, overload = str(node.target).removeprefix("aten.").partition(".")
            packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
            target = getattr(packet, overload, None)
            if _place(node) in others or target is None or not effects.is_last_use(node):
                continue
            value = called(target, node.args, node.kwargs)
            if isinstance(value, torch.Tensor) and _form_of(value) == _form(node):
                node.target = target


class _Merging:
    """Two graphs of one model, in order: `image` maps nodes of the second to nodes of the first, or
    to themselves where the first has none."""

    def __init__(self, graph: fx.Graph, evaluated: fx.Graph) -> None:
        self.graph, self.evaluated = graph, evaluated
        self.nodes = list(graph.nodes)
        self.effects, self.other_effects = Effects(graph), Effects(evaluated)
        self.image: dict[fx.Node, fx.Node] = {}
        self.choices: list[tuple[fx.Node, fx.Node, fx.Node]] = []  # reader, operand, the other's
        self.added: dict[fx.Node, list[fx.Node]] = {}  # behind nodes of the first graph
        self.alone: dict[str, fx.Node] = {}  # constants of the second graph alone, by name
        self._copies: dict[fx.Node, fx.Node] = {}  # of placeholders of the second graph
        self._places: dict[Hashable, list[int]] = {}
        self._next = 0  # nodes before it are paired, or of the first graph only
        self._touched: dict[fx.Node, fx.Node] = {}  # memory that such nodes change -> the last

    def pair_constants(self, first: Mapping[fx.Node, Any], second: Mapping[fx.Node, Any]) -> None:
        """Pair each constant of the second graph with one of the first that has its value and is
        read at the same places; add it if there is none."""
        left = dict(first)
        for other, value in second.items():
            readers = {*map(_place, other.users)}
            equal = (
                node
                for node, known in left.items()
                if _are_equal(known, value) and readers & {*map(_place, node.users)}
            )
            self.image[other] = node = next(equal, other)
            if left.pop(node, None) is None:
                self.alone[other.name] = other

    def pair_up(self, outputs: int) -> None:
        """Pair the nodes up. Raises CaptureError where the graphs cannot be merged."""
        inputs = [node for node in self.nodes if node.op == "placeholder"]
        named = {node.name: node for node in inputs}
        for other in self.evaluated.nodes:
            if other.op == "placeholder" and other not in self.image:
                if other.name not in named:
                    message = f"evaluation has other inputs ({other.name})"
                    raise CaptureError(message)
                self.image[other] = named[other.name]
        self.added[inputs[-1]] = [*self.alone.values()]
        self._next = len(inputs)
        for number, node in enumerate(self.nodes):
            self._places.setdefault(_place(node), []).append(number)
        for node in list(self.evaluated.nodes):
            if node.op == "call_function" and not self._find_place(node):
                message = f"{self._obstacle(node)}: {where(node)}"
                raise CaptureError(message)
        last, other = self.graph.output_node(), self.evaluated.output_node()
        operands = [node.args[0][: 1 + outputs] for node in (last, other)]  # type: ignore[index]
        self._pass(len(self.nodes) - 1)
        differing = self._differing(*operands)
        if differing is None or not self._are_kept(differing, other, self._touched):
            message = "results have other shapes, or one mode alone changes their memory"
            raise CaptureError(message)
        self.choices += [(last, *pair) for pair in differing]
        added, number = sum(map(len, self.added.values())), len(self.nodes)
        if added > number // 2:
            message = f"evaluations add {added} operators to the {number} of training"
            raise CaptureError(message)

    def _find_place(self, other: fx.Node) -> bool:
        """Pair a node of the second graph, or add it: as it is, else with copies as operands."""
        if self._pair(other) or self._add(other):
            return True
        return self._read_copies(other) and (self._pair(other) or self._add(other))

    def _obstacle(self, other: fx.Node) -> str:
        """Why a node of the second graph has no place in the first."""
        if _place(other) in self._places:
            return "the modes differ in shapes, or in what they wrote to memory before"
        if is_random(other):
            return "evaluations alone draw random numbers"
        if any(mutated_operands(other)):
            return "evaluations alone write to memory that training has too"
        if not _has_known_sizes(other):
            return "sizes in evaluations depend on data"
        return "training alone writes to memory that evaluations read afterwards"

    def _read_copies(self, other: fx.Node) -> bool:
        """Let a node of the second graph read copies of tensors of the model that the first graph
        alone updates, made before it does. Returns whether there are any."""
        writers, others = self.effects.writers, self.other_effects.writers
        read = [operand for operand in other.all_input_nodes if operand.op == "placeholder"]
        updated = [x for x in read if self.image[x] in writers and x not in others]
        for operand in updated:
            writer = writers[self.image[operand]][0]
            if operand not in self._copies:
                self._copies[operand] = copy = inserted(
                    next(iter(operand.users)), torch.ops.aten.clone.default, operand, like=writer
                )
                self.image[copy] = copy
                self.added.setdefault(writer.prev, []).append(copy)
                self.other_effects = Effects(self.evaluated)
            other.replace_input_with(operand, self._copies[operand])
        return bool(updated)

    def _pair(self, other: fx.Node) -> bool:
        """Pair a node of the second graph with the first that is left at its place."""
        for number in self._places.get(_place(other), ()):
            if number < self._next:
                continue
            node, touched = self.nodes[number], self._touched | self._changed_before(number)
            differing = self._differing(_arguments(node), _arguments(other))
            if (
                differing is None
                or _form(node) != _form(other)
                or not self._are_kept(differing, other, touched)
            ):
                return False
            common = {*node.all_input_nodes} - {operand for operand, _ in differing}
            if any(self._is_touched(operand, touched) for operand in common):
                return False
            self._pass(number)
            self.image[other] = node
            self.choices += [(node, *pair) for pair in differing]
            return True
        return False

    def _add(self, other: fx.Node) -> bool:
        """Add a node of the second graph alone. Returns whether it may be added."""
        roots = {self.other_effects.root(operand) for operand in mutated_operands(other)}
        if is_random(other) or any(self.image[root] is not root for root in roots):
            return False
        if not _has_known_sizes(other):
            return False
        operands = [self.image[operand] for operand in other.all_input_nodes]
        if any(self._is_touched(operand, self._touched) for operand in operands):
            return False
        self.image[other] = other
        self.added.setdefault(self.nodes[self._next - 1], []).append(other)
        return True

    def _changed_before(self, end: int) -> dict[fx.Node, fx.Node]:
        """The memory that nodes before one change which only the first graph has."""
        skipped = self.nodes[self._next : end]
        return {self.effects.root(x): node for node in skipped for x in mutated_operands(node)}

    def _is_touched(self, image: fx.Node, touched: Mapping[fx.Node, fx.Node]) -> bool:
        """Whether training alone has changed the memory of a value since it was made."""
        if image.graph is not self.graph:
            return False
        writer = touched.get(self.effects.root(image))
        return writer is not None and self.effects.is_before(image, writer)

    def _pass(self, number: int) -> None:
        """Go on behind a node of the first graph that is paired."""
        self._touched |= self._changed_before(number)
        self._next = number + 1

    def _are_kept(
        self,
        pairs: Iterable[tuple[fx.Node, fx.Node]],
        reader: fx.Node,
        touched: Mapping[fx.Node, fx.Node],
    ) -> bool:
        """Whether a node of the second graph may read its operands in `pairs` in the first: their
        memory has not been `touched`, and nothing changes it later under another name."""
        effects = self.other_effects
        for _, operand in pairs:
            root = effects.root(operand)
            if self._is_touched(self.image[operand], touched):
                return False
            later = [w for w in effects.writers.get(root, ()) if not effects.is_before(w, reader)]
            if later and (later[0] is not reader or not effects.is_last_use(reader)):
                return False
        return True

    def _differing(self, first: Any, second: Any) -> list[tuple[fx.Node, fx.Node]] | None:
        """The operands of two calls that are not one node; None if the calls differ otherwise."""
        (one, spec), (two, other_spec) = map(pytree.tree_flatten, (first, second))
        if spec != other_spec:
            return None
        others: dict[fx.Node, fx.Node] = {}
        for left, right in zip(one, two, strict=True):
            if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
                if type(left) is not type(right) or repr(left) != repr(right):
                    return None
            elif others.setdefault(left, right) is not right:
                return None
        pairs = [(left, right) for left, right in others.items() if self.image[right] is not left]
        whole = all(
            isinstance(left.meta.get("val"), torch.Tensor) and _form(left) == _form(right)
            for left, right in pairs
        )
        return pairs if whole else None

    def apply(self) -> None:
        """Add nodes and choices to the first graph."""
        values = (node.meta.get("val") for node in self.nodes)
        mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))
        for before, added in self.added.items():
            place = before
            for other in added:
                with self.graph.inserting_after(place):
                    place = self.graph.node_copy(other, self.image.__getitem__)
                if other.op == "placeholder":  # fx does not know the names that export gave
                    place.name = place.target = f"{other.name}_of_evaluation"
                place.meta["val"] = _moved(other.meta.get("val"), mode)
                self.image[other] = place
        order = {node: number for number, node in enumerate(self.graph.nodes)}
        made: dict[Hashable, fx.Node] = {}
        for reader, operand, other in self.choices:
            pair = operand, self.image[other]
            if pair not in made:  # behind both, so that a cut before the reader sends one value
                last = max(pair, key=order.__getitem__)
                behind = last if last.op == "call_function" else reader.prev
                with self.graph.inserting_after(behind):
                    made[pair] = self.graph.call_function(BY_MODE, pair)
                made[pair].meta = {**behind.meta, "val": operand.meta["val"]}
            reader.replace_input_with(operand, made[pair])


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two constants are tensors of the same values."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return one is other
    return one.dtype == other.dtype and not one.is_meta and torch.equal(one, other)


def _place(node: fx.Node) -> Hashable:
    """What a node calls, and where in the model."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = tuple(path for path, _ in stack.values())
    return node.op, str(node.target), paths, node.meta.get("stack_trace")


def _has_known_sizes(node: fx.Node) -> bool:
    """Whether a node computes tensors of sizes that do not depend on data."""
    tensors = list(tensors_of(node.meta.get("val")))
    return bool(tensors) and all(type(size) is int for t in tensors for size in t.shape)


def _arguments(node: fx.Node) -> Any:
    """The arguments of a call that hold in either mode."""
    named = {k: v for k, v in arguments_of(node).items() if k not in MODES}
    return named if isinstance(node.target, torch._ops.OpOverload) else (node.args, named)


def _moved(value: Any, mode: FakeTensorMode) -> Any:
    """A value without data in another mode of fake tensors."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            made = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )
        return made.requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(torch.Tensor, moved, value)


def _form(node: fx.Node) -> Any:
    """The shape, layout and dtype of a node's value."""
    return pytree.tree_map_only(torch.Tensor, _form_of, node.meta.get("val"))


def _form_of(tensor: torch.Tensor) -> Any:
    """The shape, layout and dtype of a tensor, with sizes that depend on data as text."""
    sizes = (size if type(size) is int else str(size) for size in (*tensor.shape, *tensor.stride()))
    return *sizes, tensor.dtype
