"""Random mistakes in what all ranks do for the vocabulary, in lines and in the table of layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from parcompiler.instruction import EMBEDDING, HEAD, TRANSFERS, Instruction, Kind
from parcompiler.lower import Lowered
from tests.verifier.edits import with_lists
from tests.verifier.mistake import Chance, Lines, Mistake, Mutant, edited, where
from tests.verifier.words import METHODS

COLLECTIVES = TRANSFERS | {Kind.EXCHANGE}
PARTS = EMBEDDING | HEAD | COLLECTIVES


def _picked(chance: Chance, lines: Sequence[Instruction], kinds: Collection[Kind]) -> int | None:
    places = where(list(lines), kinds)
    return chance.choice(places) if places else None


def _dropped(kinds: Collection[Kind]) -> Mistake:
    def mutant(chance: Chance, lowered: Lowered) -> Mutant:
        def edit(lines: Lines) -> bool:
            k = _picked(chance, lines, kinds)
            if k is not None:
                del lines[k]
            return k is not None

        return edited(chance, lowered, edit)

    mutant.__name__ = f"drop_{'_or_'.join(sorted(kind.lower() for kind in kinds))}"
    return mutant


def drop_a_part_everywhere(chance: Chance, lowered: Lowered) -> Mutant:
    k = _picked(chance, lowered.instructions[0], PARTS)
    if k is None:
        return None
    gone = lowered.instructions[0][k]
    return with_lists(lowered, [[x for x in lines if x != gone] for lines in lowered.instructions])


def _shifted(kinds: Collection[Kind], far: int) -> Mistake:
    def mutant(chance: Chance, lowered: Lowered) -> Mutant:
        def edit(lines: Lines) -> bool:
            k = _picked(chance, lines, kinds)
            if k is None:
                return False
            line = lines.pop(k)
            by = chance.randint(1, abs(far)) * (-1 if far < 0 else 1)
            lines.insert(max(0, k + by), line)
            return True

        return edited(chance, lowered, edit)

    names = "_or_".join(sorted(kind.lower() for kind in kinds))
    mutant.__name__ = f"{names}_too_{'early' if far < 0 else 'late'}"
    return mutant


def swap_two_collectives(chance: Chance, lowered: Lowered) -> Mutant:
    def edit(lines: Lines) -> bool:
        return _exchange(chance, lines, where(lines, COLLECTIVES))

    return edited(chance, lowered, edit)


def swap_two_parts(chance: Chance, lowered: Lowered) -> Mutant:
    def edit(lines: Lines) -> bool:
        return _exchange(chance, lines, where(lines, EMBEDDING | HEAD))

    return edited(chance, lowered, edit)


def _exchange(chance: Chance, lines: Lines, places: Sequence[int]) -> bool:
    if len(places) < 2:
        return False
    k = chance.randrange(1, len(places))
    a, b = (places[k - 1], places[k]) if chance.random() < 0.7 else chance.sample(places, 2)
    lines[a], lines[b] = lines[b], lines[a]
    return True


def swap_two_parts_everywhere(chance: Chance, lowered: Lowered) -> Mutant:
    """On all ranks two lines change places: they still agree."""
    places = where(list(lowered.instructions[0]), PARTS)
    if len(places) < 2:
        return None
    k = chance.randrange(len(places))
    near = places[max(0, k - 4) : k] + places[k + 1 : k + 5]
    first, second = (lowered.instructions[0][p] for p in (places[k], chance.choice(near)))
    lists = [list(lines) for lines in lowered.instructions]
    for lines in lists:
        a, b = lines.index(first), lines.index(second)
        lines[a], lines[b] = lines[b], lines[a]
    return with_lists(lowered, lists)


def move_a_part_everywhere(chance: Chance, lowered: Lowered) -> Mutant:
    """On all ranks a line stands elsewhere, before or behind the same other one."""
    own = lowered.instructions[0]
    places = where(list(own), PARTS)
    if len(places) < 2:
        return None
    first, second = (own[k] for k in chance.sample(places, 2))
    behind = chance.random() < 0.5
    lists = [list(lines) for lines in lowered.instructions]
    for lines in lists:
        lines.remove(first)
        lines.insert(lines.index(second) + behind, first)
    return with_lists(lowered, lists)


def _rewritten(
    name: str,
    kinds: Collection[Kind],
    change: Callable[[Chance, Lowered, Instruction], dict[str, Any]],
) -> Mistake:
    """The mistake that a line says something else, on one rank or on all of them."""

    def mutant(chance: Chance, lowered: Lowered) -> Mutant:
        evaluation = chance.random() < 0.25
        lists = [list(x) for x in (lowered.evaluation if evaluation else lowered.instructions)]
        rank = chance.randrange(len(lists))
        k = _picked(chance, lists[rank], kinds)
        if k is None:
            return None
        before = lists[rank][k]
        after = replace(before, **change(chance, lowered, before))
        for r in range(len(lists)) if chance.random() < 0.5 else [rank]:
            if before in lists[r]:
                lists[r][lists[r].index(before)] = after
        return None if after == before else with_lists(lowered, lists, evaluation=evaluation)

    mutant.__name__ = name
    return mutant


def _another_kind(chance: Chance, _: Lowered, line: Instruction) -> dict[str, Any]:
    alike = next(kinds for kinds in (HEAD, EMBEDDING, TRANSFERS) if line.kind in kinds)
    return {"kind": chance.choice(sorted(alike))}


def _another_value(chance: Chance, lowered: Lowered, line: Instruction) -> dict[str, Any]:
    names = ["nothing", *lowered.values]
    if line.kind is Kind.EXCHANGE:
        names = ["maximum", "sum", "statistics"]
    return {"value": chance.choice(names)}


def parts_without_vocabulary(chance: Chance, lowered: Lowered) -> Mutant:
    return replace(lowered, vocabulary=None)


def _of_table(name: str, change: Callable[[Chance, Lowered], dict[str, Any]]) -> Mistake:
    """The mistake that the table of layers says something else."""

    def mutant(chance: Chance, lowered: Lowered) -> Mutant:
        assert lowered.vocabulary is not None
        other = replace(lowered.vocabulary, **change(chance, lowered))
        return None if other == lowered.vocabulary else replace(lowered, vocabulary=other)

    mutant.__name__ = name
    return mutant


def _of_layer(name: str, field: str, others: Callable[[Lowered], Sequence[Any]]) -> Mistake:
    """The mistake that a lookup or the head has something else in a field."""

    def change(chance: Chance, lowered: Lowered) -> dict[str, Any]:
        spread = lowered.vocabulary
        assert spread is not None and spread.head is not None
        changes = {field: chance.choice(others(lowered))}
        if chance.random() < 0.5:
            return {"head": replace(spread.head, **changes)}
        first, *rest = spread.lookups
        return {"lookups": (replace(first, **changes), *rest)}

    return _of_table(name, change)


def _tensors(chance: Chance, lowered: Lowered) -> dict[str, Any]:
    assert lowered.vocabulary is not None
    known, graph = lowered.vocabulary.tensors, lowered.graph
    others = [*known, *chance.sample(sorted(graph.by_name), 2)]
    names = chance.sample(others, chance.randrange(len(others)))
    return {"tensors": {name: known.get(name, graph.by_name[name].shape[0]) for name in names}}


def _layers(chance: Chance, lowered: Lowered) -> dict[str, Any]:
    assert lowered.vocabulary is not None
    lookups = lowered.vocabulary.lookups
    changes: list[dict[str, Any]] = [{"head": None}, {"lookups": ()}, {"lookups": lookups * 2}]
    return chance.choice(changes)


ORDERS: tuple[Mistake, ...] = (
    swap_two_collectives,
    swap_two_parts,
    swap_two_parts_everywhere,
    move_a_part_everywhere,
    _shifted({Kind.EMBED, Kind.S, Kind.NORMALIZE}, -8),
    _shifted({Kind.EMBED, Kind.S, Kind.NORMALIZE}, 8),
    _shifted({Kind.T, Kind.EMBED_BACKWARD}, -8),
    _shifted({Kind.T, Kind.EMBED_BACKWARD}, 8),
    _shifted(COLLECTIVES, -5),
    _shifted(COLLECTIVES, 5),
)
WRONG_PARTS: tuple[Mistake, ...] = (
    *(_dropped({kind}) for kind in sorted(PARTS)),
    drop_a_part_everywhere,
    parts_without_vocabulary,
    _rewritten("wrong_kind_of_a_part", HEAD | EMBEDDING | TRANSFERS, _another_kind),
    _rewritten("wrong_value_of_a_part", EMBEDDING | COLLECTIVES, _another_value),
    _rewritten(
        "wrong_gradient_of_a_part", TRANSFERS, lambda _, __, x: {"gradient": not x.gradient}
    ),
    _rewritten(
        "wrong_peer_of_a_part", TRANSFERS, lambda c, x, _: {"peer": c.randrange(-1, x.size + 1)}
    ),
    _rewritten(
        "wrong_microbatch_of_a_part",
        PARTS,
        lambda c, x, _: {"microbatch": c.randrange(-1, x.microbatches + 1)},
    ),
    _of_table("wrong_method", lambda c, _: {"method": c.choice([*METHODS, "whole"])}),
    _of_table("wrong_tensors", _tensors),
    _of_table("wrong_layers", _layers),
    _of_layer("wrong_stage_of_a_layer", "stage", lambda x: range(-2, len(x.stages) + 1)),
    _of_layer("wrong_value_of_a_layer", "value", lambda x: [*x.values, "nothing"]),
    _of_layer("wrong_inputs_of_a_layer", "inputs", lambda _: [(), ("tokens", "labels"), ("x",)]),
)
