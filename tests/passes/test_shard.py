"""What the shard pass decides: the layers that people found by hand, pins, and plans read back."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import parcompiler as pc
from parcompiler.capture import capture
from parcompiler.device import Device, device
from parcompiler.errors import InfeasibleError, InputError, PlanError
from parcompiler.graph import Graph
from parcompiler.models import dlrm, gpt, llama, moe, resnet
from parcompiler.options import Options
from parcompiler.passes.shard import ShardPass, _states, assignment, decided
from parcompiler.passes.shard.candidates import Candidates
from parcompiler.passes.shard.ilp import ProgrammeSolver, decide
from parcompiler.passes.shard.ilp_builder import build
from parcompiler.passes.shard.local import local
from parcompiler.passes.shard.node_costs import ShardCosts
from parcompiler.passes.shard.pins import Pins
from parcompiler.passes.shard.plan_entries import check
from parcompiler.passes.shard.templates import fold
from parcompiler.plan import Plan, Shape, Sharding
from parcompiler.problem import Problem
from parcompiler.spmd.shard import shard
from parcompiler.spmd.sorting import SORTED

H100 = device("h100")
FEW = 1 << 16  # bytes: the gradients of biases and norms, statistics of losses


@cache
def captured(kind: str, hidden: int = 1024, sequence: int = 1024, **more: Any) -> Graph:
    """A language model without data."""
    module: Any = {"gpt": gpt, "llama": llama}[kind]
    sizes = {"layers": 2, "heads": hidden // 64, "vocabulary": 50257, **more}
    with torch.device("meta"):
        config = module.Config(hidden=hidden, sequence=sequence, **sizes)
        model = module.GPT(config) if kind == "gpt" else module.Llama(config)
    tokens = torch.zeros(1, sequence, dtype=torch.long)
    return capture(model, {"tokens": tokens, "labels": tokens})


def problem(graph: Graph, n: int = 2, on: Device = H100, p: int = 1, **options: Any) -> Problem:
    mesh = pc.Mesh(tensor=n, pipeline=p, device=on)
    return Problem(graph, mesh, Options(**{"microbatches": 4, **options}))


def plan(found: Sharding, n: int = 2, p: int = 1) -> Plan:
    return Plan("model", "0f", Shape(p, n), 4, sharding=found)


def said(graph: Graph, found: Sharding, n: int, layer: str) -> tuple[Counter[str], Counter[str]]:
    """The collectives of a layer, forward and backward, that move more than a few bytes."""
    forward, backward = Counter[str](), Counter[str]()
    for node in shard(graph, assignment(graph, plan(found, n)), n).fx_graph.nodes:
        stack = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
        if "exchange" in node.meta and any(path.endswith(layer) for path in stack):
            exchange = node.meta["exchange"]
            forward.update(action for action, nbytes in exchange.forward if nbytes > FEW)
            backward.update(action for action, nbytes in exchange.backward if nbytes > FEW)
    return forward, backward


def held(found: Sharding, template: str) -> dict[str, str]:
    """How the tensors of a template are held."""
    (entry,) = (entry for entry in found.templates if entry.template == template)
    return dict(line.split(": ", 1) for line in entry.tensors)


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("hidden", [1024, 2048])
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_a_layer_is_split_by_columns_and_rows_with_two_all_reduces(
    kind: str, hidden: int, n: int
) -> None:
    graph = captured(kind, hidden)
    found = decided(problem(graph, n))
    assert said(graph, found, n, "layers.1") == ({"all-reduce": 2}, {"all-reduce": 2})
    tensors = held(found, "Layer")
    columns = {"gpt": ("attention_qkv", "ffn_up"), "llama": ("attention_query", "ffn_gate")}[kind]
    assert all(tensors[f"{name}_weight"] == "S(0)" for name in columns)
    assert tensors["attention_out_weight"] == tensors["ffn_down_weight"] == "S(1)"
    assert tensors["ffn_norm_weight"] == "I"
    assert found.solution is not None
    assert (found.solution.status, round(found.solution.gap, 9)) == ("optimal", 0.0)


@pytest.mark.parametrize("rows", [2048, 8192])
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_long_sequences_are_split_between_the_products(kind: str, rows: int) -> None:
    graph = captured(kind, 8192, rows)
    found = decided(problem(graph, 4))
    pairs = {"reduce-scatter": 2, "all-gather": 2}
    assert said(graph, found, 4, "layers.1") == (pairs, pairs)
    assert held(found, "Layer")["ffn_up_weight"] == "S(0)"


@pytest.mark.parametrize(("kind", "part"), [("gpt", 0.985), ("llama", 0.995)])
def test_sequences_are_split_where_memory_is_tight(kind: str, part: float) -> None:
    graph = captured(kind)
    free = decided(problem(graph, recompute="none"))
    assert free.memory is not None
    tight = dataclasses.replace(H100, memory=round(part * free.memory / 0.9))
    found = decided(problem(graph, on=tight, recompute="none"))
    assert found.memory is not None
    assert found.memory <= 0.9 * tight.memory
    forward, _ = said(graph, found, 2, "layers.1")
    assert forward["reduce-scatter"] >= 1
    assert forward["all-gather"] >= 1


def test_all_memory_is_filled_before_blocks_run_again() -> None:
    """A sharding for a model with every block recomputed was twice as slow as one that fills the
    memory: it fits only where blocks are offloaded too."""
    with torch.device("meta"):
        config = gpt.Config(layers=3, heads=8, hidden=512, vocabulary=512, sequence=8192)
        tokens = torch.zeros(1, config.sequence, dtype=torch.long)
        model = gpt.GPT(config).bfloat16()
    options: dict[str, Any] = {"microbatches": 4, "vocabulary": "whole", "progress": False}
    program = pc.compile(model, pc.Mesh(tensor=2, device="h100"), (tokens, tokens), **options)
    roomy = program.simulate()
    small = dataclasses.replace(H100, memory=int(0.55 * max(roomy.peak_memory)))
    tight = pc.compile(program, pc.Mesh(tensor=2, device=small), **options)
    assert not tight.plan.offload
    assert tight.simulate().step_time < 1.5 * roomy.step_time


@pytest.mark.parametrize("n", [2, 4, 8])
def test_experts_are_split_with_two_all_reduces(n: int) -> None:
    with torch.device("meta"):
        config = moe.Config(layers=2, heads=16, hidden=1024, sequence=1024, experts=8)
        tokens = torch.zeros(1, 1024, dtype=torch.long)
        graph = capture(moe.MoE(config), {"tokens": tokens, "labels": tokens})
    found = decided(problem(graph, n))
    assert said(graph, found, n, "layers.1") == ({"all-reduce": 2}, {"all-reduce": 2})
    tensors = held(found, "Layer")
    stacked = ("up", "up_bias", "down", "down_bias")
    assert {tensors[f"ffn_experts_{name}"] for name in stacked} == {"S(0)"}
    assert tensors["ffn_router_scores_weight"] == "I"


@cache
def clicks() -> Graph:
    """DLRM for the data of Criteo's Kaggle challenge, without data."""
    config = dlrm.PRESETS["criteo"]
    with torch.device("meta"):
        return capture(dlrm.DLRM(config), clicked(config, 2048))


def clicked(config: dlrm.Config, rows: int) -> dict[str, torch.Tensor]:
    """A batch of a recommender."""
    return {
        "numbers": torch.zeros(rows, config.numbers),
        "categories": torch.zeros(rows, len(config.tables), dtype=torch.long),
        "labels": torch.zeros(rows),
    }


def tables(found: Sharding, graph: Graph, n: int) -> dict[int, str]:
    """How the table of each size is held."""
    split = shard(graph, assignment(graph, plan(found, n)), n).by_name
    whole = {name: item.shape for name, item in graph.by_name.items() if name.startswith("tables")}
    kinds = {shape: "I" for shape in whole.values()}
    for name, shape in whole.items():
        dims = [dim for dim in range(2) if split[name].shape[dim] != shape[dim]]
        kinds[shape] = f"S({dims[0]})" if dims else "I"
    return {shape[0]: kind for shape, kind in kinds.items()}


@pytest.mark.parametrize("n", [2, 4])
def test_large_tables_are_split_by_columns(n: int) -> None:
    """Ranks exchange columns for rows of the batch, which are less than sums of rows."""
    graph = clicks()
    found = tables(decided(problem(graph, n, microbatches=1)), graph, n)
    assert {kind for size, kind in found.items() if size > 1_000_000} == {"S(1)"}
    assert len(found) == 26


def test_a_pin_splits_tables_by_rows() -> None:
    graph = clicks()
    pinned = problem(graph, microbatches=1, sharding={"tables.2.weight": "S(0)"})
    assert tables(decided(pinned), graph, 2)[10131227] == "S(0)"


@pytest.mark.parametrize("n", [8, 16])
def test_the_recommender_of_mlperf_is_planned_as_by_experts(n: int) -> None:
    """Large tables in pieces, the rest on rows of the batch, one all-to-all of rows between."""
    config = dlrm.PRESETS["mlperf"]
    with torch.device("meta"):
        graph = capture(dlrm.DLRM(config), clicked(config, 65536))
    found = decided(problem(graph, n, microbatches=1, on=device("a100-80g")))
    kinds = tables(found, graph, n)
    assert {kind for size, kind in kinds.items() if size > 10_000_000} == {"S(1)"}
    lines = [line for template in found.templates for line in template.nodes]
    products = [line for line in lines if line.startswith(("linear", "matmul"))]
    assert len(products) >= 8
    assert all(": S(0) " in line and "-> S(0)" in line for line in products)


def test_what_is_in_flight_and_optimizer_states_count() -> None:
    graph = captured("gpt")
    memory = [
        decided(problem(graph, p=p, microbatches=m, optimizer=optimizer)).memory or 0
        for p, m, optimizer in ((1, 4, "adamw"), (1, 4, "sgd"), (2, 4, "adamw"), (2, 1, "adamw"))
    ]
    assert memory[1] < memory[0]
    assert memory[3] < memory[2] < memory[0] * 1.2


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_what_runs_again_is_not_in_flight(kind: str) -> None:
    whole = problem(captured(kind, 256, 256, vocabulary=512))
    memory, saved = [], []
    for again in (False, True):
        found = decided(dataclasses.replace(whole, selective=again))
        split = local(whole, dataclasses.replace(plan(found), selective=again))
        memory.append(found.memory or 0)
        saved.append(sum(split.priced(split.levels[0]).saved))
    assert saved[1] < 0.8 * saved[0]
    assert memory[0] - memory[1] == pytest.approx(saved[0] - saved[1], rel=0.02)


class Experts(nn.Module):
    """Experts whose weights are stacked; each token goes to two."""

    def __init__(self, experts: int, hidden: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, hidden, 2 * hidden))
        self.down = nn.Parameter(torch.empty(experts, 2 * hidden, hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        score, index = self.router(rows).softmax(-1).topk(2)
        gate = torch.zeros(len(rows), len(self.up), device=x.device).scatter(1, index, score)
        each = rows.unsqueeze(0).expand(len(self.up), -1, -1)
        each = torch.bmm(F.gelu(torch.bmm(each, self.up)), self.down)
        y = (each * gate.t().unsqueeze(-1)).sum(0)
        return x + y.view_as(x)


class Mixture(nn.Module):
    def __init__(self, experts: int = 8, hidden: int = 1024) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts(experts, hidden) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("n", [2, 8])
def test_stacked_experts_are_split_by_experts(n: int) -> None:
    with torch.device("meta"):
        model = Mixture()
    graph = capture(model, {"x": torch.zeros(1, 512, 1024)})
    tensors = held(decided(problem(graph, n)), "Experts")
    assert tensors["up"] == tensors["down"] == "S(0)"


def test_states_in_pieces_on_many_data_ranks_are_not_rounded_up() -> None:
    graph = captured("gpt", 256, 64)
    wide = Problem(graph, pc.Mesh(tensor=2, data=256, device=H100), Options(microbatches=4))
    states = _states(wide)
    told = sum(states[item.name].nbytes * item.numel for item in graph.parameters)
    assert told == pytest.approx(sum(map(wide.state_bytes, graph.parameters)))
    assert all(states[item.name].seconds > 0 for item in graph.parameters if item.trainable)


def told(layers: int) -> tuple[Candidates, Any]:
    graph = captured("gpt", 256, 64, layers=layers, vocabulary=512)
    candidates = Candidates(fold(graph), ShardCosts(graph, H100, 2))
    return candidates, build(candidates, Pins({}, {}), {}, None).programme


def test_the_programme_of_many_layers_is_that_of_two() -> None:
    few, many = told(2)[1], told(12)[1]
    models = [ProgrammeSolver(data).model for data in (few, many)]
    sizes = [(len(model.variables), len(model.rows)) for model in models]
    assert sizes[0] == sizes[1]
    assert [len(x.seconds) for x in few.decisions] == [len(x.seconds) for x in many.decisions]
    layers = [decide(data).solution.objective for data in (few, many)]
    assert 3 < layers[1] / layers[0] < 6
    assert decide(few).choices == decide(many).choices


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_the_programme_of_a_template_is_solved_within_a_second(kind: str) -> None:
    graph = captured(kind)
    candidates = Candidates(fold(graph), ShardCosts(graph, H100, 4))
    data = build(candidates, Pins({}, {}), {}, None).programme
    start = time.process_time()
    assert decide(data).solution.status == "optimal"
    assert time.process_time() - start < 1


def test_the_plan_of_many_layers_says_each_once() -> None:
    graphs = [captured("gpt", 256, 64, layers=layers, vocabulary=512) for layers in (2, 12)]
    few, many = (plan(decided(problem(graph))).to_json() for graph in graphs)
    assert len(few.splitlines()) == len(many.splitlines())


@pytest.mark.parametrize("n", [2, 4])
def test_a_vocabulary_that_does_not_divide_is_split(n: int) -> None:
    graph = captured("gpt", 2048, tied=True)
    found = decided(problem(graph, n))
    lines = [line for entry in found.templates for line in entry.nodes]
    assert "cross_entropy_loss: S(1) R -> I, classes" in lines
    assert "embedding: S(0) R -> P, vocabulary lookup" in lines
    whole = [
        exchange
        for node in shard(graph, assignment(graph, plan(found, n)), n).fx_graph.nodes
        if (exchange := node.meta.get("exchange"))
        and any(nbytes >= 50257 * 1024 * 4 for _, nbytes in (*exchange.forward, *exchange.backward))
    ]
    assert whole == []  # neither logits nor a table are ever put together


def test_what_nothing_divides_is_whole_and_said_to_be() -> None:
    graph = captured("gpt", 256, 64, heads=4, vocabulary=512)
    found = decided(problem(graph, 7))
    assert all(s.is_replicated for s in assignment(graph, plan(found, 7)).values() if s.outputs)
    (layer,) = (entry for entry in found.templates if entry.template == "Layer")
    wanted = "7 divides no dimension of 1x64x256 and 768x256 and 768 that aten.linear.default"
    assert any(line.startswith(f"linear: {wanted}") for line in layer.whole)
    assert not [line for entry in decided(problem(graph)).templates for line in entry.whole]


def test_without_a_tensor_axis_nothing_is_decided() -> None:
    before = Plan("model", "0f", Shape(2), 4)
    assert ShardPass().run(problem(captured("gpt"), 1, p=2), before) is before
    assert "sharding" not in before.to_json()


def test_the_same_problem_gives_the_same_bytes() -> None:
    graph = captured("llama")
    start = Plan("model", "0f", Shape(1, 2), 4)
    texts = {ShardPass().run(problem(graph), start).to_json() for _ in range(2)}
    assert len(texts) == 1
    (text,) = texts
    assert Plan.from_json(text).to_json() == text


# Pins


def test_pins_are_kept() -> None:
    graph = captured("gpt")
    found = decided(problem(graph, sharding={"*.ffn.up.*": "R", "*.ffn.down.*": "I"}))
    tensors = held(found, "Layer")
    assert tensors["ffn_up_weight"] == tensors["ffn_down_weight"] == "I"
    assert tensors["attention_qkv_weight"] == "S(0)"
    rows = decided(problem(graph, sharding={"*.ffn.up.weight": "S(1)"}))
    assert held(rows, "Layer")["ffn_up_weight"] == "S(1)"


def test_a_pin_of_one_layer_is_of_that_layer_alone() -> None:
    graph = captured("gpt", layers=4)
    found = decided(problem(graph, sharding={"layers.2.ffn.*": "R"}))
    entries = [entry for entry in found.templates if entry.template == "Layer"]
    assert [entry.blocks for entry in entries] == [
        ("layers.0", "layers.1", "layers.3"),
        ("layers.2",),
    ]
    chosen = assignment(graph, plan(found))
    parameters = {item.name: item for item in shard(graph, chosen, 2).parameters}
    assert parameters["layers.2.ffn.up.weight"].shape == (4096, 1024)
    assert parameters["layers.3.ffn.up.weight"].shape == (2048, 1024)


def test_a_pin_that_names_nothing_is_refused() -> None:
    with pytest.raises(InputError, match=r"pins '\*\.mlp\.\*', which names no parameter"):
        decided(problem(captured("gpt"), sharding={"*.mlp.*": "S(0)"}))


def test_pins_that_no_strategy_keeps_together_are_named_without_the_others() -> None:
    pins = {"*.ffn.up.weight": "S(0)", "*.qkv.weight": "S(0)", "*.ffn.up.bias": "R"}
    with pytest.raises(InfeasibleError) as caught:
        decided(problem(captured("gpt"), sharding=pins))
    assert str(caught.value) == (
        "sharding pins '*.ffn.up.weight': 'S(0)' and '*.ffn.up.bias': 'R' exclude each other for "
        "layers.0.ffn.up.bias, layers.0.ffn.up.weight: loosen one of them"
    )


def test_pins_that_exclude_each_other_are_named() -> None:
    graph = captured("gpt")
    pins = {"*.ffn.up.weight": "S(0)", "layers.*.up.*": "R", "*.attention.*": "R"}
    with pytest.raises(InfeasibleError) as caught:
        decided(problem(graph, sharding=pins))
    demands = "'*.ffn.up.weight': 'S(0)' and 'layers.*.up.*': 'R'"
    where = "layers.0.ffn.up.weight (4096 x 1024)"
    assert f"{demands}, which exclude each other for {where}" in str(caught.value)
    assert "attention" not in str(caught.value)
    assert "can only" not in str(caught.value)


def test_of_pins_of_a_parameter_the_one_that_no_rule_can_keep_is_named() -> None:
    pins = {"*": "R", "*.ffn_norm.weight": "S(0)"}
    with pytest.raises(InfeasibleError, match=r"can only be R") as caught:
        decided(problem(captured("gpt"), sharding=pins))
    assert "'*': 'R'" not in str(caught.value)


def test_a_pin_that_no_rule_can_keep_is_refused() -> None:
    with pytest.raises(InfeasibleError, match=r"layers.0.ffn_norm.weight \(1024\) can only be R"):
        decided(problem(captured("gpt"), sharding={"*.ffn_norm.weight": "S(0)"}))


@pytest.mark.parametrize("pins", ["S(0)", {"*": "P"}, {"*": "S(-1)"}, {"*": 0}, 3])
def test_what_is_no_pin_is_refused(pins: Any) -> None:
    with pytest.raises(InputError):
        Options(microbatches=1, sharding=pins)


def test_pins_that_only_together_cannot_be_kept_are_named() -> None:
    """Tied tables have one placement, and pieces of a matrix fit those of its bias."""
    graph = captured("gpt")
    pins = {"*.ffn.up.weight": "S(1)", "*.ffn.up.bias": "S(0)", "*.qkv.weight": "S(0)"}
    with pytest.raises(InfeasibleError) as caught:
        decided(problem(graph, sharding=pins))
    assert "'*.ffn.up.weight': 'S(1)' and '*.ffn.up.bias': 'S(0)' exclude" in str(caught.value)


@pytest.mark.parametrize("n", [1, 2])
def test_a_plan_that_is_given_keeps_to_the_pins(n: int) -> None:
    mesh = pc.Mesh(tensor=n, device=H100)
    program = pc.compile(captured("gpt"), mesh, microbatches=4, schedule="1f1b")
    pins = {"*.ffn.up.weight": "S(0)", "*.ffn_norm.*": "R"}
    again = pc.compile(program, mesh, plan=program.plan, sharding=pins)
    assert again.plan == program.plan
    with pytest.raises(InputError, match="names no parameter"):
        pc.compile(program, mesh, plan=program.plan, sharding={"*.mlp.*": "R"})


def test_a_plan_that_is_given_against_a_pin_is_refused() -> None:
    mesh = pc.Mesh(tensor=2, device=H100)
    program = pc.compile(captured("gpt"), mesh, microbatches=4, schedule="1f1b")
    wanted = r"layers.0.ffn.up.weight \(4096 x 1024\) as S\(0\), but .* '\*.up.weight': 'S\(1\)'"
    with pytest.raises(PlanError, match=wanted):
        pc.compile(program, mesh, plan=program.plan, sharding={"*.up.weight": "S(1)"})


def test_a_table_that_is_pinned_is_not_spread_over_all_ranks() -> None:
    mesh, pins = pc.Mesh(2, 2, device=H100), {"layers.*.ffn.up.weight": "S(0)"}
    given: dict[str, Any] = {"microbatches": 4, "schedule": "1f1b"}
    program = pc.compile(
        captured("gpt", tied=False), mesh, vocabulary="vocab-2", sharding=pins, **given
    )
    again = pc.compile(program, mesh, plan=program.plan, sharding=pins, **given)
    assert again.plan == program.plan
    pins = {"head.weight": "S(1)"}
    with pytest.raises(PlanError, match=r"rows of head.weight on all ranks .* sharding pins 'head"):
        pc.compile(program, mesh, plan=program.plan, sharding=pins, **given)
    choice = pc.compile(program, mesh, vocabulary="vocab-2", sharding=pins, **given).plan.vocabulary
    assert choice is not None
    assert (choice.lookups, choice.head) == (("embedding.weight",), None)
    assert "head.weight: a pin of sharding= says how tensor ranks hold it" in choice.kept


# Plans that were edited


def edited(found: Sharding, before: str, after: str) -> Plan:
    text = plan(found).to_json()
    assert before in text
    return Plan.from_json(text.replace(before, after, 1))


def test_an_edited_plan_is_read() -> None:
    graph = captured("gpt")
    found = decided(problem(graph))
    changed = edited(found, '"gelu: S(2) -> S(2)"', '"gelu: R -> R"')
    gelu = next(node for node in graph.fx_graph.nodes if node.name == "gelu")
    assert str(assignment(graph, changed)[gelu]) == "R -> R"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("gelu: S(2) -> S(2)", "gelu: S(7) -> S(7)", "no strategy of node 'gelu'"),
        ("gelu: S(2) -> S(2)", "gelo: S(2) -> S(2)", "where node 'gelu' stands"),
        ("gelu: S(2) -> S(2)", "gelu", "where node 'gelu' stands|no strategy"),
        ("add_2: I I -> I", "add_2: R R -> R", "needs 'add_2' as I, which is R"),
        ('"template": "Layer"', '"template": "Player"', "nothing of block 'layers.0'"),
        ('"level": 1', '"level": 0', "level 0"),
    ],
)
def test_a_wrong_edit_is_refused(before: str, after: str, message: str) -> None:
    graph = captured("gpt")
    with pytest.raises(PlanError, match=message):
        assignment(graph, edited(decided(problem(graph)), before, after))


@pytest.mark.parametrize(
    "changed", [{"template": "Leier"}, {"blocks": ("layer.0",)}, {"nodes": ()}]
)
def test_an_entry_that_no_block_follows_is_refused(changed: dict[str, Any]) -> None:
    graph = captured("gpt")
    found = decided(problem(graph))
    (layer,) = [entry for entry in found.templates if entry.template == "Layer"]
    more = dataclasses.replace(
        found, templates=(*found.templates, dataclasses.replace(layer, **changed))
    )
    with pytest.raises(PlanError, match=r"has an entry of template 'L\w+' that no block follows"):
        assignment(graph, plan(more))


def test_a_plan_of_another_form_is_refused() -> None:
    text = plan(decided(problem(captured("gpt")))).to_json()
    with pytest.raises(InputError, match=r"plan.sharding.level"):
        Plan.from_json(text.replace('"level": 1', '"level": "one"'))
    with pytest.raises(InputError, match="unknown field"):
        Plan.from_json(text.replace('"whole"', '"holes"', 1))


class Distinct(nn.Module):
    """The number of distinct values is a size that depends on the data: no tensor, but a node."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        count: int = torch.unique(y.detach().sign()).numel()
        return y.square().mean() * count


def test_a_size_that_depends_on_the_data_saves_nothing() -> None:
    program = pc.compile(Distinct(), pc.Mesh(tensor=2), {"x": torch.randn(4, 8)}, microbatches=2)
    assert program.plan.sharding is not None


@pytest.mark.parametrize("where", ["in the layer", "before the layer"])
def test_a_fault_of_one_layer_is_found_among_layers_that_are_alike(where: str) -> None:
    graph = captured("gpt", hidden=128, sequence=64, layers=6)
    blocks = [block for one in fold(graph, level=1).templates for block in one.blocks]
    assigned = assignment(graph, plan(decided(problem(graph))))
    check(graph, assigned, blocks=blocks)
    (block,) = (block for block in blocks if block.name == "layers.3")
    if where == "in the layer":
        node = next(node for node in block.nodes if len(assigned[node].inputs) == 1)
        other = dataclasses.replace(assigned[node], inputs=(SORTED,))
    else:
        node = block.inputs[0]
        other = dataclasses.replace(assigned[node], outputs=(SORTED,))
    with pytest.raises(PlanError, match="there is no such conversion"):
        check(graph, {**assigned, node: other}, blocks=blocks)


def test_pieces_are_smaller_where_whole_blocks_that_run_again_do_not_fit() -> None:
    """With the batch, such a block was more than the memory, though pins fitted the model."""
    config = resnet.PRESETS["tiny"]
    with torch.device("meta"):
        size, model = config.image_size, resnet.ResNet(config)
        images = torch.zeros(16, config.in_channels, size, size)
        inputs = images, torch.zeros(16, dtype=torch.long)
    small = dataclasses.replace(device("h100"), memory=1_080_000)
    program = pc.compile(
        model, pc.Mesh(tensor=4, device=small), inputs, microbatches=4, optimizer="sgd",
        progress=False,
    )  # fmt: skip
    assert max(program.simulate().peak_memory) <= small.memory
