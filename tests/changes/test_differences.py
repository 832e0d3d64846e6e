"""Two plans compared in words: every decision that differs is said, and nothing else."""

import dataclasses
from typing import Any

import pytest

from parcompiler.changes import changes
from parcompiler.data_updates import DataUpdates
from parcompiler.plan import (
    MeshChoice,
    Method,
    Plan,
    Shape,
    Sharding,
    Shards,
    Solution,
    StageChoice,
    TemplateTime,
    VocabularyChoice,
    VocabularyTime,
    Weighed,
)


def stages(*counts: int, ranks: tuple[int, ...] | None = None) -> tuple[StageChoice, ...]:
    """Numbered blocks in stages of so many."""
    names = iter(f"h.{k}" for k in range(sum(counts)))
    return tuple(
        StageChoice(tuple(next(names) for _ in range(count)), j if ranks is None else ranks[j])
        for j, count in enumerate(counts)
    )


def template(**tensors: str) -> Shards:
    """A template whose tensors are held so."""
    lines = tuple(f"{name}: {held}" for name, held in tensors.items())
    return Shards("Layer", ("linear: R S(0) -> S(2)",), lines)


TIME = TemplateTime("Layer", 1.0, 2.0, 0.5)
PASSES = VocabularyTime("vocab-2", s=2.0, normalize=0.0, t=1.0, embed=0.5, embed_backward=0.5)
METHOD = Method("whole", "1f1b", 0.5)
PLAN = Plan(
    model="GPT",
    fingerprint="0f",
    mesh=Shape(pipeline=2, tensor=2),
    microbatches=8,
    schedule="1f1b",
    granularity=1,
    sent=("mask",),
    stages=stages(4, 4),
    recompute=("h.0",),
    solution=Solution("optimal", 1.0, 1.0, 0.0),
    weighed=(Weighed("1f1b", 1, 1.0),),
    sharding=Sharding(1, (template(up="S(0)", down="S(1)"),)),
    vocabulary=VocabularyChoice("whole", weighed=(METHOD,)),
)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": "Llama"}, ["model: GPT -> Llama"]),
        ({"fingerprint": "1f"}, ["fingerprint: another graph: the sizes, the inputs or the code"]),
        (
            {"mesh": Shape(4, 1, 2, "h100")},
            ["mesh: pipeline 2 -> 4, tensor 2 -> 1, data 1 -> 2, device cpu -> h100"],
        ),
        (
            {"mesh": Shape(2, 2, 1, ("h100", "l40s"))},
            ["mesh: device cpu -> h100, l40s"],
        ),
        ({"microbatches": 16}, ["microbatches: 8 -> 16"]),
        ({"precision": "fp64"}, ["precision: the model's own -> fp64"]),
        ({"optimizer": "sgd"}, ["optimizer: adamw -> sgd"]),
        ({"schedule": None}, ["schedule: 1f1b -> undecided"]),
        ({"virtual_stages": 2}, ["virtual_stages: 1 -> 2"]),
        ({"orders": ("0F0", "1F0")}, ["orders: the order that the schedule's name says -> an ord"]),
        ({"granularity": 2}, ["granularity: 1 -> 2"]),
        ({"sent": ("mask", "rope")}, ["sent: now also rope"]),
        ({"sent": ()}, ["sent: no longer mask"]),
        (
            {"recompute": ("h.1", "h.2", "h.3")},
            ["recompute: now also h.1 … h.3 (3); no longer h.0"],
        ),
        ({"recompute": None}, ["recompute: h.0 -> undecided"]),
        ({"stages": stages(3, 5)}, ["stages: h.3: stage 0 (rank 0) -> stage 1 (rank 1)"]),
        (
            {"stages": stages(7, 1)},
            ["stages: h.4 … h.6 (3): stage 1 (rank 1) -> stage 0 (rank 0)"],
        ),
        (
            {"stages": stages(4, 4, ranks=(1, 0))},
            [
                "stages: h.0 … h.3 (4): stage 0 (rank 0) -> stage 0 (rank 1)",
                "stages: h.4 … h.7 (4): stage 1 (rank 1) -> stage 1 (rank 0)",
            ],
        ),
        (
            {"stages": stages(4, 2, 2)},
            ["stages: h.6, h.7: stage 1 (rank 1) -> stage 2 (rank 2)"],
        ),
        ({"stages": None}, ["stages: h.0 … h.7 (8) -> undecided"]),
        (
            {"solution": Solution("feasible", 2.0, 1.5, 0.25)},
            ["solution: status optimal -> feasible, objective 1 -> 2, bound 1 -> 1.5, gap 0 "],
        ),
        (
            {"search": Solution("feasible", 2.0, 1.5, 0.25)},
            ["search: none -> status feasible, objective 2, bou"],
        ),
        (
            {"weighed": (Weighed("1f1b", 1, 2.0), Weighed("zb-v", 2, 1.0))},
            ["weighed: now also zb-v x 2", "weighed: 1f1b x 1: other seconds"],
        ),
        ({"weighed": None}, ["weighed: 1f1b x 1 -> undecided"]),
        ({"sharding": None}, ["sharding: tensors in pieces on the tensor ranks -> tensors whole"]),
        (
            {"sharding": Sharding(1, (template(up="I", down="S(1)"),))},
            ["sharding: templates Layer: tensors up: S(0) -> I"],
        ),
        ({"sharding": Sharding(1, ())}, ["sharding: templates no longer Layer"]),
        (
            {"sharding": Sharding(1, (template(up="S(0)", down="S(1)"),), memory=5)},
            ["sharding: memory none -> 5"],
        ),
        (
            {"vocabulary": VocabularyChoice("vocab-2", ("wte",), "head", weighed=(METHOD,))},
            ["vocabulary: method whole -> vocab-2, lookups now also wte, head none -> head"],
        ),
        (
            {"vocabulary": VocabularyChoice("whole", kept=("head: tied",), weighed=(METHOD,))},
            ["vocabulary: kept now also head"],
        ),
        ({"vocabulary": None}, ["vocabulary: method whole, weighed whole -> undecided"]),
        (
            {"costs": (TIME,)},
            ["costs: times by the device's figures -> measured times of blocks"],
        ),
        (
            {"vocabulary_costs": PASSES},
            ["vocabulary_costs: times by the device's figures -> measured times"],
        ),
        (
            {"meshes": (MeshChoice(2, 2, 1, 8, seconds=0.5), MeshChoice(4, 1, 1, 8))},
            ["meshes: undecided -> 2 × 2 × 1, 4 × 1 × 1"],
        ),
        (
            {"meshes": (MeshChoice(2, 1, 2, 8, rows=1), MeshChoice(2, 1, 2, 4, rows=2))},
            ["meshes: undecided -> 2 × 1 × 2 of 1 rows, 2 × 1 × 2 of 2 rows"],
        ),
        ({"version": 2}, ["version: 1 -> 2"]),
        (
            {"updates": DataUpdates.of("local", every=50)},
            ["updates: all-reduce of gradients -> way local, rank 0, every 50, outer 0.7, 0.9"],
        ),
    ],
)
def test_a_decision_that_differs_is_said(fields: dict[str, Any], said: list[str]) -> None:
    found = changes(PLAN, dataclasses.replace(PLAN, **fields))
    lines = [f"{change.field}: {change.text}" for change in found]
    assert len(lines) == len(said), lines
    for line, begin in zip(lines, said, strict=True):
        assert line.startswith(begin)


def test_equal_plans_have_no_changes_and_every_field_has_one() -> None:
    assert changes(PLAN, PLAN) == ()
    other = Plan("Llama", "1f", Shape(), 1, precision="fp64", optimizer="sgd", virtual_stages=2)
    decided: dict[str, Any] = {"costs": (TIME,), "meshes": (MeshChoice(2, 2, 1, 8),)}
    decided |= {"vocabulary_costs": PASSES, "orders": ("0F0",), "search": PLAN.solution, "zero": 1}
    decided["updates"] = DataUpdates.of("local", every=50)
    decided["selective"] = decided["offload"] = True
    decided["context"] = Sharding(1, ())
    decided["runner_up"] = MeshChoice(4, 1, 1, 8)
    found = dataclasses.replace(other, version=2, **decided)
    names = {field.name for field in dataclasses.fields(Plan)}
    for one, two in ((PLAN, found), (found, PLAN)):
        assert {change.field for change in changes(one, two)} == names


def test_passes_of_the_vocabulary_that_were_measured_anew_are_named() -> None:
    one = dataclasses.replace(PLAN, vocabulary_costs=PASSES)
    other = dataclasses.replace(PLAN, vocabulary_costs=dataclasses.replace(PASSES, s=3.0))
    (change,) = changes(one, other)
    assert change.text == "s 2 -> 3"


def test_blocks_and_meshes_that_came_out_otherwise_are_named() -> None:
    one = dataclasses.replace(PLAN, costs=(TIME,), meshes=(MeshChoice(2, 2, 1, 8, seconds=1.0),))
    slower = dataclasses.replace(TIME, forward=2.0)
    other = dataclasses.replace(
        PLAN,
        costs=(slower, dataclasses.replace(TIME, template="Head")),
        meshes=(MeshChoice(2, 2, 1, 8),),
    )
    assert [change.text for change in changes(one, other)] == [
        "now also Head",
        "Layer: other forward",
        "2 × 2 × 1: other seconds",
    ]


def test_what_came_is_what_goes_the_other_way() -> None:
    after = dataclasses.replace(PLAN, recompute=("h.0", "h.1"))
    assert [change.text for change in changes(PLAN, after)] == ["now also h.1"]
    assert [change.text for change in changes(after, PLAN)] == ["no longer h.1"]


def test_ranks_with_another_order_are_named() -> None:
    one = dataclasses.replace(PLAN, orders=("0F0 0B0", "1F0 1B0"))
    other = dataclasses.replace(PLAN, orders=("0F0 0B0", "1F0 1I0 1W0"))
    assert [change.text for change in changes(one, other)] == ["rank 1 computes in another order"]


def test_tensors_with_the_same_change_are_said_together() -> None:
    one = template(**{f"t{k}": "I" for k in range(9)})
    other = template(**{f"t{k}": "S(0)" for k in range(9)})
    plans = [dataclasses.replace(PLAN, sharding=Sharding(1, (item,))) for item in (one, other)]
    (change,) = changes(*plans)
    assert change.text == "templates Layer: tensors t0 … t8 (9): I -> S(0)"
