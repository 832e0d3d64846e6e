"""Models large enough that small tensors do not matter, and quick on a CPU."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

import parcompiler as pc
from parcompiler.models import bert, gpt, llama, moe, resnet, t5

ROWS, LENGTH, WORDS, HIDDEN = 2, 64, 2048, 128
Case = tuple[nn.Module, dict[str, torch.Tensor]]


def _tokens(*names: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randint(WORDS, (ROWS, LENGTH), generator=generator) for name in names}


def _gpt(**options: Any) -> Case:
    config = gpt.Config(
        layers=6, heads=4, hidden=HIDDEN, vocabulary=WORDS, sequence=LENGTH, **options
    )
    return gpt.GPT(config), _tokens("tokens", "labels")


def _frozen() -> Case:
    """Without gradients of its tables and the first of its layers."""
    model, inputs = _gpt(tied=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("embedding" not in name and "layers.0." not in name)
    return model, inputs


def _bert() -> Case:
    config = bert.Config(layers=6, heads=4, hidden=HIDDEN, vocabulary=WORDS, sequence=LENGTH)
    return bert.BERT(config), _tokens("tokens", "labels")


def _moe() -> Case:
    config = moe.Config(
        layers=6, heads=4, hidden=HIDDEN, vocabulary=WORDS, sequence=LENGTH, experts=4, every=2
    )
    return moe.MoE(config), _tokens("tokens", "labels")


def _llama() -> Case:
    config = llama.Config(
        layers=6, heads=4, kv_heads=2, hidden=HIDDEN, vocabulary=WORDS, sequence=LENGTH
    )
    return llama.Llama(config), _tokens("tokens", "labels")


def _t5() -> Case:
    config = t5.Config(layers=3, heads=4, hidden=HIDDEN, vocabulary=WORDS, sequence=LENGTH)
    return t5.T5(config), _tokens("tokens", "decoder_tokens", "labels")


def _resnet() -> Case:
    config = resnet.Config(depths=(2, 2, 2), widths=(32, 64, 128), classes=100, image_size=64)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(4, 3, 64, 64, generator=generator)
    return resnet.ResNet(config), {"images": images, "labels": torch.arange(4)}


MODELS: Mapping[str, Callable[[], Case]] = {
    "gpt": lambda: _gpt(tied=False),
    "gpt-frozen": _frozen,
    "gpt-dropout": lambda: _gpt(tied=False, dropout=0.1),
    "gpt-tied": _gpt,
    "bert": _bert,
    "moe": _moe,
    "llama": _llama,
    "t5": _t5,
    "resnet": _resnet,
}


@cache
def captured(name: str, dtype: torch.dtype, precision: str | None = None) -> pc.Program:
    """A model in a dtype, on one rank; `precision` has masters."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    inputs = {key: t.to(dtype) if t.is_floating_point() else t for key, t in inputs.items()}
    options: Any = {"vocabulary": "whole", "precision": precision, "progress": False}
    return pc.compile(model.to(dtype), pc.Mesh(device="cpu"), inputs, **options)


def compiled(
    name: str, dtype: torch.dtype, *, pipeline: int, data: int = 1, **options: Any
) -> pc.Program:
    """The program of a model in a dtype; its vocabulary stays on stages."""
    options = {"vocabulary": "whole", "progress": False, **options}
    given = captured(name, dtype, options.get("precision"))
    return pc.compile(given, pc.Mesh(pipeline=pipeline, data=data, device="cpu"), **options)
