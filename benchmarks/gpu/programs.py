"""One rank of the proofs: programs on the device in float64 beside the model's own gradients.

torchrun --nproc-per-node N -m benchmarks.gpu.rank DEVICE OUT, started by the line "proofs"
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import parcompiler as pc
from parcompiler.models import gpt

CONFIG = gpt.Config(layers=4, heads=4, hidden=32, vocabulary=64, sequence=16)
MICROBATCHES = 4


def programs(ranks: int) -> dict[str, dict[str, Any]]:
    """What is proved: several stages on one rank, and each axis with all ranks."""
    if ranks == 1:
        stages = {"schedule": "interleaved", "virtual_stages": 2, "vocabulary": "whole"}
        return {"two stages on one rank": {"mesh": {}, **stages}, "one stage": {"mesh": {}}}
    return {
        f"pipeline {ranks}": {"mesh": {"pipeline": ranks}, "schedule": "1f1b"},
        f"tensor {ranks}": {
            "mesh": {"tensor": ranks},
            "sharding": {"*.qkv.weight": "S(0)", "*.up.weight": "S(0)"},
        },
        f"data {ranks}": {"mesh": {"data": ranks}},
    }


def main() -> None:
    """Prove each program; the first rank writes its errors."""
    kind, out = sys.argv[1], Path(sys.argv[2])
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    found = {name: errors(kind, **options) for name, options in programs(ranks).items()}
    if rank == 0:
        out.write_text(json.dumps(found))


def words(mesh: dict[str, int]) -> dict[str, torch.Tensor]:
    """A batch: two rows for each micro-batch of each data rank."""
    rows = 2 * MICROBATCHES * mesh.get("data", 1)
    generator = torch.Generator().manual_seed(0)
    found = torch.randint(CONFIG.vocabulary, (rows, CONFIG.sequence + 1), generator=generator)
    return {"tokens": found[:, :-1], "labels": found[:, 1:]}


def compiled(kind: str, mesh: dict[str, int], **options: Any) -> pc.Program:
    """The program of a kind of device."""
    torch.manual_seed(0)
    return pc.compile(
        gpt.GPT(CONFIG).double(),
        pc.Mesh(**mesh, device="cpu" if kind == "cpu" else "h100"),
        {name: x[:2] for name, x in words(mesh).items()},
        microbatches=MICROBATCHES,
        precision="fp64",
        progress=False,
        **options,
    )


def errors(kind: str, mesh: dict[str, int], **options: Any) -> list[float]:
    """The largest relative errors of the loss, and of the gradients, on the first rank."""
    program, batch = compiled(kind, mesh, **options), words(mesh)
    with program.worker() as worker:
        share = 2 * MICROBATCHES
        own = slice(worker.data_rank * share, (worker.data_rank + 1) * share)
        loss = float(worker.step({name: x[own] for name, x in batch.items()}))
        gradients = worker.gather_gradients()
    if gradients is None:
        return []
    torch.manual_seed(0)
    wanted, theirs = _reference(gpt.GPT(CONFIG).double(), batch, torch.device(kind))
    found = [abs(loss / wanted - 1)]
    far = [
        float((gradients[name].to(kind) - g).abs().max() / g.abs().max().clamp_min(1e-30))
        for name, g in theirs.items()
    ]
    return [*found, max(far)]


def _reference(
    model: torch.nn.Module, batch: dict[str, torch.Tensor], device: torch.device
) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean loss of the model itself on the device, and its gradients."""
    model, total, rows = model.to(device), 0.0, len(batch["tokens"]) // 2
    for k in range(rows):
        part = {name: x[2 * k : 2 * k + 2].to(device) for name, x in batch.items()}
        loss = model(**part) / rows
        loss.backward()
        total += float(loss.detach())
    return total, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


if __name__ == "__main__":
    main()
