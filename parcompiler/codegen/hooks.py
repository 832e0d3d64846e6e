"""The module of hooks: what the model does to the gradients of parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from parcompiler.capture.effects import Effects
from parcompiler.codegen.body import Body
from parcompiler.codegen.heading import module_text
from parcompiler.codegen.layout import table
from parcompiler.codegen.literals import string
from parcompiler.codegen.quoting import docstring, paragraph
from parcompiler.graph import Graph

_OPENING = """What the model's hooks make of gradients.

They run once a step, on gradients of the mean loss that are complete: on each rank on what it
holds of them."""


def hooks_module(graph: Graph, device: str) -> str:
    """The text of `hooks.py`."""
    hooks = graph.hooks
    functions = ["\n".join(_function(graph, name, k)) for k, name in enumerate(hooks)]
    rows = [(string(name), f"hook_{k}") for k, name in enumerate(hooks)]
    body = "\n\n\n".join([*functions, "\n".join(table("HOOKS = {", rows, "}", 0))])
    nodes = [node for hook in hooks.values() for node in hook.graph.nodes]
    calls = [node for node in nodes if node.op == "call_function"]
    return module_text(_OPENING, body, calls, device)


def _function(graph: Graph, name: str, k: int) -> Iterator[str]:
    """The hooks of one parameter as a function."""
    hook = graph.hooks[name]
    gradient, *calls, output = hook.graph.nodes
    result = output.args[0]
    assert isinstance(result, fx.Node)
    small = replace(graph, fx_graph=hook.graph, differentiable=frozenset())
    body = Body(small, Effects(hook.graph), {gradient: "gradient"}, {"gradient"})
    lines = body.lines(calls, {result: None})
    yield f"def hook_{k}(gradient: Tensor) -> Tensor:"
    places = ", ".join(hook.places)
    yield f'    """{paragraph(f"Of {docstring(name)}: {places}.", 4)}"""'
    yield from (line.removeprefix("    ") for line in lines)
    yield f"    return {body.name(result)}"
