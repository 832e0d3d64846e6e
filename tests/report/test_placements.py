"""The sections about the tensor axis: what ranks hold, and what they tell each other."""

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import parcompiler as pc
from parcompiler.device import Link, device
from parcompiler.models import gpt, llama, moe
from parcompiler.report import Report

CHEAP = dataclasses.replace(
    device("cpu"), name="cheap", link=Link(1e13, 1e-10), launch_overhead=1e-9
)
SIZES: dict[str, Any] = {
    "layers": 3,
    "heads": 16,
    "hidden": 1024,
    "vocabulary": 50257,
    "sequence": 1024,
}
MANY = 1 << 20  # bytes: what a router says of its tokens is less
LONG = {"heads": 64, "hidden": 8192, "sequence": 8192}
MODELS: dict[str, Callable[[dict[str, Any]], nn.Module]] = {
    "gpt": lambda sizes: gpt.GPT(gpt.Config(**sizes, tied=False)),
    "gpt-long": lambda sizes: gpt.GPT(gpt.Config(**sizes, tied=False)),
    "llama": lambda sizes: llama.Llama(llama.Config(**sizes, kv_heads=8)),
    "moe": lambda sizes: moe.MoE(moe.Config(**sizes, tied=False, experts=8)),
}


@cache
def report(kind: str) -> Report:
    """A model on four H100 that hold pieces of its tensors."""
    sizes = {**SIZES, **(LONG if kind == "gpt-long" else {})}
    with torch.device("meta"):
        tokens = torch.zeros(1, sizes["sequence"], dtype=torch.long)
        model = MODELS[kind](sizes)
    mesh = pc.Mesh(tensor=4, device="h100")
    inputs = {"tokens": tokens, "labels": tokens}
    return pc.compile(model, mesh, inputs, microbatches=4, schedule="1f1b").report()


@pytest.mark.parametrize("kind", MODELS)
def test_what_is_held_and_exchanged_is_the_layer_that_people_found(
    kind: str, golden: Callable[[str, str], None]
) -> None:
    """Columns and rows; along the sequence between them when it is long; experts of their own."""
    text = report(kind).to_text(100)
    start, end = text.index("Tensors on"), text.index("\n\n", text.index("Collectives of"))
    golden(f"report/{kind}-tensor/100.txt", text[start : end + 1])


@pytest.mark.parametrize("kind", ["gpt", "llama", "moe"])
def test_a_layer_has_two_all_reduces_each_way(kind: str) -> None:
    found = report(kind)
    layer = max(found.exchanged, key=lambda item: item.blocks).template
    own = [i for i in found.exchanged if i.template == layer and i.sent > MANY]
    assert {item.action for item in own} == {"all-reduce"}
    assert sum(item.backward for item in own) == sum(not item.backward for item in own) == 2


@pytest.mark.parametrize("kind", ["gpt", "llama", "moe"])
def test_the_backward_hides_collectives_beside_products_for_weights(kind: str) -> None:
    found = report(kind)
    layer = max(found.exchanged, key=lambda item: item.blocks).template
    own = [item for item in found.exchanged if item.template == layer and item.sent > MANY]
    exposed = {True: 0.0, False: 0.0}
    for item in own:
        assert 0 <= item.exposed <= item.seconds
        exposed[item.backward] += item.exposed / item.seconds
    assert exposed[True] < exposed[False] == 2


def test_gradients_of_parameters_are_exchanged_once_a_step() -> None:
    """Rows in pieces: each rank has a summand of the gradients of the layer norms between."""
    torch.manual_seed(0)
    config = gpt.Config(layers=2, heads=2, hidden=16, vocabulary=96, sequence=12)
    tokens = torch.zeros(2, 12, dtype=torch.long)
    mesh = pc.Mesh(tensor=2, device=CHEAP)
    program = pc.compile(
        gpt.GPT(config), mesh, {"tokens": tokens, "labels": tokens}, microbatches=4
    )
    once = [item for item in program.report().exchanged if item.once]
    assert once
    assert {item.shape for item in once} <= {(16,), (12, 16)}  # norms and positions
    assert all(item.backward and item.action == "all-reduce" for item in once)
    row = next(
        line for line in program.report().to_text(200).splitlines() if once[-1].value in line
    )
    sent, _, in_a_step, _ = row.split()[-8:-4]
    assert int(in_a_step) == once[-1].blocks * int(sent)


def test_the_figures_are_those_of_the_whole_model() -> None:
    found = report("gpt")
    assert found.model.parameters > 100e6
    assert found.stages[0].parameters < found.model.parameters / 3
    assert 0 < found.step.mfu < 1
    assert Report.from_json(found.to_json()) == found
