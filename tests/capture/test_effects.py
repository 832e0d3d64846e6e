"""Views, updates in place and chance, as the operators' schemas and a few facts have them."""

import torch
from torch import fx

from parcompiler.capture.effects import Effects, is_random, mutated_operands

aten = torch.ops.aten


def test_a_view_of_a_view_has_the_root_of_both() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    view = graph.call_function(aten.view.default, (x, [2, 3]))
    part = graph.call_function(aten.select.int, (view, 0, 0))
    made = graph.call_function(aten.add.Tensor, (part, 1))
    effects = Effects(graph)
    assert effects.root(part) is x
    assert effects.root(made) is made


def test_writers_depend_in_order() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    made = graph.call_function(aten.clone.default, (x,))
    first = graph.call_function(aten.add_.Tensor, (made, 1))
    read = graph.call_function(aten.sum.default, (made,))
    second = graph.call_function(aten.mul_.Tensor, (made, 2))
    effects = Effects(graph)
    assert effects.writers == {made: [first, second]}
    assert set(effects.dependencies(read)) == {made, first}
    assert effects.early_readers({made}) == {first, read}


def test_batch_norm_updates_its_statistics_in_training_only() -> None:
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in ("x", "weight", "bias", "mean", "var")]
    for training in (True, False):
        norm = graph.call_function(aten.batch_norm.default, (*nodes, training, 0.1, 1e-5, False))
        assert list(mutated_operands(norm)) == (nodes[3:] if training else [])


def test_dropout_is_chance_in_training_with_a_probability() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    cases = {(0.1, True): True, (0.0, True): False, (0.1, False): False}
    for (probability, training), wanted in cases.items():
        node = graph.call_function(aten.dropout.default, (x, probability, training))
        assert is_random(node) is wanted
    assert is_random(graph.call_function(aten.rand_like.default, (x,)))
