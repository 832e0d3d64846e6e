"""Placements that the user pins: `{"*.mlp.*": "S(0)"}`, patterns of names and placements.

`R` and `I` both mean whole; `S(0)` means in pieces along dimension 0, within segments or not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from parcompiler.errors import InfeasibleError, InputError
from parcompiler.graph import Graph, Parameter
from parcompiler.passes.shard.templates import TensorGroup
from parcompiler.spmd import Placement
from parcompiler.spmd.placement import parse


@dataclass(frozen=True, slots=True)
class Pins:
    """The placement that each pattern pins, and the names of the parameters that it matches."""

    matches: Mapping[str, frozenset[str]]
    placements: Mapping[str, Placement]

    def text(self, name: str) -> str:
        """The pin of a parameter; empty where there is none."""
        patterns = self.of(name)
        return str(self.placements[patterns[0]]) if patterns else ""

    def of(self, name: str) -> tuple[str, ...]:
        """The patterns that name a parameter."""
        return tuple(pattern for pattern, names in self.matches.items() if name in names)

    def allowed(self, tensor: TensorGroup, types: Sequence[Placement]) -> tuple[Placement, ...]:
        """The types that agree with all pins of a group of tensors.

        Raises InfeasibleError, naming the patterns, when none does.
        """
        patterns = sorted({p for item in tensor.items for p in self.of(item.name)})
        agreeing = tuple(
            t for t in types if all(agrees(t, self.placements[pattern]) for pattern in patterns)
        )
        if not agreeing:
            raise InfeasibleError(_refusal(tensor.items[0], patterns, self.placements, types))
        return agreeing

    def without(self, pattern: str) -> Pins:
        """The pins without this pattern."""
        matches = {name: names for name, names in self.matches.items() if name != pattern}
        return Pins(matches, {name: self.placements[name] for name in matches})

    def named(self) -> str:
        """One parameter of each kind that the pins name: that of the first layer."""
        first: dict[str, str] = {}
        for name in sorted({name for names in self.matches.values() for name in names}):
            first.setdefault(re.sub(r"\d+", "#", name), name)
        return ", ".join(first.values())

    def __str__(self) -> str:
        """As the user gave them."""
        return " and ".join(f"{name!r}: '{at}'" for name, at in self.placements.items())


def read(option: str | Mapping[str, str], graph: Graph) -> Pins:
    """The pins of an option. Raises InputError for a pattern that names no parameter."""
    if isinstance(option, str):
        return Pins({}, {})
    matches = {}
    for pattern in option:
        matches[pattern] = frozenset(
            item.name
            for item in graph.parameters
            if not item.buffer
            and any(fnmatchcase(name, pattern) for name in (item.name, *item.aliases))
        )
        if not matches[pattern]:
            known = ", ".join(item.name for item in graph.parameters if not item.buffer)
            message = (
                f"sharding pins {pattern!r}, which names no parameter (parameters: "
                f"{known[:300]}{'...' if len(known) > 300 else ''})"
            )
            raise InputError(message)
    return Pins(matches, {pattern: parse(text) for pattern, text in option.items()})


def agrees(placement: Placement, wanted: Placement) -> bool:
    """Whether a type is what a pin demands.

    >>> from parcompiler.spmd import I, R, S
    >>> agrees(I, R), agrees(S(0, (8, 4)), S(0)), agrees(S(0), S(1))
    (True, True, False)
    """
    if wanted.is_whole:
        return placement.is_whole
    pieces = placement.kind == "S" and placement.dim == wanted.dim
    return pieces and wanted.segments in ((), placement.segments)


def _refusal(
    item: Parameter,
    patterns: Sequence[str],
    placements: Mapping[str, Placement],
    types: Sequence[Placement],
) -> str:
    """The message for pins that no placement agrees with."""
    shape = " x ".join(map(str, item.shape))
    alone = [p for p in patterns if not any(agrees(t, placements[p]) for t in types)]
    demands = " and ".join(f"{pattern!r}: '{placements[pattern]}'" for pattern in alone or patterns)
    if not alone:
        return (
            f"sharding pins {demands}, which exclude each other for {item.name} ({shape}): "
            "let one pattern name it"
        )
    plain = ("R" if placement.is_whole else f"S({placement.dim})" for placement in types)
    possible = ", ".join(dict.fromkeys(plain))
    return (
        f"sharding pins {demands}, but {item.name} ({shape}) can only be {possible}: "
        "change the pins that name it"
    )
