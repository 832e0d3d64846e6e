"""Blocks come from the module tree, and every cut between two of them can be made."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from parcompiler.capture import capture
from parcompiler.capture.blocks import cut, levels
from parcompiler.capture.prologue import is_sendable
from parcompiler.graph import Graph, order_of
from tests import zoo
from tests.distributed.models import (
    MODELS,
    WIDTH,
    XY,
    InPlace,
    NormedTwice,
    Stack,
    Strided,
    UNet,
    classes,
    rows,
)

NAMES = ("gpt", "t5", "resnet", "hf-albert", "hf-bart", "hf-mixtral")


def check_cut(graph: Graph, level: int) -> None:
    """Each node once, in order; tensors of known size, made before they are read, in between."""
    parts = cut(graph, level)
    position = {node: index for index, node in enumerate(graph.fx_graph.nodes)}
    nodes = [node for block in parts.blocks for node in block.nodes]
    calls = [node for node in graph.fx_graph.nodes if node.op == "call_function"]
    assert sorted(nodes + list(parts.prologue), key=position.__getitem__) == calls
    home = {node: index for index, block in enumerate(parts.blocks) for node in block.nodes}
    prologue = set(parts.prologue)
    for index, block in enumerate(parts.blocks):
        assert list(block.nodes) == sorted(block.nodes, key=position.__getitem__)
        assert block.outputs
        assert all(isinstance(node.meta["val"], torch.Tensor) for node in block.outputs)
        assert all(is_sendable(node) for node in block.outputs)
        for node in block.inputs:
            assert node.op == "placeholder" or node in prologue or home[node] < index
    assert len({block.name for block in parts.blocks}) == len(parts.blocks)


@pytest.mark.parametrize("name", NAMES)
def test_every_level_of_a_known_model_is_a_good_cut(name: str) -> None:
    model, inputs = zoo.build(name)
    graph = capture(model, inputs)
    for level in levels(graph):
        check_cut(graph, level)


@pytest.mark.parametrize("name", MODELS)
def test_every_level_of_a_special_model_is_a_good_cut(name: str) -> None:
    make, inputs, loss = MODELS[name]
    graph = capture(make(), inputs, loss)
    for level in levels(graph):
        check_cut(graph, level)


def test_layers_are_blocks_and_finer_levels_have_more() -> None:
    model, inputs = zoo.build("gpt")
    graph = capture(model, inputs)
    coarse = [block.name for block in cut(graph, 1).blocks]
    assert [name for name in coarse if "layers." in name] == [f"layers.{i}" for i in range(4)]
    counts = [len(cut(graph, level).blocks) for level in levels(graph)]
    assert all(a < b for a, b in itertools.pairwise(counts))


def test_a_model_without_numbered_modules_is_cut_at_its_children() -> None:
    make, inputs, _ = MODELS["U-Net"]
    graph = capture(UNet(), inputs)
    names = [block.name for block in cut(graph, 1).blocks]
    assert names == ["enter", "down", "deep", "up", "leave"]
    assert make is UNet


def test_a_layer_called_twice_is_two_blocks_of_one_template() -> None:
    class Twice(Stack):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](self.layers[1](self.layers[0](self.layers[1](x))))
            return F.cross_entropy(self.head(x), labels)

    blocks = cut(capture(Twice(), XY), 1).blocks
    names = [block.name for block in blocks[:4]]
    assert names == ["layers.1", "layers.0", "layers.1@1", "layers.0@1"]
    assert blocks[1].template == blocks[3].template
    assert blocks[1].tensors == blocks[3].tensors


def test_an_update_in_place_and_its_target_stay_together() -> None:
    graph = capture(InPlace(), XY)
    home = {n: b.name for b in cut(graph, 1).blocks for n in b.nodes}
    adds = [node for node in home if str(node.target) == "aten.add_.Tensor"]
    assert adds
    for node in adds:
        assert home[node.all_input_nodes[0]] == home[node]


def test_statistics_that_several_layers_update_have_one_home() -> None:
    graph = capture(NormedTwice(), XY)
    norms = [n for n in graph.fx_graph.nodes if str(n.target) == "aten.batch_norm.default"]
    homes = [block.name for block in cut(graph, 1).blocks if set(norms) & set(block.nodes)]
    assert len(norms) == 2
    assert len(homes) == 1


def test_no_block_returns_a_list() -> None:
    graph = capture(MODELS["parts of a split"][0](), XY)
    home = {n: b.name for b in cut(graph, 1).blocks for n in b.nodes}
    items = [n for n in home if n.name.startswith("getitem")]
    assert items
    for node in items:
        assert home[node] == home[node.all_input_nodes[0]]


def test_a_number_that_the_batch_decides_is_not_sent() -> None:
    class Scaled(Stack):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x)
            scale = x.abs().max().item()
            x = self.layers[2](self.layers[1](x)) * scale
            return F.cross_entropy(self.head(self.layers[3](x)), labels)

    graph = capture(Scaled(), XY)
    check_cut(graph, 1)
    home = {n: b.name for b in cut(graph, 1).blocks for n in b.nodes}
    (item,) = [n for n in home if str(n.target) == "aten.item.default"]
    assert {home[user] for user in item.users} == {home[item]}


def test_the_order_in_memory_of_what_crosses_is_known() -> None:
    blocks = cut(capture(Strided(), {"x": rows(6, WIDTH), "labels": classes()}), 1).blocks
    orders = [order_of(node) for block in blocks[:3] for node in block.outputs]
    assert orders == [(0, 2, 1)] * 3


def test_capture_is_the_same_every_time() -> None:
    def once() -> list[Any]:
        model, inputs = zoo.build("hf-bart")
        graph = capture(model, inputs)
        return [graph.fingerprint, [(b.name, b.template) for b in cut(graph, 2).blocks]]

    assert once() == once()
