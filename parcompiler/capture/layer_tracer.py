"""torch.export's tracer at a call of a layer: reads the nodes of the call, and copies them.

These are private interfaces of torch. If they have changed, `current_tracer` returns None, and
layers are traced one by one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils import _pytree as pytree

from parcompiler.capture.effects import is_repeatable
from parcompiler.capture.untouched import Attribute, is_plain

Stack = dict[str, tuple[str, Any]]  # the modules around a node: the path and class of each


class Source(NamedTuple):
    """Where a tensor comes from: an argument or a parameter of the layer, or one of its nodes."""

    kind: Literal["argument", "parameter", "node"]
    key: int | str


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer. Calls of equal `key` run equal operators, unless the forward reads one
    of the `plain` attributes and its values differ."""

    key: Hashable
    plain: Mapping[Attribute, Hashable]
    tensors: tuple[torch.Tensor, ...]
    nodes: Mapping[Source, fx.Node]


@dataclass
class LayerTrace:
    """The trace of one call of a layer.

    `names` has the source of each node and operand, `inner` the modules around each node within the
    layer. `leaves` and `spec` are the result, with sources for its tensors; `made` are the tensors
    in it that nodes yield. `calls` counts the calls of each module inside. Traces of equal
    `signature` have equal nodes; `confirmed`: a second layer had the same.
    """

    graph: fx.Graph
    key: Hashable
    read: Mapping[Attribute, Hashable]
    nodes: list[fx.Node]
    names: Mapping[fx.Node, Source]
    inner: list[tuple[tuple[str, str, str], ...]]
    leaves: list[Any]
    spec: pytree.TreeSpec
    made: list[torch.Tensor]
    calls: Mapping[str, int]
    signature: list[Any]
    confirmed: bool = False


@contextmanager
def untraced() -> Iterator[None]:
    """In this context, calls on tensors are neither traced nor seen by function modes."""
    with torch._C.DisableTorchFunction(), proxy_tensor.disable_proxy_modes_tracing():
        yield


def form(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The properties of a tensor, besides its values, that an operator may depend on."""
    strided = tensor.layout == torch.strided
    place = (tensor.stride(), tensor.storage_offset()) if strided else ()
    flags = tensor.requires_grad, tensor.is_leaf, tensor.is_conj(), tensor.is_neg()
    kind = type(tensor), tensor.dtype, tensor.device, tensor.layout, tensor.is_inference()
    return (*kind, tuple(tensor.shape), *place, *flags)


def current_tracer(layer: nn.Module) -> LayerTracer | None:
    """The tracer, if it is calling `layer` for the first time; else None."""
    tracer = getattr(proxy_tensor.get_proxy_mode(), "tracer", None)
    stack = getattr(tracer, "module_stack", None)
    if not stack or not hasattr(tracer, "num_calls") or not hasattr(tracer, "graph"):
        return None
    current = LayerTracer(tracer, layer, dict(stack))
    key, (path, _kind) = next(reversed(stack.items()))
    return current if key == path and not current.calls() else None


@dataclass(frozen=True)
class LayerTracer:
    """The tracer at one call of a layer; `stack` are the modules around and the layer itself."""

    tracer: Any
    layer: nn.Module
    stack: Stack

    @property
    def graph(self) -> fx.Graph:
        """The graph that is being traced."""
        graph: fx.Graph = self.tracer.graph
        return graph

    @property
    def path(self) -> str:
        """The path of the layer."""
        path: str = next(reversed(self.stack.values()))[0]
        return path

    def calls(self) -> dict[str, int]:
        """How often each module inside the layer was called, by its path from there."""
        inside = (f".{n}" for n, _ in self.layer.named_modules(remove_duplicate=False) if n)
        known = {name: self.tracer.num_calls.get(f"{self.path}{name}") for name in inside}
        return {name: count for name, count in known.items() if count is not None}

    def call(
        self,
        args: Any,
        kwargs: Any,
        description: tuple[Hashable, Mapping[Attribute, Hashable]],
        has_values: Callable[[torch.Tensor], bool],
    ) -> LayerCall | None:
        """The call with these arguments, of a layer with this description.

        None where a forward may change an argument, or where two tensors have one node. A tensor
        with known values is equal only to itself.
        """
        tensors: list[torch.Tensor] = []

        def key(value: Any) -> Hashable:
            if isinstance(value, torch.Tensor):
                number = next((i for i, t in enumerate(tensors) if t is value), len(tensors))
                if number == len(tensors):
                    tensors.append(value)
                known = has_values(value) or self._has_constant(value)
                return number, form(value), id(value) if known else None
            if type(value) is tuple:
                return "tuple", *map(key, value)
            if is_plain(value):
                return type(value), repr(value)
            raise TypeError

        try:
            arguments = key(args), key(tuple(kwargs.items()))
        except TypeError:
            return None
        sources = [(Source("argument", i), tensor) for i, tensor in enumerate(tensors)]
        sources += [(Source("parameter", name), tensor) for name, tensor in self._tensors()]
        nodes = ((source, self._node(tensor)) for source, tensor in sources)
        known = {source: node for source, node in nodes if node is not None}
        inputs = {node for source, node in known.items() if source.kind == "argument"}
        parameters = {node for source, node in known.items() if source.kind == "parameter"}
        if len(inputs) != len(tensors) or inputs & parameters:
            return None
        structure, plain = description
        return LayerCall((structure, arguments, _state()), plain, tuple(tensors), known)

    def traced(
        self, call: LayerCall, read: set[Attribute], start: int, result: Any
    ) -> LayerTrace | None:
        """The nodes of the graph from the number `start` on; None where they cannot be copied."""
        nodes = list(self.graph.nodes)[start:]
        names: dict[fx.Node, Source] = {}
        for source, node in call.nodes.items():
            names.setdefault(node, source)
        signature: list[Any] = [tuple(call.nodes)]
        inner = []
        for number, node in enumerate(nodes):
            stack = list(node.meta.get("nn_module_stack", {}).items())
            if not _is_copyable(node, names) or list(self.stack) != [
                key for key, _ in stack[: len(self.stack)]
            ]:
                return None
            inner.append(
                tuple(
                    (key.removeprefix(self.path), path.removeprefix(self.path), kind)
                    for key, (path, kind) in stack[len(self.stack) :]
                )
            )
            # Compare texts: they tell floats apart to the last bit, and nodes have names.
            arguments = fx.map_arg((node.args, node.kwargs), names.__getitem__)
            forms = pytree.tree_map_only(torch.Tensor, form, node.meta.get("val"))
            text = repr((node.target, arguments)), node.meta.get("stack_trace")
            signature.append((*text, inner[-1], forms))
            names[node] = Source("node", number)
        if not nodes or not is_repeatable(nodes):
            return None
        memory = {_memory(t) for t in (*call.tensors, *(t for _, t in self._tensors()))}
        leaves, spec = pytree.tree_flatten(result)
        made: list[torch.Tensor] = []
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                number = next((i for i, t in enumerate(call.tensors) if t is leaf), -1)
                yielding = self._node(leaf)
                origin = None if yielding is None else names.get(yielding)
                if number >= 0:
                    origin = Source("argument", number)
                elif origin is None or origin.kind != "node":
                    return None
                elif self._has_constant(leaf) or _memory(leaf) in memory or _like(leaf) is None:
                    return None
                else:
                    memory.add(_memory(leaf))
                    made.append(leaf)
                leaves[place] = origin
            elif not is_plain(leaf):
                return None
        signature += [leaves, spec, [form(tensor) for tensor in made]]
        values = {at: call.plain[at] for at in read}
        return LayerTrace(
            self.graph, call.key, values, nodes, names, inner, leaves, spec, made, self.calls(),
            signature,
        )  # fmt: skip

    def copy(self, trace: LayerTrace, call: LayerCall) -> Any:
        """Copy the nodes of an equal layer. Returns the result of this call."""
        outer = {key: (path, _class_name(kind)) for key, (path, kind) in self.stack.items()}
        nodes = dict(call.nodes)
        for number, (node, inner) in enumerate(zip(trace.nodes, trace.inner, strict=True)):
            # A copy has the name that the traced node would have.
            copy = self.graph.node_copy(node, lambda operand: nodes[trace.names[operand]])
            copy.meta["nn_module_stack"] = outer | {
                self.path + key: (self.path + path, kind) for key, path, kind in inner
            }
            nodes[Source("node", number)] = copy
        self.tracer.num_calls.update({self.path + name: n for name, n in trace.calls.items()})
        made = iter(trace.made)
        leaves = list(trace.leaves)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Source) and leaf.kind == "argument":
                leaves[place] = call.tensors[int(leaf.key)]
            elif isinstance(leaf, Source):
                tensor = leaves[place] = _like(next(made))
                proxy = fx.Proxy(nodes[leaf], self.tracer)
                proxy_tensor.track_tensor_tree(tensor, proxy, constant=None, tracer=self.tracer)
        return pytree.tree_unflatten(leaves, trace.spec)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters and buffers of the layer, tied ones under each of their names."""
        yield from self.layer.named_parameters(remove_duplicate=False)
        yield from self.layer.named_buffers(remove_duplicate=False)

    def _node(self, tensor: torch.Tensor) -> fx.Node | None:
        """The node that yields a tensor; None for one that is not traced."""
        slot: Any = proxy_tensor.get_proxy_slot(tensor, self.tracer, None)
        return None if slot is None else slot.proxy.node

    def _has_constant(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a constant of the trace, or is not traced."""
        slot: Any = proxy_tensor.get_proxy_slot(tensor, self.tracer, None)
        if slot is None or slot.constant is not None or not isinstance(tensor, FakeTensor):
            return True
        return tensor.constant is not None


def _is_copyable(node: fx.Node, names: Mapping[fx.Node, Source]) -> bool:
    """Whether a node is an operator on known operands whose sizes are numbers."""
    target, value = node.target, node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    if isinstance(target, torch._ops.OpOverload) and (
        torch.Tag.inplace_view in target.tags or target._opname in ("set_", "resize_")
    ):
        return False  # changes the shape or memory of its operand
    return (
        node.op == "call_function"
        and not isinstance(target, torch._ops.HigherOrderOperator)
        and "unbacked_bindings" not in node.meta
        and all(operand in names for operand in node.all_input_nodes)
        and all(
            item is None
            or (isinstance(item, torch.Tensor) and all(type(size) is int for size in item.shape))
            for item in values
        )
    )


def _state() -> Hashable:
    """The state of torch that a forward may depend on, and the current lines of its callers."""
    kinds = ("cpu", "cuda")
    casts = [(torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()
    lines: list[Hashable] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        lines.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return (*modes, *casts, *map(id, function_modes()), *lines)


def _class_name(kind: Any) -> str:
    """The name of a class in the module stacks of nodes."""
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else str(kind)


def _memory(tensor: torch.Tensor) -> int:
    """The address of the storage that a tensor lies in."""
    address: int = tensor.untyped_storage()._cdata
    return address


def _like(tensor: torch.Tensor) -> torch.Tensor | None:
    """A new tensor of the same form without history; None where there is none."""
    assert isinstance(tensor, FakeTensor)
    with tensor.fake_mode, torch.enable_grad():
        made = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        if tensor.requires_grad:
            made = made.requires_grad_().clone()
    sizes = tensor.untyped_storage().nbytes(), made.untyped_storage().nbytes()
    return made if form(made) == form(tensor) and sizes[0] == sizes[1] else None
