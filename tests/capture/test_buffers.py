"""Buffers that no checkpoint holds: their values for a model on the meta device."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import parcompiler as pc
from parcompiler.capture.buffers import computed
from parcompiler.models import llama
from parcompiler.runtime.tensor_files import read


class Config:
    size = 4


class Table(nn.Module):
    def __init__(self, config: Config, base: float = 2.0, noise: float = 0.0) -> None:
        super().__init__()
        self.config, self.base = config, base
        table = base ** torch.arange(config.size) + noise * torch.randn(config.size)
        self.register_buffer("table", table, persistent=False)
        self.weight = nn.Parameter(torch.randn(config.size))


def on_meta(**options: float) -> Table:
    with torch.device("meta"):
        return Table(Config(), **options)


def test_a_module_that_keeps_its_configuration_tells_its_buffers() -> None:
    before = torch.get_rng_state()
    found = computed(on_meta(), ["table", "weight", "nothing"])
    assert torch.equal(found.pop("table"), torch.tensor([1.0, 2.0, 4.0, 8.0]))
    assert not found
    assert torch.equal(torch.get_rng_state(), before)
    assert not computed(Table(Config()), ["table"]), "it has values"
    assert computed(nn.ModuleDict({"a": on_meta()}), ["a.table"]).keys() == {"a.table"}
    assert computed(on_meta().bfloat16(), ["table"])["table"].dtype == torch.bfloat16


def test_what_may_have_had_other_values_is_left_out() -> None:
    assert not computed(on_meta(base=3.0), ["table"])
    other = on_meta()
    other.config.size = 5
    assert not computed(other, ["table"])
    del other.config
    assert not computed(other, ["table"])


def test_random_buffers_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Table.__init__, "__defaults__", (2.0, 1.0))
    assert not computed(on_meta(), ["table"])


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_model_on_the_meta_device_starts_from_published_weights(
    tmp_path: Path, precision: str | None
) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
        tie_word_embeddings=True,
    )  # fmt: skip
    published = LlamaForCausalLM(config)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tokens = torch.arange(8).reshape(2, 4)
    inputs = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    program = pc.compile(model, pc.Mesh(), inputs, microbatches=1, precision=precision)
    folder = program.export(tmp_path / "out", weights=False)
    written = dict(read(folder / "weights" / "stage_0.safetensors"))
    assert torch.equal(written["model.rotary_emb.inv_freq"], published.model.rotary_emb.inv_freq)
    checkpoint = {n: t for n, t in published.state_dict().items() if n != "lm_head.weight"}
    with pc.load(folder).worker() as worker:
        worker.load_state_dict(checkpoint)
        loss = worker.step({"input_ids": tokens, "labels": tokens})
        state = worker.gather_state_dict()
    wanted = published(**inputs).loss.detach()
    torch.testing.assert_close(loss, wanted, rtol=1e-6 if precision is None else 1e-2, atol=0)
    assert state is not None
    assert published.load_state_dict(state).missing_keys == []


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_tables_have_the_precision_that_they_are_made_in(precision: str | None) -> None:
    config = llama.Config(layers=1, heads=2, hidden=8, vocabulary=16, sequence=4)
    with torch.device("meta"):
        model = llama.Llama(config)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    inputs = {"tokens": tokens, "labels": tokens}
    program = pc.compile(model, pc.Mesh(), inputs, microbatches=1, precision=precision)
    assert torch.equal(program.captured.tensors["cos"], llama.Llama(config).cos)


class Annealed(nn.Module):
    """Layers that all read a count, which the model raises first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.count: torch.Tensor = nn.Buffer(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        for layer in self.layers:
            x = torch.tanh(layer(x)) * (1 - 1 / (self.count + 1))
        return (x * self.count).square().mean()


def test_a_count_is_sent_to_the_layers_that_read_it() -> None:
    mesh = pc.Mesh(pipeline=2)
    program = pc.compile(Annealed(), mesh, (torch.randn(8, 4),), microbatches=4)
    found = program.verify()
    assert found.ok, str(found)
