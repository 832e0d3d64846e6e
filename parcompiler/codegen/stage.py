"""The module of one stage: its layers as classes, and a forward that calls them.

Layers that repeat become a loop:

    for layer in self.transformer_h:
        transformer_h_5 = layer(transformer_h_5, causal_mask)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from parcompiler.capture.effects import is_random
from parcompiler.capture.templates import identifier
from parcompiler.codegen.block import block_class, constructor, docstring, names_table
from parcompiler.codegen.body import Body, comment
from parcompiler.codegen.layout import assign, wrap
from parcompiler.codegen.literals import literal
from parcompiler.codegen.registry import home_of
from parcompiler.graph import Block, Parameter
from parcompiler.lower.lowered import Call, Lowered, Stage

_HEADER = '''"""{title}

{flow}
"""

import torch
import torch.nn.functional as F
from torch import nn

from parcompiler.runtime import Block, Stage, rank_device

DEVICE = rank_device({device})
'''


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive calls of one template that a loop can make; often a single call.

    `attribute` is the layer, or the list of layers, in the module; `carried` are the positions of
    the arguments that each call takes from the results of the one before.
    """

    attribute: str
    calls: tuple[Call, ...]
    carried: tuple[tuple[int, int], ...] = ()
    shared: bool = False


class StageWriter:
    """Writes the file of one stage."""

    def __init__(self, lowered: Lowered, stage: Stage, device: str) -> None:
        self.lowered = lowered
        self.graph = lowered.graph
        self.stage = stage
        self.device = device

    def text(self) -> str:
        """The whole file."""
        imports = _HEADER.format(
            title=docstring(self._title()), flow=self._flow(), device=literal(self.device)
        )
        body = "\n\n\n".join([*self._classes(), self._stage_class()])
        return _only_used(imports, body) + self._registrations() + "\n\n" + body + "\n"

    def _registrations(self) -> str:
        """Imports of the packages that define operators of their own, for what they register."""
        nodes = [node for call in self.stage.calls for node in call.block.nodes]
        homes = {home_of(node): node.target for node in (*nodes, *self.stage.prologue)}
        lines = [f"import {h}  # defines {t}\n" for h, t in sorted(homes.items(), key=str) if h]
        return "\n" + "".join(lines) if lines else ""

    def _title(self) -> str:
        """What this stage is."""
        count = len(self.lowered.stages)
        blocks = [call.block.name for call in self.stage.calls]
        listed = blocks if len(blocks) < 5 else [*blocks[:2], "…", *blocks[-2:]]
        return f"Stage {self.stage.index} of {count} of {self.graph.name}: {', '.join(listed)}."

    def _flow(self) -> str:
        """What comes in and goes out, in words."""
        came = [*self.stage.inputs, *self.stage.receives]
        gone = [*self.stage.gives, *(["the loss"] if self.stage.loss else [])]
        return f"{', '.join(came) or 'nothing'} → {', '.join(gone) or 'nothing'}"

    def _classes(self) -> Iterator[str]:
        """A class for each distinct layer."""
        by_template: dict[str, list[Block]] = {}
        for call in self.stage.calls:
            by_template.setdefault(call.block.template, []).append(call.block)
        for blocks in by_template.values():
            names = [block.name for block in blocks]
            yield block_class(self.graph, blocks[0], names, self.lowered.variables)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The calls of the stage, those that repeat in one group."""
        return tuple(_group(self.stage, self._instances()))

    def _instances(self) -> dict[str, str]:
        """For each block the first block of the stage with the same layer and the same tensors."""
        first: dict[tuple[object, ...], str] = {}
        return {
            call.block.name: first.setdefault(
                (call.block.template, tuple(b.name for b in call.block.tensors)), call.block.name
            )
            for call in self.stage.calls
        }

    def _stage_class(self) -> str:
        """The class that calls the layers."""
        own = self._own_tensors()
        prologue = self._prologue(own)
        arguments = ", ".join(
            f"{n}: torch.Tensor" for n in (*self.stage.inputs, *self.stage.receives)
        )
        results = [*self.stage.gives, *(["loss"] if self.stage.loss else [])]
        kind = "torch.Tensor" if len(results) == 1 else "tuple[torch.Tensor, ...]"
        lines = [
            "class Stage_(Stage):".replace("Stage_(", f"Stage{self.stage.index}("),
            f'    """{docstring(self._title())}"""',
            "",
            *self._declarations(),
            *names_table({attribute: item.name for attribute, item in own.items()}),
            *constructor(list(own.items()), [*self._layers(), *self._ties()]),
            wrap(f"def forward(self{', ' if arguments else ''}{arguments}) -> {kind}:", 4),
            '        """One micro-batch."""',
            *prologue,
            *itertools.chain.from_iterable(map(_call_lines, self.groups)),
            f"        return {', '.join(results)}" if results else "        return ()",
        ]
        return "\n".join(lines)

    def _declarations(self) -> Iterator[str]:
        """The class attributes that the runtime reads."""
        for name in ("inputs", "receives", "gives"):
            value = getattr(self.stage, name)
            if value:
                yield wrap(f"{name} = {_names(value)}", 4)
        if self.stage.loss:
            yield "    loss = True"
        if any(is_random(node) for call in self.stage.calls for node in call.block.nodes):
            yield "    random = True"
        rows = [f"        {literal(p)}: {literal(s)}," for p, s in self._scopes()]
        yield from ["    scopes = {", *rows, "    }", ""] if rows else [""]

    def _scopes(self) -> Iterator[tuple[str, str]]:
        """The path of each layer in this module and in the user's model."""
        for group in self.groups:
            listed = len(group.calls) > 1 and not group.shared
            for index, call in enumerate(group.calls if listed else group.calls[:1]):
                path = f"{group.attribute}.{index}" if listed else group.attribute
                if call.block.tensors:
                    yield path, call.block.scope

    def _layers(self) -> Iterator[str]:
        """The lines that make the layers."""
        made: set[str] = set()
        for group in self.groups:
            if group.attribute in made:
                continue
            made.add(group.attribute)
            template = group.calls[0].block.template
            made_by = f"{template}()"
            if len(group.calls) > 1 and not group.shared:
                made_by = f"nn.ModuleList({template}() for _ in range({len(group.calls)}))"
            yield wrap(f"self.{group.attribute} = {made_by}", 8)

    def _ties(self) -> Iterator[str]:
        """The lines that let layers share a tensor."""
        first: dict[str, str] = {}
        for path, call in self._paths():
            for binding in call.block.tensors:
                place = f"{path}.{binding.attribute}"
                known = first.setdefault(binding.name, place)
                if known != place:
                    yield wrap(f"self.{_indexed(place)} = self.{_indexed(known)}", 8) + "  # tied"

    def _paths(self) -> Iterator[tuple[str, Call]]:
        """Each distinct layer with its path in this module."""
        seen: set[str] = set()
        for group in self.groups:
            listed = len(group.calls) > 1 and not group.shared
            for index, call in enumerate(group.calls if listed else group.calls[:1]):
                path = f"{group.attribute}.{index}" if listed else group.attribute
                if path not in seen:
                    seen.add(path)
                    yield path, call

    def _own_tensors(self) -> dict[str, Parameter]:
        """Tensors that no layer holds: those of the prologue, and those that nothing reads."""
        held = {b.name for call in self.stage.calls for b in call.block.tensors}
        read = {n.name for node in self.stage.prologue for n in node.all_input_nodes}
        taken = {group.attribute for group in self.groups}
        own = {}
        for name in self.stage.tensors:
            item = self.graph.by_name[name]
            if name not in held or item.node in read:
                attribute = identifier(name)
                while attribute in taken:
                    attribute += "_"
                taken.add(attribute)
                own[attribute] = item
        return own

    def _prologue(self, own: dict[str, Parameter]) -> list[str]:
        """What the stage computes for itself instead of receiving it."""
        if not self.stage.prologue:
            return []
        attributes = {item.node: f"self.{attribute}" for attribute, item in own.items()}
        operands: dict[fx.Node, str] = {}
        for node in self.graph.fx_graph.nodes:
            if node.op == "placeholder":
                named = attributes.get(node.name) or self.lowered.variables.get(node)
                if named is not None:
                    operands[node] = named
        used = {name for call in self.stage.calls for name in call.arguments}
        kept = [n for n in self.stage.prologue if self.lowered.variables[n] in used]
        reserved = {*self.stage.inputs, *self.stage.receives}
        reserved |= {self.lowered.variables[n] for n in kept}
        body = Body(operands, reserved)
        lines = body.lines(self.stage.prologue, {n: self.lowered.variables[n] for n in kept})
        title = "        # Computed here, not received: no parameters, no gradient."
        return [title, *[line for line in lines if not line.strip().startswith("#")]]


def _group(stage: Stage, instances: dict[str, str]) -> Iterator[Group]:
    """Calls gathered into loops where each takes its changing arguments from the one before."""
    names: dict[str, str] = {}
    taken: set[str] = set()
    calls = list(stage.calls)
    start = 0
    while start < len(calls):
        end = start + 1
        carried: tuple[tuple[int, int], ...] = ()
        while end < len(calls):
            extended = _carried(calls[start : end + 1], stage)
            if extended is None or not _uniform(calls[start : end + 1], instances):
                break
            end, carried = end + 1, extended
        members = tuple(calls[start:end])
        shared = len(members) > 1 and len({instances[c.block.name] for c in members}) == 1
        first = instances[members[0].block.name]
        if first in names and (len(members) == 1 or shared):
            attribute = names[first]
        else:
            attribute = _attribute(members, shared, taken)
            names[first] = attribute
        yield Group(attribute, members, carried, shared)
        start = end


def _uniform(calls: Sequence[Call], instances: dict[str, str]) -> bool:
    """Whether calls are all of one layer, or all of layers that appear here for the first time."""
    layers = [instances[call.block.name] for call in calls]
    return len(set(layers)) == 1 or all(
        i == c.block.name for i, c in zip(layers, calls, strict=True)
    )


def _carried(calls: Sequence[Call], stage: Stage) -> tuple[tuple[int, int], ...] | None:
    """Which arguments each call takes from which results of the one before; None if no loop."""
    first, second = calls[0], calls[1]
    if any(call.block.template != first.block.template for call in calls):
        return None
    positions = [
        (a, first.results.index(name))
        for a, name in enumerate(second.arguments)
        if name in first.results
    ]
    pairs = tuple(positions)
    changing = {a for a, _ in pairs}
    for before, after in itertools.pairwise(calls):
        for a, name in enumerate(after.arguments):
            wanted = before.results[dict(pairs)[a]] if a in changing else first.arguments[a]
            if name != wanted:
                return None
    inside = {name for call in calls[:-1] for name in call.results}
    later = {name for call in stage.calls for name in call.arguments if call not in calls}
    if inside & (later | set(stage.gives)) or not pairs:
        return None
    return pairs


def _attribute(members: Sequence[Call], shared: bool, taken: set[str]) -> str:
    """The attribute of a layer or of a list of layers."""
    name = members[0].block.name.partition("@")[0]
    if len(members) > 1 and not shared:
        name = name.rstrip("0123456789").rstrip(".") or "layers"
    wish = identifier(name)
    while wish in taken or hasattr(fx.GraphModule, wish):
        wish += "_"
    taken.add(wish)
    return wish


def _call_lines(group: Group) -> Iterator[str]:
    """The lines that make one call, or a loop of calls."""
    first, last = group.calls[0], group.calls[-1]
    if len(group.calls) == 1:
        call = f"self.{group.attribute}({', '.join(first.arguments)})"
        yield assign(", ".join(first.results), call, 8) if first.results else wrap(call, 8)
        return
    carried = dict(group.carried)
    arguments = [
        last.results[carried[a]] if a in carried else n for a, n in enumerate(first.arguments)
    ]
    for a, result in group.carried:
        yield f"        {last.results[result]} = {first.arguments[a]}"
    if group.shared:
        yield f"        for _ in range({len(group.calls)}):"
        call = f"self.{group.attribute}({', '.join(arguments)})"
    else:
        yield f"        for layer in self.{group.attribute}:"
        call = f"layer({', '.join(arguments)})"
    yield assign(", ".join(last.results), call, 12)


def _indexed(path: str) -> str:
    """`layers.0.weight` as Python: `layers[0].weight`."""
    return "".join(f"[{p}]" if p.isdigit() else f".{p}" for p in path.split(".")).lstrip(".")


def _names(values: Sequence[str]) -> str:
    """A tuple of strings."""
    return (
        "("
        + ", ".join(literal(value) for value in values)
        + ("," if len(values) == 1 else "")
        + ")"
    )


def _only_used(header: str, body: str) -> str:
    """The header without the imports that the body does not use."""
    lines = header.splitlines()
    if "F." not in body:
        lines.remove("import torch.nn.functional as F")
    if "nn." not in body:
        lines.remove("from torch import nn")
    if "DEVICE" not in body:
        lines = [line for line in lines if not line.startswith("DEVICE")]
        lines = [line.replace(", rank_device", "") for line in lines]
    if "(Block)" not in body:
        lines = [line.replace("import Block, ", "import ") for line in lines]
    return "\n".join(lines).rstrip("\n") + "\n"


__all__ = ["Group", "StageWriter", "comment"]
