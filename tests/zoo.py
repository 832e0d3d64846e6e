"""Tiny models of every kind, with one micro-batch each, by name.

`build("gpt")` is a model of `parcompiler.models`; the rest are unmodified Hugging Face models
built from configurations.
"""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

import parcompiler as pc
from parcompiler.models import bert, dlrm, gpt, llama, moe, resnet, t5
from parcompiler.passes import DEFAULT, OrderPass

Case = tuple[nn.Module, dict[str, Any]]
VOCABULARY, ROWS, LENGTH = 96, 2, 12
# The passes of `compile` with a short search for an order: it takes a second, not a minute.
SHORT = tuple(OrderPass(effort=0.1) if item.name == "order" else item for item in DEFAULT)


def tokens(high: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(3, high, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


def own_gpt(*, tied: bool = False, dropout: float = 0.0, layers: int = 4) -> Case:
    config = gpt.Config(
        layers=layers,
        heads=2,
        hidden=16,
        vocabulary=VOCABULARY,
        sequence=LENGTH,
        tied=tied,
        dropout=dropout,
    )
    return gpt.GPT(config), {"tokens": tokens(), "labels": tokens()}


def own_llama() -> Case:
    config = llama.Config(
        layers=4, heads=4, kv_heads=2, hidden=16, vocabulary=VOCABULARY, sequence=LENGTH
    )
    return llama.Llama(config), {"tokens": tokens(), "labels": tokens()}


def own_bert() -> Case:
    config = bert.Config(layers=4, heads=2, hidden=16, vocabulary=VOCABULARY, sequence=LENGTH)
    return bert.BERT(config), {"tokens": tokens(), "labels": tokens()}


def own_t5() -> Case:
    config = t5.Config(layers=2, heads=2, hidden=16, vocabulary=VOCABULARY, sequence=LENGTH)
    inputs = {"tokens": tokens(), "decoder_tokens": tokens(), "labels": tokens()}
    return t5.T5(config), inputs


def own_resnet() -> Case:
    model = resnet.ResNet(resnet.PRESETS["tiny"])
    size, channels = model.config.image_size, model.config.in_channels
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(ROWS, channels, size, size, generator=generator)
    return model, {"images": images, "labels": torch.tensor([0, 1])}


def own_moe() -> Case:
    config = moe.Config(
        layers=4, heads=2, hidden=16, vocabulary=VOCABULARY, sequence=LENGTH, experts=4, ffn=32
    )
    return moe.MoE(config), {"tokens": tokens(), "labels": tokens()}


def own_dlrm() -> Case:
    config = dlrm.PRESETS["tiny"]
    generator = torch.Generator().manual_seed(1)
    columns = [torch.randint(size, (8,), generator=generator) for size in config.tables]
    numbers = torch.randn(8, config.numbers, generator=generator)
    labels = torch.randint(2, (8,), generator=generator).to(numbers.dtype)
    inputs = {"numbers": numbers, "categories": torch.stack(columns, 1), "labels": labels}
    return dlrm.DLRM(config), inputs


def of_transformers(name: str) -> Any:
    """A class of transformers, which ranks that train other models need not import."""
    return getattr(importlib.import_module("transformers"), name)


def language_model(name: str, **sizes: Any) -> Callable[[], Case]:
    """A language model of transformers: causal, masked, or encoder and decoder."""

    def make() -> Case:
        kind = of_transformers(name)
        config = kind.config_class(**sizes)
        inputs: dict[str, Any] = {"input_ids": tokens(), "labels": tokens()}
        if hasattr(config, "use_cache"):
            inputs["use_cache"] = False
        return kind(config), inputs

    return make


def image_model(name: str, **sizes: Any) -> Callable[[], Case]:
    """An image classifier of transformers."""

    def make() -> Case:
        kind = of_transformers(name)
        images = torch.randn(ROWS, 3, 32, 32, generator=torch.Generator().manual_seed(1))
        labels = torch.tensor([0, 1])
        return kind(kind.config_class(**sizes)), {"pixel_values": images, "labels": labels}

    return make


SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = {**SMALL, "num_key_value_heads": 2}
_SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}

OWN: dict[str, Callable[[], Case]] = {
    "gpt": own_gpt,
    "gpt-tied": lambda: own_gpt(tied=True),
    "gpt-dropout": lambda: own_gpt(dropout=0.1),
    "llama": own_llama,
    "bert": own_bert,
    "t5": own_t5,
    "resnet": own_resnet,
    "moe": own_moe,
    "dlrm": own_dlrm,
}
HUGGING_FACE: dict[str, Callable[[], Case]] = {
    "hf-gpt2": language_model(
        "GPT2LMHeadModel",
        n_layer=4,
        n_head=2,
        n_embd=16,
        vocab_size=VOCABULARY,
        n_positions=32,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "hf-llama": language_model("LlamaForCausalLM", **_GROUPED),
    "hf-qwen3": language_model("Qwen3ForCausalLM", head_dim=4, **_GROUPED),
    "hf-bert": language_model("BertForMaskedLM", **SMALL),
    "hf-albert": language_model("AlbertForMaskedLM", embedding_size=8, **SMALL),
    "hf-t5": language_model(
        "T5ForConditionalGeneration",
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        num_heads=2,
        d_ff=32,
        num_layers=2,
        decoder_start_token_id=0,
    ),
    "hf-bart": language_model("BartForConditionalGeneration", **_SEQ2SEQ),
    "hf-vit": image_model(
        "ViTForImageClassification",
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=32,
        patch_size=8,
    ),
    "hf-resnet": image_model(
        "ResNetForImageClassification",
        embedding_size=8,
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 2, 1],
        layer_type="basic",
    ),
    "hf-opt": language_model(
        "OPTForCausalLM",
        ffn_dim=32,
        word_embed_proj_dim=16,
        **{k: v for k, v in SMALL.items() if k != "intermediate_size"},
    ),
    "hf-mixtral": language_model("MixtralForCausalLM", num_local_experts=4, **_GROUPED),
}
ALL = OWN | HUGGING_FACE


def build(name: str) -> Case:
    """The model (in training mode, same weights every time) and one micro-batch."""
    torch.manual_seed(0)
    model, inputs = ALL[name]()
    return model.train(), inputs


def captured(name: str, precision: str | None = None) -> pc.Program:
    """A model compiled for one rank: a test that compiles it for another mesh captures nothing."""
    return _captured(name, precision)


@cache
def _captured(name: str, precision: str | None) -> pc.Program:
    model, inputs = build(name)
    return pc.compile(model, pc.Mesh(), inputs, microbatches=1, precision=precision)
