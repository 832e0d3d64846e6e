"""Whatever the pass decides, ranks that carry it out have the loss and gradients of the whole."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import parcompiler as pc
from parcompiler.capture import capture
from parcompiler.capture.lift import lift
from parcompiler.device import Device, Link, device
from parcompiler.graph import Graph
from parcompiler.options import Options
from parcompiler.passes.shard import Assignment, assignment, decided
from parcompiler.passes.shard.candidates import Candidates
from parcompiler.passes.shard.ilp import Programme, decide
from parcompiler.passes.shard.ilp_builder import build
from parcompiler.passes.shard.node_costs import ShardCosts
from parcompiler.passes.shard.pins import Pins
from parcompiler.passes.shard.plan_entries import sharding
from parcompiler.passes.shard.templates import fold
from parcompiler.plan import Plan, Shape, Sharding
from parcompiler.problem import Problem
from tests import architectures, zoo
from tests.passes.simulated import Outcome, sharded, whole

LATER = ("hf-llama", "hf-mixtral", "phi3", "bloom", "gptneox")
OWN = ("gpt", "gpt-tied", "llama", "t5", "bert", "resnet")
MODELS = (*OWN, "hf-gpt2")


def built(name: str) -> Any:
    """The model, its inputs, and perhaps its loss."""
    in_zoo = name in MODELS or name.startswith("hf")
    return zoo.build(name) if in_zoo else architectures.build(name)


@cache
def graph(name: str) -> Graph:
    """A tiny model in float64."""
    torch.manual_seed(0)
    model, inputs, *loss = built(name)
    model.train(name in OWN)  # no dropout: ranks draw other numbers than the whole
    found = lift(capture(model, inputs, *loss), torch.float64)
    tensors = {
        key: value.double() if value.is_floating_point() else value
        for key, value in found.tensors.items()
    }
    return dataclasses.replace(found, tensors=tensors)


@cache
def batch(name: str) -> dict[str, torch.Tensor]:
    """Its micro-batch, by placeholder."""
    found, inputs = graph(name), built(name)[1]
    return {
        item.node: inputs[item.key].double()
        if inputs[item.key].is_floating_point()
        else inputs[item.key]
        for item in found.inputs
    }


@cache
def reference(name: str) -> Outcome:
    return whole(graph(name), batch(name))


def eager(memory: int = 10**12, bandwidth: float = 1e12) -> Device:
    """A device that computes slowly and talks fast: everything that can be split is."""
    link = Link(bandwidth=bandwidth, latency=0.0)
    slow = dataclasses.replace(device("cpu"), memory=memory, link=link, launch_overhead=0.0)
    return dataclasses.replace(slow, flops=(("float32", 1e6),), memory_bandwidth=1e6)


def problem(name: str, n: int, on: Device) -> Problem:
    return Problem(graph(name), pc.Mesh(tensor=n, device=on), Options(microbatches=1))


def plan(found: Sharding, n: int) -> Plan:
    made = Plan("model", "0f", Shape(tensor=n), 1, sharding=found)
    assert Plan.from_json(made.to_json()) == made
    return made


def check(name: str, chosen: Assignment, n: int) -> None:
    """Ranks find the loss and the gradients of the whole."""
    loss, gradients = sharded(graph(name), chosen, n, batch(name))
    expected, expected_gradients = reference(name)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-12)
    for parameter, gradient in expected_gradients.items():
        scale = gradient.abs().max().item()
        error = (gradients[parameter] - gradient).abs().max().item()
        assert error <= 1e-9 * max(scale, 1e-6), parameter


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_decided_computes_the_same(name: str, n: int) -> None:
    chosen = assignment(graph(name), plan(decided(problem(name, n, eager())), n))
    split = [node for node, s in chosen.items() if not s.is_replicated]
    assert split
    check(name, chosen, n)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_any_answer_of_the_programme_computes_the_same(name: str, n: int) -> None:
    for seed in range(4):
        for chosen in anything(name, n, seed):
            check(name, chosen, n)


@pytest.mark.sweep
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("name", LATER)
def test_what_is_decided_of_others_computes_the_same(name: str, n: int) -> None:
    check(name, assignment(graph(name), plan(decided(problem(name, n, eager())), n)), n)
    for seed in range(8):
        for chosen in anything(name, n, seed):
            check(name, chosen, n)


class Filled(nn.Module):
    """A value that is made of zeros and filled piece by piece, through views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        filled = torch.zeros(x.shape, dtype=x.dtype)
        for row in range(len(x)):
            filled[row] = y[row].tanh()
        first: torch.Tensor = filled[0]
        filled += y
        loss: torch.Tensor = (self.after(filled.relu()) * first).square().mean()
        return loss


@pytest.mark.parametrize("n", [2, 4])
def test_memory_that_is_updated_in_place_keeps_its_type(n: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 16, dtype=torch.float64)
    found = capture(Filled().double(), {"x": x})
    expected, expected_gradients = whole(found, {found.inputs[0].node: x})
    for seed in range(12):
        candidates = Candidates(fold(found), ShardCosts(found, eager(), n))
        built = build(candidates, Pins({}, {}), {}, None)
        data = priced_by_chance(built.programme, seed)
        chosen = assignment(found, plan(sharding(candidates, built, decide(data), 1), n))
        loss, gradients = sharded(found, chosen, n, {found.inputs[0].node: x})
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-12)
        for name, gradient in expected_gradients.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-9, atol=1e-12)


def priced_by_chance(data: Programme, seed: int) -> Programme:
    """The programme with random costs of the choices alone."""
    chance = random.Random(seed)
    decisions = tuple(
        dataclasses.replace(group, seconds=tuple(chance.random() for _ in group.seconds))
        for group in data.decisions
    )
    return Programme(decisions, data.edges, ())


def anything(name: str, n: int, seed: int) -> Iterator[Assignment]:
    """An assignment that random prices make the best."""
    candidates = Candidates(fold(graph(name)), ShardCosts(graph(name), eager(), n))
    built = build(candidates, Pins({}, {}), {}, None)
    data = priced_by_chance(built.programme, seed)
    found = sharding(candidates, built, decide(data), 1)
    yield assignment(graph(name), plan(found, n))
