"""On several context ranks, each with a piece of the rows, a program computes what the model does.

Which form of attention is in force is read from the emitted layers: by heads it exchanges queries,
keys, values and results all-to-all, by rows it gathers keys and values.
"""

from __future__ import annotations

import dataclasses
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import parcompiler as pc
from parcompiler.device import Device, Link, device
from parcompiler.models import gpt
from tests import zoo
from tests.architectures import ALL

CHEAP = dataclasses.replace(
    device("cpu"), name="cheap", link=Link(1e13, 1e-10), launch_overhead=1e-9
)
BY_HEADS = dataclasses.replace(
    device("cpu"), name="cheap", link=Link(1e9, 1e-12), launch_overhead=1e-12
)
IN_A_RING = dataclasses.replace(  # where messages are long, and compute longer
    device("cpu"), name="slow", flops=(("float32", 1e6),), link=Link(1e6, 1e-12),
    launch_overhead=1e-12,
)  # fmt: skip
FEW: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("gpt-dropout", {"context": 2}, {}),
    ("gpt-dropout", {"context": 2, "pipeline": 2}, {"recompute": "full", "schedule": "zb-h1"}),
    ("llama", {"context": 3}, {}),
    ("bert", {"context": 2, "data": 2}, {"zero": 1}),
    ("t5", {"context": 2}, {"zero": 3}),
    ("hf-llama", {"context": 4}, {}),
    ("llama", {"context": 2, "tensor": 2, "device": IN_A_RING}, {"recompute": "full"}),
    ("t5", {"context": 2, "tensor": 2, "device": CHEAP}, {}),
]
MODELS = (
    "gpt-tied", "llama", "bert", "t5", "hf-llama", "hf-qwen3", "gemma3", "modernbert-mlm",
    "gpt-oss", "deepseek-v3",
)  # fmt: skip
LAYOUTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"tensor": 2}, {}),
    ({"pipeline": 2}, {"schedule": "1f1b"}),
    ({"pipeline": 2}, {"schedule": "zb-h1", "recompute": "full"}),
    ({"data": 2}, {"zero": 1}),
    ({"data": 2}, {"zero": 3}),
    ({"pipeline": 2}, {"vocabulary": "vocab-2"}),
]
WITH_VOCABULARY: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"context": 2, "tensor": 2}, {"schedule": "zb-h1"}),
    ({"context": 3}, {"vocabulary": "vocab-1", "loss_weights": "tokens"}),
    ({"context": 3, "data": 2}, {"zero": 3}),
    ({"context": 4}, {"recompute": "full"}),
]


def case(name: str) -> zoo.Case:
    model, inputs, *_ = zoo.build(name) if name in zoo.ALL else ALL[name]()
    return model, inputs


def compiled(name: str, mesh: pc.Mesh, **options: Any) -> pc.Program:
    torch.manual_seed(0)
    model, inputs = case(name)
    return pc.compile(model, mesh, inputs, microbatches=2, progress=False, **options)


def check(program: pc.Program) -> None:
    found = program.verify()
    assert found.ok, str(found)
    assert found.lifted is not None
    assert max(found.loss_error, found.gradient_error, found.parameter_error) <= 1e-9


def layers(program: pc.Program, folder: Path) -> str:
    program.export(folder)
    return "".join(path.read_text() for path in sorted(folder.glob("stage_*.py")))


@pytest.mark.parametrize(("name", "mesh", "options"), FEW)
def test_context_ranks_train_as_the_model_does(
    name: str, mesh: dict[str, Any], options: dict[str, Any]
) -> None:
    program = compiled(name, pc.Mesh(**mesh), **options)
    assert program.plan.mesh.context == mesh["context"]
    templates = program.plan.context.templates if program.plan.context else ()
    lines = [line for entry in templates for line in entry.nodes]
    attention = [line for line in lines if line.startswith("scaled_dot_product_attention")]
    assert attention
    assert all(re.search(r"S\([12]( zigzag)?\)", line) for line in attention)
    causal = name in ("gpt-dropout", "llama")  # without mask tensors
    assert causal == any("zigzag" in line for line in lines)
    check(program)


def own_gpt(mesh: pc.Mesh, dropout: float = 0.1, masked: int = 0, **options: Any) -> pc.Program:
    config = gpt.Config(layers=1, heads=4, hidden=16, vocabulary=32, sequence=12, dropout=dropout)
    tokens = torch.randint(32, (1, 12), generator=torch.Generator().manual_seed(1))
    labels = torch.cat([torch.full((1, masked), -100), tokens[:, masked:]], 1)
    inputs = {"tokens": tokens, "labels": labels}
    return pc.compile(gpt.GPT(config), mesh, inputs, microbatches=1, progress=False, **options)


def test_attention_by_heads_exchanges_rows_for_heads(tmp_path: Path) -> None:
    program = own_gpt(pc.Mesh(context=4, device=BY_HEADS))
    text = layers(program, tmp_path / "out")
    assert len(re.findall(r"runtime\.all_to_all\(.*axis=\"context\"\)", text)) == 2  # qkv, result
    assert "attention_of_rows" not in text
    assert 'runtime.own_draws(1, axis="context")' in text
    check(program)


def test_attention_by_rows_gathers_keys_and_values(tmp_path: Path) -> None:
    program = own_gpt(pc.Mesh(context=3))
    text = layers(program, tmp_path / "out")
    gathered = r"runtime\.all_gather\(.*partial=True, zigzag=True, axis=\"context\"\)"
    assert len(re.findall(gathered, text)) == 2
    assert re.search(r"attention_of_rows\([^)]*zigzag=True,\s+axis=\"context\",\s+\)", text)
    assert re.search(r"runtime\.take\(tokens, 1, zigzag=True, axis=\"context\"\)", text)
    assert "all_to_all" not in text
    check(program)


@pytest.mark.parametrize(("context", "chip", "dim"), [(3, device("cpu"), 2), (2, BY_HEADS, 1)])
def test_learned_sinks_are_a_column_of_the_scores_of_own_rows_or_heads(
    context: int, chip: Device, dim: int, tmp_path: Path
) -> None:
    program = compiled("gpt-oss", pc.Mesh(context=context, device=chip))
    text = layers(program, tmp_path)
    (scores,) = {
        tuple(node.meta["val"].shape)
        for node in program.lowered.graph.fx_graph.nodes
        if node.name.startswith("softmax") and node.meta["val"].dim() == 4
    }
    whole = [2, 4, 12, 13]  # samples, heads, rows, keys and the sink
    whole[dim] //= context
    assert list(scores) == whole
    assert ("runtime.all_to_all(" in text) == (dim == 1)
    check(program)


@pytest.mark.parametrize("context", [2, 3])
def test_in_a_ring_keys_and_values_go_round(context: int, tmp_path: Path) -> None:
    program = own_gpt(pc.Mesh(context=context, device=IN_A_RING), dropout=0.0)
    text = layers(program, tmp_path / "out")
    emitted = r"ring_attention\([^)]*is_causal=True,\s+zigzag=True,\s+axis=\"context\",?\s*\)"
    assert re.search(emitted, text)
    assert not re.search(r"all_gather\(.*axis=\"context\"|all_to_all|attention_of_rows", text)
    report = program.report()
    (forward, backward) = (x for x in report.exchanged if x.action == "rotation")
    pair = 2 * 12 * 16 * 4  # bytes of keys and values of all rows
    assert forward.sent * context == pair * (context - 1)
    assert backward.sent == 2 * forward.sent
    assert backward.exposed < backward.seconds  # it goes beside the steps
    assert "rotation" in report.to_text()
    check(program)


def test_attention_with_dropout_is_in_no_ring(tmp_path: Path) -> None:
    text = layers(own_gpt(pc.Mesh(context=3, device=IN_A_RING)), tmp_path / "out")
    assert "ring_attention" not in text


def test_context_ranks_with_masters_are_proved_in_float64_too() -> None:
    check(own_gpt(pc.Mesh(context=3), precision="bf16"))


def test_tensor_ranks_split_heads_and_classes_of_the_rows(tmp_path: Path) -> None:
    program = own_gpt(pc.Mesh(context=3, tensor=2, device=CHEAP))
    assert program.plan.sharding is not None
    lines = [line for entry in program.plan.sharding.templates for line in entry.nodes]
    assert any(re.match(r"scaled_dot.*: S\(1\) S\(1\) S\(1\) -> S\(1\)", x) for x in lines)
    assert any(line.endswith("classes of rows") for line in lines)
    text = layers(program, tmp_path / "out")
    # Each draws for its rows of its heads.
    assert re.search(
        r'own_draws\(2, axis="context", zigzag=True\):\n +with runtime.own_draws\(1\)', text
    )
    check(program)


@pytest.mark.parametrize(("mesh", "options"), WITH_VOCABULARY)
def test_the_vocabulary_on_all_ranks_of_a_pipeline_is_of_own_rows(
    mesh: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    options = {"vocabulary": "vocab-2", **options}
    program = own_gpt(pc.Mesh(pipeline=2, **mesh), masked=5, **options)  # others count elsewhere
    choice = program.plan.vocabulary
    assert choice is not None
    assert (choice.method, choice.lookups, choice.head, choice.kept) == (
        options["vocabulary"], ("embedding.weight",), "embedding.weight", (),
    )  # fmt: skip
    spread = program.lowered.graph.vocabulary
    assert spread is not None
    assert spread.head is not None
    assert tuple(spread.head.x.meta["val"].shape) == (12 // mesh["context"], 16)
    program.export(tmp_path)
    text = (tmp_path / "vocabulary.py").read_text()
    assert re.search(r"tokens = runtime.take\(tokens, 1, .*axis=\"context\"\)", text)
    assert "x = norm of this context rank's rows" in " ".join(text.split())
    check(program)


class OwnLoss(gpt.GPT):
    """The loss by a form that is not among those that context ranks divide, or is weighed."""

    each: torch.Tensor

    def __init__(self, form: str) -> None:
        super().__init__(gpt.Config(layers=1, heads=4, hidden=16, vocabulary=32, sequence=12))
        self.form = form
        self.register_buffer("each", torch.linspace(0.5, 1.5, 32))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        logits = self.head(self.norm(self.layers[0](x)))
        if self.form == "weighed":
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), self.each)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ("weighed", "its mean counts rows of other context ranks by the weights of their classes"),
        ("shifted", "every context rank computes its loss on all rows"),
    ],
)
def test_a_head_that_context_ranks_cannot_share_stays_whole(form: str, reason: str) -> None:
    tokens = torch.randint(32, (1, 12), generator=torch.Generator().manual_seed(1))
    program = pc.compile(
        OwnLoss(form), pc.Mesh(pipeline=2, context=2), {"tokens": tokens, "labels": tokens},
        microbatches=1, vocabulary="vocab-2", progress=False,
    )  # fmt: skip
    choice = program.plan.vocabulary
    assert choice is not None
    assert (choice.head, choice.kept) == (None, (f"embedding.weight: {reason}",))
    check(program)


def test_activations_and_what_they_take_are_in_pieces() -> None:
    whole, divided = own_gpt(pc.Mesh()), own_gpt(pc.Mesh(context=3))
    nodes = {node.name: node for node in divided.lowered.graph.fx_graph.nodes}
    assert tuple(nodes["gelu"].meta["val"].shape) == (1, 4, 64)
    assert max(divided.simulate().peak_memory) < max(whole.simulate().peak_memory)


def test_the_report_says_who_holds_which_rows() -> None:
    text = own_gpt(pc.Mesh(context=3)).report().to_text()
    assert "pipeline 1 x data 1 x context 3 x tensor 1" in text
    shares = "of the 12 rows of tokens, labels rank 0 has 0 to 1 and 10 to 11, ... rank 2 4 to 7"
    assert shares in " ".join(text.split())
    assert re.search(r"Layer +× 1 +context +all-gather +forward|context +all-gather", text)
    assert "Gradients averaged over 3 context ranks" in text


def test_channels_of_images_are_no_positions_to_pad() -> None:
    model, inputs = zoo.build("resnet")
    with pytest.raises(pc.InputError, match=r"3 positions of the input 'images'.*whose channels"):
        pc.compile(model, pc.Mesh(context=2), inputs)


def test_costs_at_other_sizes_are_those_of_a_context_rank() -> None:
    program = own_gpt(pc.Mesh(context=3))
    figures = program.costs.at(batch=2)
    here, there = (sum(s.forward_flops for s in f.stages) for f in (program.costs.at(), figures))
    assert there == pytest.approx(2 * here, rel=0.05)  # masks are as large; undivided: 6
    with pytest.raises(pc.InputError, match="context=3 does not divide the 10 positions"):
        program.costs.at(sequence=10)


def test_a_plan_says_how_rows_are_divided_and_is_reused() -> None:
    program = own_gpt(pc.Mesh(context=3))
    plan = pc.Plan.from_json(program.plan.to_json())
    assert plan == program.plan
    assert plan.context is not None
    again = own_gpt(pc.Mesh(context=3), plan=plan)
    assert again.lowered.graph.fingerprint == program.lowered.graph.fingerprint
    text = plan.to_json().replace(
        "S(2 zigzag) R R -> S(2 zigzag), causal rows, draws own", "R R R -> R"
    )
    edited = own_gpt(pc.Mesh(context=3), plan=pc.Plan.from_json(text))
    assert edited.lowered.graph.fingerprint != program.lowered.graph.fingerprint


@pytest.mark.parametrize(
    ("mesh", "options", "words"),
    [
        ({"context": 5}, {}, r"context=5 does not divide the 12 positions of the input 'tokens'"),
        (
            {"context": 2},
            {"updates": "local"},
            r"context=2\) .* updates='local' each rank updates by",
        ),
        ({"context": 2}, {"compression": "powersgd"}, r"context=2\) .* compression='powersgd'"),
    ],
)
def test_what_context_ranks_cannot_do_is_refused_by_name(
    mesh: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(pc.InputError, match=words):
        own_gpt(pc.Mesh(**mesh), **options)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "context", "layout"), [*product(MODELS, (2, 3, 4), range(len(LAYOUTS)))]
)
def test_every_layout_trains_as_the_model_does(name: str, context: int, layout: int) -> None:
    mesh, options = LAYOUTS[layout]
    check(compiled(name, pc.Mesh(context=context, **mesh), **options))


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "context", "layout"),
    [*product(("llama", "bert", "hf-llama"), (2, 3), range(len(LAYOUTS)))],
)
def test_every_layout_trains_in_a_ring(name: str, context: int, layout: int) -> None:
    mesh, options = LAYOUTS[layout]
    program = compiled(name, pc.Mesh(context=context, device=IN_A_RING, **mesh), **options)
    assert program.plan.context is not None
    lines = [line for entry in program.plan.context.templates for line in entry.nodes]
    assert any(line.endswith(", ring") for line in lines)
    check(program)
