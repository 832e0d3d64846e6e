"""Random mistakes in stages and in the tables beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from parcompiler.lower import Lowered
from tests.verifier.edits import with_lists, with_stage, with_value
from tests.verifier.mistake import Chance, Mistake, Mutant


def _stage(chance: Chance, lowered: Lowered) -> int:
    return chance.randrange(len(lowered.stages))


def _picked(chance: Chance, items: Sequence[Any]) -> int | None:
    return chance.randrange(len(items)) if items else None


def _without(items: Sequence[Any], k: int) -> tuple[Any, ...]:
    return (*items[:k], *items[k + 1 :])


def _thinned(field: str) -> Mistake:
    """The mistake that something is missing in a field of a stage."""

    def mutant(chance: Chance, lowered: Lowered) -> Mutant:
        j = _stage(chance, lowered)
        items = getattr(lowered.stages[j], field)
        k = _picked(chance, items)
        return None if k is None else with_stage(lowered, j, **{field: _without(items, k)})

    mutant.__name__ = f"drop_one_of_{field}"
    return mutant


def _grown(field: str) -> Mistake:
    """The mistake that something of another stage is in a field of a stage too."""

    def mutant(chance: Chance, lowered: Lowered) -> Mutant:
        j = _stage(chance, lowered)
        own = getattr(lowered.stages[j], field)
        others = [x for stage in lowered.stages for x in getattr(stage, field) if x not in own]
        k = _picked(chance, others)
        if k is None:
            return None
        at = chance.randrange(len(own) + 1)
        return with_stage(lowered, j, **{field: (*own[:at], others[k], *own[at:])})

    mutant.__name__ = f"add_one_of_{field}"
    return mutant


def swap_two_calls(chance: Chance, lowered: Lowered) -> Mutant:
    j = _stage(chance, lowered)
    calls = list(lowered.stages[j].calls)
    if len(calls) < 2:
        return None
    a, b = chance.sample(range(len(calls)), 2)
    calls[a], calls[b] = calls[b], calls[a]
    return with_stage(lowered, j, calls=tuple(calls))


def move_a_call(chance: Chance, lowered: Lowered) -> Mutant:
    if len(lowered.stages) < 2:
        return None
    j, other = chance.sample(range(len(lowered.stages)), 2)
    calls, theirs = lowered.stages[j].calls, lowered.stages[other].calls
    k = chance.randrange(len(calls))
    smaller = with_stage(lowered, j, calls=_without(calls, k))
    more = (*theirs, calls[k]) if chance.random() < 0.5 else (calls[k], *theirs)
    return with_stage(smaller, other, calls=more)


def recompute_a_call(chance: Chance, lowered: Lowered) -> Mutant:
    j = _stage(chance, lowered)
    calls = list(lowered.stages[j].calls)
    k = chance.randrange(len(calls))
    calls[k] = replace(calls[k], recompute=not calls[k].recompute)
    return with_stage(lowered, j, calls=tuple(calls))


def _renamed(field: str) -> Mistake:
    """The mistake that a call reads or returns something under the name of another."""

    def mutant(chance: Chance, lowered: Lowered) -> Mutant:
        j = _stage(chance, lowered)
        calls = list(lowered.stages[j].calls)
        c = chance.randrange(len(calls))
        names = list(getattr(calls[c], field))
        k = _picked(chance, names)
        if k is None:
            return None
        other = chance.choice(["nothing", *lowered.variables.values()])
        if other == names[k]:
            return None
        names[k] = other
        changes: dict[str, Any] = {field: tuple(names)}
        calls[c] = replace(calls[c], **changes)
        return with_stage(lowered, j, calls=tuple(calls))

    mutant.__name__ = f"rename_one_of_{field}"
    return mutant


def exchange_two_ranks(chance: Chance, lowered: Lowered) -> Mutant:
    if len(lowered.stages) < 2:
        return None
    a, b = chance.sample(range(len(lowered.stages)), 2)
    swapped = with_stage(lowered, a, rank=lowered.stages[b].rank)
    return with_stage(swapped, b, rank=lowered.stages[a].rank)


def wrong_rank(chance: Chance, lowered: Lowered) -> Mutant:
    j, rank = _stage(chance, lowered), chance.randrange(-1, lowered.size + 1)
    return None if rank == lowered.stages[j].rank else with_stage(lowered, j, rank=rank)


def move_a_stage(chance: Chance, lowered: Lowered) -> Mutant:
    """A stage and all that it computes are on another rank; the messages stay."""
    j, rank = _stage(chance, lowered), chance.randrange(lowered.size)
    home = lowered.stages[j].rank
    if rank == home:
        return None
    lists = [list(lines) for lines in lowered.instructions]
    own = [line for line in lists[home] if line.stage == j]
    lists[home] = [line for line in lists[home] if line.stage != j]
    at = chance.randrange(len(lists[rank]))
    lists[rank][at:at] = own
    return with_lists(with_stage(lowered, j, rank=rank), lists)


def loss_on_another_stage(chance: Chance, lowered: Lowered) -> Mutant:
    j = _stage(chance, lowered)
    loss = chance.choice([None, "nothing", *lowered.variables.values()])
    return None if loss == lowered.stages[j].loss else with_stage(lowered, j, loss=loss)


def _misdescribed(field: str, others: Sequence[Any]) -> Mistake:
    """The mistake that a value is not as the table says."""

    def mutant(chance: Chance, lowered: Lowered) -> Mutant:
        if not lowered.values:
            return None
        name, other = chance.choice(list(lowered.values)), chance.choice(others)
        if getattr(lowered.values[name], field) == other:
            return None
        return with_value(lowered, name, **{field: other})

    mutant.__name__ = f"wrong_{field}_of_a_value"
    return mutant


def drop_a_value(chance: Chance, lowered: Lowered) -> Mutant:
    if not lowered.values:
        return None
    gone = chance.choice(list(lowered.values))
    return replace(lowered, values={n: v for n, v in lowered.values.items() if n != gone})


def drop_a_tie(chance: Chance, lowered: Lowered) -> Mutant:
    k = _picked(chance, lowered.tied)
    return None if k is None else replace(lowered, tied=_without(lowered.tied, k))


def tie_other_ranks(chance: Chance, lowered: Lowered) -> Mutant:
    k = _picked(chance, lowered.tied)
    if k is None:
        return None
    tied = list(lowered.tied)
    ranks = tuple(r for r in range(lowered.size) if chance.random() < 0.6)
    if ranks == tied[k].ranks:
        return None
    tied[k] = replace(tied[k], ranks=ranks)
    return replace(lowered, tied=tuple(tied))


def forget_a_tie(chance: Chance, lowered: Lowered) -> Mutant:
    """Neither the table nor the lists know of a tensor that several ranks hold."""
    k = _picked(chance, lowered.tied)
    if k is None:
        return None
    label = lowered.tied[k].label
    lists = [[x for x in lines if x.value != label] for lines in lowered.instructions]
    return replace(with_lists(lowered, lists), tied=_without(lowered.tied, k))


def another_number_of_microbatches(chance: Chance, lowered: Lowered) -> Mutant:
    return replace(lowered, microbatches=lowered.microbatches + chance.choice((-1, 1)))


def exchange_two_names(chance: Chance, lowered: Lowered) -> Mutant:
    nodes = list(lowered.variables)
    if len(nodes) < 2:
        return None
    a, b = chance.sample(nodes, 2)
    names = {a: lowered.variables[b], b: lowered.variables[a]}
    return replace(lowered, variables={**lowered.variables, **names})


WRONG_STAGES: tuple[Mistake, ...] = (
    *map(_thinned, ("calls", "prologue", "inputs", "receives", "gives", "tensors")),
    *map(_grown, ("calls", "prologue", "inputs", "receives", "gives", "tensors")),
    swap_two_calls,
    move_a_call,
    recompute_a_call,
    _renamed("arguments"),
    _renamed("results"),
    exchange_two_ranks,
    wrong_rank,
    move_a_stage,
    loss_on_another_stage,
    _misdescribed("name", ["nothing"]),
    _misdescribed("shape", [(), (2,), (4, 2), (2, 4)]),
    _misdescribed("dtype", [torch.float64, torch.bfloat16, torch.int64]),
    _misdescribed("differentiable", [True, False]),
    _misdescribed("producer", [-1, 0, 1, 2]),
    _misdescribed("consumers", [(), (0,), (1,), (1, 2), (9,)]),
    drop_a_value,
    drop_a_tie,
    tie_other_ranks,
    forget_a_tie,
    another_number_of_microbatches,
    exchange_two_names,
)
