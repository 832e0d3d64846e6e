"""What is predicted: models, meshes and schedules whose steps are mostly products."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from parcompiler.models import bert, gpt, llama, moe, resnet, t5

MICROBATCHES = 4
LENGTH = 256
VOCABULARY = 4096


@dataclass(frozen=True)
class Case:
    """A model with its micro-batch, a mesh, and options of `compile`."""

    model: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, torch.Tensor]]
    mesh: Mapping[str, int]
    chosen: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """For `compile`."""
        return {"microbatches": MICROBATCHES, "recompute": "none"} | dict(self.chosen)

    def batch(self) -> dict[str, torch.Tensor]:
        """All micro-batches of a data rank."""
        parts = [self.inputs() for _ in range(MICROBATCHES)]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _words(*names: str, rows: int = 2, high: int = VOCABULARY) -> dict[str, torch.Tensor]:
    return {name: torch.randint(high, (rows, LENGTH)) for name in names}


def _text() -> dict[str, torch.Tensor]:
    return _words("tokens", "labels")


def _translation() -> dict[str, torch.Tensor]:
    return _words("tokens", "decoder_tokens", "labels")


def _pictures() -> dict[str, torch.Tensor]:
    return {"images": torch.randn(8, 3, 64, 64), "labels": torch.randint(10, (8,))}


def _gpt(vocabulary: int = VOCABULARY) -> nn.Module:
    return gpt.GPT(
        gpt.Config(layers=8, heads=8, hidden=512, vocabulary=vocabulary, sequence=LENGTH)
    )


def _llama() -> nn.Module:
    sizes = {"hidden": 512, "vocabulary": VOCABULARY, "sequence": LENGTH}
    return llama.Llama(llama.Config(layers=8, heads=8, kv_heads=4, **sizes))


def _bert() -> nn.Module:
    sizes = {"hidden": 512, "vocabulary": VOCABULARY, "sequence": LENGTH}
    return bert.BERT(bert.Config(layers=8, heads=8, **sizes))


def _t5() -> nn.Module:
    sizes = {"hidden": 512, "vocabulary": VOCABULARY, "sequence": LENGTH}
    return t5.T5(t5.Config(layers=4, heads=8, **sizes))


def _moe() -> nn.Module:
    sizes = {"hidden": 512, "vocabulary": VOCABULARY, "sequence": LENGTH, "ffn": 1024}
    return moe.MoE(moe.Config(layers=4, heads=8, experts=4, **sizes))


def _resnet() -> nn.Module:
    sizes = {"classes": 10, "image_size": 64}
    return resnet.ResNet(resnet.Config(depths=(3, 4, 6, 3), block="bottleneck", **sizes))


def _pipeline(model: Callable[[], nn.Module], inputs: Any, schedule: str, **options: Any) -> Case:
    chosen = {"schedule": schedule, "vocabulary": "whole", **options}
    return Case(model, inputs, {"pipeline": 2}, chosen)


SHARDING = {"*.attention.qkv.weight": "S(0)", "*.ffn.up.weight": "S(0)"}

CASES = {
    "gpt gpipe": _pipeline(_gpt, _text, "gpipe"),
    "gpt 1f1b": _pipeline(_gpt, _text, "1f1b"),
    "gpt zb-v": _pipeline(_gpt, _text, "zb-v"),
    "gpt vocabulary": _pipeline(lambda: _gpt(32768), _text, "1f1b", vocabulary="vocab-2"),
    "gpt data": Case(_gpt, _text, {"data": 2}),
    "gpt tensor": Case(_gpt, _text, {"tensor": 2}, {"sharding": SHARDING}),
    "llama interleaved": _pipeline(_llama, _text, "interleaved"),
    "llama data": Case(_llama, _text, {"data": 2}),
    "bert zb-h1": _pipeline(_bert, _text, "zb-h1"),
    "t5 1f1b": _pipeline(_t5, _translation, "1f1b"),
    "resnet 1f1b": _pipeline(_resnet, _pictures, "1f1b"),
    "moe v-half": _pipeline(_moe, _text, "v-half"),
}
