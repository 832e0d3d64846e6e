"""The blocks of a model with their costs: seconds and bytes of one micro-batch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import add
from typing import Any

from torch import fx

from parcompiler.capture.blocks import Cut
from parcompiler.capture.effects import is_repeatable
from parcompiler.cost import BlockCost
from parcompiler.device import Link
from parcompiler.graph import nbytes_of
from parcompiler.plan import TemplateTime


@dataclass(frozen=True)
class Priced:
    """The blocks at one granularity, with the costs of each for one micro-batch on the device.

    `forward` and `backward` are seconds by block. `weight` are the seconds of `backward` that a
    split backward can defer, `hidden` those that a split adds (see `TemplateTime`). Blocks in
    `recomputed` keep only their inputs, and their backward begins with their forward. Blocks in
    `copies` keep their activations in the host's memory; the seconds are those of the copy, beside
    compute. Where ranks have different devices, `ranks` are the blocks on the device of each, and
    the seconds here are the least of theirs.
    """

    cut: Cut
    costs: tuple[BlockCost, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    hidden: tuple[float, ...]
    sent: tuple[fx.Node, ...]
    recomputed: frozenset[str] = frozenset()
    copies: Mapping[str, float] = dataclasses.field(default_factory=dict)
    ranks: tuple[Priced, ...] = ()

    @staticmethod
    def timed(
        parts: Cut,
        costs: Iterable[BlockCost],
        sent: tuple[fx.Node, ...],
        times: Sequence[Mapping[str, TemplateTime]],
    ) -> Priced:
        """Blocks with the times of their templates: `times` has one entry, or one for each rank."""
        names, block_costs = [block.template for block in parts.blocks], tuple(costs)

        def made(took: Mapping[str, TemplateTime]) -> Priced:
            backward = tuple(took[name].backward for name in names)
            weight = map(min, (took[name].weight for name in names), backward)
            forward = tuple(took[name].forward for name in names)
            hidden = tuple(took[name].hidden for name in names)
            return Priced(parts, block_costs, forward, backward, tuple(weight), hidden, sent)

        if len(times) == 1:
            return made(times[0])
        return dataclasses.replace(made(_least(times)), ranks=tuple(map(made, times)))

    def on(self, rank: int) -> Priced:
        """The blocks on the device of a pipeline rank."""
        return self.ranks[rank] if self.ranks else self

    @cached_property
    def pace(self) -> float:
        """Upper bound on the aggregate speed of all ranks, in units of the fastest device; 0 where
        all devices are the same."""
        speeds = []
        for one in self.ranks:
            rows = zip(self.forward, self.backward, one.forward, one.backward, strict=True)
            speeds.append(max(((a + b) / (c + d) for a, b, c, d in rows if a + b), default=1.0))
        return math.fsum(speeds)

    def recomputing(self, names: Collection[str]) -> Priced:
        """The blocks, with those of these names recomputed."""
        assert not self.recomputed
        again = [block.name in names for block in self.cut.blocks]
        rows = zip(self.forward, self.backward, again, strict=True)
        return dataclasses.replace(
            self,
            backward=tuple(back + once if twice else back for once, back, twice in rows),
            recomputed=frozenset(names),
            ranks=tuple(one.recomputing(names) for one in self.ranks),
        )

    def offloading(self, names: Collection[str], host: Link, *, beside: bool) -> Priced:
        """The blocks, with the activations of those of these names copied over a link and back:
        `beside` compute (then the longer of both counts), or not."""
        pairs = zip(self.cut.blocks, self.costs, strict=True)
        sizes = {block.name: cost.saved + cost.saved_inputs for block, cost in pairs}
        copies = {name: host.seconds(sizes[name]) for name in sizes if name in names}
        least = [copies.get(block.name, 0.0) for block in self.cut.blocks]
        return dataclasses.replace(
            self,
            forward=tuple(map(max if beside else add, self.forward, least)),
            backward=tuple(map(max if beside else add, self.backward, least)),
            copies=copies if beside else dict.fromkeys(copies, 0.0),
            ranks=tuple(one.offloading(names, host, beside=beside) for one in self.ranks),
        )

    def mixed(self, other: Priced, names: Collection[str]) -> Priced:
        """The blocks, with those of these names taken from `other`."""
        places = [(other if b.name in names else self) for b in self.cut.blocks]

        def taken(name: str) -> Any:
            return tuple(getattr(one, name)[b] for b, one in enumerate(places))

        fields = "costs", "forward", "backward", "weight", "hidden"
        pairs = zip(self.ranks, other.ranks, strict=True)
        ranks = tuple(mine.mixed(its, names) for mine, its in pairs)
        return dataclasses.replace(self, ranks=ranks, **{name: taken(name) for name in fields})

    def gathering(self, exchanges: Sequence[tuple[float, float]]) -> Priced:
        """The blocks under ZeRO 3; `exchanges` are the seconds to gather each block's parameters
        and to reduce-scatter its gradients. Both overlap with compute: the longer one counts.
        Where a backward has two parts, the gather overlaps with the first, the sum with the second.
        """
        columns = self.forward, self.backward, self.weight, self.hidden, exchanges
        rows = [
            (
                max(forward, gather),
                whole := max(back, gather + scatter),
                last := min(max(weight, scatter), whole),
                max(back - weight + hidden, gather) - (whole - last),
            )
            for forward, back, weight, hidden, (gather, scatter) in zip(*columns, strict=True)
        ]
        forward, backward, weight, hidden = zip(*rows, strict=True)
        return dataclasses.replace(
            self,
            forward=forward,
            backward=backward,
            weight=weight,
            hidden=hidden,
            ranks=tuple(one.gathering(exchanges) for one in self.ranks),
        )

    @cached_property
    def repeatable(self) -> frozenset[str]:
        """Names of the blocks that can be recomputed (`is_repeatable`)."""
        first = {block.template: block for block in reversed(self.cut.blocks)}
        able = {template for template, block in first.items() if is_repeatable(block.nodes)}
        return frozenset(block.name for block in self.cut.blocks if block.template in able)

    @cached_property
    def home(self) -> dict[fx.Node, int]:
        """The number of the block that computes each node."""
        return {node: b for b, block in enumerate(self.cut.blocks) for node in block.nodes}

    @cached_property
    def saved(self) -> tuple[int, ...]:
        """Bytes that each block keeps for its backward. A value between blocks counts once, with
        the block that makes it."""
        kept: set[fx.Node] = set()
        inside = []
        for block, cost in zip(self.cut.blocks, self.costs, strict=True):
            if block.name in self.recomputed:
                kept.update(block.inputs)
                inside.append(0)
            elif block.name in self.copies:
                inside.append(0)
            else:
                kept.update(block.inputs[i] for i in cost.kept_inputs)
                kept.update(block.outputs[i] for i in cost.kept_outputs)
                inside.append(cost.saved - cost.saved_outputs)
        return tuple(
            inner + sum(nbytes_of(node) for node in block.outputs if node in kept)
            for block, inner in zip(self.cut.blocks, inside, strict=True)
        )

    @cached_property
    def moments(self) -> tuple[int, ...]:
        """Workspace peak of each block, in forward or backward: bytes besides those it saves."""
        return tuple(
            max(cost.unsaved_peak, cost.recompute_peak + cost.gradient_bytes, cost.backward_peak)
            if block.name in self.recomputed
            else (block.name in self.copies) * (cost.saved + cost.saved_inputs + self._largest_copy)
            + max(cost.saved, cost.forward_peak, cost.backward_peak, cost.input_peak)
            - cost.saved
            for block, cost in zip(self.cut.blocks, self.costs, strict=True)
        )

    @cached_property
    def _largest_copy(self) -> int:
        """Bytes of the largest copy, which may be on its way while another block computes."""
        pairs = zip(self.cut.blocks, self.costs, strict=True)
        sizes = (c.saved + c.saved_inputs for block, c in pairs if block.name in self.copies)
        return max(sizes, default=0)

    @cached_property
    def later(self) -> tuple[int, ...]:
        """Bytes by which the operands deferred by a split backward exceed what the block saves."""
        return tuple(
            max(0, cost.deferred - size) for cost, size in zip(self.costs, self.saved, strict=True)
        )


def _least(times: Sequence[Mapping[str, TemplateTime]]) -> dict[str, TemplateTime]:
    """The least time of each template on any device."""
    fastest = {}
    for name in times[0]:
        of_kinds = [took[name] for took in times]
        fields = ("forward", "backward", "weight", "hidden")
        fastest[name] = TemplateTime(name, *(min(getattr(t, x) for t in of_kinds) for x in fields))
    return fastest
