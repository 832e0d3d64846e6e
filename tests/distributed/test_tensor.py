"""On several tensor ranks a program computes what the model computes: loss, gradients, a step.

First with strategies chosen by hand or at random, so that what carries them out is proved for more
than what a solver would choose; then with those of the solver, on a device whose links cost
nothing, so that it splits even tiny models.
"""

import dataclasses
import json
from collections import Counter
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import fx

import parcompiler as pc
from parcompiler.device import Link, device
from parcompiler.graph import Graph
from parcompiler.models import dlrm, gpt
from parcompiler.spmd.placement import S
from parcompiler.spmd.rules import strategies
from parcompiler.spmd.strategy import Strategy
from tests import zoo
from tests.distributed import failing, forked, totals
from tests.distributed.sharding import sharded
from tests.spmd import choosing

MEGATRON = partial(choosing.greedy, pins={**choosing.LLAMA, **choosing.GPT, **choosing.GPT2})
CHEAP = dataclasses.replace(
    device("cpu"), name="cheap", link=Link(1e13, 1e-10), launch_overhead=1e-9
)
STAYING = dataclasses.replace(CHEAP, link=Link(1e10, 1e-10))  # bytes of weights cost something
BY_HAND = [
    ("gpt-tied", 1, 4, 1), ("llama", 1, 2, 1), ("t5", 2, 2, 1), ("hf-gpt2", 1, 2, 1),
    ("gpt-dropout", 2, 2, 2),
]  # fmt: skip
AT_RANDOM = [
    ("gpt-dropout", 1, 1, 2), ("resnet", 0, 1, 2), ("t5", 1, 2, 2), ("bert", 0, 1, 2),
    ("hf-llama", 0, 1, 4),
]  # fmt: skip
MODELS = (
    "gpt-tied", "gpt-dropout", "llama", "t5", "bert", "resnet", "moe", "dlrm",
    "hf-gpt2", "hf-mixtral",
)  # fmt: skip
MESHES = [(1, 2, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 2, 2)]  # pipeline, tensor, data
OFTEN = [
    ("gpt-dropout", 2, 2, 1), ("resnet", 1, 2, 1), ("hf-gpt2", 1, 4, 1), ("t5", 1, 2, 2),
    ("moe", 2, 2, 1), ("dlrm", 1, 4, 1),
]  # fmt: skip


def check(program: pc.Program) -> None:
    found = program.verify()
    assert found.ok, str(found)
    assert found.lifted is not None
    assert max(found.loss_error, found.gradient_error, found.parameter_error) <= 1e-9


def exchanges(program: pc.Program) -> int:
    return sum("exchange" in node.meta for node in program.lowered.graph.fx_graph.nodes)


@pytest.mark.parametrize(("name", "pipeline", "tensor", "data"), BY_HAND)
def test_megatron_by_hand_equals_one_process(
    name: str, pipeline: int, tensor: int, data: int
) -> None:
    program = sharded(name, MEGATRON, pc.Mesh(pipeline=pipeline, tensor=tensor, data=data))
    assert exchanges(program)
    check(program)


def test_replicated_ranks_are_bitwise_equal() -> None:
    program = sharded("gpt-dropout", choosing.replicated, pc.Mesh(tensor=2))
    assert program.verify().native.bitwise


@pytest.mark.parametrize(("name", "seed", "pipeline", "tensor"), AT_RANDOM)
def test_strategies_at_random_equal_one_process(
    name: str, seed: int, pipeline: int, tensor: int
) -> None:
    chooser = partial(choosing.at_random, seed=seed)
    check(sharded(name, chooser, pc.Mesh(pipeline=pipeline, tensor=tensor)))


def test_gathers_that_run_again_equal_one_process() -> None:
    chooser = partial(choosing.at_random, seed=0)
    program = sharded("llama", chooser, pc.Mesh(tensor=2), selective=True)
    calls = program.lowered.stages[0].calls
    names = Counter(str(node.target) for call in calls for node in call.again)
    assert names["runtime.all_gather"]
    check(program)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("name", MODELS)
def test_many_strategies_at_random_equal_one_process(name: str, seed: int) -> None:
    chooser = partial(choosing.at_random, seed=seed)
    check(sharded(name, chooser, pc.Mesh(tensor=2)))


@cache
def odd(*, tied: bool) -> pc.Program:
    """Nothing divides evenly: 97 words, 7 positions, 3 rows, 34 units."""
    torch.manual_seed(0)
    config = gpt.Config(
        layers=2, heads=4, hidden=16, vocabulary=97, sequence=7, ffn=34, dropout=0.1, tied=tied
    )
    tokens = torch.randint(97, (3, 8))
    inputs = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:].clone()}
    return pc.compile(gpt.GPT(config).train(), pc.Mesh(), inputs, microbatches=1)


def test_an_uneven_vocabulary_is_split_over_four() -> None:
    program = sharded(odd(tied=True), MEGATRON, pc.Mesh(tensor=4))
    table = program.lowered.graph.by_name["embedding.weight"]
    assert (table.shape, table.shard is None) == ((25, 16), False)
    check(program)


@pytest.mark.parametrize("seed", [0, 2])
def test_uneven_pieces_cross_stages(seed: int) -> None:
    chooser = partial(choosing.at_random, seed=seed)
    check(sharded(odd(tied=False), chooser, pc.Mesh(pipeline=2, tensor=2)))


def compiled(name: str, pipeline: int, tensor: int, data: int) -> None:
    mesh = pc.Mesh(pipeline=pipeline, tensor=tensor, data=data, device=CHEAP)
    program = pc.compile(zoo.captured(name), mesh, microbatches=2)
    assert exchanges(program), "nothing is split"
    check(program)


@pytest.mark.parametrize(("name", "pipeline", "tensor", "data"), OFTEN)
def test_a_compiled_model_equals_one_process(
    name: str, pipeline: int, tensor: int, data: int
) -> None:
    compiled(name, pipeline, tensor, data)


def test_a_recommender_has_columns_of_its_tables_and_rows_of_the_batch() -> None:
    torch.manual_seed(0)
    config = dlrm.Config(tables=(4096, 2048, 7), hidden=16, bottom=(8,), top=(8,))
    rows = 256
    inputs = {
        "numbers": torch.randn(rows, config.numbers),
        "categories": torch.stack([torch.randint(size, (rows,)) for size in config.tables], 1),
        "labels": torch.randint(2, (rows,)).float(),
    }
    mesh = pc.Mesh(tensor=4, device=CHEAP)
    program = pc.compile(dlrm.DLRM(config), mesh, inputs, microbatches=2)
    assert program.plan.sharding is not None
    chosen = {entry.template: entry for entry in program.plan.sharding.templates}
    assert {chosen[name].tensors for name in ("Embedding", "Embedding_2")} == {("weight: S(1)",)}
    linear = [line for entry in chosen.values() for line in entry.nodes if "linear" in line]
    assert len(linear) == 4
    assert all(line.endswith(": S(0) R R -> S(0)") for line in linear)
    targets = Counter(str(node.target) for node in program.lowered.graph.fx_graph.nodes)
    assert targets["runtime.all_to_all"] == 2
    check(program)


def test_experts_of_one_grouped_product_are_on_two_ranks() -> None:
    pins = {"*.experts.*": "S(0)"}
    mesh = pc.Mesh(tensor=2, device=STAYING)
    program = pc.compile(zoo.captured("hf-mixtral"), mesh, microbatches=2, sharding=pins)
    targets = [str(node.target) for node in program.lowered.graph.fx_graph.nodes]
    assert targets.count("runtime.own_experts") >= 4  # layers
    held = program.lowered.graph.by_name["model.layers.0.mlp.experts.gate_up_proj"]
    assert held.shape[0] == 2
    check(program)


@pytest.mark.sweep
@pytest.mark.parametrize("tensor", [2, 3, 4])
@pytest.mark.parametrize("name", ["moe", "hf-mixtral"])
def test_experts_are_split_over_any_ranks(name: str, tensor: int) -> None:
    """Four experts do not divide by three: there the rest decides."""
    pins = {"*.experts.*": "S(0)"} if 4 % tensor == 0 else "auto"
    mesh = pc.Mesh(tensor=tensor, device=STAYING)
    check(pc.compile(zoo.captured(name), mesh, microbatches=2, sharding=pins))


@pytest.mark.sweep
@pytest.mark.parametrize(("pipeline", "tensor", "data"), MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_every_compiled_model_equals_one_process(
    name: str, pipeline: int, tensor: int, data: int
) -> None:
    compiled(name, pipeline, tensor, data)


@pytest.mark.parametrize(
    ("schedule", "recompute"), [("zb-h1", "full"), ("zb-v", "none"), ("pipedream", "none")]
)
def test_schedules_and_recomputation_work_on_pieces(schedule: str, recompute: str) -> None:
    name = "gpt" if schedule == "pipedream" else "gpt-dropout"
    mesh = pc.Mesh(pipeline=2, tensor=2, device=CHEAP)
    program = pc.compile(
        zoo.captured(name), mesh, microbatches=3, schedule=schedule, recompute=recompute
    )
    assert exchanges(program)
    check(program)


def test_a_standalone_folder_trains_on_tensor_ranks(tmp_path: Path) -> None:
    program = sharded("gpt-dropout", MEGATRON, pc.Mesh(tensor=2))
    program.export(tmp_path / "out", standalone=True)
    text = forked.run(2, forked.script, str(tmp_path / "out" / "main.py"), "--steps", "2")
    assert "step 1 loss" in text


def rows_of_products(graph: Graph, n: int) -> dict[fx.Node, Strategy]:
    """Each rank multiplies some rows by whole matrices, and has a summand of their gradients."""
    chosen = choosing.replicated(graph, n)
    for node in chosen:
        if node.target is torch.ops.aten.linear.default:
            open_to = strategies(node, n, differentiable=graph.differentiable)
            chosen[node] = next(item for item in open_to if item.inputs[0] == S(0))
    return chosen


def test_the_gradient_of_a_whole_parameter_is_added_up_once_a_step(tmp_path: Path) -> None:
    program = sharded("gpt", rows_of_products, pc.Mesh(tensor=2), microbatches=3)
    read = [node.all_input_nodes[0] for node in program.lowered.graph.fx_graph.nodes
            if str(node.target) == "runtime.fan_out"]  # fmt: skip
    shapes = Counter(str(list(node.meta["val"].shape)) for node in read)
    assert len(shapes) > 4
    check(program)
    program.export(tmp_path / "out")
    text = forked.run(2, totals.main, str(tmp_path / "out"))
    found = json.loads(next(line for line in text.splitlines() if line.startswith("{")))
    assert {shape: found[shape] for shape in shapes} == shapes


WAYS = (
    "label out of range",
    "exception in a module on rank 0",
    "a batch more than rank 1",
)


@cache
def raised(folder: Path) -> str:
    """What ranks print that fail in some ways."""
    program = sharded("gpt", MEGATRON, pc.Mesh(tensor=2))
    program.export(folder)
    return forked.run(2, failing.main, str(folder), *WAYS)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    text = raised(tmp_path_factory.mktemp("failing") / "out")
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_fails_ends_the_others_in_a_collective(
    way: str, answers: list[dict[str, str]]
) -> None:
    own = [answer for answer in answers if answer["way"] == way]
    assert len(own) == 2
    assert sum(bool(answer["raised"]) for answer in own) >= (1 if "more" in way else 2), own
    assert all(float(answer["s"]) < 20 for answer in own)
