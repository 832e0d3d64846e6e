"""Rules on what ranks do together: sum gradients, and share the loss.

The ranks of a group meet in the order in which their collectives stand; two that are swapped on one
rank would add the gradients of different tensors. A bucket is summed by one rank here, together
with its data replicas, which have the same list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from parcompiler.instruction import Kind
from parcompiler.lower.lowered import Bucket, Tied
from parcompiler.verifier.fault import Fault
from parcompiler.verifier.steps import Step
from parcompiler.verifier.tensors import ranks

REDUCED = "every copy of a parameter is reduced"
ORDERED = "collectives keep their order"
SHARED = "every rank gets the loss"


def faults(step: Step) -> Iterator[Fault]:
    """All faults of the collectives of a step."""
    if step.training:
        sums = {item.label: item for item in step.wiring.lowered.sums}
        for item in sums.values():
            yield from _missing(step, item)
        for rank in range(len(step.lists)):
            yield from _wrong(step, rank, sums)
        for group in dict.fromkeys(item.ranks for item in sums.values()):
            yield from _order(step, group)
    yield from _shares(step)


def _missing(step: Step, item: Tied | Bucket) -> Iterator[Fault]:
    """Every rank that holds a tied tensor, or the tensors of a bucket, takes part in the sum."""
    for rank in item.ranks:
        if 0 <= rank < len(step.lists) and item.label not in step.reductions[rank]:
            yield Fault(REDUCED, f"rank {rank} never sums {item.label} ({_named(item)})")


def _named(item: Tied | Bucket) -> str:
    """The tensors of a sum."""
    first, *others = item.names or ("nothing",)
    return f"{first} and {len(others)} more" if others else first


def _wrong(step: Step, rank: int, sums: Mapping[str, Tied | Bucket]) -> Iterator[Fault]:
    """A rank takes part in sums that exist, with the ranks that belong to them."""
    for label, position in step.reductions[rank].items():
        line, item = step.at(rank, position), sums.get(label)
        if item is None:
            yield Fault(REDUCED, f"rank {rank}: {line}: no tensor has this label")
        elif line.ranks != item.ranks:
            yield Fault(REDUCED, f"rank {rank}: {line}: {_named(item)} is on {ranks(item.ranks)}")


def _order(step: Step, group: tuple[int, ...]) -> Iterator[Fault]:
    """The ranks of a group sum the same tensors one after the other."""
    there = [rank for rank in group if 0 <= rank < len(step.lists)]
    orders = {rank: _labels(step, rank, group) for rank in there}
    common = set.intersection(*(set(labels) for labels in orders.values())) if orders else set()
    kept = {rank: [x for x in labels if x in common] for rank, labels in orders.items()}
    for rank in there[1:]:
        if kept[rank] != kept[there[0]]:
            first, other = ", ".join(kept[there[0]]), ", ".join(kept[rank])
            yield Fault(ORDERED, f"rank {there[0]} sums {first}, and rank {rank} sums {other}")


def _labels(step: Step, rank: int, group: tuple[int, ...]) -> list[str]:
    """The sums of a rank with a group, in the order in which they stand."""
    places = sorted((place, label) for label, place in step.reductions[rank].items())
    return [label for place, label in places if step.at(rank, place).ranks == group]


def _shares(step: Step) -> Iterator[Fault]:
    """Every rank is given the loss, by the rank that has it."""
    wiring = step.wiring
    home = next((stage.rank for stage in wiring.stages if stage.loss is not None), None)
    if wiring.head is not None:  # every rank knows it then; that of the stage before it gives it
        home = wiring.rank_of(wiring.head.stage)
    for rank, position in enumerate(step.shares):
        if position is None:
            yield Fault(SHARED, f"rank {rank} has no {Kind.SHARE_LOSS}")
            continue
        line = step.at(rank, position)
        if line.peer != home:
            yield Fault(SHARED, f"rank {rank}: {line}: the loss is on rank {home}")
