"""Every operator of real models has strategies, and those of the values at hand hold."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
from torch import fx

from parcompiler.capture import capture
from parcompiler.graph import Graph
from parcompiler.spmd import I, P, R, S, Strategy, strategies
from parcompiler.spmd.call import NodeCall, read
from parcompiler.spmd.discover import on_random
from parcompiler.spmd.segments import segmentations
from parcompiler.spmd.simulate import faults
from tests import architectures, zoo
from tests.spmd.cases import source

OWN = (
    "gpt", "gpt-dropout", "llama", "bert", "t5", "resnet", "moe", "dlrm", "hf-gpt2", "hf-llama",
    "hf-mixtral",
)  # fmt: skip
MODELS = (*OWN, "phi3", "bloom", "gptneox")
# Compared in test_rules: random integers are no groups, and memory that was not written is nothing.
APART = {"grouped_mm_fallback", "empty_like"}

# Whose operators are discovered or replicated; all others have a written rule.
DISCOVERED = {"transformers.models.bloom.modeling_bloom.GeLUFunction.apply"}
REPLICATED = {"aten.arange.default", "aten.arange.start", "aten.tril_indices.default"}


@cache
def graph(name: str) -> Graph:
    if name in OWN:
        return capture(*zoo.build(name))
    return capture(*architectures.build(name))


def calls(name: str) -> Iterator[fx.Node]:
    """One node of each operator, with each shape of its operands and result."""
    seen = set()
    for node in graph(name).fx_graph.nodes:
        if node.op == "call_function":
            call = read(node)
            key = node.target, call.shapes, call.result_shapes
            if key not in seen:
                seen.add(key)
                yield node


_compared: set[object] = set()


def is_compared(call: NodeCall, n: int) -> bool:
    """Whether random values can tell, and no model before had the same operator and shapes."""
    key = n, call.node.target, call.shapes, call.result_shapes, call.gradients
    fresh = key not in _compared
    _compared.add(key)
    tells = call.is_plain and not call.is_item and call.base not in APART
    return fresh and tells and bool(call.operands)


@pytest.mark.parametrize("name", MODELS)
def test_every_node_can_be_replicated_and_every_strategy_holds(name: str) -> None:
    known = graph(name).differentiable
    segments = segmentations(graph(name).fx_graph.nodes)
    for node in calls(name):
        call = read(node, known)
        for n in (2, 4):
            found = strategies(node, n, differentiable=known, segments=segments)
            assert found[0].is_replicated
            if is_compared(call, n):
                trial = on_random(call, call.shapes)
                gradients = known if any(call.gradients) else None
                for strategy in strategies(node, n, differentiable=gradients, segments=segments):
                    assert faults(trial, strategy, n) == (), node.format_node()


@pytest.mark.parametrize("name", MODELS)
def test_rules_are_written_for_all_but_a_few(name: str) -> None:
    sources = {str(node.target): source(node, 2) for node in calls(name)}
    assert {target for target, found in sources.items() if found == "discovered"} <= DISCOVERED
    assert {target for target, found in sources.items() if found == "replicated"} <= REPLICATED


@pytest.mark.parametrize(("name", "norm"), [("gpt", "layer_norm"), ("llama", "rms_norm")])
def test_a_layer_has_the_strategies_of_megatron(name: str, norm: str) -> None:
    known = graph(name).differentiable
    for node in calls(name):
        found = strategies(node, 2, differentiable=known)
        if str(node.target) == "aten.linear.default":
            bias = len(node.args) > 2
            assert Strategy((R, S(0), *[S(0)] * bias), (S(2),)) in found  # by columns
            assert Strategy((S(2), S(1), *[P] * bias), (P,)) in found  # by rows
        if "attention" in str(node.target):
            assert Strategy((S(1), S(1), S(1)), (S(1),)) in found  # by heads
        if norm in str(node.target):
            weights = len(read(node).operands) - 1
            assert Strategy((I,) * (weights + 1), (I,)) in found
            assert Strategy((S(1), *[R] * weights), (S(1),)) in found  # by the sequence
        if str(node.target) == "aten.embedding.default":
            rows = Strategy((S(0), R), (P,), special="vocabulary lookup")
            assert rows in found
        if "cross_entropy" in str(node.target):
            assert Strategy((S(1), R), (I,), special="classes") in found


def test_heads_are_carried_from_the_projection_to_the_output() -> None:
    """S(2) of the fused projection is S of the heads all the way, in local sizes."""
    view = next(n for n in graph("gpt").fx_graph.nodes if str(n.target) == "aten.view.default")
    heads = [s for s in strategies(view, 2) if s.inputs == (S(2),)]
    assert [str(s) for s in heads] == ["S(2) -> S(2), size[2] = 2 split"]


def test_fused_projections_of_hugging_face_split_within_their_segments() -> None:
    for name, operator in (("hf-gpt2", "split"), ("phi3", "slice"), ("hf-mixtral", "chunk")):
        all_nodes = graph(name).fx_graph.nodes
        segments = segmentations(all_nodes)
        found = [
            strategy
            for node in all_nodes
            if node.op == "call_function" and read(node).base == operator
            for strategy in strategies(node, 2, segments=segments)
            if any(placement.segments for placement in strategy.inputs)
        ]
        assert found, name
