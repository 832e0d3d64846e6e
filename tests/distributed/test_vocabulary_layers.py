"""Other layers that look words up: factorised embeddings, and the tables of a recommender."""

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import nn

import parcompiler as pc
from parcompiler.models import dlrm
from tests import zoo


def electra(*, tied: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Rows of a table are narrower than the layers, which project them; and so is the head."""
    torch.manual_seed(0)
    config = transformers.ElectraConfig(
        embedding_size=8, tie_word_embeddings=tied, vocab_size=zoo.VOCABULARY, hidden_size=16,
        num_attention_heads=4, intermediate_size=32, num_hidden_layers=4, pad_token_id=0,
        max_position_embeddings=32,
    )  # fmt: skip
    inputs = {"input_ids": zoo.tokens(), "labels": zoo.tokens()}
    return transformers.ElectraForMaskedLM(config).train(), inputs


MODELS: dict[str, Callable[[], zoo.Case]] = {
    "electra": lambda: electra(tied=False),
    "electra tied": lambda: electra(tied=True),
    "albert": lambda: zoo.build("hf-albert"),
    "dlrm": lambda: zoo.build("dlrm"),
}
TABLES = {
    "electra": ("electra.embeddings.word_embeddings.weight",),
    "electra tied": ("electra.embeddings.word_embeddings.weight",),
    "albert": ("albert.embeddings.word_embeddings.weight",),
    "dlrm": ("tables.0.weight", "tables.1.weight", "tables.2.weight"),
}


@pytest.mark.parametrize("name", MODELS)
def test_their_rows_on_all_ranks_equal_one_process(name: str) -> None:
    model, inputs = MODELS[name]()
    program = pc.compile(
        model, pc.Mesh(pipeline=2), inputs, microbatches=3, schedule="1f1b", vocabulary="vocab-2"
    )
    choice = program.plan.vocabulary
    assert choice is not None
    assert choice.lookups == TABLES[name]
    assert (choice.head is None) is (name == "dlrm")
    found = program.verify()
    assert found.ok, str(found)
    assert max(found.loss_error, found.gradient_error, found.parameter_error) <= 1e-9


def recommender(vocabulary: str) -> pc.Program:
    """Two large tables, one of a few rows, and layers that are small beside them."""
    config = dlrm.Config(tables=(3_000_001, 1_000_000, 50), hidden=32)
    with torch.device("meta"):
        model = dlrm.DLRM(config)
    inputs = {
        "numbers": torch.zeros(64, config.numbers),
        "categories": torch.zeros(64, 3, dtype=torch.long),
        "labels": torch.zeros(64),
    }
    return pc.compile(
        model, pc.Mesh(pipeline=4, device="a100-80g"), inputs, microbatches=4, schedule="1f1b",
        vocabulary=vocabulary,
    )  # fmt: skip


def test_large_tables_take_as_much_memory_on_all_ranks_and_small_ones_stay_whole() -> None:
    spread, whole = recommender("vocab-2"), recommender("whole")
    assert spread.plan.vocabulary is not None
    assert spread.plan.vocabulary.lookups == ("tables.0.weight", "tables.1.weight")
    reason = "small beside the other parameters"
    assert spread.plan.vocabulary.kept == (f"tables.2.weight: {reason}",)
    assert reason in spread.report().to_text()
    memory = spread.simulate().peak_memory
    assert max(memory) < 1.05 * sum(memory) / len(memory)
    assert max(memory) < max(whole.simulate().peak_memory) / 2
