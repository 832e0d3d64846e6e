"""Mixed precision as one writes it in plain torch, in one process; programs must follow it.

Float32 masters; every step their 16-bit copies compute the logits, the loss is in float32, the
gradients of micro-batches are added up in float32, and the optimizer gets them unscaled and
clipped, or not at all when one is not finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

Tensors = dict[str, torch.Tensor]


@dataclass
class Run:
    """What came out of some steps."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scale: float = 1.0
    skipped: int = 0


def train(
    model: nn.Module,
    batches: list[Tensors],
    microbatches: int,
    dtype: torch.dtype | None,
    *,
    scale: float = 1.0,
    max_norm: float = float("inf"),
    lr: float = 1e-3,
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
) -> Run:
    """Train `model`, whose parameters are the masters; without a `dtype` all in its own."""
    masters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = kind(masters.values(), lr=lr)  # type: ignore[call-arg]
    found = Run(scale=scale)
    wide = {
        f"{path}.{leaf}"
        for path, module in model.named_modules()
        if isinstance(module, nn.BatchNorm2d)
        for leaf, _ in module.named_parameters()
    }
    for batch in batches:
        own = {
            n: p.detach().to(p.dtype if dtype is None or n in wide else dtype).requires_grad_()
            for n, p in masters.items()
        }
        losses = []
        sums: dict[str, torch.Tensor | float] = dict.fromkeys(masters, 0.0)
        for i in range(microbatches):
            part = {key: tensor.chunk(microbatches)[i] for key, tensor in batch.items()}
            loss = _loss(model, own, part, dtype)
            (loss * (found.scale / microbatches)).backward()
            losses.append(loss.item())
            for name, master in masters.items():
                gradient, own[name].grad = own[name].grad, None
                if gradient is not None:
                    sums[name] += gradient.to(master.dtype)
        found.losses.append(sum(losses) / microbatches)
        for name, master in masters.items():
            total = sums[name]
            master.grad = total / found.scale if isinstance(total, torch.Tensor) else None
        norm = torch.nn.utils.clip_grad_norm_(masters.values(), max_norm)
        found.norms.append(norm.item())
        if norm.isfinite():
            optimizer.step()
        else:
            found.scale, found.skipped = found.scale / 2, found.skipped + 1
    return found


def _loss(
    model: nn.Module, own: Tensors, part: Mapping[str, torch.Tensor], dtype: torch.dtype | None
) -> torch.Tensor:
    """The loss of one micro-batch: the model's own, or in 16 bits cross-entropy of its logits."""
    if dtype is None:
        whole: torch.Tensor = torch.func.functional_call(model, own, (), dict(part))
        return whole
    inputs = {
        key: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for key, tensor in part.items()
        if key != "labels"
    }
    tables = {n: b.to(dtype) for n, b in model.named_buffers() if n in ("cos", "sin")}  # of Llama
    logits = torch.func.functional_call(model, own | tables, (), inputs).float()
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), part["labels"].reshape(-1))
