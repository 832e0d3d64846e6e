"""One class per template: the emitted form of a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from parcompiler.capture.templates import relative_name
from parcompiler.codegen.body import Body, comment
from parcompiler.codegen.layout import wrap
from parcompiler.codegen.literals import literal
from parcompiler.graph import Block, Graph, Parameter
from parcompiler.lower.names import assigned_name


def block_class(
    graph: Graph, block: Block, instances: Sequence[str], variables: Mapping[fx.Node, str]
) -> str:
    """The class of the template that `block` is an instance of."""
    arguments = _argument_names(block, variables)
    tensors = {graph.by_name[b.name].node: f"self.{b.attribute}" for b in block.tensors}
    nodes = {node.name: node for node in graph.fx_graph.nodes if node.name in tensors}
    operands = {nodes[name]: text for name, text in tensors.items()} | arguments
    body = Body(operands, scope=block.scope)
    lines = body.lines(block.nodes, dict.fromkeys(block.outputs))
    results = ", ".join(body.name(node) for node in block.outputs)
    kind = "torch.Tensor" if len(block.outputs) == 1 else "tuple[torch.Tensor, ...]"
    parameters = "".join(f", {name}: torch.Tensor" for name in arguments.values())
    parts = [
        f"class {block.template}(Block):",
        f'    """{docstring(_title(instances))}"""',
        "",
        *names_table({b.attribute: relative_name(b.name, block.scope) for b in block.tensors}),
        *constructor([(b.attribute, graph.by_name[b.name]) for b in block.tensors]),
        wrap(f"def forward(self{parameters}) -> {kind}:", 4),
        f'        """{docstring(_source(block))}"""',
        *lines,
        f"        return {results}",
    ]
    return "\n".join(parts)


def _argument_names(block: Block, variables: Mapping[fx.Node, str]) -> dict[fx.Node, str]:
    """Names of the arguments: what the user's source calls them where they are made."""
    names: dict[fx.Node, str] = {}
    taken: set[str] = {"self", "torch", "F", "DEVICE"}
    for node in block.inputs:
        wish = variables[node] if node.op == "placeholder" else (assigned_name(node) or "x")
        candidate, count = wish, 1
        while candidate in taken:
            count += 1
            candidate = f"{wish}_{count}"
        taken.add(candidate)
        names[node] = candidate
    return names


def names_table(names: dict[str, str]) -> list[str]:
    """The class attribute that maps attributes to the model's names."""
    if not names:
        return []
    rows = [f"        {literal(key, str)}: {literal(name, str)}," for key, name in names.items()]
    return ["    names = {", *rows, "    }", ""]


def constructor(tensors: Sequence[tuple[str, Parameter]], more: Sequence[str] = ()) -> list[str]:
    """`__init__` with a line per tensor."""
    lines = [tensor_line(attribute, item) for attribute, item in tensors]
    if not lines and not more:
        return []
    return [
        "    def __init__(self) -> None:",
        "        super().__init__()",
        *lines,
        *more,
        "",
    ]


def tensor_line(attribute: str, item: Parameter) -> str:
    """The line that makes a parameter or buffer, still empty."""
    size = literal(tuple(item.shape), str)
    empty = f"torch.empty({size}, dtype={item.dtype})"
    if item.buffer:
        return wrap(f'self.register_buffer("{attribute}", {empty})', 8)
    frozen = "" if item.trainable else ", requires_grad=False"
    return wrap(f"self.{attribute} = nn.Parameter({empty}{frozen})", 8)


def _title(instances: Sequence[str]) -> str:
    """Which layers of the model a class is."""
    if len(instances) > 3:
        return f"{instances[0]}, {instances[1]} … {instances[-1]} ({len(instances)} layers)."
    return ", ".join(instances) + "."


def _source(block: Block) -> str:
    """Where in the user's source the block comes from; torch's own modules do not count."""
    for node in block.nodes:
        trace = (node.meta.get("stack_trace") or "").strip().splitlines()
        files = [line.strip().replace("\\", "/") for line in trace if 'File "' in line]
        own = [line for line in files if "/torch/nn/" not in line]
        if own:
            path, _, rest = own[-1].removeprefix("File ").partition(", line ")
            return f"{path.strip(chr(34)).rpartition('/')[2]}:{rest.partition(',')[0]}."
    return "One micro-batch."


def docstring(text: str) -> str:
    """Any text as the inside of a docstring on one line."""
    return comment(text).replace("\\", "/").replace('"', "'")
