"""Blocks of the same structure share a template, so that work per layer is done once.

Two runs of nodes have the same template when their operators, constants, wiring, shapes and the
names of their tensors relative to their module are the same, node for node.
"""

from __future__ import annotations

import hashlib
import keyword
import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import fx, nn

from parcompiler.capture.effects import CASTS, name_of, outside
from parcompiler.capture.gradients import recorded_in
from parcompiler.graph import Binding, Block, Graph, shape_of

# Names that emitted code uses itself, which variables and classes of a model must not have; and
# attributes of its modules, which parameters must not have.
EMITTED = frozenset(
    "self torch nn F Tensor runtime DEVICE float complex getattr range super tuple zip".split()
)
ATTRIBUTES = frozenset(dir(nn.Module())) | frozenset(
    "names inputs receives gives loss random again scopes tensor_names constants once"
    " prepare".split()
)


class Segment(NamedTuple):
    """Consecutive nodes under one module; `path` is empty for nodes between the layers.

    `scope` is the module that tensors are named from: the layer, also for a piece of one.
    """

    path: str
    call: str
    nodes: list[fx.Node]
    scope: str


def group(graph: Graph, segments: list[Segment]) -> tuple[Block, ...]:
    """A block for each segment, with template names by structure."""
    blocks = []
    templates: dict[str, str] = {}
    taken = {*EMITTED, *(f"Stage{j}" for j in range(len(segments)))}
    names: set[str] = set()
    for path, call, nodes, scope in segments:
        inside = set(nodes)
        inputs = tuple(node for node in outside(nodes) if node.name not in graph.by_node)
        outputs = tuple(n for n in nodes if any(user not in inside for user in n.users))
        tensors = _tensors(graph, nodes, scope)
        key = _structure(graph, nodes, inputs, outputs, tensors, scope)
        if key not in templates:
            templates[key] = unique(_class_name(path, nodes, _label(graph, nodes)), taken)
        label = path or _label(graph, nodes)
        name = unique(label + (f"@{call}" if call else ""), names, separator="#")
        read = (graph.by_name[name] for name in {binding.name for binding in tensors})
        weights = sum(item.nbytes for item in read if not item.buffer)
        fields = tuple(nodes), inputs, outputs, tensors, scope, weights
        blocks.append(Block(name, templates[key], *fields))
    return tuple(blocks)


def _tensors(graph: Graph, nodes: Sequence[fx.Node], scope: str) -> tuple[Binding, ...]:
    """The parameters and buffers that a block reads, with the attribute each has there."""
    bindings: dict[str, Binding] = {}
    taken = set(ATTRIBUTES)
    for node in outside(nodes):
        known = graph.by_node.get(node.name)
        if known is not None and known.name not in bindings:
            wish = identifier(relative_name(known.name, scope))
            bindings[known.name] = Binding(unique(wish, taken), known.name)
    return tuple(bindings.values())


def relative_name(name: str, scope: str) -> str:
    """A tensor's name relative to its layer, with a leading dot; the whole name outside of the
    layer.

    >>> relative_name("h.0.ln.weight", "h.0"), relative_name("wte.weight", "h.0")
    ('.ln.weight', 'wte.weight')
    """
    return name.removeprefix(scope) if scope and name.startswith(f"{scope}.") else name


def _structure(
    graph: Graph,
    nodes: list[fx.Node],
    inputs: tuple[fx.Node, ...],
    outputs: tuple[fx.Node, ...],
    tensors: tuple[Binding, ...],
    scope: str,
) -> str:
    """A digest of everything that the emitted class of a block depends on."""
    number = {node: f"%{index}" for index, node in enumerate(nodes)}
    number |= {node: f"in{index}" for index, node in enumerate(inputs)}
    attributes = {binding.name: binding.attribute for binding in tensors}

    def operand(node: fx.Node) -> str:
        known = graph.by_node.get(node.name)
        return number[node] if known is None else f"self.{attributes[known.name]}"

    # Under `no_grad` it matters whether values have a history, even if it does not reach the loss.
    apart = any(
        str(kind).endswith("_grad") for node in nodes for kind, *_ in node.meta.get("contexts", ())
    )
    recorded = recorded_in(graph) if apart else graph.differentiable
    digest = hashlib.sha256()
    for node in nodes:
        arguments = fx.map_arg((node.args, node.kwargs), operand)
        how = node.meta.get("contexts", ()), "synchronized" in node.meta
        digest.update(repr((str(node.target), arguments, how, node in outputs)).encode())
    for node in inputs:
        value = node.meta["val"]
        kind = (shape_of(node), value.dtype) if isinstance(value, torch.Tensor) else type(value)
        carries = node.name in graph.differentiable, node.name in recorded
        digest.update(repr((kind, *carries)).encode())
    for binding in tensors:
        known = graph.by_name[binding.name]
        name = relative_name(binding.name, scope)
        digest.update(
            repr(
                (name, known.shape, known.dtype, known.trainable, known.buffer, known.shard)
            ).encode()
        )
    return digest.hexdigest()


def _class_name(path: str, nodes: list[fx.Node], label: str) -> str:
    """The class of a block's module, or a name made from its contents."""
    for node in nodes:
        for module, kind in node.meta.get("nn_module_stack", {}).values():
            if path and module.removeprefix("model.") == path:
                kind = kind if isinstance(kind, str) else kind.__name__
                return identifier(kind.rpartition(".")[2])
    words = re.split(r"[^A-Za-z0-9]+", label)
    return identifier("".join(word[:1].upper() + word[1:] for word in words if word))


def _label(graph: Graph, nodes: list[fx.Node]) -> str:
    """The modules that hold a segment's two largest parameters, in order of use: `wte+wpe`.

    Buffers count if there are only buffers; casts of them are ignored, as they depend on the
    precision and names of blocks must not.
    """
    known = (graph.by_node.get(_uncast(node).name) for node in outside(nodes))
    read = [item for item in known if item is not None]
    sizes = {item.name: item.numel for item in read if not item.buffer}
    sizes = sizes or {item.name: item.numel for item in read}
    largest = sorted(sizes, key=lambda name: -sizes[name])[:2]
    modules = [name.split(".")[-2] for name in sizes if name in largest and "." in name]
    return "+".join(dict.fromkeys(modules)) or "glue"


def _uncast(node: fx.Node) -> fx.Node:
    """The value that a node casts to another dtype, or the node itself."""
    while name_of(node) in CASTS:
        node = node.all_input_nodes[0]
    return node


def identifier(name: str) -> str:
    """A Python identifier that looks like `name`, whatever characters it has.

    >>> identifier("attn.c_proj.weight"), identifier('x"; import os'), identifier("0.bias")
    ('attn_c_proj_weight', 'x_import_os', '_0_bias')
    """
    text = re.sub(r"[^A-Za-z0-9_]+", "_", name).strip("_") or "value"
    return f"_{text}" if text[0].isdigit() or keyword.iskeyword(text) else text


def unique(name: str, taken: set[str], separator: str = "_") -> str:
    """`name`, with a number appended if it is taken; adds it to `taken`."""
    candidate, count = name, 1
    while candidate in taken:
        count += 1
        candidate = f"{name}{separator}{count}"
    taken.add(candidate)
    return candidate
