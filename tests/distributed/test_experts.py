"""On expert ranks, each with a piece of the experts, a program computes what the model does.

That tokens are exchanged is read from the emitted layers, and that pieces are held from shapes.
"""

import copy
import dataclasses
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import parcompiler as pc
from parcompiler.device import Link, device
from parcompiler.instruction import EXPERTS, Kind
from parcompiler.models import moe
from parcompiler.request import check_fits, check_published
from parcompiler.runtime.checkpoint import folder as folders
from parcompiler.verification.batches import random_batch
from parcompiler.verification.pool import Job, pool
from tests import zoo
from tests.architecture_text import CAUSAL
from tests.distributed import checkpoints, forked, recipe
from tests.distributed.predicting import predicted
from tests.verifier.edits import texts

CHEAP = dataclasses.replace(
    device("cpu"), name="cheap", link=Link(1e13, 1e-10), launch_overhead=1e-9
)  # so that tensor ranks split even tiny models
TENSOR = {"data": 2, "expert": 2, "tensor": 2, "device": CHEAP}
FEW: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("moe", {"data": 4, "expert": 2}, {"compression": "bf16"}),
    ("moe", {"context": 2, "expert": 2}, {}),
    ("hf-mixtral", {"context": 2, "expert": 2, "pipeline": 2}, {"recompute": "full", "zero": 1}),
    ("gpt-oss", {"context": 2, "data": 2, "expert": 2}, {}),
    ("hf-mixtral", {"pipeline": 2, "data": 2, "expert": 2}, {"recompute": "full", "zero": 2}),
    ("gpt-oss", TENSOR, {"zero": 1}),
]
MODELS = ("moe", "hf-mixtral", "qwen3-moe", "olmoe", "gpt-oss", "deepseek-v3")
LAYOUTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"data": 2, "expert": 2}, {}),
    ({"data": 4, "expert": 4}, {}),
    ({"data": 4, "expert": 2}, {"recompute": "full"}),
    ({"pipeline": 2, "data": 2, "expert": 2}, {"schedule": "zb-h1"}),
    ({"data": 4, "expert": 2}, {"zero": 1}),
    ({"pipeline": 2, "data": 2, "expert": 2}, {"zero": 2}),
    ({"data": 4, "expert": 2}, {"zero": 3, "recompute": "full"}),
    ({"data": 2, "expert": 2}, {"zero": 3}),
    (TENSOR, {"zero": 3}),
    (TENSOR, {"sharding": {"*experts*[!s]": "S(0)"}}),
    ({**TENSOR, "pipeline": 2}, {"schedule": "zb-h1"}),
    ({"data": 4, "expert": 2}, {"updates": "parameter-server"}),
    ({"data": 4, "expert": 2}, {"compression": "bf16", "zero": 2}),
    ({"data": 2, "expert": 2}, {"compression": "fp16"}),
    ({"context": 2, "data": 2, "expert": 2}, {"zero": 2}),
    ({"context": 3, "data": 2, "expert": 2}, {"recompute": "full"}),
    ({**TENSOR, "data": 1, "context": 2}, {"zero": 3}),
]


OPTIONS: dict[str, Any] = {
    "microbatches": 2,
    "precision": "fp64",
    "vocabulary": "whole",
    "progress": False,
}


@cache
def captured(name: str, *outputs: str) -> pc.Program:
    torch.manual_seed(0)
    model, inputs, *_ = zoo.build(name) if name in zoo.ALL else CAUSAL[name]()
    return pc.compile(model.train(), pc.Mesh(), inputs, outputs=outputs, **OPTIONS)


def compiled(name: str, mesh: dict[str, Any], **options: Any) -> pc.Program:
    return pc.compile(captured(name), pc.Mesh(**mesh), **{**OPTIONS, **options})


def check(program: pc.Program) -> None:
    found = program.verify()
    assert found.ok, str(found)
    assert (program.lowered.updates.compression is not None) == ("compressed" in found.note)
    assert max(found.loss_error, found.gradient_error, found.parameter_error) <= 1e-9


@pytest.mark.parametrize(("name", "mesh", "options"), FEW)
def test_expert_ranks_train_as_the_model_does(
    name: str, mesh: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    program = compiled(name, mesh, **options)
    program.export(tmp_path)
    text = "".join(path.read_text() for path in sorted(tmp_path.glob("stage_*.py")))
    assert ("runtime.all_to_all(" if name == "moe" else "runtime.dispatch(") in text
    pieces = [item for item in program.lowered.graph.parameters if item.experts]
    assert pieces
    assert all(item.shape[0] * mesh["expert"] == item.experts for item in pieces)
    assert any(item.shard for item in pieces) == ("tensor" in mesh)
    check(program)


@pytest.mark.parametrize(
    ("name", "mesh", "options", "words"),
    [
        ("hf-mixtral", {"data": 8, "expert": 8}, {}, r"4 experts .*more ranks than experts"),
        ("hf-mixtral", {"data": 3, "expert": 3}, {}, r"expert=3 does not divide the 4 experts"),
        (
            "gpt",
            {"data": 2, "expert": 2},
            {},
            r"expert=2 divides experts, and none were found in GPT",
        ),
        ("moe", {"data": 2, "expert": 2}, {"updates": "local"}, r"take updates='all-reduce'"),
    ],
)
def test_what_expert_ranks_cannot_do_is_refused_by_name(
    name: str, mesh: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(pc.InputError, match=words):
        compiled(name, mesh, **options)


def test_context_ranks_exchange_nothing_of_a_mixture_to_sort_it() -> None:
    program = compiled("hf-mixtral", {"context": 2})
    mixture = [
        node
        for node in program.lowered.graph.fx_graph.nodes
        if "mlp.experts" in str(node.meta.get("nn_module_stack"))
    ]
    assert any("sort" in node.name for node in mixture)
    assert not any("exchange" in node.meta for node in mixture)
    assert program.plan.context is not None
    (layer,) = (x for x in program.plan.context.templates if x.template == "MixtralDecoderLayer")
    assert layer.whole == ()  # nor is anything computed by all


def test_experts_that_draw_by_row_are_not_sorted_by_context_ranks() -> None:
    torch.manual_seed(0)
    model, inputs = zoo.build("hf-mixtral")
    for module in model.modules():
        if hasattr(module, "gate_up_proj"):
            module.act_fn = torch.nn.Dropout(0.5)
    program = pc.compile(model, pc.Mesh(context=2), inputs, **OPTIONS)
    check(program)
    with pytest.raises(pc.InputError, match=r"of which context ranks have pieces .*context=1"):
        pc.compile(program, pc.Mesh(context=2, expert=2), **OPTIONS)


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_a_mixture_without_values_counts_its_tokens_on_cpus_too(device: str) -> None:
    """It is captured as on a GPU, which counts integers."""
    real, inputs = zoo.build("hf-mixtral")
    with torch.device("meta"):
        model = type(real)(real.config)
    program = pc.compile(model, pc.Mesh(pipeline=2, device=device), inputs, **OPTIONS)
    check(program)


class ExpertsInside(torch.nn.Module):
    """A mixture whose parameter has the experts as its second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.router = torch.nn.Linear(8, 8)
        self.experts = torch.nn.Parameter(torch.randn(8, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number = self.router(x).argmax(-1)
        ends = torch.histc(number.float(), 8, 0, 7).cumsum(0).to(torch.int32)
        rows = x[number.argsort()].to(torch.bfloat16)
        weight = self.experts.to(torch.bfloat16).transpose(0, 1)
        return torch.nn.functional.grouped_mm(rows, weight, offs=ends).sum()


def test_experts_that_are_not_the_first_dimension_are_not_divided() -> None:
    x = {"x": torch.randn(16, 8)}
    with pytest.raises(pc.InputError, match="none were found in"):
        pc.compile(ExpertsInside(), pc.Mesh(data=2, expert=2), x, microbatches=2, progress=False)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_data_ranks_with_the_same_experts_share_them_out(zero: int, tmp_path: Path) -> None:
    program = compiled("moe", {"data": 4, "expert": 2}, zero=zero)
    kept = program.problem.kept_bytes
    experts = {item.name: item for item in program.lowered.graph.parameters if item.experts}
    assert {2 * kept(item)[3 - zero] for item in experts.values()} == {
        item.nbytes * (2 if zero == 1 else 1) for item in experts.values()
    }
    (lines,) = program.lowered.instructions
    sums = [line for line in lines if line.kind is Kind.REDUCE_GRADIENTS]
    assert {name for x in program.lowered.buckets for name in x.names if "experts" in x.label} == {
        *experts
    }
    assert len({line.value for line in sums}) == len(program.lowered.buckets)
    assert any(line.kind is Kind.GATHER_PARAMETERS for line in lines) == (zero < 3)
    clipped(program, tmp_path)


def test_experts_of_one_rank_alone_are_exchanged_with_none(tmp_path: Path) -> None:
    program = compiled("moe", {"data": 2, "expert": 2}, zero=2)
    summed = {name for item in program.lowered.buckets for name in item.names}
    assert summed == {x.name for x in program.lowered.graph.parameters if not x.experts}
    clipped(program, tmp_path)


def test_experts_slots_and_samples_may_be_odd() -> None:
    torch.manual_seed(0)
    config = moe.Config(layers=1, heads=1, hidden=8, vocabulary=16, sequence=4, experts=3)
    tokens = torch.zeros(1, config.sequence, dtype=torch.int64)
    inputs = {"tokens": tokens, "labels": tokens}
    program = pc.compile(moe.MoE(config), pc.Mesh(data=3, expert=3), inputs, **OPTIONS)
    assert {item.shape[0] for item in program.lowered.graph.parameters if item.experts} == {1}
    check(program)


def test_predictions_are_those_of_one_rank(tmp_path: Path) -> None:
    whole = captured("hf-mixtral", "logits")
    program = pc.compile(whole, pc.Mesh(data=2, expert=2), **OPTIONS)
    batch = random_batch(program.problem.graph, 4, 0)
    tokens = {"input_ids": batch["input_ids"][:5]}  # three on one data rank, two on the other
    logits = list[torch.Tensor]()
    for one in (program, whole):
        folder = tmp_path / str(len(logits))
        folder.mkdir()
        logits.append(predicted(one, tokens, folder)["logits"])
    torch.testing.assert_close(*logits, rtol=1e-9, atol=1e-12)


def test_what_expert_ranks_send_is_priced_in_both_passes() -> None:
    program = compiled("hf-mixtral", {"data": 2, "expert": 2})
    layer = max(program.problem.priced(1).costs, key=lambda cost: len(cost.forward))
    forward, backward = (
        [x.nbytes for x in side if (x.kind, x.axis) == ("exchange", "expert")]
        for side in (layer.forward, layer.backward)
    )
    rows = 2 * 12 * 2  # samples, tokens and experts of each: half of them leave
    assert sorted(forward) == [4 * 4 / 2, *[rows * 16 * 8 / 2] * 2]  # the counts of four experts
    assert backward == [rows * 16 * 8 / 2] * 2


def test_wrong_buckets_of_experts_are_found() -> None:
    lowered = compiled("moe", {"data": 4, "expert": 2}).lowered
    of_all = tuple(replace(x, label=x.label.removeprefix(EXPERTS)) for x in lowered.buckets)
    assert any("is of all of the data ranks" in x for x in texts(replace(lowered, buckets=of_all)))
    alone = replace(compiled("moe", {"data": 2, "expert": 2}).lowered, buckets=lowered.buckets)
    assert any("experts" in x and "is on rank 0, and also in experts_" in x for x in texts(alone))


def clipped(program: pc.Program, folder: Path) -> None:
    """Train with clipped gradients, as the model does in one process."""
    mesh, model = program.plan.mesh, copy.deepcopy(program.model)
    assert model is not None
    count = program.plan.microbatches * mesh.data
    batches = [random_batch(program.problem.graph, count, seed) for seed in range(2)]
    job = Job(str(program.export(folder / "program")), batches, options={"lr": 0.5}, max_norm=0.2)
    found = pool().run(job, program.lowered.grid.size)
    wanted = recipe.train(
        model.double(), batches, count, None, max_norm=0.2, lr=0.5, kind=torch.optim.SGD
    )
    assert found.norms is not None
    assert max(wanted.norms) > 0.2, "nothing is clipped"
    torch.testing.assert_close(found.norms, torch.tensor(wanted.norms, dtype=torch.float64))
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(found.state[key], parameter.detach(), rtol=1e-9, atol=1e-12)


DEGREES = {
    "two": ({"data": 4, "expert": 2}, 1),
    "four": ({"data": 4, "expert": 4}, 0),
    "pieces": ({"data": 4, "expert": 2}, 3),
    "one": ({"data": 1}, 0),
}


def test_a_run_goes_on_with_other_expert_ranks_and_levels_to_the_bit(tmp_path: Path) -> None:
    jobs: list[dict[str, Any]] = []
    graphs = []
    for name, (mesh, zero) in DEGREES.items():
        program = compiled("moe", mesh, microbatches=4 // mesh["data"], zero=zero)
        config: Any = getattr(program.model, "config")  # noqa: B009
        program.export(tmp_path / name)
        graphs.append(program.problem.graph)
        actions = [["load", jobs[-1]["name"]] if jobs else ["train", 2], ["save", name]]
        job = {"program": name, "ranks": program.lowered.grid.size, "rows": 8, "no_loader": True}
        job |= {"name": name, "high": config.vocabulary, "length": config.sequence}
        jobs.append({**job, "actions": [*actions, ["train", 1]]})
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    forked.run(4, checkpoints.main, str(tmp_path))
    seen = [json.loads((tmp_path / f"{job['name']}.0.json").read_text()) for job in jobs]
    assert [one["faults"] for one in seen] == [[]] * len(jobs)
    first, *others = (folders.read(folders.find(tmp_path / name)) for name in DEGREES)
    assert any(key.startswith("optimizer exp_avg/") for key in first.entries)
    for graph in graphs:
        check_fits(graph, first)
    for other in others:
        for key in first.entries:
            if not key.startswith("extra/"):
                assert torch.equal(first.whole(key), other.whole(key)), key
    assert [one["losses"][-1] for one in seen] == pytest.approx(
        [seen[0]["losses"][-1]] * 4, rel=1e-9
    )


def test_published_weights_of_whole_experts_fit_expert_ranks(tmp_path: Path) -> None:
    with compiled("moe", {"data": 1}).worker() as worker:
        worker.save_pretrained(tmp_path)
    for mesh, _ in DEGREES.values():
        check_published(compiled("moe", mesh).problem.graph, tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", range(len(LAYOUTS)))
@pytest.mark.parametrize("name", MODELS)
def test_every_layout_trains_as_the_model_does(name: str, layout: int) -> None:
    mesh, options = LAYOUTS[layout]
    check(compiled(name, mesh, **options))


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["moe", "hf-mixtral", "deepseek-v3"])
def test_two_experts_may_get_all_tokens(name: str) -> None:
    program = compiled(name, {"data": 4, "expert": 4})
    model: Any = program.model
    gates = [p for key, p in model.named_parameters() if "gate.weight" in key or "router" in key]
    assert gates
    before = [gate.detach().clone() for gate in gates]
    try:
        with torch.no_grad():
            for gate in gates:  # so that all scores are equal, and the same experts come first
                gate.zero_()
        made = model(**random_batch(program.problem.graph, 1, 0))
        getattr(made, "loss", made).backward()
        stacks = [p for n, p in model.named_parameters() if "experts" in n and p.dim() > 2]
        used = {sum(bool(one.any()) for one in p.grad) for p in stacks}
        assert used == {2}, "not one-sided"
        model.zero_grad()
        check(program)
    finally:
        with torch.no_grad():
            for gate, values in zip(gates, before, strict=True):
                gate.copy_(values)
