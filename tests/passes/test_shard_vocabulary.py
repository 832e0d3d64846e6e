"""Tensor ranks and a spread vocabulary: what is looked up comes whole, and x leaves whole."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import parcompiler as pc
from parcompiler.capture.blocks import cut
from parcompiler.graph import Graph
from parcompiler.options import Options
from parcompiler.passes.shard import Assignment, assignment, decided
from parcompiler.passes.shard.candidates import Candidates
from parcompiler.passes.shard.ilp import decide
from parcompiler.passes.shard.ilp_builder import build
from parcompiler.passes.shard.node_costs import ShardCosts
from parcompiler.passes.shard.pins import Pins
from parcompiler.passes.shard.plan_entries import sharding
from parcompiler.passes.shard.templates import fold
from parcompiler.problem import Problem
from parcompiler.spmd.placement import I
from parcompiler.spmd.shard import shard
from tests.passes.simulated import sharded
from tests.passes.test_shard_parity import batch, eager, graph, plan, priced_by_chance, reference
from tests.vocabulary.running import everything

MODELS = ("gpt-tied", "llama", "t5", "bert")


@cache
def spread(name: str) -> Graph:
    """A tiny model with all of its vocabulary spread."""
    return everything(graph(name))


def check(name: str, chosen: Assignment, n: int) -> None:
    """Ranks find the loss and the gradients of the whole."""
    loss, gradients = sharded(spread(name), chosen, n, batch(name))
    expected, expected_gradients = reference(name)
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-12)
    for parameter, gradient in expected_gradients.items():
        scale = max(gradient.abs().max().item(), 1e-6)
        assert (gradients[parameter] - gradient).abs().max().item() <= 1e-9 * scale, parameter


@pytest.mark.parametrize("name", MODELS)
def test_what_is_decided_for_the_trunk_computes_the_same(name: str) -> None:
    problem = Problem(spread(name), pc.Mesh(tensor=2, device=eager()), Options(microbatches=1))
    chosen = assignment(spread(name), plan(decided(problem), 2))
    assert any(not strategy.is_replicated for strategy in chosen.values())
    check(name, chosen, 2)


@pytest.mark.parametrize("name", MODELS)
def test_any_answer_for_the_trunk_computes_the_same(name: str) -> None:
    for seed in range(3):
        candidates = Candidates(fold(spread(name)), ShardCosts(spread(name), eager(), 2))
        built = build(candidates, Pins({}, {}), {}, None)
        data = priced_by_chance(built.programme, seed)
        found = sharding(candidates, built, decide(data), 1)
        check(name, assignment(spread(name), plan(found, 2)), 2)


@pytest.mark.parametrize("name", MODELS)
def test_the_sharded_graph_has_the_vocabulary_whole(name: str) -> None:
    problem = Problem(spread(name), pc.Mesh(tensor=2, device=eager()), Options(microbatches=1))
    chosen = assignment(spread(name), plan(decided(problem), 2))
    made = shard(spread(name), chosen, 2)
    assert made.vocabulary is not None
    head = made.vocabulary.head
    assert head is not None
    nodes = set(made.fx_graph.nodes)
    assert set(made.vocabulary.nodes) <= nodes
    assert head.x in nodes
    assert head.node is made.loss
    for node in (*made.vocabulary.nodes, head.x):
        assert node.meta["placements"] == (I,)
        assert node.name in made.differentiable
    assert made.by_name[head.weight].shard is None
    inside = {node for block in cut(made, 1).blocks for node in block.nodes}
    assert not inside & set(made.vocabulary.nodes)
    assert head.x in inside
