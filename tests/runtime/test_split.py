"""A backward in two parts, as it is emitted and run: the bits of one backward."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parcompiler.capture import capture
from parcompiler.capture.clean import simplify
from parcompiler.codegen.stage import StageWriter
from parcompiler.graph import Graph
from parcompiler.instruction import Kind
from parcompiler.lower import Lowered
from tests import zoo
from tests.runtime.ranks import Ranks, divided

WIDTH = 8
KINDS = ("Linear", "linear", "addmm")


def hugging_face_gpt2(*, tied: bool) -> zoo.Case:
    """Conv1D layers, which are captured as addmm."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": zoo.VOCABULARY}
    chance: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends: dict[str, Any] = {"use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(**sizes, **chance, **ends, tie_word_embeddings=tied)
    return GPT2LMHeadModel(config), {"input_ids": zoo.tokens(), "labels": zoo.tokens()}


class Shared(nn.Module):
    """One matrix in three products, a frozen one, a product in place, and a stage without any."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.layers[1].requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x), inplace=True)
        x = torch.tanh(self.first(x) + F.linear(x, self.first.weight))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x * self.scale).sum()


class Edges(nn.Module):
    """Layers without a product before and behind one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)]
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).cos()
        return x.sum()


def rows() -> dict[str, Tensor]:
    return {"x": torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(0))}


CASES: Mapping[str, Callable[[], zoo.Case]] = {
    "gpt": lambda: zoo.build("gpt"),
    "llama": lambda: zoo.build("llama"),
    "hf-gpt2": lambda: hugging_face_gpt2(tied=False),
    "shared": lambda: (Shared(), rows()),
    "edges": lambda: (Edges(), rows()),
}


def graph_of(case: zoo.Case) -> Graph:
    torch.manual_seed(0)
    return simplify(capture(*case))


def halves(lowered: Lowered) -> int:
    """The products in the emitted code that can be left for later."""
    texts = [StageWriter(lowered, stage, "cpu").text() for stage in lowered.stages]
    return sum(text.count(f"runtime.{kind}(") for text in texts for kind in KINDS)


@pytest.mark.parametrize("name", CASES)
def test_both_parts_have_the_bits_of_one_backward(name: str) -> None:
    graph = graph_of(CASES[name]())
    split, whole = (divided(graph, schedule, 1, 3) for schedule in ("zb-h1", "1f1b"))
    kinds = {line.kind for line in split.instructions[0]}
    assert kinds >= {Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}
    assert halves(split) > 0 == halves(whole)
    ours, theirs = Ranks(split), Ranks(whole)
    assert ours.step() == theirs.step()
    assert ours.step(keep=True) == theirs.step(keep=True)  # gradients add up


def test_a_stage_without_products_leaves_nothing() -> None:
    graph = graph_of(CASES["edges"]())
    split, whole = (divided(graph, schedule, 3, 4) for schedule in ("zb-h1", "1f1b"))
    assert Ranks(split).step().named.keys() == Ranks(whole).step().named.keys()
    assert Ranks(split).step() == Ranks(whole).step()


def test_a_matrix_that_is_also_a_table_has_the_sum_of_both_gradients() -> None:
    """Its two parts are not added up before they are added to those of other micro-batches."""
    graph = graph_of(hugging_face_gpt2(tied=True))
    for count, exact in ((1, True), (3, False)):
        split, whole = (divided(graph, schedule, 1, count) for schedule in ("zb-h1", "1f1b"))
        ours, theirs = Ranks(split).step(), Ranks(whole).step()
        assert ours == theirs or not exact
        torch.testing.assert_close(ours.named, theirs.named)


def test_stages_of_one_rank_share_a_tied_tensor() -> None:
    """On a V the first stage, with the table, and the last one, with the head, are on rank 0."""
    graph = graph_of(hugging_face_gpt2(tied=True))
    placed = divided(graph, "zb-v", 2, 2)
    assert placed.tied == ()
    assert "transformer.wte.weight" in set(placed.stages[0].tensors) & set(placed.stages[3].tensors)
    ours, theirs = Ranks(placed).step(), Ranks(divided(graph, "1f1b", 1, 2)).step()
    torch.testing.assert_close(ours.named, theirs.named)


def test_an_evaluation_and_other_schedules_defer_nothing() -> None:
    graph = graph_of(CASES["gpt"]())
    for schedule in ("naive", "gpipe", "1f1b", "interleaved"):
        assert halves(divided(graph, schedule, 2, 2)) == 0
