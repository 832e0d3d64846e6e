"""Published training runs with their whole configuration, and the programs that predict them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

import parcompiler as pc
from parcompiler.device import Device, Link, device
from parcompiler.models import bert, gpt, llama, resnet

ROOM = 10**15  # bytes of a device: whether a published run fits is not asked


@dataclass(frozen=True, slots=True)
class Run:
    """One published row: what ran, on which ranks, and the seconds of a step.

    `degrees` are tensor, pipeline and data; `batch` the rows of a micro-batch and how many of them.
    """

    source: str
    name: str
    kind: str
    sizes: dict[str, Any]
    degrees: tuple[int, int, int]
    batch: tuple[int, int]
    seconds: float
    device: str = "a100-80g"
    virtual: int = 1
    recompute: str = "none"
    precision: str = "fp16"
    fused: bool = True  # attention in one kernel
    zero: int = 0
    network: float | None = None  # bytes per s of a device, where it is not the catalogue's
    options: dict[str, Any] = field(default_factory=dict)


def _gpt(layers: int, hidden: int, heads: int, vocabulary: int, sequence: int) -> dict[str, Any]:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "vocabulary": vocabulary}
    return {**sizes, "sequence": sequence}


NARAYANAN = {"recompute": "full", "fused": False}
BLOOM = {**NARAYANAN, "zero": 1, "network": 6.25e9}
H100 = {"device": "h100", "precision": "bf16", "zero": 1}
WIDE = _gpt(72, 14336, 64, 250880, 2048)

RUNS = (
    Run("narayanan2021", "1.7B", "gpt", _gpt(24, 2304, 24, 51200, 2048), (1, 1, 32), (16, 1),
        3.528, **NARAYANAN),
    Run("narayanan2021", "18B", "gpt", _gpt(40, 6144, 48, 51200, 2048), (8, 1, 32), (8, 4),
        9.399, **NARAYANAN),
    Run("narayanan2021", "145B", "gpt", _gpt(80, 12288, 96, 51200, 2048), (8, 8, 24), (2, 48),
        24.817, virtual=2, **NARAYANAN),
    Run("korthikanti2022", "22B full", "gpt", _gpt(48, 6144, 64, 51200, 2048), (8, 1, 1), (4, 1),
        1.420, **NARAYANAN),
    Run("korthikanti2022", "22B selective", "gpt", _gpt(48, 6144, 64, 51200, 2048), (8, 1, 1),
        (4, 1), 1.100),
    Run("korthikanti2022", "530B selective", "gpt", _gpt(105, 20480, 128, 51200, 2048),
        (8, 35, 1), (1, 280), 37.830, virtual=3),
    Run("megatron_h100_2024", "7.1B", "gpt", _gpt(30, 4096, 32, 131072, 4096), (2, 1, 48), (2, 2),
        0.800, **H100),
    Run("megatron_h100_2024", "70B", "gpt", _gpt(84, 8192, 64, 131072, 4096), (8, 2, 48), (1, 8),
        2.177, **H100),
    Run("megatron_h100_2024", "314B", "gpt", _gpt(96, 16384, 128, 131072, 4096), (8, 8, 48),
        (1, 32), 8.399, **H100),
    Run("llama3_2024", "405B", "llama",
        {**_gpt(126, 16384, 128, 128256, 8192), "kv_heads": 8, "ffn": 53248}, (8, 16, 128),
        (1, 16), 6.494, virtual=8, device="h100", precision="bf16", zero=1),
    Run("bloom2022", "TP8 PP12", "gpt", WIDE, (8, 12, 4), (4, 128), 117.070, **BLOOM),
    Run("bloom2022", "TP4 PP12", "gpt", WIDE, (4, 12, 8), (2, 128), 110.480, **BLOOM),
    Run("bloom2022", "TP2 PP12", "gpt", WIDE, (2, 12, 16), (2, 64), 112.500, **BLOOM),
    Run("bloom2022", "TP1 PP48", "gpt", _gpt(96, 12288, 64, 250880, 2048), (1, 48, 8), (1, 256),
        142.170, **BLOOM),
    Run("deeplearningexamples", "BERT-large", "bert", {"sequence": 512, "dropout": 0.1},
        (1, 1, 8), (32, 128), 19.776),
    Run("deeplearningexamples", "ResNet-50", "resnet", {"sequence": 224}, (1, 1, 8), (256, 1),
        0.123),
)  # fmt: skip


def program(run: Run) -> pc.Program:
    """The plan of a published run: its mesh, schedule, even stages and recomputation."""
    tensor, pipeline, data = run.degrees
    mesh = pc.Mesh(pipeline=pipeline, tensor=tensor, data=data, device=_device(run))
    model, inputs = _model(run)
    with _attention(fused=run.fused):
        return pc.compile(
            model,
            mesh,
            inputs,
            microbatches=run.batch[1],
            schedule="interleaved" if run.virtual > 1 else "1f1b",
            virtual_stages=run.virtual,
            stages="even",
            vocabulary="whole",
            recompute=run.recompute,
            precision=run.precision,
            zero=run.zero if data > 1 else 0,
            progress=False,
            **run.options,
        )


def _device(run: Run) -> Device:
    """The device of a run, with room for any plan."""
    found = dataclasses.replace(device(run.device), memory=ROOM)
    if run.network is not None:
        found = dataclasses.replace(found, network=Link(run.network, found.network.latency))
    return found


def _model(run: Run) -> tuple[torch.nn.Module, tuple[Tensor, ...]]:
    """The model without data, and one micro-batch."""
    rows, sequence = run.batch[0], run.sizes["sequence"]
    with torch.device("meta"):
        if run.kind == "resnet":
            model = resnet.ResNet(resnet.PRESETS["resnet50"])
            return model, (torch.empty(rows, 3, sequence, sequence), torch.zeros(rows).long())
        tokens = torch.zeros(rows, sequence, dtype=torch.long)
        if run.kind == "bert":
            sizes = dataclasses.replace(bert.PRESETS["large"], **run.sizes)
            return bert.BERT(sizes), (tokens, tokens)
        if run.kind == "llama":
            return llama.Llama(llama.Config(**run.sizes)), (tokens, tokens)
        return gpt.GPT(gpt.Config(**run.sizes, tied=True)), (tokens, tokens)


@contextmanager
def _attention(*, fused: bool) -> Iterator[None]:
    """Attention as it was before FlashAttention, with the scores in memory, or as it is."""
    if fused:
        yield
        return
    with mock.patch.object(F, "scaled_dot_product_attention", _in_memory):
        yield


def _in_memory(q: Tensor, k: Tensor, v: Tensor, **_: object) -> Tensor:
    """Attention by products and a softmax; the mask is part of the softmax's kernel."""
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    return torch.softmax(scores, dim=-1) @ v
