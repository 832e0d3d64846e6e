"""A search weighs context and expert ranks with the other axes."""

import dataclasses
import functools
import re
from typing import Any

import pytest
import torch

import parcompiler as pc
from parcompiler.models import gpt, moe
from parcompiler.passes.base import MARGIN
from tests.meshes.test_search import check_answer, check_told, exhaustive, fits

EXPERTS = moe.Config(layers=2, heads=2, hidden=64, vocabulary=64, sequence=8, experts=8)
OPTIONS: dict[str, Any] = {"schedule": "1f1b", "vocabulary": "whole", "zero": 0}
TIGHT = fits(8 * 2**20)  # whole experts with their optimizer states are more


@functools.cache
def mixture() -> pc.Program:
    """A small mixture of experts in float64, captured once for many meshes."""
    torch.manual_seed(0)
    tokens = torch.randint(EXPERTS.vocabulary, (2, EXPERTS.sequence))
    inputs = {"tokens": tokens, "labels": tokens}
    return pc.compile(moe.MoE(EXPERTS).double(), pc.Mesh(device="h100"), inputs, **OPTIONS)


LONG = gpt.Config(layers=2, heads=2, hidden=16, vocabulary=16, sequence=512, tied=False)


@functools.cache
def long_rows() -> pc.Program:
    """A small GPT in float64 whose activations take more than its states; captured once."""
    torch.manual_seed(0)
    tokens = torch.randint(LONG.vocabulary, (2, LONG.sequence))
    inputs = {"tokens": tokens, "labels": tokens}
    return pc.compile(gpt.GPT(LONG).double(), pc.Mesh(device="h100"), inputs, **OPTIONS)


def with_experts(cluster: pc.Cluster, degrees: tuple[int, ...]) -> list[pc.Mesh]:
    """All meshes, with all these degrees of expert ranks that each can have."""
    return [
        dataclasses.replace(mesh, expert=n)
        for mesh in cluster.meshes()
        for n in degrees
        if n == 1 or (mesh.tensor == 1 and mesh.data % n == 0)
    ]


@pytest.mark.parametrize("device", [TIGHT, fits(2**30)])
def test_expert_ranks_are_weighed_as_exhaustively_as_the_others(device: pc.Device) -> None:
    cluster = pc.Cluster(1, 4, device)
    found = pc.compile(mixture(), cluster, microbatches=8, **OPTIONS)
    every = exhaustive(mixture(), cluster, 8, with_experts(cluster, (1, 2, 4)), **OPTIONS)
    check_answer(found, every)
    check_told(found.plan.meshes, every)
    assert {item.mesh.expert for item in every} == {1, 2, 4}
    assert {item.expert for item in found.plan.meshes or ()} == {1, 2, 4}


def test_expert_ranks_are_chosen_train_exactly_and_are_told() -> None:
    program = pc.compile(mixture(), pc.Cluster(1, 4, TIGHT), microbatches=8, **OPTIONS)
    assert (program.plan.mesh.data, program.plan.mesh.expert) == (4, 4)
    assert any(item.experts == EXPERTS.experts for item in program.lowered.graph.parameters)
    verification = program.verify()
    assert verification.ok, str(verification)
    assert max(verification.loss_error, verification.gradient_error) <= 1e-9
    plan = pc.Plan.from_json(program.plan.to_json())
    assert plan == program.plan
    assert plan.meshes is not None
    assert plan.meshes[0].degrees == "1 × 1 × 4, expert 4"
    again = pc.compile(program, program.problem.mesh, microbatches=2, plan=plan)
    assert again.plan.stages == plan.stages
    text = program.report().to_text()
    table = text.partition("Meshes considered")[2]
    assert " expert " in table
    assert " context " not in table.partition("\n\n")[0]
    assert "of 8 rank 0 has 0 to 1, ... rank 3 6 to 7" in text
    assert program.report().experts == (8,)


def test_bounds_of_context_ranks_hold() -> None:
    cluster = pc.Cluster(1, 4, fits(2300 * 2**10))
    found = pc.compile(long_rows(), cluster, microbatches=4, **OPTIONS)
    meshes = [
        dataclasses.replace(mesh, data=mesh.data // n, context=n)
        for mesh in cluster.meshes()
        for n in (1, 2, 4)
        if mesh.data % n == 0
    ]
    every = exhaustive(long_rows(), cluster, 4, meshes, **OPTIONS)
    assert found.simulate().step_time <= (1 + MARGIN) * min(item.seconds for item in every)
    check_told(found.plan.meshes, every)


def test_context_ranks_are_chosen_where_nothing_else_fits() -> None:
    cluster = pc.Cluster(1, 4, fits(2000 * 2**10))
    assert not exhaustive(long_rows(), cluster, 4, **OPTIONS)
    program = pc.compile(long_rows(), cluster, microbatches=4, **OPTIONS)
    assert program.plan.mesh.context > 1
    assert program.lowered.context == program.plan.mesh.context
    verification = program.verify()
    assert verification.ok, str(verification)
    assert max(verification.loss_error, verification.gradient_error) <= 1e-9
    plan = pc.Plan.from_json(program.plan.to_json())
    assert plan == program.plan
    again = pc.compile(program, program.problem.mesh, microbatches=plan.microbatches, plan=plan)
    assert again.plan.stages == plan.stages
    report = program.report()
    text = report.to_text()
    assert " context " in text.partition("Meshes considered")[2]
    assert "each sends" in text
    alone = pc.compile(long_rows(), pc.Mesh(), microbatches=4, **OPTIONS)
    assert report.step.flops == alone.report(meshes=False).step.flops


@functools.cache
def longest_rows(heads: int) -> pc.Program:
    """A GPT without data, with rows of 8,192 on two H100 with memory for everything."""
    config = gpt.Config(
        layers=3, heads=heads, hidden=512, vocabulary=512, sequence=8192, tied=False
    )
    with torch.device("meta"):
        tokens = torch.zeros(1, 8192, dtype=torch.long)
        model = gpt.GPT(config).bfloat16()
    mesh = pc.Mesh(tensor=2, device="h100")
    return pc.compile(model, mesh, (tokens, tokens), microbatches=4, **OPTIONS)


def test_who_lacks_memory_for_long_rows_is_told_of_context_ranks() -> None:
    rows = longest_rows(heads=1)  # tensor ranks cannot divide attention with one head
    short = fits(int(0.55 * max(rows.simulate().peak_memory)))
    lean = pc.compile(rows, pc.Mesh(tensor=2, device=short), microbatches=4, **OPTIONS)
    assert lean.plan.selective or lean.plan.recompute
    (told,) = (item for item in lean.report().step.changes if item.option == "mesh")
    assert told.value == "context=2"
    other = pc.compile(rows, pc.Mesh(context=2, device=short), microbatches=4, **OPTIONS)
    assert other.simulate().step_time == pytest.approx(told.seconds)
    rows = longest_rows(heads=8)
    shorter = fits(int(0.48 * max(rows.simulate().peak_memory)))
    with pytest.raises(pc.InfeasibleError) as caught:
        pc.compile(rows, pc.Mesh(tensor=2, device=shorter), microbatches=4, **OPTIONS)
    (note,) = (note for note in caught.value.__notes__ if "rows of 8,192" in note)
    told_numbers = re.fullmatch(
        r"(\d+) ranks \(context=(\d+), pipeline=1, tensor=2, data=1\) were tried and fit: "
        r"rows of 8,192 positions in pieces of ([\d,]+), ([\d,]+) bytes on the fullest rank",
        note,
    )
    assert told_numbers
    ranks, context, piece, most = (int(x.replace(",", "")) for x in told_numbers.groups())
    assert ranks == 2 * context
    assert piece == 8192 // context
    assert most <= shorter.memory
