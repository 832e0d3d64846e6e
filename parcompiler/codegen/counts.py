"""The module that counts the targets of a micro-batch, where the loss is a mean over tokens."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from parcompiler.capture.effects import Effects
from parcompiler.codegen.body import Body
from parcompiler.codegen.heading import module_text
from parcompiler.codegen.layout import wrap
from parcompiler.lower.lowered import Lowered

_OPENING = """How many targets of a micro-batch the loss counts.

The sum of the loss is divided by their number in all micro-batches and data ranks of a step."""


def counts_module(lowered: Lowered, device: str) -> str:
    """The text of `counts.py`."""
    small = lowered.graph.counts
    assert small is not None
    known = {n.name: n for n in lowered.graph.fx_graph.nodes if n.op == "placeholder"}
    read = [node for node in small.nodes if node.op == "placeholder"]
    operands = {node: lowered.variables[known[node.name]] for node in read}
    calls = [node for node in small.nodes if node.op == "call_function"]
    result = next(node for node in small.nodes if node.op == "output").args[0]
    assert isinstance(result, fx.Node)
    graph = replace(lowered.graph, fx_graph=small, differentiable=frozenset())
    body = Body(graph, Effects(small), operands, {*operands.values()})
    lines = body.lines(calls, {result: None})
    arguments = ", ".join(f"{name}: Tensor" for name in operands.values())
    text = "\n".join([
        wrap(f"def counted({arguments}) -> Tensor:"),
        '    """The number of targets, a scalar of integers."""',
        *(line.removeprefix("    ") for line in lines),
        f"    return {body.name(result)}",
    ])  # fmt: skip
    return module_text(_OPENING, text, calls, device)
