"""What the line "proofs" proves: every mechanism of the runtime once, in tiny models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import parcompiler as pc
from parcompiler.models import dlrm, gpt, llama, moe, resnet, t5

Options = dict[str, Any]
ROWS = 2
SIZES: Options = {"layers": 4, "heads": 4, "hidden": 32, "vocabulary": 64, "sequence": 16}
TENSOR = {"sharding": {"*.qkv.weight": "S(0)", "*.up.weight": "S(0)"}}


def programs(ranks: int, compiled: bool) -> Iterator[tuple[str, str, Options, bool]]:
    """Name, model, options (with degrees of the mesh) and whether layers are compiled."""
    stages = {"schedule": "interleaved", "virtual_stages": 2, "vocabulary": "whole"}
    yield "one stage", "gpt", {}, False
    yield "two stages on one rank", "gpt", stages, False
    for way in ("full", "selective", "offload"):
        yield f"recompute {way}", "dropout", {**stages, "recompute": way}, False
    for name in ("llama", "t5", "resnet", "dlrm", "moe", "ctc"):
        yield name, name, {}, False
    for precision in ("bf16", "fp16"):
        yield precision, "llama", {"precision": precision}, False
    if compiled:
        yield "compiled", "llama", {}, True
        yield "compiled, bf16", "gpt", {**stages, "precision": "bf16"}, True
    if ranks > 1:
        yield from _of_ranks(ranks, compiled)


def _of_ranks(ranks: int, compiled: bool) -> Iterator[tuple[str, str, Options, bool]]:
    """Those of several ranks."""
    stages: Options = {"pipeline": ranks}
    for schedule in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "pipedream"):
        yield f"pipeline {ranks}, {schedule}", "llama", {**stages, "schedule": schedule}, False
    for vocabulary in ("vocab-1", "vocab-2", "interlaced"):
        yield f"pipeline {ranks}, {vocabulary}", "gpt", {**stages, "vocabulary": vocabulary}, False
    yield f"pipeline {ranks}, dropout", "dropout", stages, False
    yield f"pipeline {ranks}, bf16", "llama", {**stages, "precision": "bf16"}, False
    yield f"pipeline {ranks}, t5", "t5", stages, False
    yield f"pipeline {ranks}, offload", "gpt", {**stages, "recompute": "offload"}, False
    yield f"tensor {ranks}", "gpt", {"tensor": ranks, **TENSOR}, False
    yield f"tensor {ranks}, dropout", "dropout", {"tensor": ranks, **TENSOR}, False
    if compiled:
        yield f"tensor {ranks}, compiled", "gpt", {"tensor": ranks, **TENSOR}, True
    yield f"context {ranks}", "llama", {"context": ranks}, False
    yield f"context {ranks}, bf16", "llama", {"context": ranks, "precision": "bf16"}, False
    yield f"expert {ranks}", "moe", {"expert": ranks, "data": ranks}, False
    for zero in range(4):
        yield f"data {ranks}, ZeRO {zero}", "gpt", {"data": ranks, "zero": zero}, False
    data: Options = {"data": ranks}
    yield f"data {ranks}, ZeRO 3, bf16", "gpt", {**data, "zero": 3, "precision": "bf16"}, False
    yield f"data {ranks}, resnet", "resnet", data, False
    yield f"data {ranks}, rows of tables", "sparse", {**data, "optimizer": "sgd"}, False
    for updates in ("parameter-server", "asynchronous", "local"):
        every = {"every": 2} if updates == "local" else {}
        yield f"data {ranks}, {updates}", "gpt", {**data, "updates": updates, **every}, False
    for compression in ("bf16", "powersgd"):
        yield f"data {ranks}, {compression}", "gpt", {**data, "compression": compression}, False
    if ranks % 2 == 0 and ranks > 2:
        half = ranks // 2
        mixed = {"pipeline": half, "tensor": 2, **TENSOR}
        yield f"pipeline {half}, tensor 2", "gpt", mixed, False
        mixed = {"pipeline": half, "data": 2, "zero": 2, "schedule": "zb-v"}
        yield f"pipeline {half}, data 2, ZeRO 2, zb-v", "gpt", mixed, False
        mixed = {"tensor": half, "data": 2, "zero": 3, **TENSOR}
        yield f"tensor {half}, data 2, ZeRO 3", "gpt", mixed, False


class Listener(nn.Module):
    """Scores of letters over time, and their CTC loss; a zero is no letter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, sound: Tensor, letters: Tensor) -> Tensor:
        scores = self.head(torch.tanh(self.layer(sound))).log_softmax(-1).transpose(0, 1)
        times = torch.full((sound.shape[0],), sound.shape[1])
        return F.ctc_loss(scores, letters, times, (letters > 0).sum(-1))


def program(name: str, options: Options, device: str) -> pc.Program:
    """The program of a model with some options, planned for a device."""
    degrees = {key: value for key, value in options.items() if hasattr(pc.Mesh(), key)}
    others = {key: value for key, value in options.items() if key not in degrees}
    torch.manual_seed(0)
    model, inputs = _model(name)
    if "precision" not in options:  # one comparison, the sharper one
        model = model.double()
        inputs = {k: x.double() if x.is_floating_point() else x for k, x in inputs.items()}
    mesh = pc.Mesh(**degrees, device=device)
    return pc.compile(model, mesh, inputs, microbatches=4, progress=False, **others)


def _model(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A tiny model and a micro-batch."""
    words = torch.randint(SIZES["vocabulary"], (ROWS, SIZES["sequence"]))
    text = {"tokens": words, "labels": words}
    if name == "llama":
        return llama.Llama(llama.Config(**SIZES, kv_heads=2)), text
    if name == "t5":
        return t5.T5(t5.Config(**SIZES | {"layers": 2})), {**text, "decoder_tokens": words}
    if name == "moe":
        return moe.MoE(moe.Config(**SIZES, experts=4, ffn=32)), text
    if name == "ctc":
        sound, letters = torch.randn(ROWS, 16, 8), torch.tensor([[1, 2, 2], [4, 3, 0]])
        return Listener(), {"sound": sound, "letters": letters}
    if name == "resnet":
        config = resnet.PRESETS["tiny"]
        size = config.image_size
        images = torch.randn(ROWS, config.in_channels, size, size)
        return resnet.ResNet(config), {"images": images, "labels": torch.tensor([0, 1])}
    if name in ("dlrm", "sparse"):
        tables = dlrm.PRESETS["tiny"].tables
        columns = [torch.randint(size, (8,)) for size in tables]
        model = dlrm.DLRM(dlrm.PRESETS["tiny"])
        for module in model.modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                module.sparse = name == "sparse"
        numbers = torch.randn(8, dlrm.PRESETS["tiny"].numbers)
        labels = torch.randint(2, (8,)).to(numbers.dtype)
        return model, {
            "numbers": numbers,
            "categories": torch.stack(columns, 1),
            "labels": labels,
        }
    return gpt.GPT(gpt.Config(**SIZES, dropout=0.1 if name == "dropout" else 0.0)), text
