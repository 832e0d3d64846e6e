"""The graph of one rank: local shapes, conversions, and the structure of the whole."""

from functools import cache, partial

import pytest
import torch
from torch import fx
from transformers import JetMoeConfig, JetMoeForCausalLM

import parcompiler as pc
from parcompiler.capture.blocks import cut
from parcompiler.graph import Block, Graph
from parcompiler.lower.names import variables
from parcompiler.models import gpt
from parcompiler.passes.shard.local import local
from parcompiler.pieces import Shard
from parcompiler.spmd.placement import P
from parcompiler.spmd.runtime_call import Piece, RuntimeCall
from parcompiler.spmd.shard import shard
from parcompiler.spmd.strategy import Strategy
from tests import zoo
from tests.codegen.emitting import graph_of
from tests.spmd.choosing import GPT, LLAMA, at_random, greedy, replicated

MODELS = ("gpt", "gpt-tied", "gpt-dropout", "llama", "t5", "bert", "resnet")


@cache
def whole(name: str) -> Graph:
    return graph_of(*zoo.build(name))


@cache
def megatron(name: str, n: int) -> Graph:
    graph = whole(name)
    return shard(graph, greedy(graph, n, {**LLAMA, **GPT}), n)


def conversions(graph: Graph) -> list[fx.Node]:
    return [node for node in graph.fx_graph.nodes if isinstance(node.target, RuntimeCall)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chooser", [greedy, replicated, partial(at_random, seed=0)])
def test_blocks_are_those_of_the_whole(name: str, chooser: object) -> None:
    graph = whole(name)
    local = shard(graph, chooser(graph, 2), 2)  # type: ignore[operator]
    expected, found = cut(graph, 1), cut(local, 1)
    assert [block.name for block in found.blocks] == [block.name for block in expected.blocks]
    for one, other in zip(found.blocks, expected.blocks, strict=True):
        names = {node.name for node in one.nodes}
        assert {node.name for node in other.nodes} - names <= {n.name for n in found.prologue}
    assert local.fx_graph.find_nodes(op="output")
    local.fx_graph.lint()


def test_layers_that_are_split_alike_share_a_template() -> None:
    templates = [block.template for block in cut(megatron("gpt", 2), 1).blocks]
    assert templates == [templates[0], *["Layer"] * 4, templates[-1]]


def test_a_layer_of_megatron_exchanges_twice_forward_and_twice_back() -> None:
    local = megatron("gpt", 2)
    layer = cut(local, 1).blocks[1]
    said = [node.meta["exchange"] for node in layer.nodes if "exchange" in node.meta]
    forward = [action for one in said for action, _ in one.forward]
    backward = [action for one in said for action, _ in one.backward]
    assert (forward, backward) == (["all-reduce"] * 2, ["all-reduce"] * 2)
    value = layer.outputs[0].meta["val"]
    assert all(nbytes == value.numel() * 4 for one in said for _, nbytes in one.forward)


def test_parameters_are_local_and_say_what_of() -> None:
    local = megatron("gpt", 2)
    qkv = local.by_name["layers.0.attention.qkv.weight"]
    out = local.by_name["layers.0.attention.out.weight"]
    norm = local.by_name["layers.0.ffn_norm.weight"]
    assert (qkv.shape, qkv.shard) == ((24, 16), Shard(0, (48,)))
    assert (out.shape, out.shard) == ((16, 8), Shard(1, (16,)))
    assert (norm.shape, norm.shard) == ((16,), None)
    assert tuple(local.tensors[qkv.name].shape) == (48, 16)


def test_sizes_of_views_are_local() -> None:
    views = [n for n in megatron("gpt", 2).fx_graph.nodes if str(n.target) == "aten.view.default"]
    assert list(views[0].args[1]) == [2, 12, 1, 24]
    assert tuple(views[0].meta["val"].shape) == (2, 12, 1, 24)


def test_views_of_what_a_conversion_has_left_in_another_order_may_copy() -> None:
    torch.manual_seed(0)
    config = JetMoeConfig(
        vocab_size=128, hidden_size=32, num_hidden_layers=1, num_key_value_heads=2, kv_channels=8,
        intermediate_size=64, num_local_experts=4, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    row = torch.randint(128, (4, 16))
    inputs, mesh = {"input_ids": row, "labels": row}, pc.Mesh(context=2)
    model = JetMoeForCausalLM(config).double()
    program = pc.compile(model, mesh, inputs, microbatches=1, progress=False)
    graph = local(program.problem, program.plan).graph
    (take,) = (node for node in conversions(graph) if node.name == "transpose_take")
    assert not take.all_input_nodes[0].meta["val"].is_contiguous()
    found = program.verify()
    assert found.ok, str(found)


def test_a_value_is_converted_once_for_all_who_need_it_in_a_layer() -> None:
    layer = cut(megatron("llama", 2), 1).blocks[1]
    readers = sorted(len(node.users) for node in layer.nodes if "exchange" in node.meta)
    assert readers[-2:] == [2, 3]  # gate and up; query, key and value


def summed(sums: tuple[str, ...]) -> list[Block]:
    """The blocks of GPT with these additions left to be added up over the ranks."""
    graph = whole("gpt")
    chosen = greedy(graph, 2, GPT)
    for node in graph.fx_graph.nodes:
        if node.name in sums:
            chosen[node] = Strategy((P, P), (P,))
    return list(cut(shard(graph, chosen, 2), 1).blocks)


def test_what_layers_read_from_outside_is_converted_there() -> None:
    blocks = summed(("add",))
    assert [node.name for node in blocks[0].outputs] == ["add_all_reduce"]
    assert [block.template for block in blocks[1:-1]] == ["Layer"] * 4


def test_tables_that_all_layers_read_in_pieces_are_taken_once() -> None:
    model, inputs = zoo.build("llama")
    program = pc.compile(model, pc.Mesh(context=2), inputs, progress=False)
    graph = program.problem.graph
    taken = {node.name: node for node in conversions(graph) if "take" in node.name}
    assert [*taken] == ["slice_1_take", "slice_2_take", "tokens_take"]
    names = variables(graph, cut(graph, 1))
    assert (names[taken["slice_1_take"]], names[taken["slice_2_take"]]) == ("cos", "sin")


def test_what_readers_need_otherwise_is_converted_where_each_needs_it() -> None:
    blocks = summed(("add", "add_1"))
    assert [node.name for node in blocks[0].outputs] == ["add"]
    assert "add_all_reduce" in {node.name for node in blocks[1].nodes}


def test_uneven_pieces_are_found_by_each_rank() -> None:
    torch.manual_seed(0)
    config = gpt.Config(layers=1, heads=2, hidden=16, vocabulary=97, sequence=12)
    inputs = {"tokens": zoo.tokens(), "labels": zoo.tokens()}
    graph = graph_of(gpt.GPT(config), inputs)
    table = shard(graph, greedy(graph, 4, GPT), 4).by_name["embedding.weight"]
    assert (table.shape, isinstance(table.shape[0], Piece)) == ((25, 16), True)


def test_one_rank_alone_has_the_graph_of_the_whole() -> None:
    graph = whole("gpt")
    local = shard(graph, replicated(graph, 2), 2)
    assert not conversions(local)
    assert [n.name for n in local.fx_graph.nodes] == [n.name for n in graph.fx_graph.nodes]


def test_nodes_without_a_strategy_take_what_there_is() -> None:
    graph = whole("gpt")
    chosen = greedy(graph, 2, GPT)
    free = {node: s for node, s in chosen.items() if "gelu" not in node.name}
    local = shard(graph, free, 2)
    gelu = next(node for node in local.fx_graph.nodes if node.name == "gelu")
    assert tuple(gelu.meta["val"].shape) == (2, 12, 32)


def test_other_strategies_are_another_program() -> None:
    graph = whole("gpt")
    prints = {shard(graph, greedy(graph, 2, pins), 2).fingerprint for pins in (GPT, {})}
    assert len(prints) == 2
