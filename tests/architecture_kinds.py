"""How tiny Hugging Face models are built from their configurations, with one micro-batch each."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

from tests.zoo import LENGTH, ROWS, VOCABULARY, tokens

Loss = Callable[[Any], torch.Tensor]
Case = tuple[nn.Module, dict[str, Any], Loss | None]
Builder = Callable[[], Case]

SIZES: dict[str, Any] = {
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
GROUPED = {**SIZES, "num_key_value_heads": 2}
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 2,
}
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "num_heads": 2,
    "d_ff": 32,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "decoder_start_token_id": 0,
}
VIT: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 32,
    "patch_size": 8,
}
BACKBONE: dict[str, Any] = {
    "hidden_sizes": [8, 8, 8, 8],
    "depths": [1, 1, 1, 1],
    "num_attention_heads": [1, 2, 2, 2],
    "mlp_ratios": [2, 2, 2, 2],
    "sr_ratios": [4, 2, 1, 1],
}


def normal(*shape: int) -> torch.Tensor:
    """Random floats, a row per example of the micro-batch."""
    return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(1))


def integers(low: int, high: int, *shape: int) -> torch.Tensor:
    """Random integers, a row per example of the micro-batch."""
    return torch.randint(low, high, (ROWS, *shape), generator=torch.Generator().manual_seed(1))


def pair() -> torch.Tensor:
    """A class for each example."""
    return torch.tensor([0, 1])


def mask() -> torch.Tensor:
    """An attention mask that hides nothing."""
    return torch.ones(ROWS, LENGTH, dtype=torch.long)


def images(side: int = 32) -> torch.Tensor:
    """Random images."""
    return normal(3, side, side)


def model(
    name: str, inputs: Callable[[], dict[str, Any]], loss: Loss | None = None, **sizes: Any
) -> Builder:
    """A model of transformers with the inputs that a function makes."""

    def make() -> Case:
        kind = getattr(transformers, name)
        config = kind.config_class(**{k: v() if callable(v) else v for k, v in sizes.items()})
        return kind(config), inputs(), loss

    return make


def text(name: str, /, **sizes: Any) -> Builder:
    """A language model: causal, masked, or encoder and decoder."""

    def inputs() -> dict[str, Any]:
        found: dict[str, Any] = {"input_ids": tokens(), "labels": tokens()}
        kind = getattr(transformers, name)
        if "use_cache" in inspect.signature(kind.forward).parameters:
            found["use_cache"] = False
        return found

    return model(name, inputs, **sizes)


def image(name: str, /, side: int = 32, **sizes: Any) -> Builder:
    """An image classifier."""
    return model(name, lambda: {"pixel_values": images(side), "labels": pair()}, **sizes)


def segmenter(name: str, /, side: int = 32, **sizes: Any) -> Builder:
    """A model that names a class for each pixel."""

    def inputs() -> dict[str, Any]:
        return {"pixel_values": images(side), "labels": integers(0, 5, side, side)}

    return model(name, inputs, num_labels=5, **sizes)
