"""Clean-ups of an exported graph: removes what no rank should run.

Regions under `torch.no_grad()` or `torch.autocast` come as submodules; their nodes are inlined
and remember the context in `node.meta["contexts"]`. Assertions and dead nodes go.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from parcompiler.capture.batched import write_batches
from parcompiler.capture.effects import (
    Effects,
    arguments_of,
    effects_of,
    is_random,
    mutated_operands,
    overload_name,
    viewed,
)
from parcompiler.capture.grad_modes import is_in_lost_region
from parcompiler.capture.gradients import is_unrecorded, returned
from parcompiler.capture.prologue import constants
from parcompiler.capture.rewriting import copied
from parcompiler.errors import CaptureError
from parcompiler.graph import Graph

Context = tuple[Any, ...]

_ASSERTIONS = ("_assert", "sym_constrain", "_check")


def inline_regions(
    graph: fx.Graph, owner: torch.nn.Module, contexts: tuple[Context, ...] = ()
) -> None:
    """Replace each `wrap_with_*` region by its nodes. Raises CaptureError for other regions."""
    for node in graph.nodes:  # export leaves wrong users beside its regions
        node.users.clear()
    for node in graph.nodes:
        for operand in node.all_input_nodes:
            operand.users[node] = None
    write_batches(graph, owner)
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(
            node.target, torch._ops.HigherOrderOperator
        ):
            continue
        name = node.target.name()
        region = _region(name, node, contexts)
        if region is None:
            message = (
                f"the operator {name!r} holds a sub-graph that cannot be divided; {where(node)}"
            )
            raise CaptureError(message)
        context, body, operands = region
        inner = contexts + (() if context is None else (context,))
        _inline(graph, node, owner.get_submodule(str(body.target)), operands, inner)


def enter_lost_regions(graph: fx.Graph) -> None:
    """Put nodes under the `no_grad` that the export has lost."""
    for node in graph.nodes:
        if node.op == "call_function" and is_in_lost_region(node) and not is_unrecorded(node):
            node.meta["contexts"] = (*node.meta.get("contexts", ()), ("no_grad",))


def _region(
    name: str, node: fx.Node, contexts: tuple[Context, ...]
) -> tuple[Context | None, fx.Node, tuple[Any, ...]] | None:
    """The context, the submodule and the operands of a region under others; None if it is of
    another kind."""
    if name == "wrap_with_set_grad_enabled":
        enabled, body, *operands = node.args
        context: Context | None = ("enable_grad",) if enabled else ("no_grad",)
    elif name == "wrap_with_autocast":
        device, dtype, enabled, _cache, body, *operands = node.args
        # Switching autocast off (rotary tables) has an effect only within a region that has it on.
        is_on = any(around[:2] == ("autocast", device) for around in contexts)
        context = ("autocast", device, str(dtype).removeprefix("torch."), enabled)
        context = context if enabled or is_on else None
    else:
        return None
    assert isinstance(body, fx.Node)
    return context, body, tuple(operands)


def _inline(
    graph: fx.Graph,
    node: fx.Node,
    body: torch.nn.Module,
    operands: tuple[Any, ...],
    contexts: tuple[Context, ...],
) -> None:
    """Copy the nodes of `body` in front of `node` and redirect its users to them."""
    assert isinstance(body, fx.GraphModule)
    inline_regions(body.graph, body, contexts)
    values: dict[fx.Node, Any] = {}
    remaining = iter(operands)
    results: Any = ()
    with graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op == "placeholder":
                values[inner] = next(remaining)
            elif inner.op == "output":
                results = fx.map_arg(inner.args[0], lambda item: values[item])
            elif inner.op == "call_function":
                values[inner] = graph.node_copy(inner, lambda item: values[item])
                values[inner].meta.setdefault("contexts", contexts)
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(node)


def drop_objects(graph: fx.Graph) -> None:
    """Erase sub-graphs and objects that nothing uses. Raises CaptureError for those in use: no
    stage could run them."""
    for node in graph.nodes:
        if node.op == "get_attr" and node.users:
            message = (
                f"the graph has a sub-graph or an object, which cannot be divided: {where(node)}"
            )
            raise CaptureError(message)
        if node.op == "get_attr":
            graph.erase_node(node)


_TRANSFORMS = {  # by the first call that torch records for each
    "_add_batch_dim": (
        "torch.vmap of dropout, of a custom Function or under no_grad cannot be divided: write "
        "the operation with a batch dimension"
    ),
    "_make_dual": "torch.func.jvp cannot be divided: write the derivative out",
    "_wrap_for_grad": "torch.func.grad cannot be divided: write the derivative out",
    "_unwrap_for_grad": "torch.func.grad cannot be divided: write the derivative out",
}


def refuse_transforms(graph: fx.Graph) -> None:
    """Raise CaptureError for a function transformed by `torch.func`: its operators need torch's
    stack of transforms, which stages do not have."""
    for node in graph.nodes:
        if (name := getattr(node.target, "__name__", "")) in _TRANSFORMS:
            message = f"{_TRANSFORMS[name]}; {where(node)}"
            raise CaptureError(message)


def drop_assertions(graph: fx.Graph) -> None:
    """Erase the checks that export adds; shapes and dtypes are proved by the verifier."""
    for node in reversed(graph.nodes):
        name = getattr(node.target, "__name__", str(node.target))
        if node.op == "call_function" and not node.users and name.startswith(_ASSERTIONS):
            graph.erase_node(node)


def settle_sizes(graph: fx.Graph) -> None:
    """Replace symbolic sizes that depend on known values by numbers."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor | list | tuple):
            node.meta["val"] = pytree.tree_map_only(FakeTensor, _settled, value)


def _settled(tensor: FakeTensor) -> torch.Tensor:
    """A tensor whose known symbolic sizes are numbers."""
    if tensor.layout is not torch.strided:
        return tensor
    sizes = [*tensor.shape, *tensor.stride()]
    symbols = [size.node for size in sizes if isinstance(size, torch.SymInt)]
    if not symbols or any(symbol.maybe_as_int() is None for symbol in symbols):
        return tensor
    shape, stride = map(int, tensor.shape), map(int, tensor.stride())
    with tensor.fake_mode:
        made = torch.empty_strided(
            tuple(shape), tuple(stride), dtype=tensor.dtype, device=tensor.device
        )
    return made.requires_grad_(tensor.requires_grad)


def make_gradients_whole(graph: fx.Graph) -> None:
    """Replace sparse=True by dense gradients in lookups of tables, as ranks sum dense gradients;
    the lookups are marked."""
    for node in graph.nodes:
        named, looks_up = arguments_of(node), ("embedding", "embedding_bag", "_embedding_bag")
        if overload_name(node) in looks_up and named["sparse"]:
            node.meta["sparse"] = True
            pairs = zip(named, node.args, strict=False)
            node.args = tuple(False if name == "sparse" else x for name, x in pairs)
            node.kwargs = {key: x for key, x in node.kwargs.items() if key != "sparse"}


def drop_dead(graph: fx.Graph) -> None:
    """Erase what neither the result, nor an update of a placeholder in place, nor a random draw
    depends on. Updates of other memory stay if a later reader of that memory does."""
    effects = Effects(graph)
    pending = [graph.output_node()]
    for root, writers in effects.writers.items():
        pending += writers if root.op == "placeholder" else ()
    pending += [node for node in graph.nodes if is_random(node) and not any(mutated_operands(node))]
    needed = effects.behind(pending)
    for node in reversed(graph.nodes):
        if node not in needed and node.op != "placeholder":
            graph.erase_node(node)


def drop_no_operations(graph: fx.Graph) -> None:
    """Erase casts to the dtype that a value already has, and aliases.

    Models cast to float32 around norms and softmax whatever their own dtype; after `lift` most
    of these casts do nothing, and the emitted code reads better without them. Under `no_grad` only
    a node that returns its operand itself is erased: an alias there is a tensor without history.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(
            node.args[0] if node.args else None, fx.Node
        ):
            continue
        source = node.args[0]
        if returned(node) is source if is_unrecorded(node) else _does_nothing(node, source):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _does_nothing(node: fx.Node, source: fx.Node) -> bool:
    """Whether a node returns its first argument as it is, in the same memory."""
    name = overload_name(node)
    if name not in ("to", "type_as", "dropout"):
        return name == "alias" or (name == "by_mode" and node.args[1] is source)
    return source.meta["val"].device == node.meta["val"].device and returned(node) is source


def where(node: fx.Node) -> str:
    """The place of a node in the user's model: module path and source line."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    path = stack[-1][0].removeprefix("model").removeprefix(".") if stack else ""
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    source = " ".join(line.strip() for line in lines[-2:])
    return f"module {path or '(the model itself)'!r}" + (f", {source}" if source else "")


def simplify(graph: Graph) -> Graph:
    """`graph` without casts to the dtype that a value has already; equal layers share constants.

    Made once, so that results cached with it serve every mesh.
    """

    def simplified() -> Graph:
        copies = copied(graph)
        _share(graph, copies.nodes)
        drop_no_operations(copies.made)
        return copies.rewritten()

    return graph.once("simplified", simplified)


def _share(graph: Graph, copies: Mapping[fx.Node, fx.Node]) -> None:
    """Merge equal constants that several equal layers compute at the same place, and that nothing
    writes to, into one node. Views stay with their readers.

    (Two constants of one layer that are equal at these sizes may differ at others.)
    """
    effects, fixed = effects_of(graph), constants(graph)
    number: Counter[str] = Counter()  # of a node among the constants of its layer
    first: dict[str, fx.Node] = {}
    same: dict[fx.Node, fx.Node] = {}
    for node, copy in copies.items():
        if node not in fixed or node.op != "call_function":
            continue
        call, (path, _) = next(reversed((node.meta.get("nn_module_stack") or _OUTSIDE).items()))
        number[call] += 1
        if effects.writers.get(effects.root(node)) or any(mutated_operands(node)):
            continue
        arguments = fx.map_arg((copy.args, copy.kwargs), lambda operand: same.get(operand, operand))
        place = re.sub(r"\d+", "#", path), number[call]
        formula = repr((str(node.target), arguments, node.meta.get("contexts", ()), place))
        same[copy] = first.setdefault(formula, copy)
        if same[copy] is not copy and viewed(node) is node:
            copy.replace_all_uses_with(same[copy])
    for copy in reversed([*copies.values()]):
        if same.get(copy, copy) is not copy and not copy.users:
            copy.graph.erase_node(copy)


_OUTSIDE = {"": ("", None)}  # the module stack of a node without one
