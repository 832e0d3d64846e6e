"""What another plan has tensor ranks hold otherwise, in words, template by template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from parcompiler.plan import Plan, Sharding, Shards

MOST = 6  # tensors of a template that are named; of more, their number is said


def sharding(_before: Plan, _after: Plan, first: Any, second: Any) -> Iterator[str]:
    """What is said of placements that differ."""
    one: Sharding | None = first
    other: Sharding | None = second
    if one is None or other is None:
        words = "tensors whole on every rank", "tensors in pieces on the tensor ranks"
        yield f"{words[one is not None]} -> {words[other is not None]}"
        return
    was, now = _named(one), _named(other)
    for name in [*was, *(name for name in now if name not in was)]:
        yield from _template(name, was.get(name), now.get(name))
    if one.level != other.level:
        yield f"decided for blocks of granularity {one.level} -> {other.level}"
    if one.templates == other.templates and one.level == other.level:
        yield "the same placements, with other predictions of their time or memory"
    elif was == now and one.level == other.level:
        yield "the same placements, listed in another order"


def _named(found: Sharding) -> dict[str, Shards]:
    """Templates by their names, with the blocks where only some are meant."""
    return {
        f"{item.template} ({', '.join(item.blocks)})" if item.blocks else item.template: item
        for item in found.templates
    }


def _template(name: str, one: Shards | None, other: Shards | None) -> Iterator[str]:
    """The tensors of a template that are held otherwise, and whether more than those changed."""
    if one is None or other is None:
        yield f"{name}: {'now among the templates' if one is None else 'no longer a template'}"
        return
    tensors = [*_other(one.tensors, other.tensors)]
    if tensors:
        more = f" and {len(tensors) - MOST} more" if len(tensors) > MOST else ""
        yield f"{name}: {', '.join(tensors[:MOST])}{more}"
    nodes = len([*_other(one.nodes, other.nodes)])
    if nodes:
        yield f"{name}: {nodes} of {len(other.nodes)} operations have other placements"
    if one.whole != other.whole:
        yield f"{name}: not split: {_listed(one.whole)} -> {_listed(other.whole)}"
    if one != other and not tensors and not nodes and one.whole == other.whole:
        yield f"{name}: the same placements, listed in another order"


def _other(one: Sequence[str], other: Sequence[str]) -> Iterator[str]:
    """Lines "name: placement" whose placement differs, as "name S(0) -> I"."""
    was, now = _placements(one), _placements(other)
    for name in [*was, *(name for name in now if name not in was)]:
        pair = was.get(name, "none"), now.get(name, "none")
        if pair[0] != pair[1]:
            yield f"{name} {pair[0]} -> {pair[1]}"


def _placements(lines: Sequence[str]) -> dict[str, str]:
    return {name: said.strip() for name, _, said in (line.partition(":") for line in lines)}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
