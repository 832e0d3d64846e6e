"""The tracer of `torch.export` at the moment when it calls a layer, and what it has traced.

What is not torch's public interface is in this file. Where torch has changed it, there is `now` no
tracer, and layers are traced one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor

from parcompiler.capture.replay.alike import form, is_plain
from parcompiler.capture.replay.calls import Call
from parcompiler.capture.replay.span import Result, Source, Span, Stack, copied, path_of

Sources = Mapping[Source, fx.Node]


@contextmanager
def aside() -> Iterator[None]:
    """Within it, what is done with tensors is neither traced nor seen by anybody."""
    with torch._C.DisableTorchFunction(), proxy_tensor.disable_proxy_modes_tracing():
        yield


@dataclass(frozen=True)
class Tracing:
    """The tracer at one call of a layer; `stack` are the modules around and the layer."""

    tracer: Any
    layer: nn.Module
    stack: Stack

    @property
    def graph(self) -> fx.Graph:
        """What is traced so far."""
        graph: fx.Graph = self.tracer.graph
        return graph

    @property
    def calls(self) -> dict[str, int]:
        """How often each module inside the layer was called, by its path from there."""
        path, known = path_of(self.stack), self.tracer.num_calls
        inside = (f".{n}" for n, _ in self.layer.named_modules(remove_duplicate=False) if n)
        return {n: known[f"{path}{n}"] for n in inside if f"{path}{n}" in known}

    def has_constant(self, tensor: torch.Tensor) -> bool:
        """Whether the tracer knows the values of a tensor, or does not know the tensor."""
        slot: Any = proxy_tensor.get_proxy_slot(tensor, self.tracer, None)
        if slot is None or slot.constant is not None or not isinstance(tensor, FakeTensor):
            return True
        return tensor.constant is not None

    def sources(self, call: Call) -> Sources | None:
        """The nodes of the arguments and of the layer's tensors; None when they are not apart."""
        arguments = [self._node(tensor) for tensor in call.tensors]
        own = {name: self._node(tensor) for name, tensor in _tensors(self.layer)}
        nodes = [*arguments, *(node for node in dict.fromkeys(own.values()) if node is not None)]
        if None in arguments or len(set(nodes)) != len(nodes):
            return None
        given = {("argument", number): node for number, node in enumerate(arguments)}
        found = given | {("own", name): node for name, node in own.items()}
        return {source: node for source, node in found.items() if node is not None}

    def span(self, start: fx.Node, call: Call, sources: Sources, result: Any) -> Span | None:
        """What was traced behind the node `start`; None for results that cannot be made again."""
        nodes: list[fx.Node] = []
        node = start.next
        while node.op != "root":
            nodes.append(node)
            node = node.next
        outside: dict[fx.Node, Source] = {}
        for source, node in sources.items():
            outside.setdefault(node, source)
        made: list[torch.Tensor] = []
        found = self._results(result, call, {n: i for i, n in enumerate(nodes)}, made)
        given = {_memory(t) for t in (*call.tensors, *(t for _, t in _tensors(self.layer)))}
        memory = [_memory(tensor) for tensor in made]
        if found is None or len(set(memory)) < len(memory) or not given.isdisjoint(memory):
            return None
        if any(_like(tensor) is None for tensor in made):
            return None
        return Span(tuple(nodes), dict(self.stack), outside, found, tuple(made))

    def copy(self, span: Span, call: Call, calls: Mapping[str, int]) -> Any:
        """Copy what an equal layer was traced to; what the layer of this call returns then."""
        sources = self.sources(call)
        assert sources is not None
        nodes = copied(span, self.graph, self.stack, sources)
        path = path_of(self.stack)
        self.tracer.num_calls.update({path + inner: count for inner, count in calls.items()})
        made = iter(span.made)

        def value(item: Any) -> Any:
            if isinstance(item, tuple):
                return tuple(map(value, item))
            if not isinstance(item, Result):
                return item
            if item.kind == "argument":
                return call.tensors[item.number]
            tensor = _like(next(made))
            proxy = fx.Proxy(nodes[item.number], self.tracer)
            proxy_tensor.track_tensor_tree(tensor, proxy, constant=None, tracer=self.tracer)
            return tensor

        return value(span.result)

    def _node(self, tensor: torch.Tensor) -> fx.Node | None:
        """The node that yields a tensor; None for one that is not traced."""
        slot: Any = proxy_tensor.get_proxy_slot(tensor, self.tracer, None)
        return None if slot is None else slot.proxy.node

    def _results(
        self, value: Any, call: Call, places: Mapping[fx.Node, int], made: list[torch.Tensor]
    ) -> Any:
        """The result of a layer without its tensors, which are added to `made`; None if there is
        something in it that cannot be told from others."""
        if isinstance(value, torch.Tensor):
            for number, given in enumerate(call.tensors):
                if given is value:
                    return Result("argument", number)
            node = self._node(value)
            if node is None or node not in places or self.has_constant(value):
                return None
            made.append(value)
            return Result("node", places[node])
        if type(value) is tuple:
            found = tuple(self._results(item, call, places, made) for item in value)
            unclear = any(f is None and v is not None for f, v in zip(found, value, strict=True))
            return None if unclear else found
        return value if is_plain(value) else None


def now(layer: nn.Module) -> Tracing | None:
    """The tracer that calls `layer` for the first time; None where there is none such."""
    mode = proxy_tensor.get_proxy_mode()
    tracer = getattr(mode, "tracer", None)
    stack = getattr(tracer, "module_stack", None)
    if not stack or not hasattr(tracer, "num_calls") or not hasattr(tracer, "graph"):
        return None
    found = Tracing(tracer, layer, stack)
    key, (path, _kind) = next(reversed(stack.items()))
    return found if key == path and not found.calls else None


def _tensors(layer: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers of a layer, tied ones under each of their names."""
    yield from layer.named_parameters(remove_duplicate=False)
    yield from layer.named_buffers(remove_duplicate=False)


def _memory(tensor: torch.Tensor) -> int:
    """Which memory a tensor lies in."""
    place: int = tensor.untyped_storage()._cdata
    return place


def _like(tensor: torch.Tensor) -> torch.Tensor | None:
    """A new tensor of the same form, of which autograd knows no more; None where there is none."""
    assert isinstance(tensor, FakeTensor)
    with tensor.fake_mode, torch.enable_grad():
        made = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        if tensor.requires_grad:
            made = made.requires_grad_().clone()
    sizes = tensor.untyped_storage().nbytes(), made.untyped_storage().nbytes()
    return made if form(made) == form(tensor) and sizes[0] == sizes[1] else None
