"""Rewrites a graph, node after node, into a new one with the same names."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from parcompiler.capture.templates import unique
from parcompiler.graph import Graph


class Rewriting:
    """A new graph under construction: `nodes` maps each node of `whole` to its replacement, and
    `carrying` has the names of new nodes that carry gradients."""

    def __init__(self, whole: Graph) -> None:
        self.whole = whole
        self.made = fx.Graph()
        self.nodes: dict[fx.Node, fx.Node] = {}
        self.carrying: set[str] = set()
        self.taken = {node.name for node in whole.fx_graph.nodes}

    def copy(self, node: fx.Node, operand: Callable[[fx.Node], fx.Node] | None = None) -> fx.Node:
        """Copy a node, with its operands mapped by `nodes`, or by `operand`."""
        return self.keep(node, self.made.node_copy(node, operand or self.nodes.__getitem__))

    def keep(self, node: fx.Node, made: fx.Node) -> fx.Node:
        """Make a new node the replacement of one of the whole, under its name."""
        for key, value in node.meta.items():
            made.meta.setdefault(key, value)
        if made.name != node.name:  # torch renames inputs called `torch` or `inf`
            made.name = node.name
        self.nodes[node] = made
        if node.name in self.whole.differentiable:
            self.carrying.add(node.name)
        return made

    def insert(
        self, name: str, target: Callable[..., Any], args: tuple[Any, ...],
        meta: dict[str, Any], *, carries: bool, kwargs: Mapping[str, Any] | None = None,
    ) -> fx.Node:  # fmt: skip
        """Add a new node that replaces none, under `name` or a free name like it; `carries` says
        that it carries a gradient."""
        free, more = unique(name, self.taken), dict(kwargs or {})
        made = self.made.create_node("call_function", target, args, more, free)
        made.meta = meta
        if made.name != free:  # torch had given that name to another node at first
            made.name = free
        if carries:
            self.carrying.add(made.name)
        return made

    def rewritten(self, said: str = "", **changes: Any) -> Graph:
        """The finished graph, with `changes` of its other fields; `said` distinguishes its
        fingerprint from those of other rewritings of the same whole."""
        output: Any = self.made.output_node()
        if said:
            digest = hashlib.sha256(f"{self.whole.fingerprint} {said}".encode())
            changes["fingerprint"] = digest.hexdigest()[:16]
        return dataclasses.replace(
            self.whole,
            fx_graph=self.made,
            loss=output.args[0][0],
            differentiable=frozenset(x.name for x in self.made.nodes if x.name in self.carrying),
            **changes,
        )


def copied(graph: Graph) -> Rewriting:
    """A rewriting with copies of all nodes of a graph, to be changed."""
    rewriting = Rewriting(graph)
    for node in graph.fx_graph.nodes:
        rewriting.copy(node)
    return rewriting


def inserted(
    before: fx.Node, target: Callable[..., Any], *args: Any, like: fx.Node | None = None
) -> fx.Node:
    """Insert a call in front of a node, with the place in the model of that node or of `like`; its
    value is computed without data."""
    with before.graph.inserting_before(before):
        made = before.graph.call_function(target, args)
    made.meta = {**(like or before).meta, "val": called(target, args)}
    return made


def called(target: Callable[..., Any], args: Any, kwargs: Any = None) -> Any:
    """The result of a function on values without data."""
    args, kwargs = fx.map_arg((args, kwargs or {}), lambda node: node.meta["val"])
    with torch.no_grad():
        return target(*args, **kwargs)


def place(module: fx.Node, source: fx.Node | None = None) -> dict[str, Any]:
    """The `meta` of a new node in the module of one, from the source lines of it or of another.

    >>> graph = fx.Graph()
    >>> x, y = graph.placeholder("x"), graph.placeholder("y")
    >>> x.meta, y.meta = {"nn_module_stack": {}, "val": None}, {"stack_trace": "model.py"}
    >>> place(x, y)
    {'nn_module_stack': {}, 'stack_trace': 'model.py'}
    """
    origins = ("nn_module_stack", module), ("stack_trace", source or module)
    return {key: node.meta[key] for key, node in origins if key in node.meta}
