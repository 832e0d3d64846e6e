"""The module of one stage: its layers as classes, and a forward that calls them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import fx

from parcompiler.capture.blocks import steps
from parcompiler.capture.deferrable import deferrable_weight, overlapping
from parcompiler.capture.effects import effects_of, is_random
from parcompiler.capture.prologue import constants
from parcompiler.capture.templates import ATTRIBUTES, EMITTED, identifier, unique
from parcompiler.codegen.attributes import (
    BlockAttributes,
    constructor,
    names_table,
    tensor_line,
)
from parcompiler.codegen.body import Body
from parcompiler.codegen.forward import Forward
from parcompiler.codegen.heading import module_text
from parcompiler.codegen.layers import StageLayers
from parcompiler.codegen.layout import table, wrap
from parcompiler.codegen.literals import literal, string
from parcompiler.codegen.quoting import docstring, paragraph
from parcompiler.graph import Block, Parameter
from parcompiler.lower.lowered import Lowered, StageProgram
from parcompiler.naming.source import Frame, frames
from parcompiler.naming.variables import argument_names
from parcompiler.report.names import ranges

BESIDE = "are computed beside the next collective"  # text for a whole backward


class StageWriter:
    """Writes the file of one stage."""

    def __init__(self, lowered: Lowered, stage: StageProgram, device: str) -> None:
        self.lowered = lowered
        self.graph = lowered.graph
        self.stage = stage
        self.device = device
        self.effects = effects_of(lowered.graph)
        self.layers = StageLayers(lowered, stage)
        # The values that layers read, and the prologue: constants, and the rest for each
        # micro-batch.
        self._arguments = {name for call in stage.calls for name in call.arguments}
        fixed = constants(self.graph)
        self._fixed = [node for node in stage.prologue if node in fixed]
        self._rest = [node for node in stage.prologue if node not in fixed]
        # The constants that layers or the rest of the prologue read, with their names.
        read = {operand for node in self._rest for operand in node.all_input_nodes}
        named = {node: lowered.variables[node] for node in self._fixed}
        self._once = {n: x for n, x in named.items() if n in read or x in self._arguments}
        # The nodes that run again, of the first block of each template.
        self._again = {call.block.template: call.again for call in reversed(stage.calls)}

    def text(self) -> str:
        """The whole file."""
        body = "\n\n\n".join([*self._classes(), self._stage_class()])
        opening = f"{paragraph(self._title())}\n\n{paragraph(self._flow())}"
        nodes = [node for call in self.stage.calls for node in call.block.nodes]
        return module_text(opening, body, (*nodes, *self.stage.prologue), self.device)

    def _title(self) -> str:
        """The title of the module."""
        count = len(self.lowered.stages)
        names = dict.fromkeys(call.block.name.partition("@")[0] for call in self.stage.calls)
        blocks = ranges([docstring(name) for name in names])
        return f"Stage {self.stage.index} of {count} of {docstring(self.graph.name)}: {blocks}."

    def _flow(self) -> str:
        """Inputs and outputs of the stage."""
        came = [*self.stage.inputs, *self.stage.receives]
        gone = [*self.stage.gives, *(["the loss"] if self.stage.loss else [])]
        gone += [f"{name} (kept)" for name in self.stage.keeps]
        return f"{', '.join(came) or 'nothing'} → {', '.join(gone) or 'nothing'}"

    def _classes(self) -> Iterator[str]:
        """A class for each distinct layer."""
        by_template: dict[str, list[Block]] = {}
        for call in self.stage.calls:
            by_template.setdefault(call.block.template, []).append(call.block)
        when = "wait for BACKWARD_WEIGHT" if self.stage.index in self.lowered.split else BESIDE
        for blocks in by_template.values():
            yield self._class(blocks, when)

    def _class(self, instances: Sequence[Block], when: str) -> str:
        """The class of a template, from the blocks that are its instances; `when` says when weight
        gradients that are left for later are computed."""
        graph, block = self.graph, instances[0]
        deferring, again = self._deferring(instances), self._again[block.template]
        inputs = [item.inputs for item in instances]
        arguments = argument_names(graph, inputs, self.lowered.variables)
        tensors = {graph.by_name[b.name].node: f"self.{b.attribute}" for b in block.tensors}
        operands = {graph.placeholders[name]: text for name, text in tensors.items()} | arguments
        attributes = BlockAttributes(graph, block, deferring, again)
        body = Body(graph, self.effects, operands, scope=block.scope, attributes=attributes)
        lines = body.lines(block.nodes, dict.fromkeys(block.outputs))
        title, made = _title(instances), attributes.constructor()
        text = "\n".join([*made, *lines])
        if deferring:
            listed = (kind for kind in ("Linear", "linear", "addmm") if f"runtime.{kind}(" in text)
            kinds = ", ".join(f"`runtime.{kind}`" for kind in listed)
            title += f" The gradients of weights of {kinds} {when}."
        if again:
            title += " What `runtime.again` computes is not kept: it runs again in the backward."
        results = ", ".join(body.name(node) for node in block.outputs)
        kind = "Tensor" if len(block.outputs) == 1 else "tuple[Tensor, ...]"
        parameters = "".join(f", {name}: Tensor" for name in arguments.values())
        parts = [
            f"class {block.template}(runtime.Layer):",
            f'    """{paragraph(title, 4)}"""',
            "",
            *names_table(attributes.names),
            *constructor(made),
            wrap(f"def forward(self{parameters}) -> {kind}:", 4),
            *lines,
            wrap(f"return {results}" if results else "return ()", 8),
        ]
        return "\n".join(parts)

    def _deferring(self, instances: Sequence[Block]) -> set[fx.Node]:
        """The nodes of the first of some equal blocks that leave weight gradients for later; in a
        whole backward none whose weight any of the blocks shares."""
        block, graph = instances[0], self.graph
        tensors = [[graph.by_name[binding.name] for binding in x.tensors] for x in instances]
        trained = {item.node for item in tensors[0] if item.trainable}
        if self.stage.index in self.lowered.split:
            return {node for node in block.nodes if deferrable_weight(node, trained) is not None}
        beside = {} if self.lowered.asynchronous else overlapping(block.nodes, trained)
        readers = {node.name: len(node.users) for node in graph.fx_graph.nodes if beside}
        shared = {
            first.node
            for same in tensors
            for first, item in zip(tensors[0], same, strict=True)
            if beside and readers[item.node] > 1
        }
        return {node for node, weight in beside.items() if weight.name not in shared}

    def _stage_class(self) -> str:
        """The class that calls the layers."""
        arguments = [*self.stage.inputs, *self.stage.receives]
        kept = [self.lowered.variables[node] for node in self.stage.prologue]
        further = self._further_tensors()
        tensors = [tensor_line(attribute, item) for attribute, item in further.items()]
        results = len(self.stage.gives) + bool(self.stage.loss) + len(self.stage.keeps)
        kind = "Tensor" if results == 1 else "tuple[Tensor, ...]"
        parameters = "".join(f", {name}: Tensor" for name in arguments)
        lines = [
            f"class Stage{self.stage.index}(runtime.Stage):",
            f'    """{paragraph(self._title(), 4)}"""',
            "",
            *self._declarations(),
            *names_table({attribute: item.name for attribute, item in further.items()}),
            *constructor([*tensors, *self.layers.made(), *self.layers.ties()]),
            *self._constants(further),
            wrap(f"def forward(self{parameters}) -> {kind}:", 4),
            *self._prologue(further),
            *Forward(self.stage, self.layers, {*arguments, *kept, *EMITTED}).lines(),
        ]
        return "\n".join(lines)

    def _declarations(self) -> Iterator[str]:
        """The class attributes that the runtime reads."""
        for name in ("inputs", "receives", "gives", "keeps"):
            value = getattr(self.stage, name)
            if value:
                yield wrap(f"{name} = {literal(tuple(value))}", 4)
        if self.stage.loss:
            yield "    loss = True"
        if any(is_random(node) for call in self.stage.calls for node in call.block.nodes):
            yield "    random = True"
        if any(call.again for call in self.stage.calls):
            yield "    again = True"
        rows = [(string(path), string(scope)) for path, scope in self.layers.scopes()]
        yield from [*table("scopes = {", rows, "}", 4), ""] if rows else [""]

    def _further_tensors(self) -> dict[str, Parameter]:
        """Tensors outside of layers: those of the prologue, and unread ones."""
        of_layers = {b.name for call in self.stage.calls for b in call.block.tensors}
        read = {n.name for node in self.stage.prologue for n in node.all_input_nodes}
        taken = {*ATTRIBUTES, *self.layers.attributes}
        further = {}
        for name in self.stage.tensors:
            item = self.graph.by_name[name]
            if name not in of_layers or item.node in read:
                further[unique(identifier(name), taken)] = item
        return further

    def _constants(self, further: dict[str, Parameter]) -> list[str]:
        """The method `constants`, for nodes that depend on no input and no parameter."""
        if not self._once:
            return []
        return [
            "    def constants(self) -> tuple[Tensor, ...]:",
            "        # Computed once: no input, no parameter.",
            *self._lines(self._fixed, self._once, further),
            wrap(f"return {_tuple(self._once.values())}", 8),
            "",
        ]

    def _prologue(self, further: dict[str, Parameter]) -> list[str]:
        """The lines for values that exist before the layers run, and are not received."""
        lines = []
        if self._once:
            lines.append(wrap(f"{_tuple(self._once.values())} = self.once", 8))
        rest = {node: self.lowered.variables[node] for node in self._rest}
        if rest:
            kept = {node: name for node, name in rest.items() if name in self._arguments}
            lines.append("        # Computed here, not received: no parameters, no gradient.")
            lines += self._lines(self._rest, kept, further, self._once)
        return [*lines, ""] if lines else []

    def _lines(
        self,
        nodes: Sequence[fx.Node],
        kept: Mapping[fx.Node, str],
        further: Mapping[str, Parameter],
        known: Mapping[fx.Node, str] | None = None,
    ) -> list[str]:
        """The statements of nodes of the prologue, where the names of some are `known` already."""
        variables, known = self.lowered.variables, known or {}
        attributes = {item.node: f"self.{attribute}" for attribute, item in further.items()}
        operands = {
            node: attributes.get(node.name, variables.get(node, ""))
            for node in self.graph.fx_graph.nodes
            if node.op == "placeholder" and (node.name in attributes or node in variables)
        }
        taken = {*self.stage.inputs, *self.stage.receives, *known.values()}
        body = Body(self.graph, self.effects, {**operands, **known}, taken)
        lines = body.lines(nodes, kept)
        return [line for line in lines if line and not line.strip().startswith("#")]


def _tuple(names: Iterable[str]) -> str:
    """`cos, sin`, or `(cos,)`."""
    several = list(names)
    return ", ".join(several) if len(several) > 1 else f"({several[0]},)"


def _title(instances: Sequence[Block]) -> str:
    """The layers of the model that a class is for, and where they begin in the source."""
    listed = ranges([docstring(block.name) for block in instances])
    frame = _beginning(instances[0])
    if frame is None:
        return f"{listed}."
    file = frame.file.replace("\\", "/").rpartition("/")[2]
    return f"{listed}, from {file}:{frame.line}."


def _beginning(block: Block) -> Frame | None:
    """The first line of the layer's own forward; else the innermost line of the model."""
    for node in block.nodes:
        paths = [step.path for step in steps(node)]
        calls = [frame for frame in frames(node) if frame.function == "forward"]
        if block.scope in paths and len(calls) == len(paths) + 1:
            frame = calls[paths.index(block.scope) + 1]
            if not frame.is_torch:
                return frame
    of_model = (f for node in block.nodes for f in frames(node)[::-1] if not f.is_torch)
    return next(of_model, None)
