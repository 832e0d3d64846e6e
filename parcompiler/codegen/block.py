"""One class per template: the emitted form of a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from parcompiler.capture.blocks import steps
from parcompiler.capture.deferrable import deferrable_weight
from parcompiler.capture.effects import Effects
from parcompiler.codegen.attributes import BlockAttributes
from parcompiler.codegen.body import Body
from parcompiler.codegen.layout import wrap
from parcompiler.codegen.quoting import docstring, paragraph
from parcompiler.codegen.tensors import constructor, names_table
from parcompiler.graph import Block, Graph
from parcompiler.naming.source import Frame, frames
from parcompiler.naming.variables import argument_names
from parcompiler.report.names import ranges


def block_class(
    graph: Graph,
    effects: Effects,
    instances: Sequence[Block],
    variables: Mapping[fx.Node, str],
    *,
    split: bool = False,
) -> str:
    """The class of a template, from the blocks that are instances of it.

    The weight gradients of its linear layers can be left for later where the backward is `split`.
    """
    block = instances[0]
    arguments = argument_names(graph, [item.inputs for item in instances], variables)
    tensors = {graph.by_name[b.name].node: f"self.{b.attribute}" for b in block.tensors}
    nodes = {node.name: node for node in graph.fx_graph.nodes if node.name in tensors}
    operands = {nodes[name]: text for name, text in tensors.items()} | arguments
    deferring = deferring_nodes(graph, block) if split else set()
    attributes = BlockAttributes(graph, block, deferring)
    body = Body(
        graph, effects, operands, scope=block.scope, deferring=deferring, attributes=attributes
    )
    lines = body.lines(block.nodes, dict.fromkeys(block.outputs))
    written = [*attributes.constructor(), *lines]
    title = _title(instances)
    later = [
        name
        for name in ("Linear", "linear", "addmm")
        if any(f"runtime.{name}(" in x for x in written)
    ]
    if later:
        said = ", ".join(f"`runtime.{name}`" for name in later)
        title += f" The gradients of weights of {said} wait for BACKWARD_WEIGHT."
    results = ", ".join(body.name(node) for node in block.outputs)
    kind = "Tensor" if len(block.outputs) == 1 else "tuple[Tensor, ...]"
    parameters = "".join(f", {name}: Tensor" for name in arguments.values())
    parts = [
        f"class {block.template}(runtime.Block):",
        f'    """{paragraph(title, 4)}"""',
        "",
        *names_table(attributes.names),
        *constructor(attributes.constructor()),
        wrap(f"def forward(self{parameters}) -> {kind}:", 4),
        *lines,
        wrap(f"return {results}" if results else "return ()", 8),
    ]
    return "\n".join(parts)


def deferring_nodes(graph: Graph, block: Block) -> set[fx.Node]:
    """The nodes of a block that can leave the gradient of their weight for later."""
    trainable = {item.node for item in graph.parameters if item.trainable}
    return {node for node in block.nodes if deferrable_weight(node, trainable) is not None}


def _title(instances: Sequence[Block]) -> str:
    """Which layers of the model a class is, and where they begin in its source."""
    listed = ranges([docstring(block.name) for block in instances])
    frame = _beginning(instances[0])
    if frame is None:
        return f"{listed}."
    file = frame.file.replace("\\", "/").rpartition("/")[2]
    return f"{listed}, from {file}:{frame.line}."


def _beginning(block: Block) -> Frame | None:
    """The line of the layer's own forward that comes first; else the innermost of the model."""
    for node in block.nodes:
        paths = [step.path for step in steps(node)]
        calls = [frame for frame in frames(node) if frame.function == "forward"]
        if block.scope in paths and len(calls) == len(paths) + 1:
            frame = calls[paths.index(block.scope) + 1]
            if not frame.is_torch:
                return frame
    own = [f for node in block.nodes for f in frames(node)[::-1] if not f.is_torch]
    return own[0] if own else None
