"""The layers of a stage as attributes of its module: single ones, and lists of those that repeat.

self.wte_wpe = WteWpe()
self.h = nn.ModuleList(GPT2Block() for _ in range(2))
self.lm_head.weight = self.wte_wpe.weight  # tied
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from parcompiler.capture.templates import ATTRIBUTES, identifier, unique
from parcompiler.codegen.attributes import BlockAttributes
from parcompiler.codegen.layout import wrap
from parcompiler.codegen.loops import loops
from parcompiler.graph import Block
from parcompiler.lower.lowered import Call, Lowered, StageProgram
from parcompiler.lower.names import short_names


class StageLayers:
    """The attributes of a stage's layers; `paths` has the expression for each block: `h[0]`."""

    def __init__(self, lowered: Lowered, stage: StageProgram) -> None:
        self.short = short_names(call.block.name for s in lowered.stages for call in s.calls)
        self.blocks = {call.block.name: call.block for call in stage.calls}
        self.instances = _instances(stage.calls)
        self.loops = tuple(loops(stage, self.instances))
        self.graph = lowered.graph
        self.attributes: dict[str, list[str]] = {}  # the blocks of each, first uses only
        self.paths: dict[str, str] = {}
        for loop in self.loops:
            for members, fresh in zip(zip(*loop.rounds, strict=True), loop.fresh, strict=True):
                self._add(members, listed=fresh and len(members) > 1)

    def variables(self, taken: Collection[str]) -> dict[str, str]:
        """The loop variable of each list: `layer`, or the name of the piece of a layer."""
        variables: dict[str, str] = {}
        for loop in self.loops:
            names = dict.fromkeys(self.paths[call.block.name] for call in loop.rounds[0])
            lists = [path.rpartition("[")[0] for path in names if path.endswith("]")]
            used = set(taken)
            for path in lists if len(loop.rounds) > 1 else []:
                last = self.attributes[path][0].partition("@")[0].rpartition(".")[2]
                variables[path] = unique("layer" if len(lists) == 1 else identifier(last), used)
        return variables

    def made(self) -> Iterator[str]:
        """The lines that make the layers."""
        for attribute, names in self.attributes.items():
            kind = f"{self.blocks[names[0]].template}()"
            if self.paths[names[0]].endswith("]"):
                kind = f"nn.ModuleList({kind} for _ in range({len(names)}))"
            yield wrap(f"self.{attribute} = {kind}", 8)

    def ties(self) -> Iterator[str]:
        """The lines that tie tensors of layers."""
        first: dict[str, str] = {}
        by_template: dict[str, tuple[str, ...]] = {}
        for name, block in self._distinct():
            if block.template not in by_template:
                by_template[block.template] = BlockAttributes(self.graph, block).places
            places = by_template[block.template]
            for binding, inner in zip(block.tensors, places, strict=True):
                place = f"{self.paths[name]}.{inner}"
                known = first.setdefault(binding.name, place)
                if known != place:
                    line = wrap(f"self.{place} = self.{known}", 8)
                    yield line if "\n" in line or len(line) > 92 else f"{line}  # tied"

    def scopes(self) -> Iterator[tuple[str, str]]:
        """The path of each layer in this module and in the user's model."""
        for name, block in self._distinct():
            if block.tensors:
                yield self.paths[name].replace("[", ".").rstrip("]"), block.scope

    def _distinct(self) -> Iterator[tuple[str, Block]]:
        """Each layer once."""
        for names in self.attributes.values():
            yield from ((name, self.blocks[name]) for name in names)

    def _add(self, members: tuple[Call, ...], *, listed: bool) -> None:
        """Make an attribute for the layers at one position of a loop, unless they have one."""
        names = [call.block.name for call in members]
        first = self.instances[names[0]]
        if first in self.paths:
            self.paths |= dict.fromkeys(names, self.paths[first])
            return
        attribute = self._attribute(names[0], listed=listed)
        self.attributes[attribute] = names if listed else names[:1]
        for index, name in enumerate(names):
            self.paths[name] = f"{attribute}[{index}]" if listed else attribute

    def _attribute(self, name: str, *, listed: bool) -> str:
        """The attribute of a layer, or of a list of layers: without the number."""
        wish = self.short[name]
        if listed:
            words = [word for word in wish.split("_") if not word.isdigit()]
            wish = "_".join(words) or "layers"
        return unique(identifier(wish), {*self.attributes, *ATTRIBUTES})


def _instances(calls: tuple[Call, ...]) -> dict[str, str]:
    """By block, the first block of the stage with an equal layer and the same tensors."""
    first: dict[tuple[object, ...], str] = {}
    return {
        call.block.name: first.setdefault(
            (call.block.template, tuple(b.name for b in call.block.tensors)), call.block.name
        )
        for call in calls
    }
