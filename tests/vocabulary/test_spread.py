"""The spread graph: the same loss and gradients, blocks without the vocabulary."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
import torch

from parcompiler.capture import capture
from parcompiler.capture.blocks import cut, levels
from parcompiler.errors import InputError
from parcompiler.graph import Graph, shape_of
from parcompiler.plan import VocabularyChoice
from parcompiler.vocabulary import find, spread
from tests import zoo
from tests.architecture_text import CAUSAL, MASKED, SEQUENCES
from tests.vocabulary import endings
from tests.vocabulary.endings import SPREAD, case
from tests.vocabulary.running import everything, graph, lifted, run
from tests.vocabulary.test_find import EXPECTED

SWEEP = sorted({*zoo.ALL, *CAUSAL, *MASKED, *SEQUENCES} - set(EXPECTED))
BOUND = 1e-12
WHOLE = ("mobilebert",)  # its head is a product with two tables side by side


@pytest.mark.parametrize(
    "name", [*EXPECTED, *(pytest.param(name, marks=pytest.mark.sweep) for name in SWEEP)]
)
def test_loss_and_gradients_are_those_of_the_model(name: str) -> None:
    whole, batch = graph(name)
    made = everything(whole)
    assert made.vocabulary is not None or name in WHOLE
    check(whole, made, batch)
    if made.vocabulary is not None:
        check_blocks(made)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", SPREAD)
def test_a_head_has_the_same_loss_however_it_is_written(name: str, tied: bool) -> None:
    model, inputs = case(SPREAD[name], tied=tied, padding_idx=2)
    whole, batch = lifted(capture(model, inputs), inputs)
    made = everything(whole)
    assert made.vocabulary is not None
    assert made.vocabulary.head is not None
    assert made.vocabulary.lookups
    check(whole, made, batch)
    check_blocks(made)


def check(whole: Graph, made: Graph, batch: Mapping[str, torch.Tensor]) -> None:
    """Both graphs have the same results."""
    expected, gradients = run(whole, batch)
    loss, found = run(made, batch)
    assert abs(loss - expected) <= BOUND * abs(expected)
    for name, gradient in gradients.items():
        mine = found[name]
        if gradient is None or mine is None:
            assert gradient is mine, name
            continue
        assert (mine - gradient).abs().max() <= BOUND * gradient.abs().max().clamp_min(1e-6), name


def check_blocks(made: Graph) -> None:
    """The vocabulary is in no block, at any level; everything else is in one or in the prologue."""
    assert made.vocabulary is not None
    apart = set(made.vocabulary.nodes)
    calls = {node for node in made.fx_graph.nodes if node.op == "call_function"}
    head = made.vocabulary.head
    for level in levels(made):
        parts = cut(made, level)
        inside = [node for block in parts.blocks for node in block.nodes] + list(parts.prologue)
        assert len(inside) == len(set(inside))
        assert set(inside) == calls - apart
        for item in made.vocabulary.lookups:
            users = set(item.node.users)
            readers = [block for block in parts.blocks if users & set(block.nodes)]
            assert all(item.node in block.inputs for block in readers)
        if head is not None:
            assert sum(head.x in block.outputs for block in parts.blocks) == 1


def test_the_head_reads_a_contiguous_matrix() -> None:
    for name in ("shifted", "transposed", "pictures", "last", "chosen"):
        model, inputs = case(SPREAD[name])
        made = everything(capture(model, inputs))
        assert made.vocabulary is not None
        head = made.vocabulary.head
        assert head is not None
        assert len(shape_of(head.x)) == 2
        assert head.x.meta["val"].is_contiguous()
        output = next(node for node in head.targets.nodes if node.op == "output")
        assert shape_of(output.all_input_nodes[0]) == shape_of(head.x)[:1]
        assert head.node is made.loss
        assert head.x.name in made.differentiable


def test_what_is_received_is_not_updated_in_place() -> None:
    """`x += positions` would change the embedded value itself."""
    model, inputs = case(endings.plain)
    made = everything(capture(model, inputs))
    assert made.vocabulary is not None
    (item,) = made.vocabulary.lookups
    assert [str(user.target) for user in item.node.users] == ["aten.clone.default"]


def test_names_and_places_of_the_trunk_stay() -> None:
    whole, _ = graph("hf-bart")
    made = everything(whole)
    before = {node.name: node for node in whole.fx_graph.nodes}
    assert made.fingerprint == whole.fingerprint
    assert made.parameters == whole.parameters
    for node in made.fx_graph.nodes:
        if node.op == "call_function" and node.name in before:
            assert node.meta.get("nn_module_stack") == before[node.name].meta.get("nn_module_stack")
    assert made.loss.name == whole.loss.name
    assert made.vocabulary is not None
    assert {item.node.name for item in made.vocabulary.lookups} == {"embedding", "embedding_2"}


def test_layers_still_share_templates() -> None:
    made = everything(graph("gpt")[0])
    blocks = [block for block in cut(made, 1).blocks if block.name.startswith("layers.")]
    assert len(blocks) == 4
    assert len({block.template for block in blocks}) == 1


def test_a_choice_may_name_some_of_the_layers() -> None:
    whole, batch = graph("gpt")
    choice = VocabularyChoice("vocab-2", lookups=("embedding.weight",))
    made = spread(whole, choice, 2)
    assert made.vocabulary is not None
    assert made.vocabulary.head is None
    check(whole, made, batch)
    made = spread(whole, dataclasses.replace(choice, lookups=(), head="head.weight"), 2)
    assert made.vocabulary is not None
    assert not made.vocabulary.lookups
    check(whole, made, batch)


def test_a_choice_of_what_cannot_be_spread_is_refused_with_the_reason() -> None:
    model, inputs = case(endings.several_terms)
    whole = capture(model, inputs)
    assert find(whole, 2).head is None
    with pytest.raises(InputError, match=r"'head.weight' .* other terms besides"):
        spread(whole, VocabularyChoice("vocab-2", head="head.weight"), 2)
    with pytest.raises(InputError, match=r"'nothing' .*no lookup or head reads it"):
        spread(whole, {"nothing"}, 2)
