"""Which layers are the vocabulary's, over many models, and why others stay whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from parcompiler.capture import capture
from parcompiler.vocabulary import VocabularyMatch, find
from tests.vocabulary import endings
from tests.vocabulary.endings import SPREAD, WHOLE, V, case
from tests.vocabulary.running import graph

# The tables that are looked up in, how often; the head's weight, its bias, its functions.
Row = tuple[dict[str, int], str | None, str | None, int]
EXPECTED: dict[str, Row] = {
    "gpt": ({"embedding.weight": 1}, "head.weight", None, 0),
    "gpt-tied": ({"embedding.weight": 1}, "embedding.weight", None, 0),
    "llama": ({"embedding.weight": 1}, "head.weight", None, 0),
    "bert": ({"embeddings.tokens.weight": 1}, "embeddings.tokens.weight", "head.bias", 0),
    "t5": ({"embedding.weight": 2}, "embedding.weight", None, 0),
    "moe": ({"embedding.weight": 1}, "embedding.weight", None, 0),
    "dlrm": ({f"tables.{i}.weight": 1 for i in range(3)}, None, None, 0),
    "resnet": ({}, "head.weight", "head.bias", 0),
    "hf-gpt2": ({"transformer.wte.weight": 1}, "transformer.wte.weight", None, 0),
    "gemma2": ({"model.embed_tokens.weight": 1}, "model.embed_tokens.weight", None, 3),
    "hf-bert": (
        {"bert.embeddings.word_embeddings.weight": 1},
        "bert.embeddings.word_embeddings.weight",
        "cls.predictions.bias",
        0,
    ),
    "hf-t5": ({"shared.weight": 2}, "shared.weight", None, 0),
    "hf-bart": ({"model.shared.weight": 2}, "model.shared.weight", "final_logits_bias", 0),
}
LATER: dict[str, Row] = {
    "hf-llama": ({"model.embed_tokens.weight": 1}, "lm_head.weight", None, 0),
    "hf-mixtral": ({"model.embed_tokens.weight": 1}, "lm_head.weight", None, 0),
    "hf-albert": (
        {"albert.embeddings.word_embeddings.weight": 1},
        "albert.embeddings.word_embeddings.weight",
        "predictions.bias",
        0,
    ),
    "electra-mlm": (
        {"electra.embeddings.word_embeddings.weight": 1},
        "electra.embeddings.word_embeddings.weight",
        "generator_lm_head.bias",
        0,
    ),
    "hf-opt": (
        {"model.decoder.embed_tokens.weight": 1},
        "model.decoder.embed_tokens.weight",
        None,
        0,
    ),
    "falcon": (
        {"transformer.word_embeddings.weight": 1},
        "transformer.word_embeddings.weight",
        None,
        0,
    ),
    "qwen2": ({"model.embed_tokens.weight": 1}, "lm_head.weight", None, 0),
    "phi": ({"model.embed_tokens.weight": 1}, "lm_head.weight", "lm_head.bias", 0),
    "gptneox": ({"gpt_neox.embed_in.weight": 1}, "lm_head.weight", None, 0),
    "bloom": (
        {"transformer.word_embeddings.weight": 1},
        "transformer.word_embeddings.weight",
        None,
        0,
    ),
    "cohere": ({"model.embed_tokens.weight": 1}, "model.embed_tokens.weight", None, 1),
    "granite": ({"model.embed_tokens.weight": 1}, "lm_head.weight", None, 1),
}


@pytest.mark.parametrize(
    ("name", "row"),
    [
        *EXPECTED.items(),
        *(pytest.param(*item, id=item[0], marks=pytest.mark.sweep) for item in LATER.items()),
    ],
)
def test_the_vocabulary_of_a_model_is_found(name: str, row: Row) -> None:
    found = find(graph(name)[0], 2)
    tables, weight, bias, functions = row
    names = [item.weight for item in found.lookups]
    assert {name: names.count(name) for name in names} == tables
    assert (found.head.weight if found.head else None) == weight
    if found.head is not None:
        assert (found.head.bias, len(found.head.chain.functions)) == (bias, functions)


@pytest.mark.parametrize("name", SPREAD)
def test_a_head_is_found_however_it_is_written(name: str) -> None:
    found = seen(SPREAD[name])
    assert found.head is not None, found.kept
    assert found.head.weight == "head.weight"
    assert not found.whole


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_no_such_head_stays_whole_and_says_why(name: str) -> None:
    ending, reason = WHOLE[name]
    found = seen(ending, double=False)
    assert found.head is None
    assert f"head.weight: {reason}" in found.kept
    assert found.tables == ("table.weight",)


def test_a_table_that_is_tied_to_a_head_that_stays_whole_does_so_too() -> None:
    found = seen(endings.several_terms, tied=True)
    assert not found.lookups
    assert found.kept == ("table.weight: the loss has other terms besides the cross-entropy",)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"scale_grad_by_freq": True}, "a gradient that is scaled by frequency"),
        ({"max_norm": 1.0}, "its rows are changed in the forward (max_norm)"),
    ],
)
def test_a_table_with_a_gradient_or_rows_of_its_own_stays_whole(
    options: dict[str, object], reason: str
) -> None:
    found = seen(endings.plain, **options)
    assert not found.lookups
    assert f"table.weight: {reason}" in found.kept
    assert found.head is not None


def test_a_vocabulary_with_fewer_words_than_ranks_stays_whole() -> None:
    model, inputs = case(endings.plain)
    found = find(capture(model, inputs), V + 1)
    assert found == VocabularyMatch((), None, found.whole)
    assert f"head.weight: V ({V}) is smaller than the number of ranks ({V + 1})" in found.kept


def test_a_frozen_table_stays_whole() -> None:
    model, inputs = case(endings.plain)
    model.table.weight.requires_grad_(False)
    assert "table.weight: frozen" in find(capture(model, inputs), 2).kept


class Bags(nn.Module):
    """Sums of rows; and a table that is small beside the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(40, 8, mode="sum")
        self.kinds = nn.Embedding(2, 8)
        self.layer = nn.Linear(8, 200)
        self.head = nn.Linear(200, 5)

    def forward(self, words: torch.Tensor, kinds: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.bags(words) + self.kinds(kinds))
        return F.cross_entropy(self.head(torch.relu(x)), y)


def test_bags_of_rows_and_small_tables_stay_whole() -> None:
    inputs = {
        "words": torch.randint(40, (4, 3)),
        "kinds": torch.randint(2, (4,)),
        "y": torch.randint(5, (4,)),
    }
    found = find(capture(Bags(), inputs), 2)
    assert found.kept == (
        "bags.weight: a sum over bags of rows",
        "kinds.weight: small beside the other parameters",
    )
    assert found.head is not None


def test_what_is_found_does_not_depend_on_names() -> None:
    """The modules of `Model` in other words."""
    model, inputs = case(endings.shifted)
    first = find(capture(model, inputs), 2)
    model.add_module("zebra", model._modules.pop("table"))
    model.forward = _forward.__get__(model)  # type: ignore[method-assign]
    second = find(capture(model, inputs), 2)
    assert second.tables == ("zebra.weight",)
    assert first.head is not None
    assert second.head is not None
    chains = first.head.chain, second.head.chain
    assert chains[0].dim == chains[1].dim
    assert len(chains[0].rows) == len(chains[1].rows)


def _forward(self: endings.Model, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    x = self.get_submodule("zebra")(tokens)
    for layer in self.layers:
        x = x + torch.tanh(layer(x))
    return self.ending(self, x, labels)


def seen(ending: endings.Loss, **options: object) -> VocabularyMatch:
    """What is found of a small model for two ranks."""
    model, inputs = case(ending, **options)  # type: ignore[arg-type]
    return find(capture(model, inputs), 2)
