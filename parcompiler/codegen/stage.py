"""The module of one stage: its layers as classes, and a forward that calls them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from parcompiler.capture.effects import Effects, is_random
from parcompiler.capture.templates import ATTRIBUTES, EMITTED, identifier
from parcompiler.codegen.block import block_class
from parcompiler.codegen.body import Body
from parcompiler.codegen.forward import Forward
from parcompiler.codegen.heading import module_text
from parcompiler.codegen.layers import StageLayers
from parcompiler.codegen.layout import table, wrap
from parcompiler.codegen.literals import literal, string
from parcompiler.codegen.quoting import docstring, paragraph
from parcompiler.codegen.tensors import constructor, names_table, tensor_line
from parcompiler.graph import Block, Parameter
from parcompiler.lower.lowered import Lowered, Stage
from parcompiler.report.names import ranges


class StageWriter:
    """Writes the file of one stage."""

    def __init__(self, lowered: Lowered, stage: Stage, device: str) -> None:
        self.lowered = lowered
        self.graph = lowered.graph
        self.stage = stage
        self.device = device
        self.effects = Effects(lowered.graph.fx_graph)
        self.layers = StageLayers(lowered, stage)

    def text(self) -> str:
        """The whole file."""
        body = "\n\n\n".join([*self._classes(), self._stage_class()])
        opening = f"{paragraph(self._title())}\n\n{paragraph(self._flow())}"
        nodes = [node for call in self.stage.calls for node in call.block.nodes]
        return module_text(opening, body, (*nodes, *self.stage.prologue), self.device)

    def _title(self) -> str:
        """What this stage is."""
        count = len(self.lowered.stages)
        names = dict.fromkeys(call.block.name.partition("@")[0] for call in self.stage.calls)
        blocks = ranges([docstring(name) for name in names])
        return f"Stage {self.stage.index} of {count} of {docstring(self.graph.name)}: {blocks}."

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
        split = self.stage.index in self.lowered.split
        for blocks in by_template.values():
            variables = self.lowered.variables
            yield block_class(self.graph, self.effects, blocks, variables, split=split)

    def _stage_class(self) -> str:
        """The class that calls the layers."""
        arguments = [*self.stage.inputs, *self.stage.receives]
        own = self._own_tensors()
        tensors = [tensor_line(attribute, item) for attribute, item in own.items()]
        results = len(self.stage.gives) + bool(self.stage.loss)
        kind = "Tensor" if results == 1 else "tuple[Tensor, ...]"
        parameters = "".join(f", {name}: Tensor" for name in arguments)
        lines = [
            f"class Stage{self.stage.index}(runtime.Stage):",
            f'    """{paragraph(self._title(), 4)}"""',
            "",
            *self._declarations(),
            *names_table({attribute: item.name for attribute, item in own.items()}),
            *constructor([*tensors, *self.layers.made(), *self.layers.ties()]),
            wrap(f"def forward(self{parameters}) -> {kind}:", 4),
            *self._prologue(own),
            *self._forward(arguments).lines(),
        ]
        return "\n".join(lines)

    def _forward(self, arguments: Sequence[str]) -> Forward:
        """The calls of the layers."""
        kept = [self.lowered.variables[node] for node in self.stage.prologue]
        taken = {*arguments, *kept, *EMITTED}
        variables = self.layers.variables(taken)
        return Forward(self.stage, self.layers.loops, taken, self.layers.paths, variables)

    def _declarations(self) -> Iterator[str]:
        """The class attributes that the runtime reads."""
        for name in ("inputs", "receives", "gives"):
            value = getattr(self.stage, name)
            if value:
                yield wrap(f"{name} = {literal(tuple(value))}", 4)
        if self.stage.loss:
            yield "    loss = True"
        if any(is_random(node) for call in self.stage.calls for node in call.block.nodes):
            yield "    random = True"
        rows = [(string(path), string(scope)) for path, scope in self.layers.scopes()]
        yield from [*table("scopes = {", rows, "}", 4), ""] if rows else [""]

    def _own_tensors(self) -> dict[str, Parameter]:
        """Tensors that no layer holds: those of the prologue, and those that nothing reads."""
        held = {b.name for call in self.stage.calls for b in call.block.tensors}
        read = {n.name for node in self.stage.prologue for n in node.all_input_nodes}
        taken = {*ATTRIBUTES, *self.layers.attributes}
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
        operands = self._operands(own)
        used = {name for call in self.stage.calls for name in call.arguments}
        kept = {n: name for n, name in self._prologue_names().items() if name in used}
        fixed = {*self.stage.inputs, *self.stage.receives}
        body = Body(self.graph, self.effects, operands, fixed)
        lines = body.lines(self.stage.prologue, kept)
        title = "        # Computed here, not received: no parameters, no gradient."
        rest = [line for line in lines if line and not line.strip().startswith("#")]
        return [title, *rest, ""]

    def _prologue_names(self) -> dict[fx.Node, str]:
        """The names of the prologue's values."""
        return {node: self.lowered.variables[node] for node in self.stage.prologue}

    def _operands(self, own: dict[str, Parameter]) -> dict[fx.Node, str]:
        """What the prologue reads: buffers of the stage and tensors of the batch."""
        attributes = {item.node: f"self.{attribute}" for attribute, item in own.items()}
        placeholders = [n for n in self.graph.fx_graph.nodes if n.op == "placeholder"]
        found = {n: attributes.get(n.name) or self.lowered.variables.get(n) for n in placeholders}
        return {node: text for node, text in found.items() if text is not None}
