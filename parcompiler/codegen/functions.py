"""Small graphs of a model as functions in separate modules: hooks on gradients, and the count of
targets for a loss that is a mean over tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from parcompiler.capture.effects import Effects
from parcompiler.codegen.body import Body
from parcompiler.codegen.heading import module_text
from parcompiler.codegen.layout import table, wrap
from parcompiler.codegen.literals import string
from parcompiler.codegen.quoting import docstring, paragraph
from parcompiler.graph import Graph
from parcompiler.lower.lowered import Lowered

_HOOKS = """What the model's hooks make of gradients.

They run once a step, on gradients of the mean loss that are complete: on each rank on what it
holds of them."""
_COUNTS = """How many targets of a micro-batch the loss counts.

The sum of the loss is divided by their number in all micro-batches and data ranks of a step."""


def hooks_module(graph: Graph, device: str) -> str:
    """The text of `hooks.py`."""
    functions = []
    for k, (name, hook) in enumerate(graph.hooks.items()):
        remark = f"Of {docstring(name)}: {', '.join(hook.places)}."
        gradient = next(iter(hook.graph.nodes))
        functions.append(_function(graph, hook.graph, f"hook_{k}", remark, {gradient: "gradient"}))
    rows = [(string(name), f"hook_{k}") for k, name in enumerate(graph.hooks)]
    body = "\n\n\n".join([*functions, "\n".join(table("HOOKS = {", rows, "}", 0))])
    calls = [node for hook in graph.hooks.values() for node in _calls(hook.graph)]
    return module_text(_HOOKS, body, calls, device)


def counts_module(lowered: Lowered, device: str) -> str:
    """The text of `counts.py`."""
    small = lowered.graph.counts
    assert small is not None
    known, read = lowered.graph.placeholders, small.find_nodes(op="placeholder")
    operands = {node: lowered.variables[known[node.name]] for node in read}
    remark = "The number of targets, a scalar of integers."
    text = _function(lowered.graph, small, "counted", remark, operands)
    return module_text(_COUNTS, text, _calls(small), device)


def _function(
    graph: Graph, small: fx.Graph, name: str, remark: str, operands: Mapping[fx.Node, str]
) -> str:
    """A small graph without gradients as a function of tensors named in `operands`."""
    head = f"def {name}({', '.join(f'{argument}: Tensor' for argument in operands.values())})"
    lines = method(graph, small, head, remark, operands)
    return "\n".join(line.removeprefix("    ") for line in lines)


def method(
    graph: Graph,
    small: fx.Graph,
    head: str,
    remark: str,
    operands: Mapping[fx.Node, str],
    differentiable: frozenset[str] = frozenset(),
) -> list[str]:
    """The lines of a method that computes a small graph of the model from `operands`;
    `differentiable` names its nodes that carry gradients."""
    (result,) = small.output_node().all_input_nodes
    part = replace(graph, fx_graph=small, differentiable=differentiable)
    body = Body(part, Effects(small), operands)
    lines = body.lines(_calls(small), {result: None})
    return [
        wrap(f"{head} -> Tensor:", 4),
        f'        """{paragraph(remark, 8)}"""',
        *lines,
        wrap(f"return {body.name(result)}", 8),
    ]


def _calls(graph: fx.Graph) -> Sequence[fx.Node]:
    """The operators of a small graph."""
    return [node for node in graph.nodes if node.op == "call_function"]
