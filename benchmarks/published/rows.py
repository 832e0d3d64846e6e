"""Published training runs with their whole configuration, and the programs that predict them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

import parcompiler as pc
from parcompiler import prices
from parcompiler.cost import Operation, roofline
from parcompiler.cost.operation import EXCHANGE
from parcompiler.device import Device, Link, device
from parcompiler.instruction import BEHIND
from parcompiler.lower.lowered import Bucket, Lowered, TiedTensor
from parcompiler.models import bert, gpt, llama, resnet
from parcompiler.passes.shard.local import local
from parcompiler.prices import simulate_lowered
from parcompiler.timeline import Timeline, free

# Of 512: Wikipedia's sequences have 256 tokens in the mean (Krell et al. 2021, arXiv 2107.02027),
# and are padded to the next multiple of 64.
BINNED = 288
ROOM = 10**15  # bytes of a device: whether a published run fits is not asked


@dataclass(frozen=True, slots=True)
class Run:
    """One published row: what ran, on which ranks, and the seconds of a step.

    `degrees` are tensor, pipeline and data; `batch` the rows of a micro-batch and how many of them.
    With "selective" recomputation the core of attention, in memory, runs again in the backward.
    `overlaps` says what the source lets run beside compute: sums of "gradients" and gathers of
    "parameters" beside the next forward, as our runtime does, and collectives of "tensor" ranks
    beside the products next to them, which it does not in forwards. Steps `follow` each other
    without waiting for all ranks where the source validates norms behind the update. `wide` says
    that gradients are added up over ranks in float32, as our runtime does; others in 16 bits.
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
    schedule: str = "1f1b"
    overlaps: tuple[str, ...] = ()
    follow: bool = False
    wide: bool = False
    network: float | None = None  # bytes per s of a device, where it is not the catalogue's
    options: dict[str, Any] = field(default_factory=dict)


def _gpt(layers: int, hidden: int, heads: int, vocabulary: int, sequence: int) -> dict[str, Any]:
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "vocabulary": vocabulary}
    return {**sizes, "sequence": sequence}


MEGATRON: dict[str, Any] = {"dropout": 0.1}  # of attention and layers: Megatron-LM's defaults
NARAYANAN: dict[str, Any] = {"recompute": "full", "fused": False}
SELECTIVE: dict[str, Any] = {"recompute": "selective", "fused": False}
BLOOM: dict[str, Any] = {**NARAYANAN, "zero": 1, "network": 6.25e9}
H100: dict[str, Any] = {
    "device": "h100", "precision": "bf16", "zero": 1, "wide": True,
    "overlaps": ("gradients", "parameters", "tensor"),
}  # fmt: skip
NVIDIA: dict[str, Any] = {"overlaps": ("gradients",)}
QI_6B = _gpt(30, 4096, 32, 50304, 1024) | {"tied": False}
QI_28B = _gpt(62, 6144, 48, 50304, 1024) | {"tied": False}
WIDE = _gpt(72, 14336, 64, 250880, 2048)

RUNS = (
    Run("narayanan2021", "1.7B", "gpt", _gpt(24, 2304, 24, 51200, 2048) | MEGATRON, (1, 1, 32),
        (16, 1), 3.528, **NARAYANAN),
    Run("narayanan2021", "18B", "gpt", _gpt(40, 6144, 48, 51200, 2048) | MEGATRON, (8, 1, 32),
        (8, 4), 9.399, **NARAYANAN),
    Run("narayanan2021", "145B", "gpt", _gpt(80, 12288, 96, 51200, 2048) | MEGATRON, (8, 8, 24),
        (2, 48), 24.817, virtual=2, **NARAYANAN),
    Run("korthikanti2022", "22B full", "gpt", _gpt(48, 6144, 64, 51200, 2048) | MEGATRON,
        (8, 1, 1), (4, 1), 1.420, **NARAYANAN),
    Run("korthikanti2022", "22B selective", "gpt", _gpt(48, 6144, 64, 51200, 2048) | MEGATRON,
        (8, 1, 1), (4, 1), 1.100, **SELECTIVE),
    Run("korthikanti2022", "530B selective", "gpt", _gpt(105, 20480, 128, 51200, 2048) | MEGATRON,
        (8, 35, 1), (1, 280), 37.830, virtual=3, **SELECTIVE),
    Run("megatron_h100_2024", "7.1B", "gpt", _gpt(30, 4096, 32, 131072, 4096), (2, 1, 48), (2, 2),
        0.800, **H100),
    Run("megatron_h100_2024", "70B", "gpt", _gpt(84, 8192, 64, 131072, 4096), (8, 2, 48), (1, 8),
        2.177, virtual=2, **H100),
    Run("megatron_h100_2024", "314B", "gpt", _gpt(96, 16384, 128, 131072, 4096), (8, 8, 48),
        (1, 32), 8.399, virtual=2, **H100),
    Run("llama3_2024", "405B", "llama",
        {**_gpt(126, 16384, 128, 128256, 8192), "kv_heads": 8, "ffn": 53248}, (8, 16, 128),
        (1, 16), 6.494, virtual=8, **{**H100, "overlaps": ("gradients", "parameters")}),
    Run("bloom2022", "TP8 PP12", "gpt", WIDE, (8, 12, 4), (4, 128), 117.070, **BLOOM),
    Run("bloom2022", "TP4 PP12", "gpt", WIDE, (4, 12, 8), (2, 128), 110.480, **BLOOM),
    Run("bloom2022", "TP2 PP12", "gpt", WIDE, (2, 12, 16), (2, 64), 112.500, **BLOOM),
    Run("bloom2022", "TP1 PP48", "gpt", _gpt(96, 12288, 64, 250880, 2048), (1, 48, 8), (1, 256),
        142.170, **BLOOM),
    Run("qi2023", "6.2B 1F1B", "gpt", QI_6B, (1, 8, 1), (3, 24),
        24 * 3 / 8 / 3.50),
    Run("qi2023", "6.2B ZB-1p", "gpt", QI_6B, (1, 8, 1), (3, 24),
        24 * 3 / 8 / 3.88, schedule="zb-h1", follow=True),
    Run("qi2023", "6.2B ZB-2p", "gpt", QI_6B, (1, 8, 1), (3, 24),
        24 * 3 / 8 / 4.32, schedule="zb-h2", follow=True),
    Run("qi2023", "28.3B 1F1B", "gpt", QI_28B, (1, 32, 1), (1, 96),
        96 / 32 / 0.76),
    Run("qi2023", "28.3B ZB-1p", "gpt", QI_28B, (1, 32, 1), (1, 96),
        96 / 32 / 0.87, schedule="zb-h1", follow=True),
    Run("qi2023", "28.3B ZB-2p", "gpt", QI_28B, (1, 32, 1), (1, 96),
        96 / 32 / 0.99, schedule="zb-h2", follow=True),
    Run("qi2023", "28.3B ZB-V", "gpt", QI_28B, (1, 32, 1), (2, 96),
        96 * 2 / 32 / 1.01, schedule="zb-v", follow=True),
    Run("deeplearningexamples", "BERT-large 128", "bert",
        {"sequence": 128, "dropout": 0.1, "masked": 20}, (1, 1, 8), (256, 32), 65536 / 4591,
        fused=False, **NVIDIA),
    Run("deeplearningexamples", "BERT-large 512", "bert",
        {"sequence": BINNED, "dropout": 0.1, "masked": BINNED * 15 // 100}, (1, 1, 8), (32, 128),
        19.776, fused=False, **NVIDIA),
    Run("deeplearningexamples", "ResNet-50, one", "resnet", {"sequence": 224}, (1, 1, 1), (256, 1),
        256 / 2470),
    Run("deeplearningexamples", "ResNet-50", "resnet", {"sequence": 224}, (1, 1, 8), (256, 1),
        0.123, **NVIDIA),
)  # fmt: skip


class MaskedBERT(bert.BERT):
    """BERT whose head predicts masked positions alone, as the authors' does."""

    def forward(self, tokens: Tensor, labels: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        """`positions` are among those of all rows, `labels` are theirs."""
        x = self.embeddings(tokens, torch.zeros_like(tokens))
        for layer in self.layers:
            x = layer(x, None)
        x = x.flatten(0, 1)[positions]
        return F.cross_entropy(self.head(self.norm(F.gelu(self.dense(x)))), labels)


def as_published(run: Run, made: pc.Program) -> Timeline:
    """The step of a program with what the source overlaps in the place of what our runtime does."""
    problem, plan, lowered = local(made.problem, made.plan), made.plan, made.lowered
    seconds = prices.collective_seconds(made.problem, lowered)
    costs = list(prices.stage_costs(problem, plan, lowered))
    if "parameters" not in run.overlaps:  # all are waited for
        behind = [[line for line in own if line.kind in BEHIND] for own in lowered.instructions]
        waits = [sum(map(seconds, lines)) for lines in behind]
        ranks = [stage.rank for stage in lowered.stages]
        costs = [replace(c, ready=waits[r]) for c, r in zip(costs, ranks, strict=True)]
    priced = problem.under(plan)
    traced = {block.name: c for block, c in zip(priced.cut.blocks, priced.costs, strict=True)}
    for j, stage in enumerate(lowered.stages):
        more = [0.0, 0.0]
        for call in stage.calls:
            cost = traced[call.block.name]
            if "tensor" in run.overlaps:  # all but the first of as many pieces as ranks
                for side, operations in enumerate((cost.forward, cost.backward)):
                    own = [one for one in operations if one.kind == EXCHANGE]
                    hidden = roofline.seconds(own, problem.device) * (1 - 1 / run.degrees[0])
                    more[side] -= hidden
            if run.recompute == "selective":
                more[1] += roofline.seconds(_core(run, cost.forward), problem.device)
        costs[j] = replace(
            costs[j], forward=costs[j].forward + more[0], backward=costs[j].backward + more[1]
        )
    left = prices.left_seconds(problem, plan, lowered) if "gradients" in run.overlaps else free
    with mock.patch.object(prices, "sent_bytes", prices.sent_bytes if run.wide else _narrow):
        return simulate_lowered(
            lowered, costs, prices.message_seconds(made.problem, lowered),
            collective_seconds=seconds, left_seconds=left,
        )  # fmt: skip


def _narrow(lowered: Lowered, item: TiedTensor | Bucket) -> int:
    """Bytes of a sum of gradients in the dtype of their parameters."""
    return sum(lowered.graph.by_name[name].nbytes for name in item.names)


def _core(run: Run, operations: Sequence[Operation]) -> list[Operation]:
    """The operators of attention that read or write all scores, of 2 bytes; no linear layers."""
    heads = run.sizes["heads"] // run.degrees[0]
    scores = 2 * run.batch[0] * heads * run.sizes["sequence"] ** 2
    others = "aten.mm.default", "aten.addmm.default"
    return [
        one for one in operations
        if one.kind != EXCHANGE and one.nbytes >= scores and one.name not in others
    ]  # fmt: skip


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
            schedule="interleaved" if run.virtual > 1 else run.schedule,
            virtual_stages=run.virtual,
            stages="even",
            vocabulary="whole",
            recompute="none" if run.recompute == "selective" else run.recompute,
            precision=run.precision,
            zero=run.zero if data > 1 else 0,
            progress=False,
            **run.options,
        )


def _device(run: Run) -> Device:
    """The device of a run, with room for any plan."""
    found = replace(device(run.device), memory=ROOM)
    if run.network is not None:
        found = replace(found, network=Link(run.network, found.network.latency))
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
            sizes = {name: size for name, size in run.sizes.items() if name != "masked"}
            positions = torch.zeros(rows * run.sizes["masked"], dtype=torch.long)
            large = replace(bert.PRESETS["large"], **sizes)
            return MaskedBERT(large), (tokens, positions, positions)
        if run.kind == "llama":
            return llama.Llama(llama.Config(**run.sizes)), (tokens, tokens)
        return gpt.GPT(gpt.Config(**{"tied": True, **run.sizes})), (tokens, tokens)


@contextmanager
def _attention(*, fused: bool) -> Iterator[None]:
    """Attention as it was before FlashAttention, with the scores in memory, or as it is."""
    if fused:
        yield
        return
    with mock.patch.object(F, "scaled_dot_product_attention", _in_memory):
        yield


def _in_memory(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, **_: object) -> Tensor:
    """Attention by products and a softmax; scale and mask are part of the softmax's kernel."""
    scores = torch.softmax(q @ k.transpose(-2, -1), dim=-1)
    return F.dropout(scores, dropout_p) @ v if dropout_p else scores @ v
