"""The sections about the tensor axis: what ranks hold, and what they tell each other."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

import parcompiler as pc
from parcompiler.models import gpt, llama
from parcompiler.report import Report

SIZES: dict[str, Any] = {
    "layers": 3,
    "heads": 16,
    "hidden": 1024,
    "vocabulary": 50257,
    "sequence": 1024,
}


@cache
def report(kind: str) -> Report:
    """A model on four H100 that hold pieces of its tensors."""
    with torch.device("meta"):
        model = (
            gpt.GPT(gpt.Config(**SIZES, tied=False))
            if kind == "gpt"
            else llama.Llama(llama.Config(**SIZES, kv_heads=8))
        )
        tokens = torch.zeros(1, SIZES["sequence"], dtype=torch.long)
    mesh = pc.Mesh(tensor=4, device="h100")
    inputs = {"tokens": tokens, "labels": tokens}
    return pc.compile(model, mesh, inputs, microbatches=4, schedule="1f1b").report()


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_the_layer_of_columns_and_rows_is_found_again(
    kind: str, golden: Callable[[str, str], None]
) -> None:
    text = report(kind).to_text(100)
    start, end = text.index("Held by"), text.index("\n\n", text.index("Exchanged by"))
    golden(f"report/{kind}-tensor/100.txt", text[start : end + 1])


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_a_layer_has_two_all_reduces_each_way(kind: str) -> None:
    found = report(kind)
    layer = max(found.exchanged, key=lambda item: item.blocks).template
    own = [item for item in found.exchanged if item.template == layer]
    assert {item.action for item in own} == {"all-reduce"}
    assert sum(item.backward for item in own) == sum(not item.backward for item in own) == 2


def test_the_figures_are_those_of_the_whole_model() -> None:
    found = report("gpt")
    assert found.model.parameters > 100e6
    assert found.stages[0].parameters < found.model.parameters / 3
    assert 0 < found.step.mfu < 1
    assert Report.from_json(found.to_json()) == found
