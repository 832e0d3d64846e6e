"""The same graph, and the same model, in another floating precision.

Most models cast to float32 inside (norms, softmax, loss) also when their parameters are double,
which limits how exactly two runs can agree. `lift` rewrites a captured graph so that every
floating tensor has the given dtype; `lifting` does the same to a model that runs eagerly. The two
are written apart on purpose: the second is the reference that proves the first.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from parcompiler.graph import Graph


def lift(graph: Graph, dtype: torch.dtype) -> Graph:
    """`graph` with every floating tensor and every floating cast in `dtype`; a new graph."""
    nodes: dict[fx.Node, fx.Node] = {}
    lifted = fx.Graph()
    result = lifted.graph_copy(graph.fx_graph, nodes)
    lifted.output(result)
    for node in lifted.nodes:
        node.args = pytree.tree_map(_swap(dtype), node.args)
        node.kwargs = pytree.tree_map(_swap(dtype), node.kwargs)
        if _follows_default(node):
            node.kwargs = {**node.kwargs, "dtype": dtype}
        contexts = node.meta.get("contexts", ())
        node.meta["contexts"] = tuple(c for c in contexts if c[0] != "autocast")
    _propagate(lifted, dtype)
    return dataclasses.replace(
        graph,
        fx_graph=lifted,
        loss=nodes[graph.loss],
        parameters=tuple(_cast(item, dtype) for item in graph.parameters),
        inputs=tuple(_cast(item, dtype) for item in graph.inputs),
    )


def _swap(dtype: torch.dtype) -> Callable[[Any], Any]:
    """A function that turns floating dtypes into `dtype` and leaves all else."""
    return lambda leaf: dtype if _is_floating(leaf) else leaf


def _follows_default(node: fx.Node) -> bool:
    """Whether a node makes a floating tensor from nothing, in the default dtype."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or node.all_input_nodes:
        return False
    takes_dtype = any(argument.name == "dtype" for argument in target._schema.arguments)
    value = node.meta.get("val")
    floating = isinstance(value, torch.Tensor) and value.dtype.is_floating_point
    return takes_dtype and floating and node.kwargs.get("dtype") is None


def _is_floating(leaf: object) -> bool:
    """Whether a value is a floating dtype."""
    return isinstance(leaf, torch.dtype) and leaf.is_floating_point


def _cast(item: Any, dtype: torch.dtype) -> Any:
    """A parameter or input described in `dtype` when it is floating."""
    return dataclasses.replace(item, dtype=dtype) if item.dtype.is_floating_point else item


def _propagate(graph: fx.Graph, dtype: torch.dtype) -> None:
    """Recompute `node.meta["val"]` of every node from lifted placeholders."""
    with FakeTensorMode(), torch.no_grad():
        values: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            if node.op == "placeholder":
                old = node.meta["val"]
                kind = dtype if old.dtype.is_floating_point else old.dtype
                values[node] = torch.empty(old.shape, dtype=kind, device=old.device)
            elif node.op == "call_function":
                args = fx.map_arg(node.args, values.__getitem__)
                kwargs = fx.map_arg(node.kwargs, values.__getitem__)
                values[node] = node.target(*args, **kwargs)
            else:
                continue
            node.meta["val"] = values[node]


class _Lifting(TorchFunctionMode):
    """Replaces floating dtypes in every call of a torch function."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` with floating dtypes swapped; `x.float()` becomes a cast to `dtype`."""
        if getattr(func, "__name__", "") in ("float", "half", "bfloat16", "double"):
            return args[0].to(self.dtype)
        swap = _swap(self.dtype)
        return func(*pytree.tree_map(swap, args), **pytree.tree_map(swap, kwargs or {}))


@contextmanager
def lifting(dtype: torch.dtype) -> Iterator[None]:
    """Within it, eager code computes in `dtype` whatever casts it asks for."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with _Lifting(dtype):
            yield
    finally:
        torch.set_default_dtype(before)


def lifted_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of `model` whose floating parameters and buffers are in `dtype`."""
    return copy.deepcopy(model).to(dtype)
